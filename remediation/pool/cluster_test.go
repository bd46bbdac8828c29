package pool

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// TestCluster plays 30 days of a cluster of 1,000 nodes: seven jobs of 128 nodes with 8 spares
// each, 48 nodes that come in later as further spares, 200 faults at random times, some of them
// two at once, some of spares, some of nodes that are out already. Repairs take days and
// fail now and then; whoever acts is killed now and then between the answer and the deed, and
// asks again. A second set of books is kept by other rules, of what was seen to
// happen alone, and both must agree after each event.
func TestCluster(t *testing.T) {
	for _, empty := range []Empty{EmptyInPlace, EmptyWait} {
		for seed := range uint64(1) {
			t.Run(fmt.Sprintf("%s/%d", empty, seed), func(t *testing.T) { newTown(t, empty, seed).play() })
		}
	}
}

type town struct {
	t     *testing.T
	rnd   *rand.Rand
	clock *clock
	jobs  []*townJob
	due   []townEvent

	touched map[*townJob]bool // by the last event

	faults, swaps, empty, refused, repeats, failed int
}

type townJob struct {
	name  string
	c     Config
	store *Memory
	p     *Pool
	// The second books.
	works, stands, out map[string]bool
	waits              []string // actions
	suspectOf          map[string]string
	acts               int
}

type townEvent struct {
	at time.Time
	do func()
}

func newTown(t *testing.T, empty Empty, seed uint64) *town {
	w := &town{t: t, rnd: rand.New(rand.NewPCG(seed, 17)), clock: newClock(), touched: map[*townJob]bool{}}
	for i := range 7 {
		j := &townJob{name: fmt.Sprintf("job%d", i), c: Config{Need: 128, Empty: empty}, store: &Memory{},
			works: map[string]bool{}, stands: map[string]bool{}, out: map[string]bool{}, suspectOf: map[string]string{}}
		var list []string
		for n := range 136 {
			list = append(list, fmt.Sprintf("%s-n%d", j.name, n))
		}
		w.open(j)
		w.must(j.p.Sync(list))
		for _, u := range list {
			j.stands[u] = true
		}
		for _, u := range j.p.State().In(Active) {
			delete(j.stands, u)
			j.works[u] = true
		}
		w.jobs = append(w.jobs, j)
	}
	return w
}

func (w *town) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *town) open(j *townJob) {
	p, err := OpenAt(j.c, j.store, w.clock.now)
	w.must(err)
	j.p = p
}

func (w *town) in(d time.Duration, do func()) {
	w.due = append(w.due, townEvent{w.clock.t.Add(d), do})
}

func (w *town) play() {
	const days = 30 * 24 * time.Hour
	for range 200 {
		at := time.Duration(w.rnd.Int64N(int64(days)))
		w.in(at, w.fault)
	}
	for i := range 48 { // further nodes, to the jobs in turn
		w.in(days/2, func() {
			j := w.jobs[i%len(w.jobs)]
			name := fmt.Sprintf("extra%d", i)
			list := []string{name}
			for u := range j.p.Units() {
				list = append(list, u)
			}
			w.must(j.p.Sync(list))
			j.stands[name] = true
			w.settle(j)
		})
	}
	for len(w.due) > 0 {
		slices.SortStableFunc(w.due, func(a, b townEvent) int { return a.at.Compare(b.at) })
		e := w.due[0]
		w.due = w.due[1:]
		w.clock.t = e.at
		e.do()
		w.compare(w.jobs[w.rnd.IntN(len(w.jobs))])
		for j := range w.touched {
			w.compare(j)
		}
		clear(w.touched)
		if w.t.Failed() {
			w.t.FailNow()
		}
	}
	for _, j := range w.jobs { // everything was repaired in the end
		w.compare(j)
		if len(j.out) != 0 || len(j.works) != j.c.Need || len(j.waits) != 0 {
			w.t.Errorf("%s: %d work, %d are out, %d wait", j.name, len(j.works), len(j.out), len(j.waits))
		}
	}
	if w.faults < 200 || w.swaps == 0 || w.repeats == 0 || w.failed == 0 {
		w.t.Errorf("nothing happened: %+v", *w)
	}
	w.t.Logf("%d faults: %d swaps, %d found no spare, %d refused; %d asked again, %d checks failed", w.faults, w.swaps, w.empty, w.refused, w.repeats, w.failed)
}

// fault blames a node, or two of one job at once.
func (w *town) fault() {
	j := w.jobs[0]
	if w.rnd.IntN(3) > 0 { // the first job is the unlucky one: its pool runs empty
		j = w.jobs[w.rnd.IntN(len(w.jobs))]
	}
	n := 1
	if w.rnd.IntN(10) == 0 {
		n = 2
	}
	for range n {
		var from map[string]bool
		switch k := w.rnd.IntN(20); {
		case k == 0 && len(j.stands) > 0:
			from = j.stands
		case k == 1 && len(j.out) > 0:
			from = j.out
		default:
			from = j.works
		}
		w.blame(j, pick(w.rnd, from))
	}
}

