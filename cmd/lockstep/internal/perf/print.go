package perf

import (
	"encoding/json"
	"fmt"
	"io"
	"strconv"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/progress"
)

// printer writes results as nccl-tests does, or as JSON. Only rank 0's goes anywhere.
type printer struct {
	w     io.Writer
	at    *progress.Line // makes room for what is printed
	cmd   *Cmd
	ranks int
	bus   []float64
	wrong int // elements so far
}

func newPrinter(w io.Writer, cmd *Cmd, ranks int) *printer {
	return &printer{w: w, cmd: cmd, ranks: ranks}
}

func (p *printer) header(coll collective) {
	p.at.Wipe()
	p.bus = p.bus[:0]
	if p.cmd.JSON {
		return
	}
	iters := "auto"
	if p.cmd.Iters > 0 {
		iters = strconv.Itoa(p.cmd.Iters)
	}
	fmt.Fprintf(p.w, "# %s: %d ranks on %d nodes, sizes %d to %d, warmup %d, iters %s, check %d, recorder %s\n#\n",
		coll.name, p.ranks, p.cmd.Nodes, p.cmd.Begin, p.cmd.End, p.cmd.Warmup, iters, p.cmd.Check, p.cmd.Recorder)
	if p.cmd.Recorder == "both" {
		const half = "     time     off   ratio   algbw   busbw  #wrong"
		fmt.Fprintf(p.w, "# %50s%-48s%-48s\n", "", "     out of place", "     in place")
		fmt.Fprintf(p.w, "# %10s %11s %9s %7s %8s%s%s\n", "size", "count", "type", "redop", "root", half, half)
		fmt.Fprintf(p.w, "# %10s %11s %9s %7s %8s%[6]s%[6]s\n", "(B)", "(elements)", "", "", "", "     (us)    (us)          (GB/s)  (GB/s)        ")
		return
	}
	const half = "     time   algbw   busbw  #wrong"
	fmt.Fprintf(p.w, "# %50s%-33s%-33s\n", "", "     out of place", "     in place")
	fmt.Fprintf(p.w, "# %10s %11s %9s %7s %8s%s%s\n", "size", "count", "type", "redop", "root", half, half)
	fmt.Fprintf(p.w, "# %10s %11s %9s %7s %8s%[6]s%[6]s\n", "(B)", "(elements)", "", "", "", "     (us)  (GB/s)  (GB/s)        ")
}

func (p *printer) line(coll collective, r *Result) {
	for _, t := range []*Timing{r.OutOfPlace, r.InPlace} {
		if t != nil {
			p.bus = append(p.bus, t.Bus)
			p.wrong += max(t.Wrong, 0)
		}
	}
	p.at.Wipe()
	if p.cmd.JSON {
		b, err := json.Marshal(r)
		if err != nil {
			b = []byte(strconv.Quote(err.Error()))
		}
		fmt.Fprintf(p.w, "%s\n", b)
		return
	}
	fmt.Fprintf(p.w, "  %10d %11d %9s %7s %8d", r.Size, r.Count, r.Type, r.Op, r.Root)
	p.timing(r.OutOfPlace)
	p.timing(r.InPlace)
	fmt.Fprintln(p.w)
}

func (p *printer) timing(t *Timing) {
	both := p.cmd.Recorder == "both"
	if t == nil {
		if fmt.Fprintf(p.w, " %8s", "N/A"); both {
			fmt.Fprintf(p.w, " %7s %7s", "N/A", "N/A")
		}
		fmt.Fprintf(p.w, " %7s %7s %7s", "N/A", "N/A", "N/A")
		return
	}
	fmt.Fprintf(p.w, " %8s", micros(t.Micros))
	if both {
		fmt.Fprintf(p.w, " %7s %7.3f", micros(t.Plain), t.Micros/t.Plain)
	}
	wrong := "N/A"
	if t.Wrong >= 0 {
		wrong = strconv.Itoa(t.Wrong)
	}
	fmt.Fprintf(p.w, " %7.2f %7.2f %7s", t.Alg, t.Bus, wrong)
}

func micros(t float64) string {
	switch {
	case t < 100:
		return fmt.Sprintf("%.2f", t)
	case t < 10_000:
		return fmt.Sprintf("%.1f", t)
	}
	return fmt.Sprintf("%.0f", t)
}

func (p *printer) footer() {
	if p.cmd.JSON || len(p.bus) == 0 {
		return
	}
	p.at.Wipe()
	var sum float64
	for _, b := range p.bus {
		sum += b
	}
	fmt.Fprintf(p.w, "# Avg bus bandwidth    : %.6g\n#\n", sum/float64(len(p.bus)))
}

// verdict is an error when elements came out wrong.
func (p *printer) verdict() error {
	if p.wrong == 0 {
		return nil
	}
	return fmt.Errorf("%d elements came out wrong", p.wrong)
}
