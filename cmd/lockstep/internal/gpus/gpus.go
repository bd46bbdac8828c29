// Package gpus is `lockstep gpus`: what the agent's nvml source sees, once.
package gpus

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/progress"
	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/collector/source/nvml"
	"github.com/lockstep-ccl/lockstep/collector/source/proc"
	"github.com/lockstep-ccl/lockstep/collector/source/recorder"
	"github.com/lockstep-ccl/lockstep/record"
)

// Cmd is the command line.
type Cmd struct {
	JSON       bool          `name:"json" help:"Print all that is known, as JSON. What a GPU cannot tell is not there."`
	RuntimeDir string        `default:"${runtime_dir}" type:"path" help:"Where the ranks of this node keep their flight recorders." env:"LOCKSTEP_RUNTIME_DIR"`
	Timeout    time.Duration `default:"15s" help:"How long the driver may take."`
}

// Help implements kong's help provider.
func (*Cmd) Help() string {
	return `Asks NVIDIA's driver for the health of this node's GPUs, as the agent does every few seconds, and names the
ranks that use them. Needs no agent and no privilege. Xids are not among it: the driver tells them as they happen.

Examples:
  lockstep gpus                                    a line for each GPU
  lockstep gpus --json | jq '.gpus[].nvlinks'      everything, such as the counters of each link`
}

// seen is what is printed.
type seen struct {
	*collector.GPUs
	Ranks []rank `json:"ranks"`
}

// rank is a live process with a recorder that uses a GPU.
type rank struct {
	Job  string `json:"job"`
	Rank int32  `json:"rank"`
	PID  int32  `json:"pid"`
	GPU  int    `json:"gpu"`
}

// Run prints what there is to see.
func (c *Cmd) Run(ctx context.Context, out io.Writer) error {
	gpus := nvml.New(nvml.Options{Bound: c.Timeout, Log: slog.New(slog.DiscardHandler)})
	defer gpus.Close()
	waiting := progress.Start("waiting for NVIDIA's driver")
	s, err := look(ctx, gpus, c.RuntimeDir)
	waiting.Stop()
	if err != nil {
		return err
	}
	if c.JSON {
		enc := json.NewEncoder(out)
		enc.SetIndent("", "  ")
		return enc.Encode(s)
	}
	return s.print(out)
}

// look passes until the first probe has come back.
func look(ctx context.Context, gpus source.Source, dir string) (*seen, error) {
	recorders := recorder.New(recorder.Options{Dir: dir})
	defer recorders.Close()
	procs, err := proc.New("/proc")
	if err != nil {
		return nil, err
	}
	defer procs.Close()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		v := source.View{Now: record.Now()}
		_ = recorders.Update(&v) // a node without ranks is well
		_ = procs.Update(&v)     // the pids by which GPUs are found
		switch err := gpus.Update(&v); {
		case err != nil:
			return nil, err
		case v.GPUs != nil:
			s := &seen{GPUs: v.GPUs, Ranks: []rank{}}
			for _, p := range v.Processes {
				if p.GPU.Seen && !p.Closed {
					s.Ranks = append(s.Ranks, rank{p.Job, p.Rank, cmp.Or(p.HostPID, p.PID), int(p.GPU.Index)})
				}
			}
			return s, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-tick.C:
		}
	}
}

func (s *seen) print(out io.Writer) error {
	fmt.Fprintf(out, "driver %s, %d GPUs, asked in %v\n\n", s.DriverVersion, len(s.GPUs.GPUs), time.Duration(s.ProbeNs).Round(time.Millisecond))
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "GPU\tMODEL\tBUS\tTEMP\tPOWER\tSM CLOCK\tBUSY\tMEMORY\tPCIE\tNVLINKS\tLINK ERRORS\tECC UNCORR\tREMAPPED\tLOWERED BY\tRANKS")
	for i := range s.GPUs.GPUs {
		g := &s.GPUs.GPUs[i]
		if g.Lost {
			fmt.Fprintf(w, "%d\t%s\t%s\tLOST: it does not answer its driver\n", g.Index, g.Model, g.BusID)
			continue
		}
		up, errs := links(g.Links)
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n",
			g.Index, g.Model, g.BusID,
			show("%.0f °C", 1, g.Temperature), of("%.0f", 1, g.Power, g.PowerLimit, " W"), show("%.0f MHz", 1e-6, g.SMClock),
			show("%.0f %%", 100, g.Utilization), of("%.1f", 1.0/(1<<30), g.MemoryUsed, g.MemoryTotal, " GiB"),
			show("gen %.0f ×%.0f", 1, g.PCIeGeneration, g.PCIeWidth), up, errs,
			show("%.0f", 1, g.Uncorrected.Volatile), remapped(g), lowered(g), s.ranks(g.Index))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for i := range s.GPUs.GPUs {
		for _, f := range s.GPUs.GPUs[i].Failed {
			fmt.Fprintf(out, "GPU %d: %s\n", s.GPUs.GPUs[i].Index, f)
		}
	}
	return nil
}

// show formats values, each times scale; "-" when one of them is not known.
func show(format string, scale float64, values ...*float64) string {
	var args []any
	for _, v := range values {
		if v == nil {
			return "-"
		}
		args = append(args, *v*scale)
	}
	return fmt.Sprintf(format, args...)
}

// of shows a value of what there may be at most, the latter when it is known.
func of(format string, scale float64, v, most *float64, unit string) string {
	switch {
	case v == nil:
		return "-"
	case most == nil:
		return show(format, scale, v) + unit
	}
	return show(format+"/%.0f", scale, v, most) + unit
}

func links(all []collector.NVLink) (up, errs string) {
	if len(all) == 0 {
		return "-", "-"
	}
	var n int
	var sum [3]float64
	known := false
	for _, l := range all {
		if l.Up {
			n++
		}
		for i, v := range []*float64{l.CRC, l.Replays, l.Recoveries} {
			if v != nil {
				known = true
				sum[i] += *v
			}
		}
	}
	if !known {
		return fmt.Sprintf("%d/%d up", n, len(all)), "-"
	}
	return fmt.Sprintf("%d/%d up", n, len(all)), fmt.Sprintf("%.0f crc, %.0f replay, %.0f recovery", sum[0], sum[1], sum[2])
}

func remapped(g *collector.GPU) string {
	s := show("%.0f+%.0f", 1, g.RowsCorrected, g.RowsUncorrected)
	if g.RemapPending != nil && *g.RemapPending != 0 {
		s += ", PENDING"
	}
	if g.RemapFailure != nil && *g.RemapFailure != 0 {
		s += ", FAILED"
	}
	return s
}

func lowered(g *collector.GPU) string {
	if g.Throttle == nil || *g.Throttle == 0 {
		return "-"
	}
	return g.Throttle.String()
}

func (s *seen) ranks(gpu int) string {
	var on []string
	for _, r := range s.Ranks {
		if r.GPU == gpu {
			on = append(on, fmt.Sprintf("%s/%d", r.Job, r.Rank))
		}
	}
	if len(on) == 0 {
		return "-"
	}
	return strings.Join(on, " ")
}
