package slurm

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/remediation"
)

// Tests of a real Slurm run where LOCKSTEP_TEST_SLURM is set (make test-slurm): it needs
// Debian's packages and root. It is also how often each fault is played.
func rounds(t *testing.T) int {
	t.Helper()
	v := os.Getenv("LOCKSTEP_TEST_SLURM")
	if v == "" {
		t.Skip("a real Slurm: make test-slurm")
	}
	n, err := strconv.Atoi(v)
	if err != nil || n < 1 {
		t.Fatalf("LOCKSTEP_TEST_SLURM is %q, want a number of rounds", v)
	}
	return n
}

// lab is a real Slurm.
type lab struct {
	t   *testing.T
	dir string
	run Runner
	log string // what ranks write
}

func newLab(t *testing.T, nodes int, extra string) *lab {
	t.Helper()
	dir, err := os.MkdirTemp("", "slurmlab")
	if err != nil {
		t.Fatal(err)
	}
	l := &lab{t: t, dir: filepath.Join(dir, "lab"), log: filepath.Join(dir, "ranks.log"), run: Commands("")}
	os.Chmod(dir, 0o755)
	t.Cleanup(func() {
		if t.Failed() {
			out, _ := exec.Command("tail", "-n", "40", filepath.Join(l.dir, "slurmctld.log")).Output()
			t.Logf("slurmctld.log:\n%s", out)
		}
		l.do("down", "")
		os.RemoveAll(dir)
	})
	t.Setenv("SLURM_CONF", filepath.Join(l.dir, "slurm.conf"))
	t.Setenv("NODES", strconv.Itoa(nodes))
	t.Setenv("PORT", strconv.Itoa(freePorts(t, nodes+1)))
	t.Setenv("EXTRA", extra)
	t.Setenv("SLURM_TIME_FORMAT", "%s")
	l.do("up", "")
	return l
}

func freePorts(t *testing.T, n int) int {
	for range 100 {
		base, ok := 20000+rand.IntN(10000), true
		for p := base; p < base+n && ok; p++ {
			c, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(p))
			if ok = err == nil; ok {
				c.Close()
			}
		}
		if ok {
			return base
		}
	}
	t.Fatal("no free ports")
	return 0
}

func (l *lab) do(op, node string) {
	l.t.Helper()
	args := []string{op, l.dir}
	if node != "" {
		args = append(args, node)
	}
	cmd := exec.Command("../../deploy/slurmlab/lab", args...)
	if out, err := cmd.CombinedOutput(); err != nil {
		l.t.Fatalf("lab %s %s: %v\n%s", op, node, err, out)
	}
}

func (l *lab) slurm(name string, args ...string) string {
	l.t.Helper()
	out, err := l.run(context.Background(), name, args...)
	if err != nil {
		l.t.Fatal(err)
	}
	return strings.TrimSpace(out)
}

// submit starts a job of ranks, one a node, and waits until they run.
func (l *lab) submit(loop bool, options ...string) (id string) {
	l.t.Helper()
	os.Remove(l.log)
	self, err := os.Executable()
	if err != nil {
		l.t.Fatal(err)
	}
	script := fmt.Sprintf("#!/bin/sh\nexec srun --kill-on-bad-exit=0 --wait=60 %s rank %s\n", self, l.log)
	nodes := "4"
	if loop {
		script, nodes = fmt.Sprintf("#!/bin/sh\nexec %s loop --ntasks-per-node=1 %s rank %s\n", self, self, l.log), "5"
	}
	file := filepath.Join(filepath.Dir(l.dir), "job.sh")
	if err := os.WriteFile(file, []byte(script), 0o755); err != nil {
		l.t.Fatal(err)
	}
	if loop {
		options = append(options, "--no-kill")
	}
	args := append([]string{
		"--parsable", "-N", nodes, "--ntasks-per-node=1", "--gres=gpu:8", "--requeue", "--open-mode=append", "-o", filepath.Join(filepath.Dir(l.dir), "job.out"),
		"--comment=" + "the user's own; X=1 [not ours]",
	}, options...)
	id = l.slurm("sbatch", append(args, file)...)
	l.attempt(id, 0, 4)
	return id
}

// line is what a rank writes when it starts.
type line struct {
	At       time.Time
	Job      string
	Attempt  int
	Rank     int
	Node     string
	PID      int
	Restarts string
}

