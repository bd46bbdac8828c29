package starting_test

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/collector/source/proc"
	"github.com/lockstep-ccl/lockstep/collector/source/recorder"
	"github.com/lockstep-ccl/lockstep/collector/source/starting"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/internal/stranger"
	"github.com/lockstep-ccl/lockstep/record"
)

func TestMain(m *testing.M) {
	if stranger.Role() != "" {
		stranger.Play(func() error { return nil })
	}
	// A recorder that nobody holds any more is unmapped by a cleanup of the runtime, maybe just now.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("runtime.runCleanups"))
}

// node is a node with its agent's sources, as far as they matter here.
type node struct {
	t       *testing.T
	dir     string
	sources []source.Source
	view    source.View
}

func newNode(t *testing.T, o starting.Options) *node {
	t.Helper()
	n := &node{t: t, dir: t.TempDir()}
	o.Dir, o.Settle, o.Period = n.dir, time.Millisecond, 20*time.Millisecond
	p, err := proc.New("/proc")
	if err != nil {
		t.Fatal(err)
	}
	s, r := starting.New(o), recorder.New(recorder.Options{Dir: n.dir, Discover: 20 * time.Millisecond})
	n.sources = []source.Source{r, s, p}
	t.Cleanup(func() {
		for _, c := range []interface{ Close() error }{r, s, p} {
			for c.Close() != nil { // on a crowded machine a look takes long
			}
		}
	})
	return n
}

// environ is what lockstep attach and torchrun set.
func (n *node) environ(rank, size, attempt int) []string {
	return []string{
		"PATH=" + os.Getenv("PATH"), "LOCKSTEP_JOB=LLM", "LOCKSTEP_RUNTIME_DIR=" + n.dir, "NCCL_PROFILER_PLUGIN=/opt/lockstep/libnccl-profiler-lockstep.so",
		fmt.Sprint("RANK=", rank), fmt.Sprint("WORLD_SIZE=", size), fmt.Sprint("LOCAL_RANK=", rank), fmt.Sprint("TORCHELASTIC_RESTART_COUNT=", attempt),
	}
}

// start starts a command with this environment. Its standard input is a pipe that nobody writes.
func (n *node) start(env []string, command ...string) *exec.Cmd {
	n.t.Helper()
	c := exec.Command(command[0], command[1:]...)
	c.Env = env
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if _, err := c.StdinPipe(); err != nil {
		n.t.Fatal(err)
	}
	return n.run(c)
}

func (n *node) run(c *exec.Cmd) *exec.Cmd {
	n.t.Helper()
	if err := c.Start(); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() {
		_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL) // it may have ended
		_ = c.Wait()
	})
	return c
}

// starting are the ranks in the view that have no communicator.
func (n *node) starting() (found []*source.Process) {
	n.view.Now = record.Now()
	for _, s := range n.sources {
		_ = s.Update(&n.view) // what it does not see is not in the view
	}
	for _, p := range n.view.Processes {
		if p.Starting {
			found = append(found, p)
		}
	}
	slices.SortFunc(found, func(a, b *source.Process) int { return int(a.Rank - b.Rank) })
	return found
}

func (n *node) eventually(what string, ok func([]*source.Process) bool) {
	n.t.Helper()
	for deadline := time.Now().Add(60 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if ok(n.starting()) {
			return
		}
	}
	for _, p := range n.starting() {
		n.t.Logf("rank %d of %d, attempt %d, pid %d, %v, in %q", p.Rank, p.WorldSize, p.Attempt, p.PID, p.State, p.WaitsIn)
	}
	n.t.Fatalf("never happened: %s", what)
}

