package diagnosistest

import (
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// node is a host and its agent.
type node struct {
	id       int
	skew     int64 // error of its clock as the master maps it
	lost     bool
	lastSeen int64
}

// lostAfter is the simulated master's patience with a silent agent.
const lostAfter = int64(3 * time.Second)

func (j *Job) reportFrom(n *node, at int64) {
	j.at(at, nil, func() {
		if !n.lost {
			j.report(n)
		}
		j.reportFrom(n, j.now+int64(j.cfg.ReportEvery)*9/10+j.rng.Int64N(int64(j.cfg.ReportEvery)/5))
	})
}

// report copies what an agent sees into the master's evidence.
func (j *Job) report(n *node) {
	n.lastSeen = j.now
	stamp := func(t int64) int64 {
		if t == 0 {
			return 0
		}
		return Start + t + n.skew
	}
	for _, r := range j.ranks {
		if r.node != n.id {
			continue
		}
		e := &j.ev.Ranks[r.id]
		if e.Proc != r.proc {
			e.Proc, e.ProcAt = r.proc, stamp(j.now)
		}
		e.Node, e.PID, e.IO = int32(n.id), int32(4000+r.id), r.io && !r.frozen
		e.Mark, e.MarkAt = r.mark, stamp(r.markAt)
		if !j.cfg.NoSteps {
			e.Step = uint64(r.step)
		}
		e.CPU = j.cpu(r)
	}
	for _, c := range j.comms {
		x := j.evComm(c)
		if x == nil {
			continue
		}
		for i, w := range c.ranks {
			if j.ranks[w].node != n.id {
				continue
			}
			m := c.members[i]
			m.EnqueuedAt, m.StartedAt, m.FinishedAt = stamp(m.EnqueuedAt), stamp(m.StartedAt), stamp(m.FinishedAt)
			x.Members[i] = m
		}
		if j.cfg.NoConns {
			continue
		}
		for _, k := range c.conns {
			if src := j.ranks[c.ranks[k.src]].node == n.id; src || j.ranks[c.ranks[k.dst]].node == n.id {
				j.reportConn(k, src, j.ranks[c.ranks[k.dst]].node == n.id, stamp)
			}
		}
	}
}

// cpu is the share of a core used over the last second.
func (j *Job) cpu(r *rank) float32 {
	stuck := float32(0)
	if r.stuck != 0 {
		stuck = min(1, float32(j.now-r.stuckAt)/1e9)
	}
	switch {
	case r.done:
		return 0
	case r.stuck == Spin:
		return 0.97
	case r.stuck != 0:
		return 0.9*(1-stuck) + 0.01
	case r.sleeping || j.cfg.OnGPU:
		return 0.03
	}
	return 0.6 + 0.4*j.rng.Float32()
}

// evComm finds a communicator in the evidence, or adds it; nil once all its
// members have left.
func (j *Job) evComm(c *comm) *diagnosis.Comm {
	over := true
	for i := range c.members {
		over = over && c.members[i].State == record.CommLeft
	}
	at := slices.IndexFunc(j.ev.Comms, func(x diagnosis.Comm) bool { return x.ID == c.id })
	if over {
		if at >= 0 {
			j.ev.Comms = slices.Delete(j.ev.Comms, at, at+1)
			j.ev.Conns = slices.DeleteFunc(j.ev.Conns, func(k diagnosis.Conn) bool { return k.Comm == int32(at) })
			for i := range j.ev.Conns {
				if j.ev.Conns[i].Comm > int32(at) {
					j.ev.Conns[i].Comm--
				}
			}
			j.ev.Arrivals = nil
		}
		return nil
	}
	if at < 0 {
		x := diagnosis.Comm{ID: c.id, Name: c.name, Members: make([]diagnosis.Member, len(c.members))}
		for i := range x.Members {
			x.Members[i] = diagnosis.Member{World: -1, Peer: -1}
		}
		j.ev.Comms = append(j.ev.Comms, x)
		at = len(j.ev.Comms) - 1
	}
	return &j.ev.Comms[at]
}

// reportConn merges one end's or both ends' view of a connection.
func (j *Job) reportConn(k *conn, src, dst bool, stamp func(int64) int64) {
	comm := int32(slices.IndexFunc(j.ev.Comms, func(x diagnosis.Comm) bool { return x.ID == k.comm.id }))
	at := slices.IndexFunc(j.ev.Conns, func(x diagnosis.Conn) bool {
		return x.Comm == comm && x.Src == int32(k.src) && x.Dst == int32(k.dst)
	})
	if at < 0 {
		j.ev.Conns = append(j.ev.Conns, k.c)
		at = len(j.ev.Conns) - 1
	}
	e, truth := &j.ev.Conns[at], k.c
	posted, blocked, waiting := j.flow(k)
	e.Comm = comm
	if src {
		e.Outstanding, e.TxBlockedSince = posted, stamp(blocked)
		e.LastPost, e.LastCompletion = stamp(truth.LastPost), stamp(truth.LastCompletion)
		e.Windows, e.SlowWindows, e.BytesPerSec, e.LatencyNs, e.Cause = truth.Windows, truth.SlowWindows, truth.BytesPerSec, truth.LatencyNs, truth.Cause
		e.LastWindowAt = stamp(truth.LastWindowAt)
	}
	if dst {
		e.RxWaitingSince = stamp(waiting)
	}
}

// flow is what a connection holds now, and since when its ends wait.
func (j *Job) flow(k *conn) (outstanding uint64, blockedSince, waitingSince int64) {
	src, dst := j.ranks[k.comm.ranks[k.src]], j.ranks[k.comm.ranks[k.dst]]
	in := func(r *rank) *op {
		if r.op != nil && r.op.comm == k.comm && r.op.uses(k) {
			return r.op
		}
		return nil
	}
	so, do := in(src), in(dst)
	if do != nil {
		waitingSince = max(do.start[k.dst]-1, 1)
	}
	switch {
	case so == nil:
	case do != so: // the receiver has not entered: buffered, then no credit
		outstanding, blockedSince = 1<<16, so.start[k.src]+1000
	case so.entered < so.need: // the ring is not closed: what could flow has flowed
	case so.ends > 0: // under way: for so long that it is seen if the connection is slow
		if factor, _ := j.connFault(k); factor >= 1.5 {
			outstanding = 1 << 16
		}
	case so.stalled == k:
		outstanding, blockedSince = 1<<16, so.last+1000
	case so.stalled == nil && dst.frozen:
		outstanding, blockedSince = 1<<16, dst.stuckAt+1000
	}
	return outstanding, blockedSince, waitingSince
}

// arrival samples one collective in eight of each communicator.
func (j *Job) arrival(o *op) {
	comm := slices.IndexFunc(j.ev.Comms, func(x diagnosis.Comm) bool { return x.ID == o.comm.id })
	if o.pair || comm < 0 || (o.seq*0x9e3779b97f4a7c15)>>61 != 0 {
		return
	}
	a := diagnosis.Arrival{Comm: int32(comm), Seq: o.seq, Coll: o.coll}
	for i, w := range o.comm.ranks {
		skew := j.nodes[j.ranks[w].node].skew
		a.Start = append(a.Start, Start+o.start[i]-1+skew)
		a.End = append(a.End, Start+o.out[i]+skew)
	}
	j.ev.Arrivals = append(j.ev.Arrivals, a)
	if n := len(j.ev.Arrivals); n > 64 {
		j.ev.Arrivals = slices.Delete(j.ev.Arrivals, 0, n-64)
	}
}

// Evidence is what the master knows now. It is the job's own and valid until
// the next Advance.
func (j *Job) Evidence() *diagnosis.Evidence {
	j.ev.Now = Start + j.now
	j.ev.Nodes = j.ev.Nodes[:0]
	for _, n := range j.nodes {
		j.ev.Nodes = append(j.ev.Nodes, diagnosis.Node{
			Name: Node(n.id), LastSeen: Start + n.lastSeen, MapError: int64(j.cfg.MapError),
			Lost: n.lastSeen > 0 && j.now-n.lastSeen > lostAfter,
		})
	}
	return &j.ev
}

// Node is the name of a job's n-th node.
func Node(n int) string { return "node" + string(rune('a'+n%26)) + suffix(n/26) }

func suffix(n int) string {
	if n == 0 {
		return ""
	}
	return string(rune('0' + n%10))
}
