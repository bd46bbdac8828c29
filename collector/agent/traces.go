package agent

import (
	"cmp"
	"slices"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/internal/roots"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/record"
)

const (
	// maxTraced bounds what is told of traces in one report. What finds no room is not
	// covered by its trace's root.
	maxTraced = 2048
	// clockFor is how long a master's word on the job's clock is used without another, ns;
	// its error grows meanwhile.
	clockFor = int64(60e9)
	// drift is how fast two hosts' clocks may part.
	drift = 50e-6
)

// jobTime fills in how c's times are to be understood: on the job's clock as far as its
// master has told of it, else on the node's.
func (a *Agent) jobTime(j *job, c *collector.Collective) {
	c.RealOffset = a.realOffset
	if j.stream == nil {
		return
	}
	k := j.stream.jobClock.Load()
	if k == nil {
		return
	}
	if age := a.view.Now - k.at; age < clockFor {
		c.RealOffset, c.JobClock, c.Correction = k.offset, true, k.offset-a.realOffset
		c.MapErr = k.err + int64(float64(max(age, 0))*drift)
	}
}

// tracers are the sinks that answer requests for traces.
func (a *Agent) tracers() (all []collector.Tracer) {
	for _, s := range a.o.Sinks {
		if tr, ok := s.(collector.Tracer); ok {
			all = append(all, tr)
		}
	}
	return all
}

// traced notes that a rank's spans of a collective have gone out, for the sender of the trace's
// root. A master collects how far all ranks' spans reach; without one, only this node's count.
func (a *Agent) traced(r *rank, c *comm, k roots.Key, t collector.Traced, anomalous bool) {
	j := r.job
	if !k.Coll.Collective() { // sends and receives have no root
		return
	}
	if j.stream == nil || !j.stream.roots.Load() {
		j.roots.Add(k, roots.Part{Rank: c.rank, Size: int(c.size), First: t.First, Last: t.Last, Err: t.Err, NodeClock: t.NodeClock}, a.view.Now)
		return
	}
	if len(j.traced) < maxTraced && r.reportable() {
		j.traced = append(j.traced, &wire.TraceResult{
			Spans: 1, CommId: k.Comm, Coll: uint32(k.Coll), Seq: k.Seq, Rank: t.Rank,
			FirstNs: t.First, LastNs: t.Last, ErrorNs: t.Err, NodeClock: t.NodeClock, Anomalous: anomalous,
		})
	}
}

// localRoots sends the roots of traces of a job without a master, on rank 0's node only: other
// agents cannot tell whether it does. At the end of time all of them are due.
func (a *Agent) localRoots(j *job, now int64) {
	for _, due := range j.roots.Due(now) {
		_, c := j.member(due.Comm, true)
		if c == nil {
			continue
		}
		out := a.rootOf(j, c, due.Key)
		a.jobTime(j, out)
		out.RealOffset = 0
		out.Started, out.Ended, out.MapErr, out.JobClock = due.First, due.Last, due.Err, out.JobClock && !due.NodeClock
		for _, tr := range a.tracers() {
			tr.Root(out, due.Ranks)
		}
	}
}

// member returns a rank of this node in a communicator, the lowest one when first says so.
func (j *job) member(id uint64, first bool) (*rank, *comm) {
	for _, r := range j.ranks {
		for _, c := range r.comms {
			if c != nil && c.id == id && (!first || c.rank == 0) {
				return r, c
			}
		}
	}
	return nil, nil
}

func (a *Agent) rootOf(j *job, c *comm, k roots.Key) *collector.Collective {
	a.out = collector.Collective{
		Job: j.name, Node: a.o.Node, Comm: c.name, CommID: c.id, Rank: -1, World: -1, Size: c.size,
		Kind: k.Coll, Seq: k.Seq, Root: -1, WaitedFor: -1,
	}
	if r, _ := j.member(c.id, false); r != nil {
		a.out.Attempt = r.p.Attempt
	}
	return &a.out
}

// trace answers a master's request about one collective: it exports its spans, or its root.
func (a *Agent) trace(t traceRequest) {
	j := a.jobs[t.from.job]
	if t.root != nil {
		a.root(j, t.root)
		return
	}
	res := &wire.TraceResult{Id: t.Id}
	if j != nil && t.Job == t.from.job {
		res.Spans = uint32(a.retroactive(j, roots.Key{Comm: t.CommId, Coll: record.CollKind(t.Coll), Seq: t.Seq}))
		if res.Spans == 0 {
			for _, tr := range a.tracers() {
				if coll, seq, ok := tr.Held(j.name, t.CommId); ok && seq > res.HeldSeq {
					res.HeldColl, res.HeldSeq = uint32(coll), seq
				}
			}
		}
	}
	select {
	case t.from.results <- res:
	default:
	}
}

