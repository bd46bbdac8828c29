package diagnosis

import (
	"math"
	"slices"

	"github.com/lockstep-ccl/lockstep/record"
)

// view is what is known of a job: the evidence of this pass, what follows from
// it for every detector alike, and the little that is remembered between passes
// to read it right (how long operations usually take, which pauses the job has
// come back from). Detectors read it; only take changes it.
type view struct {
	cfg Config

	job     string
	attempt uint32
	prev    int64 // Now of the former pass, 0 before the first
	resumed int64 // what was open before is as old as this: the master did not run

	comms   []commHistory // by index into Evidence.Comms
	ranks   []rankHistory // by world rank
	pauses  pauses
	crowds  crowds
	changed bool     // the set of communicators is not that of the former pass
	open    *tracker // incidents that are open

	// Of this pass:
	ev    *Evidence
	now   int64
	asOf  []int64 // by node: how far its ranks' state is known
	state []rankState
	sums  []rankSums // by world rank, once sumRanks has been called
	// What is summed up over all members is so in shares: these are the sums of each.
	shares   []share
	partSums [][]rankSums
	summed   bool
	held     []int32 // communicators with an operation open for too long
	byComm   connIndex

	alive, ended int  // ranks of this attempt
	sick         bool // some rank's process is stopped or gone
	gone         bool
	lost         bool // some rank's node is silent
	marked       bool // some rank has a mark open
	fatalXid     bool // some rank's GPU has reported one
	aborted      bool // some member has given up a communicator
	step         uint64
	maxOwn       int64 // longest own time in the job's history
	lastFinish   int64 // of an operation that did not fail, in this attempt

	told      []naming // see namings
	toldBuilt bool
}

// rankState is what a rank can do for those who wait for it.
type rankState uint8

const (
	rankAbsent  rankState = iota // never seen, or its report is of a former attempt
	rankAlive                    //
	rankStopped                  // stopped, or in uninterruptible sleep
	rankGone                     // died
	rankExited                   // ended in good order
	rankLost                     // its agent is silent: the last report may be false by now
)

// sick ranks do not wait for anybody, whatever they were in.
func (s rankState) sick() bool { return s == rankStopped || s == rankGone || s == rankExited }

// take takes in the evidence of a pass. anew is true when it is of another
// attempt: what was learnt about the former one is void, and communicators that
// it left behind are ignored. paused is true when the master did not run.
func (v *view) take(ev *Evidence) (anew, paused bool) {
	v.ev, v.now = ev, ev.Now
	v.asOf, v.state, v.held = v.asOf[:0], v.state[:0], v.held[:0]
	v.summed = false
	v.alive, v.ended, v.step, v.maxOwn, v.lastFinish = 0, 0, 0, 0, 0
	v.sick, v.gone, v.lost, v.marked, v.aborted, v.fatalXid = false, false, false, false, false, false
	v.toldBuilt = false
	for i := range ev.Nodes {
		n := &ev.Nodes[i]
		at := ev.Now
		if n.LastSeen > 0 {
			at = min(at, n.LastSeen+int64(v.cfg.ReportSlack))
		}
		v.asOf = append(v.asOf, at)
	}
	attempt := uint32(0)
	for i := range ev.Ranks {
		attempt = max(attempt, ev.Ranks[i].Attempt)
	}
	if ev.Job != v.job || attempt != v.attempt {
		anew = true
		sameJob := ev.Job == v.job
		v.job, v.attempt = ev.Job, attempt
		for i := range v.comms {
			h := &v.comms[i]
			*h = commHistory{id: h.id, since: ev.Now, former: sameJob, enqueued: h.enqueued}
		}
		v.pauses = v.pauses.ofNextAttempt(sameJob && len(v.ranks) == len(ev.Ranks))
		v.ranks = v.ranks[:0]
	}
	if len(v.ranks) != len(ev.Ranks) {
		for i := range v.comms {
			v.comms[i].rev = 0 // members may be of the world now, or no more
		}
	}
	v.ranks = resized(v.ranks, len(ev.Ranks))
	v.scanRanks()
	v.alignComms()
	v.orderConns()
	paused = ev.Paused || v.now < v.prev
	v.prev = v.now
	if paused {
		v.resumed = v.now
	}
	v.scan()
	return anew, paused
}

// finished reports whether all ranks ended in good order: the job is over.
func (v *view) finished() bool {
	return v.alive == 0 && v.ended > 0 && !v.gone
}

// known returns how far the state of a world rank is known. An agent that starts again is
// connected before it has told of its ranks: what was known of them is as old as it was.
func (v *view) known(rank int32) int64 {
	at := v.now
	if n := v.ev.Ranks[rank].Node; n >= 0 && int(n) < len(v.asOf) {
		at = v.asOf[n]
	}
	if blind := v.ranks[rank].blind; blind > 0 && v.now-blind < int64(v.cfg.LostAfter)/2 {
		at = min(at, blind)
	}
	return at
}

