package remediation

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// TestSeenTwice: a pass that has read an entry as open, and whose turn comes
// after another goroutine has closed it, must not act on what it read.
func TestSeenTwice(t *testing.T) {
	g := start(t, "", live(), &fake{})
	g.send(alert("i"))
	e := g.closed()
	if !g.r.work(context.Background(), e.Seq) {
		t.Error("a closed entry must count as closed")
	}
	if n := len(g.act.acts); n != 1 {
		t.Errorf("acted %d times", n)
	}
}

func TestSupersededWhateverTheClocksSay(t *testing.T) {
	g := start(t, "", live(), &fake{})
	g.send(alert("i1", label(names.LabelAttempt, "3")))
	g.closed()
	early := field("startsAt", time.Now().Add(-time.Minute).Format(time.RFC3339Nano)) // Prometheus's clock is behind
	g.send(alert("i2", label(names.LabelAttempt, "3"), early))
	if e := g.closed(); e.Outcome != OutcomeSuperseded {
		t.Errorf("about the attempt that was ended: %s", e.Outcome)
	}
	g.send(alert("i3", label(names.LabelAttempt, "4"), early))
	if e := g.closed(); e.Outcome != OutcomeDone {
		t.Errorf("about the attempt after it: %s (%s)", e.Outcome, e.Detail)
	}
}

// TestJournalIsBounded: a flood of alerts that lead to nothing pushes out
// neither what was done, which the breakers count, nor much memory.
func TestJournalIsBounded(t *testing.T) {
	j, err := openJournal(filepath.Join(t.TempDir(), "j.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer j.close()
	j.db.NoSync = true
	now := time.Now()
	keep := now.Add(-time.Hour)
	flood := func(n int) (added int, err error) {
		alerts := make([]Alert, n)
		for i := range alerts {
			alerts[i] = Alert{Job: fmt.Sprint("j", i), Incident: "i", Fingerprint: fmt.Sprint(now.UnixNano(), i), StartsAt: now}
		}
		now = now.Add(time.Millisecond)
		added, _, err = j.add(now, keep, alerts)
		return added, err
	}
	closeAll := func(change func(*Entry)) {
		var open []*Entry
		if err := j.each(func(e *Entry) {
			if e.State != Closed {
				open = append(open, e)
			}
		}); err != nil {
			t.Fatal(err)
		}
		for _, e := range open {
			e.State = Closed
			change(e)
			if err := j.update(e); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := flood(1); err != nil {
		t.Fatal(err)
	}
	closeAll(func(e *Entry) { e.Started = now })
	for range 6 {
		if _, err := flood(MaxWebhookAlerts); err != nil {
			t.Fatal(err)
		}
		closeAll(func(*Entry) {})
	}
	if added, err := flood(1); err != nil || added != 1 {
		t.Fatal(added, err)
	}
	n, acted := 0, 0
	if err := j.each(func(e *Entry) {
		n++
		if !e.Started.IsZero() {
			acted++
		}
	}); err != nil || n > maxClosed+1 || acted != 1 {
		t.Errorf("%d entries, %d of them acted on, %v; want at most %d, 1", n, acted, err, maxClosed+1)
	}
	for err == nil {
		_, err = flood(MaxWebhookAlerts)
	}
	if !errors.Is(err, ErrJournalFull) {
		t.Errorf("too many open entries: %v", err)
	}
}

func TestDamagedJournal(t *testing.T) {
	path := filepath.Join(t.TempDir(), "j.db")
	j, err := openJournal(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(j.db.Update(func(tx *bolt.Tx) error { return tx.Bucket(bucketEntries).Put(seqKey(1), []byte("{")) }), j.close()); err != nil {
		t.Fatal(err)
	}
	if _, err := New(Options{Config: live(), Journal: path, Token: token, Actuator: &fake{}, BelieveAlerts: true}); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("error %v, want one that names the journal", err)
	}
}
