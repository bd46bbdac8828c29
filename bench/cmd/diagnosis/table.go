package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/jobsim"
)

// line is a scenario in one line.
func line(s *jobsim.Scenario) string {
	c := &s.Config
	var parts []string
	add := func(name string, n int) {
		if n > 1 {
			parts = append(parts, fmt.Sprintf("%s%d", name, n))
		}
	}
	add("tp", c.Tensor)
	add("cp", c.Context)
	add("dp", c.Data)
	add("ep", c.Expert)
	add("pp", c.Pipeline)
	add("chunks", c.Chunks)
	add("micro", c.Micro)
	parts = append(parts, fmt.Sprintf("nodes of %d", c.Cluster.RanksPerNode))
	switch {
	case c.Cluster.RDMA:
		parts = append(parts, "rdma")
	case c.Cluster.GPU:
		parts = append(parts, "gpu tcp")
	default:
		parts = append(parts, "cpu tcp")
	}
	if c.Cluster.Mute {
		parts = append(parts, "mute")
	}
	if c.Steps {
		parts = append(parts, "steps marked")
	}
	parts = append(parts, fmt.Sprintf("step %v", s.Step.Round(time.Millisecond)), c.Dying.Reaction.String())
	if c.Dying.Launcher > 0 {
		parts = append(parts, fmt.Sprintf("launcher %v", c.Dying.Launcher))
	}
	out := strings.Join(parts, " ")
	for i := range c.Faults {
		out += "; " + c.Faults[i].String()
	}
	return out
}

// verdictOn is what became of one truth, in words.
func verdictOn(o *jobsim.Outcome, i int) string {
	f := &o.Found[i]
	switch {
	case !o.Felt(i):
		return "never felt"
	case f.Confirmed >= 0:
		s := fmt.Sprintf("suspected after %.2fs, confirmed after %.2fs (%d steps)", f.Suspected.Seconds(), f.Confirmed.Seconds(), f.Steps)
		if !o.Top1(i) {
			s += ", but first: " + said(&f.First.Verdict)
		}
		return s
	case f.Suspected >= 0:
		return fmt.Sprintf("suspected only, after %.2fs", f.Suspected.Seconds())
	}
	var all []string
	for k := range o.Said {
		x := &o.Said[k]
		if x.Last >= f.Onset {
			all = append(all, fmt.Sprintf("%s %s (+%.2fs)", x.Level, said(&x.Verdict), (x.Suspected-f.Onset).Seconds()))
		}
	}
	if len(all) == 0 {
		return "nothing said"
	}
	return "said: " + strings.Join(all[:min(3, len(all))], "; ")
}

// score is one line of the table.
type score struct {
	runs, felt, wanted int
	found, suspected   int // of those wanted
	top1, confirmedAny int
	wrong, innocent    int // incidents confirmed that are not so; runs that blamed innocents
	suspect, confirm   []time.Duration
	steps              []int
	passNs             int64
	suspicions         int
	counted            time.Duration
	passes             int
}

func (a *score) add(r *result) {
	a.runs++
	a.suspicions, a.counted = a.suspicions+r.Suspicions, a.counted+r.Counted
	a.passNs, a.passes = a.passNs+r.PassNs, a.passes+r.Passes
	bad := false
	for i := range r.Said {
		if x := &r.Said[i]; x.Confirmed > 0 {
			if x.Right == 0 {
				a.wrong++
			}
			bad = bad || x.Innocent
		}
	}
	if bad {
		a.innocent++
	}
	for i := range r.Found {
		f := &r.Found[i]
		if !r.Felt(i) {
			continue
		}
		a.felt++
		if r.Scenario.Truths[i].Want > 0 {
			a.wanted++
			if !r.Missed(i) {
				a.found++
			}
		}
		if f.Suspected >= 0 {
			a.suspected++
			a.suspect = append(a.suspect, f.Suspected)
		}
		if f.Confirmed >= 0 {
			a.confirm = append(a.confirm, f.Confirmed)
			a.steps = append(a.steps, f.Steps)
		}
		if f.First != nil {
			a.confirmedAny++
			if r.Top1(i) {
				a.top1++
			}
		}
	}
}

func quantile[T any](of []T, q float64, cmp func(a, b T) int) (v T, ok bool) {
	if len(of) == 0 {
		return v, false
	}
	s := slices.Clone(of)
	slices.SortFunc(s, cmp)
	return s[min(len(s)-1, int(q*float64(len(s))))], true
}

