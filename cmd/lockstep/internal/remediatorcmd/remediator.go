// Package remediatorcmd is `lockstep remediator` and `lockstep breaker`.
package remediatorcmd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/controltrace"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/flags"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/prom"
	"github.com/lockstep-ccl/lockstep/exporters/web"
	"github.com/lockstep-ccl/lockstep/internal/statedir"
	"github.com/lockstep-ccl/lockstep/remediation"
)

// Cmd is the command line.
type Cmd struct {
	Config                string `name:"config.file" type:"existingfile" placeholder:"FILE" help:"Policies and breaker (default: restart on confirmed hangs, dry run)."`
	Journal               string `default:"/var/lib/lockstep/remediator.db" type:"path" help:"Journal file."`
	TokenFile             string `type:"existingfile" placeholder:"FILE" help:"File with the bearer token that Alertmanager presents; at least 16 bytes, readable by nobody else. Required to run."`
	OperatorTokenFile     string `type:"existingfile" placeholder:"FILE" help:"File with the bearer token that operators close breakers with (lockstep breaker), another one than Alertmanager's; without it nobody can."`
	Actuators             `embed:""`
	Master                []string  `placeholder:"[JOB=]HOST:PORT" help:"Where a job's master listens: it is asked about each incident before anything is done. {job} stands for the job's name. Repeatable." env:"LOCKSTEP_MASTER"`
	InsecureBelieveAlerts bool      `help:"Act on what alerts say, without asking the job's master: whoever can post to Alertmanager can then restart jobs."`
	TLS                   flags.TLS `embed:"" prefix:"tls."`
	Check                 bool      `help:"Check the configuration and exit."`
	Web                   flags.Web `embed:"" set:"listen=127.0.0.1:9410"`
}

// Help implements kong's help provider.
func (*Cmd) Help() string {
	return `Receives Alertmanager's webhook on /webhook, journals it, decides by policy, asks the breaker,
and acts. Nothing is done for real until the configuration says dry_run: false. Actions are traced
over OTLP, in the trace of their incident, when OTEL_EXPORTER_OTLP_ENDPOINT is set.

Examples:
  lockstep remediator --token-file token --master 127.0.0.1:9401 --journal r.db
                                         decide and journal, act on nothing (dry run)
  lockstep remediator --config.file r.yaml --token-file token --operator-token-file operator-token --supervisor llm=/run/lockstep/llm/control.sock \
    --master 'lockstep-master-{job}:9401' --tls.cert r.crt --tls.key r.key --tls.ca ca.crt
  lockstep remediator --config.file r.yaml --token-file token --actuator kubernetes --kubernetes.namespace training --master '{job}.training:9401'
  lockstep remediator --config.file r.yaml --token-file token --actuator slurm --slurm.user alice --master slurm-77=10.0.0.5:9401
  lockstep remediator --config.file r.yaml --check

r.yaml, all of it optional:
  dry_run: false
  policies:
  - {name: hangs, class: noncommunication_hang, action: restart}
  - {name: slow-rank, class: noncommunication_slow, job: 'llm-*', action: restart_excluding}
  breaker: {window: 1h, job: 5, total: 20, unit_share: 0.1, units: 8}

Alertmanager's side:
  receivers:
  - name: lockstep
    webhook_configs:
    - url: http://remediator:9410/webhook
      http_config: {authorization: {credentials_file: /etc/lockstep/token}}`
}

