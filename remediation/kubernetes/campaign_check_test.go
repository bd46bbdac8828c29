package kubernetes

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/lockstep-ccl/lockstep/remediation"
	books "github.com/lockstep-ccl/lockstep/remediation/pool"
)

// follow keeps the second books: what the journal says was decided about units, and which
// nodes are silent, or have returned, which must have a reason that the campaign knows.
func (c *campaign) follow(nodes map[string]*corev1.Node) {
	c.t.Helper()
	entries := c.r.entries()
	for i := range entries {
		e := &entries[i]
		if e.Outcome != remediation.OutcomeDone || e.Kind != remediation.ActionExclude || c.master.booked(e.Alert.Incident) {
			continue
		}
		c.useBook(books.EmptyInPlace)
		answer, err := c.book.Take(e.Unit, e.Action, e.Alert.Reason)
		c.must(err)
		switch answer.Kind {
		case books.Swap:
			c.seen["spare taken for a slow node"]++
			if node := e.Unit; c.rnd.IntN(7) == 0 { // a person brings it back before its time
				c.in(time.Duration(1+c.rnd.IntN(20))*time.Hour, func() {
					if n := c.bed.nodes()[node]; isOut(n) && c.ill[node] == slow {
						c.seen["uncordoned by a person"]++
						c.passed[node] = true
						c.bed.uncordon(node)
					}
				})
			}
		case books.InPlace:
			c.seen["restarted in place, no spare"]++
			c.cure(e.Unit)
		case books.Already: // while the pool waited for a node
		default:
			c.fatalf("%s: %+v", e.Unit, answer)
		}
	}
	book := c.book.State()
	for _, name := range slices.Sorted(maps.Keys(nodes)) {
		n, u := nodes[name], book.Units[name]
		note, out := noteOf(n)
		switch {
		case out && note.Why == whySilent && u != nil && !u.Out():
			if k := c.ill[name]; k != off && k != cut_ {
				c.fatalf("node %s is out for being silent, and nothing is wrong with it (%q): %+v", name, k, note)
			}
			c.useBook(books.EmptyWait)
			answer, err := c.book.Take(name, note.Action+"/"+name, note.Reason)
			c.must(err)
			c.seen["silent node: "+string(answer.Kind)]++
		case !out && u != nil && u.Out():
			c.back(name, u)
		}
	}
	for id, a := range c.book.State().Actions { // those that wait ask again
		if a.Kind == books.Wait {
			_, err := c.book.Take(a.Suspect, id, "again")
			c.must(err)
		}
	}
}

// back is a node's return, for which there must be a reason.
func (c *campaign) back(name string, u *books.Unit) {
	switch {
	case c.ill[name] == off || c.ill[name] == cut_:
		c.fatalf("node %s has returned, and its kubelet is not heard", name)
	case c.ill[name] == slow && !c.passed[name]:
		c.fatalf("node %s has returned, and neither preflight nor a person has said so", name)
	}
	c.cure(name)
	delete(c.passed, name)
	c.must(c.book.Return(name, "repaired"))
	c.must(c.book.Passed(name, "returned"))
	c.seen["node returned"]++
}

func (m *master) booked(id string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	in := m.incidents[id]
	was := in.booked
	in.booked = true
	return was
}

