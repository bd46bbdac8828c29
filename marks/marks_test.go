package marks_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/lockstep-ccl/lockstep/collector/agent"
	"github.com/lockstep-ccl/lockstep/marks"
	"github.com/lockstep-ccl/lockstep/record"
)

func TestMain(m *testing.M) {
	if os.Getenv("MARKS_TEST_PROGRAM") == "" {
		os.Exit(m.Run())
	}
	// The same marks as testdata/marks.c.
	w, err := marks.Open()
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	w.Step(7)
	end := w.Checkpoint()
	end()
	end()
	w.Evaluation()()
	w.DataLoading()
	paths, err := record.List(record.DefaultDir())
	fmt.Println(strings.Join(paths, "\n"), err)
	_, _ = io.ReadAll(os.Stdin)
	_ = w.Close()
}

// program is a rank in some language.
type program struct {
	name string
	make func(t *testing.T) *exec.Cmd
}

var programs = []program{
	{"Go", func(t *testing.T) *exec.Cmd {
		exe, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		c := exec.Command(exe)
		c.Env = []string{"MARKS_TEST_PROGRAM=1"}
		return c
	}},
	{"C", func(t *testing.T) *exec.Cmd {
		return exec.Command(compiled(t, "cc", "-std=c11", "testdata/marks.c", "testdata/other.c"))
	}},
	{"C++", func(t *testing.T) *exec.Cmd {
		return exec.Command(compiled(t, "c++", "-std=c++14", "-x", "c++", "testdata/marks.c", "testdata/other.c"))
	}},
	{"Python", func(t *testing.T) *exec.Cmd {
		c := exec.Command(python(t), "testdata/marks.py")
		c.Env = []string{"PYTHONPATH=python", "PYTHONDONTWRITEBYTECODE=1"}
		return c
	}},
}

func python(t *testing.T) string {
	p, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no Python: python3 is not in PATH")
	}
	return p
}

func compiled(t *testing.T, compiler string, args ...string) string {
	cc, err := exec.LookPath(compiler)
	if err != nil {
		t.Skipf("no compiler: %s is not in PATH", compiler)
	}
	bin := filepath.Join(t.TempDir(), "program")
	args = append([]string{"-O2", "-Wall", "-Wextra", "-Werror", "-I../record/c", "-Ic", "-o", bin}, args...)
	if out, err := exec.Command(cc, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", compiler, err, out)
	}
	return bin
}

// start runs a program to the point where it waits; end lets it end.
func start(t *testing.T, p program, dir string, rank int) (end func()) {
	t.Helper()
	cmd := p.make(t)
	cmd.Env = append(cmd.Env, "PATH="+os.Getenv("PATH"), "HOME="+os.Getenv("HOME"), "LOCKSTEP_RUNTIME_DIR="+dir, "TORCHELASTIC_RUN_ID=Train_Me",
		"TORCHELASTIC_RESTART_COUNT=2", fmt.Sprint("RANK=", rank), "WORLD_SIZE=8", "LOCAL_RANK=1", "NODE_NAME=node-a")
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
	done := false
	end = func() {
		if done {
			return
		}
		done = true
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("%s: %v", p.name, err)
		}
	}
	t.Cleanup(end)
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || !strings.Contains(line, dir) {
		t.Fatalf("%s says %q, %v; want a file in %s", p.name, line, err, dir)
	}
	return end
}

// Programs in each language leave the same file.
func TestLanguages(t *testing.T) {
	for i, p := range programs {
		t.Run(p.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "rt")
			end := start(t, p, dir, i)
			paths, err := record.List(dir)
			if err != nil || len(paths) != 1 {
				t.Fatalf("recorders %v, %v; want one", paths, err)
			}
			r, err := record.Open(paths[0])
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			h := r.Header()
			want := record.Identity{Job: "train-me", Node: "node-a", Rank: int32(i), WorldSize: 8, LocalRank: 1, Attempt: 2}
			if h.Identity != want || !h.MarksOnly() || h.Closed || !r.Alive() {
				t.Errorf("header %+v, alive %v; want %+v", h, r.Alive(), want)
			}
			if d := time.Since(h.ToReal(record.Now())); d < -time.Minute || d > time.Minute {
				t.Errorf("the anchor is off by %v", d)
			}
			recs := make([]record.Record, 16)
			recs = recs[:r.Next(recs)]
			mark := func(code record.MarkCode, flags uint8, value uint64) record.Record {
				return record.Record{Kind: record.KindMark, Comm: record.NoComm, Code: uint8(code), Flags: flags, Value: value}
			}
			marks := []record.Record{
				mark(record.MarkStep, 0, 7),
				mark(record.MarkCheckpoint, record.FlagBegin, 0), mark(record.MarkCheckpoint, 0, 0),
				mark(record.MarkEvaluation, record.FlagBegin, 0), mark(record.MarkEvaluation, 0, 0),
				mark(record.MarkDataLoading, record.FlagBegin, 0),
			}
			if d := cmp.Diff(marks, recs, cmpopts.IgnoreFields(record.Record{}, "Ticket", "Mono", "Peer")); d != "" {
				t.Error(d)
			}
			for i := 1; i < len(recs); i++ {
				if recs[i].Mono < recs[i-1].Mono || recs[i].Mono > record.Now() {
					t.Errorf("times out of order: %+v", recs)
				}
			}
			end()
			if h = r.Header(); h.Closed != (p.name == "Go" || p.name == "Python") { // C has no end of its own
				t.Errorf("closed: %v", h.Closed)
			}
		})
	}
}