// Run serves until ctx ends.
func (c *Cmd) Run(ctx context.Context, log *slog.Logger, out io.Writer) error {
	cfg := remediation.DefaultConfig()
	if c.Config != "" {
		var err error
		if cfg, err = remediation.LoadConfig(c.Config); err != nil {
			return err
		}
	}
	if c.Check {
		fmt.Fprintf(out, "%s: %d policies, dry run %v\n", cmp.Or(c.Config, "defaults"), len(cfg.Policies), *cfg.DryRun)
		return nil
	}
	token, err := readToken(c.TokenFile)
	if err != nil {
		return err
	}
	var operator []byte
	if c.OperatorTokenFile != "" {
		if operator, err = readToken(c.OperatorTokenFile); err != nil {
			return err
		}
	} else {
		log.Warn("no breaker can be closed: there is no --operator-token-file")
	}
	masterOf, err := flags.Masters(c.Master)
	if err != nil {
		return err
	}
	certs := c.TLS.Wire()
	if _, err := certs.Credentials(); err != nil {
		return fmt.Errorf("remediator: %w", err)
	}
	if c.InsecureBelieveAlerts {
		log.Warn("alerts are believed: whoever can post to Alertmanager can restart jobs")
	}
	traces, err := controltrace.New("lockstep-remediator", log)
	if err != nil {
		return err
	}
	defer traces.Close()
	reg := prom.NewRegistry(names.Remediator, flags.Build(), prom.Certificates(flags.Certificates), traces)
	ask := masters{address: masterOf, tls: certs}
	act, err := c.build(log, reg, ask)
	if err != nil {
		return err
	}
	if act.release != nil {
		defer func() {
			if err := act.release(); err != nil { // no failure of an action
				log.Warn("the actuator does not close", "err", err)
			}
		}()
	}
	if *cfg.DryRun {
		log.Warn("dry run: decisions are journaled and logged, nothing is done")
	}
	notes, err := newNotes(ask, reg, log)
	if err != nil {
		return err
	}
	return c.serve(ctx, log, reg, act, notes, remediation.Options{
		Config: cfg, Journal: c.Journal, Token: token, OperatorToken: operator, Logger: log, Registry: reg,
		OnEvent: func(e remediation.Entry) { traces.Action(e); notes.event(e) },
		Masters: ask, BelieveAlerts: c.InsecureBelieveAlerts, Actuator: act.Actuator, Fencer: act.fencer,
	})
}

// serve runs the remediator and its pages. Where several may run, who does not lead has no
// journal open, and refuses webhooks so that Alertmanager repeats them.
func (c *Cmd) serve(ctx context.Context, log *slog.Logger, reg *prometheus.Registry, act actuator, notes *notes, options remediation.Options) error {
	var current atomic.Pointer[remediation.Remediator]
	if act.lead == nil {
		r, err := remediation.New(options)
		if err != nil {
			return err
		}
		current.Store(r)
	}
	o := c.Web.Options("Lockstep remediator", "Turns alerts into actions.", log)
	o.Metrics = prom.Handler(reg, log)
	o.Ready = func() error {
		r := current.Load()
		if r == nil {
			return errStandby
		}
		return r.Ready()
	}
	srv, err := web.New(o)
	if err != nil {
		return err
	}
	reg.MustRegister(prom.Web(srv))
	h := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		r := current.Load()
		if r == nil {
			http.Error(w, errStandby.Error(), http.StatusServiceUnavailable)
			return
		}
		r.Handler().ServeHTTP(w, req)
	})
	srv.Handle("/webhook", h)
	srv.Handle("/api/v1/", h)
	g, ctx := errgroup.WithContext(ctx)
	run := func(ctx context.Context) error {
		r := current.Load()
		if r == nil {
			var err error
			if r, err = remediation.New(options); err != nil {
				return err
			}
			current.Store(r)
			defer current.Store(nil)
		}
		log.Info("remediator is ready", "web", srv.Addr().String(), "journal", c.Journal, "actuator", act.Name())
		var keeping sync.WaitGroup
		if act.keep != nil {
			keeping.Go(func() { act.keep(ctx) })
		}
		defer keeping.Wait()
		return r.Run(ctx)
	}
	g.Go(func() error {
		if act.lead == nil {
			return run(ctx)
		}
		if err := act.lead(ctx, run); ctx.Err() == nil {
			return err
		}
		return nil // asked to end, as without a lease
	})
	g.Go(func() error { return srv.Run(ctx) })
	g.Go(func() error { notes.run(ctx); return nil })
	return g.Wait()
}

var errStandby = errors.New("this remediator does not lead: another one acts, and has the journal")

func readToken(file string) ([]byte, error) {
	b, err := statedir.ReadSecret(file)
	if err != nil {
		return nil, fmt.Errorf("token file: %w", err)
	}
	return b, nil
}
