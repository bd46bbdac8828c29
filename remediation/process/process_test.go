package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ccl/lockstep/remediation"
)

func init() { runtime.LockOSThread() } // TestMain runs on the process's first thread

// The test binary is also a rank: it does what its command says.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "rank" {
		os.Exit(rank(os.Args[2]))
	}
	if len(os.Args) > 2 && os.Args[1] == "supervise" {
		os.Exit(supervise(os.Args[2]))
	}
	if len(os.Args) > 2 && os.Args[1] == "remediate" {
		os.Exit(remediate(os.Args[2]))
	}
	if len(os.Args) > 3 && os.Args[1] == "host" {
		os.Exit(host(os.Args[2], os.Args[3]))
	}
	goleak.VerifyTestMain(m)
}

func rank(what string) int {
	me, attempt := os.Getenv("LOCKSTEP_RANK"), os.Getenv("LOCKSTEP_RESTART_COUNT")
	if gpus := os.Getenv("CUDA_VISIBLE_DEVICES"); gpus != "" {
		fmt.Printf("local rank %s sees %s\n", os.Getenv("LOCAL_RANK"), gpus)
	}
	fmt.Printf("rank %s of %s attempt %s slot %s node %s\n", me, os.Getenv("WORLD_SIZE"), attempt, os.Getenv("LOCKSTEP_SLOT"), os.Getenv("LOCKSTEP_NODE"))
	switch what {
	case "deaf": // to SIGTERM
		signal.Ignore(syscall.SIGTERM)
	case "deaf-7":
		signal.Ignore(syscall.SIGTERM)
		if me == "1" {
			return waitForOthers(7)
		}
		ready()
	case "exit-3":
		if me == "1" {
			return 3
		}
	case "panic":
		if me == "1" {
			panic("as the test wants")
		}
	case "polite":
		term := make(chan os.Signal, 1)
		signal.Notify(term, syscall.SIGTERM)
		fmt.Println("listening")
		<-term
		fmt.Println("bye")
		return 0
	case "forks": // and leaves behind what holds its output open
		child := exec.Command("sleep", "60")
		child.Stdout, child.Stderr = os.Stdout, os.Stderr
		if err := child.Start(); err != nil {
			return 1
		}
		fmt.Println("child", child.Process.Pid)
		return 0
	case "escapes": // as a daemon does, and works on
		child := exec.Command("sleep", "60")
		child.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := child.Start(); err != nil {
			return 1
		}
		fmt.Println("child", child.Process.Pid)
	case "headless":
		go time.Sleep(time.Minute)
		_, _, _ = syscall.RawSyscall(syscall.SYS_EXIT, 0, 0, 0) // of the first thread
	case "census":
		return census()
	case "long":
		fmt.Println(strings.Repeat("x", 3*maxLine))
		fmt.Println("end")
		return 0
	}
	switch {
	case what == "ok", what == "fail-first" && attempt != "0":
		return 0
	case what == "fail-first" && me == "1", what == "fail" && me == "1":
		return 7
	}
	time.Sleep(time.Minute)
	return 0
}

// ready says that this rank is deaf by now; waitForOthers is until all others are.
func ready() { _ = os.WriteFile(readyFile(os.Getenv("LOCKSTEP_RANK")), nil, 0o600) }

func waitForOthers(code int) int {
	for _, r := range []string{"0", "2", "3"} {
		for _, err := os.Stat(readyFile(r)); err != nil; _, err = os.Stat(readyFile(r)) {
			time.Sleep(time.Millisecond)
		}
	}
	return code
}

func readyFile(rank string) string {
	return filepath.Join(filepath.Dir(os.Getenv("LOCKSTEP_SECRET_FILE")), "ready"+rank)
}

func options(dir, what string) Options {
	return Options{
		Job: "j", Command: []string{os.Args[0], "rank", what}, Ranks: 2, Dir: dir, Control: true, Grace: 200 * time.Millisecond,
		RuntimeDir: func(n string) string { return filepath.Join(dir, n) },
		Node:       func(i int) string { return fmt.Sprint("node", i) },
		Rendezvous: func() ([]string, error) { return []string{"LOCKSTEP_COMM_ID=id"}, nil },
	}
}

type job struct {
	*Supervisor
	t      *testing.T
	events chan Event
	err    chan error
	cancel context.CancelFunc
}

func begin(t *testing.T, what string, change func(*Options)) *job {
	t.Helper()
	j := &job{t: t, events: make(chan Event, 100), err: make(chan error, 1)}
	dir := filepath.Join(t.TempDir(), "job")
	o := options(dir, what)
	o.Ranks, o.Nodes = 4, 2
	o.OnEvent = func(e Event) { j.events <- e }
	if change != nil {
		change(&o)
	}
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	j.Supervisor = s
	var ctx context.Context
	ctx, j.cancel = context.WithCancel(context.Background())
	go func() { j.err <- s.Run(ctx) }()
	t.Cleanup(func() { j.cancel(); <-j.err })
	return j
}

