package kubelab

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/deploy/local"
	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// TestChart is `make test-chart-kubernetes`: both charts on six real kubelets, real ranks on four of
// a pool of five, a real Prometheus and Alertmanager; faults from outside, and what comes of each:
// verdict, alert, action, running again. It ends with the charts uninstalled beside a job that goes on.
//
// n1 has the master and the remediator. There are no DNS and no services: hosts' network.
func TestChart(t *testing.T) {
	c := install(t, 5*time.Second)
	runs, only := number("RUNS", 1), strings.Fields(os.Getenv("FAULTS"))
	var table []string
	for _, f := range faults {
		if len(only) > 0 && !slices.Contains(only, f.name) {
			continue
		}
		var all []outcome
		for run := range runs {
			o := c.play(f, run%4, nil)
			if len(o.wrong) > 0 {
				t.Errorf("%s: %v\n%s\nthe master's state: %s", f.name, o, c.state(), c.keep(run+1))
			}
			all = append(all, o)
		}
		table = append(table, summary(f.name, all))
	}
	t.Logf("seconds from the fault on, median and worst:\n%-18s %4s %5s %12s %12s %12s %12s %10s\n%s", "fault", "runs", "right", "verdict", "alert", "action", "running", "old ended", strings.Join(table, "\n"))
	c.uninstall()
	c.sameLosses()
}

// TestChartKills is the same with KILLS faults at random, in the middle of each of which one part is
// killed (SIGKILL) at random: remediator, master, an agent, the API server. Nothing is done twice,
// nothing lost, and no node taken out with which nothing is wrong.
func TestChartKills(t *testing.T) {
	kills := number("KILLS", 4)
	c := install(t, 20*time.Second) // a master that is killed twice is kept away for ten seconds by its kubelet
	seed := uint64(number("SEED", int(time.Now().Unix())))
	t.Logf("SEED=%d", seed)
	random := rand.New(rand.NewPCG(seed, 17))
	parts := []string{"remediator", "master", "agent", "apiserver"}
	var times []time.Duration
	for n := range kills {
		f := faults[random.IntN(len(faults))]
		part, after, away := parts[n%len(parts)], time.Duration(random.Int64N(int64(20*time.Second))), time.Duration(random.Int64N(int64(8*time.Second)))
		if f.unplugged && part == "agent" { // it may be the one that stands still
			part = "remediator"
		}
		agent := fmt.Sprintf("n%d", 1+random.IntN(6))
		o := c.play(f, random.IntN(world), func() {
			time.Sleep(after)
			c.kill(part, agent, away)
		})
		t.Logf("%d: %s killed after %.1f s beside %s", n+1, part, after.Seconds(), f.name)
		if len(o.wrong) > 0 {
			t.Errorf("%d: %s, %s killed after %.1f s: %v\n%s\nthe master's state: %s", n+1, f.name, part, after.Seconds(), o, c.state(), c.keep(n+1))
		}
		times = append(times, o.running)
	}
	slices.Sort(times)
	t.Logf("from fault to running again: median %.1f, worst %.1f s of %d", times[len(times)/2].Seconds(), times[len(times)-1].Seconds(), len(times))
	c.uninstall()
	c.sameLosses()
}

func number(name string, or int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil && n > 0 {
		return n
	}
	return or
}

const (
	world  = 4
	settle = 10 * time.Second // of running undisturbed before a fault: slowness needs some history
	within = 3 * time.Minute
)

// chart is what is installed.
type chart struct {
	*Lab
	t                     *testing.T
	helm, lockstep, image string
	stack                 *local.Stack
	mu                    sync.Mutex
	restarts              int // of the JobSet
	restarted             time.Time
	client                http.Client
	losses                string
	lease                 time.Duration // for which a rank lives without a word from its master
}

func (c *chart) wait(what string, until func() bool) {
	c.t.Helper()
	for end := time.Now().Add(within); !until(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			c.t.Fatalf("after %v still not: %s\n%s", within, what, c.state())
		}
	}
}

