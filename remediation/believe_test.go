package remediation

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// word is what masters say, by incident.
type word struct {
	mu    sync.Mutex
	says  map[string]Incident
	fails int // so many questions go unanswered first
	asked int
}

func (w *word) Incident(_ context.Context, job, id string) (Incident, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.asked++
	if job != "j" {
		return Incident{}, ErrNoMaster
	}
	if w.fails > 0 {
		w.fails--
		return Incident{}, errors.New("connection refused")
	}
	in, ok := w.says[id]
	if !ok {
		return Incident{}, ErrUnknownIncident
	}
	return in, nil
}

func hang(rank, attempt int) Incident {
	return Incident{Class: names.ClassNoncommunicationHang, Level: names.LevelConfirmed, CulpritKind: "rank", Culprit: "rank", Rank: rank, Attempt: attempt, AttemptNow: attempt, Reason: "idle"}
}

// What a master says decides, whatever the alert says.
func TestTheMasterIsBelieved(t *testing.T) {
	slow := hang(3, 0)
	slow.Class = names.ClassNoncommunicationSlow
	suspected := hang(3, 0)
	suspected.Level = names.LevelSuspected
	closed := hang(3, 0)
	closed.Closed = true
	over := hang(3, 0)
	over.AttemptNow = 1
	old := hang(3, 0)
	old.Opened = time.Now().Add(-time.Hour) // the alert says that it began now
	w := &word{says: map[string]Incident{"old": old, "same": hang(5, 0), "slow": slow, "suspected": suspected, "closed": closed, "over": over}}
	for _, c := range []struct {
		incident string
		outcome  Outcome
		kind     ActionKind
		unit     string
	}{
		{"invented", OutcomeUnknown, "", ""},
		{"suspected", OutcomeNone, ActionNone, ""},
		{"closed", OutcomeStale, "", ""},
		{"old", OutcomeStale, "", ""},
		{"over", OutcomeSuperseded, "", ""},
		{"same", OutcomeDone, ActionRestart, ""},
		{"slow", OutcomeDone, ActionExclude, "slot3"}, // the alert says rank 5, and a hang
	} {
		g := start(t, "", live(), &fake{masters: w})
		if code := g.send(alert(c.incident)); code != 200 {
			t.Fatalf("%s: %d", c.incident, code)
		}
		e := g.closed()
		if e.Outcome != c.outcome || e.Kind != c.kind || e.Unit != c.unit {
			t.Errorf("%s: %+v", c.incident, e)
		}
		if acted := g.act.count() > 0; acted != (c.outcome == OutcomeDone) {
			t.Errorf("%s: acted %v", c.incident, acted)
		}
		g.stop()
	}
}

func TestAlertsOfNobodysJobChangeNothing(t *testing.T) {
	g := start(t, "", live(), &fake{masters: &word{}})
	g.send(alert("i", func(labels map[string]string, _ map[string]any) { labels[names.LabelJob] = "theirs" }))
	if e := g.closed(); e.Outcome != OutcomeUnknown || g.act.count() != 0 {
		t.Errorf("%+v", e)
	}
	if n := testutil.ToFloat64(g.r.m.disbelieved.WithLabelValues(disbeliefUnknown)); n != 1 {
		t.Errorf("counted %v times", n)
	}
}

func TestAMasterIsAskedAgain(t *testing.T) {
	g := start(t, "", live(), &fake{masters: &word{says: map[string]Incident{"i": hang(5, 2)}, fails: 1}})
	g.send(alert("i"))
	if e := g.closed(); e.Outcome != OutcomeDone || e.Alert.Attempt == nil || *e.Alert.Attempt != 2 {
		t.Errorf("%+v", e)
	}
}

// A job that the actuator does not know costs its master no question.
func TestTheMasterOfAJobThatIsGoneIsNotAsked(t *testing.T) {
	w := &word{fails: 1000}
	g := start(t, "", live(), &fake{masters: w, knows: "other"})
	g.send(alert("i"))
	if e := g.closed(); e.Outcome != OutcomeFailed || g.act.count() != 0 {
		t.Errorf("%+v", e)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.asked != 0 {
		t.Errorf("asked %d times", w.asked)
	}
}

// One job's alerts leave room for the others'.
func TestAShareOfTheJournalForEachJob(t *testing.T) {
	j, err := openJournal(t.TempDir() + "/j.db")
	if err != nil {
		t.Fatal(err)
	}
	defer j.close()
	now := time.Now()
	var flood []Alert
	for i := range 2 * maxOpen {
		flood = append(flood, Alert{Job: "loud", Incident: fmt.Sprint(i), Fingerprint: fmt.Sprint(i), StartsAt: now})
	}
	if added, over, err := j.add(now, now, flood); err != nil || added != maxOpenOfJob || over != len(flood)-maxOpenOfJob {
		t.Errorf("%d added, %d over, %v", added, over, err)
	}
	if added, over, err := j.add(now, now, []Alert{{Job: "quiet", Fingerprint: "q", StartsAt: now}}); err != nil || added != 1 || over != 0 {
		t.Errorf("another job: %d added, %d over, %v", added, over, err)
	}
}
