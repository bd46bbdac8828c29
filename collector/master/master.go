package master

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/replay"
	"github.com/lockstep-ccl/lockstep/internal/accept"
	"github.com/lockstep-ccl/lockstep/internal/crowd"
	"github.com/lockstep-ccl/lockstep/internal/statedir"
)

// Options of a Master. Job and Listen are required.
type Options struct {
	Job    string
	Listen string    // host:port of the gRPC listener
	TLS    *wire.TLS // nil: plain text, on loopback and for processes of the same user and of root only
	// Insecure lets anybody who reaches Listen report, without TLS. It is exported as a metric.
	Insecure bool
	// StateDir holds incidents.json, so that an open incident outlives the
	// master; it is made with mode 0700. "" keeps incidents in memory only.
	StateDir  string
	Diagnosis diagnosis.Config
	Interval  time.Duration // between diagnosis passes; 100 ms
	Patience  time.Duration // until a silent agent is lost; 3 s
	// CloseAfter is how long a verdict must be gone before its incident closes; 3 s.
	CloseAfter time.Duration
	// Hold bounds how long an incident stays open because the evidence is
	// incomplete: the master has just started, or agents are silent; 1 min.
	Hold   time.Duration
	Limits Limits
	// Recording is of the evidence, in StateDir.
	Recording Recording
	// Paths names the links over which a communicator's rank sends to another, "" while they
	// are not known. It is called under the master's lock and must not wait. nil: nobody knows.
	Paths func(comm uint64, rank, peer int) string
	Log   *slog.Logger // nil: slog.Default()
}

// pauseAfter is how late a tick may be before ages measured across it are void.
const pauseAfter = 500 * time.Millisecond

// Master is one job's master. Snapshot and Addr may be called from any
// goroutine; Run once.
type Master struct {
	o        Options
	log      *slog.Logger
	listener *crowd.Listener
	creds    grpc.ServerOption
	engine   diagnoser
	recorder *replay.Recorder        // nil: nothing is recorded
	path     string                  // of the incident file, "" when there is none
	dir      *statedir.Dir           // of the state, nil when there is none
	replace  func(text []byte) error // of the incident file

	started    time.Time
	told       atomic.Int64 // unix second of the last line about a refusal
	stopping   chan struct{}
	receivers  sync.WaitGroup
	denied     atomic.Uint64 // calls that the caller's certificate does not allow
	handshakes atomic.Uint64 // that were refused
	messages   atomic.Uint64 // that were not taken apart
	changed    chan struct{} // capacity 1: there is something to save
	kept       chan struct{} // closed when the last of it was
	saved      atomic.Pointer[saved]
	snapshot   atomic.Pointer[collector.MasterSnapshot]

	mu        sync.Mutex // guards all below
	state     *state
	incidents incidents
	traces    traces
	holdSince int64  // since when incidents are held open, 0 when they are not
	anew      uint64 // state.anew as of the last pass
	passes    uint64
	passNs    uint64
	passLast  time.Duration
	lastTick  int64
	resumed   int64 // when the last pause of this master ended, 0 when there was none
	delay     []collector.DelayMatrix
	details   []collector.ConnDetail // likewise
	delayAt   int64                  // when delay was made
	delayOf   uint64                 // and of which of state.epochs: what the last attempt's ranks did is no word on this one's
	view      *collector.JobView     // the last that was asked for
	viewOf    uint64                 // and of which of state.epochs

	duplicates  uint64 // agents refused because another one of their node is heard
	duplicateAt int64  // when that was last logged

	fences fences
}

type diagnoser interface {
	Diagnose(*diagnosis.Evidence) []diagnosis.Verdict
}

