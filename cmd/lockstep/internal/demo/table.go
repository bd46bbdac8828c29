package demo

import (
	"fmt"
	"slices"
)

// table prints medians by fault.
func table(out *printer, done []outcome) {
	var kinds []string
	by := map[string][]outcome{}
	for _, o := range done {
		if by[o.Fault] == nil {
			kinds = append(kinds, o.Fault)
		}
		by[o.Fault] = append(by[o.Fault], o)
	}
	out.say("\nmedians, seconds (worst in brackets)")
	out.say("%-24s %5s %6s  %16s %16s %16s %16s", "fault", "runs", "right", "fault→verdict", "verdict→alert", "alert→running", "fault→running")
	for _, k := range kinds {
		right := 0
		var a, b, c, d []float64
		for _, o := range by[k] {
			if o.right() {
				right++
			}
			if o.Running < 0 || o.Alert < 0 || o.Confirmed < 0 {
				continue
			}
			a, b, c, d = append(a, o.Confirmed), append(b, o.Alert-o.Confirmed), append(c, o.Running-o.Alert), append(d, o.Running)
		}
		out.say("%-24s %5d %6d  %s %s %s %s", k, len(by[k]), right, spread(a), spread(b), spread(c), spread(d))
	}
}

func spread(v []float64) string {
	if len(v) == 0 {
		return fmt.Sprintf("%16s", "-")
	}
	slices.Sort(v)
	return fmt.Sprintf("%16s", fmt.Sprintf("%.2f (%.2f)", v[len(v)/2], v[len(v)-1]))
}
