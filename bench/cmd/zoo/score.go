package main

import (
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/lockstep-ccl/lockstep/bench/zoo"
)

// result is a run's outcome.
type result struct {
	Run      int    `json:"run"`
	Seed     uint64 `json:"seed"`
	Fault    string `json:"fault"`
	Job      string `json:"job"`
	Habit    string `json:"habit"`
	Launcher string `json:"launcher"`
	Pods     bool   `json:"pods"`
	Truth    string `json:"truth"`
	Class    string `json:"class"` // right one

	Skipped string `json:"skipped,omitempty"`
	Broken  string `json:"broken,omitempty"` // the zoo's own trouble, or the job's before the fault
	Hit     bool   `json:"hit"`
	Miss    string `json:"miss,omitempty"` // why not

	Said       string   `json:"said,omitempty"` // class of the first confirmed verdict
	SaidTop    string   `json:"said_top,omitempty"`
	ClassRight bool     `json:"class_right"`
	TopRight   bool     `json:"top_right"`
	Innocent   []string `json:"innocent,omitempty"`  // confirmed
	Suspected  float64  `json:"suspected,omitempty"` // s after the fault, of the right culprit
	Confirmed  float64  `json:"confirmed,omitempty"`
	All        []string `json:"all,omitempty"`  // all that was said
	Cost       float64  `json:"cost,omitempty"` // of a step, as a ratio
	Needed     bool     `json:"needed"`         // a verdict was
	Steps      int      `json:"steps"`          // after the fault
	Unequal    string   `json:"unequal,omitempty"`

	Watched          float64 `json:"watched"` // healthy seconds
	HealthySuspected int     `json:"healthy_suspected"`
	HealthyConfirmed int     `json:"healthy_confirmed"`
	Took             float64 `json:"took"`
}

// right reports whether a sighting is the fault's, class and first culprit.
func (t *truth) right(f *fault, s *sighting) bool {
	return slices.Contains(f.class, s.class) && slices.Contains(t.names, s.top())
}

// early counts what was said before there was a fault.
func (r *result) early(s *sighting) {
	r.HealthySuspected++
	if !s.confirmed.IsZero() {
		r.HealthyConfirmed++
	}
	r.All = append(r.All, "before the fault: "+s.String(time.Time{}))
}

func (s *sighting) String(t0 time.Time) string {
	var b strings.Builder
	if !t0.IsZero() {
		fmt.Fprintf(&b, "%.1f s ", s.first.Sub(t0).Seconds())
	}
	fmt.Fprintf(&b, "%s %s", s.class, strings.Join(s.in.names(), ", "))
	if len(s.in.Culprits) > 0 && s.in.Culprits[0].Reason != "" {
		fmt.Fprintf(&b, " (%s)", s.in.Culprits[0].Reason)
	}
	switch {
	case !s.confirmed.IsZero() && !t0.IsZero():
		fmt.Fprintf(&b, ", confirmed at %.1f s", s.confirmed.Sub(t0).Seconds())
	case !s.confirmed.IsZero():
		b.WriteString(", confirmed")
	default:
		b.WriteString(", suspected")
	}
	return b.String()
}

// costFrom is how much longer a step takes from which on a slow fault needs a verdict.
const costFrom = 1.10

// stuck is the cost where too few steps were made to tell.
const stuck = 99

// score judges what was said after the fault.
func (r *run) score(res *result, t *truth) {
	var said []*sighting
	for _, s := range r.seen {
		if s.first.After(r.t0) || s.confirmed.After(r.t0) || s.in.Closed == nil {
			said = append(said, s)
		}
	}
	slices.SortFunc(said, func(a, b *sighting) int { return a.first.Compare(b.first) })
	var confirmed []*sighting
	second, apart := false, false // apart: an incident of its own blames an innocent
	for _, s := range said {
		res.All = append(res.All, s.String(r.t0))
		ours := t.right(r.f, s)
		other := len(t.also) > 0 && slices.Contains(t.also, s.top())
		if ours && res.Suspected == 0 {
			res.Suspected = s.first.Sub(r.t0).Seconds()
		}
		if !s.confirmed.After(r.t0) {
			continue
		}
		confirmed = append(confirmed, s)
		second, apart = second || other, apart || !other && !slices.Contains(t.names, s.top())
		if ours && (res.Confirmed == 0 || s.confirmed.Sub(r.t0).Seconds() < res.Confirmed) {
			res.Confirmed = s.confirmed.Sub(r.t0).Seconds()
		}
		for _, name := range s.in.names() {
			if !slices.Contains(t.names, name) && !slices.Contains(t.parts, name) && !slices.Contains(t.also, name) {
				res.Innocent = append(res.Innocent, name)
			}
		}
	}
	slices.SortFunc(confirmed, func(a, b *sighting) int { return a.confirmed.Compare(b.confirmed) })
	if len(confirmed) > 0 {
		first := confirmed[0]
		res.Said, res.SaidTop = first.class, first.top()
		also := len(t.also) > 0 && slices.Contains(t.also, first.top())
		res.ClassRight = slices.Contains(r.f.class, first.class) || also && slices.Contains(t.class, first.class)
		res.TopRight = slices.Contains(t.names, first.top()) || also
	}
	r.progress(res, t)

	res.Needed = r.f.want == verdict || r.f.want == costly && res.Cost >= costFrom
	if r.f.undisturbed() {
		res.Watched += time.Since(r.t0).Seconds()
		res.HealthyConfirmed += len(confirmed)
		for _, s := range said {
			if s.first.After(r.t0) {
				res.HealthySuspected++
			}
		}
	}
	switch {
	case r.f.want == nothing && len(confirmed) > 0:
		res.Miss = "confirmed, and nothing is wrong"
	case res.Needed && len(confirmed) == 0:
		res.Miss = "nothing confirmed"
	case len(confirmed) > 0 && !res.TopRight:
		res.Miss = "wrong culprit"
	case len(confirmed) > 0 && !res.ClassRight:
		res.Miss = "wrong class"
	case len(res.Innocent) > 0 && apart:
		res.Miss = "an innocent was confirmed, too"
	case len(res.Innocent) > 0:
		res.Miss = "innocents behind the right culprit"
	case len(t.also) > 0 && (res.Confirmed == 0 || !second):
		res.Miss = "one of two confirmed"
	case res.Unequal != "":
		res.Miss = res.Unequal
	case (r.f.want == goesOn || r.f.want == nothing) && res.Steps < 5:
		res.Miss = "the job did not go on"
	}
	res.Hit = res.Miss == ""
}