// New checks the options, reads the incidents that an earlier master left open
// and opens the listener. Run must follow: it releases what New took.
func New(o Options) (*Master, error) {
	if err := wire.CheckJob(o.Job); err != nil {
		return nil, fmt.Errorf("master: %w", err)
	}
	o.Interval = cmp.Or(o.Interval, 100*time.Millisecond)
	o.Patience = cmp.Or(o.Patience, 3*time.Second)
	o.CloseAfter = cmp.Or(o.CloseAfter, 3*time.Second)
	o.Hold = cmp.Or(o.Hold, time.Minute)
	log := cmp.Or(o.Log, slog.Default()).With("job", o.Job)
	o.TLS = o.TLS.LogTo(log)
	creds, err := o.TLS.Credentials()
	if err != nil {
		return nil, fmt.Errorf("master: %w", err)
	}
	if o.TLS == nil && !o.Insecure {
		creds = wire.Loopback()
	}
	m := &Master{
		o: o, log: log,
		engine:   diagnosis.New(o.Diagnosis),
		started:  time.Now(),
		stopping: make(chan struct{}),
		changed:  make(chan struct{}, 1),
		kept:     make(chan struct{}),
		state:    newState(o.Job, o.Limits),
	}
	m.creds = grpc.Creds(wire.Counted(creds, &m.handshakes))
	m.incidents = incidents{job: o.Job, closeAfter: o.CloseAfter}
	if o.StateDir != "" {
		err := m.restore()
		if err == nil {
			err = m.startRecording()
		}
		if err != nil {
			m.leave()
			return nil, fmt.Errorf("master: %w", err)
		}
	}
	ln, err := accept.Listen(o.Listen)
	if err != nil {
		m.leave()
		return nil, fmt.Errorf("master: listen for agents on %s: %w", o.Listen, err)
	}
	if m.listener, err = crowd.Limit(ln, m.state.limits.Nodes+spareConns, false); err != nil {
		ln.Close()
		m.leave()
		return nil, fmt.Errorf("master: %w", err)
	}
	if at, ok := m.listener.Addr().(*net.TCPAddr); ok && o.TLS == nil && !at.IP.IsLoopback() && !o.Insecure {
		m.listener.Close()
		m.leave()
		return nil, fmt.Errorf("master: listen for agents on %s: beyond loopback agents must be authenticated: give certificate, key and CA (lockstep pki makes them), or say that whoever reaches this address may report faults of this job", at)
	}
	if o.Insecure {
		m.log.Warn("agents are not authenticated: whoever reaches this address can report faults of this job, and have it restarted", "listen", m.listener.Addr().String())
	}
	m.publish(m.now())
	return m, nil
}

// restore loads the incident file. A damaged one is set aside and reported:
// a job without its master would be worse than one incident reported twice.
func (m *Master) restore() error {
	dir, err := statedir.Open(m.o.StateDir)
	if err != nil {
		return fmt.Errorf("%w (one master a state directory)", err)
	}
	m.dir, m.path = dir, dir.Join(incidentFile)
	m.replace = func(text []byte) error { return dir.Replace(incidentFile, text) }
	if err := m.loadFences(); err != nil {
		return err
	}
	m.loadLeases()
	err = m.incidents.load(dir, time.Unix(0, m.now()))
	if err == nil || errors.Is(err, errForeign) || errors.Is(err, statedir.ErrForeign) {
		return err
	}
	aside := m.path + ".damaged"
	m.log.Error("incidents of the last run are lost: the file is set aside", "err", err, "as", aside)
	if err := os.Rename(m.path, aside); err != nil {
		return fmt.Errorf("set aside a damaged incident file: %w", err)
	}
	return nil
}

// leave gives the state directory back.
func (m *Master) leave() {
	if m.dir != nil {
		_ = m.dir.Close()
	}
}

// Addr is where agents connect.
func (m *Master) Addr() net.Addr { return m.listener.Addr() }

// HungUp returns how many connections were hung up on because there were too many.
func (m *Master) HungUp() uint64 { return m.listener.HungUp() }

// Snapshot returns the state after the last pass; it is never nil and not to be changed.
func (m *Master) Snapshot() *collector.MasterSnapshot { return m.snapshot.Load() }

// now is the master's clock: unix ns that never jump.
func (m *Master) now() int64 { return m.started.UnixNano() + int64(time.Since(m.started)) }

// at is a time of the master's clock, with its monotonic part: how long ago it was does not jump either.
func (m *Master) at(now int64) time.Time {
	return m.started.Add(time.Duration(now - m.started.UnixNano()))
}

