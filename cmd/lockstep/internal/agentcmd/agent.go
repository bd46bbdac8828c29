// Package agentcmd is `lockstep agent`.
package agentcmd

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/buildinfo"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/flags"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/presence"
	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/agent"
	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/collector/source/ebpf"
	"github.com/lockstep-ccl/lockstep/collector/source/nvml"
	"github.com/lockstep-ccl/lockstep/collector/source/ras"
	"github.com/lockstep-ccl/lockstep/collector/source/rdma"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/otlp"
	"github.com/lockstep-ccl/lockstep/exporters/prom"
	"github.com/lockstep-ccl/lockstep/exporters/web"
	"github.com/lockstep-ccl/lockstep/record"
)

// Cmd is the command line.
type Cmd struct {
	Node       string    `help:"Name of this node (default: the host name)." env:"LOCKSTEP_NODE"`
	RuntimeDir string    `default:"${runtime_dir}" type:"path" help:"Where the ranks of this node keep their flight recorders." env:"LOCKSTEP_RUNTIME_DIR"`
	ShareDir   bool      `name:"share-runtime-dir" help:"Make the runtime directory one in which each user makes theirs (mode 1777): for ranks in containers, which see it by a mount."`
	Master     []string  `placeholder:"[JOB=]HOST:PORT" help:"Where a job's master listens; without a job, that of all jobs. {job} stands for the job's name. Repeatable." env:"LOCKSTEP_MASTER"`
	JobUser    []string  `placeholder:"JOB=USER" help:"Whose a job is: recorders of other users that name it are not read. Without it a job is the user's whose process was first seen. Repeatable."`
	NCCLEvents string    `name:"nccl-events" default:"default" enum:"default,ops,net,all" help:"What ranks with the NCCL profiler plugin are to record: what they were started with (default), operations, also transfers over the network, or all (docs/design/nccl.md)."`
	GPU        GPU       `embed:"" prefix:"gpu."`
	NIC        NIC       `embed:"" prefix:"nic."`
	EBPF       EBPF      `embed:"" prefix:"ebpf."`
	RAS        RAS       `embed:"" prefix:"ras."`
	TLS        flags.TLS `embed:"" prefix:"tls."`
	Web        flags.Web `embed:"" set:"listen=:9400"`

	WhileAttached bool `hidden:"" help:"End some seconds after the last process that lockstep attach has started."`
}

// GPU is how the agent asks NVIDIA's driver for the health of its GPUs.
type GPU struct {
	Watch  bool          `default:"true" negatable:"" help:"Ask NVIDIA's driver for the health of this node's GPUs, where there is one."`
	Period time.Duration `default:"5s" help:"Time between two probes of all GPUs."`
	Bound  time.Duration `default:"10s" help:"How long a probe may take before the driver is called unresponsive."`
}

// NIC is how the agent watches RDMA ports.
type NIC struct {
	Watch  bool          `default:"true" negatable:"" help:"Watch this node's RDMA ports, where there are some."`
	Period time.Duration `default:"5s" help:"Time between two probes of all ports. Changes of links are heard of at once."`
	Bound  time.Duration `default:"10s" help:"How long a probe may take before the driver is called unresponsive."`
	Sys    string        `default:"/sys" type:"path" help:"Where sysfs is mounted."`
}

// EBPF is how the agent watches ranks that keep no recorder.
type EBPF struct {
	Watch  bool   `negatable:"" help:"Watch NCCL in processes that run, and what ranks wait for, by eBPF probes: calls cost a few microseconds more. Takes CAP_BPF, CAP_PERFMON and CAP_SYS_PTRACE."`
	Job    string `placeholder:"NAME" help:"Job of processes whose environment names none (default: a name made of their first communicator)."`
	Sample int    `default:"1" help:"Record one of so many calls of a communicator one by one, a power of two. All are counted."`
}

// RAS is how the agent asks NCCL's RAS for a second opinion of a hang.
type RAS struct {
	Watch bool   `default:"true" negatable:"" help:"Ask NCCL's RAS who is missing while a rank of this node is held up."`
	Addr  string `default:"localhost:28028" placeholder:"HOST:PORT" help:"Where it listens (NCCL_RAS_ADDR)." env:"NCCL_RAS_ADDR"`
}

// Help implements kong's help provider.
func (*Cmd) Help() string {
	return `Reads the flight recorders of this node's ranks, without their taking part, and the state of their
processes, and asks NVIDIA's driver, where there is one, for the health of its GPUs, and the kernel for that of its RDMA ports; serves metrics, streams progress to each job's master, and exports traces over OTLP when
OTEL_EXPORTER_OTLP_ENDPOINT is set.

Examples:
  lockstep agent                                          metrics only, on :9400
  lockstep agent --master llm=10.0.0.5:9401               one job
  lockstep agent --master 'lockstep-master-{job}:9401'    any job, by name (Kubernetes)
  OTEL_EXPORTER_OTLP_ENDPOINT=http://tempo:4317 lockstep agent --master 10.0.0.5:9401`
}

