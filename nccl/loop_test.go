package nccl_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/agent"
	"github.com/lockstep-ccl/lockstep/collector/master"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// job is ranks driven by the conformance driver, their agent and their master.
type job struct {
	m     *master.Master
	ranks []*os.Process
	sink  *sink
}

// sink keeps what the agent hands over.
type sink struct {
	mu  sync.Mutex
	got []collector.Collective
}

func (s *sink) Collective(c *collector.Collective) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.got) < 1<<16 {
		s.got = append(s.got, *c)
	}
}

func run(t *testing.T, f func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// start runs a job of n ranks; faults has what the driver is told of some of them, env what all have in their environment.
func start(t *testing.T, version string, n int, stepUS int, faults map[int]string, env ...string) *job {
	t.Helper()
	dir := t.TempDir()
	log := slog.New(slog.DiscardHandler)
	m, err := master.New(master.Options{Job: "job", Listen: "127.0.0.1:0", Log: log})
	if err != nil {
		t.Fatal(err)
	}
	run(t, m.Run)
	j := &job{m: m, sink: &sink{}}
	a, err := agent.New(agent.Options{Node: "node", Dir: dir, Master: func(string) string { return m.Addr().String() }, Log: log, Sinks: []collector.Sink{j.sink}})
	if err != nil {
		t.Fatal(err)
	}
	run(t, a.Run)
	for r := range n {
		args := []string{version, "rank", filepath.Join(dir, "meeting"), strconv.Itoa(r), strconv.Itoa(n), "1000000", strconv.Itoa(stepUS)}
		if f := faults[r]; f != "" {
			args = append(args, f)
		}
		cmd := command(t, plain, dir, append([]string{"RANK=" + strconv.Itoa(r), "WORLD_SIZE=" + strconv.Itoa(n), "LOCAL_RANK=" + strconv.Itoa(r)}, env...), args...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = cmd.Process.Signal(syscall.SIGCONT)
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
		j.ranks = append(j.ranks, cmd.Process)
	}
	eventually(t, "all ranks run", func() bool { return m.Snapshot().Ranks[diagnosis.ProcRunning] == n })
	return j
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(3 * time.Minute); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("never happened: %s", what)
}

// verdict waits for a confirmed incident.
func (j *job) verdict(t *testing.T) diagnosis.Verdict {
	t.Helper()
	var v diagnosis.Verdict
	eventually(t, "an incident is confirmed", func() bool {
		for _, i := range j.m.Snapshot().Incidents {
			if !i.Confirmed.IsZero() {
				v = i.Verdict
				return true
			}
		}
		return false
	})
	for _, i := range j.m.Snapshot().Incidents {
		t.Logf("incident: %v %v %v", i.Verdict.Class, i.Verdict.Culprits, i.Confirmed)
	}
	return v
}

// A rank of NCCL that does not call any more, with nothing else wrong: who it is, and where the others wait.
func TestRankStopsCalling(t *testing.T) {
	j := start(t, "5", 3, 2000, map[int]string{1: "stop-after=400"})
	v := j.verdict(t)
	if v.Class != diagnosis.NoncommunicationHang || len(v.Culprits) != 1 || v.Culprits[0].Kind != diagnosis.CulpritRank || v.Culprits[0].Rank != 1 {
		t.Errorf("verdict %+v", v)
	}
	if v.CommName != "tp" || v.Coll != record.AllGather {
		t.Errorf("they wait in %v of %q, want AllGather of tp", v.Coll, v.CommName)
	}
}

// The same where timed calls are so dear that hardly any is: nothing tells when the last operation of the others is over.
func TestSampledRankStopsCalling(t *testing.T) {
	j := start(t, "5", 3, 1000, map[int]string{1: "stop-after=800"}, "WAKING=200000")
	if v := j.verdict(t); v.Class != diagnosis.NoncommunicationHang || len(v.Culprits) != 1 || v.Culprits[0].Kind != diagnosis.CulpritRank || v.Culprits[0].Rank != 1 {
		t.Errorf("verdict %+v", v)
	}
}

// healthy waits until the job has made some progress, of which nothing is to be said.
func (j *job) healthy(t *testing.T) {
	t.Helper()
	eventually(t, "the job makes progress", func() bool {
		j.sink.mu.Lock()
		defer j.sink.mu.Unlock()
		return len(j.sink.got) > 3000
	})
	for _, i := range j.m.Snapshot().Incidents { // a busy machine may have a rank suspected
		if !i.Confirmed.IsZero() {
			t.Fatalf("an incident in a healthy job: %+v", i)
		}
	}
}

// A rank that is killed in the middle of its work: it, and that it has gone, not those that wait for it.
func TestRankIsKilled(t *testing.T) {
	j := start(t, "5", 3, 2000, nil)
	j.healthy(t)
	if err := j.ranks[1].Kill(); err != nil {
		t.Fatal(err)
	}
	if _, err := j.ranks[1].Wait(); err != nil { // a zombie is its parent's to reap
		t.Fatal(err)
	}
	if v := j.verdict(t); v.Class != diagnosis.NoncommunicationHang || len(v.Culprits) != 1 || v.Culprits[0].Kind != diagnosis.CulpritRank || v.Culprits[0].Rank != 1 || v.Culprits[0].Reason != "process_gone" {
		t.Errorf("verdict %+v", v)
	}
}

// A rank that is stopped from outside, by the oldest version of the interface.
func TestRankIsStopped(t *testing.T) {
	j := start(t, "4", 3, 2000, nil)
	j.healthy(t)
	if err := j.ranks[2].Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if v := j.verdict(t); v.Class != diagnosis.NoncommunicationHang || len(v.Culprits) != 1 || v.Culprits[0].Rank != 2 || v.Culprits[0].Reason != "process_stopped" {
		t.Errorf("verdict %+v", v)
	}
}

// A rank that computes for longer than the others: all wait for it.
func TestStraggler(t *testing.T) {
	j := start(t, "7", 3, 10_000, map[int]string{2: "slow=30000@300"})
	if v := j.verdict(t); v.Class != diagnosis.NoncommunicationSlow || len(v.Culprits) != 1 || v.Culprits[0].Kind != diagnosis.CulpritRank || v.Culprits[0].Rank != 2 {
		t.Errorf("verdict %+v", v)
	}
}

// The agent asks the ranks for what it was told to see.
func TestAgentAsksForEvents(t *testing.T) {
	dir := t.TempDir()
	a, err := agent.New(agent.Options{Node: "node", Dir: dir, Log: slog.New(slog.DiscardHandler), Events: record.EventsAll})
	if err != nil {
		t.Fatal(err)
	}
	run(t, a.Run)
	if lines := play(t, plain, dir, nil, "5", "control"); len(lines) < 2 || lines[1] != "mask 4062" {
		t.Errorf("%q", lines)
	}
}

// What a rank sends does not arrive: the connection, by the steps of NCCL's proxies.
func TestConnectionStalls(t *testing.T) {
	j := start(t, "6", 4, 2000, map[int]string{1: "stall=300"})
	v := j.verdict(t)
	if v.Class != diagnosis.CommunicationHang || len(v.Culprits) != 1 || v.Culprits[0].Kind != diagnosis.CulpritConnection || v.Culprits[0].Rank != 1 || v.Culprits[0].Peer != 2 {
		t.Errorf("verdict %+v", v)
	}
}

// The same where sockets are told of as well: none of them stands in for all that goes to the peer.
func TestConnectionStallsBesideSockets(t *testing.T) {
	j := start(t, "6", 4, 2000, map[int]string{1: "stall=300"}, "LOCKSTEP_NCCL_EVENTS=all")
	v := j.verdict(t)
	if v.Class != diagnosis.CommunicationHang || len(v.Culprits) != 1 || v.Culprits[0].Kind != diagnosis.CulpritConnection || v.Culprits[0].Rank != 1 || v.Culprits[0].Peer != 2 {
		t.Errorf("verdict %+v", v)
	}
	told := map[string]int{}
	for _, c := range j.m.Snapshot().Connections {
		told[c.Name]++
	}
	for src := range 4 {
		dst := (src + 1) % 4
		for _, name := range []string{fmt.Sprintf("nccl net peer %d", dst), fmt.Sprintf("nccl net peer %d socket 40", dst)} {
			if told[name] != 1 {
				t.Errorf("%d connections are called %q, want 1: %v", told[name], name, told)
			}
		}
	}
}

// What a rank sends arrives late, from some time on.
func TestConnectionIsSlow(t *testing.T) {
	j := start(t, "5", 4, 5000, map[int]string{2: "late=20000@400"})
	v := j.verdict(t)
	if v.Class != diagnosis.CommunicationSlow || len(v.Culprits) != 1 || v.Culprits[0].Kind != diagnosis.CulpritConnection || v.Culprits[0].Rank != 2 || v.Culprits[0].Peer != 3 {
		t.Errorf("verdict %+v", v)
	}
}

// The agent maps the GPU's clock, which shows another time than the host's, by what
// each operation says of it alone: what an operation took is exact, when it was is
// within the error that it says.
func TestGPUClock(t *testing.T) {
	const offset = 1700000000123456789 // GPU_OFFSET of the driver
	j := start(t, "5", 2, 500, nil)
	eventually(t, "collectives are folded", func() bool {
		j.sink.mu.Lock()
		defer j.sink.mu.Unlock()
		return len(j.sink.got) > 2000
	})
	j.sink.mu.Lock()
	defer j.sink.mu.Unlock()
	now := record.Now()
	for i := range j.sink.got {
		c := &j.sink.got[i]
		if c.Clock != record.ClockGPU || c.ClockErr <= 0 || c.Enqueued == 0 {
			t.Fatalf("no GPU times: %+v", c)
		}
		if c.Started < c.Enqueued-c.ClockErr || c.Ended < c.Started || c.Ended > now+c.ClockErr || now-c.Ended > int64(10*time.Minute) || c.Started > offset/2 {
			t.Errorf("enqueued %d, started %d, ended %d, ± %d; it is %d", c.Enqueued, c.Started, c.Ended, c.ClockErr, now)
		}
		if c.Wait+c.Transfer != c.Ended-c.Started {
			t.Errorf("waited for %d and transferred for %d of %d", c.Wait, c.Transfer, c.Ended-c.Started)
		}
	}
}
