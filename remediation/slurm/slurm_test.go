package slurm

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ccl/lockstep/remediation"
)

// The test binary is also a job's batch script and its ranks (real_test.go).
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "loop" {
		os.Exit(loopMain(os.Args[2:]))
	}
	if len(os.Args) > 2 && os.Args[1] == "rank" {
		os.Exit(rankMain(os.Args[2]))
	}
	if len(os.Args) > 2 && os.Args[1] == "act" {
		os.Exit(actMain(os.Args[2]))
	}
	goleak.VerifyTestMain(m)
}

func actuator(t *testing.T, run Runner, change func(*Options)) *Actuator {
	t.Helper()
	o := Options{
		Users: []string{"alice"}, Journal: filepath.Join(t.TempDir(), "journal"), Run: run,
		FenceTimeout: 20 * time.Millisecond, tick: time.Millisecond, patience: 20 * time.Second, queue: 20 * time.Second, again: 50 * time.Millisecond,
	}
	if change != nil {
		change(&o)
	}
	a, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	return a
}

func ptr(n int) *int { return &n }

func act(kind remediation.ActionKind, rank, attempt int) remediation.Action {
	return remediation.Action{ID: "5e1f", Job: "slurm-7", Incident: "i", Kind: kind, Rank: rank, Attempt: ptr(attempt), Reason: "noncommunication_hang: rank 2"}
}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func TestActions(t *testing.T) {
	for _, c := range []struct {
		name   string
		fake   *fake
		set    func(*fake, *Options)
		act    remediation.Action
		ran    []string // what happened after the start
		detail string
		exc    string
		drain  string
	}{
		{
			name: "restart inside the allocation", fake: newFake(5, 4, 5, true), act: act(remediation.ActionRestart, 2, 0),
			ran: []string{"cancelled 7.0", "attempt 1 [n1 n2 n3 n4]"}, detail: "every node has told Slurm so",
		},
		{
			name: "exclude inside the allocation", fake: newFake(5, 4, 5, true), act: act(remediation.ActionExclude, 2, 0),
			ran: []string{"cancelled 7.0", "attempt 1 [n1 n2 n4 n5]"}, detail: "attempt 1 runs inside the allocation",
		},
		{
			name: "the agent's word on the node", fake: newFake(5, 4, 5, true), ran: []string{"cancelled 7.0", "attempt 1 [n1 n3 n4 n5]"},
			act: func() remediation.Action {
				a := act(remediation.ActionExclude, 11, 0)
				a.Node = "n2.example.org"
				return a
			}(),
		},
		{
			name: "no spare left in the allocation", fake: newFake(5, 4, 4, true), act: act(remediation.ActionExclude, 2, 0),
			ran: []string{"requeued", "started [n1 n2 n4 n5]", "attempt 100 [n1 n2 n4 n5]"}, exc: "n3", detail: "no spare is left in the allocation",
		},
		{
			name: "no spare at all", fake: newFake(4, 4, 4, true), act: act(remediation.ActionExclude, 2, 0),
			ran: []string{"cancelled 7.0", "attempt 1 [n1 n2 n3 n4]"}, detail: "no node is free to take the place of n3",
		},
		{
			name: "requeue", fake: newFake(5, 4, 4, false), act: act(remediation.ActionRestart, 2, 0),
			ran: []string{"requeued", "started [n1 n2 n3 n4]"},
		},
		{
			name: "requeue without a node, and its list is kept", fake: newFake(6, 4, 4, false), act: act(remediation.ActionExclude, 1, 0),
			set: func(f *fake, o *Options) { f.exc, o.Drain = []string{"n5"}, true },
			ran: []string{"requeued", "started [n1 n3 n4 n6]"}, exc: "n5,n2", drain: "n2", detail: "n2 is drained",
		},
		{
			name: "an account that may not drain", fake: newFake(5, 4, 4, false), act: act(remediation.ActionExclude, 1, 0),
			set: func(f *fake, o *Options) { f.denied, o.Drain = true, true },
			ran: []string{"requeued", "started [n1 n3 n4 n5]"}, exc: "n2", detail: "n2 is not drained: this account may not",
		},
		{
			name: "a reserved spare", fake: newFake(6, 4, 4, false), act: act(remediation.ActionExclude, 1, 0),
			set: func(f *fake, o *Options) { f.spares, o.Spares = []string{"n5", "n6"}, "spares" },
			ran: []string{"requeued", "started [n1 n3 n4 n6]"}, exc: "n2", detail: "spare n6 released",
		},
		{
			name: "an attempt that is over", fake: newFake(5, 4, 5, true), set: func(f *fake, _ *Options) { f.startStep(4) },
			act: act(remediation.ActionRestart, 2, 0), ran: []string{"attempt 1 [n1 n2 n3 n4]"}, detail: "attempt 0 is over",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			before := len(c.fake.ran)
			a := actuator(t, c.fake.run, func(o *Options) {
				if c.set != nil {
					c.set(c.fake, o)
				}
			})
			answer, err := a.Act(within(t), c.act)
			if err != nil {
				t.Fatalf("%v; %q", err, c.fake.ran)
			}
			if got := c.fake.ran[before:]; !slices.Equal(got, c.ran) {
				t.Errorf("happened %q, want %q", got, c.ran)
			}
			if !strings.Contains(answer.Detail, c.detail) || strings.Join(c.fake.exc, ",") != c.exc {
				t.Errorf("detail %q, excluded %v; want %q, %s", answer.Detail, c.fake.exc, c.detail, c.exc)
			}
			for n, s := range c.fake.node {
				if (s == "drained") != (n == c.drain) || s == "drained" && !strings.Contains(c.fake.reason[n], "lockstep action 5e1f job 7: noncommunication_hang: rank 2") {
					t.Errorf("%s is %s (%s)", n, s, c.fake.reason[n])
				}
			}
			if !strings.HasPrefix(c.fake.comment, "the user's own") {
				t.Errorf("the user's comment is gone: %q", c.fake.comment)
			}
			n := len(c.fake.ran)
			if again, err := a.Act(within(t), c.act); err != nil || again != answer && !again.At.IsZero() || len(c.fake.ran) != n {
				t.Errorf("a repeat: %+v, %v, %q", again, err, c.fake.ran[n:])
			}
		})
	}
}