// compare is the books against the cluster: every node of the pool is used, a spare, or
// out, as the books have it, and no other node was touched.
func (c *campaign) compare() {
	c.t.Helper()
	v, nodes := c.bed.job(), c.bed.all()
	c.follow(nodes)
	if err := c.book.Assign(v.placed); err != nil {
		c.fatalf("%v", err)
	}
	book := c.book.State()
	used := map[string]bool{}
	for _, n := range v.placed {
		used[n] = true
	}
	var wrong []string
	bad := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	silent, lags := 0, 0
	for _, name := range slices.Sorted(maps.Keys(nodes)) {
		n := nodes[name]
		note, noted := noteOf(n)
		out := isOut(n)
		if n.Labels[LabelPool] != c.pool {
			if noted || out || isSpare(n) || n.Annotations[Spare] != "" {
				bad("node %s is none of the pool's, and has %v %v", name, n.Annotations, n.Spec.Taints)
			}
			continue
		}
		place := books.Place("")
		switch {
		case out && !isSpare(n) && !used[name]:
			place = books.Suspect
		case !out && isSpare(n) && !used[name]:
			place = books.Spare
		case !out && !isSpare(n) && used[name]:
			place = books.Active
		}
		if place != book.Units[name].Place {
			bad("node %s: used %v, spare %v, out %v; the books say %s since %s (%s)", name, used[name], isSpare(n), out, book.Units[name].Place, book.Units[name].Since.Format(time.DateTime), book.Units[name].Why)
		}
		if out != noted || out != (n.Labels[Suspect] != "") || out != n.Spec.Unschedulable {
			bad("node %s: taint %v, annotation %v, label %q, cordon %v", name, out, noted, n.Labels[Suspect], n.Spec.Unschedulable)
		}
		if conditioned(n) != out {
			lags++
		}
		if !out {
			continue
		}
		if note.Why == whySilent {
			silent++
		}
		if !c.ailed[name] || note.Why == whySuspect && c.ill[name] != slow || note.Why == whySilent && c.ill[name] != off && c.ill[name] != cut_ {
			bad("node %s is out (%s), and what is wrong with it is %q", name, note.Why, c.ill[name])
		}
	}
	if silent > maxSilent {
		bad("%d nodes are out for being silent, at most %d may be", silent, maxSilent)
	}
	// A condition tells; a remediator that was killed before it has written one leaves it so.
	if kills := c.seen["remediator killed"]; lags > kills {
		bad("%d conditions do not tell that a node is out, after %d kills", lags, kills)
	}
	if got, most := v.attempt, c.acted()+v.own; got > most {
		bad("attempt %d: the journal has %d restarts, and the job's controller made %d", got, c.acted(), v.own)
	}
	if len(wrong) > 0 {
		c.fatalf("books and cluster differ:\n%s\n%s", strings.Join(wrong, "\n"), c.r.journal())
	}
	c.most = max(c.most, book.Out())
	if book.Count(books.Spare) == 0 {
		c.seen["times that the pool was empty"]++
	}
}

func conditioned(n *corev1.Node) bool {
	for _, x := range n.Status.Conditions {
		if x.Type == ConditionSuspect {
			return x.Status == corev1.ConditionTrue
		}
	}
	return false
}

// acts is how many actions were begun, acted how many have restarted the job.
func (c *campaign) acts() int {
	return len(slices.DeleteFunc(c.r.entries(), func(e remediation.Entry) bool { return e.Started.IsZero() }))
}

func (c *campaign) acted() int {
	return len(slices.DeleteFunc(c.r.entries(), func(e remediation.Entry) bool { return e.Outcome != remediation.OutcomeDone }))
}

// bounds reads the journal as the breakers do: never more actions, nor nodes taken out, in any hour than they allow.
func (p *process) bounds() {
	b := remediation.DefaultConfig().Breaker
	var begun []remediation.Entry
	for _, e := range p.entries() {
		if !e.Started.IsZero() {
			begun = append(begun, e)
		}
	}
	slices.SortFunc(begun, func(a, b remediation.Entry) int { return a.Started.Compare(b.Started) })
	most, mostUnits := 0, 0
	for i, first := range begun {
		units := map[string]bool{}
		n := 0
		for _, e := range begun[i:] {
			if e.Started.Sub(first.Started) >= b.Window {
				break
			}
			n++
			if e.Unit != "" {
				units[e.Unit] = true
			}
		}
		most, mostUnits = max(most, n), max(mostUnits, len(units))
	}
	if most > b.Job || mostUnits > b.Units {
		p.c.fatalf("%d actions and %d nodes out within %v: at most %d and %d may be", most, mostUnits, b.Window, b.Job, b.Units)
	}
	p.c.t.Logf("%d actions, at most %d of them and %d nodes within %v (breakers: %d and %d)", len(begun), most, mostUnits, b.Window, b.Job, b.Units)
}

// counts are requests of the remediator.
type counts struct {
	mu sync.Mutex
	m  map[string]int // "verb group/resource in NAMESPACE"
}

func (c *counts) add(r *http.Request) {
	verb, group, resource, namespace := requestOf(r)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.m == nil {
		c.m = map[string]int{}
	}
	c.m[fmt.Sprintf("%s %s/%s in %s", verb, group, resource, namespace)]++
}

func (c *counts) snapshot() map[string]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.m)
}

