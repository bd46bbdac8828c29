package local_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ccl/lockstep/deploy/local"
)

const orphanEnv = "LOCKSTEP_TEST_ORPHAN_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(orphanEnv); dir != "" {
		beOrphaned(dir)
	}
	goleak.VerifyTestMain(m)
}

// notification is what the tests read of Alertmanager's webhook.
type notification struct {
	Status string
	Alerts []struct {
		Status string
		Labels map[string]string
	}
}

const rules = `groups:
- name: test
  rules:
  - alert: TooHot
    expr: temperature > 30
    labels: {severity: critical}
  - alert: ForPeople
    expr: sum(temperature) > 30
    labels: {severity: critical}
`

// world is a target with one gauge and a webhook, both in this process.
type world struct {
	cfg   local.Config
	temp  chan float64
	hooks chan notification
}

func newWorld(t *testing.T) *world { return newWorldBehind(t, nil) }

// newWorldBehind is a world whose target wants the password of web, and its webhook the certificate.
func newWorldBehind(t *testing.T, web *local.Web) *world {
	w := &world{temp: make(chan float64, 1), hooks: make(chan notification, 100)}
	w.temp <- 20
	mux := http.NewServeMux()
	mux.HandleFunc("/metrics", func(rw http.ResponseWriter, r *http.Request) {
		if user, password, _ := r.BasicAuth(); web != nil && (user != web.User || password != passwordOf(t, web)) {
			t.Errorf("scraped by %q without the password", user)
			http.Error(rw, "no", http.StatusUnauthorized)
			return
		}
		v := <-w.temp
		w.temp <- v
		fmt.Fprintf(rw, "# TYPE temperature gauge\ntemperature{training_job=\"j\",incident=\"j-1\"} %g\n", v)
	})
	mux.HandleFunc("/hook", func(rw http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer s3cret" {
			t.Errorf("webhook came with Authorization %q", r.Header.Get("Authorization"))
		}
		var n notification
		if err := json.NewDecoder(r.Body).Decode(&n); err != nil {
			t.Error(err)
		}
		for _, a := range n.Alerts {
			if a.Labels["alertname"] != "TooHot" {
				t.Errorf("webhook got an alert without an incident: %v", a.Labels)
			}
		}
		select {
		case w.hooks <- n:
		default:
		}
	})
	srv := httptest.NewUnstartedServer(mux)
	if web == nil {
		srv.Start()
	} else {
		srv.TLS = mutual(t, web)
		srv.StartTLS()
	}
	t.Cleanup(srv.Close)
	dir := t.TempDir()
	for name, data := range map[string]string{"test.rules.yaml": rules, "token": "s3cret"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	w.cfg = local.Config{
		Dir:                    dir,
		Targets:                []local.Target{{Job: "test", Addresses: []string{srv.Listener.Addr().String()}}},
		RuleFiles:              []string{filepath.Join(dir, "test.rules.yaml")},
		WebhookURL:             srv.URL + "/hook",
		WebhookCredentialsFile: filepath.Join(dir, "token"),
		Interval:               100 * time.Millisecond,
		Progress:               t.Output(),
		Web:                    web,
	}
	return w
}

func (w *world) set(v float64) { <-w.temp; w.temp <- v }

func (w *world) await(t *testing.T, status string) {
	t.Helper()
	timeout := time.After(2 * time.Minute)
	for {
		select {
		case n := <-w.hooks:
			if n.Status == status {
				if n.Alerts[0].Labels["incident"] != "j-1" {
					t.Errorf("labels of the alert: %v", n.Alerts[0].Labels)
				}
				return
			}
		case <-timeout:
			t.Fatalf("no %s notification", status)
		}
	}
}

