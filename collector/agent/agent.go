package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/internal/roots"
	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/collector/source/pressure"
	"github.com/lockstep-ccl/lockstep/collector/source/proc"
	"github.com/lockstep-ccl/lockstep/collector/source/recorder"
	"github.com/lockstep-ccl/lockstep/collector/source/starting"
	"github.com/lockstep-ccl/lockstep/collector/source/supervisor"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/record"
)

// Options of an Agent. Zero fields take the defaults.
type Options struct {
	Node string // logical node name, at most 63 bytes; the host name
	Dir  string // of the flight recorders; record.DefaultDir()
	// OwnNode passes over recorders whose header names another logical node;
	// for several agents on one host.
	OwnNode bool
	// Users names the users of jobs, where it is known: recorders of others that name them are refused.
	Users map[string]uint32
	// Master returns the address of a job's master, host:port, or "" when the
	// job has none; nil: no job has. It is asked for each connection.
	Master func(job string) string
	TLS    *wire.TLS // nil: plain text
	// Sinks get every finished collective, in this order. Those that are Tracers also answer
	// the masters' requests for what they have kept; for such a request they may be
	// handed a collective that is still open (Ended is 0).
	Sinks []collector.Sink
	// Sources run after those that every agent has, in this order.
	Sources []NamedSource

	// Workload says where a process runs, by its environment, for the spans of its ranks; nil: nobody asks.
	Workload func(getenv func(string) string) *collector.Workload

	Poll     time.Duration    // between two readings of the records, at most; 20 ms
	Interval time.Duration    // between two reports; 100 ms
	MaxRanks int              // processes tracked at a time; 256
	Keep     time.Duration    // how long a dead process is reported; 10 min
	Now      func() time.Time // the node's wall clock; nil: time.Now
	// Events is what recorders of another library's operations (NCCL's) are asked for;
	// record.EventsDefault leaves it to their processes.
	Events record.EventSet
	Log    *slog.Logger // nil: slog.Default()
}

// NamedSource is a source with the name that it has in metrics.
type NamedSource struct {
	Name string
	source.Source
}

const (
	// maxJobs bounds the jobs of one node at a time.
	maxJobs = 64
	// maxDrain bounds the records read in one go.
	maxDrain = 1 << 16
	// shortPoll is the wait when a ring fills quickly.
	shortPoll = 2 * time.Millisecond
	// published is the time between two snapshots, ns.
	published = int64(200 * time.Millisecond)
	// stuckAfter is the age of a snapshot from which on the agent hangs.
	stuckAfter = 10 * time.Second
	// tuned is the time between two looks at the sampling rates, ns.
	tuned = int64(time.Second)
)

// Agent is one node's agent. Snapshot and Ready may be called from any goroutine; Run once.
type Agent struct {
	o         Options
	log       *slog.Logger
	recorders *recorder.Source
	starting  *starting.Source
	procs     *proc.Source
	pressure  *pressure.Source
	sources   []NamedSource
	status    []collector.SourceStatus
	hello     *wire.Hello
	snapshot  atomic.Pointer[collector.AgentSnapshot]
	traces    chan traceRequest
	orders    chan fenceOrder

	view       source.View
	ranks      map[*source.Process]*rank
	jobs       map[string]*job
	full       bool // a job was turned away, and it was logged
	ops        int  // room for pending collectives, all communicators
	out        collector.Collective
	realOffset int64
	began      int64 // when it began to run, CLOCK_MONOTONIC ns
	leases     leases
	ports      portLook
	history    []record.Window // scratch
	late       time.Duration   // worst oversleeping since the last report
}

