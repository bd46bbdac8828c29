// Package plannercmd is `lockstep planner`.
package plannercmd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/controltrace"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/flags"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/prom"
	"github.com/lockstep-ccl/lockstep/exporters/web"
	"github.com/lockstep-ccl/lockstep/pathplan"
	"github.com/lockstep-ccl/lockstep/pathplan/service"
)

// Cmd is the command line.
type Cmd struct {
	Serve Serve `cmd:"" help:"Plan the paths of all jobs' connections (one a fabric)."`
	Probe Probe `cmd:"" help:"Probe the fabric from this host, and answer other hosts' probes (one a host)."`
	Check Check `cmd:"" help:"Check a fabric's file, and say what is in it."`
}

// Help implements kong's help provider.
func (*Cmd) Help() string {
	return `C4P: gives each connection of each job its path through a leaf-spine fabric, so that links carry the same
and bad ones are left. Switches choose paths by a hash of addresses and ports; ranks find by traces which source ports take
the paths that the planner gives them. A planner that is away costs the plan and nothing else.

Examples:
  lockstep planner check --fabric fabric.json
  lockstep planner serve --fabric fabric.json --listen :9411 --tls.cert p.crt --tls.key p.key --tls.ca ca.crt
  lockstep planner probe --planner planner:9411 --node gpu-01 --tls.cert a.crt --tls.key a.key --tls.ca ca.crt
  LOCKSTEP_PLANNER=planner:9411 lockstep perf all_reduce

fabric.json, two hosts under two leaves and a spine. Links have a direction; each has an interface: the address by which
its far end answers probes:

  {"leaves": ["leaf1", "leaf2"], "spines": ["spine1"],
   "links": [
    {"from": "leaf1", "to": "spine1", "rate": 400000000000}, {"from": "spine1", "to": "leaf1", "rate": 400000000000},
    {"from": "leaf2", "to": "spine1", "rate": 400000000000}, {"from": "spine1", "to": "leaf2", "rate": 400000000000}],
   "ports": [
    {"host": "gpu-01", "nic": "mlx5_0", "side": 0, "leaf": "leaf1", "rate": 200000000000, "addr": "10.1.1.1"},
    {"host": "gpu-02", "nic": "mlx5_0", "side": 0, "leaf": "leaf2", "rate": 200000000000, "addr": "10.1.2.1"}],
   "interfaces": [
    {"from": "leaf1", "to": "spine1", "addr": "10.2.1.0"}, {"from": "spine1", "to": "leaf1", "addr": "10.2.1.1"},
    {"from": "leaf2", "to": "spine1", "addr": "10.2.2.0"}, {"from": "spine1", "to": "leaf2", "addr": "10.2.2.1"}]}

Ranks of other users and hosts show the planner the certificate that LOCKSTEP_PLANNER_CERT, _KEY and _CA name.`
}

// Serve is `lockstep planner serve`.
type Serve struct {
	Fabric   string        `required:"" type:"existingfile" placeholder:"FILE" help:"The fabric: switches, links and their interfaces' addresses, hosts' ports (JSON)."`
	Listen   string        `default:"127.0.0.1:9411" placeholder:"HOST:PORT" help:"Where processes and probers connect (gRPC; default: ${default})."`
	Insecure bool          `name:"insecure-clients" help:"Let anybody who reaches --listen plan and probe, without TLS: whoever can, can have jobs' traffic moved."`
	Lease    time.Duration `default:"60s" help:"How long a process that is away keeps its paths (default: ${default})."`
	Moves    int           `default:"64" help:"Lanes that are moved at most, each 200 ms (default: ${default})."`
	StateDir string        `type:"path" placeholder:"DIR" help:"Where the plan is kept, so that a planner that is started again goes on with it; nobody else may look into it (default: nowhere)."`
	Probing  Probing       `embed:"" prefix:"probe."`
	TLS      flags.TLS     `embed:"" prefix:"tls."`
	Web      flags.Web     `embed:"" set:"listen=127.0.0.1:9412"`
}

// Probing is how the fabric is probed.
type Probing struct {
	Every  time.Duration `default:"500ms" help:"Time between rounds (default: ${default})."`
	Window time.Duration `default:"6s" help:"What links are judged by (default: ${default})."`
	Port   uint16        `default:"4791" help:"UDP port of hosts' responders (default: ${default}, as RoCEv2)."`
	Rate   int           `default:"1000" help:"Probes a second of one host (default: ${default}); five times as many while a link may be bad."`
}

// Help implements kong's help provider.
func (*Serve) Help() string {
	return `Examples:
  lockstep planner serve --fabric fabric.json
  lockstep planner serve --fabric fabric.json --state-dir /var/lib/lockstep/planner --listen :9411 --tls.cert p.crt --tls.key p.key --tls.ca ca.crt`
}