// heard returns when a world rank's node has last reported.
func (v *view) heard(rank int32) int64 {
	if n := nodeOf(v.ev, rank); n >= 0 && v.ev.Nodes[n].LastSeen > 0 {
		return v.ev.Nodes[n].LastSeen
	}
	return v.now
}

func (v *view) lostNode(node int32) bool {
	return node >= 0 && int(node) < len(v.ev.Nodes) && v.ev.Nodes[node].Lost
}

// silent reports whether a node has not been heard for so long that what its
// ranks are in is not known any more. What is found then rests on others; what
// was found before stands until it reports again.
func (v *view) silent(node int32) bool {
	if node < 0 || int(node) >= len(v.ev.Nodes) {
		return false
	}
	n := &v.ev.Nodes[node]
	return n.Lost || (n.LastSeen > 0 && v.now-n.LastSeen > silentAfter)
}

const silentAfter = 1_000_000_000

func (v *view) nodeName(rank int32) string {
	if n := v.ev.Ranks[rank].Node; n >= 0 && int(n) < len(v.ev.Nodes) {
		return v.ev.Nodes[n].Name
	}
	return ""
}

// world returns the world rank of a communicator's member when it is a rank
// of this job that this attempt has seen, else -1.
func (v *view) world(w int32) int32 {
	if w < 0 || int(w) >= len(v.state) || v.state[w] == rankAbsent {
		return -1
	}
	return w
}

// end returns the world rank of a connection's end, -1 when not known.
func (v *view) end(c *Conn, member int32) int32 {
	members := v.ev.Comms[c.Comm].Members
	if member < 0 || int(member) >= len(members) {
		return -1
	}
	return v.world(members[member].World)
}

func (v *view) bothAlive(c *Conn) bool {
	src, dst := v.end(c, c.Src), v.end(c, c.Dst)
	return src >= 0 && dst >= 0 && v.state[src] == rankAlive && v.state[dst] == rankAlive
}

func (v *view) rankCulprit(rank int32, reason string) Culprit {
	return Culprit{Kind: CulpritRank, Rank: rank, Peer: -1, Node: v.nodeName(rank), Reason: reason}
}

// connIndex orders connections by communicator.
type connIndex struct {
	of    int     // connections that it is of
	conns []int32 // indices into Evidence.Conns
	first []int32 // by communicator: its first in conns
}

// orderConns makes the index anew when connections may have come, gone or moved.
// The master only appends, but when communicators go.
func (v *view) orderConns() {
	x := &v.byComm
	n := len(v.ev.Comms)
	counted := !slices.ContainsFunc(v.ev.Comms, func(c Comm) bool { return c.ConnRev == 0 })
	if !v.changed && x.of == len(v.ev.Conns) && len(x.first) == n+2 && (counted || v.inOrder()) {
		return
	}
	for i := range v.comms {
		v.comms[i].connRev = 0
	}
	x.of = len(v.ev.Conns)
	x.first = zeroed(x.first, n+2)
	for i := range v.ev.Conns {
		if k := v.ev.Conns[i].Comm; k >= 0 && int(k) < n {
			x.first[k+2]++
		}
	}
	for k := 2; k < n+2; k++ {
		x.first[k] += x.first[k-1]
	}
	x.conns = zeroed(x.conns, int(x.first[n+1]))
	for i := range v.ev.Conns {
		if k := v.ev.Conns[i].Comm; k >= 0 && int(k) < n {
			x.conns[x.first[k+1]] = int32(i)
			x.first[k+1]++
		}
	}
}

// inOrder reports whether the index still holds: to look is far cheaper than to make it anew.
func (v *view) inOrder() bool {
	x := &v.byComm
	if len(x.conns) != len(v.ev.Conns) {
		return false // of some the communicator was not known
	}
	for ci := range v.ev.Comms {
		for _, k := range v.connsOf(int32(ci)) {
			if v.ev.Conns[k].Comm != int32(ci) {
				return false
			}
		}
	}
	return true
}

// connsOf returns the indices of a communicator's connections.
func (v *view) connsOf(ci int32) []int32 {
	return v.byComm.conns[v.byComm.first[ci]:v.byComm.first[ci+1]]
}

func inComm(m *Member) bool {
	return m.State != record.CommLeft && m.State != record.CommAborted
}

func zeroed[T any](s []T, n int) []T {
	s = slices.Grow(s[:0], n)[:n]
	clear(s)
	return s
}

func resized[T any](s []T, n int) []T {
	old := min(len(s), n)
	s = slices.Grow(s[:old], n-old)[:n]
	clear(s[old:])
	return s
}

func sortInt32(s []int32) { slices.Sort(s) }

const never = math.MaxInt64