func (l *lab) lines() (all []line) {
	b, _ := os.ReadFile(l.log)
	for s := range strings.Lines(string(b)) {
		var x line
		if json.Unmarshal([]byte(s), &x) == nil {
			all = append(all, x)
		}
	}
	return all
}

// attempt waits until n ranks of an attempt have started, and returns them by rank.
func (l *lab) attempt(id string, attempt, n int) []line {
	l.t.Helper()
	var got []line
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		got = slices.DeleteFunc(l.lines(), func(x line) bool { return x.Job != id || x.Attempt != attempt })
		if len(got) == n {
			slices.SortFunc(got, func(a, b line) int { return a.Rank - b.Rank })
			return got
		}
	}
	out, _ := os.ReadFile(filepath.Join(filepath.Dir(l.dir), "job.out"))
	q, _ := l.run(context.Background(), "squeue", "-t", "all")
	l.t.Fatalf("job %s: %d of %d ranks of attempt %d started: %+v\n%s\n%s", id, len(got), n, attempt, l.lines(), out, q)
	return nil
}

func (l *lab) attempts(id string) (n int) {
	seen := map[int]bool{}
	for _, x := range l.lines() {
		if x.Job == id {
			seen[x.Attempt] = true
		}
	}
	return len(seen)
}

// calm waits until all nodes are idle again.
func (l *lab) calm(id string) {
	l.t.Helper()
	l.run(context.Background(), "scancel", "--signal=KILL", "--full", id)
	l.run(context.Background(), "scancel", id)
	for _, x := range l.lines() {
		syscall.Kill(x.PID, syscall.SIGKILL)
	}
	for i := range 10 {
		n := "n" + strconv.Itoa(i+1)
		if strconv.Itoa(i) == os.Getenv("NODES") {
			break
		}
		if b, err := os.ReadFile(filepath.Join(l.dir, "pids", n)); err == nil {
			pid, _ := strconv.Atoi(strings.TrimSpace(string(b)))
			syscall.Kill(pid, syscall.SIGCONT)
		}
		l.do("start", n)
	}
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		l.run(context.Background(), "scontrol", "update", "nodename=ALL", "state=resume")
		out, err := l.run(context.Background(), "sinfo", "-h", "-o", "%D", "-t", "idle")
		if err == nil && strings.TrimSpace(out) == os.Getenv("NODES") {
			return
		}
		if time.Now().After(deadline) {
			l.t.Fatalf("nodes are not idle: %s, %v", l.slurm("sinfo", "-N", "-l"), err)
		}
	}
}

// faults are what happens to rank 2 or its node.
var faults = []struct {
	name string
	kind remediation.ActionKind
	lost bool // the master's word: the node's agent is silent
	hurt func(l *lab, r line)
}{
	{"rank killed", remediation.ActionRestart, false, func(_ *lab, r line) { syscall.Kill(r.PID, syscall.SIGKILL) }},
	{"rank stopped", remediation.ActionRestart, false, func(_ *lab, r line) { syscall.Kill(r.PID, syscall.SIGSTOP) }},
	{"slow node", remediation.ActionExclude, false, func(*lab, line) {}},
	{"node power loss", remediation.ActionRestart, false, func(l *lab, r line) { l.do("kill", r.Node) }},
	{"slurmd dead", remediation.ActionRestart, false, func(l *lab, r line) { l.do("lose", r.Node) }},
	{"node cut off", remediation.ActionRestart, true, func(l *lab, r line) {
		b, _ := os.ReadFile(filepath.Join(l.dir, "pids", r.Node))
		pid, _ := strconv.Atoi(strings.TrimSpace(string(b)))
		syscall.Kill(pid, syscall.SIGSTOP)
	}},
}

// TestRealFaults: each fault, in the allocation and by requeue, is followed by one attempt on
// nodes that answer; how long that takes is told.
func TestRealFaults(t *testing.T) {
	n := rounds(t)
	l := newLab(t, 5, "")
	for _, loop := range []bool{true, false} {
		for _, f := range faults {
			var took []time.Duration
			for i := range n {
				took = append(took, l.play(loop, f.name, f.kind, f.lost, f.hurt, i))
			}
			slices.Sort(took)
			way := map[bool]string{true: "in the allocation", false: "by requeue"}[loop]
			t.Logf("%-16s %-18s %2d runs: median %5.2f s, worst %5.2f s", f.name, way, n, took[len(took)/2].Seconds(), took[len(took)-1].Seconds())
		}
	}
}

