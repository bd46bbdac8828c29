package process

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ccl/lockstep/remediation"
)

// The test binary is also a rank: it does what its command says.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "rank" {
		os.Exit(rank(os.Args[2]))
	}
	goleak.VerifyTestMain(m)
}

func rank(what string) int {
	me, attempt := os.Getenv("LOCKSTEP_RANK"), os.Getenv("LOCKSTEP_RESTART_COUNT")
	fmt.Printf("rank %s of %s attempt %s slot %s node %s\n", me, os.Getenv("WORLD_SIZE"), attempt, os.Getenv("LOCKSTEP_SLOT"), os.Getenv("LOCKSTEP_NODE"))
	switch {
	case what == "ok", what == "fail-first" && attempt != "0":
		return 0
	case what == "fail-first" && me == "1", what == "fail" && me == "1":
		return 7
	}
	time.Sleep(time.Minute)
	return 0
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
	dir := t.TempDir()
	o := Options{
		Job: "j", Command: []string{os.Args[0], "rank", what}, Ranks: 4, Nodes: 2, Dir: dir, Control: true, Grace: 200 * time.Millisecond,
		RuntimeDir: func(n string) string { return filepath.Join(dir, n) },
		Node:       func(i int) string { return fmt.Sprint("node", i) },
		CommID:     func() (string, error) { return "id", nil },
		OnEvent:    func(e Event) { j.events <- e },
	}
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
		case <-time.After(30 * time.Second):
			j.t.Fatalf("no %s event within 30 s; status %+v", kind, j.Status())
		}
	}
}

func (j *job) end() error {
	j.t.Helper()
	select {
	case err := <-j.err:
		j.err <- err
		return err
	case <-time.After(30 * time.Second):
		j.t.Fatal("job did not end within 30 s")
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
	if fi, err := os.Stat(filepath.Join(j.o.Dir, "secret")); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("secret: %v, %v", fi.Mode(), err)
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
	detail, err := act.Act(ctx, a)
	if err != nil || !strings.Contains(detail, "rank 2 moved from slot 2 to spare slot 4") {
		t.Fatalf("%q, %v", detail, err)
	}
	if e := j.wait("started"); e.Attempt != 1 {
		t.Fatalf("started %+v", e)
	}
	for range 2 { // the same action again, and a late decision about attempt 0
		if detail, err := act.Act(ctx, a); err != nil || !strings.Contains(detail, "again") {
			t.Fatalf("%q, %v", detail, err)
		}
	}
	a.ID = "y"
	if detail, err := act.Act(ctx, a); err != nil || !strings.Contains(detail, "nothing done") {
		t.Fatalf("%q, %v", detail, err)
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

func TestOptionErrors(t *testing.T) {
	for want, o := range map[string]Options{
		"needs a name":     {Command: []string{"x"}, Ranks: 1},
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
