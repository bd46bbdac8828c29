package transport

import (
	"github.com/lockstep-ccl/lockstep/record"
)

// stampFrom is the smallest post that is worth a time stamp of its own; smaller
// ones are told by Flush, or when the rank has time.
const stampFrom = 4 << 10

// meter tells the recorder of one connection. Bytes are positions of its
// streams: padding between aligned messages counts, and a line counts as 64.
type meter struct {
	conn                        *record.Conn // nil: recorder off
	posted, completed, received uint64       // as last told
	wanted                      int64
}

func (t *meter) open(m *mesh, peer int, kind record.Transport, id uint64, name string) {
	t.conn, _ = m.cfg.Recorder.AddConn(record.ConnEntry{Comm: m.cfg.Comm.Index(), Peer: int32(peer), Transport: kind, ID: id, Name: name})
}

func (t *meter) post(n int, total uint64) {
	if n >= stampFrom && t.conn != nil {
		t.posted = total
		t.conn.Posted(total, record.Now())
	}
}

func (t *meter) complete(total uint64) {
	if t.conn != nil {
		t.completed = total
		t.conn.Completed(total, record.Now())
	}
}

func (t *meter) receive(n int) {}

func (t *meter) block() {
	if t.conn != nil {
		t.conn.TxBlocked(record.Now())
	}
}

func (t *meter) unblock() { t.conn.TxBlocked(0) }

func (t *meter) want(since int64) {
	if since != t.wanted {
		t.wanted = since
		t.conn.RxWaiting(since)
	}
}

func (t *meter) flush(now int64, posted, completed, received uint64) {
	if posted != t.posted {
		t.posted = posted
		t.conn.Posted(posted, now)
	}
	if completed = min(completed, posted); completed != t.completed {
		t.completed = completed
		t.conn.Completed(completed, now)
	}
	if received != t.received {
		t.received = received
		t.conn.Received(received, now)
	}
}

func (t *meter) outstanding() uint64 { return t.posted - t.completed }
