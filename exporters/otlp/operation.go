package otlp

import (
	"fmt"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/record"
)

// Ranks that stand for spans that are no rank's.
const (
	rootRank = -1
	openRank = -2 // and below: the snapshot of an open collective, -2 - rank
)

// operation is one collective of one rank as it is remembered: what varies,
// beside the track's what does not.
type operation struct {
	track *track

	seq, bytes               uint64
	enqueued, started, ended int64 // CLOCK_MONOTONIC ns, as in collector.Collective
	wait, transfer           int64
	realOffset               int64
	windows                  uint64 // position of the first in the tracer's window ring
	links                    uint64 // likewise
	peers                    uint64 // likewise
	seen                     int64  // when an open one was looked at
	mapErr, correction       int64
	clockErr                 int64
	root                     int32
	waitedFor                int32
	ranks                    int32 // of a root: covered by it
	channels                 uint16
	nwindows, nlinks, npeers uint8
	leftOut                  uint16 // windows and changes that it came without
	kind                     record.CollKind
	dtype                    record.DType
	op                       record.RedOp
	algo                     record.Algo
	proto                    record.Proto
	result                   record.Result
	queued                   bool // for export, now or ever
	historyOut               bool // what its connections' windows were around it, too
	late                     bool // its trace's root is out, and does not cover it
	rootless                 bool // its trace never has one
	jobClock, replay         bool
	clock                    record.Clock
}

// timed reports whether any of o's stamps survived.
func (o *operation) timed() bool { return o.enqueued != 0 || o.started != 0 || o.ended != 0 }

// interval is from o's first stamp to its last one, of those that its span can have; what is
// open ends when it was looked at.
func (o *operation) interval() (first, last int64) {
	first = o.started
	if first == 0 {
		first = o.enqueued
	}
	if first == 0 || o.ended != 0 && first > o.ended {
		first = o.ended
	}
	if o.ended == 0 {
		return first, max(o.seen, first)
	}
	return first, o.ended
}

// phases are o's phases; without a start there is nowhere to put them.
func (o *operation) phases() (wait, transfer int64) {
	if o.started == 0 || o.track.rank == rootRank {
		return 0, 0
	}
	return o.wait, o.transfer
}

// countSpans is how many spans operation appends for o.
func countSpans(o *operation) int {
	if o.track.rank == rootRank {
		return 1
	}
	n := 1
	wait, transfer := o.phases()
	if wait > 0 {
		n++
	}
	if transfer > 0 {
		n++
	}
	return n + int(o.npeers)
}

// track is one rank in one communicator: the attributes that all its spans share, encoded once.
type track struct {
	trackKey
	job, comm string // as the trainer wrote them: trace ids derive from these
	node      string
	workload  *collector.Workload
	resource  *jobResource
	name      [16][]byte // Span.name by kind: "rank 3 (node1) AllReduce", of a root "AllReduce dp"
	shared    []byte     // attributes of the root and of the rank's span
	own       []byte     // attributes of the rank's span only
	open      uint64     // 1 + position of the last snapshot of an open collective
}

type trackKey struct {
	id      uint64
	rank    int32
	size    int32
	world   int32
	attempt uint32
}

func newTrack(c *collector.Collective, r *jobResource) *track {
	t := &track{trackKey: keyOf(c), job: c.Job, comm: c.Comm, node: c.Node, workload: c.Workload, resource: r}
	comm := clean(c.Comm)
	for kind := range t.name {
		t.name[kind] = appendText(nil, tagName, spanName(c, record.CollKind(kind), comm))
	}
	t.shared = appendString(t.shared, tagAttribute, names.AttrCommunicator, comm)
	t.shared = appendString(t.shared, tagAttribute, names.AttrCommID, fmt.Sprintf("%016x", c.CommID))
	t.shared = appendInt(t.shared, tagAttribute, names.AttrCommSize, int64(c.Size))
	t.shared = appendInt(t.shared, tagAttribute, names.AttrAttempt, int64(c.Attempt))
	if c.Rank == rootRank {
		return t
	}
	t.own = appendInt(t.own, tagAttribute, names.AttrRank, int64(c.Rank))
	t.own = appendInt(t.own, tagAttribute, names.AttrWorldRank, int64(c.World))
	if c.Workload != nil {
		for _, kv := range c.Workload.Attributes {
			t.own = appendString(t.own, tagAttribute, clean(kv.Key), clean(kv.Value))
		}
	}
	return t
}

// spanName is the collective's for the root, and says whose it is for a rank's span.
func spanName(c *collector.Collective, kind record.CollKind, comm string) string {
	switch {
	case c.Rank == rootRank:
		return kind.String() + " " + comm
	case c.Node == "":
		return fmt.Sprintf("rank %d %v", c.World, kind)
	}
	return fmt.Sprintf("rank %d (%s) %v", c.World, clean(c.Node), kind)
}

func keyOf(c *collector.Collective) trackKey {
	return trackKey{c.CommID, c.Rank, c.Size, c.World, c.Attempt}
}

func index(k record.CollKind) int {
	if int(k) < len(track{}.name) {
		return int(k)
	}
	return int(record.CollNone)
}
