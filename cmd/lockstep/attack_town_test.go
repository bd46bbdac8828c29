package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/collector/wire/pki"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	pages "github.com/lockstep-ccl/lockstep/exporters/web"
	free "github.com/lockstep-ccl/lockstep/internal/ports"
	"github.com/lockstep-ccl/lockstep/remediation/process"
)

// town is a job with everything around it, each part a process with its default flags:
// what the suite of attackers attacks.
type town struct {
	t                    *testing.T // the whole test: what a part of it starts lives on
	dir                  string
	ca                   *pki.Authority
	grpc, web, rem       string // addresses of the master's two listeners, and of the remediator
	agents               [2]string
	token, operatorToken string
	control              *process.Client
	parts                map[string]*part
}

type part struct {
	*exec.Cmd
	args []string
	log  string
	done chan struct{}
}

const (
	townDomain = "town.example"
	townJob    = "victim"
	townRanks  = 4
)

// freeAddrs are addresses that nobody else is given while the test runs.
func freeAddrs(t *testing.T, n int) []string {
	t.Helper()
	held, err := free.Hold("127.0.0.1", n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = held.Close() })
	return held.Addrs
}

// newTown starts all of it, and waits until the job is healthy.
func newTown(t *testing.T) *town {
	t.Helper()
	addrs := freeAddrs(t, 5)
	w := &town{
		t: t, dir: t.TempDir(), grpc: addrs[0], web: addrs[1], rem: addrs[2], agents: [2]string(addrs[3:]),
		token: "town's Alertmanager: 0123456789", operatorToken: "town's operator: 0123456789", parts: map[string]*part{},
	}
	if err := os.Chmod(w.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	var err error
	if w.ca, err = pki.Init(w.path("pki")); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"token": w.token, "operator-token": w.operatorToken,
		"r.yaml": "dry_run: false\npolicies:\n- {name: all, action: restart_excluding}\n",
	} {
		if err := os.WriteFile(w.path(name), []byte(text+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	w.run(t, "master", append([]string{"master", "--job", townJob, "--listen", w.grpc, "--web.listen-address", w.web, "--state-dir", w.path("state")},
		w.flags(t, w.ca, "master", wire.Identity{Role: wire.RoleMaster, Jobs: []string{townJob}}, "127.0.0.1")...)...)
	w.run(t, "remediator", append([]string{"remediator", "--config.file", w.path("r.yaml"), "--journal", w.path("journal/r.db"), "--token-file", w.path("token"),
		"--operator-token-file", w.path("operator-token"), "--master", w.grpc, "--web.listen-address", w.rem, "--supervisor", townJob + "=" + w.path("job/control.sock")},
		w.flags(t, w.ca, "remediator", wire.Identity{Role: wire.RoleRemediator})...)...)
	for i, addr := range w.agents {
		node := fmt.Sprint("node", i)
		w.run(t, node, append([]string{"agent", "--node", node, "--runtime-dir", w.path("rt", node), "--master", w.grpc, "--web.listen-address", addr},
			w.flags(t, w.ca, node, wire.Identity{Role: wire.RoleAgent, Node: node})...)...)
	}
	w.run(t, "job", "run", "--job", townJob, "--ranks", fmt.Sprint(townRanks), "--spares", "1", "--nodes", "2", "--dir", w.path("job"), "--runtime-dir", w.path("rt"),
		"--control", "--hold", "10m", "--grace", "500ms", "--quiet", "--",
		"lockstep", "train", "--dp", "2", "--tp", "1", "--pp", "2", "--dir", w.path("train"), "--steps", "0", "--checkpoint", "1000", "--pace", "20ms")
	w.control = process.NewClient(w.path("job/control.sock"))
	w.healthy(t)
	return w
}

func (w *town) path(parts ...string) string {
	return filepath.Join(append([]string{w.dir}, parts...)...)
}

// files issues a certificate.
func files(t *testing.T, ca *pki.Authority, name string, id wire.Identity, hosts ...string) wire.TLS {
	t.Helper()
	if id.Domain == "" {
		id.Domain = townDomain
	}
	f, err := ca.Issue(name, id, hosts, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func (w *town) flags(t *testing.T, ca *pki.Authority, name string, id wire.Identity, hosts ...string) []string {
	f := files(t, ca, name, id, hosts...)
	return []string{"--tls.cert", f.CertFile, "--tls.key", f.KeyFile, "--tls.ca", f.CAFile}
}

// run starts a part, to be ended at the latest with the test.
func (w *town) run(t *testing.T, name string, args ...string) *part {
	t.Helper()
	p := &part{args: args, log: w.path(name + ".log"), done: make(chan struct{})}
	f, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	p.Cmd = exec.Command("lockstep", args...)
	p.Stdout, p.Stderr = f, f
	p.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	w.parts[name] = p
	go func() { _ = p.Wait(); close(p.done) }()
	w.t.Cleanup(func() { p.end(w.t) })
	return p
}

// end ends a part, and what it started.
func (p *part) end(t *testing.T) {
	_ = p.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(20 * time.Second):
		_ = syscall.Kill(-p.Process.Pid, syscall.SIGKILL)
		<-p.done
	}
	if t.Failed() && testing.Verbose() {
		b, _ := os.ReadFile(p.log)
		t.Logf("%s:\n%s", filepath.Base(p.log), b[max(0, len(b)-4000):])
	}
}

// again kills a part and starts it with the same command.
func (w *town) again(t *testing.T, name string, between func()) {
	t.Helper()
	p := w.parts[name]
	_ = p.Process.Kill()
	<-p.done
	if between != nil {
		between()
	}
	w.run(t, name, p.args...)
}

func (w *town) get(url, token string, v any) error {
	req, err := http.NewRequest(http.MethodGet, "http://"+url, nil)
	if err != nil {
		return err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	c := http.Client{Timeout: bound}
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
		return fmt.Errorf("GET %s: %s: %s", url, resp.Status, b)
	}
	if v == nil {
		return nil
	}
	return json.NewDecoder(resp.Body).Decode(v)
}

// eventually is until for tests that are no scripts; the bound is far beyond what anything takes.
func eventually(t *testing.T, what string, ok func() error) {
	t.Helper()
	var err error
	for begin := time.Now(); time.Since(begin) < 2*bound; time.Sleep(30 * time.Millisecond) {
		if err = ok(); err == nil {
			return
		}
	}
	t.Fatalf("not %s within %v: %v", what, 2*bound, err)
}

func (w *town) status() (s pages.Status, err error) {
	return s, w.get(w.web+"/api/v1/status", "", &s)
}

// healthy waits until the job makes steps, with all ranks seen and no incident.
func (w *town) healthy(t *testing.T) {
	t.Helper()
	first := uint64(0)
	eventually(t, "healthy", func() error {
		s, err := w.status()
		if err != nil {
			return err
		}
		if s.Health != "healthy" && (len(s.Open) == 0 || hung(&s)) || s.Unseen > 0 || s.WorldSize != townRanks || s.Step == 0 {
			return fmt.Errorf("%s at step %d of attempt %d, %d of %d ranks unseen, open %+v, agents %+v", s.Health, s.Step, s.Attempt, s.Unseen, s.WorldSize, s.Open, s.Agents)
		}
		if first == 0 {
			first = s.Step
		}
		if s.Step < first+3 {
			return fmt.Errorf("step %d", s.Step)
		}
		return nil
	})
}

// hung reports whether a hang is confirmed. That a rank is slow is no matter here: on a
// machine that does ten other things one is, for a while.
func hung(s *pages.Status) bool {
	return slices.ContainsFunc(s.Open, func(in pages.Incident) bool {
		return in.Level == names.LevelConfirmed && !strings.HasSuffix(in.Class, "_slow")
	})
}

// metric sums a metric's series of a process.
func metric(t *testing.T, addr string, m *names.Metric, labels ...string) (sum float64) {
	t.Helper()
	resp, err := http.Get("http://" + addr + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range families[m.Name].GetMetric() {
		has := 0
		for _, l := range s.GetLabel() {
			for _, want := range labels {
				if l.GetValue() == want {
					has++
				}
			}
		}
		if has == len(labels) {
			sum += s.GetGauge().GetValue() + s.GetCounter().GetValue()
		}
	}
	return sum
}

// watch looks at what honest clients get while attacks go on.
type watch struct {
	w    *town
	stop chan struct{}
	done sync.WaitGroup

	mu     sync.Mutex
	longer time.Duration // the longest time that an honest question took
	bad    []string
	steps  uint64
}

func (w *town) watch() *watch {
	c := &watch{w: w, stop: make(chan struct{})}
	c.done.Go(func() {
		for {
			select {
			case <-c.stop:
				return
			case <-time.After(50 * time.Millisecond):
			}
			begin := time.Now()
			s, err := w.status()
			c.mu.Lock()
			c.longer = max(c.longer, time.Since(begin))
			switch {
			case err != nil:
				c.bad = append(c.bad, err.Error())
			case s.Attempt != 0 || s.WorldSize != townRanks:
				c.bad = append(c.bad, fmt.Sprintf("attempt %d of %d ranks", s.Attempt, s.WorldSize))
			case hung(&s):
				c.bad = append(c.bad, fmt.Sprintf("%+v", s.Open[0]))
			default:
				c.steps = max(c.steps, s.Step)
			}
			c.mu.Unlock()
		}
	})
	return c
}

// unharmed ends the watch: the job has made steps all the while, nothing was restarted,
// excluded, blinded or exhausted.
func (c *watch) unharmed(t *testing.T) {
	t.Helper()
	c.w.healthy(t)
	close(c.stop)
	c.done.Wait()
	for i, b := range c.bad {
		if i < 5 {
			t.Errorf("an honest client saw: %s", b)
		}
	}
	s, err := c.w.control.Status(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if s.Attempt != 0 || len(s.Excluded) != 0 || s.State != "running" {
		t.Errorf("the job: %+v", s)
	}
	var actions []struct{ Outcome string }
	if err := c.w.get(c.w.rem+"/api/v1/actions", c.w.token, &actions); err != nil {
		t.Error(err)
	}
	for _, a := range actions {
		if a.Outcome == "done" {
			t.Errorf("acted: %+v", actions)
		}
	}
	// A second is what is promised; this bound is for machines that do ten other things.
	if c.longer > bound/2 {
		t.Errorf("an honest client waited for %v", c.longer)
	}
	for _, name := range []string{"master", "remediator", "node0", "node1"} {
		if mib := resident(c.w.parts[name].Process.Pid) >> 20; mib > 512 {
			t.Errorf("%s uses %d MiB", name, mib)
		}
	}
	t.Logf("the longest that an honest client waited: %v", c.longer.Round(time.Millisecond))
}

func resident(pid int) int {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	var size, pages int
	_, _ = fmt.Sscan(strings.TrimSpace(string(b)), &size, &pages)
	return pages * os.Getpagesize()
}