// state is what there is, for whoever looks for a reason.
func (c *chart) state() string {
	var all []string
	for _, args := range [][]string{
		{"get", "pods,jobset,nodes", "-A", "-o", "wide"},
		{"get", "nodes", "-o", `jsonpath={range .items[*]}{.metadata.name} {.spec.taints} {.metadata.annotations.lockstep\.dev/suspect} {.status.conditions[?(@.type=="Ready")]}{"\n"}{end}`},
		{"get", "leases", "-n", "kube-node-lease", "-o", `jsonpath={range .items[*]}{.metadata.name} {.spec.renewTime}{"\n"}{end}`},
		{"get", "events", "-n", "training", "--sort-by=.lastTimestamp", "--no-headers"},
		{"logs", "-n", "lockstep", "deployment/lockstep-remediator", "--tail", "40"},
		{"logs", "-n", "training", "deployment/lockstep-master-train", "--tail", "40"},
	} {
		out, err := Try("kubectl", args...)
		if err != nil {
			out += err.Error()
		}
		if lines := strings.Split(out, "\n"); args[1] == "events" && len(lines) > 40 {
			out = strings.Join(lines[len(lines)-40:], "\n")
		}
		all = append(all, out)
	}
	return strings.Join(all, "\n")
}

// keep copies what the master has recorded to where it outlives the lab.
func (c *chart) keep(n int) string {
	to := filepath.Join(c.dir, "../../dist/lab", fmt.Sprintf("wrong-%d-%d", time.Now().Unix(), n))
	if err := os.CopyFS(to, os.DirFS(filepath.Join(c.Shared, "lockstep-master-train", "state"))); err != nil {
		return err.Error()
	}
	return to
}

var label = regexp.MustCompile(`([a-z_]+)="([^"]*)"`)

// verdict is the confirmed incident of an attempt that the master shows.
func (c *chart) verdict(attempt int) map[string]string {
	resp, err := c.client.Get("http://" + c.Address("n1") + ":9402/metrics")
	if err != nil {
		return nil
	}
	defer resp.Body.Close()
	for s := bufio.NewScanner(io.LimitReader(resp.Body, 16<<20)); s.Scan(); {
		if !strings.HasPrefix(s.Text(), names.IncidentInfo.Name+"{") {
			continue
		}
		l := map[string]string{}
		for _, m := range label.FindAllStringSubmatch(s.Text(), -1) {
			l[m[1]] = m[2]
		}
		if l[names.LabelLevel] == "confirmed" && l[names.LabelAttempt] == strconv.Itoa(attempt) {
			return l
		}
	}
	return nil
}

// alerted reports whether Alertmanager has an alert of an incident.
func (c *chart) alerted(incident string) bool {
	resp, err := c.client.Get(c.stack.AlertmanagerURL + "/api/v2/alerts?filter=" + names.LabelIncident + "%3D%22" + incident + "%22")
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	var all []json.RawMessage
	return json.NewDecoder(io.LimitReader(resp.Body, 16<<20)).Decode(&all) == nil && len(all) > 0
}

// agents are those that are ready.
func (c *chart) agents() (n int) {
	_, _ = fmt.Sscan(c.Kubectl("-n", "lockstep", "get", "daemonset", "lockstep-agent", "-o", "jsonpath={.status.numberReady}"), &n)
	return n
}

// sameLosses ends the job, and trains as long without faults.
func (c *chart) sameLosses() {
	c.Kubectl("-n", "training", "delete", "jobset", "train", "--cascade=foreground", "--timeout=60s")
	got, err := os.ReadFile(c.losses)
	if err != nil {
		c.t.Fatal(err)
	}
	dir := c.t.TempDir()
	steps := bytes.Count(got, []byte("\n"))
	ctx, cancel := context.WithTimeout(c.t.Context(), 10*time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, c.lockstep, "run", "--job", "reference", "--ranks", strconv.Itoa(world), "--dir", filepath.Join(dir, "run"), "--runtime-dir", filepath.Join(dir, "rt"), "--quiet", "--",
		c.lockstep, "train", "--dp", strconv.Itoa(world), "--dir", dir, "--steps", strconv.Itoa(steps)).CombinedOutput()
	if err != nil {
		c.t.Fatalf("the run without faults: %v: %s", err, out)
	}
	want, err := os.ReadFile(filepath.Join(dir, "loss.txt"))
	if err != nil {
		c.t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		a, b := strings.Split(string(got), "\n"), strings.Split(string(want), "\n")
		for i := range min(len(a), len(b)) {
			if a[i] != b[i] {
				c.t.Fatalf("losses differ from an undisturbed run's: %q and %q", a[i], b[i])
			}
		}
		c.t.Fatalf("%d losses, and %d of an undisturbed run", len(a), len(b))
	}
	c.t.Logf("the losses of all %d steps are those of an undisturbed run, bit for bit", steps)
}
