package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/internal/accept"
	"github.com/lockstep-ccl/lockstep/internal/crowd"
	"github.com/lockstep-ccl/lockstep/internal/statedir"
	"github.com/lockstep-ccl/lockstep/pathplan"
	"github.com/lockstep-ccl/lockstep/pathplan/service/planpb"
)

const (
	version    = 1
	maxMessage = 256 << 10
	// helloWithin bounds the time to a stream's first message.
	helloWithin = 5 * time.Second
	// outgoing bounds what waits for a process that does not read.
	outgoing = 64
	// spareConns are connections beyond one a stream and one a host's prober: of those that come anew.
	spareConns = 64
)

// Options of a server. Fabric and Listen are required.
type Options struct {
	Fabric Fabric
	Listen string // HOST:PORT
	TLS    *wire.TLS
	// Insecure lets anybody who reaches Listen plan, and probe, without TLS.
	Insecure bool
	Plan     pathplan.Options
	Tick     time.Duration // between looks at what is to be moved, 200 ms
	Moves    int           // lanes that one look moves at most, 64
	Streams  int           // at a time, 4096; half of them one job's at most
	StateDir string        // where the plan is kept, "" for nowhere

	// Decided is told of what the planner has done, under its lock: it must not block.
	Decided func(Decision)

	Probing Probing
	Log     *slog.Logger
}

// Server is a fabric's planner.
type Server struct {
	planpb.UnimplementedPlannerServer
	o     Options
	ln    *crowd.Listener
	creds credentials.TransportCredentials

	mu      sync.Mutex
	planner *pathplan.Planner
	owners  map[pathplan.ConnID]*stream
	orphans map[pathplan.ConnID]time.Time // connections that no process tells of, and until when they keep their paths
	jobs    map[string]int                // streams by tenant
	streams int
	version uint64
	probing *prober
	slowest int64     // rate of the slowest link
	fair    []float64 // of the connection that is looked at
	moved   map[pathplan.Reason]uint64

	segments map[pathplan.Link][2]uint64 // sent and lost, as senders say
	suspects []pathplan.Link             // that the log has told of

	state      *statedir.Dir // nil for none
	stateError atomic.Pointer[string]

	Denied, Moved, Refused, Handshakes atomic.Uint64
}

// stream is a process's.
type stream struct {
	tenant, job, node string
	out               chan *planpb.Paths
	lagging           atomic.Bool
	conns             map[string]bool
	loads             map[string][]carried // by connection and lane
}

// New opens a planner's listener.
func New(o Options) (*Server, error) {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	o.Tick, o.Moves, o.Streams = cmp.Or(o.Tick, 200*time.Millisecond), cmp.Or(o.Moves, 64), cmp.Or(o.Streams, 4096)
	if err := o.Fabric.check(); err != nil {
		return nil, fmt.Errorf("planner: fabric: %w", err)
	}
	o.Plan.Steered = true // processes find their ports by themselves
	planner, err := pathplan.New(o.Fabric.Topology, o.Plan)
	if err != nil {
		return nil, fmt.Errorf("planner: %w", err)
	}
	o.TLS = o.TLS.LogTo(o.Log)
	creds, err := o.TLS.Credentials()
	if err != nil {
		return nil, fmt.Errorf("planner: %w", err)
	}
	if o.TLS == nil && !o.Insecure {
		creds = wire.Loopback()
	}
	ln, err := accept.Listen(o.Listen)
	if err != nil {
		return nil, fmt.Errorf("planner: listen at %s: %w", o.Listen, err)
	}
	if at, ok := ln.Addr().(*net.TCPAddr); ok && o.TLS == nil && !o.Insecure && !at.IP.IsLoopback() {
		ln.Close()
		return nil, fmt.Errorf("planner: listening at %s needs certificates: without, whoever reaches it could have jobs' traffic moved; give --tls.*, or listen on loopback", o.Listen)
	}
	hosts := map[string]bool{}
	for _, p := range o.Fabric.Ports {
		hosts[p.Host] = true
	}
	limited, err := crowd.Limit(ln, o.Streams+len(hosts)+spareConns, false)
	if err != nil {
		ln.Close()
		return nil, fmt.Errorf("planner: %w", err)
	}
	s := &Server{o: o, ln: limited, creds: creds, planner: planner, owners: map[pathplan.ConnID]*stream{}, orphans: map[pathplan.ConnID]time.Time{}, jobs: map[string]int{}, moved: map[pathplan.Reason]uint64{}, segments: map[pathplan.Link][2]uint64{}}
	s.probing = newProber(s, o.Probing)
	for i, l := range o.Fabric.Topology.Links {
		if i == 0 || l.Rate < s.slowest {
			s.slowest = l.Rate
		}
	}
	if o.StateDir != "" {
		if err := s.restore(o.StateDir); err != nil {
			limited.Close()
			return nil, err
		}
	}
	return s, nil
}

