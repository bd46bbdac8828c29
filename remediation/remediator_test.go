package remediation

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

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
		{"no alerts", "malformed", []byte(`{"version":"4","alerts":[]}`), bearer, 400},
		{"stale", "stale", webhook(alert("i", field("startsAt", "2020-01-01T00:00:00Z"))), bearer, 200},
		{"from the future", "stale", webhook(alert("i", field("startsAt", "2999-01-01T00:00:00Z"))), bearer, 200},
		{"overlong label", "incomplete_alert", webhook(alert("i", label(names.LabelReason, strings.Repeat("x", 1<<16)))), bearer, 200},
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
	made := time.Unix(1e9, 0)
	act := &fake{block: make(chan struct{}), made: made}
	g := start(t, journal, live(), act)
	g.send(alert("i"))
	for act.count() == 0 {
		time.Sleep(time.Millisecond)
	}
	g.stop()
	act.mu.Lock()
	act.block, act.made = nil, made.Add(time.Hour)
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
	if !act.acts[0].Made.Equal(made) || !act.acts[1].Made.Equal(made) {
		t.Fatalf("both are about what ran when it was decided, made at %v: %+v", made, act.acts)
	}
}

// TestEveryClassHasAPolicy: the default says of each class what is done, nothing included.
func TestEveryClassHasAPolicy(t *testing.T) {
	c := DefaultConfig()
	for _, class := range names.Classes {
		if p := c.decide(&Alert{Class: class, Level: names.LevelConfirmed, Rank: 1}); p.Class != class {
			t.Errorf("a confirmed %s is left to policy %q", class, p.Name)
		}
	}
}

