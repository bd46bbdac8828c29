package kubernetes

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/lockstep-ccl/lockstep/deploy/kubelab"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/remediation"
)

// The tests here are `make test-kubernetes`: five real kubelets with JobSet's controller
// (deploy/kubelab), and the actuator with no more rights than deploy/kubernetes/rbac.yaml gives it.

// lab is the cluster.
type lab struct {
	*kubelab.Lab
	t *testing.T
}

func newLab(t *testing.T) *lab {
	if os.Getenv("LOCKSTEP_TEST_KUBERNETES") == "" {
		t.Skip("make test-kubernetes runs this: it needs root, and a cluster that takes minutes to build once")
	}
	l := &lab{kubelab.Up(t), t}
	l.Kubectl("create", "namespace", "training")
	l.Kubectl("apply", "-f", "../../deploy/kubernetes/rbac.yaml")
	manifest, err := os.ReadFile("../../deploy/kubelab/manifests/train.yaml")
	if err != nil {
		t.Fatal(err)
	}
	l.Apply(strings.ReplaceAll(string(manifest), "@SHARED@", l.Shared))
	return l
}

// actuator has the rights of the remediator's service account, and a fencer that can
// switch a node's power off.
func (l *lab) actuator() *Actuator {
	admin, err := clientcmd.BuildConfigFromFlags("", l.Kubeconfig)
	if err != nil {
		l.t.Fatal(err)
	}
	token := l.Kubectl("create", "token", "lockstep-remediator", "-n", "lockstep", "--duration", "2h")
	client, err := dynamic.NewForConfig(&rest.Config{Host: admin.Host, BearerToken: token, TLSClientConfig: rest.TLSClientConfig{Insecure: true}, QPS: 50, Burst: 100, Timeout: 10 * time.Second})
	if err != nil {
		l.t.Fatal(err)
	}
	a, err := New(Options{
		Client: client, Namespaces: []string{"training"}, Namespace: "lockstep", Fencer: power{l}, Poll: 250 * time.Millisecond, Keep: time.Second, ReturnAfter: 3 * time.Second,
		Logger: slog.New(slog.NewTextHandler(testLog{l.t}, nil)),
	})
	if err != nil {
		l.t.Fatal(err)
	}
	return a
}

type testLog struct{ t *testing.T }

func (w testLog) Write(b []byte) (int, error) {
	w.t.Log(strings.TrimSpace(string(b)))
	return len(b), nil
}

// power fences a node by switching it off, as a management controller does.
type power struct{ *lab }

func (p power) Fence(_ context.Context, _ string, _ int, node string) (remediation.Proof, error) {
	if out, err := p.TryNode("kill", node); err != nil {
		return remediation.Proof{}, fmt.Errorf("switch %s off: %w: %s", node, err, out)
	}
	return remediation.Proof{Proven: true, How: "its power is off"}, nil
}

// write is one line of a rank's file.
type write struct {
	at      time.Time
	attempt int
	node    string
}

func (l *lab) writes(rank int) []write {
	f, err := os.Open(fmt.Sprintf("%s/rank-%d", l.Shared, rank))
	if err != nil {
		return nil
	}
	defer f.Close()
	var list []write
	for s := bufio.NewScanner(f); s.Scan(); {
		p := strings.Fields(s.Text())
		if len(p) != 3 {
			continue
		}
		ns, _ := strconv.ParseInt(p[0], 10, 64)
		n, _ := strconv.Atoi(p[1])
		list = append(list, write{time.Unix(0, ns), n, p[2]})
	}
	return list
}

// running waits until all ranks write in an attempt above after, and returns which, since
// when, and where.
func (l *lab) running(after int) (attempt int, since time.Time, where []string) {
	l.t.Helper()
	for end := time.Now().Add(4 * time.Minute); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		attempt, since, where = -1, time.Time{}, nil
		for rank := range 4 {
			w := l.writes(rank)
			if len(w) == 0 || time.Since(w[len(w)-1].at) > 2*time.Second {
				break
			}
			last := w[len(w)-1]
			if attempt >= 0 && last.attempt != attempt || last.attempt <= after {
				break
			}
			attempt = last.attempt
			first := w[slices.IndexFunc(w, func(w write) bool { return w.attempt == attempt })]
			if first.at.After(since) {
				since = first.at
			}
			where = append(where, last.node)
		}
		if len(where) == 4 {
			return attempt, since, where
		}
	}
	l.t.Fatalf("the job does not run: %s", l.Kubectl("get", "jobset,pods,nodes", "-n", "training", "-o", "wide"))
	return
}

// overlap is how long the last write of any attempt up to old was after the first of the next.
func (l *lab) overlap(old int) time.Duration {
	var last, first time.Time
	for rank := range 4 {
		for _, w := range l.writes(rank) {
			switch {
			case w.attempt <= old && w.at.After(last):
				last = w.at
			case w.attempt > old && (first.IsZero() || w.at.Before(first)):
				first = w.at
			}
		}
	}
	return last.Sub(first)
}

// signal sends one to the rank's process.
func (l *lab) signal(node, sig string) {
	l.Node("enter", node, "sh", "-c", `for p in /proc/[0-9]*; do [ "$(tr '\0' ' ' < $p/cmdline 2>/dev/null)" = "/lab task " ] && kill -`+sig+` ${p#/proc/}; done; true`)
}