// Close ends a server that does not run.
func (s *Server) Close() error {
	err := s.ln.Close()
	if s.state != nil {
		err = errors.Join(err, s.state.Close())
	}
	return err
}

// Addr is where it listens.
func (s *Server) Addr() net.Addr { return s.ln.Addr() }

// HungUp returns how many connections were hung up on because there were too many.
func (s *Server) HungUp() uint64 { return s.ln.HungUp() }

// Run serves until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	g := grpc.NewServer(grpc.Creds(wire.Counted(s.creds, &s.Handshakes)), grpc.MaxRecvMsgSize(maxMessage), grpc.MaxConcurrentStreams(16), grpc.ConnectionTimeout(helloWithin),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: time.Minute, Time: 5 * time.Second, Timeout: 5 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}))
	planpb.RegisterPlannerServer(g, s)
	context.AfterFunc(ctx, g.Stop)
	var ticking sync.WaitGroup
	ticking.Go(func() {
		t := time.NewTicker(s.o.Tick)
		defer t.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case now := <-t.C:
				s.tick(now)
			}
		}
	})
	if s.state != nil {
		defer s.state.Close()
		ticking.Go(func() { s.keep(ctx) })
	}
	defer ticking.Wait()
	if err := g.Serve(s.ln); err != nil && ctx.Err() == nil {
		return fmt.Errorf("planner: %w", err)
	}
	return nil
}

// tick moves what is to be moved.
func (s *Server) tick(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.planner.Expire(now)
	for id, until := range s.orphans {
		if now.After(until) {
			delete(s.orphans, id)
			_ = s.planner.Release(id) // it may have expired
		}
	}
	s.planner.Observe(now, nil, nil) // what was measured wears off, whoever is silent
	s.suspected()
	s.probing.judge(now)
	moved := map[pathplan.ConnID]bool{}
	moves := s.planner.Rebalance(now, s.o.Moves)
	for _, m := range moves {
		s.Moved.Add(1)
		s.moved[m.Reason]++
		s.o.Log.Info("lane moved", "tenant", m.Conn.Tenant, "job", m.Conn.Job, "conn", m.Conn.Conn, "lane", m.Lane, "from", m.From.String(), "to", m.Path.String(), "reason", m.Reason.String())
		moved[m.Conn] = true
	}
	if len(moves) > 0 {
		s.decided(Decision{At: now, Took: time.Since(now), Moves: moves})
	}
	for id := range moved {
		s.tell(id)
	}
	for id, st := range s.owners {
		if st.lagging.Load() && len(st.out) < outgoing/2 {
			s.tell(id) // what it has missed
		}
	}
}

// tell sends a connection's paths to whose it is. The lock is held.
func (s *Server) tell(id pathplan.ConnID) {
	st := s.owners[id]
	if st == nil {
		return
	}
	s.version++
	st.send(&planpb.Paths{Assigned: []*planpb.Assigned{s.assigned(id, s.planner.Assignments(id), nil)}})
}

func (st *stream) send(m *planpb.Paths) {
	select {
	case st.out <- m:
	default:
		st.lagging.Store(true)
	}
}

func (s *Server) assigned(id pathplan.ConnID, as []pathplan.Assignment, err error) *planpb.Assigned {
	a := &planpb.Assigned{Conn: id.Conn, Version: s.version}
	if err != nil {
		a.Error = err.Error()
	}
	for _, x := range as {
		l := &planpb.Lane{Name: x.Path.String(), Share: uint32(x.Share)}
		if x.Path != (pathplan.Path{}) {
			l.Spine, l.Leaf = s.o.Fabric.hops(x.Path)
		}
		a.Lanes = append(a.Lanes, l)
	}
	return a
}

// caller is as what somebody calls.
type caller int

const (
	process caller = iota // of a job, that plans
	hostProber
	jobMaster
)

