package runcmd

import (
	"context"
	"errors"
	"log/slog"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/flags"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/prom"
	"github.com/lockstep-ccl/lockstep/exporters/web"
	"github.com/lockstep-ccl/lockstep/remediation/process"
)

// Page is where a host's supervisor, and the coordinator where it is that, tells how it does. Flags are
// named as those of the other parts; by default there is none, since a machine may have many jobs.
type Page struct {
	ListenAddress string `placeholder:"HOST:PORT" help:"Serve /metrics, /-/healthy and /-/ready of this host's supervisor, and of the coordinator where it is that (default: not at all)."`
	ConfigFile    string `name:"config.file" type:"existingfile" placeholder:"FILE" help:"TLS and basic authentication of --web.listen-address (exporter-toolkit's web configuration)."`
}

func (p *Page) check() error {
	if p.ListenAddress == "" && p.ConfigFile != "" {
		return errors.New("--web.config.file goes with --web.listen-address")
	}
	return flags.Listen("web.listen-address", p.ListenAddress)
}

// serve serves the page until it is closed. The job goes on when that fails later.
func (p *Page) serve(ctx context.Context, job string, s *process.Host, coordinates bool, log *slog.Logger) (end func(), err error) {
	if p.ListenAddress == "" {
		return func() {}, nil
	}
	f := flags.Web{ListenAddress: p.ListenAddress, ConfigFile: p.ConfigFile}
	o := f.Options("Lockstep supervisor of "+job, "This host's ranks, and whom the coordinator lets in.", log)
	reg := prom.NewRegistry(names.Supervisor, flags.Build(), prom.Certificates(flags.Certificates),
		prom.NewSupervisor(func() prom.Supervision { return supervision(s.Stats()) }, prom.Options{}))
	if coordinates {
		reg.MustRegister(
			prom.Crowded(names.ListenerCoordinator, func() uint64 { return coordination(s).HungUp }),
			prom.State(func() string { return coordination(s).Unwritten }))
	}
	o.Metrics, o.Ready = prom.Handler(reg, log), s.Ready
	srv, err := web.New(o)
	if err != nil {
		return nil, err
	}
	reg.MustRegister(prom.Web(srv))
	log.Info("supervisor is ready", "job", job, "web", srv.Addr().String())
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx)) // it tells of the end, too
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := srv.Run(ctx); err != nil {
			log.Error("this supervisor's page is gone; the job goes on", "job", job, "err", err)
		}
	}()
	return func() { cancel(); <-done }, nil
}

// coordination is what the coordinator tells; nothing before it has begun.
func coordination(s *process.Host) process.CoordinatorStats {
	if c := s.Stats().Coordinator; c != nil {
		return *c
	}
	return process.CoordinatorStats{}
}

func supervision(st process.Stats) prom.Supervision {
	s := prom.Supervision{Job: st.Job, Heard: st.Heard, LeasesExpired: st.LeasesExpired, Ranks: map[string]int{names.StateRunning: st.Running, names.StateExited: st.Exited}}
	c := st.Coordinator
	if c == nil {
		return s
	}
	k := &prom.Coordination{Attempt: c.Attempt, Attempts: c.Attempts, Needed: c.Needed, Connections: c.Connections, Joined: c.Joined, Hosts: map[string]int{}, Refused: map[string]uint64{}}
	for _, state := range process.HostStates() {
		k.Hosts[string(state)] = c.Hosts[state]
	}
	for _, why := range process.RefusalReasons() {
		k.Refused[string(why)] = c.Refused[why]
	}
	s.Coordination = k
	return s
}
