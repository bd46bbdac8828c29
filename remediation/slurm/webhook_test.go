package slurm

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/remediation"
)

// TestWebhook: from Alertmanager's webhook through journal, policy and breaker to Slurm. The
// node that the master names is the one that goes, and is what the breaker counts.
func TestWebhook(t *testing.T) {
	const token = "0123456789abcdef0123456789abcdef"
	f := newFake(6, 4, 5, true)
	cfg := remediation.DefaultConfig()
	no := false
	cfg.DryRun = &no
	closed := make(chan remediation.Entry, 10)
	r, err := remediation.New(remediation.Options{
		Config: cfg, Journal: filepath.Join(t.TempDir(), "journal.db"), Token: []byte(token), BelieveAlerts: true,
		Actuator: actuator(t, f.run, nil),
		OnEvent: func(e remediation.Entry) {
			if e.State == remediation.Closed {
				closed <- e
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(within(t))
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	defer func() { cancel(); <-ended }()
	post := func(incident string) remediation.Entry {
		t.Helper()
		body, err := json.Marshal(map[string]any{"version": "4", "alerts": []any{map[string]any{
			"status": "firing", "startsAt": time.Now().Format(time.RFC3339Nano), "fingerprint": incident,
			"labels": map[string]string{
				"alertname": "LockstepSlow", names.LabelJob: "slurm-7", names.LabelIncident: incident, names.LabelClass: names.ClassNoncommunicationSlow,
				names.LabelLevel: names.LevelConfirmed, names.LabelCulprit: "rank 11", names.LabelRank: "11", names.LabelNode: "n2", names.LabelAttempt: "0",
			},
		}}})
		if err != nil {
			t.Fatal(err)
		}
		req := httptest.NewRequest(http.MethodPost, "/webhook", bytes.NewReader(body))
		req.Header.Set("Authorization", "Bearer "+token)
		w := httptest.NewRecorder()
		if r.Handler().ServeHTTP(w, req); w.Code != http.StatusOK {
			t.Fatalf("%d: %s", w.Code, w.Body)
		}
		select {
		case e := <-closed:
			return e
		case <-ctx.Done():
			t.Fatal("nothing was done")
		}
		return remediation.Entry{}
	}
	if e := post("one"); e.Outcome != remediation.OutcomeDone || e.Unit != "n2" || e.Effective.IsZero() {
		t.Errorf("%+v", e)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if s := f.steps[len(f.steps)-1]; s.attempt != 1 || slices.Contains(s.nodes, "n2") {
		t.Errorf("%+v, %q", s, f.ran)
	}
}