// who says whose a stream is, by its certificate; without certificates by its own word.
func (s *Server) who(ctx context.Context, h *planpb.Hello, as caller) error {
	if h.GetVersion() != version {
		s.Refused.Add(1)
		return status.Errorf(codes.FailedPrecondition, "version %d, this planner speaks %d", h.GetVersion(), version)
	}
	if err := wire.CheckNode(h.GetNode()); err != nil {
		s.Refused.Add(1)
		return status.Error(codes.InvalidArgument, err.Error())
	}
	if as != hostProber {
		if err := wire.CheckJob(h.GetJob()); err != nil {
			s.Refused.Add(1)
			return status.Error(codes.InvalidArgument, err.Error())
		}
	}
	id, authenticated, err := wire.PeerIdentity(ctx)
	switch {
	case err != nil:
	case !authenticated:
		if s.o.Insecure {
			return nil
		}
		err = wire.PeerPresent(ctx)
	case as == jobMaster:
		err = id.Master(h.GetJob())
	case as == hostProber && (id.Role != wire.RoleAgent || id.Node != h.GetNode() || id.Jobs != nil):
		err = fmt.Errorf("%w: %s does not probe for node %s", wire.ErrIdentity, id, h.GetNode())
	case as == process:
		err = id.Agent(h.GetNode(), h.GetJob())
	}
	if err != nil {
		s.Denied.Add(1)
		return status.Error(codes.PermissionDenied, err.Error())
	}
	return nil
}

// Plan implements the service.
func (s *Server) Plan(g planpb.Planner_PlanServer) error {
	first, err := hello(g.Context(), g.Recv)
	if err != nil {
		return err
	}
	h := first.GetHello()
	if err := s.who(g.Context(), h, process); err != nil {
		return err
	}
	st := &stream{tenant: h.GetJob(), job: h.GetJob(), node: h.GetNode(), out: make(chan *planpb.Paths, outgoing), conns: map[string]bool{}, loads: map[string][]carried{}}
	if err := s.enter(st.tenant); err != nil {
		return err
	}
	var ended atomic.Bool // the process has said so
	defer func() { s.leave(st, ended.Load()) }()
	ctx, cancel := context.WithCancel(g.Context())
	defer cancel()
	failed := make(chan error, 1)
	go func() { // ends with the stream
		defer cancel()
		for need := first; ; {
			if err := s.take(st, need); err != nil {
				failed <- err
				return
			}
			if need, err = g.Recv(); err != nil {
				ended.Store(errors.Is(err, io.EOF))
				return
			}
		}
	}()
	renew := time.NewTicker(leaseEvery)
	defer renew.Stop()
	for {
		select {
		case <-ctx.Done():
			select {
			case err := <-failed:
				return err
			default:
				return nil
			}
		case m := <-st.out:
			if err := g.Send(m); err != nil {
				return err
			}
			st.lagging.Store(false)
		case now := <-renew.C:
			s.mu.Lock()
			if len(st.conns) > 0 {
				_ = s.planner.Renew(now, st.tenant, st.job) // else it is asked for again
			}
			s.mu.Unlock()
		}
	}
}

const leaseEvery = 5 * time.Second

// hello waits for a stream's first message.
func hello[M any](ctx context.Context, recv func() (M, error)) (m M, err error) {
	got := make(chan struct{})
	go func() { // ends with the stream
		m, err = recv()
		close(got)
	}()
	select {
	case <-got:
		return m, err
	case <-ctx.Done():
		return *new(M), ctx.Err()
	case <-time.After(helloWithin):
		return *new(M), status.Error(codes.DeadlineExceeded, "no hello")
	}
}

func (s *Server) enter(tenant string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.streams >= s.o.Streams || s.jobs[tenant] >= (s.o.Streams+1)/2 {
		s.Refused.Add(1)
		return status.Errorf(codes.ResourceExhausted, "%d streams, %d of job %s", s.streams, s.jobs[tenant], tenant)
	}
	s.streams++
	s.jobs[tenant]++
	return nil
}

// orphanFor is for how long connections of a process that is not heard any more keep their paths.
// It is killed, and the job's next attempt needs the room; or it is cut off, and asks again.
const orphanFor = 15 * time.Second

// leave ends a stream. What a process had that has ended is free at once.
func (s *Server) leave(st *stream, ended bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range st.conns {
		id := st.id(c)
		if s.owners[id] != st {
			continue
		}
		delete(s.owners, id)
		if ended {
			_ = s.planner.Release(id) // it may have expired
		} else {
			s.orphans[id] = time.Now().Add(orphanFor)
		}
	}
	s.streams--
	if s.jobs[st.tenant]--; s.jobs[st.tenant] == 0 {
		delete(s.jobs, st.tenant)
	}
}

// Assignments returns what a job has.
func (s *Server) Assignments(job string) []pathplan.Assignment {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.planner.Assignments(pathplan.ConnID{Tenant: job, Job: job})
}