// job is one job's part on this node.
type job struct {
	name            string
	ranks           []*rank // sorted by age of discovery
	stream          *stream // nil when the job has no master
	misnamed        bool    // its name can be no job's, and that has been said
	epoch           uint64  // of the stream that ranks' reported states belong to
	first           int     // of the ranks: the next report begins with it
	arrivals        []*wire.Arrival
	arrivalsDropped uint64
	rasAt           int64               // of RAS's answer that the master has heard
	nicsAt          int64               // of the probe of NICs that the master has heard
	nicsTold        int64               // when it was told
	nics            map[nicWord]uint64  // what it was told
	traced          []*wire.TraceResult // what was exported, for the next report
	roots           roots.Gather        // of traces, while no master tells how far they reach

	standing  *standing // the order that stands, nil: none has come
	fencer    *fencer   // nil: nothing was ever to be stopped
	leaseOver bool
	metAt     int64 // CLOCK_MONOTONIC ns
	leased    bool  // some of its ranks have a lease
	anchored  bool  // its anchor is where the next agent finds it

	records, lost, unknown uint64
	refused                [record.NumRefusals]uint64
	step                   uint64
	gone                   map[record.Transport]*collector.ConnTotals // of connections that are gone
	finished               map[string]uint64                          // likewise, by communicator name
}

// New checks the options. It opens nothing but the proc file system; Run does the rest.
func New(o Options) (*Agent, error) {
	if o.Node == "" {
		host, err := os.Hostname()
		if err != nil {
			return nil, fmt.Errorf("agent: node name: %w", err)
		}
		o.Node = host
	}
	if len(o.Node) > wire.MaxName {
		return nil, fmt.Errorf("agent: node name of %d bytes, at most %d", len(o.Node), wire.MaxName)
	}
	o.Poll = cmp.Or(o.Poll, 20*time.Millisecond)
	o.Interval = cmp.Or(o.Interval, 100*time.Millisecond)
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Master == nil {
		o.Master = func(string) string { return "" }
	}
	log := cmp.Or(o.Log, slog.Default()).With("node", o.Node)
	o.TLS = o.TLS.LogTo(log)
	if _, err := o.TLS.Credentials(); err != nil {
		return nil, fmt.Errorf("agent: %w", err)
	}
	procs, err := proc.New("/proc")
	if err != nil {
		return nil, fmt.Errorf("agent: %w", err)
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("agent: boot id: %w", err)
	}
	ro := recorder.Options{Dir: o.Dir, Users: o.Users, Max: o.MaxRanks, Keep: o.Keep}
	if o.OwnNode {
		ro.Node = o.Node
	}
	a := &Agent{
		o: o, log: log,
		recorders: recorder.New(ro), starting: starting.New(starting.Options{Dir: o.Dir, Node: o.Node, OwnNode: o.OwnNode, Users: o.Users, Max: o.MaxRanks, Keep: o.Keep}), procs: procs, pressure: pressure.New("/proc", "/sys/fs/cgroup"),
		hello:  &wire.Hello{ProtocolVersion: wire.ProtocolVersion, Node: o.Node, Instance: rand.Uint64(), BootId: strings.TrimSpace(string(boot))},
		traces: make(chan traceRequest, 1024),
		orders: make(chan fenceOrder, maxJobs),
		ranks:  map[*source.Process]*rank{},
		jobs:   map[string]*job{},
	}
	a.sources = append([]NamedSource{{"recorder", a.recorders}, {"starting", a.starting}, {"proc", procs}, {"supervisor", supervisor.New()}, {"pressure", a.pressure}}, o.Sources...)
	a.status = make([]collector.SourceStatus, len(a.sources))
	a.publish()
	return a, nil
}

// Snapshot returns the agent's state a moment ago; it is never nil and not to be changed.
func (a *Agent) Snapshot() *collector.AgentSnapshot { return a.snapshot.Load() }

// Ready returns an error while passes do not end: a source that was to wait for
// nothing waits, and what Snapshot returns is old.
func (a *Agent) Ready() error {
	if age := time.Since(a.Snapshot().At); age > stuckAfter {
		return fmt.Errorf("the agent's last pass ended %v ago: it hangs", age.Round(time.Second))
	}
	return nil
}

