package remediatorcmd

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/remediation"
)

func TestNotesTellTheStory(t *testing.T) {
	at := time.Unix(1000, 0)
	e := remediation.Entry{Seq: 3, State: remediation.Running, Kind: remediation.ActionRestart, Policy: "hang", Received: at, Started: at.Add(time.Second)}
	e.Alert.Name, e.Alert.StartsAt = "LockstepNoncommunicationHang", at.Add(-time.Second)
	kinds := func() (k []string) {
		for _, n := range story(&e) {
			k = append(k, n.Kind)
		}
		return k
	}
	restarting := func() bool { // as the master understands it
		var notes []collector.Note
		for _, n := range story(&e) {
			notes = append(notes, collector.Note{At: time.Unix(0, n.AtUnixNs), Kind: n.Kind, Text: n.Text})
		}
		return collector.Restarting(notes)
	}
	if k := kinds(); len(k) != 3 || k[2] != collector.NoteDecision || !restarting() {
		t.Errorf("running: %v, restarting %v", k, restarting())
	}
	e.State, e.Outcome, e.Finished, e.Effective = remediation.Closed, remediation.OutcomeDone, at.Add(2*time.Second), at.Add(3*time.Second)
	if k := kinds(); len(k) != 5 || k[4] != collector.NoteRunning || !restarting() {
		t.Errorf("done: %v, restarting %v", k, restarting())
	}
	e.Outcome = remediation.OutcomeFailed
	if restarting() {
		t.Errorf("failed, and taken for a restart: %v", story(&e))
	}
	e.Outcome, e.Detail = remediation.OutcomeDone, "attempt 1 started"
	if !restarting() {
		t.Errorf("done, and not taken for a restart: %v", story(&e))
	}
	e.Outcome, e.Started, e.Effective, e.Detail = remediation.OutcomeRefused, time.Time{}, time.Time{}, "job: too many"
	if s := story(&e); len(s) != 3 || s[2].Text != "restart refused: job: too many" {
		t.Errorf("refused: %v", s)
	}
	e.Kind, e.Outcome, e.Detail = remediation.ActionNone, remediation.OutcomeNone, ""
	if s := story(&e); s[2].Text != "none is taken" {
		t.Errorf("none: %v", s)
	}
}

// What the master is not told is counted, and nobody waits.
func TestNotesAreDropped(t *testing.T) {
	n, err := newNotes(masters{}, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	for range noteQueue + 2 {
		n.event(remediation.Entry{})
	}
	if got := testutil.ToFloat64(n.dropped); got != 2 {
		t.Errorf("%v dropped, want 2", got)
	}
	tries := 0
	n.again = time.Nanosecond
	n.send = func(context.Context, *wire.NoteRequest) error { tries++; return errors.New("no") }
	if err := n.tell(t.Context(), &remediation.Entry{}); err == nil || tries != noteTries {
		t.Errorf("%v after %d tries", err, tries)
	}
}