func (j *job) wait(kind string) Event {
	j.t.Helper()
	for {
		select {
		case e := <-j.events:
			if e.Kind == kind {
				return e
			}
		case <-time.After(2 * time.Minute):
			j.t.Fatalf("no %s event within two minutes; status %+v", kind, j.Status())
		}
	}
}

func (j *job) end() error {
	j.t.Helper()
	select {
	case err := <-j.err:
		j.err <- err
		return err
	case <-time.After(2 * time.Minute):
		j.t.Fatal("job did not end within two minutes")
		return nil
	}
}

func TestRunsToTheEnd(t *testing.T) {
	var out strings.Builder
	j := begin(t, "ok", func(o *Options) { o.Output = &out })
	if err := j.end(); err != nil {
		t.Fatal(err)
	}
	if s := j.Status(); s.State != "done" {
		t.Errorf("state %s", s.State)
	}
	b, err := os.ReadFile(filepath.Join(j.o.Dir, "rank3.attempt0.log"))
	if err != nil || string(b) != "rank 3 of 4 attempt 0 slot 3 node node1\n" {
		t.Errorf("log %q, %v", b, err)
	}
	if _, err := os.Stat(filepath.Join(j.o.Dir, "secret")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the secret outlives the job: %v", err)
	}
}

func TestRestartsOnItsOwn(t *testing.T) {
	j := begin(t, "fail-first", func(o *Options) { o.MaxRestarts = 1 })
	if err := j.end(); err != nil {
		t.Fatal(err)
	}
	j = begin(t, "fail", func(o *Options) { o.MaxRestarts = 1 })
	if err := j.end(); err == nil || !strings.Contains(err.Error(), "rank 1: exit status 7") {
		t.Fatalf("error %v", err)
	}
}

func TestHoldWaitsForADecision(t *testing.T) {
	j := begin(t, "fail-first", func(o *Options) { o.Hold = time.Minute })
	if e := j.wait("holding"); e.Rank != 1 {
		t.Fatalf("holding for rank %d", e.Rank)
	}
	if s := j.Status(); s.State != "holding" || s.Ranks[0].State != "running" || s.Ranks[1].State != "exited" {
		t.Fatalf("status %+v", s)
	}
	r, err := NewClient(j.ControlSocket()).Restart(context.Background(), RestartRequest{Action: "a"})
	if err != nil || r.Attempt != 1 {
		t.Fatalf("%+v, %v", r, err)
	}
	if err := j.end(); err != nil {
		t.Fatal(err)
	}
}

