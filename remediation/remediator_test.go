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
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var token = []byte("0123456789abcdef0123456789abcdef")

// fake is an actuator that remembers action ids as a real one must, and can fail or hang.
type fake struct {
	mu    sync.Mutex
	acts  []Action
	done  map[string]bool // by action id: really carried out
	times int             // really carried out, with repeats answered from done
	fail  int             // so many calls fail first
	err   error
	block chan struct{} // Act waits for it after carrying out, before answering
}

func (f *fake) Name() string { return "fake" }

func (f *fake) Inventory(context.Context, string) (Inventory, error) {
	return Inventory{Units: 8, Unit: func(rank int) string { return fmt.Sprint("slot", rank) }}, nil
}

func (f *fake) Act(ctx context.Context, a Action) (string, error) {
	f.mu.Lock()
	f.acts = append(f.acts, a)
	if f.fail > 0 {
		f.fail--
		f.mu.Unlock()
		return "", cmpErr(f.err)
	}
	if !f.done[a.ID] {
		if f.done == nil {
			f.done = map[string]bool{}
		}
		f.done[a.ID] = true
		f.times++
	}
	block := f.block
	f.mu.Unlock()
	if block != nil {
		select {
		case <-block:
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}
	return "restarted", nil
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
	if journal == "" {
		journal = filepath.Join(t.TempDir(), "j.db")
	}
	g := &rig{t: t, act: act, reg: prometheus.NewRegistry(), events: make(chan Entry, 256)}
	r, err := New(Options{Config: cfg, Journal: journal, Token: token, Actuator: act, Registry: g.reg, OnEvent: func(e Entry) { g.events <- e }})
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

func TestHangRestartsOnce(t *testing.T) {
	g := start(t, "", live(), &fake{})
	a := alert("i1", label(names.LabelAttempt, "3"))
	if code := g.send(a); code != 200 {
		t.Fatalf("webhook answered %d", code)
	}
	e := g.closed()
	if e.Outcome != OutcomeDone || e.Kind != ActionRestart || g.act.acts[0].Rank != 5 || *g.act.acts[0].Attempt != 3 {
		t.Fatalf("entry %+v, action %+v", e, g.act.acts)
	}
	// Alertmanager repeats; a second alert of the same incident comes; an older one of the same job too.
	if code := g.send(a); code != 200 {
		t.Fatalf("repeat answered %d", code)
	}
	g.send(alert("i1", field("fingerprint", "other")))
	if e := g.closed(); e.Outcome != OutcomeSuperseded {
		t.Fatalf("second alert of the incident: %+v", e)
	}
	g.send(alert("i2", field("startsAt", time.Now().Add(-time.Minute).Format(time.RFC3339Nano))))
	if e := g.closed(); e.Outcome != OutcomeSuperseded {
		t.Fatalf("alert from before the restart: %+v", e)
	}
	if n := g.act.count(); n != 1 {
		t.Fatalf("carried out %d times", n)
	}
	if g.webhooks("duplicate") != 1 || g.webhooks("accepted") != 3 {
		t.Fatalf("duplicate %v accepted %v", g.webhooks("duplicate"), g.webhooks("accepted"))
	}
}

func TestChangesNothing(t *testing.T) {
	bearer := "Bearer " + string(token)
	trunc := bytes.Replace(webhook(alert("i")), []byte(`"version"`), []byte(`"truncatedAlerts":2,"version"`), 1)
	for _, c := range []struct {
		name, result string
		body         []byte
		auth         string
		code         int
	}{
		{"no token", "unauthorized", webhook(alert("i")), "", 401},
		{"wrong token", "unauthorized", webhook(alert("i")), "Bearer 0123456789abcdef0123456789abcdeX", 401},
		{"token without scheme", "unauthorized", webhook(alert("i")), string(token), 401},
		{"not JSON", "malformed", []byte("{"), bearer, 400},
		{"too large", "malformed", bytes.Repeat([]byte(" "), MaxWebhookBytes+1), bearer, 400},
		{"other version", "version", []byte(`{"version":"5","alerts":[]}`), bearer, 400},
		{"truncated", "truncated", trunc, bearer, 400},
		{"resolved", "resolved", webhook(alert("i", field("status", "resolved"))), bearer, 200},
		{"stale", "stale", webhook(alert("i", field("startsAt", "2020-01-01T00:00:00Z"))), bearer, 200},
		{"no incident", "incomplete_alert", webhook(alert("")), bearer, 200},
		{"rank is no number", "incomplete_alert", webhook(alert("i", label(names.LabelRank, "five"))), bearer, 200},
		{"rank is negative", "incomplete_alert", webhook(alert("i", label(names.LabelRank, "-5"))), bearer, 200},
		{"no start", "incomplete_alert", webhook(alert("i", field("startsAt", "0001-01-01T00:00:00Z"))), bearer, 200},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := start(t, "", live(), &fake{})
			before := g.webhooks(c.result)
			if code := g.post(c.body, c.auth); code != c.code {
				t.Errorf("answered %d, want %d", code, c.code)
			}
			if got := g.webhooks(c.result) - before; got != 1 {
				t.Errorf("counted %v times as %s, want 1", got, c.result)
			}
			n := 0
			if err := g.r.j.each(func(*Entry) { n++ }); err != nil || n != 0 {
				t.Errorf("%d entries in the journal, err %v", n, err)
			}
		})
	}
}