// heal brings everything back to five nodes that are used, by what the keeper does by itself and a node's start.
func (l *lab) heal(node string) {
	l.t.Helper()
	l.Node("heal", node)
	l.Node("kill", node)
	l.Node("start", node)
	for end := time.Now().Add(3 * time.Minute); time.Now().Before(end); time.Sleep(300 * time.Millisecond) {
		out := l.Kubectl("get", "nodes", "--no-headers")
		if strings.Count(out, " Ready ") == 5 && !strings.Contains(out, "SchedulingDisabled") {
			return
		}
	}
	l.t.Fatalf("nodes do not come back: %s", l.Kubectl("get", "nodes", "-o", "wide"))
}

// TestLab is fault → decision → action → running again. The decision is made here, at
// once: how long a verdict and its alert take is measured elsewhere.
func TestLab(t *testing.T) {
	l := newLab(t)
	a := l.actuator()
	ctx, stop := context.WithCancel(t.Context())
	var keeping sync.WaitGroup
	keeping.Go(func() { a.Keep(ctx) })
	defer keeping.Wait()
	defer stop()

	runs := 2
	if n, err := strconv.Atoi(os.Getenv("LOCKSTEP_TEST_KUBERNETES_RUNS")); err == nil && n > 0 {
		runs = n
	}
	faults := []struct {
		name   string
		inject func(node string)
		// action is nil where nobody is alerted: what runs on is no fault of the job.
		action func(rank int, node string) *remediation.Action
		moves  bool // off the node
	}{
		{"rank killed", func(n string) { l.signal(n, "KILL") }, func(rank int, _ string) *remediation.Action {
			return &remediation.Action{Kind: remediation.ActionRestart, Rank: rank, Cause: "process_gone"}
		}, false},
		{"rank stopped", func(n string) { l.signal(n, "STOP") }, func(rank int, node string) *remediation.Action {
			return &remediation.Action{Kind: remediation.ActionRestart, Rank: rank, Node: node, Cause: "process_stopped"}
		}, false},
		{"slow node", func(string) {}, func(rank int, node string) *remediation.Action {
			return &remediation.Action{Kind: remediation.ActionExclude, Rank: rank, Node: node, Unit: node, Cause: "computing"}
		}, true},
		{"power loss", func(n string) { l.Node("kill", n) }, func(_ int, node string) *remediation.Action {
			return &remediation.Action{Kind: remediation.ActionRestart, Rank: -1, Node: node, Cause: names.ReasonNodeLost}
		}, true},
		{"node cut off", func(n string) { l.Node("cut", n) }, func(_ int, node string) *remediation.Action {
			return &remediation.Action{Kind: remediation.ActionRestart, Rank: -1, Node: node, Cause: names.ReasonNodeLost}
		}, true},
		{"kubelet dead", func(n string) { l.Node("kubelet", n) }, nil, true},
	}
	only := os.Getenv("LOCKSTEP_TEST_KUBERNETES_FAULT")
	var table []string
	for _, f := range faults {
		if only != "" && only != f.name {
			continue
		}
		var times []time.Duration
		var detail string
		for run := range runs {
			attempt, _, where := l.running(-1)
			rank := run % 4
			node := where[rank]
			began := time.Now()
			f.inject(node)
			if f.action != nil {
				x := f.action(rank, node)
				x.ID, x.Job, x.Incident, x.Attempt, x.Reason = fmt.Sprintf("%s-%d-%d", strings.ReplaceAll(f.name, " ", "-"), attempt, began.Unix()), "train", "lab", &attempt, f.name
				actx, done := context.WithTimeout(ctx, 2*time.Minute)
				answer, err := a.Act(actx, *x)
				done()
				if err != nil {
					t.Fatalf("%s: %v", f.name, err)
				}
				detail = answer.Detail
				again, err := a.Act(ctx, *x)
				if err != nil || !again.At.Equal(answer.At) {
					t.Errorf("%s: repeated: %+v, %v", f.name, again, err)
				}
			}
			now, since, on := l.running(attempt)
			times = append(times, since.Sub(began))
			t.Logf("%s: %s: attempt %d on %v after %v: %s", f.name, node, now, on, times[len(times)-1].Round(10*time.Millisecond), detail)
			if now != attempt+1 {
				t.Errorf("%s: attempt %d led to %d", f.name, attempt, now)
			}
			if slices.Contains(on, node) == f.moves {
				t.Errorf("%s of %s: the job runs on %v", f.name, node, on)
			}
			if f.name == "slow node" {
				l.Kubectl("uncordon", node)
			}
			if f.moves {
				l.heal(node)
			}
			if o := l.overlap(attempt); o > 0 {
				t.Errorf("%s: attempt %d has written for %v beside the next one", f.name, attempt, o)
			}
			if used := l.Kubectl("get", "jobset", "train", "-n", "training", "-o", "jsonpath={.status.restartsCountTowardsMax}"); used == "3" && f.name != "rank killed" {
				t.Errorf("%s: restarts that count: %s of 3", f.name, used)
			}
			if f.name == "rank killed" || f.action == nil { // those that the JobSet has counted itself
				l.Kubectl("patch", "jobset", "train", "-n", "training", "--subresource=status", "--type=merge", "-p", `{"status":{"restartsCountTowardsMax":0}}`)
			}
		}
		slices.Sort(times)
		table = append(table, fmt.Sprintf("%-14s median %5.1f s, worst %5.1f s of %d", f.name, times[len(times)/2].Seconds(), times[len(times)-1].Seconds(), len(times)))
	}
	t.Logf("fault to all ranks writing again:\n%s", strings.Join(table, "\n"))
}