// root sends the span that covers a collective's on all ranks.
func (a *Agent) root(j *job, w *wire.TraceRoot) {
	if j == nil || w.FirstNs <= 0 || w.LastNs < w.FirstNs {
		return
	}
	_, c := j.member(w.CommId, false)
	if c == nil {
		return
	}
	out := a.rootOf(j, c, roots.Key{Comm: w.CommId, Coll: record.CollKind(w.Coll), Seq: w.Seq})
	out.Started, out.Ended, out.JobClock, out.MapErr = w.FirstNs, w.LastNs, !w.NodeClock, w.ErrorNs
	for _, tr := range a.tracers() {
		tr.Root(out, int(w.Ranks))
	}
}

// retroactive has what is kept of one collective exported.
func (a *Agent) retroactive(j *job, k roots.Key) (spans int) {
	tracers := a.tracers()
	for _, r := range j.ranks {
		for _, c := range r.comms {
			if c == nil || c.id != k.Comm || len(c.ops) == 0 {
				continue
			}
			// A collective that hangs has not been handed over yet, and is the one most asked for.
			if o := &c.ops[k.Seq&uint64(len(c.ops)-1)]; o.seq == k.Seq && !o.done {
				out := a.describe(r, c, o)
				out.Anomalous = true
				for _, tr := range tracers {
					tr.Collective(out)
				}
			}
		}
	}
	for _, tr := range tracers {
		spans += tr.Retroactive(j.name, k.Comm, k.Coll, k.Seq, func(t collector.Traced) {
			for _, r := range j.ranks {
				for _, c := range r.comms {
					if c != nil && c.id == k.Comm && c.rank == t.Rank {
						a.traced(r, c, k, t, false)
						return
					}
				}
			}
		})
	}
	for _, tr := range tracers { // each has spans of the collective out by now, or never
		a.exportHistory(j, k, tr)
	}
	return spans
}

const (
	// beforeFor is how long before a collective its connections' windows are worth exporting, ns.
	beforeFor = int64(10e6)
	// changedBefore likewise of changes of their paths and ports, of which there are few.
	changedBefore = int64(5e9)
)

// exportHistory exports what is kept of connections around one collective: windows in recorders,
// and changes of paths and ports.
func (a *Agent) exportHistory(j *job, k roots.Key, tr collector.Tracer) {
	h, ok := tr.(collector.HistoryTracer)
	if !ok {
		return
	}
	h.History(j.name, k.Comm, k.Coll, k.Seq, func(rank int32, first, last int64) (h collector.Around) {
		for _, r := range j.ranks {
			for _, c := range r.comms {
				if c != nil && c.id == k.Comm && c.rank == rank {
					h.Links = c.ports.around(c.links.around(h.Links, first-changedBefore, last), first-changedBefore, last)
				}
			}
			for i := range r.p.Conns {
				s := &r.p.Conns[i]
				if c := r.comm(s.Comm); c != nil && c.id == k.Comm && c.rank == rank && s.History != 0 {
					h.Windows = a.around(h.Windows, r, s, first-beforeFor, last)
				}
			}
		}
		slices.SortStableFunc(h.Windows, func(x, y collector.Window) int { return cmp.Compare(x.Last, y.Last) })
		h.LeftOut = max(0, len(h.Windows)-collector.MaxHistory)
		h.Windows = h.Windows[h.LeftOut:]
		return h
	})
}

// around appends a connection's windows of some time.
func (a *Agent) around(out []collector.Window, r *rank, s *record.ConnStatus, from, to int64) []collector.Window {
	a.history = a.recorders.History(r.p, s, a.history[:0])
	for i := range a.history {
		w := &a.history[i]
		if w.Last < from || w.First > to {
			continue
		}
		out = append(out, collector.Window{
			Peer: s.Peer, Conn: r.conn(s.Index).who, Bytes: w.Bytes, WRs: w.WRs, Backlog: w.Backlog, First: w.First, Last: w.Last,
			Cause: w.Cause, State: w.State, Overlaps: w.Overlaps,
		})
	}
	return out
}
