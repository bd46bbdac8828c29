package collector_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/agent"
	"github.com/lockstep-ccl/lockstep/collector/master"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/collector/wire/wiretest"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/replay"
	"github.com/lockstep-ccl/lockstep/record"
)

// TestMain lets the test binary be an agent or a rank of its own, so that a
// test can kill it.
func TestMain(m *testing.M) {
	switch os.Getenv("LOCKSTEP_TEST_AS") {
	case "agent":
		beAgent()
	case "rank":
		beRank()
	case "fence-rank":
		beFenceRank()
	default:
		// A recorder that nobody holds any more is unmapped by a cleanup of the runtime, maybe just now.
		goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("runtime.runCleanups"))
	}
}

func beAgent() {
	var certs *wire.TLS
	if f := os.Getenv("LOCKSTEP_TEST_CERT"); f != "" {
		certs = &wire.TLS{CertFile: f, KeyFile: os.Getenv("LOCKSTEP_TEST_KEY"), CAFile: os.Getenv("LOCKSTEP_TEST_CA")}
	}
	a, err := agent.New(agent.Options{Node: "node", Dir: os.Getenv("LOCKSTEP_TEST_DIR"), Master: at(os.Getenv("LOCKSTEP_TEST_MASTER")), TLS: certs, Log: slog.New(slog.DiscardHandler)})
	if err == nil {
		err = a.Run(context.Background())
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// beRank is the last rank of a job: it takes part in the collectives whose sequence
// it is told on standard input, and answers when it has left each.
func beRank() {
	size, _ := strconv.Atoi(os.Getenv("LOCKSTEP_TEST_SIZE"))
	w, c, k, err := createRank(os.Getenv("LOCKSTEP_TEST_DIR"), size-1, size, 0)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	r := &ranks{w: []*record.Writer{w}, comms: []*record.Comm{c}, conns: []*record.Conn{k}, sent: []uint64{0}}
	for {
		var seq uint64
		if _, err := fmt.Scan(&seq); err != nil {
			os.Exit(0)
		}
		r.enter(0, seq)
		time.Sleep(time.Millisecond)
		r.leave(0, seq, time.Millisecond)
		fmt.Println(seq)
	}
}

// remote is a rank in a process of its own.
type remote struct {
	*exec.Cmd
	in  io.Writer
	out io.Reader
}

// take sends the remote rank through one collective; done waits until it has left.
func (r *remote) take(seq uint64) { fmt.Fprintln(r.in, seq) }
func (r *remote) done() error {
	var seq uint64
	_, err := fmt.Fscan(r.out, &seq)
	return err
}

// spawn starts the test binary as something else, to be killed at the latest when the test ends.
func spawn(t testing.TB, as string, env ...string) *remote {
	t.Helper()
	return start(t, exec.Command(os.Args[0]), as, env...)
}

func start(t testing.TB, cmd *exec.Cmd, as string, env ...string) *remote {
	t.Helper()
	cmd.Env = append(os.Environ(), append(env, "LOCKSTEP_TEST_AS="+as)...)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return &remote{cmd, in, out}
}

// running is a component that a test can kill.
type running struct {
	stop context.CancelFunc
	done chan error
}

func run(t testing.TB, f func(context.Context) error) *running {
	ctx, cancel := context.WithCancel(t.Context())
	r := &running{cancel, make(chan error, 1)}
	go func() { r.done <- f(ctx) }()
	t.Cleanup(func() { r.kill(t) })
	return r
}

func (r *running) kill(t testing.TB) {
	r.stop()
	if err := <-r.done; err != nil {
		t.Error(err)
	}
	r.done <- nil
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("never happened: %s", what)
}

func quiet(t testing.TB) *slog.Logger {
	if testing.Verbose() {
		return slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	return slog.New(slog.DiscardHandler)
}

func startMaster(t testing.TB, o master.Options) (*master.Master, *running) {
	t.Helper()
	o.Job, o.Log, o.Listen = "job", quiet(t), "127.0.0.1:0"
	m, err := master.New(o)
	if err != nil {
		t.Fatal(err)
	}
	return m, run(t, m.Run)
}

func startAgent(t testing.TB, o agent.Options) (*agent.Agent, *running) {
	t.Helper()
	o.Node, o.Log = "node", quiet(t)
	a, err := agent.New(o)
	if err != nil {
		t.Fatal(err)
	}
	return a, run(t, a.Run)
}

func at(address string) func(string) string { return func(string) string { return address } }

// whereabouts is where the job's present master is. One that is started again listens on another
// port: meanwhile its last one may be another process's.
type whereabouts struct{ m atomic.Pointer[master.Master] }

func (w *whereabouts) of(string) string {
	if m := w.m.Load(); m != nil {
		return m.Addr().String()
	}
	return ""
}

// sink keeps what it is handed, and answers retroactive requests.
type sink struct {
	mu    sync.Mutex
	got   []collector.Collective
	asked []uint64
	roots []collector.Collective
}

func (s *sink) Collective(c *collector.Collective) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.got = append(s.got, *c)
}

func (s *sink) Retroactive(_ string, commID uint64, _ record.CollKind, seq uint64, each func(collector.Traced)) (spans int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = append(s.asked, seq)
	for i := range s.got {
		if c := &s.got[i]; c.CommID == commID && c.Seq == seq {
			each(collector.Traced{Rank: c.Rank, First: c.Started, Last: max(c.Ended, c.SeenAt)})
			spans++
		}
	}
	return spans
}

func (s *sink) Held(string, uint64) (kind record.CollKind, seq uint64, ok bool) { return 0, 0, false }

func (s *sink) Root(c *collector.Collective, _ int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.roots = append(s.roots, *c)
}

func TestProgressReachesTheMaster(t *testing.T) {
	dir := t.TempDir()
	r := newRanks(t, dir, 4, 0)
	m, _ := startMaster(t, master.Options{})
	s := &sink{}
	a, _ := startAgent(t, agent.Options{Dir: dir, Master: at(m.Addr().String()), Sinks: []collector.Sink{s}})
	for range 20 {
		r.step()
	}
	r.w[2].Append(&record.Record{Kind: record.KindMark, Mono: record.Now(), Code: uint8(record.MarkStep), Value: 7})
	eventually(t, "all ranks running in the master's snapshot", func() bool {
		s := m.Snapshot()
		return s.WorldSize == 4 && s.Ranks[diagnosis.ProcRunning] == 4 && s.Step == 7
	})
	eventually(t, "all collectives folded", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.got) == 80
	})
	c := s.got[len(s.got)-1]
	if c.Job != "job" || c.Comm != "dp" || c.CommID != commID || c.Size != 4 || c.Kind != record.AllReduce || c.DType != record.Float32 ||
		c.Bytes != opBytes || c.Algo != record.AlgoRing || c.Wait != int64(time.Millisecond)/4 || c.Transfer != int64(time.Millisecond)/2 ||
		c.Enqueued == 0 || c.Started < c.Enqueued || c.Ended <= c.Started || c.Root != -1 || c.Seq != 20 {
		t.Errorf("folded collective: %+v", c)
	}
	if real := time.Unix(0, c.Started+c.RealOffset); time.Since(real).Abs() > time.Minute {
		t.Errorf("the collective started at %v", real)
	}
	eventually(t, "the agent's snapshot", func() bool {
		s := a.Snapshot()
		return len(s.Jobs) == 1 && len(s.Jobs[0].Comms) == 1 && s.Jobs[0].Comms[0].Finished == 80 && s.Jobs[0].Comms[0].Members == 4 &&
			s.Jobs[0].Records == 401 && s.Jobs[0].Lost == 0 && s.Master[0].Connected
	})
	agents := m.Snapshot().Agents
	if len(agents) != 1 || !agents[0].Connected || agents[0].Ranks != 4 || agents[0].MapError <= 0 || agents[0].MapError > time.Second {
		t.Errorf("agents: %+v", agents)
	}
}

