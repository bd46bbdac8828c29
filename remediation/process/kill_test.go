package process

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/remediation"
)

const killToken = "0123456789abcdef0123456789abcdef"

// TestRemediatorKilled kills a remediator with SIGKILL again and again while
// webhooks come in for several supervised jobs. An Alertmanager of our own
// repeats what was not answered, tells of each incident by two alerts and of
// many things twice. Every incident must lead to exactly one restart.
func TestRemediatorKilled(t *testing.T) {
	jobs, incidents := 3, 12
	if testing.Short() {
		jobs, incidents = 2, 3
	}
	dir, err := os.MkdirTemp("", "lk") // short: socket paths have a limit of 108 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	starts := make([]atomic.Int32, jobs)
	supervised := make([]*Supervisor, jobs)
	for i := range jobs {
		o := options(filepath.Join(dir, fmt.Sprint("j", i)), "sleep")
		o.Job, o.Ranks, o.Grace = fmt.Sprint("j", i), 1, 5*time.Millisecond
		o.OnEvent = func(e Event) {
			if e.Kind == "started" {
				starts[i].Add(1)
			}
		}
		s, err := New(o)
		if err != nil {
			t.Fatal(err)
		}
		supervised[i] = s
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan struct{})
		go func() { defer close(ended); s.Run(ctx) }()
		t.Cleanup(func() { cancel(); <-ended })
	}
	deadline := time.Now().Add(5 * time.Minute)
	within := func(what string) {
		if time.Now().After(deadline) {
			t.Errorf("five minutes were not enough to %s", what)
		}
	}
	var addr atomic.Pointer[string]
	sending, stopKilling := context.WithCancel(context.Background())
	var senders sync.WaitGroup
	for i, s := range supervised {
		senders.Go(func() {
			for k := range incidents {
				for starts[i].Load() < int32(k+1) && time.Now().Before(deadline) {
					time.Sleep(time.Millisecond)
				}
				incident := fmt.Sprintf("j%d-%d", i, k)
				first, second := alert(s, incident, "a", k), alert(s, incident, "b", k)
				post(&addr, deadline, first)
				post(&addr, deadline, first, second)
				if k > 0 {
					post(&addr, deadline, alert(s, fmt.Sprintf("j%d-%d", i, k-1), "late", k-1))
				}
			}
			for starts[i].Load() < int32(incidents+1) && time.Now().Before(deadline) {
				time.Sleep(time.Millisecond)
			}
		})
	}
	go func() { senders.Wait(); stopKilling() }()

	kills := 0
	for sending.Err() == nil && !t.Failed() {
		r := launch(t, dir, &addr)
		select {
		case <-time.After(time.Duration(rand.IntN(30)) * time.Millisecond):
			kills++
		case <-sending.Done():
		}
		r.kill()
		within("have every incident acted on")
	}
	stopKilling()
	senders.Wait()

	// What is still open is repeated by one last, undisturbed remediator.
	r := launch(t, dir, &addr)
	defer r.kill()
	var entries []remediation.Entry
	for open := true; open && !t.Failed(); within("close every entry") {
		entries, open = nil, false
		if err := get(&addr, "/api/v1/actions", &entries); err != nil {
			open = true
		}
		for _, e := range entries {
			open = open || e.State != remediation.Closed
		}
		time.Sleep(5 * time.Millisecond)
	}
	done := map[string]int{}
	for _, e := range entries {
		switch e.Outcome {
		case remediation.OutcomeDone:
			done[e.Alert.Incident]++
		case remediation.OutcomeSuperseded:
		default:
			t.Errorf("entry %d of incident %s: %s: %s", e.Seq, e.Alert.Incident, e.Outcome, e.Detail)
		}
	}
	for i := range jobs {
		if n := starts[i].Load() - 1; n != int32(incidents) {
			t.Errorf("job %d was restarted %d times for %d incidents", i, n, incidents)
		}
		for k := range incidents {
			if n := done[fmt.Sprintf("j%d-%d", i, k)]; n != 1 {
				t.Errorf("incident %d of job %d: %d entries say that they did it", k, i, n)
			}
		}
	}
	t.Logf("%d incidents over %d kills", jobs*incidents, kills)
}

func alert(s *Supervisor, incident, name string, attempt int) map[string]any {
	labels := map[string]string{
		"alertname": name, names.LabelJob: s.o.Job, names.LabelIncident: incident, names.LabelClass: names.ClassCommunicationHang,
		names.LabelLevel: names.LevelConfirmed, names.LabelCulprit: "rank 0", names.LabelRank: "0",
	}
	if attempt%2 == 0 { // without it, only the action's id keeps a repeat from doing harm
		labels[names.LabelAttempt] = fmt.Sprint(attempt)
	}
	return map[string]any{"status": "firing", "startsAt": time.Now().Format(time.RFC3339Nano), "fingerprint": incident + name, "labels": labels}
}

// post sends a webhook until it is answered with success, as Alertmanager does.
func post(addr *atomic.Pointer[string], deadline time.Time, alerts ...map[string]any) {
	body, err := json.Marshal(map[string]any{"version": "4", "alerts": alerts})
	if err != nil {
		panic(err)
	}
	for time.Now().Before(deadline) {
		if call(addr, http.MethodPost, "/webhook", body, nil) == nil {
			return
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func get(addr *atomic.Pointer[string], path string, v any) error {
	return call(addr, http.MethodGet, path, nil, v)
}

func call(addr *atomic.Pointer[string], method, path string, body []byte, v any) error {
	at := addr.Load()
	if at == nil {
		return net.ErrClosed
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, "http://"+*at+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+killToken)
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s", resp.Status)
	}
	if v == nil {
		return nil
	}
	return json.NewDecoder(resp.Body).Decode(v)
}

// launched is a remediator process.
type launched struct{ cmd *exec.Cmd }

func launch(t *testing.T, dir string, addr *atomic.Pointer[string]) *launched {
	t.Helper()
	cmd := exec.Command(os.Args[0], "remediate", dir)
	cmd.Stderr = os.Stderr
	if _, err := cmd.StdinPipe(); err != nil { // it ends when this process does
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 64)
	n, err := out.Read(b)
	if err != nil {
		t.Fatalf("remediator did not start: %v", err)
	}
	at := strings.TrimSpace(string(b[:n]))
	addr.Store(&at)
	return &launched{cmd}
}

func (l *launched) kill() {
	l.cmd.Process.Kill()
	l.cmd.Wait()
}

// remediate is the remediator process: what cmd/lockstep makes of the package, with fewer flags.
func remediate(dir string) int {
	cfg := remediation.DefaultConfig()
	no := false
	cfg.DryRun, cfg.Breaker.Job, cfg.Breaker.Total = &no, 1000, 1000
	r, err := remediation.New(remediation.Options{
		Config: cfg, Journal: filepath.Join(dir, "journal.db"), Token: []byte(killToken), BelieveAlerts: true,
		Actuator: &Actuator{Socket: func(job string) (string, bool) { return filepath.Join(dir, job, "control.sock"), true }},
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println(l.Addr())
	go http.Serve(l, r.Handler())
	go r.Run(context.Background())
	_, _ = io.Copy(io.Discard, os.Stdin)
	return 1
}