func seconds(of []time.Duration, q float64) string {
	if v, ok := quantile(of, q, func(a, b time.Duration) int { return int(a - b) }); ok {
		return fmt.Sprintf("%.2f", v.Seconds())
	}
	return "-"
}

func count(of []int, q float64) string {
	if v, ok := quantile(of, q, func(a, b int) int { return a - b }); ok {
		return fmt.Sprint(v)
	}
	return "-"
}

func perHour(n int, d time.Duration) string {
	if d == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f", float64(n)/d.Hours())
}

func share(a, b int) string {
	if b == 0 {
		return "-"
	}
	return fmt.Sprintf("%.3f", float64(a)/float64(b))
}

// table prints all tables of a run, and every miss.
func table(w io.Writer, set jobsim.Set, results []result) error {
	byRow, bySize := map[string]*score{}, map[int]*score{}
	var sizes []int
	unmade, unfelt := 0, 0
	for i := range results {
		r := &results[i]
		if r.err != nil {
			unmade++
			continue
		}
		if byRow[r.row] == nil {
			byRow[r.row] = &score{}
		}
		if bySize[r.ranks] == nil {
			bySize[r.ranks] = &score{}
			sizes = append(sizes, r.ranks)
		}
		byRow[r.row].add(r)
		bySize[r.ranks].add(r)
		for k := range r.Found {
			if !r.Felt(k) {
				unfelt++
			}
		}
	}
	fmt.Fprintf(w, "set %v: %d scenarios played, %d that no job fits, %d faults never felt by their job\n", set, len(results)-unmade, unmade, unfelt)
	classes(w, results)

	t := tabwriter.NewWriter(w, 2, 8, 2, ' ', 0)
	head := "runs\tfelt\trecall\ttop-1\twrong\tinnocent\tsuspected s p50\tp99\tconfirmed s p50\tp99\titerations p50\tp99\tpass ms\tsuspicions/h"
	body := func(a *score) string {
		return fmt.Sprintf("%d\t%d\t%s\t%s\t%d\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%.3f\t%s", a.runs, a.felt, share(a.found, a.wanted), share(a.top1, a.confirmedAny), a.wrong, a.innocent,
			seconds(a.suspect, 0.5), seconds(a.suspect, 0.99), seconds(a.confirm, 0.5), seconds(a.confirm, 0.99), count(a.steps, 0.5), count(a.steps, 0.99), float64(a.passNs)/float64(max(a.passes, 1))/1e6, perHour(a.suspicions, a.counted))
	}
	fmt.Fprintf(t, "\nfault\t%s\n", head)
	for _, name := range jobsim.Rows() {
		if a := byRow[name]; a != nil {
			fmt.Fprintf(t, "%s\t%s\n", name, body(a))
		}
	}
	fmt.Fprintf(t, "\nranks\t%s\n", head)
	slices.Sort(sizes)
	for _, n := range sizes {
		fmt.Fprintf(t, "%d\t%s\n", n, body(bySize[n]))
	}
	t.Flush()
	costs(w, results)
	misses(w, results)
	return nil
}

// classes prints precision and recall by class, and the healthy runs.
func classes(w io.Writer, results []result) {
	t := tabwriter.NewWriter(w, 2, 8, 2, ' ', 0)
	fmt.Fprintf(t, "\nclass\tfaults\trecall\tgoal\tclass told\tincidents\tprecision\tgoal\ttop-1\tgoal\tinnocent confirmed\tgoal\n")
	var hours, counted time.Duration
	confirmed, suspicions, healthy := 0, 0, 0
	for _, class := range diagnosis.Classes() {
		faults, found, told, incidents, right, top, any, innocent := 0, 0, 0, 0, 0, 0, 0, 0
		for i := range results {
			r := &results[i]
			if r.err != nil {
				continue
			}
			for k := range r.Found {
				tr := &r.Scenario.Truths[k]
				if tr.Want == 0 || tr.Classes[0] != class || !r.Felt(k) {
					continue
				}
				faults++
				if !r.Missed(k) {
					found++
				}
				if r.Found[k].Class {
					told++
				}
				if r.Found[k].First != nil {
					any++
					if r.Top1(k) {
						top++
					}
				}
			}
			for k := range r.Said {
				x := &r.Said[k]
				if x.Confirmed == 0 || x.Class != class {
					continue
				}
				incidents++
				if x.Right > 0 {
					right++
				}
				if x.Innocent {
					innocent++
				}
			}
		}
		fmt.Fprintf(t, "%v\t%d\t%s\t0.99\t%s\t%d\t%s\t0.99\t%s\t0.97\t%d\t0\n", class, faults, share(found, faults), share(told, faults), incidents, share(right, incidents), share(top, any), innocent)
	}
	t.Flush()
	for i := range results {
		r := &results[i]
		if r.err != nil || len(r.Scenario.Truths) > 0 {
			continue
		}
		healthy++
		hours += r.Ran
		counted += r.Counted
		suspicions += r.Suspicions
		for k := range r.Said {
			if r.Said[k].Confirmed > 0 {
				confirmed++
			}
		}
	}
	fmt.Fprintf(w, "\nhealthy: %d runs, %.1f h of jobs; confirmed verdicts: %d (goal 0)", healthy, hours.Hours(), confirmed)
	if counted > 0 {
		fmt.Fprintf(w, "; suspicions after the first ten minutes: %d in %.1f h, %.2f an hour (goal 1)", suspicions, counted.Hours(), float64(suspicions)/counted.Hours())
	}
	fmt.Fprintln(w)
}

