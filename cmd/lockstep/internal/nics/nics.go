// Package nics is `lockstep nics`: what the agent's rdma source sees, once, and
// which port a rank would take.
package nics

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/progress"
	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/collector/source/rdma"
	"github.com/lockstep-ccl/lockstep/record"
)

// Cmd is the command line.
type Cmd struct {
	JSON    bool          `name:"json" help:"Print all that is known, as JSON. What a driver does not tell is not there."`
	HCA     string        `name:"hca" placeholder:"LIST" help:"Ports that may be used, in the syntax of NCCL_IB_HCA: =mlx5_0:1,mlx5_1 or ^mlx5_3." env:"LOCKSTEP_RDMA_HCA"`
	GID     string        `name:"gid" placeholder:"ADDRESS" help:"Address or prefix that a port's GID must have." env:"LOCKSTEP_RDMA_GID"`
	Sys     string        `default:"/sys" type:"path" help:"Where sysfs is mounted."`
	Timeout time.Duration `default:"15s" help:"How long the drivers may take."`
}

// Help implements kong's help provider.
func (*Cmd) Help() string {
	return `Reads the state and the counters of this node's RDMA ports, as the agent does every few seconds, and says which
port a rank near each GPU would use, which would be its backup, and why. Needs no agent and no RDMA library. A
Direct NIC's second function is found by root only; ranks ask the driver for it.

Examples:
  lockstep nics                                          a line for each port, and for each GPU
  lockstep nics --hca =mlx5_0,mlx5_3                     what LOCKSTEP_RDMA_HCA would do
  lockstep nics --json | jq '.ports[].retransmissions'   everything, by the drivers' names`
}

// seen is what is printed.
type seen struct {
	*collector.NICs
	Choices  []ccl.NICChoice `json:"choices"`
	Unusable []ccl.NICPort   `json:"unusable"`
}

// Run prints what there is to see.
func (c *Cmd) Run(ctx context.Context, out io.Writer) error {
	ctx, cancel := context.WithTimeoutCause(ctx, c.Timeout, fmt.Errorf("reading %s takes longer than --timeout=%v", c.Sys, c.Timeout))
	defer cancel()
	ports := rdma.New(rdma.Options{Sys: os.DirFS(c.Sys), Bound: c.Timeout, Log: slog.New(slog.DiscardHandler)})
	defer ports.Close()
	waiting := progress.Start("reading the ports below " + c.Sys)
	defer waiting.Stop()
	s, err := look(ctx, ports)
	if err != nil {
		return err
	}
	if err := s.choose(ctx, c); err != nil {
		return err
	}
	waiting.Stop()
	if c.JSON {
		enc := json.NewEncoder(out)
		enc.SetIndent("", "  ")
		return enc.Encode(s)
	}
	return s.print(out)
}

// look passes until the first probe has come back.
func look(ctx context.Context, ports source.Source) (*seen, error) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		v := source.View{Now: record.Now()}
		switch err := ports.Update(&v); {
		case err != nil:
			return nil, err
		case v.NICs != nil:
			return &seen{NICs: v.NICs}, nil
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// choose asks what ranks would use. Its reads, too, may never return.
func (s *seen) choose(ctx context.Context, c *Cmd) error {
	type answer struct {
		choices  []ccl.NICChoice
		unusable []ccl.NICPort
		err      error
	}
	done := make(chan answer, 1)
	go func() {
		choices, unusable, err := ccl.NICs(os.DirFS(c.Sys), c.HCA, c.GID)
		done <- answer{choices, unusable, err}
	}()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case a := <-done:
		s.Choices, s.Unusable = a.choices, a.unusable
		return a.err
	}
}

func (s *seen) print(out io.Writer) error {
	fmt.Fprintf(out, "%d RDMA ports, read in %v\n\n", len(s.Ports), time.Duration(s.ProbeNs).Round(time.Millisecond))
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "PORT\tSTATE\tLINK\tRATE\tINTERFACE\tBUS\tCHIP\tFIRMWARE\tRETRANSMISSIONS\tCONGESTION\tERRORS")
	for i := range s.Ports {
		p := &s.Ports[i]
		fmt.Fprintf(w, "%s:%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n",
			p.Device, p.Port, state(p), word(p.Layer), rate(p.Rate), interfaces(p.Links), word(p.BusID), word(p.Model), word(p.Firmware),
			total(p.Retransmissions), total(p.Congestion), total(p.Errors))
	}
	fmt.Fprint(w, "\nRANK NEAR\tPRIMARY\tADDRESS\tWHY\tBACKUP\tWHY\n")
	for i := range s.Choices {
		fmt.Fprintln(w, choice(&s.Choices[i]))
	}
	if len(s.Choices) == 0 {
		fmt.Fprintln(w, "-\tnone can be used")
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if len(s.Unusable) > 0 {
		fmt.Fprintln(out)
	}
	for _, p := range s.Unusable {
		fmt.Fprintf(out, "%s:%d is not used: it %s\n", p.Device, p.Port, p.Why)
	}
	for i := range s.Ports {
		for _, f := range s.Ports[i].Failed {
			fmt.Fprintln(out, "cannot read", f)
		}
	}
	return nil
}

// choice is the line of one place.
func choice(c *ccl.NICChoice) string {
	var where string
	switch {
	case c.GPU != "":
		where = "GPU " + c.GPU
	case c.NUMA >= 0:
		where = fmt.Sprintf("NUMA node %d, rank %d of it", c.NUMA, c.Local)
	default:
		where = fmt.Sprintf("rank %d of the node", c.Local)
	}
	primary, backup, why := c.Ports[0], "none", "-"
	if len(c.Ports) > 1 {
		backup, why = name(c.Ports[1]), c.Ports[1].Why
	}
	return fmt.Sprintf("%s\t%s\t%s\t%s\t%s\t%s", where, name(primary), primary.Address, primary.Why, backup, why)
}

func name(p ccl.NICPort) string { return fmt.Sprintf("%s:%d", p.Device, p.Port) }

func state(p *collector.NICPort) string {
	if p.State == "" {
		return "unknown"
	}
	return p.State + " (" + word(p.PhysicalState) + ")"
}

func word(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func rate(bytes *float64) string {
	if bytes == nil {
		return "-"
	}
	return fmt.Sprintf("%.4g Gb/s", *bytes*8/1e9)
}

func interfaces(links []collector.NICLink) string {
	if len(links) == 0 {
		return "-"
	}
	var all []string
	for _, l := range links {
		if l.Up {
			all = append(all, l.NetDev)
		} else {
			all = append(all, l.NetDev+" DOWN")
		}
	}
	if len(all) == 1 {
		return all[0]
	}
	return all[0] + " of " + strings.Join(all[1:], ", ")
}

// total adds counters up, "-" when there are none.
func total(counters []collector.NICCounter) string {
	if len(counters) == 0 {
		return "-"
	}
	var sum float64
	for _, c := range counters {
		sum += c.Value
	}
	return fmt.Sprintf("%.0f", sum)
}
