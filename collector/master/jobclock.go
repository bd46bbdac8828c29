package master

import (
	"slices"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/record"
)

// A job's times are compared on one clock, the job's: that of a reference node, mapped once to
// the master's. It never jumps while that node is there, since agents hear of a change one after
// the other; when the two clocks have surely drifted apart, it is slewed back.
//
// Another node's offset to it is bounded twice: by the messages between its agent and the master
// (clockMap), and by collectives, to about their own length, since nobody leaves one before the
// last member has entered. With T for the moment at which the last one enters,
//
//	T ≥ last start on node b + offset of b     for every node b
//	T ≤ first end on node a + offset of a      for every node a
//
// so a collective whose T is bounded by some nodes bounds the offsets of the others, also of
// those that share none with the reference.

// Bounds of what is kept of collectives for this.
const (
	maxMeetings     = 1024
	maxMeetingNodes = 1 << 16 // of all meetings together (1.5 MiB)
	alignRounds     = 4       // bounds travel one communicator further in each
	alignEvery      = int64(250e6)
	// slew is how fast the job's clock is led back to the master's, more than clocks drift;
	// beyond maxSlew it jumps: a machine was suspended.
	slew    = 60e-6
	maxSlew = int64(2e9)
	// toldWithin is how long after one agent another one may hear of a change, ns.
	toldWithin = int64(1e9)
)

// jobClock knows the job's clock. Its owner serialises all calls.
type jobClock struct {
	reference      int32 // node, -1: there is none
	offset         int64 // of the reference, as last used
	nodes          []aligned
	meetings       []*meeting
	of             map[arrivalKey]*meeting
	cells          int
	at             int64 // when it was last aligned
	slewing        bool  // it was led back then
	contradictions uint64
}

// aligned is where one node's clock stands: job's time = monotonic time + offset.
type aligned struct {
	lo, hi int64 // bounds of offset at time at
	at     int64
	offset int64 // in use, within the bounds
	width  int64 // hi - lo when it was chosen
	ok     bool
}

func (a *aligned) err() int64 { return max(a.hi-a.offset, a.offset-a.lo, 1) }

// meeting is one sampled collective, by node.
type meeting struct {
	key   arrivalKey
	at    int64 // when it was first heard of
	spans []nodeSpan
}

// nodeSpan is the last start and the first end of a node's members, by its monotonic clock,
// each moved by the error of its stamp to where it bounds less.
type nodeSpan struct {
	node                int32
	lastStart, firstEnd int64
}

func newJobClock() jobClock { return jobClock{reference: -1, of: map[arrivalKey]*meeting{}} }

// meet takes in one rank's part in a sampled collective.
func (j *jobClock) meet(n int32, c int32, w *wire.Arrival, now int64) {
	if !record.CollKind(w.Coll).Synchronizes() || w.MonoStartedNs == 0 || w.MonoEndedNs < w.MonoStartedNs || w.StampErrorNs < 0 {
		return
	}
	k := arrivalKey{c, w.Seq}
	m := j.of[k]
	if m == nil {
		m = &meeting{key: k, at: now}
		j.of[k], j.meetings = m, append(j.meetings, m)
	}
	i := slices.IndexFunc(m.spans, func(s nodeSpan) bool { return s.node == n })
	start, end := w.MonoStartedNs-w.StampErrorNs, w.MonoEndedNs+w.StampErrorNs
	if i < 0 {
		m.spans = append(m.spans, nodeSpan{n, start, end})
		j.cells++
	} else {
		m.spans[i].lastStart, m.spans[i].firstEnd = max(m.spans[i].lastStart, start), min(m.spans[i].firstEnd, end)
	}
	for len(j.meetings) > maxMeetings || j.cells > maxMeetingNodes {
		j.forget()
	}
}

// unmeet forgets a collective.
func (j *jobClock) unmeet(k arrivalKey) {
	if m := j.of[k]; m != nil {
		j.cells -= len(m.spans)
		m.spans = nil // it bounds nothing
	}
}

// forget drops half of the meetings, by shares of who tells of them.
func (j *jobClock) forget() {
	kept := thin(len(j.meetings), 1, func(i int) (int32, int64) {
		m := j.meetings[i]
		by := several
		if len(m.spans) == 1 {
			by = m.spans[0].node
		}
		return by, maxMeetingNodes + maxMeetings*int64(len(m.spans))
	})
	for i, m := range j.meetings {
		if !kept[i] {
			j.cells -= len(m.spans)
			delete(j.of, m.key)
		}
	}
	j.meetings = keep(j.meetings, kept)
}

// replaced forgets a node whose monotonic clock is another one now.
func (j *jobClock) replaced(n int32) {
	j.clear()
	if int(n) < len(j.nodes) {
		j.nodes[n] = aligned{}
	}
	if n == j.reference {
		j.reference = -1
	}
}

// clear forgets all collectives: communicators were renumbered, or a clock was replaced.
func (j *jobClock) clear() {
	j.meetings, j.cells = nil, 0
	clear(j.of)
}

