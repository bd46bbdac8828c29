package kubernetes

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// bed is a cluster that a campaign is played on: the API server of this package's tests, or
// a real one with KWOK's nodes.
type bed interface {
	cluster(c *campaign)            // what the remediator reaches it by, and its times
	nodes() map[string]*corev1.Node // at least the pool's
	all() map[string]*corev1.Node
	job() jobView
	end(rank int)               // the rank's process is gone
	power(node string, on bool) // on: its kubelet is heard
	preflights(verdict func(node string) bool)
	uncordon(node string)
	// killServer kills the API server, with what it was answering, and starts it again after a while.
	killServer(down time.Duration)
	// rest is a moment between two looks.
	rest()
}

// jobView is the job as the cluster has it.
type jobView struct {
	attempt int            // that its owner wants
	own     int            // restarts that its controller has counted as its own
	on      map[int]string // nodes of the attempt's running pods, by rank
	placed  []string       // nodes of all its pods
	stale   int            // pods of older attempts, or being deleted
	pending int            // pods without a node
}

// ill is what is wrong with a node.
type ill string

const (
	slow ill = "slow"
	off  ill = "power loss"
	cut_ ill = "cut off" // its ranks run on, and nobody hears them
)

// campaign plays random faults on a bed over days of a calendar that jumps from one event to
// the next. What is wrong with which node it knows, since it has done that; a second set of
// books is kept by what was decided, and compared with the cluster's nodes after each fault.
type campaign struct {
	t    *testing.T
	bed  bed
	seed uint64
	rnd  *rand.Rand
	need int
	pool string

	calendar calendar
	began    time.Time
	book     *books

	mu     sync.Mutex           // of ill and asked, for the fencer
	ill    map[string]ill       // nodes
	passed map[string]bool      // slow ones that preflight or a person has found good
	hurt   map[string]time.Time // nodes that something is wrong with (zero), or was until then
	asked  map[string]int       // of cut nodes' ranks, whether they have ended
	hung   map[int]int          // rank -> attempt
	due    []event
	r      *process // the remediator
	master *master
	counts counts
	// patience is how long the job may want a node before the calendar goes on.
	patience time.Duration
	// again is when the master tells again of what has led to nothing.
	again time.Duration
	// end is when no more faults are made, however many were asked for; zero: never.
	end    time.Time
	faults int
	seen   map[string]int // what happened, by kind
	costs  []cost
	most   int // nodes out at a time

	deaths  *deaths
	past    *past
	victims []string      // who is killed in the middle of each fault; none: the remediator, in some
	down    time.Duration // at most, of who was killed
	kills   int           // of each victim, after which it is enough; 0: the faults are counted
}

type event struct {
	at time.Time
	do func()
}

func newCampaign(t *testing.T, b bed, seed uint64, need int, pool string) *campaign {
	c := &campaign{
		t: t, bed: b, seed: seed, rnd: rand.New(rand.NewPCG(seed, 17)), need: need, pool: pool,
		ill: map[string]ill{}, passed: map[string]bool{}, hurt: map[string]time.Time{}, asked: map[string]int{}, hung: map[int]int{}, seen: map[string]int{},
	}
	c.began = c.calendar.now()
	c.master = &master{c: c}
	c.deaths, c.past = newDeaths(c), newPast(c)
	return c
}

func (c *campaign) fatalf(format string, args ...any) {
	c.t.Helper()
	c.t.Fatalf("seed %d, fault %d, day %.1f: %s", c.seed, c.faults, c.calendar.now().Sub(c.began).Hours()/24, fmt.Sprintf(format, args...))
}

func (c *campaign) must(err error) {
	c.t.Helper()
	if err != nil {
		c.fatalf("%v", err)
	}
}

// play plays so many faults. Gaps are of hours; now and then there is a bad day, on which
// one follows the other until no spare is left, or a bad minute, in which a breaker opens.
func (c *campaign) play(faults int) {
	c.start()
	defer c.stop()
	c.openBook()
	c.settle()
	c.compare()
	bad := 0
	for c.more(faults) {
		gap := time.Duration(c.rnd.ExpFloat64() * float64(4*time.Hour))
		switch {
		case bad > 0:
			bad--
			gap = time.Duration(c.rnd.IntN(30)+15) * time.Minute
			if c.seen["breaker opened"] == 0 {
				gap = 2 * time.Minute
			}
		case c.faults%60 == 8:
			bad = 16
		}
		c.pass(gap)
		before, killed := c.counts.snapshot(), c.deaths.all()
		began, actions, returns := time.Now(), c.acts(), c.returns()
		what := c.fault(bad > 0)
		c.settle()
		c.compare()
		c.deaths.callOff()
		if len(c.victims) == 0 || c.deaths.all() == killed { // else requests are repeated until they are answered
			c.bound(what, before, began, c.acts()-actions, c.returns()-returns)
		} else if testing.Verbose() {
			c.t.Logf("fault %d, day %.2f: %s: %.1f s, killed so far: %s", c.faults, c.calendar.now().Sub(c.began).Hours()/24, what, time.Since(began).Seconds(), c.deaths.summary())
		}
		if c.t.Failed() {
			c.t.FailNow()
		}
	}
	c.recover()
}