// Jobs that the actuator does not know are left alone.
func TestUnknownJobs(t *testing.T) {
	f := newFake(5, 4, 4, false)
	a := actuator(t, f.run, nil)
	for _, job := range []string{"slurm-8", "slurm-07", "slurm-7; reboot", "-j", "", "slurm-", "slurm-7_1", "SLURM-7", strings.Repeat("9", 80)} {
		x := act(remediation.ActionRestart, 0, 0)
		x.Job = job
		if _, err := a.Act(within(t), x); err == nil {
			t.Errorf("job %q was acted on", job)
		}
	}
	if a = actuator(t, f.run, func(o *Options) { o.Users = []string{"bob"} }); true {
		if _, err := a.Act(within(t), act(remediation.ActionRestart, 0, 0)); !errors.Is(err, remediation.ErrGone) {
			t.Errorf("another user's job: %v", err)
		}
	}
	if f.count("requeued") > 0 || f.count("cancelled") > 0 {
		t.Error(f.ran)
	}
}

// TestInterruptions: whatever fails, whoever dies in between, in the end the job has been
// restarted once, without the node it was to leave out.
func TestInterruptions(t *testing.T) {
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 1))
		loop, kind := r.IntN(2) == 0, []remediation.ActionKind{remediation.ActionRestart, remediation.ActionExclude}[r.IntN(2)]
		f := newFake(6, 4, 4+r.IntN(2), loop)
		if r.IntN(3) == 0 {
			f.spares = []string{"n6"}
		}
		budget, forgot := 12, 0
		trouble := func(string) error {
			switch n := r.IntN(100); {
			case budget == 0 || n >= 12:
				if r.IntN(3) == 0 {
					f.save()
				}
				return nil
			case n < 3:
				f.forget()
				forgot++
			}
			budget--
			return errors.New("Unable to contact slurm controller (connect failure)")
		}
		f.before, f.after = trouble, trouble
		dir := filepath.Join(t.TempDir(), "journal")
		var answer remediation.Answer
		var err error
		for range 100 { // remediators, each of which dies sooner or later
			a := actuator(t, f.run, func(o *Options) {
				o.Journal, o.Drain, o.Spares = dir, true, "spares"
			})
			ctx, cancel := context.WithCancel(within(t))
			if r.IntN(2) == 0 {
				time.AfterFunc(time.Duration(r.IntN(40))*time.Millisecond, cancel)
			}
			answer, err = a.Act(ctx, act(kind, 2, 0))
			cancel()
			a.Close()
			if err == nil {
				break
			}
		}
		f.mu.Lock()
		what := fmt.Sprintf("seed %d: %v, %q, forgot %d, %+v, %v", seed, kind, f.ran, forgot, answer, err)
		restarts := f.count("started") - 1
		if loop {
			restarts = f.count("attempt") - 1
		}
		if err != nil || answer.At.IsZero() || f.state != "RUNNING" {
			t.Errorf("not done: %s", what)
		}
		if restarts < 1 || restarts > 1 && forgot == 0 || restarts > 2 {
			t.Errorf("%d restarts: %s", restarts, what)
		}
		if kind == remediation.ActionExclude && len(f.steps) > 0 && slices.Contains(f.steps[0].nodes, "n3") {
			t.Errorf("n3 still in use: %s", what)
		}
		for n := range maps.Keys(f.node) {
			if n != "n3" && f.node[n] != "idle" {
				t.Errorf("%s is %s: %s", n, f.node[n], what)
			}
		}
		f.mu.Unlock()
		if t.Failed() {
			t.Log(strings.Join(f.calls, "\n"))
			return
		}
	}
}