// align brings all nodes' offsets up to date.
func (s *state) align(now int64) {
	j := &s.clock
	if now-j.at < alignEvery {
		return
	}
	before := j.at
	j.at = now
	for len(j.nodes) < len(s.nodes) {
		j.nodes = append(j.nodes, aligned{})
	}
	if !s.chooseReference() {
		for i := range j.nodes {
			j.nodes[i] = aligned{}
		}
		return
	}
	own := &s.nodes[j.reference].clock
	moved := j.lead(own, now-before)
	j.offset += moved
	was := make([]aligned, len(j.nodes))
	for n := range j.nodes {
		a := &j.nodes[n]
		a.lo, a.hi, a.offset = a.lo+moved, a.hi+moved, a.offset+moved // with the reference
		s.bound(int32(n), own, now)
		was[n] = *a
	}
	j.tighten(now)
	for n := range j.nodes {
		a := &j.nodes[n]
		if a.lo > a.hi { // its collectives contradict each other, or what its agent shows
			*a = was[n]
			j.contradictions++
		}
		a.choose()
		s.nodes[n].clock.use(a)
		s.ev.Nodes[n].MapError = s.nodes[n].clock.err()
	}
}

// chooseReference keeps the reference while its agent is there, and reports whether there is one.
func (s *state) chooseReference() bool {
	j := &s.clock
	usable := func(n int32) bool {
		return s.nodes[n].stream != nil && !s.ev.Nodes[n].Lost && s.nodes[n].clock.ok && s.nodes[n].clock.haveLo
	}
	if j.reference >= 0 && usable(j.reference) {
		return true
	}
	best := int32(-1)
	for n := range s.nodes {
		if n := int32(n); usable(n) && (best < 0 || s.nodes[n].clock.width < s.nodes[best].clock.width) {
			best = n
		}
	}
	j.reference = best
	if best < 0 {
		return false
	}
	if a := &j.nodes[best]; a.ok { // the clock goes on where it was, as well as that is known
		e := a.err()
		j.offset = a.offset
		for n := range j.nodes {
			j.nodes[n].lo, j.nodes[n].hi = j.nodes[n].lo-e, j.nodes[n].hi+e
		}
		return true
	}
	j.offset = s.nodes[best].clock.offset
	for n := range j.nodes {
		j.nodes[n].ok = false
	}
	return true
}

// lead returns by how much the job's clock is to be led back, because the reference's
// messages prove that it is not the master's any more.
func (j *jobClock) lead(reference *clockMap, since int64) (d int64) {
	age := loosened(j.at - reference.at)
	switch lo, hi := reference.lo-age, reference.hi+age; {
	case j.offset < lo:
		d = lo - j.offset
	case j.offset > hi:
		d = hi - j.offset
	}
	j.slewing = d != 0
	if d > maxSlew || d < -maxSlew {
		for n := range j.nodes {
			j.nodes[n].ok = false
		}
		return d
	}
	step := int64(slew * float64(min(max(since, 0), toldWithin)))
	return min(max(d, -step), step)
}

// bound makes a node's bounds anew from those before, which loosen with age, and from its
// agent's messages.
func (s *state) bound(n int32, reference *clockMap, now int64) {
	j := &s.clock
	a, c := &j.nodes[n], &s.nodes[n].clock
	if n == j.reference {
		*a = aligned{lo: j.offset, hi: j.offset, at: now, offset: j.offset, ok: true}
		return
	}
	if !c.ok || !c.haveLo {
		*a = aligned{}
		return
	}
	age, theirs := loosened(now-c.at), loosened(now-reference.at)
	lo := c.lo - age + (j.offset - reference.hi - theirs)
	hi := c.hi + age + (j.offset - reference.lo + theirs)
	if a.ok {
		older := loosened(now - a.at)
		if l, h := max(lo, a.lo-older), min(hi, a.hi+older); l <= h {
			lo, hi = l, h
		} else {
			a.ok = false // a clock was stepped or stood still
		}
	}
	a.lo, a.hi, a.at = lo, hi, now
}

// tighten tightens bounds by what meetings say.
func (j *jobClock) tighten(now int64) {
	known := func(s *nodeSpan) *aligned {
		if int(s.node) >= len(j.nodes) || j.nodes[s.node].at != now {
			return nil
		}
		return &j.nodes[s.node]
	}
	for range alignRounds {
		changed := false
		for _, m := range j.meetings {
			lo, hi, nodes := -unbounded, unbounded, 0
			for i := range m.spans {
				if a := known(&m.spans[i]); a != nil {
					lo, hi = max(lo, a.lo+m.spans[i].lastStart), min(hi, a.hi+m.spans[i].firstEnd)
					nodes++
				}
			}
			slack := loosened(now - m.at)
			if nodes < 2 || lo-slack > hi+slack {
				continue
			}
			for i := range m.spans {
				a := known(&m.spans[i])
				if a == nil {
					continue
				}
				if h := hi + slack - m.spans[i].lastStart; h < a.hi {
					a.hi, changed = h, true
				}
				if l := lo - slack - m.spans[i].firstEnd; l > a.lo {
					a.lo, changed = l, true
				}
			}
		}
		if !changed {
			return
		}
	}
}

const unbounded = int64(1) << 62

// choose keeps the offset in use until it is proved wrong or one twice as good is known, so
// that differences of mapped times carry no jitter.
func (a *aligned) choose() {
	if a.at == 0 {
		return
	}
	if w := a.hi - a.lo; !a.ok || a.offset < a.lo || a.offset > a.hi || w < a.width/2 {
		a.offset, a.width, a.ok = a.lo+w/2, w, true
	}
}

// jobClock is what an agent is told of the job's clock, nil when it is not known.
func (s *state) jobClock(n int32, now int64) *wire.JobClock {
	if int(n) >= len(s.clock.nodes) || !s.clock.nodes[n].ok {
		return nil
	}
	a := &s.clock.nodes[n]
	err := a.err() + loosened(now-s.clock.at)
	if s.clock.slewing {
		err += int64(slew * float64(toldWithin))
	}
	return &wire.JobClock{OffsetNs: a.offset, ErrorNs: err}
}
