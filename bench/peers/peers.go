package peers

import (
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"text/tabwriter"
)

// Case is one collective between ranks of this machine, at several sizes.
type Case struct {
	Coll      string // allreduce, reduce_scatter, allgather, broadcast, alltoall or sendrecv
	Ranks     int
	Transport string // shm or tcp

	// Sizes are Min, Min·Factor, … up to Max, in bytes of the larger buffer of
	// a rank. A peer leaves out those that its ranks cannot share evenly.
	Min, Max, Factor int
}

func (c Case) String() string { return fmt.Sprintf("%s, %d ranks, %s", c.Coll, c.Ranks, c.Transport) }

// Sample is one size's time.
type Sample struct {
	Bytes  int
	Micros float64 // of one operation
}

// Peer measures cases with one library.
type Peer interface {
	Name() string
	// Run measures every size of c. It starts processes and has ended them when
	// it returns, whatever ctx does.
	Run(ctx context.Context, c Case) ([]Sample, error)
}

// Line compares one size: Micros has one time a peer.
type Line struct {
	Case   Case
	Bytes  int
	Micros []float64
}

// Compare runs every peer in turn, rounds times, and returns the sizes that all
// of them measured, in ascending order. pick reduces the times of the rounds to
// one: Median, or Least on a machine that others load.
func Compare(ctx context.Context, peers []Peer, c Case, rounds int, pick func([]float64) float64) ([]Line, error) {
	times := make(map[int][][]float64) // by size, peer, round
	for range rounds {
		for i, p := range peers {
			samples, err := p.Run(ctx, c)
			if err != nil {
				return nil, fmt.Errorf("%s: %v: %w", p.Name(), c, err)
			}
			for _, s := range samples {
				if times[s.Bytes] == nil {
					times[s.Bytes] = make([][]float64, len(peers))
				}
				times[s.Bytes][i] = append(times[s.Bytes][i], s.Micros)
			}
		}
	}
	var lines []Line
	for bytes, byPeer := range times {
		l := Line{Case: c, Bytes: bytes}
		for _, t := range byPeer {
			if len(t) > 0 {
				l.Micros = append(l.Micros, pick(t))
			}
		}
		if len(l.Micros) == len(peers) {
			lines = append(lines, l)
		}
	}
	slices.SortFunc(lines, func(a, b Line) int { return a.Bytes - b.Bytes })
	return lines, nil
}

// Median returns the middle of some times, and sorts them.
func Median(t []float64) float64 {
	slices.Sort(t)
	if n := len(t); n%2 == 0 {
		return (t[n/2-1] + t[n/2]) / 2
	}
	return t[len(t)/2]
}

// Least returns the shortest of some times.
func Least(t []float64) float64 { return slices.Min(t) }

// Header and Print write the table. The last peer is the one that is judged:
// its ratio is against the fastest of the others, above 1 is slower.
func Header(w io.Writer, peers []Peer) {
	t := columns(w)
	defer t.Flush()
	fmt.Fprint(t, "collective\tranks\ttransport\tbytes\t")
	for _, p := range peers {
		fmt.Fprintf(t, "%s µs\t", p.Name())
	}
	fmt.Fprintln(t, "ratio\t")
}

func Print(w io.Writer, lines []Line) {
	t := columns(w)
	defer t.Flush()
	for _, l := range lines {
		fmt.Fprintf(t, "%s\t%d\t%s\t%d\t", l.Case.Coll, l.Case.Ranks, l.Case.Transport, l.Bytes)
		for _, m := range l.Micros {
			fmt.Fprintf(t, "%.2f\t", m)
		}
		fmt.Fprintf(t, "%.2f\t\n", l.Ratio())
	}
}

func columns(w io.Writer) *tabwriter.Writer {
	return tabwriter.NewWriter(w, 14, 0, 1, ' ', tabwriter.AlignRight)
}

// Ratio is the last peer's time over the best of the others'.
func (l Line) Ratio() float64 {
	n := len(l.Micros) - 1
	return l.Micros[n] / slices.Min(l.Micros[:n])
}

// Summary writes one line a case and transport: the geometric mean of the
// ratios, how many sizes are no slower, and the worst one.
func Summary(w io.Writer, lines []Line) {
	t := columns(w)
	defer t.Flush()
	fmt.Fprintln(t, "collective\tranks\ttransport\tmean ratio\tno slower\tworst\tat bytes\t")
	for len(lines) > 0 {
		c := lines[0].Case
		n := 1
		for n < len(lines) && lines[n].Case == c {
			n++
		}
		var logs float64
		good, worst := 0, lines[0]
		for _, l := range lines[:n] {
			logs += math.Log(l.Ratio())
			if l.Ratio() <= 1 {
				good++
			}
			if l.Ratio() > worst.Ratio() {
				worst = l
			}
		}
		fmt.Fprintf(t, "%s\t%d\t%s\t%.2f\t%d of %d\t%.2f\t%d\t\n",
			c.Coll, c.Ranks, c.Transport, math.Exp(logs/float64(n)), good, n, worst.Ratio(), worst.Bytes)
		lines = lines[n:]
	}
}
