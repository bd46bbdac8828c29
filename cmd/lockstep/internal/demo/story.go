package demo

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/train"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/web"
	"github.com/lockstep-ccl/lockstep/remediation"
)

// outcome is one fault's story in numbers. Times are seconds since the injection;
// a negative one has not been seen.
type outcome struct {
	Fault   string `json:"fault"`
	Class   string `json:"expected_class"`
	Culprit string `json:"expected_culprit"`

	GotClass   string   `json:"class"`
	GotCulprit string   `json:"culprit"`
	Reason     string   `json:"reason"`
	Evidence   []string `json:"evidence"`
	Action     string   `json:"action"`

	Suspected float64 `json:"suspected_s"`
	Confirmed float64 `json:"verdict_s"`
	Alert     float64 `json:"alert_s"`
	Webhook   float64 `json:"webhook_s"`
	Acted     float64 `json:"action_s"`
	Running   float64 `json:"running_s"`

	Nodes    []string `json:"nodes,omitempty"` // that it runs on again, on a cluster
	Incident string   `json:"incident,omitempty"`
	Trace    string   `json:"trace,omitempty"` // page of the collective that shows it

	Wrong []string `json:"wrong,omitempty"` // what was not as it should be
}

func (o *outcome) right() bool { return len(o.Wrong) == 0 }

// watcher reads what each part says of itself, and tells it as it comes.
type watcher struct {
	c       *cluster
	f       fault
	out     *printer
	t0      time.Time
	o       outcome
	known   map[string]bool // incidents from before the fault
	from    int             // attempt then
	resumed int             // checkpoint that the next one starts from, notSeen before it is known
}

const notSeen = -1

func watch(c *cluster, f fault, out *printer, st *web.Status) *watcher {
	w := &watcher{c: c, f: f, out: out, t0: time.Now(), known: map[string]bool{}, from: int(st.Attempt), resumed: notSeen}
	for _, in := range append(slices.Clone(st.Open), st.Closed...) {
		w.known[in.ID] = true
	}
	w.o = outcome{Fault: f.Name, Class: f.Class, Culprit: f.culprit(), Suspected: notSeen, Confirmed: notSeen, Alert: notSeen, Webhook: notSeen, Acted: notSeen, Running: notSeen}
	return w
}

// run follows the fault until the job runs again, or for limit.
func (w *watcher) run(ctx context.Context, limit time.Duration) (outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	t := time.NewTicker(25 * time.Millisecond)
	defer t.Stop()
	for w.o.Running < 0 || w.o.Webhook >= 0 && w.o.Acted < 0 {
		w.verdict(ctx)
		w.alert(ctx)
		w.action(ctx)
		w.running(ctx)
		select {
		case err := <-w.c.died:
			return w.o, err
		case <-ctx.Done():
			w.judge()
			return w.o, nil
		case <-t.C:
		}
	}
	w.judge()
	return w.o, nil
}

func (w *watcher) elapsed() float64 { return time.Since(w.t0).Seconds() }

func (w *watcher) verdict(ctx context.Context) {
	if w.o.Confirmed >= 0 {
		return
	}
	var st web.Status
	if w.c.get(ctx, w.c.web.URL(w.c.master)+"/api/v1/status", &st) != nil {
		return // the master may be dead for a while; it is asked again
	}
	for _, in := range append(st.Open, st.Closed...) {
		if w.known[in.ID] || len(in.Culprits) == 0 {
			continue
		}
		var culprits []string
		for _, c := range in.Culprits {
			culprits = append(culprits, c.Name)
		}
		what := fmt.Sprintf("%s: %s (%s)", in.Class, strings.Join(culprits, ", "), in.Culprits[0].Reason)
		if w.o.Suspected < 0 {
			w.o.Suspected = w.elapsed()
			if in.Confirmed == nil {
				w.out.line(w.o.Suspected, "verdict", "suspected  "+what)
			}
		}
		if in.Confirmed != nil {
			w.o.Confirmed, w.o.Incident = w.elapsed(), in.ID
			w.o.GotClass, w.o.GotCulprit, w.o.Reason, w.o.Evidence = in.Class, strings.Join(culprits, ", "), in.Culprits[0].Reason, in.Evidence
			w.out.line(w.o.Confirmed, "verdict", "confirmed  "+what)
			for _, e := range in.Evidence[:min(3, len(in.Evidence))] {
				w.out.more(e)
			}
			return
		}
	}
}

type promAlerts struct {
	Data struct {
		Alerts []struct {
			Labels map[string]string `json:"labels"`
			State  string            `json:"state"`
		} `json:"alerts"`
	} `json:"data"`
}

// firing returns the labels of the alerts that fire.
func (c *cluster) firing(ctx context.Context) ([]map[string]string, error) {
	if !c.monitored {
		return c.herald.firing(), nil
	}
	var a promAlerts
	if err := c.get(ctx, c.stack.PrometheusURL+"/api/v1/alerts", &a); err != nil {
		return nil, err
	}
	var firing []map[string]string
	for _, x := range a.Data.Alerts {
		if x.State == "firing" {
			firing = append(firing, x.Labels)
		}
	}
	return firing, nil
}

func (w *watcher) alert(ctx context.Context) {
	if w.o.Alert >= 0 || w.o.Confirmed < 0 {
		return
	}
	firing, err := w.c.firing(ctx)
	if err != nil {
		return
	}
	for _, l := range firing {
		if l[names.LabelLevel] == names.LevelConfirmed && !w.known[l[names.LabelIncident]] {
			w.o.Alert = w.elapsed()
			w.out.line(w.o.Alert, "alert", fmt.Sprintf("%s is firing (%s)", l["alertname"], l["severity"]))
			return
		}
	}
}