func TestActionsAreIdempotent(t *testing.T) {
	j := begin(t, "sleep", func(o *Options) { o.Spares = 1 })
	j.wait("started")
	ctx := context.Background()
	// A stopped rank cannot act on SIGTERM; it must go all the same.
	if err := syscall.Kill(j.Status().Ranks[2].PID, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	act := &Actuator{Socket: func(string) (string, bool) { return j.ControlSocket(), true }}
	inv, err := act.Inventory(ctx, "j")
	if err != nil || inv.Units != 5 || inv.Unit(2) != "j/slot2" {
		t.Fatalf("inventory %+v, %v", inv, err)
	}
	zero := 0
	a := remediation.Action{ID: "x", Job: "j", Kind: remediation.ActionExclude, Rank: 2, Attempt: &zero}
	first, err := act.Act(ctx, a)
	if err != nil || !strings.Contains(first.Detail, "rank 2 moved from slot 2 to spare slot 4") {
		t.Fatalf("%+v, %v", first, err)
	}
	if e := j.wait("started"); e.Attempt != 1 {
		t.Fatalf("started %+v", e)
	}
	for range 2 { // the same action again, and a late decision about attempt 0
		if again, err := act.Act(ctx, a); err != nil || !strings.Contains(again.Detail, "again") || !again.At.Equal(first.At) {
			t.Fatalf("%+v, %v", again, err)
		}
	}
	a.ID = "y"
	if late, err := act.Act(ctx, a); err != nil || !late.At.IsZero() || !strings.Contains(late.Detail, "nothing done") {
		t.Fatalf("%+v, %v", late, err)
	}
	if s := j.Status(); s.Attempt != 1 || s.Ranks[2].Slot != 4 || len(s.Excluded) != 1 {
		t.Fatalf("status %+v", s)
	}
	j.cancel()
	j.end()
	if _, err := act.Act(ctx, a); err == nil {
		t.Fatal("a job that has ended took an action")
	}
}

// TestExclusionMovesTheGPU: a rank that is moved computes on another GPU, the others where they did.
func TestExclusionMovesTheGPU(t *testing.T) {
	j := begin(t, "sleep", func(o *Options) {
		o.Ranks, o.Nodes, o.Spares, o.Devices = 4, 2, 1, []string{"4", "5", "GPU-aa", "7", "9"}
	})
	j.wait("started")
	sees := func(attempt, rank int, want string) {
		t.Helper()
		if got := loggedBy(t, j.o.Dir, rank, attempt, "local rank "); got != want {
			t.Errorf("rank %d: local rank %s, want %s", rank, got, want)
		}
	}
	sees(0, 1, "1 sees 4,5")
	sees(0, 2, "0 sees GPU-aa,7")
	act := &Actuator{Socket: func(string) (string, bool) { return j.ControlSocket(), true }}
	a, err := act.Act(t.Context(), remediation.Action{ID: "x", Job: "j", Kind: remediation.ActionExclude, Rank: 2})
	if err != nil || !strings.Contains(a.Detail, "from GPU GPU-aa to 9") {
		t.Fatalf("%+v, %v", a, err)
	}
	j.wait("started")
	sees(1, 1, "1 sees 4,5")
	sees(1, 2, "0 sees 9,7")
	sees(1, 3, "1 sees 9,7")
	j.cancel()
	j.end()
	if _, err := New(Options{Job: "j", Command: []string{"x"}, Ranks: 2, Spares: 1, Devices: []string{"0", "1"}}); err == nil {
		t.Error("a spare without a GPU is taken")
	}
}

// logged waits until a rank's log has a line with the prefix, and returns the rest of it.
func (j *job) logged(rank int, prefix string) string {
	j.t.Helper()
	return logged(j.t, j.o.Dir, rank, prefix)
}

func logged(t *testing.T, dir string, rank int, prefix string) string {
	t.Helper()
	return loggedBy(t, dir, rank, 0, prefix)
}

func loggedBy(t *testing.T, dir string, rank, attempt int, prefix string) string {
	t.Helper()
	var b []byte
	for range 3000 {
		b, _ = os.ReadFile(filepath.Join(dir, fmt.Sprintf("rank%d.attempt%d.log", rank, attempt)))
		for line := range strings.Lines(string(b)) {
			if rest, ok := strings.CutPrefix(line, prefix); ok {
				return strings.TrimSpace(rest)
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("no line with %q in the log of rank %d: %q", prefix, rank, b)
	return ""
}

// TestAttemptsAreNeverNumberedAgain: whoever has heard of attempt 1 (an agent, a
// master, the remediator) takes what comes later as attempt 0 or 1 for the past,
// or for the same.
func TestAttemptsAreNeverNumberedAgain(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "job")
	at := func(o *Options) { o.Dir, o.MaxRestarts = dir, 1 }
	if err := begin(t, "fail", at).end(); err == nil {
		t.Fatal("a job of failing ranks ended well")
	}
	j := begin(t, "sleep", at)
	if e := j.wait("started"); e.Attempt != 2 {
		t.Errorf("attempt %d begins after 0 and 1", e.Attempt)
	}
	old := 1
	if r, err := NewClient(j.ControlSocket()).Restart(context.Background(), RestartRequest{Action: "late", Attempt: &old}); err != nil || !r.At.IsZero() {
		t.Errorf("a decision about an attempt of the former supervisor: %+v, %v", r, err)
	}
	j.cancel()
	j.end()
	if b, err := os.ReadFile(filepath.Join(dir, "rank1.attempt1.log")); err != nil || !strings.HasPrefix(string(b), "rank 1 of 4 attempt 1 ") {
		t.Errorf("log of the former supervisor's last attempt: %q, %v", b, err)
	}
	// A number that cannot be read does not keep the job from running, nor from counting on.
	next := 3
	for _, torn := range []string{"", "\x00\x00", "-4\n", "999999999999999999999999", "4294967295\n", strings.Repeat("7", 5000)} {
		if err := os.WriteFile(filepath.Join(dir, "attempt"), []byte(torn), 0o600); err != nil {
			t.Fatal(err)
		}
		j := begin(t, "ok", at)
		if e := j.wait("started"); e.Attempt != next {
			t.Errorf("attempt %d begins behind a file of %.20q, want %d", e.Attempt, torn, next)
		}
		if err := j.end(); err != nil {
			t.Error(err)
		}
		next++
	}
}

// TestForeignStateDirectory: nothing is written, and nothing run, in a directory that another
// user owns, or leads elsewhere.
func TestForeignStateDirectory(t *testing.T) {
	base := t.TempDir()
	target := filepath.Join(base, "target")
	link := filepath.Join(base, "link")
	if err := errors.Join(os.Mkdir(target, 0o700), os.Symlink(target, link)); err != nil {
		t.Fatal(err)
	}
	dirs := map[string]string{link: "is a symbolic link"}
	if os.Geteuid() == 0 {
		foreign, above := filepath.Join(base, "foreign"), filepath.Join(base, "above")
		if err := errors.Join(os.Mkdir(foreign, 0o700), os.Mkdir(above, 0o755), os.Chown(foreign, 54321, 54321), os.Chown(above, 54321, 54321)); err != nil {
			t.Fatal(err)
		}
		dirs[foreign], dirs[filepath.Join(above, "job")] = "is user 54321's", "is user 54321's"
	}
	for dir, want := range dirs {
		s, err := New(options(dir, "ok"))
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Run(context.Background()); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), dir) {
			t.Errorf("%s: %v, want %q", dir, err, want)
		}
		if names, _ := os.ReadDir(dir); len(names) > 0 {
			t.Errorf("%s: %v was made", dir, names)
		}
	}
}

func TestRestartHook(t *testing.T) {
	ctx := context.Background()
	j := begin(t, "fail-first", func(o *Options) {
		o.Hold = time.Minute
		o.OnRestart = []string{"/bin/sh", "-c", "echo hook $LOCKSTEP_JOB $LOCKSTEP_RESTART_COUNT"}
	})
	j.wait("holding")
	if _, err := NewClient(j.ControlSocket()).Restart(ctx, RestartRequest{Action: "a"}); err != nil {
		t.Fatal(err)
	}
	if err := j.end(); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(j.o.Dir, "restart-hook.attempt1.log")); err != nil || string(b) != "hook j 1\n" {
		t.Errorf("hook wrote %q, %v", b, err)
	}

	// A hook that fails fails the job, and whoever asked is told.
	j = begin(t, "sleep", func(o *Options) { o.OnRestart = []string{"/bin/sh", "-c", "sleep 60 & exit 3"} })
	j.wait("started")
	_, err := NewClient(j.ControlSocket()).Restart(ctx, RestartRequest{Action: "a"})
	if !errors.Is(err, remediation.ErrGone) || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("answered %v", err)
	}
	if err := j.end(); err == nil || !strings.Contains(err.Error(), "restart-hook.attempt1.log") {
		t.Errorf("job ended with %v", err)
	}
}

