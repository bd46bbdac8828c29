package elastic_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/remediation"
	"github.com/lockstep-ccl/lockstep/remediation/elastic"
	"github.com/lockstep-ccl/lockstep/remediation/process"
)

type fencer struct {
	proof remediation.Proof
	err   error
	asked []int
}

func (f *fencer) Fence(_ context.Context, _ string, attempt int, node string) (remediation.Proof, error) {
	if node != "" {
		return remediation.Proof{}, errors.New("asked for one node")
	}
	f.asked = append(f.asked, attempt)
	return f.proof, f.err
}

func TestAct(t *testing.T) {
	f := &fencer{}
	a := &elastic.Actuator{Fencer: f, Knows: func(job string) bool { return job == "llm" }}
	six := 6
	restart := remediation.Action{ID: "x", Job: "llm", Kind: remediation.ActionRestart, Attempt: &six}
	for name, tt := range map[string]struct {
		change  func(*remediation.Action)
		proof   remediation.Proof
		err     error
		done    bool
		message string
	}{
		"done":              {proof: remediation.Proof{Proven: true, How: "4 ended"}, done: true, message: "4 ended"},
		"no proof":          {proof: remediation.Proof{How: "node n3 is not heard"}, message: "n3"},
		"none, and no need": {change: func(a *remediation.Action) { a.ActWithoutProof = true }, proof: remediation.Proof{How: "node n3 is not heard"}, done: true, message: "n3"},
		"nobody answers":    {err: errors.New("refused"), message: "refused"},
		"exclude":           {change: func(a *remediation.Action) { a.Kind = remediation.ActionExclude }, message: "places its ranks itself"},
		"no attempt":        {change: func(a *remediation.Action) { a.Attempt = nil }, message: "which attempt"},
		"another's job":     {change: func(a *remediation.Action) { a.Job = "other" }, message: "gone"},
	} {
		act := restart
		if tt.change != nil {
			tt.change(&act)
		}
		f.proof, f.err = tt.proof, tt.err
		answer, err := a.Act(t.Context(), act)
		if (err == nil) != tt.done || answer.At.IsZero() == tt.done {
			t.Errorf("%s: %+v, %v", name, answer, err)
		}
		if text := answer.Detail; err == nil && !strings.Contains(text, tt.message) || err != nil && !strings.Contains(err.Error(), tt.message) {
			t.Errorf("%s: %q, %v", name, text, err)
		}
	}
	if len(f.asked) != 4 || f.asked[0] != 6 {
		t.Errorf("asked for %v", f.asked)
	}
}

func TestFirst(t *testing.T) {
	f := &fencer{proof: remediation.Proof{Proven: true}}
	all := elastic.First{
		&process.Actuator{Socket: func(string) (string, bool) { return "", false }},
		&elastic.Actuator{Fencer: f, Knows: func(job string) bool { return job == "llm" }},
	}
	six := 6
	if a, err := all.Act(t.Context(), remediation.Action{Job: "llm", Kind: remediation.ActionRestart, Attempt: &six}); err != nil || a.At.IsZero() {
		t.Errorf("%+v, %v", a, err)
	}
	if _, err := all.Act(t.Context(), remediation.Action{Job: "other", Kind: remediation.ActionRestart, Attempt: &six}); !errors.Is(err, remediation.ErrGone) {
		t.Error(err)
	}
	if inv, err := all.Inventory(t.Context(), "llm"); err != nil || inv.Unit(3) != "" {
		t.Errorf("%+v, %v", inv, err)
	}
	if !all.FencesItself(remediation.ActionRestart) || all.Name() != "process, elastic" {
		t.Error(all.Name())
	}
	if _, err := (elastic.First{}).Inventory(t.Context(), "llm"); !errors.Is(err, remediation.ErrGone) {
		t.Error(err)
	}
}
