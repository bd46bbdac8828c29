package agent

import (
	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/record"
)

// learn takes in the tables of the process: new communicators, and those whose
// slot has gone to another one.
func (a *Agent) learn(r *rank) {
	for _, c := range r.comms {
		if c != nil {
			c.seen = false
		}
	}
	for i := range r.p.Comms {
		s := &r.p.Comms[i]
		for int(s.Index) >= len(r.comms) {
			r.comms = append(r.comms, nil)
		}
		c := r.comms[s.Index]
		if c != nil && c.gen != s.Gen {
			a.forget(r, c)
			c = nil
		}
		if c == nil {
			c = &comm{gen: s.Gen, since: s.Since, id: s.ID, name: s.Name, rank: s.Rank, size: s.Size, device: s.Device, peer: -1, stamped: s.Stamps+s.Copies > 0}
			r.comms[s.Index] = c
		}
		c.finished, c.seen = s.Finished, true
	}
	for i, c := range r.comms {
		if c != nil && !c.seen {
			a.forget(r, c)
			r.comms[i] = nil
		}
	}
	for i := range r.p.Conns {
		r.learnConn(&r.p.Conns[i])
	}
}

// forget lets go of a communicator; what it counted stays in its job's totals.
func (a *Agent) forget(r *rank, c *comm) {
	a.ops -= len(c.ops)
	r.job.unknown += c.evicted
	if c.host != nil {
		a.ops -= len(c.host.ops)
		r.job.unknown += c.host.evicted
	}
	r.job.addFinished(c.name, c.finished)
}

// learnConn takes in one connection.
func (r *rank) learnConn(s *record.ConnStatus) {
	k := r.conn(s.Index)
	if k.gen != s.Gen {
		r.job.addGone(k)
		*k = conn{gen: s.Gen}
	}
	if s.Transport.Stamped() {
		r.learnNVLink(s)
	}
	k.transport, k.total, k.switches, k.resent = s.Transport, s.Windows, s.Switches, s.Resent
	qp := uint64(0)
	if s.Transport.QueuePair() { // another one's is a socket's
		qp = s.ID
	}
	if w := k.who; w == nil || w.QP != qp || w.PeerQP != s.PeerID || w.Name != s.Name || w.Channel != s.Channel {
		k.who = &collector.Conn{
			Transport: s.Transport, Channel: s.Channel, QP: qp, PeerQP: s.PeerID, Name: s.Name,
			Address: record.AddressText(s.Address), Rail: s.Rail,
		}
		k.who.NIC, k.who.Port = s.NIC()
	}
}

func (r *rank) mark(rec *record.Record) {
	code := record.MarkCode(rec.Code)
	if code == record.MarkNone || int(code) >= len(r.marks) {
		return
	}
	if code == record.MarkStep && rec.Value > r.step {
		r.step = rec.Value
		r.job.step = max(r.job.step, r.step)
	}
	if rec.Flags&record.FlagBegin != 0 {
		r.marks[code] = rec.Mono
	} else {
		r.marks[code] = 0
	}
}

// openMark is the pause that the program announced last and has not ended.
func (r *rank) openMark() (code record.MarkCode, at int64) {
	for _, c := range []record.MarkCode{record.MarkCheckpoint, record.MarkEvaluation, record.MarkCompile} {
		if r.marks[c] > at {
			code, at = c, r.marks[c]
		}
	}
	// Loading data is no pause, and does not hide one.
	if load := r.marks[record.MarkDataLoading]; code == record.MarkNone && load > 0 {
		return record.MarkDataLoading, load
	}
	return code, at
}

func (r *rank) window(c *comm, rec *record.Record) {
	if int(rec.Conn) >= r.p.ConnSlots {
		r.job.unknown++
		return
	}
	cause := record.Cause(rec.Code)
	if !cause.Known() { // a newer version's
		r.job.unknown++
		return
	}
	if cause != record.CauseNone {
		r.conn(rec.Conn).counts[cause]++
	} else if rec.Flags&record.FlagAnomaly == 0 {
		return
	}
	c.touched[c.ntouched%maxTouched] = collector.Window{
		Peer: rec.Peer, Conn: r.conn(rec.Conn).who, Bytes: rec.Bytes, WRs: rec.WRs, Backlog: rec.Back,
		First: rec.First, Last: rec.Last, Cause: cause,
	}
	c.ntouched++
}

// conn returns a connection, whose index must be in the table.
func (r *rank) conn(i uint32) *conn {
	for int(i) >= len(r.conns) {
		r.conns = append(r.conns, conn{})
	}
	return &r.conns[i]
}
