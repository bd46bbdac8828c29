package agent

import (
	"cmp"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/internal/roots"
	"github.com/lockstep-ccl/lockstep/record"
)

// op is one collective that has not been handed over yet, or the last one of
// its slot that was.
type op struct {
	seq                      uint64
	bytes                    uint64
	enqueued, started, ended int64
	wait, transfer           int64
	launched                 int64 // the kernel, or enqueued
	gpuStart                 int64 // by the GPU's clock, where the process does not convert
	root                     int32
	stream                   uint32
	channels                 uint16
	coll                     record.CollKind
	dtype                    record.DType
	redop                    record.RedOp
	algo                     record.Algo
	proto                    record.Proto
	result                   record.Result
	clock                    record.Clock
	clockErr                 int64
	replay                   bool
	waitedFor                int32 // 1 + the last peer to enter, 0: not known
	inPlace                  bool
	done                     bool // handed over
}

// op returns the slot of a sequence; nil when its collective has been handed
// over already (a late record) or is older than what is pending in its slot.
func (a *Agent) op(c *comm, seq uint64) *op {
	if len(c.ops) == 0 && !a.growOps(c, firstOps) {
		return nil
	}
	for {
		o := &c.ops[seq&uint64(len(c.ops)-1)]
		switch {
		case o.seq == seq:
			if o.done {
				return nil
			}
			return o
		case o.seq > seq:
			return nil
		case o.seq != 0 && !o.done && o.seq > c.finished && len(c.ops) < maxOps && a.growOps(c, 2*len(c.ops)):
			continue // pending indeed: a stream is many operations ahead
		case o.seq != 0 && !o.done:
			c.evicted++ // its end was lost, or there is no more room
		}
		*o = op{seq: seq, root: -1}
		return o
	}
}

// growOps makes a communicator's ring n long, unless all of them are too long by then.
func (a *Agent) growOps(c *comm, n int) bool {
	if a.ops+n-len(c.ops) > allOps {
		return false
	}
	a.ops += n - len(c.ops)
	old := c.ops
	c.ops = make([]op, n)
	for i := range old {
		if old[i].seq != 0 {
			c.ops[old[i].seq&uint64(n-1)] = old[i]
		}
	}
	return true
}

// finish hands a finished collective to the sinks.
func (a *Agent) finish(r *rank, c *comm, o *op) {
	o.done = true
	out := a.describe(r, c, o)
	out.Anomalous = o.result != record.ResultOK || out.NWindows > 0 || out.NLinks > 0
	if o.started != 0 {
		if c.history.slow(o.coll, o.bytes, o.ended-o.started) {
			out.Anomalous = true
		}
		if r.job.stream != nil && !c.aside && o.meets() && r.reportable() && c.sampling.take(c.id, o.seq) {
			r.job.arrive(c, o)
		}
	}
	for _, s := range a.o.Sinks {
		s.Collective(out)
	}
	if out.Traced && !c.aside {
		a.traced(r, c, roots.Key{Comm: c.id, Coll: o.coll, Seq: o.seq}, collector.Traced{
			Rank: c.rank, First: cmp.Or(o.started, o.enqueued, o.ended) + out.RealOffset, Last: o.ended + out.RealOffset, Err: o.clockErr + out.MapErr,
		}, out.Anomalous)
	}
}

// describe fills the one Collective that is handed around.
func (a *Agent) describe(r *rank, c *comm, o *op) *collector.Collective {
	out := &a.out
	*out = collector.Collective{
		Job: r.job.name, Comm: c.name, CommID: c.id, Rank: c.rank, Size: c.size, World: r.p.Rank, Attempt: r.p.Attempt,
		Kind: o.coll, DType: o.dtype, Op: o.redop, Algo: o.algo, Proto: o.proto, Result: o.result, InPlace: o.inPlace,
		Root: o.root, Stream: o.stream, Channels: o.channels, Seq: o.seq, Bytes: o.bytes,
		Clock: o.clock, Replay: o.replay, ClockErr: o.clockErr,
		Enqueued: o.enqueued, Started: o.started, Ended: o.ended, Wait: o.wait, Transfer: o.transfer,
		Node: a.o.Node, Workload: r.workload, WaitedFor: o.waitedFor - 1, Former: o.ended != 0 && o.ended < a.began,
	}
	a.jobTime(r.job, out)
	if o.ended == 0 {
		out.SeenAt = record.Now()
	}
	if o.started != 0 {
		for i := max(0, c.ntouched-maxTouched); i < c.ntouched && out.NWindows < collector.MaxWindows; i++ {
			if w := &c.touched[i%maxTouched]; o.ended == 0 || w.Last >= o.started && w.First <= o.ended {
				out.Windows[out.NWindows] = *w
				out.NWindows++
			}
		}
		for i := max(0, c.nlinks-maxLinks); i < c.nlinks && out.NLinks < collector.MaxLinks; i++ {
			// What happened between two collectives is the next one's.
			if l := &c.links[i%maxLinks]; o.ended == 0 || l.At <= o.ended && (l.At >= o.started || i >= c.linksTold) {
				out.Links[out.NLinks] = *l
				out.NLinks++
				if o.ended != 0 {
					c.linksTold = max(c.linksTold, i+1)
				}
			}
		}
	}
	return out
}

// meets reports whether o ended in order and kept its members in until the last one had
// entered, so that its times tell of their clocks.
func (o *op) meets() bool {
	return o.coll.Collective() && o.result == record.ResultOK && (o.bytes > 0 || !o.coll.HasData())
}