// A thousand laps of the ring, from several threads: what a reader gets is whole and in order.
func TestPythonThreads(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "rt")
	code := `
import sys, threading, lockstep
def work(k):
    for i in range(3000):
        lockstep.step(i)
threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
assert lockstep.why() is None, lockstep.why()
`
	cmd := exec.Command(python(t), "-c", code)
	cmd.Env = append(os.Environ(), "PYTHONPATH=python", "PYTHONDONTWRITEBYTECODE=1", "LOCKSTEP_RUNTIME_DIR="+dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	paths, _ := record.List(dir)
	if len(paths) != 1 {
		t.Fatalf("recorders: %v", paths)
	}
	r, err := record.Open(paths[0])
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	recs := make([]record.Record, 2048)
	n := r.Next(recs)
	// A call that cannot have the lock for 0.1 s, on a loaded machine, gives its mark up.
	if h := r.Header(); h.Appended > 12000 || h.Appended < 11000 || n != record.MarksRingSlots || r.Lost() != h.Appended-record.MarksRingSlots || !h.Closed {
		t.Errorf("%d of %d read, %d lost, closed %v", n, h.Appended, r.Lost(), h.Closed)
	}
	for i := 1; i < n; i++ {
		if recs[i].Ticket != recs[i-1].Ticket+1 || recs[i].Kind != record.KindMark {
			t.Fatalf("after %+v comes %+v", recs[i-1], recs[i])
		}
	}
}

// A program that can have no file goes on, and can say why.
func TestNoRoom(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "rt")
	if err := os.WriteFile(dir, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("LOCKSTEP_RUNTIME_DIR", filepath.Join(dir, "below"))
	m, err := marks.Open()
	if err == nil {
		t.Error("Go: a file is no directory")
	}
	m.Step(1)
	m.Checkpoint()()
	cmd := exec.Command(python(t), "-c", "import lockstep\nlockstep.step(1)\nwith lockstep.checkpoint(): pass\nprint(lockstep.why())")
	cmd.Env = append(os.Environ(), "PYTHONPATH=python", "PYTHONDONTWRITEBYTECODE=1")
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "Error") {
		t.Errorf("Python: %v, %s", err, out)
	}
}

// The agent has the step of ranks in each language, whatever their library is.
func TestAgentHasTheStep(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "rt")
	for i, p := range programs {
		start(t, p, dir, i) // skips where a language is not here
	}
	a, err := agent.New(agent.Options{Node: "node-a", Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- a.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		s := a.Snapshot()
		if len(s.Jobs) == 1 && s.Jobs[0].Job == "train-me" && s.Jobs[0].Step == 7 && s.Jobs[0].Records >= uint64(6*len(programs)) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("after a minute the agent has %+v", s.Jobs)
		}
	}
}

// torch.distributed's groups get their names, with a stand-in for torch where there is none.
func TestTorchGroups(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "rt")
	cmd := exec.Command(python(t), "testdata/groups.py")
	cmd.Env = append(os.Environ(), "PYTHONPATH=python", "PYTHONDONTWRITEBYTECODE=1", "LOCKSTEP_RUNTIME_DIR="+dir)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	files, _ := filepath.Glob(filepath.Join(dir, "*.rec.groups"))
	if len(files) != 1 {
		t.Fatalf("files of groups: %q; it says %s", files, out)
	}
	got, err := os.ReadFile(files[0])
	const want = `[{"name": "0", "title": "world", "rank": 1, "size": 4}, {"name": "3", "title": "tp", "rank": 0, "size": 2}, {"name": "5", "title": "mine", "rank": 1, "size": 2}, {"name": "7", "title": "7", "rank": 0, "size": 2}]`
	if err != nil || string(got) != want {
		t.Errorf("%s, %v; want %s", got, err, want)
	}
}

func ExampleOn() {
	var recorder *record.Writer // ccl.Config.Recorder
	m := marks.On(recorder)
	for step := range uint64(3) {
		end := m.DataLoading()
		// batch := next()
		end()
		m.Step(step)
		if step%1000 == 0 {
			end := m.Checkpoint()
			// write it
			end()
		}
	}
	// Output:
}