// Run serves agents and diagnoses until ctx is done, and then returns nil.
func (m *Master) Run(ctx context.Context) error {
	server := grpc.NewServer(append(m.guards(), m.creds,
		grpc.MaxRecvMsgSize(wire.MaxMessage),
		grpc.MaxConcurrentStreams(4),
		grpc.ConnectionTimeout(helloWithin),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: time.Minute, Time: m.o.Patience, Timeout: m.o.Patience}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}),
	)...)
	wire.RegisterCollectorServer(server, service{Master: m})
	wire.RegisterIncidentsServer(server, incidentService{Master: m})
	wire.RegisterFencesServer(server, fenceService{Master: m})
	wire.RegisterNotesServer(server, noteService{Master: m})
	served := make(chan error, 1)
	go func() { served <- server.Serve(m.listener) }()
	if m.path == "" {
		close(m.kept)
	} else {
		go m.keep()
	}
	stopRecorder := m.runRecorder()
	defer func() {
		stopRecorder()
		close(m.stopping)
		server.Stop()
		m.receivers.Wait()
		select {
		case <-m.kept:
		case <-time.After(saveWithin):
			m.log.Error("the last changes of incidents are not saved: the disk does not answer", "file", m.path)
		}
		m.leave()
	}()

	tick := time.NewTicker(m.o.Interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-served:
			return fmt.Errorf("master: serve agents on %s: %w", m.o.Listen, err)
		case <-tick.C:
			m.pass()
		}
	}
}

// pass diagnoses once.
func (m *Master) pass() {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.now()
	m.state.collect(now)
	m.state.settle()
	m.state.align(now)
	ev := &m.state.ev
	ev.Now, ev.Paused = now, m.paused(now)
	m.watchAgents(now)
	m.state.evictIdle(now)
	m.keepLeases(now)
	epochs := m.state.epochs
	if m.state.decide(); m.state.epochs != epochs {
		m.askAll()
	}

	begin := time.Now()
	var verdicts []diagnosis.Verdict
	if m.settling(now) {
		ev.Paused = true
	} else {
		verdicts = m.engine.Diagnose(ev)
	}
	m.passes++
	m.passLast = time.Since(begin)
	m.passNs += uint64(m.passLast)

	var events []event
	if m.anew != m.state.anew {
		m.anew = m.state.anew
		m.log.Warn("the job was started anew: its restart count has gone back, or its size has changed", "attempt", m.state.attempt, "ranks", m.state.world)
		events = m.incidents.closeAll(time.Unix(0, now))
		m.dropFences()
	}
	events = append(events, m.incidents.update(time.Unix(0, now), m.along(ev, verdicts), m.state.attempt, m.hold(now))...)
	for _, e := range events {
		v := &e.Verdict
		log := m.log.With("incident", e.ID, "class", v.Class.String(), "level", v.Level.String(), "comm", v.CommName, "seq", v.Seq, "culprits", v.Culprits)
		switch e.change {
		case opened:
			log.Warn("incident opened", "why", v.Why)
			m.trace(&e.Incident, now)
		case confirmed:
			log.Error("incident confirmed", "why", v.Why, "after", e.Confirmed.Sub(time.Unix(0, v.Since)))
			m.trace(&e.Incident, now)
		case closed:
			log.Info("incident closed", "open_for", e.Closed.Sub(e.Opened))
		}
	}
	if m.recorder != nil {
		m.recorder.Record(ev, verdicts, marks(events)...)
	}
	if len(events) > 0 {
		m.saveSoon()
	}
	m.sendRoots(now)
	m.sendFences()
	m.publish(now)
}

// watchAgents marks the agents that have been silent for too long while this master ran.
func (m *Master) watchAgents(now int64) {
	for i := range m.state.ev.Nodes {
		n := &m.state.ev.Nodes[i]
		if !n.Lost && now-max(n.LastSeen, m.resumed) > m.o.Patience.Nanoseconds() {
			n.Lost = true
			m.state.disconnected(int32(i))
			m.log.Warn("agent lost", "node", n.Name, "silent_for", time.Duration(now-n.LastSeen))
		}
		if nd := &m.state.nodes[i]; n.Lost && !nd.gone && nd.owned > 0 && now-n.LastSeen >= strangerAfter {
			nd.gone = true
			m.state.askDenied()
			m.askAll()
		}
	}
}