func TestDecisions(t *testing.T) {
	cfg := live()
	cfg.Policies = append([]Policy{{Name: "quiet", Job: "quiet-*", Action: ActionNone}, {Name: "trial", Job: "trial", Action: ActionRestart, DryRun: true}}, cfg.Policies...)
	for _, c := range []struct {
		name    string
		change  []func(map[string]string, map[string]any)
		kind    ActionKind
		outcome Outcome
	}{
		{"suspected", []func(map[string]string, map[string]any){label(names.LabelLevel, names.LevelSuspected)}, ActionNone, OutcomeNone},
		{"job pattern", []func(map[string]string, map[string]any){label(names.LabelJob, "quiet-1")}, ActionNone, OutcomeNone},
		{"policy's dry run", []func(map[string]string, map[string]any){label(names.LabelJob, "trial")}, ActionRestart, OutcomeDryRun},
		{"slow link is left to people", []func(map[string]string, map[string]any){label(names.LabelClass, names.ClassCommunicationSlow)}, ActionNone, OutcomeNone},
		{"slow rank is excluded", []func(map[string]string, map[string]any){label(names.LabelClass, names.ClassNoncommunicationSlow)}, ActionExclude, OutcomeDone},
		{"nobody to exclude", []func(map[string]string, map[string]any){label(names.LabelClass, names.ClassNoncommunicationSlow), label(names.LabelRank, "")}, ActionRestart, OutcomeDone},
		{"unknown class", []func(map[string]string, map[string]any){label(names.LabelClass, "bad_weather")}, ActionNone, OutcomeNone},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := start(t, "", cfg, &fake{})
			g.send(alert("i", c.change...))
			if e := g.closed(); e.Outcome != c.outcome || e.Kind != c.kind {
				t.Fatalf("got %s/%s (%s), want %s/%s", e.Kind, e.Outcome, e.Detail, c.kind, c.outcome)
			}
			if want := map[bool]int{true: 1}[c.outcome == OutcomeDone]; g.act.count() != want {
				t.Fatalf("actuator acted %d times, want %d", g.act.count(), want)
			}
		})
	}
}

// TestKilled stops a remediator while an action is in flight, after the actuator
// did it and before it answered, and starts another on the same journal.
func TestKilled(t *testing.T) {
	journal := filepath.Join(t.TempDir(), "j.db")
	act := &fake{block: make(chan struct{})}
	g := start(t, journal, live(), act)
	g.send(alert("i"))
	for act.count() == 0 {
		time.Sleep(time.Millisecond)
	}
	g.stop()
	act.mu.Lock()
	act.block = nil
	act.mu.Unlock()
	g = start(t, journal, live(), act)
	if e := g.closed(); e.Outcome != OutcomeDone {
		t.Fatalf("entry after restart: %+v", e)
	}
	if act.count() != 1 {
		t.Fatalf("carried out %d times", act.count())
	}
	if len(act.acts) != 2 || act.acts[0].ID != act.acts[1].ID {
		t.Fatalf("the repeat must carry the same id: %+v", act.acts)
	}
}

func TestActuatorFails(t *testing.T) {
	t.Run("for a while", func(t *testing.T) {
		g := start(t, "", live(), &fake{fail: 1})
		g.send(alert("i"))
		if e := g.closed(); e.Outcome != OutcomeDone || e.Tries != 2 {
			t.Fatalf("%+v", e)
		}
	})
	t.Run("for good", func(t *testing.T) {
		g := start(t, "", live(), &fake{fail: 99, err: ErrGone})
		g.send(alert("i"))
		if e := g.closed(); e.Outcome != OutcomeFailed || e.Tries != 1 {
			t.Fatalf("%+v", e)
		}
	})
}