// TestOneFaultIsOneIncident stops a rank's process, and kills master and agent
// while the job hangs: the fault is one incident, from open over confirmed to closed.
func TestOneFaultIsOneIncident(t *testing.T) {
	dir, stateDir := t.TempDir(), t.TempDir()
	r := newSplitRanks(t, dir, 4)
	m, firstMaster := startMaster(t, master.Options{StateDir: stateDir, CloseAfter: time.Second})
	var where whereabouts
	where.m.Store(m)
	s := &sink{}
	o := agent.Options{Dir: dir, Master: where.of, Sinks: []collector.Sink{s}}
	_, firstAgent := startAgent(t, o)
	stop := r.steps()
	defer stop()
	eventually(t, "all ranks run", func() bool { return m.Snapshot().Ranks[diagnosis.ProcRunning] == 4 })
	time.Sleep(time.Second) // some history
	if i := m.Snapshot().Incidents; len(i) != 0 {
		t.Fatalf("an incident in a healthy job: %+v", i)
	}

	signal := func(sig syscall.Signal) {
		if err := r.remote.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
	}
	fault := time.Now()
	signal(syscall.SIGSTOP)
	var first collector.Incident
	is := func(ok func(i collector.Incident) bool) func() bool {
		return func() bool {
			got := m.Snapshot().Incidents
			return len(got) == 1 && ok(got[0])
		}
	}
	eventually(t, "an incident opens", is(func(i collector.Incident) bool { first = i; return i.Closed.IsZero() }))
	t.Logf("opened after %v: %+v", time.Since(fault), first.Verdict)
	firstAgent.kill(t)
	firstMaster.kill(t)
	m, secondMaster := startMaster(t, master.Options{StateDir: stateDir, CloseAfter: time.Second})
	where.m.Store(m)
	_, _ = startAgent(t, o)
	same := func(i collector.Incident) bool { return i.ID == first.ID && i.Opened.Equal(first.Opened) }
	eventually(t, "it is confirmed", is(func(i collector.Incident) bool { return same(i) && !i.Confirmed.IsZero() }))
	t.Logf("confirmed after %v", time.Since(fault))
	i := m.Snapshot().Incidents[0]
	if v := i.Verdict; v.Class != diagnosis.NoncommunicationHang || v.Culprits[0].Kind != diagnosis.CulpritRank || v.Culprits[0].Rank != 3 || v.Culprits[0].Reason != "process_stopped" || v.CommName != "dp" {
		t.Errorf("verdict %+v", v)
	}
	eventually(t, "it names the trace of its collective", is(func(i collector.Incident) bool {
		return i.TraceID == collector.TraceID("job", i.Verdict.Comm, i.Verdict.Coll, i.Verdict.Seq)
	}))
	eventually(t, "the agent is asked for the traces, and has the open collective", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		open := 0
		for _, c := range s.got {
			if c.Seq == i.Verdict.Seq && c.Ended == 0 && c.Anomalous {
				open++
			}
		}
		return slices.Contains(s.asked, i.Verdict.Seq) && open >= 3
	})
	secondMaster.kill(t)
	m, _ = startMaster(t, master.Options{StateDir: stateDir, CloseAfter: time.Second})
	where.m.Store(m)
	eventually(t, "the third master knows it", is(func(i collector.Incident) bool { return same(i) && !i.Confirmed.IsZero() && i.Closed.IsZero() }))

	signal(syscall.SIGCONT)
	eventually(t, "it closes", is(func(i collector.Incident) bool { return same(i) && !i.Closed.IsZero() }))
	if n := m.Snapshot().Opened[diagnosis.NoncommunicationHang]; n != 1 {
		t.Errorf("%d incidents opened", n)
	}
	eventually(t, "its recording is of all three masters", func() bool {
		res, err := playFile(t, filepath.Join(stateDir, "incidents", replay.IncidentFile(first.ID)))
		return err == nil && res.Runs == 3 && res.Identical && slices.ContainsFunc(res.Marks, func(m replay.Mark) bool { return m.Kind == replay.MarkClosed })
	})
}