// paused reports whether ages measured up to now mean nothing: this master did not run for a
// while, or most of the agents did not or have not reported since.
func (m *Master) paused(now int64) bool {
	gap := now - m.lastTick
	late := m.lastTick != 0 && gap > (m.o.Interval+pauseAfter).Nanoseconds()
	m.lastTick = now
	if late {
		m.resumed = now
	}
	connected, silent, unheard := 0, 0, 0
	for i := range m.state.nodes {
		nd, n := &m.state.nodes[i], &m.state.ev.Nodes[i]
		if nd.stream == nil || n.Lost || nd.owned == 0 && m.state.seen > 0 { // who has no ranks says nothing of them
			continue
		}
		connected++
		if now-max(n.LastSeen, m.resumed) > pauseAfter.Nanoseconds() || nd.lateAt != 0 && now-nd.lateAt < int64(time.Second) {
			silent++
		}
		if n.LastSeen < m.resumed {
			unheard++
		}
	}
	return late || 2*silent > connected || 2*unheard > connected
}

// settleFor is how long a master that has started waits for reports of what runs: agents need
// about two seconds to come back to it.
const settleFor = int64(5 * time.Second)

// settling reports whether a master that has just started knows only processes that have ended.
// The first agent to come back may be the one whose node had ranks of an attempt that is over.
func (m *Master) settling(now int64) bool {
	return m.state.epochs > 0 && now-m.started.UnixNano() < settleFor && m.state.speakers() == 0
}

// hold reports whether an absent verdict proves nothing, because agents that should report are
// silent. Options.Hold bounds it.
func (m *Master) hold(now int64) bool {
	ev := &m.state.ev
	incomplete := ev.Paused || m.state.seen == 0 || m.state.seen < len(ev.Ranks)
	for i := range m.state.ranks {
		if n := m.state.ranks[i].node; n >= 0 && (m.state.nodes[n].stream == nil || ev.Nodes[n].Lost) {
			incomplete = true
			break
		}
	}
	if !incomplete {
		m.holdSince = 0
		return false
	}
	if m.holdSince == 0 {
		m.holdSince = now
	}
	return now-m.holdSince < m.o.Hold.Nanoseconds()
}

// publish makes the next snapshot.
func (m *Master) publish(now int64) {
	ev := &m.state.ev
	s := &collector.MasterSnapshot{
		Job: m.o.Job, At: m.at(now), Attempt: m.state.attempt, Settling: m.state.epochs == 0 || m.settling(now), WorldSize: len(ev.Ranks),
		Ranks:     make(map[diagnosis.ProcState]int),
		Agents:    m.state.agentStatus(now),
		Incidents: m.incidents.list(),
		Opened:    m.incidents.opened, Confirmed: m.incidents.confirmed,
		Diagnoses: m.passes, DiagnosisNs: m.passNs,
		DiagnosisLast: m.passLast, Overflow: m.state.overflow, Refused: m.state.refused,
		Recording: m.recording(),
		Denied:    m.denied.Load(), Insecure: m.o.Insecure,
		Handshakes: m.handshakes.Load() + m.listener.Silent(), Messages: m.messages.Load(), Foreign: m.state.foreign, Duplicates: m.duplicates, StateError: m.stateError(),
	}
	s.Fences, s.FencedAttempt = collector.FenceCalls{Proven: m.fences.proven, Unproven: m.fences.unproven, Refused: m.fences.refused}, -1
	for _, f := range m.fences.all {
		s.FencedAttempt = max(s.FencedAttempt, int64(f.Attempt))
	}
	for i := range m.state.nodes {
		if m.state.nodes[i].claim.created != 0 && m.state.heard(int32(i)) {
			s.Disagreeing++
		}
	}
	if now-m.delayAt >= delayEvery || m.delayOf != m.state.epochs {
		m.delayAt, m.delayOf = now, m.state.epochs
		m.delay, m.details = delayMatrices(ev, now), connDetails(ev)
	}
	s.Delay, s.Connections = m.delay, m.details
	for i := range ev.Ranks {
		s.Ranks[ev.Ranks[i].Proc]++
		s.Step = max(s.Step, ev.Ranks[i].Step)
		s.Overflow += m.state.ranks[i].overflow
		if !m.state.sees(i) {
			s.Unseen++
		}
	}
	m.snapshot.Store(s)
}
