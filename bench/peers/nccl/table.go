package nccl

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
)

// Column is one library in one mode.
type Column struct {
	Library Library
	Mode    string
}

func (c Column) String() string {
	if c.Mode == "default" {
		return c.Library.String()
	}
	return c.Library.String() + " " + c.Mode
}

// Row is one size; a nil cell was not measured.
type Row struct {
	Bytes int
	Cells []*Sample // as Table.Columns
}

// Table compares the libraries over all sizes of one series.
type Table struct {
	Series
	Columns []Column
	Rows    []Row // by size
}

// Tables arranges samples. Of a size that was measured several times the median
// counts, unless some result was wrong: then that is what is shown.
func Tables(samples []Sample) []Table {
	order := func(a, b Sample) int {
		return cmp.Or(
			cmp.Compare(place(a.Coll), place(b.Coll)), cmp.Compare(a.Coll, b.Coll), cmp.Compare(a.Ranks, b.Ranks),
			-cmp.Compare(a.Launch, b.Launch), cmp.Compare(a.Type, b.Type), // stream before graph
			cmp.Compare(a.Bytes, b.Bytes), cmp.Compare(a.Library, b.Library), cmp.Compare(a.Mode, b.Mode))
	}
	samples = slices.SortedStableFunc(slices.Values(samples), order)
	var tables []Table
	for len(samples) > 0 {
		n := run(samples, func(a, b Sample) bool { return a.Series == b.Series })
		tables = append(tables, table(samples[:n]))
		samples = samples[n:]
	}
	return tables
}

// run is how many elements at the start belong with the first.
func run(s []Sample, same func(a, b Sample) bool) int {
	n := 1
	for n < len(s) && same(s[0], s[n]) {
		n++
	}
	return n
}

func place(coll string) int {
	return slices.Index([]string{"all_reduce", "all_gather", "reduce_scatter", "alltoall", "sendrecv", "broadcast", "reduce"}, coll) & math.MaxInt
}

// table makes the table of samples of one series, sorted by size and column.
func table(samples []Sample) Table {
	t := Table{Series: samples[0].Series}
	for _, s := range samples {
		if c := (Column{s.Library, s.Mode}); !slices.Contains(t.Columns, c) {
			t.Columns = append(t.Columns, c)
		}
	}
	slices.SortFunc(t.Columns, func(a, b Column) int {
		return cmp.Or(cmp.Compare(a.Library, b.Library), cmp.Compare(rank(a.Mode), rank(b.Mode)))
	})
	for len(samples) > 0 {
		n := run(samples, func(a, b Sample) bool { return a.Bytes == b.Bytes })
		row := Row{Bytes: samples[0].Bytes, Cells: make([]*Sample, len(t.Columns))}
		for of := samples[:n]; len(of) > 0; {
			k := run(of, func(a, b Sample) bool { return a.Library == b.Library && a.Mode == b.Mode })
			row.Cells[slices.Index(t.Columns, Column{of[0].Library, of[0].Mode})] = median(of[:k])
			of = of[k:]
		}
		t.Rows = append(t.Rows, row)
		samples = samples[n:]
	}
	return t
}

func rank(mode string) int {
	return slices.Index([]string{"default", "registered", "ce"}, mode) & math.MaxInt
}

func median(s []Sample) *Sample {
	slices.SortFunc(s, func(a, b Sample) int {
		return cmp.Or(cmp.Compare(max(a.Wrong, 0), max(b.Wrong, 0)), cmp.Compare(a.Micros, b.Micros))
	})
	if last := &s[len(s)-1]; last.Wrong > 0 {
		return last
	}
	return &s[len(s)/2]
}

// Ratio is our best time over NCCL's best, below 1 when we are ahead. Without a
// right result on both sides there is none.
func (r Row) Ratio() (float64, bool) {
	best := [2]float64{math.Inf(1), math.Inf(1)}
	for _, c := range r.Cells {
		if c != nil && c.Wrong <= 0 {
			best[c.Library] = min(best[c.Library], c.Micros)
		}
	}
	ratio := best[Lockstep] / best[NCCL]
	return ratio, !math.IsNaN(ratio) && !math.IsInf(ratio, 0) && ratio > 0
}