// TestFormerCollectives: what ended before an agent ran is told of as such.
func TestFormerCollectives(t *testing.T) {
	dir := t.TempDir()
	r := newRanks(t, dir, 1, 0)
	r.step()
	s := &sink{}
	startAgent(t, agent.Options{Dir: dir, Sinks: []collector.Sink{s}})
	got := func(n int) func() bool {
		return func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return len(s.got) == n
		}
	}
	eventually(t, "it finds what was before", got(1))
	r.step()
	eventually(t, "it sees what comes", got(2))
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.got[0].Former || s.got[1].Former {
		t.Errorf("former: %v, then %v", s.got[0].Former, s.got[1].Former)
	}
}

// TestLastWords: what was recorded before an agent is stopped reaches its sinks.
func TestLastWords(t *testing.T) {
	dir := t.TempDir()
	r := newRanks(t, dir, 2, 0)
	s := &sink{}
	a, agent := startAgent(t, agent.Options{Dir: dir, Sinks: []collector.Sink{s}, Poll: time.Hour})
	eventually(t, "its only pass", func() bool { return len(a.Snapshot().Jobs) == 1 })
	r.step()
	agent.kill(t)
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.got) != 2 || a.Snapshot().Jobs[0].Records == 0 {
		t.Errorf("%d collectives, %d records", len(s.got), a.Snapshot().Jobs[0].Records)
	}
}