// Run serves until ctx ends.
func (c *Cmd) Run(ctx context.Context, log *slog.Logger) error {
	masterOf, err := flags.Masters(c.Master)
	if err != nil {
		return err
	}
	users, err := flags.JobUsers(c.JobUser)
	if err != nil {
		return err
	}
	if c.Node == "" {
		if c.Node, err = os.Hostname(); err != nil {
			return fmt.Errorf("no --node, and %w", err)
		}
	}
	if c.ShareDir {
		if err := record.ShareDir(c.RuntimeDir); err != nil {
			return err
		}
	}
	var a *agent.Agent
	metrics := prom.NewAgent(func() *collector.AgentSnapshot { return a.Snapshot() }, prom.Options{})
	traces, err := otlp.ConfigFromEnv("lockstep-agent", buildinfo.Version(), c.Node)
	if err != nil {
		return err
	}
	tracer, err := otlp.New(traces, otlp.Options{Log: log})
	if err != nil {
		return err
	}
	defer func() {
		flush, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
		defer cancel()
		if err := tracer.Shutdown(flush); err != nil { // no failure of the agent's
			log.Warn("the last traces are lost", "err", err)
		}
	}()
	sinks := []collector.Sink{metrics}
	if tracer.Enabled() {
		sinks = []collector.Sink{tracer, metrics} // exemplars name what the tracer exports
	}
	sources, release := c.sources(log)
	defer release()
	if known := masterOf; true { // a job without a master by the flags may have one that lockstep attach has started
		masterOf = func(job string) string {
			if addr := known(job); addr != "" || wire.CheckJob(job) != nil {
				return addr
			}
			there, _ := presence.Find(c.RuntimeDir, presence.Master(job))
			return there.Agents
		}
	}
	a, err = agent.New(agent.Options{Node: c.Node, Dir: c.RuntimeDir, Users: users, Master: masterOf, TLS: c.TLS.Wire(), Log: log, Sinks: sinks, Sources: sources, Events: eventSet(c.NCCLEvents), Workload: otlp.WorkloadOf})
	if err != nil {
		return err
	}
	reg := prom.NewRegistry(names.Agent, flags.Build(), metrics, tracer, prom.Node(c.Node), prom.Certificates(flags.Certificates))
	o := c.Web.Options("Lockstep agent", "What the ranks of this node do.", log)
	o.Metrics, o.Ready = prom.Handler(reg, log), a.Ready
	srv, err := web.New(o)
	if err != nil {
		return err
	}
	reg.MustRegister(prom.Web(srv))
	if leave, err := presence.Hold(c.RuntimeDir, presence.Agent, presence.Info{Web: srv.Addr().String(), Masters: c.Master}); err == nil {
		defer leave()
	} else {
		log.Info("lockstep attach will not find this agent", "err", err)
	}
	if c.WhileAttached {
		var cancel context.CancelFunc
		ctx, cancel = presence.WhileAttached(ctx, c.RuntimeDir, "")
		defer cancel()
	}
	log.Info("agent is ready", "runtime_dir", c.RuntimeDir, "web", srv.Addr().String())
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return a.Run(ctx) })
	g.Go(func() error { return srv.Run(ctx) })
	return g.Wait()
}

// sources are what the agent watches beside recorders and processes, and what lets go of
// them, the last one first: the process ends all the same when one of them cannot.
func (c *Cmd) sources(log *slog.Logger) (sources []agent.NamedSource, release func()) {
	var closers []func()
	type closer interface {
		source.Source
		io.Closer
	}
	add := func(name string, s closer, trouble string) {
		sources = append(sources, agent.NamedSource{Name: name, Source: s})
		closers = append(closers, func() {
			if err := s.Close(); err != nil {
				log.Warn(trouble, "err", err)
			}
		})
	}
	if c.GPU.Watch {
		add("nvml", nvml.New(nvml.Options{Period: c.GPU.Period, Bound: c.GPU.Bound, Log: log}), "the GPU driver does not let go")
	}
	if c.NIC.Watch {
		add("rdma", rdma.New(rdma.Options{Sys: os.DirFS(c.NIC.Sys), Period: c.NIC.Period, Bound: c.NIC.Bound, Log: log}), "a NIC's driver does not let go")
	}
	if c.EBPF.Watch {
		add("ebpf", ebpf.New(ebpf.Options{Dir: c.RuntimeDir, Node: c.Node, Job: c.EBPF.Job, Sample: c.EBPF.Sample, Log: log}), "probes were not taken off")
	}
	if c.RAS.Watch {
		add("ras", ras.New(ras.Options{Addr: c.RAS.Addr, Log: log}), "NCCL's RAS does not let go")
	}
	return sources, func() {
		for _, f := range slices.Backward(closers) {
			f()
		}
	}
}

// eventSet is the set of this name, which is one of those that the flag allows.
func eventSet(name string) record.EventSet {
	for e := record.EventsDefault; e < record.EventsAll; e++ {
		if e.String() == name {
			return e
		}
	}
	return record.EventsAll
}