// requestOf is what a request asks for, in the words of RBAC.
func requestOf(r *http.Request) (verb, group, resource, namespace string) {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	drop := 2 // api/v1
	if parts[0] == "apis" {
		drop, group = 3, parts[1]
	}
	rest := parts[drop:]
	if rest[0] == "namespaces" && len(rest) > 2 {
		rest, namespace = rest[2:], rest[1]
	}
	resource = rest[0]
	if len(rest) == 3 {
		resource += "/" + rest[2]
	}
	verb = map[string]string{http.MethodPost: "create", http.MethodPut: "update", http.MethodPatch: "patch", http.MethodDelete: "delete", http.MethodGet: "get"}[r.Method]
	if verb == "get" && len(rest) == 1 {
		verb = "list"
	}
	return verb, group, resource, namespace
}

// cost is what a fault has taken, without the leader's lease.
type cost struct {
	what                   string
	writes, reads, actions int
	took                   time.Duration
}

// A fault's requests are bounded: what an action writes and reads once, and what it and
// the keeper read in each of their rounds.
const (
	writesOfAction = 24 // of one that is killed and repeated, finds a second node silent, and deletes its pods
	readsOfAction  = 40
	callsOfReturn  = 12 // of a node that returns meanwhile, or is checked: writes, and reads
	readsOfRound   = 16 // the job; nodes that are out, and each silent one's lease
)

func (c *campaign) bound(what string, before map[string]int, began time.Time, actions, returns int) {
	c.t.Helper()
	x := cost{what: what, actions: actions, took: time.Since(began)}
	for k, n := range c.counts.snapshot() {
		n -= before[k]
		switch verb, rest, _ := strings.Cut(k, " "); {
		case strings.HasPrefix(rest, "coordination.k8s.io/leases in lockstep"):
		case verb == "get" || verb == "list":
			x.reads += n
		default:
			x.writes += n
		}
	}
	rounds := int(x.took/c.r.options.Poll) + int(x.took/c.r.options.Keep) + 2
	if most := writesOfAction*(actions+1) + callsOfReturn*returns; x.writes > most {
		c.fatalf("%s: %d actions, %d nodes returned or checked: %d writes, at most %d", what, actions, returns, x.writes, most)
	}
	if most := readsOfAction*(actions+1) + callsOfReturn*returns + readsOfRound*rounds; x.reads > most {
		c.fatalf("%s: %d actions, %d nodes returned or checked: %d reads in %v, at most %d", what, actions, returns, x.reads, x.took, most)
	}
	c.costs = append(c.costs, x)
	if testing.Verbose() {
		c.t.Logf("fault %d, day %.2f: %s: %d actions, %d writes, %d reads, %.1f s", c.faults, c.calendar.now().Sub(c.began).Hours()/24, what, actions, x.writes, x.reads, x.took.Seconds())
	}
}

// tell prints what there was.
func (c *campaign) tell() {
	by := map[string][]cost{}
	for _, x := range c.costs {
		by[x.what] = append(by[x.what], x)
		by["all"] = append(by["all"], x)
	}
	middle := func(list []cost, of func(cost) int) (median, worst int) {
		var v []int
		for _, x := range list {
			v = append(v, of(x))
		}
		slices.Sort(v)
		return v[len(v)/2], v[len(v)-1]
	}
	lines := []string{fmt.Sprintf("%-32s %5s  %-16s %-16s %s", "fault", "times", "writes: median, worst", "reads", "seconds")}
	for _, what := range slices.Sorted(maps.Keys(by)) {
		if strings.Contains(what, " and ") {
			continue // in all
		}
		w, ww := middle(by[what], func(x cost) int { return x.writes })
		r, rw := middle(by[what], func(x cost) int { return x.reads })
		s, sw := middle(by[what], func(x cost) int { return int(x.took.Milliseconds()) })
		lines = append(lines, fmt.Sprintf("%-32s %5d  %6d %6d    %6d %6d    %7.1f %7.1f", what, len(by[what]), w, ww, r, rw, float64(s)/1000, float64(sw)/1000))
	}
	for _, k := range slices.Sorted(maps.Keys(c.seen)) {
		lines = append(lines, fmt.Sprintf("%-40s %d", k, c.seen[k]))
	}
	c.t.Logf("seed %d: %d faults in %.1f days; at most %d nodes out at a time\n%s", c.seed, c.faults, c.calendar.now().Sub(c.began).Hours()/24, c.most, strings.Join(lines, "\n"))
	var used []string
	for _, k := range slices.Sorted(maps.Keys(c.counts.m)) {
		used = append(used, fmt.Sprintf("%7d %s", c.counts.m[k], k))
	}
	c.t.Logf("requests:\n%s", strings.Join(used, "\n"))
}
