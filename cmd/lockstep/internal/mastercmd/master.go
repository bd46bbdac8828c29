// Package mastercmd is `lockstep master`.
package mastercmd

import (
	"context"
	"log/slog"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/controltrace"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/flags"
	"github.com/lockstep-ccl/lockstep/collector/master"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/prom"
	"github.com/lockstep-ccl/lockstep/exporters/web"
)

// Cmd is the command line.
type Cmd struct {
	Job      string        `required:"" help:"Name of the job to watch." env:"LOCKSTEP_JOB"`
	Listen   string        `default:":9401" placeholder:"HOST:PORT" help:"Where agents connect (gRPC)."`
	StateDir string        `type:"path" placeholder:"DIR" help:"Keep open incidents here, so that they outlive the master (default: in memory only)."`
	Patience time.Duration `default:"3s" help:"Silence after which an agent is lost."`
	TLS      flags.TLS     `embed:"" prefix:"tls."`
	Web      flags.Web     `embed:"" set:"listen=:9402"`
}

// Help implements kong's help provider.
func (*Cmd) Help() string {
	return `Merges what the agents of a job report into one picture, finds hangs and slowness in it and whom
to blame, and publishes that on /metrics, /status (for people) and /api/v1/status (for scripts).
Confirmed incidents are traced over OTLP when OTEL_EXPORTER_OTLP_ENDPOINT is set.

Examples:
  lockstep master --job llm --state-dir /var/lib/lockstep/llm
  lockstep master --job llm --tls.cert m.crt --tls.key m.key --tls.ca ca.crt     mutual TLS`
}

// Run serves until ctx ends.
func (c *Cmd) Run(ctx context.Context, log *slog.Logger) error {
	traces, err := controltrace.New("lockstep-master", log)
	if err != nil {
		return err
	}
	defer traces.Close()
	m, err := master.New(master.Options{
		Job: c.Job, Listen: c.Listen, TLS: c.TLS.Wire(), StateDir: c.StateDir,
		Diagnosis: diagnosis.DefaultConfig(), Patience: c.Patience, Log: log,
	})
	if err != nil {
		return err
	}
	reg := prom.NewRegistry(names.Master, flags.Build(), prom.NewMaster(m.Snapshot, prom.Options{}))
	o := c.Web.Options("Lockstep master of "+c.Job, "Who broke step, and why.", log)
	o.Metrics, o.Status = prom.Handler(reg, log), m.Snapshot
	srv, err := web.New(o)
	if err != nil {
		return err
	}
	log.Info("master is ready", "job", c.Job, "agents", m.Addr().String(), "web", srv.Addr().String())
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return m.Run(ctx) })
	g.Go(func() error { return srv.Run(ctx) })
	g.Go(func() error { traces.Follow(ctx, m.Snapshot); return nil })
	return g.Wait()
}
