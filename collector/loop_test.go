package collector_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/agent"
	"github.com/lockstep-ccl/lockstep/collector/master"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const commID = 0xfeed

// ranks writes the recorders of a small job, in this process's name.
type ranks struct {
	t     testing.TB
	dir   string
	w     []*record.Writer
	comms []*record.Comm
	conns []*record.Conn
	seq   uint64
	sent  []uint64
}

func newRanks(t testing.TB, dir string, n int, attempt uint32) *ranks {
	t.Helper()
	r := &ranks{t: t, dir: dir, sent: make([]uint64, n)}
	for i := range n {
		w, err := record.Create(record.Options{Dir: dir, Identity: record.Identity{
			Job: "job", Node: "node", Rank: int32(i), WorldSize: int32(n), LocalRank: int32(i), Attempt: attempt,
		}})
		if err != nil {
			t.Fatal(err)
		}
		c, _ := w.AddComm(record.CommEntry{ID: commID + uint64(attempt), Name: "dp", Rank: int32(i), Size: int32(n), State: record.CommJoined})
		k, _ := w.AddConn(record.ConnEntry{Comm: c.Index(), Peer: int32((i + 1) % n), Transport: record.TransportTCP, Name: fmt.Sprintf("tcp %d", i)})
		r.w, r.comms, r.conns = append(r.w, w), append(r.comms, c), append(r.conns, k)
	}
	t.Cleanup(r.close)
	return r
}

func (r *ranks) close() {
	for _, w := range r.w {
		w.Close()
	}
}

const opBytes = 1 << 20

// enter and leave are one rank's part in one AllReduce.
func (r *ranks) enter(i int, seq uint64) {
	now := record.Now()
	r.w[i].Append(&record.Record{Kind: record.KindEnqueue, Mono: now, Comm: r.comms[i].Index(), Seq: seq, Coll: record.AllReduce, DType: record.Float32, Bytes: opBytes, Root: -1})
	r.comms[i].Enqueued(seq, now, record.AllReduce, opBytes)
	r.w[i].Append(&record.Record{Kind: record.KindStart, Mono: now, Comm: r.comms[i].Index(), Seq: seq, Coll: record.AllReduce, Algo: record.AlgoRing, Proto: record.ProtoSimple, Stamp: now})
	r.comms[i].Started(seq, now)
}

func (r *ranks) leave(i int, seq uint64, took time.Duration) {
	now := record.Now()
	r.sent[i] += opBytes
	r.conns[i].Posted(r.sent[i], now)
	r.conns[i].Completed(r.sent[i], now)
	r.w[i].Append(&record.Record{Kind: record.KindPhase, Mono: now, Comm: r.comms[i].Index(), Seq: seq, Code: uint8(record.PhaseWait), Dur: int64(took) / 4, Stamp: now})
	r.w[i].Append(&record.Record{Kind: record.KindPhase, Mono: now, Comm: r.comms[i].Index(), Seq: seq, Code: uint8(record.PhaseTransfer), Dur: int64(took) / 2, Stamp: now})
	r.w[i].Append(&record.Record{Kind: record.KindEnd, Mono: now, Comm: r.comms[i].Index(), Seq: seq, Coll: record.AllReduce, Stamp: now})
	r.comms[i].Finished(seq, now)
	r.comms[i].AddPhases(int64(time.Millisecond), int64(took)/4, int64(took)/2, opBytes)
}

// step is one AllReduce of all ranks.
func (r *ranks) step() {
	r.seq++
	for i := range r.w {
		r.enter(i, r.seq)
	}
	time.Sleep(time.Millisecond)
	for i := range r.w {
		r.leave(i, r.seq, time.Millisecond)
	}
}

// steps runs until stop is called.
func (r *ranks) steps() (stop func()) {
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-quit:
				return
			default:
				r.step()
			}
		}
	}()
	return sync.OnceFunc(func() { close(quit); <-done })
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
	o.Job, o.Log = "job", quiet(t)
	if o.Listen == "" {
		o.Listen = "127.0.0.1:0"
	}
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

// sink keeps what it is handed, and answers retroactive requests.
type sink struct {
	mu    sync.Mutex
	got   []collector.Collective
	asked []uint64
}

