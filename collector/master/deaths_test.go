package master

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/collector/agent"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
	supervisor "github.com/lockstep-ccl/lockstep/remediation/process"
)

// beRank takes part in collectives until one fails, and then ends as log.Fatal does: at once,
// with nothing closed.
func beRank() {
	cfg, err := ccl.ConfigFromEnv()
	if err == nil {
		err = cfg.Prepare()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(9)
	}
	ctx := context.Background()
	c, err := ccl.Init(ctx, cfg)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(9)
	}
	s, x := c.NewStream(), ccl.Of(make([]float32, 1000))
	for {
		if err := c.AllReduce(s, x, x, ccl.Sum); err != nil {
			os.Exit(1)
		}
		if err := s.Wait(ctx); err != nil {
			os.Exit(1)
		}
		time.Sleep(time.Millisecond)
	}
}

// realJob is a real job under its supervisor, and the agent of its node.
type realJob struct {
	t       *testing.T
	s       *supervisor.Supervisor
	address atomic.Pointer[string] // of its master, nil before there is one
}

func runJob(t *testing.T, size int) *realJob {
	t.Helper()
	dir := t.TempDir()
	id := func() ([]string, error) {
		id, err := ccl.NewUniqueID(freeAddress(t))
		return []string{"LOCKSTEP_COMM_ID=" + id.String()}, err
	}
	s, err := supervisor.New(supervisor.Options{
		Job: "job", Command: []string{os.Args[0]}, Env: []string{"LOCKSTEP_TEST_AS=rank", "LOCKSTEP_DEVICE=cpu"}, Ranks: size, Dir: filepath.Join(dir, "state"),
		RuntimeDir: func(string) string { return dir }, Node: func(int) string { return "n" }, Rendezvous: id,
		Hold: time.Hour, Grace: time.Second, // nobody ends the survivors
		OnExit: func(x supervisor.Exit) {
			err := record.WriteEnd(dir, record.End{
				Job: "job", Rank: int32(x.Rank), Attempt: uint32(x.Attempt), PID: int32(x.PID), Started: x.Started,
				Code: int32(x.Code), Signal: int32(x.Signal), Asked: x.Asked, At: record.Now() - time.Since(x.At).Nanoseconds(),
			})
			if err != nil {
				t.Error(err)
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	j := &realJob{t: t, s: s}
	master := func(string) string { // it is asked for each connection: another process may take a port that is free
		if at := j.address.Load(); at != nil {
			return *at
		}
		return ""
	}
	a, err := agent.New(agent.Options{Node: "n", Dir: dir, Master: master, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(background(s.Run))
	t.Cleanup(background(a.Run))
	return j
}

func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// background runs something until stop is called.
func background(run func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = run(ctx) }()
	return func() { cancel(); <-done }
}

func (j *realJob) master() (m *Master, stop func()) {
	j.t.Helper()
	m, err := New(Options{Job: "job", Listen: "127.0.0.1:0", Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		j.t.Fatal(err)
	}
	at := m.Addr().String()
	j.address.Store(&at)
	return m, background(m.Run)
}

func (j *realJob) kill(rank int, sig syscall.Signal) {
	j.t.Helper()
	if err := syscall.Kill(j.s.Status().Ranks[rank].PID, sig); err != nil {
		j.t.Fatal(err)
	}
}

// until waits until the evidence of all ranks and their one communicator is as ok says, and
// returns a copy of it.
func (j *realJob) until(m *Master, what string, ok func(r *diagnosis.Rank, m *diagnosis.Member) bool) (ev diagnosis.Evidence) {
	j.t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		m.mu.Lock()
		ev = m.state.ev
		ev.Ranks, ev.Nodes, ev.Comms = slices.Clone(ev.Ranks), slices.Clone(ev.Nodes), slices.Clone(ev.Comms)
		for i := range ev.Ranks {
			ev.Ranks[i].Calls = slices.Clone(ev.Ranks[i].Calls)
		}
		for i := range ev.Comms { // the master goes on merging into its own
			ev.Comms[i].Members = slices.Clone(ev.Comms[i].Members)
		}
		done := len(ev.Ranks) == len(j.s.Status().Ranks) && len(ev.Comms) == 1
		for i := 0; done && i < len(ev.Ranks); i++ {
			done = ok(&ev.Ranks[i], &ev.Comms[0].Members[i])
		}
		m.mu.Unlock()
		if done {
			return ev
		}
		if time.Now().After(deadline) {
			j.t.Fatalf("never happened: %s; %+v", what, ev)
		}
	}
}

func atWork(r *diagnosis.Rank, m *diagnosis.Member) bool {
	return r.Proc == diagnosis.ProcRunning && m.Finished >= 50
}

// TestDeathReachesTheEvidence kills a rank of a real job under its supervisor: the evidence says
// of what it died, whom the survivors named and how they ended, also to a master that was
// started later.
func TestDeathReachesTheEvidence(t *testing.T) {
	const victim = 1
	j := runJob(t, 3)
	for life := range 2 { // of the master
		m, stop := j.master()
		if life == 0 {
			j.until(m, "all ranks at work", atWork)
			j.kill(victim, syscall.SIGKILL)
		}
		ev := j.until(m, "all ranks' ends", func(r *diagnosis.Rank, m *diagnosis.Member) bool {
			return r.Proc == diagnosis.ProcGone && r.Exit.By == diagnosis.ExitSupervisor && (m.World == victim || m.State == record.CommAborted)
		})
		stop()
		for i := range ev.Ranks {
			r, member := ev.Ranks[i], ev.Comms[0].Members[i]
			want := diagnosis.Exit{By: diagnosis.ExitSupervisor, Code: 1, At: r.Exit.At}
			if i == victim {
				want.Code, want.Signal = 0, int32(syscall.SIGKILL)
			}
			// A survivor may have ended before the victim has, whose sockets are closed before its
			// end is complete, and another survivor may have seen that one's end first. Whom the
			// survivors named tells who was first: their words lead to the victim.
			if r.ProcAt != r.Exit.At {
				t.Errorf("rank %d is gone at %d and ended at %d", i, r.ProcAt, r.Exit.At)
			}
			if r.Exit != want {
				t.Errorf("rank %d: %+v, want %+v", i, r.Exit, want)
			}
			named := int(member.FaultPeer)
			if i != victim && named != victim && named != i && named >= 0 && named < len(ev.Ranks) {
				named = int(ev.Comms[0].Members[named].FaultPeer)
			}
			if i != victim && (member.Fault != record.ResultPeerLost || named != victim || member.StateAt == 0 || member.StateAt > r.ProcAt+ev.Nodes[0].MapError) {
				t.Errorf("rank %d of the communicator: %+v; it ended at %d", i, member, r.ProcAt)
			}
			if i == victim && member.State != record.CommJoined {
				t.Errorf("the victim's own word: %+v", member)
			}
		}
	}
}

// TestLastCallsReachTheEvidence stops a rank of a real job: what each has called last is in the
// evidence, of a later master, too, and is gone when they go on.
func TestLastCallsReachTheEvidence(t *testing.T) {
	j := runJob(t, 2)
	m, stop := j.master()
	j.until(m, "all ranks at work", atWork)
	j.kill(1, syscall.SIGSTOP)
	held := func(r *diagnosis.Rank, _ *diagnosis.Member) bool { return len(r.Calls) == diagnosis.MaxCalls }
	j.until(m, "both are held up", held)
	stop()
	m, stop = j.master()
	defer func() { stop() }()
	ev := j.until(m, "both are held up, again", held)
	for i := range ev.Ranks {
		calls, member := ev.Ranks[i].Calls, &ev.Comms[0].Members[i]
		for k, c := range calls {
			if c.Comm != ev.Comms[0].ID || c.Coll != record.AllReduce || c.Bytes != 4000 || c.Peer != -1 || k > 0 && (c.Seq != calls[k-1].Seq+1 || c.At < calls[k-1].At) {
				t.Errorf("rank %d: call %d is %+v", i, k, c)
			}
		}
		if last := calls[len(calls)-1]; last.Seq != member.Enqueued {
			t.Errorf("rank %d: the last call is %d, enqueued %d", i, last.Seq, member.Enqueued)
		}
	}
	j.kill(1, syscall.SIGCONT)
	j.until(m, "they go on", func(r *diagnosis.Rank, _ *diagnosis.Member) bool { return r.Calls == nil })
}