// Score sums a table up.
type Score struct {
	Sizes, Ahead int     // sizes with a ratio, and those where it is below 1
	Mean         float64 // geometric, of the ratios
	Worst        float64
	WorstBytes   int
	Wrong        int // cells with wrong elements
}

// Score sums up all sizes that both libraries measured.
func (t *Table) Score() Score {
	var s Score
	var logs float64
	for _, r := range t.Rows {
		for _, c := range r.Cells {
			if c != nil && c.Wrong > 0 {
				s.Wrong++
			}
		}
		ratio, ok := r.Ratio()
		if !ok {
			continue
		}
		s.Sizes++
		if ratio < 1 {
			s.Ahead++
		}
		if ratio > s.Worst {
			s.Worst, s.WorstBytes = ratio, r.Bytes
		}
		logs += math.Log(ratio)
	}
	if s.Sizes > 0 {
		s.Mean = math.Exp(logs / float64(s.Sizes))
	}
	return s
}

// Markdown writes the table with what it comes to.
func (t *Table) Markdown(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "### %s, %d GPUs, %s, %s\n\n| size |", t.Coll, t.Ranks, t.Launch, t.Type)
	for _, c := range t.Columns {
		fmt.Fprintf(&b, " %v µs | busbw |", c)
	}
	b.WriteString(" ratio |\n|---:|" + strings.Repeat("---:|---:|", len(t.Columns)) + "---:|\n")
	for _, r := range t.Rows {
		fmt.Fprintf(&b, "| %s |", size(r.Bytes))
		for _, c := range r.Cells {
			switch {
			case c == nil:
				b.WriteString(" – | – |")
			case c.Wrong > 0:
				fmt.Fprintf(&b, " **%d wrong** | – |", c.Wrong)
			case c.Algo != "":
				fmt.Fprintf(&b, " %s (%s) | %.2f |", micros(c.Micros), c.Algo, c.Bus)
			default:
				fmt.Fprintf(&b, " %s | %.2f |", micros(c.Micros), c.Bus)
			}
		}
		if ratio, ok := r.Ratio(); ok {
			fmt.Fprintf(&b, " %.2f |\n", ratio)
		} else {
			b.WriteString(" – |\n")
		}
	}
	if s := t.Score(); s.Sizes > 0 {
		fmt.Fprintf(&b, "\nAhead at %d of %d sizes; geometric mean of the ratio %.2f, worst %.2f at %s.\n", s.Ahead, s.Sizes, s.Mean, s.Worst, size(s.WorstBytes))
	}
	b.WriteByte('\n')
	_, err := io.WriteString(w, b.String())
	return err
}

// Summary writes one line a table, for tables in which both libraries are.
func Summary(w io.Writer, tables []Table) error {
	var b strings.Builder
	b.WriteString("### Summary\n\n| collective | GPUs | launch | type | mean ratio | ahead | worst | at |\n|---|---:|---|---|---:|---:|---:|---:|\n")
	for i := range tables {
		t := &tables[i]
		if s := t.Score(); s.Sizes > 0 {
			fmt.Fprintf(&b, "| %s | %d | %s | %s | %.2f | %d of %d | %.2f | %s |\n",
				t.Coll, t.Ranks, t.Launch, t.Type, s.Mean, s.Ahead, s.Sizes, s.Worst, size(s.WorstBytes))
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func micros(v float64) string {
	if v < 1000 {
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.0f", v)
}

func size(bytes int) string {
	for i, unit := range []string{"GB", "MB", "KB"} {
		if n := 1 << (30 - 10*i); bytes >= n && bytes%n == 0 {
			return fmt.Sprintf("%d %s", bytes/n, unit)
		}
	}
	return fmt.Sprintf("%d B", bytes)
}