func (w *watcher) action(ctx context.Context) {
	if w.o.Acted >= 0 || w.o.Confirmed < 0 {
		return
	}
	var entries []remediation.Entry
	if w.c.get(ctx, w.c.web.URL(w.c.remediator)+"/api/v1/actions", &entries) != nil {
		return
	}
	for _, e := range entries {
		if w.known[e.Alert.Incident] || e.Alert.Level != names.LevelConfirmed {
			continue
		}
		if w.o.Webhook < 0 {
			w.o.Webhook = w.elapsed()
			w.out.line(w.o.Webhook, "webhook", fmt.Sprintf("remediator has journaled it as entry %d", e.Seq))
		}
		if e.State == remediation.Closed {
			w.o.Acted, w.o.Action = w.elapsed(), string(e.Kind)
			w.out.line(w.o.Acted, "action", fmt.Sprintf("policy %s says %s: %s; %s", e.Policy, e.Kind, e.Outcome, e.Detail))
		}
		return
	}
}

// running sees the job make steps again, in a later attempt.
func (w *watcher) running(ctx context.Context) {
	if w.o.Running >= 0 || w.o.Acted < 0 && !w.f.Again {
		return
	}
	if w.c.shrink {
		w.shrunk(ctx)
		return
	}
	var m web.Status
	if w.c.get(ctx, w.c.web.URL(w.c.master)+"/api/v1/status", &m) != nil || int(m.Attempt) <= w.from {
		return
	}
	on := ""
	if w.c.site == nil {
		st, err := w.c.control.Status(ctx)
		if err != nil || int(m.Attempt) != st.Attempt || st.State != "running" {
			return
		}
	} else {
		nodes, err := w.c.site.nodes(ctx)
		if err != nil || len(nodes) == 0 {
			return
		}
		w.o.Nodes, on = nodes, " on "+strings.Join(nodes, ", ")
	}
	// The checkpoint that there was when the attempt was first seen: later ones are its own, and
	// run away from a master that is a second behind.
	if w.resumed < 0 {
		from, err := train.Latest(filepath.Join(w.c.dir, "train"))
		if err != nil {
			return
		}
		w.resumed = from
	}
	if from, step := w.resumed, w.c.program.step(&m); step >= uint64(from)+2 { // a step is done when the next one has begun
		w.o.Running = w.elapsed()
		if w.o.Acted < 0 {
			w.o.Action = "none: its launcher was faster"
		}
		w.out.line(w.o.Running, "running", fmt.Sprintf("attempt %d%s, from the checkpoint at step %d, is at step %d", m.Attempt, on, from, step))
	}
}

// shrunk sees the survivors make steps without the lost rank.
func (w *watcher) shrunk(ctx context.Context) {
	all, err := train.ReadShrinks(filepath.Join(w.c.dir, "train"))
	if err != nil || len(all) == 0 {
		return
	}
	s := all[0]
	losses, err := w.c.losses()
	if err != nil || len(losses) < s.Resumed+2 {
		return
	}
	w.o.Running = s.Step / 1e3
	w.out.line(w.o.Running, "running", fmt.Sprintf("%d of %d ranks, from the checkpoint at step %d: noticed after %.1f ms, shrunk after %.1f ms, first AllReduce ended after %.1f ms",
		s.To, s.From, s.Resumed, s.Noticed, s.Shrink, s.GoodFirst))
	if want := []int{w.f.Rank}; !slices.Equal(s.Lost, want) {
		w.o.Wrong = append(w.o.Wrong, fmt.Sprintf("the survivors left out ranks %v, not %v", s.Lost, want))
	}
}

// judge compares what was said with what was done.
func (w *watcher) judge() {
	o := &w.o
	wrong := func(format string, args ...any) { o.Wrong = append(o.Wrong, fmt.Sprintf(format, args...)) }
	switch {
	case o.Confirmed < 0:
		wrong("no confirmed verdict after %.1f s", w.elapsed())
		return
	case o.GotClass != o.Class:
		wrong("class is %s, not %s", o.GotClass, o.Class)
	}
	if o.GotCulprit != o.Culprit && !slices.Contains(w.f.Or, o.GotCulprit) {
		wrong("culprit is %s, not %s", o.GotCulprit, o.Culprit)
	}
	if o.Running < 0 {
		wrong("the job does not run again after %.1f s", w.elapsed())
	}
	if w.f.Node != "" && slices.Contains(o.Nodes, w.f.Node) {
		wrong("the job runs on %s again, which is out", w.f.Node)
	}
}

// printer writes the story.
type printer struct {
	w     io.Writer
	color bool
}

var tint = map[string]string{"fault": "31", "verdict": "33", "alert": "35", "webhook": "36", "action": "34", "running": "32", "trace": "36"}

func (p *printer) paint(code, s string) string {
	if !p.color || code == "" {
		return s
	}
	return "\x1b[" + code + "m" + s + "\x1b[0m"
}

func (p *printer) line(at float64, what, text string) {
	fmt.Fprintf(p.w, "  %7.2f s  %s %s\n", at, p.paint(tint[what], fmt.Sprintf("%-8s", what)), text)
}

func (p *printer) more(text string) {
	fmt.Fprintf(p.w, "             %s %s\n", strings.Repeat(" ", 8), p.paint("2", text))
}

func (p *printer) say(format string, args ...any) { fmt.Fprintf(p.w, format+"\n", args...) }