func TestBreakerStaysOpenUntilClosed(t *testing.T) {
	journal := filepath.Join(t.TempDir(), "j.db")
	cfg := live()
	cfg.Breaker.Job = 2
	g := start(t, journal, cfg, &fake{})
	outcome := func(incident string) Outcome {
		g.send(alert(incident))
		return g.closed().Outcome
	}
	for i, want := range []Outcome{OutcomeDone, OutcomeDone, OutcomeRefused, OutcomeRefused} {
		if got := outcome(fmt.Sprint("a", i)); got != want {
			t.Fatalf("incident %d: %s, want %s", i, got, want)
		}
	}
	g.stop()
	g = start(t, journal, cfg, &fake{}) // a restart does not close it
	if got := outcome("b"); got != OutcomeRefused {
		t.Fatalf("after restart: %s", got)
	}
	req := httptest.NewRequest(http.MethodPost, "/api/v1/breakers/close?scope=job:j", nil)
	req.Header.Set("Authorization", "Bearer "+string(token))
	w := httptest.NewRecorder()
	g.r.Handler().ServeHTTP(w, req)
	if w.Code != 200 {
		t.Fatalf("close: %d %s", w.Code, w.Body)
	}
	if n := g.act.count(); n != 0 {
		t.Fatalf("closing a breaker replayed %d refused actions", n)
	}
	for i, want := range []Outcome{OutcomeDone, OutcomeDone, OutcomeRefused} {
		if got := outcome(fmt.Sprint("c", i)); got != want {
			t.Fatalf("after closing, incident %d: %s, want %s", i, got, want)
		}
	}
}

func TestBreakerBounds(t *testing.T) {
	never := func(string) time.Time { return time.Time{} }
	rapid.Check(t, func(t *rapid.T) {
		b := BreakerConfig{
			Window: time.Hour, Job: rapid.IntRange(1, 5).Draw(t, "job"), Total: rapid.IntRange(1, 10).Draw(t, "total"),
			UnitShare: rapid.Float64Range(0, 1).Draw(t, "share"), Units: rapid.IntRange(0, 6).Draw(t, "units"),
		}
		total := rapid.IntRange(0, 40).Draw(t, "all units")
		now := time.Unix(1e9, 0)
		var history []past
		for range rapid.IntRange(0, 60).Draw(t, "n") {
			now = now.Add(time.Duration(rapid.IntRange(0, 1200).Draw(t, "s")) * time.Second)
			job, unit := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "j"), ""
			if rapid.Bool().Draw(t, "exclude") {
				unit = fmt.Sprint(rapid.IntRange(0, 20).Draw(t, "unit"))
			}
			if scope, _ := b.allow(now, history, never, job, unit, total); scope == "" {
				history = append(history, past{now, job, unit})
			}
		}
		// Whatever was allowed, no window holds more than the bounds.
		for i, from := range history {
			jobs, units, n := map[string]int{}, map[string]bool{}, 0
			for _, p := range history[i:] {
				if p.At.Sub(from.At) >= b.Window {
					break
				}
				n++
				jobs[p.Job]++
				if p.Unit != "" {
					units[p.Unit] = true
				}
			}
			if n > b.Total {
				t.Fatalf("%d actions in a window, at most %d", n, b.Total)
			}
			for j, k := range jobs {
				if k > b.Job {
					t.Fatalf("job %s: %d actions in a window, at most %d", j, k, b.Job)
				}
			}
			if len(units) > b.Units || float64(len(units)) > max(1, b.UnitShare*float64(total)) {
				t.Fatalf("%d of %d units in a window, share %v, bound %d", len(units), total, b.UnitShare, b.Units)
			}
		}
	})
}

func TestConfigErrors(t *testing.T) {
	for text, want := range map[string]string{
		"dry_run: maybe":                        "cannot unmarshal",
		"dryrun: true":                          "field dryrun not found",
		"max_age: 0s":                           "max_age",
		"policies: [{action: reboot, name: x}]": "not one of none, restart",
		"policies: [{action: none}]":            "name is missing",
		"policies: [{name: x, action: none, class: slow}]": "is not one of",
		"policies: [{name: x, action: none, job: '['}]":    "pattern",
		"breaker: {job: 0}":        "at least 1",
		"breaker: {unit_share: 2}": "between 0 and 1",
	} {
		if _, err := ParseConfig(bytes.NewReader([]byte(text))); err == nil || !bytes.Contains([]byte(err.Error()), []byte(want)) {
			t.Errorf("%s: error %v, want one with %q", text, err, want)
		}
	}
	cfg, err := ParseConfig(bytes.NewReader(nil))
	if err != nil || !*cfg.DryRun {
		t.Errorf("an empty file must mean the defaults and dry run: %+v, %v", cfg, err)
	}
}

func FuzzWebhook(f *testing.F) {
	f.Add(webhook(alert("i")))
	f.Add([]byte(`{"version":"4","alerts":[{"status":"firing","labels":null}]}`))
	f.Add([]byte(`{"version":"4","truncatedAlerts":18446744073709551615}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		firing, _, _, err := decode(bytes.NewReader(b))
		if err != nil && len(firing) > 0 {
			t.Fatal("alerts beside an error")
		}
		for i := range firing {
			if a := &firing[i]; a.check() != nil || a.Rank < -1 {
				t.Fatalf("an unchecked alert came through: %+v", a)
			}
		}
	})
}