// TestTakenUpUnderOtherRules is a remediator that was killed while an action
// was in flight, and comes back too late or with a person's word against it.
func TestTakenUpUnderOtherRules(t *testing.T) {
	dry, none := DefaultConfig(), live()
	none.Policies = []Policy{{Name: "hands off", Action: ActionNone}}
	for _, c := range []struct {
		name    string
		cfg     Config
		began   time.Duration // ago
		outcome Outcome
	}{
		{"in time", live(), time.Minute, OutcomeDone},
		{"too late", live(), 11 * time.Minute, OutcomeFailed},
		{"dry run now", dry, time.Minute, OutcomeDryRun},
		{"no action now", none, time.Minute, OutcomeNone},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "j.db")
			j, err := openJournal(path)
			if err != nil {
				t.Fatal(err)
			}
			began := time.Now().Add(-c.began)
			a := Alert{Name: "a", Job: "j", Incident: "i", Class: names.ClassNoncommunicationHang, Level: names.LevelConfirmed, Rank: 1, Fingerprint: "f", StartsAt: began}
			if _, _, err := j.add(began, began, []Alert{a}); err != nil {
				t.Fatal(err)
			}
			e, err := j.get(1)
			if err != nil {
				t.Fatal(err)
			}
			e.State, e.Kind, e.Started = Running, ActionRestart, began
			if err := errors.Join(j.update(e), j.close()); err != nil {
				t.Fatal(err)
			}
			g := start(t, path, c.cfg, &fake{})
			if e := g.closed(); e.Outcome != c.outcome {
				t.Errorf("outcome %s (%s), want %s", e.Outcome, e.Detail, c.outcome)
			}
			if want := map[bool]int{true: 1}[c.outcome == OutcomeDone]; g.act.count() != want {
				t.Errorf("acted %d times, want %d", g.act.count(), want)
			}
		})
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
	t.Run("does it, and does not answer in time", func(t *testing.T) {
		cfg := live()
		cfg.ActionTimeout = 20 * time.Millisecond
		act := &fake{block: make(chan struct{})}
		g := start(t, "", cfg, act)
		g.send(alert("i"))
		for act.count() == 0 {
			time.Sleep(time.Millisecond)
		}
		close(act.block)
		if e := g.closed(); e.Outcome != OutcomeDone || act.count() != 1 || e.Effective.IsZero() {
			t.Fatalf("%+v, done %d times", e, act.count())
		}
	})
	t.Run("had nothing to do", func(t *testing.T) {
		g := start(t, "", live(), &fake{over: true})
		g.send(alert("i"))
		if e := g.closed(); e.Outcome != OutcomeSuperseded {
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

// TestUnitsOfOthers: what one job has lost is not a share of what another one has.
func TestUnitsOfOthers(t *testing.T) {
	never := func(string) time.Time { return time.Time{} }
	b := BreakerConfig{Window: time.Hour, Job: 5, Total: 20, UnitShare: 0.1, Units: 3}
	now := time.Unix(1e9, 0)
	history := []past{{now, "a", "a/slot3"}}
	if scope, why := b.allow(b.count(now, history, never), "b", "b/slot1", 18); scope != "" {
		t.Errorf("the first unit of job b: %s: %s", scope, why)
	}
	if scope, _ := b.allow(b.count(now, history, never), "a", "a/slot1", 18); scope != ScopeUnits {
		t.Errorf("the second unit of job a: scope %q", scope)
	}
	history = append(history, past{now, "c", "c/slot1"}, past{now, "d", "d/slot1"})
	if scope, _ := b.allow(b.count(now, history, never), "b", "b/slot1", 18); scope != ScopeUnits {
		t.Errorf("more units than any jobs may lose: scope %q", scope)
	}
}

// TestJobsOfOthers: alerts about jobs that this remediator has no hand on use up
// nothing of what it may do for its own.
func TestJobsOfOthers(t *testing.T) {
	cfg := live()
	cfg.Breaker.Total = 2
	g := start(t, "", cfg, &fake{knows: "j"})
	for i := range 3 {
		g.send(alert(fmt.Sprint("other", i), label(names.LabelJob, "other")))
		if e := g.closed(); e.Outcome != OutcomeFailed {
			t.Fatalf("%+v", e)
		}
	}
	g.send(alert("i"))
	if e := g.closed(); e.Outcome != OutcomeDone {
		t.Fatalf("%s: %s", e.Outcome, e.Detail)
	}
}

// TestNothingDone: an action that came too late for its attempt uses up nothing.
func TestNothingDone(t *testing.T) {
	cfg := live()
	cfg.Breaker.Job = 2
	act := &fake{over: true}
	g := start(t, "", cfg, act)
	for i := range 3 {
		g.send(alert(fmt.Sprint("late", i)))
		if e := g.closed(); e.Outcome != OutcomeSuperseded {
			t.Fatalf("%+v", e)
		}
	}
	act.mu.Lock()
	act.over = false
	act.mu.Unlock()
	g.send(alert("i"))
	if e := g.closed(); e.Outcome != OutcomeDone {
		t.Fatalf("%s: %s", e.Outcome, e.Detail)
	}
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
	g.gauge(g.r.m.breaker.vec, "job:j", 1)
	g.gauge(g.r.m.remaining.vec, "job:j", 0)
	g.gauge(g.r.m.remaining.vec, ScopeTotal, cfg.Breaker.Total-2)
	g.stop()
	g = start(t, journal, cfg, &fake{}) // a restart does not close it
	if got := outcome("b"); got != OutcomeRefused {
		t.Fatalf("after restart: %s", got)
	}
	req := httptest.NewRequest(http.MethodPost, "/api/v1/breakers/close?scope=job:j", nil)
	req.Header.Set("Authorization", "Bearer "+string(operatorToken))
	w := httptest.NewRecorder()
	g.r.Handler().ServeHTTP(w, req)
	if w.Code != 200 {
		t.Fatalf("close: %d %s", w.Code, w.Body)
	}
	g.gauge(g.r.m.breaker.vec, "job:j", 0)
	g.gauge(g.r.m.remaining.vec, "job:j", cfg.Breaker.Job) // its count begins anew
	if n := g.act.count(); n != 0 {
		t.Fatalf("closing a breaker replayed %d refused actions", n)
	}
	for i, want := range []Outcome{OutcomeDone, OutcomeDone, OutcomeRefused} {
		if got := outcome(fmt.Sprint("c", i)); got != want {
			t.Fatalf("after closing, incident %d: %s, want %s", i, got, want)
		}
	}
}

// TestRefusedAndDecidedAnew: closed with again=true, a breaker's refusals are decided anew, however old they are, by
// what the job's master says now; those of another breaker stay as they are.
func TestRefusedAndDecidedAnew(t *testing.T) {
	cfg := live()
	cfg.Breaker.Job, cfg.Breaker.Units = 2, 0
	slow := hang(3, 2)
	slow.Class = names.ClassNoncommunicationSlow
	w := &word{says: map[string]Incident{"a": hang(5, 0), "b": hang(5, 1), "c": hang(5, 2), "d": hang(6, 2), "u": slow}}
	var late atomic.Int64
	g := startWith(t, "", cfg, &fake{masters: w}, func(o *Options) { o.Now = func() time.Time { return time.Now().Add(time.Duration(late.Load())) } })
	for _, c := range []struct {
		incident string
		want     Outcome
	}{{"u", OutcomeRefused}, {"a", OutcomeDone}, {"b", OutcomeDone}, {"c", OutcomeRefused}, {"d", OutcomeRefused}} {
		g.send(alert(c.incident))
		if e := g.closed(); e.Outcome != c.want {
			t.Fatalf("%s: %s (%s), want %s", c.incident, e.Outcome, e.Detail, c.want)
		}
	}
	w.mu.Lock()
	over := w.says["d"]
	over.Closed = true // it has come to an end by itself
	w.says["d"] = over
	w.mu.Unlock()
	late.Store(int64(8 * time.Hour)) // a night
	req := httptest.NewRequest(http.MethodPost, "/api/v1/breakers/close?scope=job:j&again=true", nil)
	req.Header.Set("Authorization", "Bearer "+string(operatorToken))
	answer := httptest.NewRecorder()
	g.r.Handler().ServeHTTP(answer, req)
	if answer.Code != 200 || !strings.Contains(answer.Body.String(), `"again":2`) {
		t.Fatalf("close: %d %s", answer.Code, answer.Body)
	}
	for range 2 {
		e := g.closed()
		if want := map[string]Outcome{"c": OutcomeDone, "d": OutcomeStale}[e.Alert.Incident]; e.Outcome != want {
			t.Errorf("%s: %s (%s), want %s", e.Alert.Incident, e.Outcome, e.Detail, want)
		}
	}
	if n := g.act.count(); n != 3 {
		t.Errorf("%d actions, want 3", n)
	}
	open, err := g.r.j.breakers()
	if err != nil || len(open) != 1 || open[0].Scope != ScopeUnits {
		t.Errorf("open: %v, %v", open, err)
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
			count := b.count(now, history, never)
			left := b.remaining(count, nil)
			scope, _ := b.allow(count, job, unit, total)
			if _, seen := left[scopeJob+job]; !seen {
				left[scopeJob+job] = b.Job
			}
			if (left[ScopeTotal] == 0 || left[scopeJob+job] == 0) != (scope == ScopeTotal || scope == scopeJob+job) {
				t.Fatalf("%v remain, but scope %q refused", left, scope)
			}
			if scope == "" {
				history = append(history, past{now, job, unit})
			}
		}
		// Whatever was allowed, no window holds more than the bounds.
		for i, from := range history {
			jobs, units, n := map[string]int{}, map[string]bool{}, 0
			of := map[string]map[string]bool{"a": {}, "b": {}, "c": {}}
			for _, p := range history[i:] {
				if p.At.Sub(from.At) >= b.Window {
					break
				}
				n++
				jobs[p.Job]++
				if p.Unit != "" {
					units[p.Unit], of[p.Job][p.Unit] = true, true
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
			if len(units) > b.Units {
				t.Fatalf("%d units in a window, at most %d", len(units), b.Units)
			}
			for j, u := range of {
				if float64(len(u)) > max(1, b.UnitShare*float64(total)) {
					t.Fatalf("job %s: %d of %d units in a window, share %v", j, len(u), total, b.UnitShare)
				}
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