// passes are some looks at all processes in which nothing but these may be found.
func (n *node) passes(what string, but ...int) {
	n.t.Helper()
	for range 30 {
		for _, p := range n.starting() {
			if !slices.Contains(but, int(p.PID)) {
				n.t.Fatalf("%s: rank %d, pid %d", what, p.Rank, p.PID)
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// TestWhatARankWaitsIn finds ranks and what each waits in, and what becomes of them.
func TestWhatARankWaitsIn(t *testing.T) {
	n := newNode(t, starting.Options{})
	sleeps := n.start(n.environ(0, 4, 2), "sleep", "1000")
	n.start(n.environ(1, 4, 2), "cat")
	shell := n.start(n.environ(2, 4, 2), "sh", "-c", "sleep 1000; true")
	ends, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	socket, other := os.NewFile(uintptr(ends[0]), "socket"), os.NewFile(uintptr(ends[1]), "socket")
	defer other.Close()
	defer socket.Close()
	c := exec.Command("cat")
	c.Env, c.Stdin, c.SysProcAttr = n.environ(3, 4, 2), socket, &syscall.SysProcAttr{Setpgid: true}
	n.run(c)

	want := []diagnosis.WaitIn{diagnosis.WaitInSleep, diagnosis.WaitInPipe, diagnosis.WaitInSleep, diagnosis.WaitInNetwork}
	n.eventually("four ranks, and what each waits in", func(got []*source.Process) bool {
		return len(got) == 4 && slices.EqualFunc(got, want, func(p *source.Process, w diagnosis.WaitIn) bool {
			return p.WaitsIn == w && p.State == diagnosis.ProcRunning && p.WorldSize == 4 && p.Attempt == 2 && p.Job == "llm"
		})
	})
	got := n.starting()
	if p := got[0]; int(p.PID) != sleeps.Process.Pid || p.HostPID != p.PID || p.Path != "" || time.Since(p.Created) > time.Hour || time.Since(p.Created) < 0 {
		t.Errorf("rank 0: %+v", p.Header)
	}
	if int(got[2].PID) == shell.Process.Pid {
		t.Error("rank 2 is told to be its shell")
	}
	if err := sleeps.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	n.eventually("rank 0 is stopped", func(got []*source.Process) bool {
		return len(got) == 4 && got[0].State == diagnosis.ProcStopped
	})
	if err := sleeps.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	n.eventually("rank 0 has ended", func(got []*source.Process) bool { return len(got) == 4 && got[0].Dead() })
	n.start(n.environ(0, 4, 3), "sleep", "1000")
	n.eventually("rank 0 of the next attempt", func(got []*source.Process) bool {
		return len(got) == 4 && got[0].Attempt == 3 && !got[0].Dead()
	})
}

// TestRecorderTakesOver: a rank that has made a communicator tells of itself, and a file of
// marks alone tells of no communicator.
func TestRecorderTakesOver(t *testing.T) {
	n := newNode(t, starting.Options{})
	c := n.start(n.environ(1, 2, 0), "sleep", "1000")
	n.eventually("the rank", func(got []*source.Process) bool { return len(got) == 1 })
	id := record.Identity{Job: "llm", Rank: 1, WorldSize: 2}
	marks, err := record.Create(record.Options{Dir: n.dir, Identity: id, PID: c.Process.Pid, MarksOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	n.eventually("its marks stand for it", func(got []*source.Process) bool {
		return len(n.view.Processes) == 1 && len(got) == 1 && got[0].Path == marks.Path() && got[0].WaitsIn == diagnosis.WaitInSleep
	})
	w, err := record.Create(record.Options{Dir: n.dir, Identity: id, PID: c.Process.Pid})
	if err != nil {
		t.Fatal(err)
	}
	n.eventually("its recorder stands for it", func(got []*source.Process) bool { return len(got) == 0 && len(n.view.Processes) == 1 })
	if err := os.Remove(w.Path()); err != nil {
		t.Fatal(err)
	}
	n.passes("it has had a communicator")
}

// TestNoRankOfOurs: processes of which no recorder is expected here.
func TestNoRankOfOurs(t *testing.T) {
	n := newNode(t, starting.Options{Node: "here", OwnNode: true})
	env := n.environ(0, 2, 0)
	without := func(name string) (rest []string) {
		for _, v := range env {
			if !strings.HasPrefix(v, name+"=") {
				rest = append(rest, v)
			}
		}
		return rest
	}
	with := func(v string) []string {
		name, _, _ := strings.Cut(v, "=")
		return append(without(name), v)
	}
	for _, e := range [][]string{
		without("RANK"),                 // torchrun itself
		without("LOCKSTEP_JOB"),         // nobody has attached
		without("NCCL_PROFILER_PLUGIN"), // or not to NCCL
		without("LOCKSTEP_RUNTIME_DIR"),
		with("NCCL_PROFILER_PLUGIN=/opt/other.so"),
		with("LOCKSTEP_RECORDER=off"),
		with("LOCKSTEP_RUNTIME_DIR=" + filepath.Join(n.dir, "another")),
		with("LOCKSTEP_NODE=there"),
		with("RANK=2"), // of 2
		with("RANK=x"),
		append(without("RANK"), "SLURM_STEP_ID=0", "SLURM_PROCID=0", "SLURM_NTASKS=2"), // srun torchrun looks so
	} {
		n.start(e, "sleep", "1000")
	}
	one := n.start(n.environ(1, 2, 0), "sleep", "1000") // who sees it, sees all
	n.eventually("the one rank", func(got []*source.Process) bool { return len(got) > 0 })
	if got := n.starting(); len(got) != 1 || int(got[0].PID) != one.Process.Pid {
		t.Errorf("%d ranks, of them rank %d, pid %d", len(got), got[0].Rank, got[0].PID)
	}
	n.passes("others", one.Process.Pid)
}

// TestChildrenAreNoRanks: a rank's data loaders and helpers have its environment.
func TestChildrenAreNoRanks(t *testing.T) {
	n := newNode(t, starting.Options{})
	py, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c := n.start(append(n.environ(0, 2, 0), "STORE="+l.Addr().String()), py, "-c", `
import os, socket, subprocess
workers = [subprocess.Popen(["sleep", "1000"]) for _ in range(3)]
host, port = os.environ["STORE"].split(":")
socket.create_connection((host, int(port))).recv(1)
`)
	n.eventually("the rank waits for its store", func(got []*source.Process) bool {
		return len(got) == 1 && int(got[0].PID) == c.Process.Pid && got[0].WaitsIn == diagnosis.WaitInNetwork
	})
}

// TestAnothersJob: who names a job that another user has started is not heard, unless the
// operator has said whose it is.
func TestAnothersJob(t *testing.T) {
	stranger.Open(t)
	n := newNode(t, starting.Options{})
	n.start(n.environ(0, 4, 0), "sleep", "1000")
	n.eventually("the job's own", func(got []*source.Process) bool { return len(got) == 1 })
	stranger.Start(t, stranger.UID, "rank", n.environ(1, 4, 0)...)
	n.start(n.environ(2, 4, 0), "sleep", "1000")
	n.eventually("the job's next one", func(got []*source.Process) bool { return len(got) == 2 && got[1].Rank == 2 })

	// A recorder counts for more than who came first.
	late := newNode(t, starting.Options{})
	stranger.Start(t, stranger.UID, "rank", late.environ(1, 4, 0)...)
	late.eventually("who came first", func(got []*source.Process) bool { return len(got) == 1 })
	c := late.start(late.environ(0, 4, 0), "sleep", "1000")
	if _, err := record.Create(record.Options{Dir: late.dir, Identity: record.Identity{Job: "llm", WorldSize: 4}, PID: c.Process.Pid}); err != nil {
		t.Fatal(err)
	}
	late.eventually("whose the job is", func(got []*source.Process) bool { return len(got) == 0 && len(late.view.Processes) == 1 })

	told := newNode(t, starting.Options{Users: map[string]uint32{"llm": stranger.UID}})
	told.start(told.environ(0, 4, 0), "sleep", "1000")
	stranger.Start(t, stranger.UID, "rank", told.environ(1, 4, 0)...)
	told.eventually("the user's whose it is", func(got []*source.Process) bool { return len(got) == 1 && got[0].Rank == 1 })
}
