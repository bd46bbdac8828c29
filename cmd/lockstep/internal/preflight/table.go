package preflight

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
)

const (
	tableRanks   = 16 // a table of numbers up to here, a picture beyond
	pictureCells = 96 // a side
	listed       = 20 // findings
)

// print writes the report for a person; color marks what is bad.
func (r *Report) print(w io.Writer, color bool) error {
	out := bufio.NewWriter(w)
	switch n := len(r.Ranks); {
	case n == 1:
	case n <= tableRanks:
		r.table(out, "bandwidth, GB/s", r.Bandwidth, 1e-9, lowBandwidth|blocked, color)
		r.table(out, "latency, µs", r.Latency, 1e6, highLatency|blocked, color)
	default:
		r.picture(out, color)
	}
	r.self(out)
	for i, f := range r.Findings {
		if i == listed {
			fmt.Fprintf(out, "... and %d more (--json has all)\n", len(r.Findings)-i)
			break
		}
		fmt.Fprintf(out, "%s %s\n", paint("BAD", color), f.Text)
	}
	fmt.Fprintln(out, r.summary())
	return out.Flush()
}

func paint(s string, color bool) string {
	if color {
		return "\x1b[1;31m" + s + "\x1b[0m"
	}
	return s
}

// table is ranks × ranks; a cell that is bad by one of the faults has a mark.
func (r *Report) table(out io.Writer, title string, m [][]Value, unit float64, faults fault, color bool) {
	fmt.Fprintf(out, "%s, from (row) to (column); ! bad, X nothing arrives\n%6s", title, "")
	for dst := range m {
		fmt.Fprintf(out, "%9d ", dst)
	}
	fmt.Fprintln(out)
	for src, row := range m {
		fmt.Fprintf(out, "%6d", src)
		for dst, v := range row {
			text, mark := fmt.Sprintf("%.2f", float64(v)*unit), " "
			bad := r.judged.bad[src*len(m)+dst] & faults
			switch {
			case src == dst:
				text = "."
			case bad&blocked != 0:
				text, mark = "X", "!"
			case math.IsNaN(float64(v)):
				text = "-"
			case bad != 0:
				mark = "!"
			}
			text = fmt.Sprintf("%9s%s", text, mark)
			fmt.Fprint(out, paint(text, color && bad != 0))
		}
		fmt.Fprintln(out)
	}
	fmt.Fprintln(out)
}

// picture has a character a cell, by bandwidth; of many ranks a cell is a square
// of the matrix, and shows the worst in it.
func (r *Report) picture(out io.Writer, color bool) {
	n := len(r.Ranks)
	per := (n + pictureCells - 1) / pictureCells
	var cuts [numKinds][3]float64
	for kind := range cuts {
		var v []float64
		for i := range r.survey.edges {
			if e := &r.survey.edges[i]; e.bandwidth > 0 && r.survey.kind(i) == kind {
				v = append(v, e.bandwidth)
			}
		}
		slices.Sort(v)
		for i, q := range []float64{0.05, 0.25, 0.5} {
			if len(v) > 0 {
				cuts[kind][i] = v[int(q*float64(len(v)-1))]
			}
		}
	}
	const scale = " .:-=!X" // from the best to the worst
	shade := func(i int) int {
		e, cut := &r.survey.edges[i], cuts[r.survey.kind(i)]
		switch {
		case r.judged.bad[i]&blocked != 0:
			return 6
		case r.judged.bad[i] != 0:
			return 5
		case e.bandwidth == 0:
			return 0
		case e.bandwidth < cut[0]:
			return 4
		case e.bandwidth < cut[1]:
			return 3
		case e.bandwidth < cut[2]:
			return 2
		}
		return 1
	}
	fmt.Fprintf(out, "bandwidth, from (row) to (column): . above the median of its kind  : below  - lowest quarter  = lowest 5 %%  ! bad  X nothing arrives\n")
	if per > 1 {
		fmt.Fprintf(out, "each character is the worst of %d × %d ranks\n", per, per)
	}
	for src := 0; src < n; src += per {
		fmt.Fprintf(out, "%6d ", src)
		for dst := 0; dst < n; dst += per {
			worst := 0
			for a := src; a < min(src+per, n); a++ {
				for b := dst; b < min(dst+per, n); b++ {
					worst = max(worst, shade(a*n+b))
				}
			}
			fmt.Fprint(out, paint(scale[worst:worst+1], color && worst >= 5))
		}
		fmt.Fprintln(out)
	}
	fmt.Fprintln(out, "slowest edges:")
	var order []int
	for i := range r.survey.edges {
		if r.survey.edges[i].bandwidth > 0 {
			order = append(order, i)
		}
	}
	slower := func(i int) float64 { return r.survey.edges[i].bandwidth / r.judged.norms[r.survey.kind(i)].bandwidth }
	slices.SortFunc(order, func(a, b int) int {
		switch {
		case slower(a) < slower(b):
			return -1
		case slower(a) > slower(b):
			return 1
		}
		return a - b
	})
	for _, i := range order[:min(len(order), 5)] {
		e := &r.survey.edges[i]
		fmt.Fprintf(out, "  rank %d → rank %d: %s, %s (%.0f %% of what is typical)\n", i/n, i%n, gigabytes(e.bandwidth), micros(e.latency), 100*slower(i))
	}
	fmt.Fprintln(out)
}

// self is what ranks measured of themselves: all, or the worst of many.
func (r *Report) self(out io.Writer) {
	line := func(what string, unit string, of func(Rank) float64) {
		var v []string
		worst, at, n := math.Inf(1), 0, 0
		for i, rank := range r.Ranks {
			x := of(rank)
			if x == 0 {
				v = append(v, "-")
				continue
			}
			n++
			v = append(v, fmt.Sprintf("%.2f", x/1e9))
			if x < worst {
				worst, at = x, i
			}
		}
		switch {
		case n == 0:
		case len(r.Ranks) <= tableRanks:
			fmt.Fprintf(out, "%s of each rank, %s: %s\n", what, unit, strings.Join(v, " "))
		default:
			fmt.Fprintf(out, "%s of %d ranks: %.2f %s at worst (rank %d)\n", what, n, worst/1e9, unit, at)
		}
	}
	line("memory copies", "GB/s", func(r Rank) float64 { return r.Memory })
	line("compute", "GFLOP/s", func(r Rank) float64 { return r.Compute })
	line("all at once", "GB/s", func(r Rank) float64 { return r.Together })
}