func (c *campaign) more(faults int) bool {
	if !c.end.IsZero() && time.Now().After(c.end) {
		return false
	}
	if c.kills > 0 {
		_, n := c.deaths.least(c.victims)
		return n < c.kills
	}
	return c.faults < faults
}

func (c *campaign) returns() int {
	return c.seen["node returned"] + c.seen["preflight passed"] + c.seen["preflight failed"]
}

// openBook opens the second books with the nodes as they are.
func (c *campaign) openBook() {
	v := c.bed.job()
	var list []string
	for name, n := range c.bed.nodes() {
		if poolName(n) == c.pool {
			list = append(list, name)
		}
	}
	var err error
	c.book, err = openBooks(c.need, list, v.placed, c.calendar.now())
	c.must(err)
}

// fault makes one fault, or two at once, and says which.
func (c *campaign) fault(bad bool) string {
	n := 1
	if c.rnd.IntN(8) == 0 {
		n = 2
	}
	want := c.dooms()
	var what []string
	for range n {
		what = append(what, c.one(bad, want))
		want = ""
	}
	if n == 2 {
		c.seen["two at once"]++
	}
	return strings.Join(what, " and ")
}

func (c *campaign) one(bad bool, want string) string {
	c.faults++
	v := c.bed.job()
	healthy := slices.DeleteFunc(slices.Sorted(maps.Keys(v.on)), func(r int) bool { return c.ill[v.on[r]] != "" || c.hung[r] == v.attempt+1 })
	rank := healthy[c.rnd.IntN(len(healthy))]
	node := v.on[rank]
	k := c.rnd.IntN(20)
	if bad && k < 8 {
		k = 10 // nodes
	}
	if want == string(cut_) {
		k = 17
	}
	what := ""
	switch {
	case k < 3:
		what = "rank process gone"
		c.hung[rank] = v.attempt + 1
		c.master.gone(rank, node, v.attempt)
		c.bed.end(rank)
	case k < 6:
		what = "rank hangs"
		c.hung[rank] = v.attempt + 1
	case k < 13:
		what = "slow node"
		c.fall(node, slow)
	case k < 19:
		what = string(off)
		kind := off
		if k > 15 {
			what, kind = string(cut_), cut_
		}
		c.off(node, kind)
	default:
		spares := slices.DeleteFunc(c.book.in(spare), func(s string) bool { return c.ill[s] != "" })
		if len(spares) == 0 {
			c.hung[rank] = v.attempt + 1
			what = "rank hangs"
			break
		}
		what, node = "spare loses power", spares[c.rnd.IntN(len(spares))]
		c.off(node, off)
	}
	c.seen[what]++
	return what
}

func (c *campaign) off(node string, kind ill) {
	c.fall(node, kind)
	c.bed.power(node, false)
	c.in(time.Duration((0.5+c.rnd.ExpFloat64()*5)*float64(time.Hour)), func() {
		c.cure(node)
		c.bed.power(node, true)
		c.seen["node repaired"]++
	})
}

func (c *campaign) fall(node string, kind ill) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ill[node], c.hurt[node] = kind, time.Time{}
}

func (c *campaign) cure(node string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.ill, node)
	delete(c.asked, node)
	if _, ok := c.hurt[node]; ok {
		c.hurt[node] = time.Now().Add(2 * time.Minute) // until everybody has heard of it
	}
}

func (c *campaign) in(d time.Duration, do func()) {
	c.due = append(c.due, event{c.calendar.now().Add(d), do})
}

// pass lets time go by, with what is due in it: repairs, persons, and nodes' probation.
func (c *campaign) pass(d time.Duration) {
	end := c.calendar.now().Add(d)
	for {
		next := end
		for _, e := range c.due {
			if e.at.Before(next) {
				next = e.at
			}
		}
		for _, n := range c.bed.nodes() { // an exclusion's end
			if t, ok := marked(n); ok && t.Why == "suspect" && t.Until.Before(next) {
				next = t.Until.Add(time.Second)
			}
		}
		if c.calendar.now().Before(next) {
			c.calendar.set(next)
		}
		c.happen()
		c.settle()
		if !next.Before(end) {
			return
		}
	}
}

