package diagnosis

import (
	"math"
	"slices"

	"github.com/lockstep-ccl/lockstep/record"
)

// Engine turns successive Evidence of one job into verdicts. It is not safe
// for concurrent use; a master has one for each job.
type Engine struct {
	cfg Config

	job     string
	attempt uint32
	prev    int64 // Now of the former pass, 0 before the first
	resumed int64 // what was open before is as old as this: the master did not run

	comms   []commHistory // by index into Evidence.Comms
	ranks   []rankHistory // by world rank
	sums    []rankSums    // by world rank, of this pass
	changed bool          // the set of communicators is not that of the former pass
	conns   []connHistory // by index into Evidence.Conns
	// seeWaiting: the transports tell when a receiver waits.
	seeWaiting bool

	pass      pass
	pauses    pauses
	window    window
	slowRanks []slowRank
	slowConns []slowConn
	incidents []incident
	ended     []endedHang // a while ago at most

	graph   waitGraph
	hang    hangScratch
	scratch []float64
	ratios  [256][]float64 // by transport
}

// pass is what one call of Diagnose has learnt so far.
type pass struct {
	ev    *Evidence
	now   int64
	asOf  []int64 // by node: how far its ranks' state is known
	state []rankState
	held  []int32 // communicators with an operation open for too long
	dead  []deadLink

	alive, ended int  // ranks of this attempt
	sick         bool // some rank's process is stopped or gone
	gone         bool
	lost         bool // some rank's node is silent
	marked       bool // some rank has a mark open
	step         uint64
	maxOwn       int64 // longest own time in the job's history
	lastFinish   int64
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

// New returns an Engine; zero fields of cfg take their defaults.
func New(cfg Config) *Engine { return &Engine{cfg: cfg.withDefaults()} }

// Diagnose judges the job by the evidence so far. The result is the caller's,
// worst first, at most MaxVerdicts long, nil when nothing is wrong. ev is only
// read, and not kept.
func (e *Engine) Diagnose(ev *Evidence) []Verdict {
	p := &e.pass
	e.begin(ev)
	e.scanRanks()
	e.alignComms()
	paused := ev.Paused || p.now < e.prev
	e.prev = p.now
	if paused {
		e.resumed = p.now
	}
	e.scanMembers()
	defer func() { p.ev = nil }()
	if paused {
		// Ages across the gap are void, and so is the window: nothing is found,
		// and what was found stays as it is.
		e.window.void(e)
		return e.standing()
	}
	e.scanLinks()
	if p.alive == 0 && p.ended > 0 && !p.gone && len(p.dead) == 0 {
		// All ranks ended in good order: the job is finished.
		e.forget()
		return nil
	}
	found := e.deadLinks(nil)
	if len(found) == 0 { // else what else stopped did so for want of it
		if p.lost {
			found = e.lostNodes(found)
		}
		if p.gone && len(found) == 0 {
			found = e.deaths(found)
		}
		if len(p.held) > 0 {
			found = e.hangs(found)
		}
	}
	found = e.unformed(found)
	e.watchFlights()
	if e.window.due(e) {
		e.stragglers()
		e.slowConnections()
		e.window.restart(e)
	}
	found = e.slowness(found)
	return e.track(found)
}

// begin takes over the evidence and notices a restart: what was learnt about a
// former attempt is void, and communicators that it left behind are ignored.
func (e *Engine) begin(ev *Evidence) {
	p := &e.pass
	e.hang.haveConns = false
	*p = pass{ev: ev, now: ev.Now, asOf: p.asOf[:0], state: p.state[:0], held: p.held[:0], dead: p.dead[:0]}
	for i := range ev.Nodes {
		n := &ev.Nodes[i]
		at := ev.Now
		if n.LastSeen > 0 {
			at = min(at, n.LastSeen+int64(e.cfg.ReportSlack))
		}
		p.asOf = append(p.asOf, at)
	}
	attempt := uint32(0)
	for i := range ev.Ranks {
		attempt = max(attempt, ev.Ranks[i].Attempt)
	}
	if ev.Job != e.job || attempt != e.attempt {
		sameJob := ev.Job == e.job
		e.job, e.attempt = ev.Job, attempt
		e.forget()
		for i := range e.comms {
			h := &e.comms[i]
			*h = commHistory{id: h.id, since: ev.Now, former: sameJob, enqueued: h.enqueued}
		}
		e.pauses = pauses{}
		e.ranks = e.ranks[:0]
	}
	e.ranks = resized(e.ranks, len(ev.Ranks))
	e.sums = zeroed(e.sums, len(ev.Ranks))
}

// forget drops every open finding and the slow detectors' history.
func (e *Engine) forget() {
	e.incidents, e.ended = e.incidents[:0], e.ended[:0]
	e.slowRanks, e.slowConns = e.slowRanks[:0], e.slowConns[:0]
	clear(e.conns)
	for i := range e.ranks {
		e.ranks[i].own = ownHistory{}
	}
	e.window = window{}
}

// known returns how far the state of a world rank is known.
func (p *pass) known(rank int32) int64 {
	if n := p.ev.Ranks[rank].Node; n >= 0 && int(n) < len(p.asOf) {
		return p.asOf[n]
	}
	return p.now
}

// heard returns when a world rank's node has last reported.
func (p *pass) heard(rank int32) int64 {
	if n := nodeOf(p.ev, rank); n >= 0 && p.ev.Nodes[n].LastSeen > 0 {
		return p.ev.Nodes[n].LastSeen
	}
	return p.now
}

func (p *pass) lostNode(node int32) bool {
	return node >= 0 && int(node) < len(p.ev.Nodes) && p.ev.Nodes[node].Lost
}

// silent reports whether a node has not been heard for so long that what its
// ranks are in is not known any more. What is found then rests on others; what
// was found before stands until it reports again.
func (p *pass) silent(node int32) bool {
	if node < 0 || int(node) >= len(p.ev.Nodes) {
		return false
	}
	n := &p.ev.Nodes[node]
	return n.Lost || (n.LastSeen > 0 && p.now-n.LastSeen > silentAfter)
}

const silentAfter = 1_000_000_000

func (p *pass) nodeName(rank int32) string {
	if n := p.ev.Ranks[rank].Node; n >= 0 && int(n) < len(p.ev.Nodes) {
		return p.ev.Nodes[n].Name
	}
	return ""
}

// member returns the world rank of a communicator's member when it is a rank
// of this job that this attempt has seen, else -1.
func (p *pass) world(w int32) int32 {
	if w < 0 || int(w) >= len(p.state) || p.state[w] == rankAbsent {
		return -1
	}
	return w
}

func pointToPoint(k record.CollKind) bool {
	return k == record.Send || k == record.Recv || k == record.Group
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
