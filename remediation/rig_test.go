package remediation

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

var token = []byte("0123456789abcdef0123456789abcdef")

var operatorToken = []byte("fedcba9876543210fedcba9876543210")

// fake is an actuator that remembers action ids as a real one must, and can fail or hang.
type fake struct {
	mu      sync.Mutex
	acts    []Action
	done    map[string]time.Time // by action id: when it was really carried out
	times   int                  // really carried out, with repeats answered from done
	fail    int                  // so many calls fail first
	err     error
	over    bool          // the attempt that actions are about is over
	silent  int           // so many questions about the inventory go unanswered
	knows   string        // the only job that it knows, "" for any
	masters Masters       // asked before acting; nil: alerts are believed
	made    time.Time     // Inventory's
	block   chan struct{} // Act waits for it after carrying out, before answering
}

func (f *fake) Name() string { return "fake" }

func (f *fake) Inventory(_ context.Context, job string) (Inventory, error) {
	if f.knows != "" && job != f.knows {
		return Inventory{}, ErrGone
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.silent > 0 {
		f.silent--
		return Inventory{}, []error{ErrAway, context.DeadlineExceeded, errors.New("forbidden")}[f.silent%3]
	}
	return Inventory{Units: 8, Made: f.made, Unit: func(rank int) string { return fmt.Sprint("slot", rank) }}, nil
}

func (f *fake) Act(ctx context.Context, a Action) (Answer, error) {
	if f.knows != "" && a.Job != f.knows {
		return Answer{}, ErrGone
	}
	f.mu.Lock()
	f.acts = append(f.acts, a)
	if f.fail > 0 {
		f.fail--
		f.mu.Unlock()
		return Answer{}, cmpErr(f.err)
	}
	if f.over {
		f.mu.Unlock()
		return Answer{Detail: "nothing done"}, nil
	}
	if f.done == nil {
		f.done = map[string]time.Time{}
	}
	if f.done[a.ID].IsZero() {
		f.done[a.ID] = time.Now()
		f.times++
	}
	at := f.done[a.ID]
	block := f.block
	f.mu.Unlock()
	if block != nil {
		select {
		case <-block:
		case <-ctx.Done():
			return Answer{}, ctx.Err()
		}
	}
	return Answer{At: at, Detail: "restarted"}, nil
}

func cmpErr(err error) error {
	if err == nil {
		return errors.New("actuator is down")
	}
	return err
}

func (f *fake) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.times
}

// rig is a running remediator.
type rig struct {
	t      *testing.T
	r      *Remediator
	act    *fake
	reg    *prometheus.Registry
	events chan Entry
	stop   func()
}

func live() Config {
	c := DefaultConfig()
	no := false
	c.DryRun = &no
	return c
}

func start(t *testing.T, journal string, cfg Config, act *fake) *rig {
	t.Helper()
	return startWith(t, journal, cfg, act, func(*Options) {})
}

func startWith(t *testing.T, journal string, cfg Config, act *fake, change func(*Options)) *rig {
	t.Helper()
	if journal == "" {
		journal = filepath.Join(t.TempDir(), "j.db")
	}
	g := &rig{t: t, act: act, reg: prometheus.NewRegistry(), events: make(chan Entry, 256)}
	o := Options{Config: cfg, Journal: journal, Token: token, OperatorToken: operatorToken, Actuator: act, Masters: act.masters, BelieveAlerts: act.masters == nil, Registry: g.reg, OnEvent: func(e Entry) { g.events <- e }}
	change(&o)
	r, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	g.r = r
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	var once sync.Once
	g.stop = func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				t.Errorf("Run: %v", err)
			}
		})
	}
	t.Cleanup(g.stop)
	return g
}

// closed waits until one more entry is closed.
func (g *rig) closed() Entry {
	g.t.Helper()
	for {
		select {
		case e := <-g.events:
			if e.State == Closed {
				return e
			}
		case <-time.After(30 * time.Second):
			g.t.Fatal("no entry was closed within 30 s")
		}
	}
}

func (g *rig) post(body []byte, auth string) int {
	req := httptest.NewRequest(http.MethodPost, "/webhook", bytes.NewReader(body))
	req.Header.Set("Authorization", auth)
	w := httptest.NewRecorder()
	g.r.Handler().ServeHTTP(w, req)
	return w.Code
}

func (g *rig) send(alerts ...map[string]any) int {
	return g.post(webhook(alerts...), "Bearer "+string(token))
}

func (g *rig) webhooks(result string) float64 {
	return testutil.ToFloat64(g.r.m.webhooks.WithLabelValues(result))
}

// gauge waits until the value for scope is want; an absent one reads as 0.
func (g *rig) gauge(vec *prometheus.GaugeVec, scope string, want int) {
	g.t.Helper()
	var got float64
	for range 3000 {
		if got = testutil.ToFloat64(vec.WithLabelValues(scope)); got == float64(want) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	g.t.Errorf("%s: %v, want %d", scope, got, want)
}

func webhook(alerts ...map[string]any) []byte {
	b, err := json.Marshal(map[string]any{"version": "4", "status": "firing", "receiver": "lockstep", "alerts": alerts, "futureField": 1})
	if err != nil {
		panic(err)
	}
	return b
}

func alert(incident string, change ...func(labels map[string]string, a map[string]any)) map[string]any {
	labels := map[string]string{
		"alertname": "LockstepNoncommunicationHang", names.LabelJob: "j", names.LabelIncident: incident,
		names.LabelClass: names.ClassNoncommunicationHang, names.LabelLevel: names.LevelConfirmed,
		names.LabelCulprit: "rank 5", names.LabelCulpritKind: "rank", names.LabelRank: "5", names.LabelReason: "idle",
	}
	a := map[string]any{"status": "firing", "labels": labels, "startsAt": time.Now().Format(time.RFC3339Nano), "fingerprint": "f" + incident}
	for _, f := range change {
		f(labels, a)
	}
	return a
}

func label(k, v string) func(map[string]string, map[string]any) {
	return func(l map[string]string, _ map[string]any) { l[k] = v }
}

func field(k string, v any) func(map[string]string, map[string]any) {
	return func(_ map[string]string, a map[string]any) { a[k] = v }
}