func (s *sink) Collective(c *collector.Collective) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.got = append(s.got, *c)
}

func (s *sink) Retroactive(job string, commID uint64, kind record.CollKind, seq uint64) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = append(s.asked, seq)
	n := 0
	for i := range s.got {
		if s.got[i].CommID == commID && s.got[i].Seq == seq {
			n++
		}
	}
	return n
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

func TestMasterRestart(t *testing.T) {
	dir := t.TempDir()
	r := newRanks(t, dir, 2, 3)
	m, first := startMaster(t, master.Options{})
	address := m.Addr().String()
	a, _ := startAgent(t, agent.Options{Dir: dir, Master: at(address)})
	r.step()
	complete := func() bool {
		s := m.Snapshot()
		return s.Attempt == 3 && s.Ranks[diagnosis.ProcRunning] == 2
	}
	eventually(t, "the first master sees all", complete)
	first.kill(t)
	eventually(t, "the agent notices", func() bool { return !a.Snapshot().Master[0].Connected })
	m, _ = startMaster(t, master.Options{Listen: address})
	eventually(t, "the second master sees all", complete)
	eventually(t, "the agent counts it", func() bool { return a.Snapshot().Master[0].Reconnect > 0 })
}

func TestAgentRestart(t *testing.T) {
	dir := t.TempDir()
	r := newRanks(t, dir, 2, 0)
	stop := r.steps()
	defer stop()
	m, _ := startMaster(t, master.Options{Patience: time.Second})
	o := agent.Options{Dir: dir, Master: at(m.Addr().String())}
	_, first := startAgent(t, o)
	running := func() bool { return m.Snapshot().Ranks[diagnosis.ProcRunning] == 2 }
	eventually(t, "all ranks seen", running)
	first.kill(t)
	eventually(t, "the agent is lost, and nothing is known of its ranks", func() bool {
		s := m.Snapshot()
		return s.Agents[0].Lost && !s.Agents[0].Connected && s.Ranks[diagnosis.ProcUnknown] == 2
	})
	a, _ := startAgent(t, o)
	eventually(t, "its successor goes on", func() bool { return running() && !m.Snapshot().Agents[0].Lost })
	stop()
	eventually(t, "and reads on", func() bool {
		s := a.Snapshot()
		return len(s.Jobs) == 1 && s.Jobs[0].Comms[0].Finished == 2*r.seq
	})
	if s := a.Snapshot(); s.Jobs[0].Lost != 0 {
		t.Errorf("%d records lost; what was overwritten before the agent came is not", s.Jobs[0].Lost)
	}
}

// TestJobRestart checks that the recorders of a job's next attempt take the
// place of the last one's.
func TestJobRestart(t *testing.T) {
	dir := t.TempDir()
	old := newRanks(t, dir, 3, 0)
	old.step()
	m, _ := startMaster(t, master.Options{})
	a, _ := startAgent(t, agent.Options{Dir: dir, Master: at(m.Addr().String())})
	eventually(t, "the first attempt", func() bool { return m.Snapshot().Ranks[diagnosis.ProcRunning] == 3 })
	old.close()
	again := newRanks(t, t.TempDir(), 2, 1)
	for _, w := range again.w { // the same process cannot have two recorders of one rank in one directory
		if err := os.Rename(w.Path(), filepath.Join(dir, "again."+filepath.Base(w.Path()))); err != nil {
			t.Fatal(err)
		}
	}
	again.step()
	eventually(t, "the second attempt", func() bool {
		s := m.Snapshot()
		return s.Attempt == 1 && s.WorldSize == 2 && s.Ranks[diagnosis.ProcRunning] == 2
	})
	eventually(t, "the agent counts the living", func() bool {
		s := a.Snapshot()
		return s.Jobs[0].Ranks[diagnosis.ProcRunning] == 3 // the superseded rank 2 lives on in this process's name
	})
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
		return len(s.Jobs) == 1 && s.Jobs[0].Comms[0].Finished == 2 && len(s.Sources) == 2 && !s.Sources[0].Up && s.Sources[0].Err != "" && s.Sources[1].Up
	})
}