func pick(rnd *rand.Rand, from map[string]bool) string {
	var list []string
	for u := range from {
		list = append(list, u)
	}
	slices.SortFunc(list, cmp.Compare)
	return list[rnd.IntN(len(list))]
}

func (w *town) blame(j *townJob, unit string) {
	w.touched[j] = true
	w.faults++
	j.acts++
	action := fmt.Sprintf("%s-%d", j.name, j.acts)
	a, err := j.p.Take(unit, action, "fault")
	w.must(err)
	for w.rnd.IntN(3) == 0 { // killed before it was done, or told of it twice
		w.open(j)
		w.clock.t = w.clock.t.Add(time.Second)
		w.repeats++
		again, err := j.p.Take(unit, action, "fault")
		w.must(err)
		again.At, again.Detail = a.At, a.Detail // of what was refused
		if again != a {
			w.t.Fatalf("%s: %+v, and before %+v", action, again, a)
		}
	}
	// The second books, by what was seen.
	switch a.Kind {
	case Swap:
		w.swaps++
		if !j.works[unit] || !j.stands[a.Spare] {
			w.t.Fatalf("%+v: the suspect worked %v, the spare stood by %v", a, j.works[unit], j.stands[a.Spare])
		}
		delete(j.works, unit)
		delete(j.stands, a.Spare)
		j.works[a.Spare] = true
	case Removed:
		if !j.stands[unit] {
			w.t.Fatalf("%+v was no spare", a)
		}
		delete(j.stands, unit)
	case Wait:
		w.empty++
		if !j.works[unit] || len(j.stands) > 0 {
			w.t.Fatalf("%+v, and %d stand by", a, len(j.stands))
		}
		delete(j.works, unit)
		j.waits, j.suspectOf[action] = append(j.waits, action), unit
	case InPlace:
		w.empty++
		if !j.works[unit] || len(j.stands) > 0 {
			w.t.Fatalf("%+v, and %d stand by", a, len(j.stands))
		}
		return
	case Refused:
		w.refused++
		if most := (len(j.works) + len(j.stands) + len(j.out)) / 10; len(j.out) < most {
			w.t.Fatalf("%+v, and %d are out, at most %d may be", a, len(j.out), most)
		}
		return
	case Already:
		if !j.out[unit] {
			w.t.Fatalf("%+v is not out", a)
		}
		return
	}
	j.out[unit] = true
	w.in(time.Hour+time.Duration(w.rnd.ExpFloat64()*float64(36*time.Hour)), func() { w.repair(j, unit) })
}

// repair brings a unit back through its check.
func (w *town) repair(j *townJob, unit string) {
	w.touched[j] = true
	w.must(j.p.Return(unit, "repaired"))
	if w.rnd.IntN(2) == 0 {
		w.open(j) // killed during the check, which is done again
	}
	w.in(10*time.Minute, func() {
		due, err := j.p.Probation()
		w.must(err)
		if !slices.Contains(due, unit) {
			w.t.Fatalf("%s is to be checked, and %v are", unit, due)
		}
		if w.rnd.IntN(5) == 0 {
			w.failed++
			w.must(j.p.Failed(unit, "slow edge"))
			w.in(12*time.Hour, func() { w.repair(j, unit) })
			return
		}
		w.must(j.p.Passed(unit, "preflight"))
		delete(j.out, unit)
		j.stands[unit] = true
		w.settle(j)
	})
}

// settle has those who wait ask again.
func (w *town) settle(j *townJob) {
	w.touched[j] = true
	for len(j.waits) > 0 && len(j.stands) > 0 {
		action := j.waits[0]
		a, err := j.p.Take(j.suspectOf[action], action, "again")
		w.must(err)
		if a.Kind != Swap || !j.stands[a.Spare] {
			w.t.Fatalf("%s waits, and %d stand by: %+v", action, len(j.stands), a)
		}
		j.waits = j.waits[1:]
		delete(j.stands, a.Spare)
		j.works[a.Spare] = true
	}
}

func (w *town) compare(j *townJob) {
	w.t.Helper()
	s := j.p.State()
	for _, b := range []struct {
		what  string
		mine  map[string]bool
		place []Place
	}{{"work", j.works, []Place{Active}}, {"stand by", j.stands, []Place{Spare}}, {"are out", j.out, []Place{Suspect, Probation}}} {
		n := 0
		for _, p := range b.place {
			for _, u := range s.In(p) {
				n++
				if !b.mine[u] {
					w.t.Errorf("%s: %s is %s, and is not among those that %s", j.name, u, p, b.what)
				}
			}
		}
		if n != len(b.mine) {
			w.t.Errorf("%s: %d %s, want %d", j.name, n, b.what, len(b.mine))
		}
	}
	if len(j.works)+len(j.waits) != j.c.Need {
		w.t.Errorf("%s: %d work and %d are waited for, of %d", j.name, len(j.works), len(j.waits), j.c.Need)
	}
}