func (l *lab) play(loop bool, name string, kind remediation.ActionKind, lost bool, hurt func(*lab, line), i int) time.Duration {
	l.t.Helper()
	id := l.submit(loop)
	defer l.calm(id)
	first := l.attempt(id, 0, 4)
	a := actuator(l.t, l.run, func(o *Options) {
		o.Users, o.Drain, o.tick, o.again, o.FenceTimeout = []string{"root"}, true, 0, 0, 2*time.Second
	})
	began := time.Now()
	hurt(l, first[2])
	x := remediation.Action{ID: fmt.Sprintf("a%d", i), Job: "slurm-" + id, Kind: kind, Rank: 2, Attempt: ptr(0), Reason: name, Node: first[2].Node}
	if lost {
		x.Cause = nodeLost
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	answer, err := a.Act(ctx, x)
	if err != nil {
		l.t.Fatalf("%s: %v", name, err)
	}
	next := 1
	if loop && !strings.Contains(answer.Detail, "inside the allocation") {
		next = attemptsPerAllocation
	}
	second := l.attempt(id, next, 4)
	worst := began
	for _, r := range second {
		worst = latest(worst, r.At)
		if (kind == remediation.ActionExclude || strings.HasPrefix(name, "node") || strings.HasPrefix(name, "slurmd")) && r.Node == first[2].Node {
			l.t.Errorf("%s: rank %d is on %s again: %s", name, r.Rank, r.Node, answer.Detail)
		}
	}
	if again, err := a.Act(ctx, x); err != nil || !again.At.Equal(answer.At) {
		l.t.Errorf("%s: a repeat answers %+v, %v", name, again, err)
	}
	if n := l.attempts(id); n != 2 {
		l.t.Errorf("%s: %d attempts: %s", name, n, answer.Detail)
	}
	if c := l.slurm("squeue", "-h", "-j", id, "-o", "%k"); !strings.HasPrefix(c, "the user's own; X=1 [not ours]") {
		l.t.Errorf("%s: the comment is %q", name, c)
	}
	if i == 0 {
		l.t.Logf("%s, loop %v: %v: %s", name, loop, worst.Sub(began).Round(10*time.Millisecond), answer.Detail)
	}
	return worst.Sub(began)
}

// TestRealKills kills the remediator and slurmctld with SIGKILL while they act, at random
// times: in the end the job runs again, once more than before, without the bad node, and no
// other node is out.
func TestRealKills(t *testing.T) {
	n := rounds(t)
	l := newLab(t, 6, "")
	kills := map[string]int{}
	var again int
	for i := 0; kills["remediator"]+kills["slurmctld"] < 5*n; i++ {
		loop, kind := i%2 == 0, []remediation.ActionKind{remediation.ActionRestart, remediation.ActionExclude}[i/2%2]
		again += l.playKills(loop, kind, i, kills)
	}
	t.Logf("killed: %v; attempts that came up on the node to leave out, since slurmctld had forgotten it, and were ended: %d", kills, again)
}

func (l *lab) playKills(loop bool, kind remediation.ActionKind, i int, kills map[string]int) (again int) {
	l.t.Helper()
	id := l.submit(loop)
	defer l.calm(id)
	first := l.attempt(id, 0, 4)
	l.saved()
	what := struct {
		Action  remediation.Action
		Journal string
	}{
		remediation.Action{ID: fmt.Sprintf("k%d", i), Job: "slurm-" + id, Kind: kind, Rank: 2, Attempt: ptr(0), Reason: "test", Node: first[2].Node},
		filepath.Join(l.t.TempDir(), "journal"),
	}
	b, _ := json.Marshal(what)
	var answer remediation.Answer
	for try := 0; ; try++ {
		cmd := exec.Command(os.Args[0], "act", string(b))
		var out, errs strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &errs
		if err := cmd.Start(); err != nil {
			l.t.Fatal(err)
		}
		whom := []string{"remediator", "slurmctld", ""}[rand.IntN(3)]
		if try > 6 {
			whom = ""
		}
		timer := time.AfterFunc(time.Duration(rand.IntN(3000))*time.Millisecond, func() {
			if whom == "remediator" {
				cmd.Process.Kill()
			}
		})
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		var err error
		if whom == "slurmctld" {
			select {
			case err = <-ended: // what slurmctld forgets afterwards is not the action's
				ended <- err
			case <-time.After(time.Duration(rand.IntN(2500)) * time.Millisecond):
				l.do("kill", "ctld")
				time.Sleep(time.Duration(rand.IntN(1000)) * time.Millisecond)
				l.do("start", "ctld")
				kills[whom]++
			}
		}
		err = <-ended
		if !timer.Stop() && whom == "remediator" && err != nil {
			kills[whom]++
			continue
		}
		if err != nil {
			if try > 12 {
				l.t.Fatalf("round %d (loop %v, %s): %v: %s", i, loop, kind, err, errs.String())
			}
			continue
		}
		if err := json.Unmarshal([]byte(out.String()), &answer); err != nil {
			l.t.Fatal(err)
		}
		break
	}
	// Which attempts there were, and where the last one runs.
	for deadline := time.Now().Add(time.Minute); len(l.lines())%4 != 0 || l.attempts(id) < 2; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			break
		}
	}
	var last []line
	seen := map[int]int{}
	for _, x := range l.lines() {
		if x.Job == id {
			seen[x.Attempt]++
			if len(last) == 0 || x.Attempt > last[0].Attempt {
				last = nil
			}
			if len(last) == 0 || x.Attempt == last[0].Attempt {
				last = append(last, x)
			}
		}
	}
	if strings.Contains(answer.Detail, "came up on") {
		again = 1
	}
	if len(last) != 4 || len(seen) != 2+again {
		l.t.Errorf("round %d (loop %v, %s): attempts %v: %s", i, loop, kind, seen, answer.Detail)
	}
	for _, x := range last {
		if kind == remediation.ActionExclude && x.Node == first[2].Node {
			l.t.Errorf("round %d (loop %v): rank %d is on %s: %s", i, loop, x.Rank, x.Node, answer.Detail)
		}
	}
	for s := range strings.Lines(l.slurm("sinfo", "-h", "-N", "-o", "%N %T")) {
		node, state, _ := strings.Cut(strings.TrimSpace(s), " ")
		if out := strings.HasPrefix(state, "drain") || strings.HasPrefix(state, "down"); out && (node != first[2].Node || kind != remediation.ActionExclude) {
			l.t.Errorf("round %d (loop %v, %s): %s is %s", i, loop, kind, node, state)
		}
	}
	return again
}