// Run watches the node until ctx is done, and then returns nil.
func (a *Agent) Run(ctx context.Context) error {
	defer func() {
		for _, j := range a.jobs {
			j.leave()
		}
		a.leases.stop()
		_ = a.starting.Close()
		_ = a.recorders.Close()
		_ = a.procs.Close()
		_ = a.pressure.Close()
	}()
	a.began = record.Now()
	var reportDue, publishedAt, tunedAt int64
	poll := a.o.Poll
	timer := time.NewTimer(0)
	defer timer.Stop()
	due := time.Now()
	for {
		select {
		case <-ctx.Done():
			a.drain() // the last words
			for _, j := range a.jobs {
				a.localRoots(j, math.MaxInt64)
			}
			a.publish()
			return nil
		case t := <-a.traces:
			a.trace(t)
			continue
		case o := <-a.orders:
			a.fence(ctx, o)
			continue
		case <-timer.C:
		}
		a.late = max(a.late, time.Since(due))
		n, fill := a.drain()
		switch {
		case fill > 0.25:
			poll = max(poll/2, shortPoll)
		case n == 0 || fill < 0.05:
			poll = min(poll*2, a.o.Poll)
		}
		now := record.Now()
		if now >= reportDue {
			reportDue = now + unevenly(a.o.Interval)
			a.update(ctx, now)
			if now-tunedAt >= tuned {
				a.tune(float64(now-tunedAt) / 1e9)
				tunedAt = now
			}
			a.report()
		}
		if now-publishedAt >= published {
			publishedAt = now
			a.publish()
		}
		due = time.Now().Add(poll)
		timer.Reset(poll)
	}
}

// unevenly is the time to the next look, ns: the interval as a mean, within a quarter of it.
// Looks at even intervals would see a job whose steps take about as long at the same moment of
// each step, and never at others.
func unevenly(interval time.Duration) int64 {
	return int64(float64(interval) * (0.75 + 0.5*rand.Float64()))
}

// drain folds what has been recorded since the last call. fill is recorder.Source.Drain's.
func (a *Agent) drain() (n int, fill float64) {
	n, fill = a.recorders.Drain(maxDrain, a.fold)
	return n + a.recorders.DrainStamps(maxDrain, a.foldStamps), fill
}

// realOffset is how far the wall clock is ahead of CLOCK_MONOTONIC, ns. The process may be made
// to wait between reading the two clocks, so the quickest of several readings counts.
func realOffset(wall func() time.Time) (offset int64) {
	took := int64(math.MaxInt64)
	for range 5 {
		before := record.Now()
		real := wall().UnixNano()
		if d := record.Now() - before; d < took {
			took, offset = d, real-before-d/2
		}
		if took < int64(20*time.Microsecond) {
			break
		}
	}
	return offset
}

// update runs all sources and takes in what they found.
func (a *Agent) update(ctx context.Context, now int64) {
	a.view.Now = now
	a.realOffset = realOffset(a.o.Now)
	for i, s := range a.sources {
		begin := time.Now()
		err := s.Update(&a.view)
		st := collector.SourceStatus{Name: s.Name, NoData: errors.Is(err, source.ErrNoData), Duration: time.Since(begin)}
		switch {
		case err == nil:
			st.Up = true
		case st.NoData, errors.Is(err, source.ErrPartly):
			st.Up, st.Note = true, err.Error()
			if !st.NoData && a.status[i].Note != st.Note {
				a.log.Info("a source does not see everything", "source", s.Name, "note", err)
			}
		default:
			st.Err = err.Error()
			if a.status[i].Err != st.Err {
				a.log.Warn("a source has trouble", "source", s.Name, "err", err)
			}
		}
		a.status[i] = st
	}
	here := make(map[*source.Process]bool, len(a.view.Processes))
	for _, p := range a.view.Processes {
		here[p] = true
		if r := a.rank(p); r != nil {
			if r.workloadOf != p.HostPID { // in a container its own number is another process's here
				r.workloadOf, r.workload, r.terms = p.HostPID, a.workload(p.HostPID), termsOf(p.HostPID)
			}
			a.learn(r)
			a.askEvents(r)
		}
	}
	for p, r := range a.ranks {
		if !here[p] {
			a.retire(r)
		}
	}
	a.portsMoved()
	for _, j := range a.jobs {
		j.stalls(now)
		a.suspects(ctx, j, now)
		a.localRoots(j, now)
		switch {
		case len(j.ranks) == 0:
			j.leave()
			delete(a.jobs, j.name)
			delete(a.leases.former, j.name)
		case j.stream == nil && !j.misnamed && wire.CheckJob(j.name) != nil:
			j.misnamed = true
			a.log.Warn("no master can watch a job of this name", "err", wire.CheckJob(j.name))
		case j.stream == nil && a.o.Master(j.name) != "":
			j.stream = a.newStream(j.name)
			j.stream.start(ctx)
		}
	}
	a.keepAnchors(ctx, now)
}