// slow reports whether a class is of a job that goes on, with a loss.
func slow(c diagnosis.Class) bool {
	return c == diagnosis.CommunicationSlow || c == diagnosis.NoncommunicationSlow
}

// costBars group faults by the share of its time that the job loses.
var costBars = []float64{0.02, 0.05, 0.1, 0.2, 0.4, 1.01}

// costs prints how many slow faults were told by what they cost, where that was measured.
func costs(w io.Writer, results []result) {
	t := tabwriter.NewWriter(w, 2, 8, 2, ' ', 0)
	any := false
	for _, class := range diagnosis.Classes() {
		if !slow(class) {
			continue
		}
		faults, found := make([]int, len(costBars)), make([]int, len(costBars))
		for i := range results {
			r := &results[i]
			for k := range r.costs {
				tr := &r.Scenario.Truths[k]
				if tr.Want == 0 || tr.Classes[0] != class || !r.Felt(k) {
					continue
				}
				at := slices.IndexFunc(costBars, func(b float64) bool { return r.costs[k] < b })
				faults[at]++
				if !r.Missed(k) {
					found[at]++
				}
				any = true
			}
		}
		low := 0.0
		for at, bar := range costBars {
			fmt.Fprintf(t, "%v\t%.0f-%.0f %%\t%d\t%s\n", class, 100*low, 100*min(bar, 1), faults[at], share(found[at], faults[at]))
			low = bar
		}
	}
	if any {
		fmt.Fprintf(w, "\nslow faults by the share of its time that the job loses\nclass\tloses\tfaults\trecall\n")
		t.Flush()
	}
}

// misses lists everything that was not as it should be.
func misses(w io.Writer, results []result) {
	fmt.Fprintf(w, "\nmisses (again: -set SET -row ROW -seed SEED -ranks RANKS -v)\n")
	for i := range results {
		r := &results[i]
		if r.err != nil {
			continue
		}
		var what []string
		for k := range r.Found {
			if r.Felt(k) && (r.Missed(k) || r.Found[k].First != nil && !r.Top1(k)) {
				word := verdictOn(r.Outcome, k)
				if k < len(r.costs) {
					word = fmt.Sprintf("costs %.0f %%: %s", 100*r.costs[k], word)
				}
				what = append(what, word)
			}
		}
		for k := range r.Said {
			if x := &r.Said[k]; x.Confirmed > 0 && x.Right == 0 {
				word := "wrong"
				if x.Innocent {
					word = "INNOCENT"
				}
				what = append(what, fmt.Sprintf("%s confirmed at %.2fs: %s", word, x.Confirmed.Seconds(), said(&x.Verdict)))
			}
		}
		if r.Suspicions > 0 {
			x := &r.Said[r.Suspicious-1]
			what = append(what, fmt.Sprintf("%d suspicions, such as %s at %.0fs", r.Suspicions, said(&x.Verdict), x.Suspected.Seconds()))
		}
		if len(what) > 0 {
			fmt.Fprintf(w, "%q seed %d ranks %d [%s]: %s\n", r.row, r.seed, r.ranks, line(r.Scenario), strings.Join(what[:min(4, len(what))], " | "))
		}
	}
}
