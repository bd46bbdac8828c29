package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/deploy/local"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/web"
	"github.com/lockstep-ccl/lockstep/remediation"
)

// theatre plays master, Prometheus and remediator: each look at the master is one act further.
type theatre struct {
	mu       sync.Mutex
	act      int
	culprit  string
	class    string
	attempts int    // of the job in the end
	over     func() // after many acts the audience leaves
}

func (p *theatre) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	defer p.mu.Unlock()
	answer := func(v any) { _ = json.NewEncoder(w).Encode(v) }
	switch r.URL.Path {
	case "/api/v1/status":
		if p.act++; p.act > 40 {
			p.over()
		}
		st := web.Status{Attempt: 0, Step: 40}
		now := time.Now()
		in := web.Incident{ID: "i1", Class: p.class, Culprits: []web.Culprit{{Name: p.culprit, Reason: "why"}}, Evidence: []string{"seen"}}
		switch {
		case p.act < 3:
		case p.act < 5:
			st.Open = []web.Incident{in}
		default:
			in.Confirmed = &now
			st.Open = []web.Incident{in}
		}
		if p.act > 6 {
			st.Attempt, st.Step = uint32(p.attempts), 42
		}
		answer(st)
	case "/api/v1/alerts":
		answer(map[string]any{"data": map[string]any{"alerts": []any{map[string]any{"state": "firing", "labels": map[string]string{
			"alertname": "Alert", "severity": "critical", names.LabelLevel: names.LevelConfirmed, names.LabelIncident: "i1",
		}}}}})
	case "/api/v1/actions":
		answer([]remediation.Entry{{Seq: 1, Alert: remediation.Alert{Incident: "i1", Level: names.LevelConfirmed}, State: remediation.Closed, Policy: "hangs", Kind: remediation.ActionRestart, Outcome: remediation.OutcomeDone, Detail: "told"}})
	default:
		w.WriteHeader(http.StatusNotFound)
	}
}

// stage is a site of which only the nodes matter.
type stage struct {
	site
	on []string
}

func (s stage) nodes(context.Context) ([]string, error) { return s.on, nil }

// TestStory: what the parts of a cluster say is told in order and judged: on a node that is out
// no job may run again.
func TestStory(t *testing.T) {
	lost := fault{Name: faultNode, Class: names.ClassNoncommunicationHang, Rank: 3, Peer: -1}
	lost.on("n2")
	killed := fault{Name: faultKilled, Class: names.ClassNoncommunicationHang, Rank: 3, Peer: -1}
	killed.on("n2")
	for _, c := range []struct {
		name  string
		f     fault
		play  *theatre
		on    []string
		wrong string
	}{
		{"rank killed", killed, &theatre{culprit: "rank 3", class: names.ClassNoncommunicationHang, attempts: 1}, []string{"n1", "n2"}, ""},
		{"node lost", lost, &theatre{culprit: "node n2", class: names.ClassNoncommunicationHang, attempts: 1}, []string{"n1", "n3"}, ""},
		{"on it again", lost, &theatre{culprit: "node n2", class: names.ClassNoncommunicationHang, attempts: 1}, []string{"n1", "n2"}, "runs on n2 again"},
		{"another rank", killed, &theatre{culprit: "rank 1", class: names.ClassNoncommunicationHang, attempts: 1}, []string{"n1"}, "culprit is rank 1, not rank 3"},
		{"another class", killed, &theatre{culprit: "rank 3", class: names.ClassCommunicationHang, attempts: 1}, []string{"n1"}, "class is communication_hang"},
		{"no pods", killed, &theatre{culprit: "rank 3", class: names.ClassNoncommunicationHang, attempts: 1}, nil, "does not run again"},
	} {
		t.Run(c.name, func(t *testing.T) {
			srv := httptest.NewServer(c.play)
			defer srv.Close()
			host := strings.TrimPrefix(srv.URL, "http://")
			cl := &cluster{dir: t.TempDir(), master: host, remediator: host, monitored: true, stack: &local.Stack{PrometheusURL: srv.URL}, client: srv.Client(), site: stage{on: c.on}, died: make(chan error)}
			cl.program = ownProgram{cl}
			var out bytes.Buffer
			w := watch(cl, c.f, &printer{w: &out}, &web.Status{Step: 40})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			c.play.over = cancel
			o, err := w.run(ctx, time.Minute)
			if err != nil {
				t.Fatal(err)
			}
			if wrong := strings.Join(o.Wrong, "; "); (wrong == "") != (c.wrong == "") || !strings.Contains(wrong, c.wrong) {
				t.Errorf("judged %q, want %q\n%s", wrong, c.wrong, out.String())
			}
			at := 0
			for _, want := range []string{"suspected  " + c.play.class + ": " + c.play.culprit, "confirmed  ", "Alert is firing (critical)", "entry 1", "policy hangs says restart: done; told", "attempt 1 on n1"} {
				if want == "attempt 1 on n1" && c.on == nil {
					continue
				}
				i := strings.Index(out.String()[at:], want)
				if i < 0 {
					t.Fatalf("%q is not told, or not in its turn:\n%s", want, out.String())
				}
				at += i
			}
		})
	}
}
