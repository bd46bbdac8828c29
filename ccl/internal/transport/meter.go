package transport

import (
	"time"

	"github.com/lockstep-ccl/lockstep/record"
	"github.com/lockstep-ccl/lockstep/windowmon"
)

// stampFrom is the smallest post to shared memory or TCP that is worth a time stamp and
// the monitor's attention. Smaller ones, lines among them, count in the live words, and are
// part of the next larger one's work request. When the last of them completed
// is only known to the accuracy with which anyone looks, so they cannot tell a
// slow network from a fast one anyway. (A NIC tells of small ones, too: postPaced.)
const stampFrom = 4 << 10

// paceNs is how much of a connection's traffic has one time stamp where a NIC tells of each
// completion: what it carries in that time joins. So stamps cost the same however small messages
// are, 50,000 a second at most; a connection slow enough for each message to take as long has
// each one stamped. Windows take some of these times at least, so what is slow is seen as soon.
//
// memPaceNs is that of shared memory, where a stamp costs more of what there is: both ends are CPUs,
// and nothing is in between that could be slow for some microseconds but the other end's.
const (
	paceNs    = 20e3
	memPaceNs = 100e3
)

// paceWaits is how often a rank may poll between two posts that join: about memPaceNs. One that computes in
// between polls less, but has seen before that what it posted was consumed: then there is nothing to join.
const paceWaits = 1024

// maxPace bounds that, in bytes: what a NIC of 800 Gbit/s carries in that time.
const maxPace = 2 << 20

// idleRefresh is how often a sleeping rank looks what has become of bytes that
// are outstanding: nobody wakes it for a completion that it does not wait for.
// It stays below windowmon's Gap, which is a progress thread that did not run.
const idleRefresh = 5 * time.Millisecond

// meter watches one connection and tells the recorder. Counts are totals: of
// the stream's positions (so padding between aligned messages counts) and 64
// for each line. Nothing here locks, allocates or makes a system call; the
// clock is read once for what the connection carries in some microseconds.
type meter struct {
	on   bool
	mem  bool // no network is in between
	rec  *record.Writer
	conn *record.Conn
	comm uint16
	peer int32
	mon  windowmon.Monitor

	burstEnd   uint64 // up to where posts join the last one
	burstUntil uint64 // and up to how many waits
	pace       uint64 // bytes that join a stamped post, by the last window's speed

	posted, completed, received uint64 // as last told to conn
	monPosted, monCompleted     uint64 // as last told to mon
	windows, events             uint64 // of mon, as last told to conn
	wanted                      int64
	blocked                     bool
}

// open begins a connection's entry; e lacks the communicator only.
func (t *meter) open(m *Mesh, e record.ConnEntry) {
	e.Comm = m.cfg.Comm.Index()
	conn, ok := m.cfg.Recorder.AddConn(e)
	if !ok {
		return
	}
	t.on, t.rec, t.conn, t.comm, t.peer = true, m.cfg.Recorder, conn, e.Comm, e.Peer
	t.mem = e.Transport.InMemory()
	t.mon.Init(windowmon.Config{Rare: e.Transport.QueuePair()})
	t.link(record.LinkUp)
}

// post tells of n bytes more, total in all.
func (t *meter) post(n int, total uint64) {
	if n >= stampFrom && t.on {
		now := record.Now()
		tell := t.mon.Post(now, int(total-t.monPosted))
		t.monPosted, t.posted = total, total
		t.conn.Posted(total, now)
		t.window(now, tell)
	}
}

// postPaced is post where it must cost next to nothing: what this connection carries in some microseconds joins
// one work request. Of a NIC, which tells of each completion, n may be small; of memory those below stampFrom
// are part of the next larger one. waits is how often this rank has polled, or more; 0 of a NIC.
func (t *meter) postPaced(n int, total, waits uint64) {
	if n == 0 || !t.on || t.mem && n < stampFrom {
		return
	}
	soon := waits <= t.burstUntil
	t.burstUntil = waits + paceWaits
	if soon && total <= t.burstEnd && t.mon.Join(int(total-t.monPosted)) {
		t.monPosted = total
		return
	}
	t.burstEnd = total + t.pace
	now := record.Now()
	tell := t.mon.Post(now, int(total-t.monPosted))
	t.monPosted, t.posted = total, total
	t.conn.Posted(total, now)
	t.window(now, tell)
}

// complete tells that the receiver has consumed total bytes.
func (t *meter) complete(total uint64) {
	if t.on && min(total, t.monPosted) > t.monCompleted {
		t.completeAt(record.Now(), total)
	}
}

// completeNext is complete where it must cost next to nothing: what is consumed of
// a burst is told when all of it is, or when this rank waits.
func (t *meter) completeNext(total uint64) {
	if c := min(total, t.monPosted); c > t.monCompleted && t.mon.Ripe(c-t.monCompleted) {
		t.completeAt(record.Now(), total)
	}
}