func start(t *testing.T, cfg local.Config) *local.Stack {
	t.Helper()
	s, err := local.Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

// An alert's way, and the same after each server was killed in the middle of it; all of it behind
// TLS, passwords and client certificates.
func TestStack(t *testing.T) {
	web := closedWeb(t)
	w := newWorldBehind(t, web)
	s := start(t, w.cfg)
	for _, url := range []string{s.PrometheusURL, s.AlertmanagerURL} {
		askPages(t, web, url+"/-/ready")
	}
	w.set(40)
	w.await(t, "firing")
	w.set(20)
	w.await(t, "resolved")

	for _, name := range []string{local.Prometheus, local.Alertmanager} {
		if err := s.Kill(name); err != nil {
			t.Fatal(err)
		}
		w.set(40)
		if err := s.Restart(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		w.await(t, "firing")
		w.set(20)
		w.await(t, "resolved")
	}

	select {
	case err := <-s.Failed():
		t.Errorf("Failed delivered %v for servers that we killed ourselves", err)
	default:
	}
	if err := s.Kill("grafana"); err == nil {
		t.Error("Kill of an unknown server succeeded")
	}

	s.Stop()
	if !refuses(s.PrometheusURL) || !refuses(s.AlertmanagerURL) {
		t.Error("a server still listens after Stop")
	}
	if err := s.Restart(t.Context(), local.Prometheus); err == nil {
		t.Error("Restart after Stop succeeded")
	}
}

// Configurations that hold a path to a secret, and logs, are for their owner only.
func TestPermissions(t *testing.T) {
	w := newWorld(t)
	w.cfg.Dir = filepath.Join(w.cfg.Dir, "stack")
	s := start(t, w.cfg)
	for path, want := range map[string]os.FileMode{
		w.cfg.Dir: 0o700, filepath.Join(w.cfg.Dir, "alertmanager.yml"): 0o600,
		filepath.Join(w.cfg.Dir, "prometheus.yml"): 0o600, s.LogFile(local.Prometheus): 0o600,
	} {
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if got := info.Mode().Perm(); got != want {
			t.Errorf("%s has mode %o, want %o", path, got, want)
		}
	}
}

func TestStartErrors(t *testing.T) {
	w := newWorld(t)

	t.Run("bad rules", func(t *testing.T) {
		cfg := w.cfg
		cfg.Dir = t.TempDir()
		cfg.RuleFiles = []string{filepath.Join(cfg.Dir, "bad.yaml")}
		if err := os.WriteFile(cfg.RuleFiles[0], []byte("groups: [{name: g, rules: [{alert: A, expr: 'sum('}]}]"), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := local.Start(t.Context(), cfg)
		if !errors.Is(err, local.ErrExited) || !strings.Contains(err.Error(), "bad.yaml") {
			t.Errorf("err = %v, want ErrExited and the log's word on bad.yaml", err)
		}
	})
	t.Run("port taken", func(t *testing.T) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		cfg := w.cfg
		cfg.Dir, cfg.PrometheusPort = t.TempDir(), l.Addr().(*net.TCPAddr).Port
		if _, err := local.Start(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "address already in use") {
			t.Errorf("err = %v, want address already in use", err)
		}
	})
	t.Run("not ready in time", func(t *testing.T) {
		dir := t.TempDir()
		for _, name := range local.Tools() {
			if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\necho still loading\nsleep 600\n"), 0o700); err != nil {
				t.Fatal(err)
			}
		}
		t.Setenv(local.ToolsDirEnv, dir)
		// A busy machine may not let it say a word in so short a time.
		for limit := 500 * time.Millisecond; ; limit *= 4 {
			cfg := w.cfg
			cfg.Dir, cfg.ReadyTimeout = t.TempDir(), limit
			_, err := local.Start(t.Context(), cfg)
			if err == nil || !strings.Contains(err.Error(), "not ready after "+limit.String()) {
				t.Fatalf("err = %v, want the bound", err)
			}
			if strings.Contains(err.Error(), "still loading") {
				break
			}
			if limit > time.Minute {
				t.Fatalf("err = %v, want the log", err)
			}
		}
	})
	t.Run("no dir", func(t *testing.T) {
		if _, err := local.Start(t.Context(), local.Config{}); err == nil {
			t.Error("Start without Dir succeeded")
		}
	})
}

// A server that dies by itself is reported with its last words.
func TestFailed(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	for _, name := range []string{local.Prometheus, local.Alertmanager} {
		real, err := local.Find(t.Context(), name, nil)
		if err != nil {
			t.Fatal(err)
		}
		end := "wait"
		if name == local.Alertmanager {
			end = "until [ -e " + dir + "/die ]; do sleep 0.05; done; kill $!; wait; echo out of memory; exit 3"
		}
		body := fmt.Sprintf("#!/bin/sh\n%s \"$@\" &\n%s\n", real, end)
		if err := os.WriteFile(filepath.Join(dir, name), []byte(body), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv(local.ToolsDirEnv, dir)
	s := start(t, w.cfg)
	if err := os.WriteFile(filepath.Join(dir, "die"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-s.Failed():
		if !errors.Is(err, local.ErrExited) || !strings.Contains(err.Error(), "alertmanager") || !strings.Contains(err.Error(), "exit status 3") || !strings.Contains(err.Error(), "out of memory") {
			t.Errorf("err = %v, want name, status and log", err)
		}
	case <-time.After(2 * time.Minute):
		t.Fatal("nothing reported")
	}
}

// Nothing stays behind when the process that started the stack is killed.
func TestOrphans(t *testing.T) {
	w := newWorld(t)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), orphanEnv+"="+w.cfg.Dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var prom, am string
	if _, err := fmt.Fscan(out, &prom, &am); err != nil {
		t.Fatal(err)
	}
	if refuses(prom) || refuses(am) {
		t.Fatal("the stack does not run")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, out)
	_ = cmd.Wait()
	for deadline := time.Now().Add(time.Minute); !refuses(prom) || !refuses(am); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("a server outlived the process that started it")
		}
	}
}

func beOrphaned(dir string) {
	s, err := local.Start(context.Background(), local.Config{Dir: dir})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(s.PrometheusURL, s.AlertmanagerURL)
	time.Sleep(time.Minute)
	os.Exit(1)
}

func refuses(url string) bool {
	c, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err == nil {
		c.Close()
	}
	return err != nil
}