// references are the losses of each job by step, which no run may differ from.
var references = struct {
	sync.Mutex
	of map[string][]uint64
}{of: map[string][]uint64{}}

// progress says what the fault cost, whether the job goes on, and whether its losses are
// those of all ranks and runs.
func (r *run) progress(res *result, t *truth) {
	from := r.t0.UnixNano()
	if t.undo != nil {
		from += int64(t.last)
	}
	var before, after []zoo.Loss
	for _, l := range r.losses[0] {
		switch {
		case l.At < r.t0.UnixNano():
			before = append(before, l)
		case l.At > from:
			after = append(after, l)
		}
	}
	res.Steps = len(after)
	// The last step before the fault is the first that feels it. What it costs counts from then.
	if len(before) > 10 && len(after) > 3 {
		b, a := before[2:], after[1:]
		step := median
		if r.f.uneven {
			step = mean
		}
		res.Cost = math.Round(100*step(a)/step(b)) / 100
	} else if len(before) > 10 && r.f.want == costly {
		res.Cost = stuck
	}
	if strings.HasPrefix(r.f.name, "bug_") {
		return // programs that differ have losses that differ
	}
	references.Lock()
	defer references.Unlock()
	ref := references.of[r.c.job.Name]
	for k, losses := range r.losses {
		for _, l := range losses {
			if l.Step > len(ref) {
				ref = append(ref, l.Bits)
			}
			if ref[l.Step-1] != l.Bits {
				res.Unequal = fmt.Sprintf("rank %d's loss of step %d is not that of others", k, l.Step)
			}
		}
	}
	references.of[r.c.job.Name] = ref
}

func mean(l []zoo.Loss) float64 {
	if len(l) < 2 {
		return math.NaN()
	}
	return float64(l[len(l)-1].At-l[0].At) / float64(len(l)-1)
}

func median(l []zoo.Loss) float64 {
	if len(l) < 2 {
		return math.NaN()
	}
	var d []float64
	for i := range l[1:] {
		d = append(d, float64(l[i+1].At-l[i].At))
	}
	slices.Sort(d)
	return d[len(d)/2]
}

// report prints what came of the runs.
func report(w io.Writer, results []result) {
	var order []string
	by := map[string][]result{}
	for _, r := range results {
		if _, ok := by[r.Fault]; !ok {
			order = append(order, r.Fault)
		}
		by[r.Fault] = append(by[r.Fault], r)
	}
	slices.SortFunc(order, func(a, b string) int { return rowOf(a) - rowOf(b) })
	fmt.Fprintf(w, "%-20s %-24s %9s %6s %6s %6s %9s  %-15s %-15s\n", "fault", "class", "right", "class", "top-1", "needed", "innocent", "suspected (s)", "confirmed (s)")
	fmt.Fprintf(w, "%-20s %-24s %9s %6s %6s %6s %9s  %-15s %-15s\n", "", "", "", "", "", "", "", "median  p99", "median  p99")
	for _, name := range order {
		row(w, name, by[name])
	}
	row(w, "all", results)
	fmt.Fprintln(w)
	byClass(w, results)
	fmt.Fprintln(w)
	breakdown(w, "job", results, func(r *result) string { return r.Job })
	breakdown(w, "habit", results, func(r *result) string { return r.Habit })
	breakdown(w, "launcher", results, func(r *result) string { return r.Launcher })
	var watched float64
	var s, c, broken, skipped int
	for _, r := range results {
		watched += r.Watched
		s, c = s+r.HealthySuspected, c+r.HealthyConfirmed
		broken, skipped = broken+btoi(r.Broken != ""), skipped+btoi(r.Skipped != "")
	}
	fmt.Fprintf(w, "\nhealthy: %.1f min watched, %d confirmed, %d suspected (%.1f an hour)\n", watched/60, c, s, float64(s)/max(watched/3600, 1e-9))
	fmt.Fprintf(w, "runs: %d, of these %d broken, %d skipped\n", len(results), broken, skipped)
	reasons := map[string][]string{}
	for _, r := range results {
		if r.Skipped != "" && !slices.Contains(reasons[r.Skipped], r.Fault) {
			reasons[r.Skipped] = append(reasons[r.Skipped], r.Fault)
		}
	}
	for why, faults := range reasons {
		fmt.Fprintf(w, "skipped: %s: %s\n", strings.Join(faults, " "), why)
	}
	fmt.Fprintln(w, "\nsuspected where nothing is wrong with the job:")
	for _, r := range results {
		if r.Hit && (r.HealthySuspected > 0 || r.Class == healthy && len(r.All) > 0) {
			r.print(w)
		}
	}
	fmt.Fprintln(w, "\nmisses:")
	for _, r := range results {
		if r.Skipped == "" && !r.Hit {
			r.print(w)
		}
	}
}

