package preflightcmd

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/lockstep-ccl/lockstep/preflight"
)

const (
	tableRanks   = 16 // a table of numbers up to here, a picture beyond
	pictureCells = 96 // a side
	listed       = 20 // findings
)

// show writes the report for a person; color marks what is bad.
func show(r *preflight.Report, w io.Writer, color bool) error {
	out := bufio.NewWriter(w)
	switch n := len(r.Ranks); {
	case n == 1:
	case n <= tableRanks:
		table(r, out, "bandwidth, GB/s", r.Bandwidth, 1e-9, preflight.LowBandwidth|preflight.Blocked, color)
		table(r, out, "latency, µs", r.Latency, 1e6, preflight.HighLatency|preflight.Blocked, color)
	default:
		picture(r, out, color)
	}
	selves(r, out)
	for i, f := range r.Findings {
		if i == listed {
			fmt.Fprintf(out, "... and %d more (--json has all)\n", len(r.Findings)-i)
			break
		}
		fmt.Fprintf(out, "%s %s\n", paint("BAD", color), f.Text)
	}
	fmt.Fprintln(out, summary(r))
	return out.Flush()
}

func paint(s string, color bool) string {
	if color {
		return "\x1b[1;31m" + s + "\x1b[0m"
	}
	return s
}

// table is ranks × ranks; a cell that is bad by one of the faults has a mark.
func table(r *preflight.Report, out io.Writer, title string, m [][]preflight.Value, unit float64, faults preflight.Fault, color bool) {
	fmt.Fprintf(out, "%s, from (row) to (column); ! bad, X nothing arrives\n%6s", title, "")
	for dst := range m {
		fmt.Fprintf(out, "%9d ", dst)
	}
	fmt.Fprintln(out)
	for src, row := range m {
		fmt.Fprintf(out, "%6d", src)
		for dst, v := range row {
			text, mark := fmt.Sprintf("%.2f", float64(v)*unit), " "
			bad := r.Faults[src][dst] & faults
			switch {
			case src == dst:
				text = "."
			case bad&preflight.Blocked != 0:
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
func picture(r *preflight.Report, out io.Writer, color bool) {
	n := len(r.Ranks)
	per := (n + pictureCells - 1) / pictureCells
	cuts, typical := map[string][3]float64{}, map[string]float64{}
	for _, t := range r.Typical {
		var v []float64
		for src, row := range r.Bandwidth {
			for dst, x := range row {
				if x > 0 && r.Kind(src, dst) == t.Kind { // not of NaN
					v = append(v, float64(x))
				}
			}
		}
		slices.Sort(v)
		var cut [3]float64
		for i, q := range []float64{0.05, 0.25, 0.5} {
			if len(v) > 0 {
				cut[i] = v[int(q*float64(len(v)-1))]
			}
		}
		cuts[t.Kind], typical[t.Kind] = cut, t.Bandwidth
	}
	const scale = " .:-=!X" // from the best to the worst
	shade := func(src, dst int) int {
		bandwidth, cut := float64(r.Bandwidth[src][dst]), cuts[r.Kind(src, dst)]
		switch {
		case r.Faults[src][dst]&preflight.Blocked != 0:
			return 6
		case r.Faults[src][dst] != 0:
			return 5
		case !(bandwidth > 0): // or NaN
			return 0
		case bandwidth < cut[0]:
			return 4
		case bandwidth < cut[1]:
			return 3
		case bandwidth < cut[2]:
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
					worst = max(worst, shade(a, b))
				}
			}
			fmt.Fprint(out, paint(scale[worst:worst+1], color && worst >= 5))
		}
		fmt.Fprintln(out)
	}
	fmt.Fprintln(out, "slowest edges:")
	var order []int
	for i := range n * n {
		if r.Bandwidth[i/n][i%n] > 0 { // not NaN
			order = append(order, i)
		}
	}
	slower := func(i int) float64 { return float64(r.Bandwidth[i/n][i%n]) / typical[r.Kind(i/n, i%n)] }
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
		bandwidth, latency := float64(r.Bandwidth[i/n][i%n]), float64(r.Latency[i/n][i%n])
		fmt.Fprintf(out, "  rank %d → rank %d: %s, %s (%.0f %% of what is typical)\n", i/n, i%n, preflight.Rate(bandwidth), preflight.Micros(latency), 100*slower(i))
	}
	fmt.Fprintln(out)
}

// selves is what ranks measured of themselves: all, or the worst of many.
func selves(r *preflight.Report, out io.Writer) {
	line := func(what string, unit string, of func(preflight.Rank) float64) {
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
	line("memory copies", "GB/s", func(r preflight.Rank) float64 { return r.Memory })
	line("compute", "GFLOP/s", func(r preflight.Rank) float64 { return r.Compute })
	line("all at once", "GB/s", func(r preflight.Rank) float64 { return r.Together })
}

// summary is the report in a line.
func summary(r *preflight.Report) string {
	var b strings.Builder
	nodes := map[string]bool{}
	for _, rank := range r.Ranks {
		nodes[rank.Node] = true
	}
	fmt.Fprintf(&b, "%s: %d ranks on %d nodes", strings.ToUpper(r.Verdict), len(r.Ranks), len(nodes))
	for _, t := range r.Typical {
		fmt.Fprintf(&b, "; %s %s, %s", t.Kind, preflight.Rate(t.Bandwidth), preflight.Micros(t.Latency))
	}
	if t := r.TypicalTogether; t > 0 {
		fmt.Fprintf(&b, "; all at once %s a rank", preflight.Rate(t))
	}
	if r.Verdict == preflight.VerdictBad {
		fmt.Fprintf(&b, "; %d bad edges, keep out: %s", r.BadEdges, strings.Join(r.Bad, " "))
	}
	if r.Error != "" {
		fmt.Fprintf(&b, "; incomplete: %s", r.Error)
	}
	return b.String()
}
