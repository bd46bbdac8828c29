// Package roots finds out how far the spans of a collective reach on all ranks, so that
// one of the agents can send the span that covers them.
//
// In flow what each agent has handed to its exporter of a collective: when its first span
// begins and its last one ends, on the job's clock. Out flow, once every rank was heard of
// or nobody has told anything for a while, the union. A master keeps a Gather for its job,
// and an agent one for the jobs that have no master.
//
// It waits for nobody for longer than Most, and keeps at most Limit collectives; what finds
// no room has no root, which backends show as a missing parent.
package roots

import (
	"cmp"
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

// Bounds of a Gather.
const (
	Quiet = 1500 * time.Millisecond // without news, after which a trace is taken for complete
	Most  = 10 * time.Second        // after the first news
	Limit = 4096                    // collectives that are waited for
)

// Key names a collective of one job.
type Key struct {
	Comm uint64
	Coll record.CollKind
	Seq  uint64
}

// Part is what an agent has exported of one rank's collective. Each comes once.
type Part struct {
	Rank        int32 // in the communicator
	Size        int   // of the communicator, 0 when it is not known
	First, Last int64 // on the job's clock, ns
	Err         int64 // bound on the error of both
	NodeClock   bool  // they lie on a node's wall clock instead
	From        int32 // whose part it is, for Root.To
	Anomalous   bool
}

// Root is a collective whose parts have come together.
type Root struct {
	Key
	First, Last, Err int64
	Ranks            int
	NodeClock        bool  // some part lies on its node's wall clock, so Err bounds nothing
	To               int32 // who told of the lowest rank
}

// Gather brings parts together. The zero value is ready; it is for one goroutine at a time.
type Gather struct {
	pending map[Key]*pending
	dropped uint64
}

type pending struct {
	Root
	lowest int32
	size   int
	since  int64
	heard  int64
	asked  bool
}

// Dropped counts the parts that found no room.
func (g *Gather) Dropped() uint64 { return g.dropped }

// Add takes in a part at now (ns of any clock that is used for all calls). ask says that
// this is the first word of a collective that stands out, while ranks are missing: others
// may hold their part of it.
func (g *Gather) Add(k Key, p Part, now int64) (ask bool) {
	x := g.pending[k]
	if x == nil {
		if len(g.pending) >= Limit {
			g.dropped++
			return false
		}
		if g.pending == nil {
			g.pending = map[Key]*pending{}
		}
		x = &pending{Root: Root{Key: k, First: p.First, Last: p.Last, To: p.From}, lowest: p.Rank, since: now}
		g.pending[k] = x
	}
	x.First, x.Last, x.Err = min(x.First, p.First), max(x.Last, p.Last), max(x.Err, p.Err)
	x.NodeClock = x.NodeClock || p.NodeClock
	x.Ranks++
	x.size = max(x.size, p.Size)
	x.heard = now
	if p.Rank < x.lowest {
		x.lowest, x.To = p.Rank, p.From
	}
	if !p.Anomalous || x.asked {
		return false
	}
	x.asked = true
	return x.size == 0 || x.Ranks < x.size
}

// Due removes and returns the collectives that are complete, or as complete as they get.
func (g *Gather) Due(now int64) (due []Root) {
	for k, x := range g.pending {
		if x.size > 0 && x.Ranks >= x.size || now-x.heard >= Quiet.Nanoseconds() || now-x.since >= Most.Nanoseconds() {
			due = append(due, x.Root)
			delete(g.pending, k)
		}
	}
	slices.SortFunc(due, func(a, b Root) int {
		return cmp.Or(cmp.Compare(a.First, b.First), cmp.Compare(a.Comm, b.Comm), cmp.Compare(a.Seq, b.Seq))
	})
	return due
}