func (r *result) print(w io.Writer) {
	fmt.Fprintf(w, "- run %d seed %d: %s on %s (%s, %s%s): %s: %s%s", r.Run, r.Seed, r.Fault, r.Job, r.Habit, r.Launcher, map[bool]string{true: ", pods"}[r.Pods], r.Truth, r.Broken, r.Miss)
	if r.Cost > 0 && r.Cost < stuck {
		fmt.Fprintf(w, "; a step takes %.2f times as long", r.Cost)
	}
	fmt.Fprintln(w)
	for _, s := range r.All {
		fmt.Fprintln(w, "    said:", s)
	}
}

// breakdown prints the share of right runs by something else than the fault.
func breakdown(w io.Writer, what string, results []result, key func(*result) string) {
	right, all := map[string]int{}, map[string]int{}
	for _, r := range results {
		if r.Skipped == "" {
			all[key(&r)]++
			right[key(&r)] += btoi(r.Hit)
		}
	}
	fmt.Fprintf(w, "right by %s:", what)
	for _, k := range slices.Sorted(maps.Keys(all)) {
		fmt.Fprintf(w, " %s %s", k, of(right[k], all[k]))
	}
	fmt.Fprintln(w)
}

func rowOf(name string) int {
	return slices.IndexFunc(table, func(f fault) bool { return f.name == name })
}

func row(w io.Writer, name string, results []result) {
	var n, hit, class, top, needed, said, innocent int
	var s, c []float64
	label := ""
	for _, r := range results {
		if r.Skipped != "" || r.Broken != "" {
			continue
		}
		label = r.Class
		n++
		hit += btoi(r.Hit)
		needed += btoi(r.Needed)
		if r.Said != "" {
			said++
			class += btoi(r.ClassRight)
			top += btoi(r.TopRight)
		}
		innocent += btoi(len(r.Innocent) > 0)
		if r.Suspected > 0 {
			s = append(s, r.Suspected)
		}
		if r.Confirmed > 0 {
			c = append(c, r.Confirmed)
		}
	}
	if name == "all" {
		label = ""
	}
	fmt.Fprintf(w, "%-20s %-24s %9s %6s %6s %6d %9d  %-15s %-15s\n", name, label, of(hit, n), of(class, said), of(top, said), needed, innocent, times(s), times(c))
}

func of(a, b int) string { return fmt.Sprintf("%d/%d", a, b) }

func times(v []float64) string {
	if len(v) == 0 {
		return "–"
	}
	slices.Sort(v)
	return fmt.Sprintf("%6.2f %6.2f", v[(len(v)-1)/2], v[int(math.Ceil(0.99*float64(len(v))))-1])
}

// byClass prints precision and recall: a verdict is right when class and culprit are.
func byClass(w io.Writer, results []result) {
	fmt.Fprintf(w, "%-24s %8s %8s %8s  %9s %6s\n", "class", "needed", "said", "right", "precision", "recall")
	for _, class := range []string{commHang, otherHang, commSlow, otherSlow} {
		var needed, said, right, found int
		for _, r := range results {
			if r.Skipped != "" || r.Broken != "" {
				continue
			}
			ok := r.ClassRight && r.TopRight
			needed += btoi(r.Needed && r.Class == class)
			found += btoi(r.Needed && r.Class == class && ok)
			said += btoi(r.Said == class)
			right += btoi(r.Said == class && ok)
		}
		fmt.Fprintf(w, "%-24s %8d %8d %8d  %9.3f %6.3f\n", class, needed, said, right, ratio(right, said), ratio(found, needed))
	}
}

func ratio(a, b int) float64 {
	if b == 0 {
		return math.NaN()
	}
	return float64(a) / float64(b)
}