// saved waits until slurmctld has surely written the job to its disk, which it does within
// five seconds: it may forget what it was told while it dies, not that there is a job.
func (l *lab) saved() {
	l.t.Helper()
	time.Sleep(6 * time.Second)
}

func latest(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// rankMain is a rank: it says that it is there, and stays.
func rankMain(log string) int {
	f, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o666)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	rank, _ := strconv.Atoi(os.Getenv("SLURM_PROCID"))
	attempt, _ := strconv.Atoi(cmp.Or(os.Getenv("SLURM_RESTART_COUNT"), "0"))
	b, _ := json.Marshal(line{time.Now(), os.Getenv("SLURM_JOB_ID"), attempt, rank, os.Getenv("SLURMD_NODENAME"), os.Getpid(), os.Getenv("SLURM_RESTART_COUNT")})
	f.Write(append(b, '\n'))
	time.Sleep(10 * time.Minute)
	return 0
}

// loopMain is the batch script.
func loopMain(srun []string) int {
	err := Loop{Srun: srun, Nodes: 4, Hold: time.Minute, Decide: 20 * time.Second, Logger: slog.Default(), Stdout: os.Stdout}.Start(context.Background())
	var step *StepError
	if errors.As(err, &step) {
		return step.Status
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// actMain carries out one action, as a remediator does that may be killed.
func actMain(what string) int {
	var x struct {
		Action  remediation.Action
		Journal string
	}
	if err := json.Unmarshal([]byte(what), &x); err != nil {
		panic(err)
	}
	a, err := New(Options{Users: []string{"root"}, Journal: x.Journal, Drain: true, FenceTimeout: time.Second})
	if err == nil {
		var answer remediation.Answer
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		if answer, err = a.Act(ctx, x.Action); err == nil {
			b, _ := json.Marshal(answer)
			fmt.Println(string(b))
			return 0
		}
	}
	fmt.Fprintln(os.Stderr, err)
	return 1
}