func TestLongLines(t *testing.T) {
	var out strings.Builder
	j := begin(t, "long", func(o *Options) { o.Output, o.Ranks, o.Nodes = &out, 1, 1 })
	if err := j.end(); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(j.o.Dir, "rank0.attempt0.log")); err != nil || !strings.Contains(string(b), strings.Repeat("x", 3*maxLine)+"\nend\n") {
		t.Errorf("log of %d bytes, %v: not the rank's output", len(b), err)
	}
	if n := strings.Count(out.String(), "[0] "); n != 5 && n != 6 || !strings.HasSuffix(out.String(), "[0] end\n") {
		t.Errorf("%d lines on the terminal, ending %q", n, out.String()[max(0, out.Len()-20):])
	}
}

func TestOthersCannotReachTheSocket(t *testing.T) {
	j := begin(t, "sleep", nil)
	j.wait("started")
	if fi, err := os.Stat(j.ControlSocket()); err != nil || fi.Mode() != os.ModeSocket|0o600 {
		t.Errorf("control socket: %v, %v", fi, err)
	}
	if fi, err := os.Stat(filepath.Join(j.o.Dir, "secret")); err != nil || fi.Mode() != 0o600 {
		t.Errorf("secret: %v, %v", fi, err)
	}
	loose := filepath.Join(t.TempDir(), "d")
	if err := os.Mkdir(loose, 0o755); err != nil {
		t.Fatal(err)
	}
	s, err := New(options(loose, "ok"))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Run(context.Background()); err == nil || !strings.Contains(err.Error(), "chmod 700") {
		t.Errorf("a directory that others may enter: %v", err)
	}
}

func TestOptionErrors(t *testing.T) {
	for want, o := range map[string]Options{
		"needs a name":     {Command: []string{"x"}, Ranks: 1},
		"without a slash":  {Job: "../j", Command: []string{"x"}, Ranks: 1},
		"no command":       {Job: "j", Ranks: 1},
		"spread evenly":    {Job: "j", Command: []string{"x"}, Ranks: 3, Nodes: 2},
		"at least 1 and 0": {Job: "j", Command: []string{"x"}},
	} {
		o.Dir = t.TempDir()
		if _, err := New(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one with %q", err, want)
		}
	}
}