// Run serves until ctx ends.
func (c *Serve) Run(ctx context.Context, log *slog.Logger) error {
	if c.Lease < 10*time.Second || c.Moves < 1 || c.Probing.Every < 50*time.Millisecond || c.Probing.Window < c.Probing.Every || c.Probing.Rate < 1 || c.Probing.Rate > 100_000 {
		return errors.New("planner: want --lease from 10s, --moves from 1, --probe.every from 50ms, --probe.window not below it, --probe.rate from 1 to 100000")
	}
	f, err := service.ReadFabric(c.Fabric)
	if err != nil {
		return err
	}
	traces, err := controltrace.New("lockstep-planner", log)
	if err != nil {
		return err
	}
	defer traces.Close()
	s, err := service.New(service.Options{
		Fabric: f, Listen: c.Listen, TLS: c.TLS.Wire(), Insecure: c.Insecure, Moves: c.Moves, StateDir: c.StateDir, Log: log,
		Plan: pathplan.Options{Lease: c.Lease}, Decided: decisions{traces}.decided,
		Probing: service.Probing{Every: c.Probing.Every, Window: c.Probing.Window, Port: c.Probing.Port, Rate: c.Probing.Rate},
	})
	if err != nil {
		return err
	}
	if c.Insecure {
		log.Warn("anybody who reaches the planner can have jobs' traffic moved", "listen", s.Addr().String())
	}
	o := c.Web.Options("Lockstep planner", "Gives connections their paths through the fabric.", log)
	reg := prom.NewRegistry(names.Planner, flags.Build(), prom.Certificates(flags.Certificates), traces,
		prom.NewPlanner(func() prom.Fabric { return metrics(s.Snapshot(time.Now())) }, prom.Options{}))
	if c.StateDir != "" {
		reg.MustRegister(prom.State(s.StateError))
	}
	o.Metrics = prom.Handler(reg, log)
	srv, err := web.New(o)
	if err != nil {
		s.Close()
		return err
	}
	reg.MustRegister(prom.Web(srv), prom.Crowded(names.ListenerPlanner, s.HungUp))
	log.Info("planner is ready", "listen", s.Addr().String(), "web", srv.Addr().String(), "links", len(f.Links), "ports", len(f.Ports))
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return s.Run(ctx) })
	g.Go(func() error { return srv.Run(ctx) })
	return g.Wait()
}

// Probe is `lockstep planner probe`.
type Probe struct {
	Planner  string    `required:"" placeholder:"HOST:PORT" help:"The planner." env:"LOCKSTEP_PLANNER"`
	Node     string    `help:"This host's name in the fabric (default: the host's name)." env:"LOCKSTEP_NODE"`
	Listen   string    `default:"0.0.0.0:4791" placeholder:"ADDR:PORT" help:"Where to answer probes (UDP; default: ${default})."`
	MaxRate  int       `default:"5000" help:"Probes a second at most, whatever the planner asks for (default: ${default})."`
	Insecure bool      `name:"insecure-planner" help:"Believe whoever answers at --planner, without TLS."`
	TLS      flags.TLS `embed:"" prefix:"tls."`
}

// Help implements kong's help provider.
func (*Probe) Help() string {
	return `Needs no privilege. A host whose RDMA device owns UDP port 4791 answers at another: --listen here, --probe.port at the planner.

Examples:
  lockstep planner probe --planner planner:9411 --tls.cert a.crt --tls.key a.key --tls.ca ca.crt`
}

// Run probes until ctx ends.
func (c *Probe) Run(ctx context.Context, log *slog.Logger) error {
	creds, err := service.Credentials(c.TLS.Wire(), c.Insecure)
	if err != nil {
		return err
	}
	at, err := netip.ParseAddrPort(c.Listen)
	if err != nil {
		return fmt.Errorf("planner probe: --listen: %w", err)
	}
	host, _ := os.Hostname()
	p, err := service.NewProber(service.ProberOptions{Planner: c.Planner, Credentials: creds, Node: cmp.Or(c.Node, host), Listen: at, MaxRate: c.MaxRate, Log: log})
	if err != nil {
		return err
	}
	log.Info("prober is ready", "listen", c.Listen, "planner", c.Planner)
	return p.Run(ctx)
}

// Check is `lockstep planner check`.
type Check struct {
	Fabric string `required:"" type:"existingfile" placeholder:"FILE" help:"The fabric's file."`
}

// Help implements kong's help provider.
func (*Check) Help() string {
	return `Examples:
  lockstep planner check --fabric fabric.json`
}

// Run reads a fabric.
func (c *Check) Run(out io.Writer) error {
	f, err := service.ReadFabric(c.Fabric)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%s: %d leaves, %d spines, %d links, %d ports\n", c.Fabric, len(f.Leaves), len(f.Spines), len(f.Links), len(f.Ports))
	return nil
}

// Plan has a rank's connections planned by the planner that LOCKSTEP_PLANNER names, if it names
// one; stop ends that. The job's certificate is in LOCKSTEP_PLANNER_CERT, _KEY and _CA; without
// them the planner must be of this user on this host, unless LOCKSTEP_PLANNER_INSECURE is 1.
func Plan(cfg *ccl.Config) (stop func(), err error) {
	addr := os.Getenv("LOCKSTEP_PLANNER")
	if addr == "" {
		return func() {}, nil
	}
	t := flags.TLS{Cert: os.Getenv("LOCKSTEP_PLANNER_CERT"), Key: os.Getenv("LOCKSTEP_PLANNER_KEY"), CA: os.Getenv("LOCKSTEP_PLANNER_CA")}
	creds, err := service.Credentials(t.Wire(), os.Getenv("LOCKSTEP_PLANNER_INSECURE") == "1")
	if err != nil {
		return nil, fmt.Errorf("LOCKSTEP_PLANNER: %w", err)
	}
	c, err := service.NewClient(service.ClientOptions{Planner: addr, Credentials: creds, Node: cfg.Node, Job: cmp.Or(os.Getenv("LOCKSTEP_JOB"), "job")})
	if err != nil {
		return nil, fmt.Errorf("LOCKSTEP_PLANNER: %w", err)
	}
	cfg.Paths = c
	return func() { c.Close() }, nil
}