func TestTwoJobsOnOneNode(t *testing.T) {
	dir := t.TempDir()
	newRanks(t, dir, 2, 0)
	w, err := record.Create(record.Options{Dir: dir, Identity: record.Identity{Job: "other", Rank: 0, WorldSize: 1}})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	m, _ := startMaster(t, master.Options{})
	a, _ := startAgent(t, agent.Options{Dir: dir, Master: func(job string) string {
		if job == "job" {
			return m.Addr().String()
		}
		return ""
	}})
	eventually(t, "both jobs, one stream", func() bool {
		s := a.Snapshot()
		return len(s.Jobs) == 2 && len(s.Master) == 1 && s.Master[0].Connected && m.Snapshot().WorldSize == 2
	})
}

func TestBadRecorderFiles(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"empty.rec": "", "text.rec": "hello", "short.rec": record.Magic + "\x01\x00\x00\x00"} {
		if err := os.WriteFile(dir+"/"+name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r := newRanks(t, dir, 2, 0)
	a, _ := startAgent(t, agent.Options{Dir: dir})
	r.step()
	eventually(t, "good files read, bad ones told of", func() bool {
		s := a.Snapshot()
		return len(s.Jobs) == 1 && s.Jobs[0].Comms[0].Finished == 2 && len(s.Sources) > 2 && !s.Sources[0].Up && s.Sources[0].Err != "" && s.Sources[1].Up
	})
}

func TestMutualTLS(t *testing.T) {
	dir := t.TempDir()
	r := newRanks(t, dir, 2, 0)
	r.step()
	certs := wiretest.NewAuthority(t)
	masterTLS, agentTLS := certs.Master("job"), certs.Agent("node")
	m, _ := startMaster(t, master.Options{TLS: &masterTLS})
	// Without a certificate, and with another authority's: no stream.
	plain, _ := startAgent(t, agent.Options{Dir: dir, Master: at(m.Addr().String())})
	refused := []*agent.Agent{plain}
	for _, files := range []wire.TLS{
		wiretest.NewAuthority(t).Agent("node"), // of another authority
		certs.Agent("other"),                   // of another node
		certs.Agent("node", "theirs"),          // of another job on this node
		certs.Master("job"),                    // of another role
		certs.Remediator(),
	} {
		a, _ := startAgent(t, agent.Options{Dir: dir, Master: at(m.Addr().String()), TLS: &files})
		refused = append(refused, a)
	}
	for i, a := range refused {
		eventually(t, fmt.Sprintf("agent %d is refused", i), func() bool {
			s := a.Snapshot()
			return len(s.Master) == 1 && s.Master[0].Reconnect > 0 && !s.Master[0].Connected
		})
	}
	if n := len(m.Snapshot().Agents); n != 0 {
		t.Errorf("%d agents", n)
	}
	eventually(t, "refusals are counted", func() bool { return m.Snapshot().Denied >= 4 })
	// A master of another job, at the address of this one.
	theirsTLS := certs.Master("theirs")
	theirs, err := master.New(master.Options{Job: "job", Listen: "127.0.0.1:0", TLS: &theirsTLS, Log: quiet(t)})
	if err != nil {
		t.Fatal(err)
	}
	run(t, theirs.Run)
	careful, _ := startAgent(t, agent.Options{Dir: dir, Master: at(theirs.Addr().String()), TLS: &agentTLS})
	eventually(t, "the agent does not speak to it", func() bool {
		s := careful.Snapshot()
		return len(s.Master) == 1 && s.Master[0].Reconnect > 0 && !s.Master[0].Connected
	})
	startAgent(t, agent.Options{Dir: dir, Master: at(m.Addr().String()), TLS: &agentTLS})
	eventually(t, "ours is not", func() bool { return m.Snapshot().Ranks[diagnosis.ProcRunning] == 2 })
}