func (c *campaign) happen() {
	now := c.calendar.now()
	var left, ripe []event
	for _, e := range c.due {
		if e.at.After(now) {
			left = append(left, e)
		} else {
			ripe = append(ripe, e)
		}
	}
	c.due = left
	slices.SortFunc(ripe, func(a, b event) int { return a.at.Compare(b.at) })
	for _, e := range ripe {
		e.do()
	}
}

// settle is the time that the remediator and the cluster need, bounded: until the job runs
// as a whole on nodes that nothing is wrong with, and every node that is to return has.
func (c *campaign) settle() {
	c.t.Helper()
	end, stuck := time.Now().Add(20*time.Minute), time.Now()
	for calm := 0; calm < 2; c.bed.rest() {
		c.r.revive()
		c.happen()
		c.bed.preflights(c.verdict)
		v, nodes := c.bed.job(), c.bed.nodes()
		c.follow(nodes)
		why := c.unsettled(&v, nodes)
		if why == "" {
			calm++
			continue
		}
		calm = 0
		c.master.alert(&v)
		if c.r.refused() {
			c.seen["breaker opened"]++
			c.calendar.add(90 * time.Minute) // until a person closes it
			c.r.closeBreakers()
			c.master.anew()
		}
		// Nothing is left to run on: repairs, probation and time will bring it.
		if v.pending > 0 && c.spares(nodes) == 0 && time.Since(stuck) > c.patience {
			c.seen["hours waited for a node"]++
			stuck = time.Now()
			c.calendar.add(time.Hour)
		}
		if time.Now().After(end) {
			c.fatalf("not settled: %s\njob: %+v\nill: %v\n%s", why, v, c.ill, c.r.journal())
		}
	}
}

func (c *campaign) spares(nodes map[string]*corev1.Node) (n int) {
	for name, node := range nodes {
		if poolName(node) == c.pool && standsBy(node) && !takenOut(node) && c.ill[name] == "" {
			n++
		}
	}
	return n
}

// unsettled says what is still to come, "" when nothing is.
func (c *campaign) unsettled(v *jobView, nodes map[string]*corev1.Node) string {
	if len(v.on) != c.need || v.stale > 0 || v.pending > 0 {
		return fmt.Sprintf("%d of %d ranks run, %d pods are left of former attempts, %d have no node", len(v.on), c.need, v.stale, v.pending)
	}
	for rank, at := range c.hung {
		if at-1 == v.attempt {
			return fmt.Sprintf("rank %d hangs", rank)
		}
		delete(c.hung, rank)
	}
	for _, n := range v.on {
		if c.ill[n] != "" {
			return fmt.Sprintf("node %s (%s) is used", n, c.ill[n])
		}
	}
	for name, n := range nodes {
		t, ok := marked(n)
		switch {
		case !ok:
		case t.Why == "silent" && c.ill[name] == "":
			return fmt.Sprintf("node %s is heard, and still out", name)
		case t.Why == "suspect" && c.calendar.now().After(t.Until):
			return fmt.Sprintf("node %s has been out for long enough", name)
		case t.Cordoned && !n.Spec.Unschedulable:
			return fmt.Sprintf("node %s was uncordoned by a person, and is still out", name)
		}
	}
	if who := c.deaths.absent(); who != "" {
		return "the " + who + " is not back yet"
	}
	if open := c.r.open(); open > 0 {
		return fmt.Sprintf("%d alerts are open", open)
	}
	return ""
}

// verdict is what a node's preflight finds: it passes when what was wrong is repaired.
func (c *campaign) verdict(node string) bool {
	if c.rnd.IntN(5) == 0 {
		c.seen["preflight failed"]++
		return false
	}
	c.seen["preflight passed"]++
	c.passed[node] = true
	return true
}

// recover lets everything be repaired and returned, and counts what there is.
func (c *campaign) recover() {
	for range 400 {
		if c.book.count(out) == 0 && len(c.due) == 0 {
			break
		}
		c.pass(12 * time.Hour)
		c.compare()
	}
	if b := c.book; b.count(active) != c.need || b.count(out) != 0 {
		c.fatalf("all was repaired: %d work, %d stand by, %d are out", b.count(active), b.count(spare), b.count(out))
	}
	c.r.bounds()
}