// askEvents asks a process that records another library's operations for the events that this
// agent is to see. A process without a control file never has any.
func (a *Agent) askEvents(r *rank) {
	if r.p.Source != record.SourceNCCLPlugin || r.asked == a.o.Events || r.p.Dead() {
		return
	}
	r.asked = a.o.Events
	if err := record.SetEvents(r.p.Path, a.o.Events); err != nil {
		a.log.Warn("a process cannot be asked for events", "pid", r.p.PID, "rank", r.p.Rank, "events", a.o.Events, "err", err)
	}
}

func (a *Agent) newStream(job string) *stream {
	s := &stream{
		job: job, address: a.o.Master, tls: a.o.TLS, traces: a.traces, log: a.log.With("job", job),
		hello:  &wire.Hello{ProtocolVersion: a.hello.ProtocolVersion, Job: job, Node: a.hello.Node, Instance: a.hello.Instance, BootId: a.hello.BootId},
		orders: a.orders, fenced: make(chan *wire.FenceResult, 16),
		reports: make(chan report, queued), results: make(chan *wire.TraceResult, 16), began: record.Now(),
	}
	s.wanted.Store(64)
	return s
}

// rank returns the fold state of a process, nil when its job cannot be tracked.
func (a *Agent) rank(p *source.Process) *rank {
	if r, ok := a.ranks[p]; ok {
		return r
	}
	j := a.jobs[p.Job]
	if j == nil {
		if len(a.jobs) == maxJobs {
			if !a.full {
				a.full = true
				a.log.Error("too many jobs: the youngest are not watched", "jobs", maxJobs, "not_watched", p.Job)
			}
			return nil
		}
		j = &job{name: p.Job, metAt: record.Now(), gone: map[record.Transport]*collector.ConnTotals{}, finished: map[string]uint64{}}
		a.jobs[p.Job] = j
	}
	r := &rank{p: p, job: j, metAt: record.Now(), asked: ^record.EventSet(0)}
	a.ranks[p] = r
	j.ranks = append(j.ranks, r)
	a.learn(r)
	return r
}

// retire drops a process; what it counted stays in its job's totals.
func (a *Agent) retire(r *rank) {
	delete(a.ranks, r.p)
	r.job.ranks = slices.DeleteFunc(r.job.ranks, func(o *rank) bool { return o == r })
	r.job.lost += r.p.Lost
	addRefused(&r.job.refused, &r.p.Refused)
	for _, c := range r.comms {
		if c != nil {
			a.forget(r, c)
		}
	}
	for i := range r.conns {
		r.job.addGone(&r.conns[i])
	}
}

// leave ends what goes on for a job.
func (j *job) leave() {
	if j.stream != nil {
		j.stream.stop()
	}
	if j.fencer != nil {
		j.fencer.stop()
	}
}

func (a *Agent) tune(seconds float64) {
	for _, r := range a.ranks {
		if r.job.stream == nil {
			continue
		}
		for _, c := range r.comms {
			if c != nil {
				c.sampling.tune(seconds, r.job.stream.wanted.Load())
			}
		}
	}
}

// report hands each stream its next report, unless the last ones have not left yet.
func (a *Agent) report() {
	for _, j := range a.jobs {
		s := j.stream
		switch {
		case s == nil:
			continue
		case !s.ready():
			s.dropped.Add(1) // nothing is lost but arrivals: what differs goes with the next one
			continue
		}
		if e := s.epoch.Load(); e != j.epoch {
			j.epoch = e
			j.forget()
		}
		rep := j.report()
		rep.Ras, rep.Nics = j.reportRAS(a.view.RAS), j.reportNICs(a.view.NICs, a.view.Now)
		rep.LateNs = a.late.Nanoseconds()
		rep.CpuPressure, rep.MemoryPressure = steps(a.view.CPUPressure), steps(a.view.MemoryPressure)
		s.reports <- report{j.epoch, rep} // has room: this goroutine is the only sender
	}
	a.late = 0
}