func (t *meter) completeAt(now int64, total uint64) {
	if c := min(total, t.monPosted); c > t.monCompleted {
		tell := t.mon.Complete(now, int(c-t.monCompleted))
		t.monCompleted = c
		t.window(now, tell)
	}
	t.completed = total
	t.conn.Completed(total, now)
}

// due reports whether a completion is worth looking for.
func (t *meter) due() bool { return t.monCompleted < t.monPosted }

// window publishes a window that has closed; it appends a record of it only
// when the monitor has something to tell.
func (t *meter) window(now int64, tell bool) {
	if e := t.mon.Events(); e != t.events {
		t.events = e
		w := t.mon.Event()
		t.history(&w, true)
	}
	if t.mon.Windows() == t.windows {
		return
	}
	s := t.mon.Stats()
	t.windows = s.Windows
	w := t.mon.Last()
	speed := w.Bandwidth()
	pace := paceNs
	if t.mem {
		pace = memPaceNs
	}
	t.pace = uint64(min(speed*(pace/1e9), maxPace))
	t.conn.Window(uint64(speed), t.cause(w.State), now)
	if w.WRs > 0 { // a window in which nothing completed has no latency to tell
		t.conn.Latency(w.Latency)
	}
	t.conn.Slow(s.Anomalies)
	t.conn.Windows(s.Windows)
	t.history(&w, false)
	if !tell {
		return
	}
	r := record.Record{
		Mono: now, Kind: record.KindWindow, Comm: t.comm, Conn: t.conn.Index(), Peer: t.peer, Code: uint8(t.cause(w.Cause)),
		Bytes: w.Bytes, WRs: w.WRs, Back: w.Backlog, First: w.First, Last: w.Last,
	}
	if w.Anomaly {
		r.Flags = record.FlagAnomaly
	}
	t.rec.Append(&r)
}

// history adds a window to the connection's.
func (t *meter) history(w *windowmon.Window, overlaps bool) {
	t.conn.Log(&record.Window{
		First: w.First, Last: w.Last, Bytes: w.Bytes, WRs: w.WRs, Backlog: w.Backlog, Latency: w.Latency,
		Cause: t.cause(w.Cause), State: t.cause(w.State), Anomaly: w.Anomaly, Overlaps: overlaps,
	})
}

// cause is why a window was slow. What lies in memory for long is not taken by its receiver, whatever the sender sees.
func (t *meter) cause(c windowmon.Cause) record.Cause {
	if t.mem && c == windowmon.Network {
		return record.CauseReceiverNotReady
	}
	return record.Cause(c)
}

// block tells that the receiver holds all that was sent and gives no credit.
func (t *meter) block() {
	if t.on && !t.blocked {
		t.blocked = true
		now := record.Now()
		t.mon.Blocked(now)
		t.conn.TxBlocked(now)
	}
}

func (t *meter) unblock() {
	if t.blocked {
		t.blocked = false
		t.mon.Unblocked(record.Now())
		t.conn.TxBlocked(0)
	}
}

func (t *meter) want(since int64) {
	if since != t.wanted {
		t.wanted = since
		t.conn.RxWaiting(since)
	}
}

// abandon tells that what is outstanding never completes here, and that the
// next post has nothing to do with those before.
func (t *meter) abandon(now int64) {
	if !t.on {
		return
	}
	t.unblock()
	t.mon.Drop()
	t.burstEnd, t.burstUntil = 0, 0
	t.posted, t.monPosted, t.monCompleted = t.completed, t.completed, t.completed
	t.conn.Posted(t.completed, now)
}

// flush tells the totals as far as this rank knows them without asking.
func (t *meter) flush(now int64, posted, completed, received uint64) {
	if !t.on {
		return
	}
	if posted != t.posted {
		t.posted = posted
		t.conn.Posted(posted, now)
	}
	if completed > t.completed {
		t.completeAt(now, completed)
	}
	if received != t.received {
		t.received = received
		t.conn.Received(received, now)
	}
}

// idle is flush for a rank that waits: it also closes windows that are due.
func (t *meter) idle(now int64, posted, completed, received uint64) {
	if t.on {
		t.flush(now, posted, completed, received)
		t.window(now, t.mon.Progress(now))
		t.overdue(now)
	}
}

// overdue has the history tell of a network that is slow by now, though nothing has completed
// on it yet: somebody has looked since now.
func (t *meter) overdue(now int64) {
	if !t.on || !t.due() {
		return
	}
	if t.mon.Overdue(now); t.mon.Events() != t.events {
		t.window(now, false)
	}
}

// link tells the connection's state: that it is up, broke, or took over from another path.
func (t *meter) link(state record.LinkState) {
	if t.on {
		t.conn.Link(state, record.Now())
		t.tell(state)
	}
}

// rtt tells the link's round-trip time, ns; 0 when it is not known any more.
func (t *meter) rtt(ns int64) {
	if t.on {
		t.conn.RTT(ns)
	}
}

// tell appends a link record.
func (t *meter) tell(state record.LinkState) {
	t.rec.Append(&record.Record{Mono: record.Now(), Kind: record.KindLink, Comm: t.comm, Conn: t.conn.Index(), Peer: t.peer, Code: uint8(state)})
}
