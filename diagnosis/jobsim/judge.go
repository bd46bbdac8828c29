package jobsim

import (
	"cmp"
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// Truth is what was broken, and which words for it are right. A verdict is right
// when its class is one of Classes and its first culprit is one of those listed. Where
// nodes have one rank, the rank and its node are two names of one culprit.
type Truth struct {
	Fault   int // index into Config.Faults, -1: nothing is broken
	Classes []diagnosis.Class
	Ranks   []int32    // CulpritRank of any of these
	Nodes   []int32    // CulpritNode
	Pairs   [][2]int32 // CulpritConnection from one to the other
	Between [][2]int32 // CulpritConnection between ranks of these nodes
	Touches []int32    // CulpritConnection, CulpritSource or CulpritDest with an end at one of these ranks
	Sources []int32    // CulpritSource
	Dests   []int32    // CulpritDest
	// Guilty are further nodes of which a culprit does no harm to the innocent.
	Guilty []int32
	// Want is the level that a right verdict has to reach; 0: saying nothing is right, too.
	Want   diagnosis.Level
	Within time.Duration // after the onset
	Steps  int           // and so many of the job's, which take longer by then: up to longer more
}

// Scenario is one run: a job, what breaks, and for how long it is watched.
type Scenario struct {
	Name   string // of the row in tables
	Seed   uint64
	Config Config
	Truths []Truth // one a fault that counts; empty: healthy
	Length time.Duration
	Step   time.Duration // estimated length of a step
}

// right reports whether a verdict says what is so.
func (t *Truth) right(s *Scenario, v *diagnosis.Verdict) bool {
	if !slices.Contains(t.Classes, v.Class) {
		return false
	}
	c := &v.Culprits[0]
	node := func(rank int32) int32 { return rank / int32(s.Config.Cluster.RanksPerNode) }
	alone := s.Config.Cluster.RanksPerNode == 1
	is := func(n int32) bool { return NodeName(int(n)) == c.Node }
	switch c.Kind {
	case diagnosis.CulpritRank:
		return slices.Contains(t.Ranks, c.Rank) || alone && slices.Contains(t.Nodes, c.Rank)
	case diagnosis.CulpritNode:
		return slices.ContainsFunc(t.Nodes, is) || alone && slices.ContainsFunc(t.Ranks, is)
	case diagnosis.CulpritSource:
		return slices.Contains(t.Sources, c.Rank) || slices.Contains(t.Touches, c.Rank)
	case diagnosis.CulpritDest:
		return slices.Contains(t.Dests, c.Rank) || slices.Contains(t.Touches, c.Rank)
	case diagnosis.CulpritConnection:
		return slices.Contains(t.Pairs, [2]int32{c.Rank, c.Peer}) || slices.Contains(t.Between, [2]int32{node(c.Rank), node(c.Peer)}) ||
			slices.Contains(t.Touches, c.Rank) || slices.Contains(t.Touches, c.Peer)
	}
	return false
}

// guilty are the nodes that may be taken out of the job for this fault.
func (t *Truth) guilty(s *Scenario) map[int32]bool {
	n := map[int32]bool{}
	node := func(rank int32) int32 { return rank / int32(s.Config.Cluster.RanksPerNode) }
	for _, list := range [][]int32{t.Ranks, t.Touches, t.Sources, t.Dests} {
		for _, r := range list {
			n[node(r)] = true
		}
	}
	for _, p := range t.Pairs {
		n[node(p[0])], n[node(p[1])] = true, true
	}
	for _, p := range t.Between {
		n[p[0]], n[p[1]] = true, true
	}
	for _, list := range [][]int32{t.Nodes, t.Guilty} {
		for _, x := range list {
			n[x] = true
		}
	}
	return n
}

// innocent reports whether a verdict that may lead to an exclusion names somebody
// who has nothing to do with any fault: a rank or a node, on a node where nothing
// is broken. A connection excludes nobody,
// nor does a verdict that cannot tell who.
func (s *Scenario) innocent(v *diagnosis.Verdict) bool {
	if v.Undetermined != "" {
		return false // it says itself that it is no reason to exclude anybody
	}
	guilty := map[int32]bool{}
	for i := range s.Truths {
		for n := range s.Truths[i].guilty(s) {
			guilty[n] = true
		}
	}
	for i := range v.Culprits {
		switch c := &v.Culprits[i]; c.Kind {
		case diagnosis.CulpritRank, diagnosis.CulpritSource, diagnosis.CulpritDest:
			if !guilty[c.Rank/int32(s.Config.Cluster.RanksPerNode)] {
				return true
			}
		case diagnosis.CulpritNode:
			ok := false
			for n := range guilty {
				ok = ok || NodeName(int(n)) == c.Node
			}
			if !ok {
				return true
			}
		}
	}
	return false
}

// Said is one thing that was said: a verdict's key, class and first culprit, from
// when on, and how sure. Another class or culprit under the same key is said anew.
type Said struct {
	diagnosis.Verdict                        // as it was when it was surest
	Suspected, Confirmed, Last time.Duration // since the job's start; Confirmed is 0 when it never was
	Right                      int           // 1 + the truth that it tells, 0: none
	Innocent                   bool          // it was confirmed against innocents
}

// Found is what was said of one truth.
type Found struct {
	Onset                time.Duration // since the job's start; 0: the fault was never felt
	Suspected, Confirmed time.Duration // after the onset, -1: never
	Class                bool          // a verdict of the right class was confirmed, whomever it named
	First                *Said         // the first confirmed verdict since the onset
	Steps                int           // the job's, from the onset to Confirmed
}

// Outcome is how a scenario went.
type Outcome struct {
	Scenario *Scenario
	Said     []Said
	Found    []Found // parallel to Scenario.Truths
	Ran      time.Duration
	Passes   int
	PassNs   int64 // all passes, by the clock that Play was given
	PassMax  int64
	Steps    int
	// Suspicions were told after the first ten minutes of a healthy run; Counted is how long that was.
	Suspicions int
	Counted    time.Duration
	Suspicious int // 1 + the first of them in Said, 0: there is none
}

// Settled is how much of a healthy run does not count for suspicions.
const Settled = 10 * time.Minute

// closeAfter is how long a verdict must be gone before its incident closes, as a
// master has it: told again later, it is another suspicion.
const closeAfter = 3 * time.Second

const passEvery = 100 * time.Millisecond

// after is for how long a run is watched once all is found: what is said then counts, too.
const after = 6 * time.Second

// Play runs a scenario through diagnose, which gets the evidence as often as a
// master's engine does. now is read around each pass; nil: passes are not timed.
// watch, when it is not nil, sees every pass.
func Play(s *Scenario, diagnose func(*diagnosis.Evidence) []diagnosis.Verdict, now func() int64, watch func(*Job, []diagnosis.Verdict)) (*Outcome, error) {
	j, err := New(s.Config)
	if err != nil {
		return nil, err
	}
	o := &Outcome{Scenario: s, Found: make([]Found, len(s.Truths))}
	for i := range o.Found {
		o.Found[i].Suspected, o.Found[i].Confirmed = -1, -1
	}
	l := listener{o: o, s: s, j: j, onsetStep: make([]int, len(s.Truths)), at: map[saidID]int{}, open: map[string]time.Duration{}}
	until := s.Length
	for j.Now() < until {
		j.Advance(passEvery)
		ev := j.Evidence()
		var begin int64
		if now != nil {
			begin = now()
		}
		verdicts := diagnose(ev)
		if now != nil {
			d := now() - begin
			o.PassNs += d
			o.PassMax = max(o.PassMax, d)
		}
		o.Passes++
		l.onsets()
		for i := range verdicts {
			l.hear(&verdicts[i])
		}
		if watch != nil {
			watch(j, verdicts)
		}
		if over := o.over(s, j.Now(), j.Steps(), l.onsetStep); over > 0 {
			until = min(until, over)
		}
	}
	o.Ran, o.Steps = j.Now(), j.Steps()
	o.Counted = max(0, o.Ran-Settled)
	for i := range o.Found {
		f := &o.Found[i]
		for n := range o.Said {
			if x := &o.Said[n]; x.Confirmed > 0 && x.Confirmed >= f.Onset && f.Onset > 0 && (f.First == nil || x.Confirmed < f.First.Confirmed) {
				f.First = x
			}
		}
	}
	return o, nil
}

// listener keeps what is said in a run, and what of it is right.
type listener struct {
	o         *Outcome
	s         *Scenario
	j         *Job
	onsetStep []int                    // by truth: the job's step when it began
	at        map[saidID]int           // in o.Said
	open      map[string]time.Duration // incidents, by key: told last
}

type saidID struct {
	key   string
	class diagnosis.Class
	first diagnosis.Culprit
}

// onsets notes which faults are felt by now.
func (l *listener) onsets() {
	for i := range l.s.Truths {
		f := &l.o.Found[i]
		if on := l.j.Onset(l.s.Truths[i].Fault); on > 0 && f.Onset == 0 {
			f.Onset = time.Duration(on - Start)
			l.onsetStep[i] = l.j.Steps()
		}
	}
}

// hear takes in a verdict of the last pass.
func (l *listener) hear(v *diagnosis.Verdict) {
	o, s, now := l.o, l.s, l.j.Now()
	k := saidID{v.Key, v.Class, v.Culprits[0]}
	n, ok := l.at[k]
	if !ok {
		n = len(o.Said)
		l.at[k] = n
		o.Said = append(o.Said, Said{Verdict: *v, Suspected: now})
	}
	if last, ok := l.open[v.Key]; (!ok || now-last > closeAfter) && len(s.Truths) == 0 && now > Settled {
		o.Suspicions++
		o.Suspicious = cmp.Or(o.Suspicious, n+1)
	}
	l.open[v.Key] = now
	x := &o.Said[n]
	x.Last = now
	if v.Level == diagnosis.Confirmed && x.Confirmed == 0 {
		x.Confirmed, x.Verdict = now, *v
		x.Innocent = s.innocent(v)
	}
	for i := range s.Truths {
		t, f := &s.Truths[i], &o.Found[i]
		if f.Onset == 0 {
			continue
		}
		if v.Level == diagnosis.Confirmed && slices.Contains(t.Classes, v.Class) {
			f.Class = true
		}
		if !t.right(s, v) {
			continue
		}
		x.Right = i + 1
		if f.Suspected < 0 {
			f.Suspected = max(0, now-f.Onset)
		}
		if v.Level == diagnosis.Confirmed && f.Confirmed < 0 {
			f.Confirmed, f.Steps = max(0, now-f.Onset), l.j.Steps()-l.onsetStep[i]
		}
	}
}

// longer is for how long a slow job is watched beyond what its steps took before.
const longer = time.Minute

// over is when watching ends since all is found, 0: not yet.
func (o *Outcome) over(s *Scenario, now time.Duration, steps int, onset []int) time.Duration {
	if len(s.Truths) == 0 {
		return 0
	}
	last := time.Duration(0)
	for i := range o.Found {
		f := &o.Found[i]
		if s.Truths[i].Want == 0 {
			return 0
		}
		if f.Confirmed >= 0 {
			last = max(last, f.Onset+f.Confirmed+after)
			continue
		}
		t := &s.Truths[i]
		if f.Onset == 0 || now < f.Onset+t.Within || steps-onset[i] < t.Steps && now < f.Onset+t.Within+longer {
			return 0
		}
		last = max(last, now)
	}
	return last
}

// Missed reports whether a truth was not told as it should have been.
func (o *Outcome) Missed(i int) bool {
	t, f := &o.Scenario.Truths[i], &o.Found[i]
	switch {
	case f.Onset == 0 && t.Want > 0:
		return false // never felt: the scenario proves nothing
	case t.Want == diagnosis.Confirmed:
		return f.Confirmed < 0
	case t.Want == diagnosis.Suspected:
		return f.Suspected < 0
	}
	return false
}

// Felt reports whether the fault did anything to the job.
func (o *Outcome) Felt(i int) bool { return o.Found[i].Onset > 0 }

// Top1 reports whether the first verdict confirmed since the onset was right.
func (o *Outcome) Top1(i int) bool {
	f := &o.Found[i]
	return f.First != nil && f.First.Right > 0
}
