// Package mastercmd is `lockstep master`.
package mastercmd

import (
	"context"
	"log/slog"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/buildinfo"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/controltrace"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/flags"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/presence"
	"github.com/lockstep-ccl/lockstep/collector/master"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/prom"
	"github.com/lockstep-ccl/lockstep/exporters/web"
	"github.com/lockstep-ccl/lockstep/pathplan/service"
)

// Cmd is the command line.
type Cmd struct {
	Job            string        `required:"" help:"Name of the job to watch." env:"LOCKSTEP_JOB"`
	Listen         string        `default:"127.0.0.1:9401" placeholder:"HOST:PORT" help:"Where agents connect (gRPC)."`
	InsecureAgents bool          `help:"Let anybody who reaches --listen report faults of the job, without TLS: whoever can, can have it restarted."`
	StateDir       string        `type:"path" placeholder:"DIR" help:"Keep open incidents here, so that they outlive the master, and the evidence, for lockstep diagnose (default: in memory only, and no evidence)."`
	Patience       time.Duration `default:"3s" help:"Silence after which an agent is lost."`
	StartPatience  time.Duration `default:"1m" help:"How long a rank that has made no communicator may do nothing, while all others wait, before a hang at the start is suspected; it is confirmed after twice that when the process is stopped or has ended, else after five times."`
	Planner        string        `placeholder:"HOST:PORT" help:"Ask this planner over which links the connections go that verdicts are about (default: nobody is asked)."`
	Record         Record        `embed:"" prefix:"record."`
	TLS            flags.TLS     `embed:"" prefix:"tls."`
	Web            flags.Web     `embed:"" set:"listen=:9402"`
	GrafanaURL     string        `name:"web.grafana-url" placeholder:"URL" help:"Where Grafana is, for the status page's links to the job's dashboard at the moment of an incident."`
	TraceURL       string        `name:"web.trace-url" placeholder:"URL" help:"Where a trace is shown, with {trace} for its id, for the status page's links."`

	WhileAttached string `hidden:"" placeholder:"DIR" help:"End some seconds after the last process of the job that lockstep attach has started, by the notes in this runtime directory."`
}

// Record is the recording of evidence.
type Record struct {
	Off           bool          `help:"Record no evidence."`
	MaxBytes      flags.Size    `default:"64M" placeholder:"SIZE" help:"Bound of the rolling recording, and of each incident's (default: 64M)."`
	MaxAge        time.Duration `default:"30m" help:"How far back the rolling recording reaches at most."`
	Incidents     int           `default:"64" placeholder:"N" help:"Recordings of incidents to keep; the oldest are removed (default: 64)."`
	IncidentBytes flags.Size    `default:"512M" placeholder:"SIZE" help:"Bound of all incidents' recordings together (default: 512M)."`
}

// Help implements kong's help provider.
func (*Cmd) Help() string {
	return `Merges what the agents of a job report into one picture, finds hangs and slowness in it and whom
to blame, and publishes that on /metrics, /status (for people) and /api/v1/status (for scripts).
Confirmed incidents are traced over OTLP when OTEL_EXPORTER_OTLP_ENDPOINT is set.
What it judged is recorded in the state directory: the last half hour in DIR/recording, and what is
around each incident in DIR/incidents/ID.evidence; lockstep diagnose --replay judges it again.

Examples:
  lockstep master --job llm --state-dir /var/lib/lockstep/llm
  lockstep master --job llm --listen :9401 --tls.cert m.crt --tls.key m.key --tls.ca ca.crt

Without certificates only processes of its own user, and of root, on its own host may report. Beyond that agents must
show a certificate of their node: lockstep pki --help.`
}

// Run serves until ctx ends.
func (c *Cmd) Run(ctx context.Context, log *slog.Logger) error {
	traces, err := controltrace.New("lockstep-master", log)
	if err != nil {
		return err
	}
	defer traces.Close()
	paths, where, err := c.paths(log)
	if err != nil {
		return err
	}
	m, err := master.New(master.Options{
		Paths: paths,
		Job:   c.Job, Listen: c.Listen, TLS: c.TLS.Wire(), Insecure: c.InsecureAgents, StateDir: c.StateDir,
		Diagnosis: c.diagnosis(), Patience: c.Patience, Log: log,
		Recording: master.Recording{
			Off: c.Record.Off, Program: buildinfo.Version(), MaxBytes: int64(c.Record.MaxBytes), MaxAge: c.Record.MaxAge,
			Incidents: c.Record.Incidents, IncidentBytes: int64(c.Record.IncidentBytes),
		},
	})
	if err != nil {
		return err
	}
	reg := prom.NewRegistry(names.Master, flags.Build(), prom.NewMaster(m.Snapshot, prom.Options{}), prom.Certificates(flags.Certificates), traces)
	if c.StateDir != "" {
		reg.MustRegister(prom.State(func() string { return m.Snapshot().StateError }))
	}
	o := c.Web.Options("Lockstep master of "+c.Job, "Who broke step, and why.", log)
	o.Metrics, o.Status, o.Job, o.Ready = prom.Handler(reg, log), m.Snapshot, m.View, m.Ready
	o.Links = web.Links{Grafana: c.GrafanaURL, Trace: c.TraceURL}
	srv, err := web.New(o)
	if err != nil {
		return err
	}
	reg.MustRegister(prom.Web(srv), prom.Crowded(names.ListenerAgents, m.HungUp))
	if c.WhileAttached != "" {
		there := presence.Info{Web: srv.Addr().String(), Agents: m.Addr().String()}
		release, err := presence.Hold(c.WhileAttached, presence.Master(c.Job), there)
		if err != nil {
			return err
		}
		defer release()
		var cancel context.CancelFunc
		ctx, cancel = presence.WhileAttached(ctx, c.WhileAttached, c.Job)
		defer cancel()
	}
	log.Info("master is ready", "job", c.Job, "agents", m.Addr().String(), "web", srv.Addr().String())
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return m.Run(ctx) })
	g.Go(func() error { return srv.Run(ctx) })
	g.Go(func() error { traces.Follow(ctx, m.Snapshot); return nil })
	if where != nil {
		g.Go(func() error { where.Run(ctx); return nil })
	}
	return g.Wait()
}

// paths asks the planner where connections go, when there is one.
func (c *Cmd) paths(log *slog.Logger) (func(comm uint64, rank, peer int) string, *service.Where, error) {
	if c.Planner == "" {
		return nil, nil, nil
	}
	creds, err := service.Credentials(c.TLS.Wire(), false)
	if err != nil {
		return nil, nil, err
	}
	w, err := service.NewWhere(service.WhereOptions{Planner: c.Planner, Credentials: creds, Node: "master", Job: c.Job, Log: log})
	if err != nil {
		return nil, nil, err
	}
	return w.Path, w, nil
}

// diagnosis is how the engine judges.
func (c *Cmd) diagnosis() diagnosis.Config {
	cfg := diagnosis.DefaultConfig()
	cfg.StartPatience = c.StartPatience
	return cfg
}
