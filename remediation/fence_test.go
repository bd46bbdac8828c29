package remediation

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// fencer answers as told, and waits for as long as it may where it is to.
type fencer struct {
	act   *fake
	proof Proof
	err   error
	wait  bool
	asked chan string
}

func (f *fencer) Fence(ctx context.Context, job string, attempt int, node string) (Proof, error) {
	if f.act != nil && f.act.count() > 0 {
		return Proof{}, errors.New("asked after it was done")
	}
	f.asked <- fmt.Sprint(job, " ", attempt, " ", node)
	if f.wait {
		<-ctx.Done()
	}
	return f.proof, f.err
}

// selfFencing is an actuator that needs nobody.
type selfFencing struct{ *fake }

func (selfFencing) FencesItself(k ActionKind) bool { return k == ActionRestart }

func attempted(n string) func(labels map[string]string, a map[string]any) {
	return func(labels map[string]string, _ map[string]any) { labels[names.LabelAttempt] = n }
}

func TestProofBeforeActing(t *testing.T) {
	yes := true
	for name, tt := range map[string]struct {
		f       *fencer
		act     bool // without proof
		self    bool
		outcome Outcome
		result  string
	}{
		"proven":                {f: &fencer{proof: Proof{Proven: true, How: "4 processes are gone"}}, outcome: OutcomeDone, result: fenceProven},
		"not in time":           {f: &fencer{proof: Proof{Proven: false, How: "node n3 is not heard"}, wait: true}, outcome: OutcomeUnfenced, result: fenceUnproven},
		"not, and it may act":   {f: &fencer{proof: Proof{Proven: false, How: "node n3 is not heard"}}, act: true, outcome: OutcomeDone, result: fenceUnproven},
		"nobody can be asked":   {f: &fencer{err: errors.New("connection refused")}, outcome: OutcomeUnfenced, result: fenceError},
		"nobody, and it may":    {f: &fencer{err: errors.New("connection refused")}, act: true, outcome: OutcomeDone, result: fenceError},
		"the actuator needs no": {f: &fencer{err: errors.New("asked")}, self: true, outcome: OutcomeDone},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := live()
			cfg.FenceTimeout /= 600 // 100 ms
			cfg.Policies = []Policy{{Name: "all", Action: ActionRestart}}
			if tt.act {
				cfg.Policies[0].ActWithoutProof = &yes
			}
			act := &fake{}
			tt.f.act, tt.f.asked = act, make(chan string, 9)
			g := startWith(t, "", cfg, act, func(o *Options) {
				if o.Fencer = tt.f; tt.self {
					o.Actuator = selfFencing{act}
				}
			})
			g.send(alert("i1", attempted("6")))
			e := g.closed()
			if e.Outcome != tt.outcome || (act.count() == 1) != (tt.outcome == OutcomeDone) {
				t.Errorf("%s, done %d times: %s", e.Outcome, act.count(), e.Detail)
			}
			if tt.self {
				if e.Fence != nil || len(tt.f.asked) != 0 {
					t.Errorf("%+v, asked %d times", e.Fence, len(tt.f.asked))
				}
				return
			}
			if asked := <-tt.f.asked; asked != "j 6 " {
				t.Errorf("asked for %q", asked)
			}
			if e.Fence == nil || e.Fence.Attempt != 6 || e.Fence.Proven != (tt.result == fenceProven) || e.Fence.How == "" || e.Fence.Ended.Before(e.Fence.Asked) {
				t.Errorf("%+v", e.Fence)
			}
			if tt.outcome == OutcomeUnfenced && (!strings.Contains(e.Detail, "no proof that nothing of attempt 6 goes on: "+e.Fence.How) || !e.Started.IsZero()) {
				t.Errorf("%+v", e)
			}
			if n := testutil.ToFloat64(g.r.m.fences.WithLabelValues(tt.result)); n != 1 {
				t.Errorf("%s is counted %v times", tt.result, n)
			}
			if a := act.acts; tt.outcome == OutcomeDone && a[0].ActWithoutProof != tt.act {
				t.Errorf("%+v", a[0])
			}
		})
	}
}

// TestKilledWhileItWaitsForProof: the next one asks again, and acts once.
func TestKilledWhileItWaitsForProof(t *testing.T) {
	act := &fake{}
	journal := filepath.Join(t.TempDir(), "j.db")
	f := &fencer{act: act, wait: true, proof: Proof{}, asked: make(chan string, 9)}
	g := startWith(t, journal, live(), act, func(o *Options) { o.Fencer = f })
	g.send(alert("i1", attempted("6")))
	<-f.asked
	g.stop()
	if act.count() != 0 {
		t.Fatal("it has acted without proof")
	}
	f = &fencer{act: act, proof: Proof{Proven: true, How: "gone"}, asked: make(chan string, 9)}
	g = startWith(t, journal, live(), act, func(o *Options) { o.Fencer = f })
	if e := g.closed(); e.Outcome != OutcomeDone || act.count() != 1 || e.Fence == nil || !e.Fence.Proven {
		t.Errorf("%+v", e)
	}
}

func TestFencersAreAllAsked(t *testing.T) {
	asked := make(chan string, 9)
	a, b := &fencer{proof: Proof{Proven: true, How: "pods gone"}, asked: asked}, &fencer{proof: Proof{Proven: true, How: "agents say so"}, asked: asked}
	ask := func() (Proof, error) { return Fencers{a, b}.Fence(t.Context(), "j", 1, "n") }
	if p, err := ask(); err != nil || !p.Proven || p.How != "pods gone; agents say so" {
		t.Errorf("%+v, %v", p, err)
	}
	b.proof.Proven = false
	if p, err := ask(); err != nil || p.Proven {
		t.Errorf("%+v, %v", p, err)
	}
	b.err = errors.New("down")
	if p, err := ask(); err == nil || p.Proven {
		t.Errorf("%+v, %v", p, err)
	}
	if p, _ := (Fencers{}).Fence(t.Context(), "j", 1, ""); p.Proven {
		t.Error("nobody has proven it")
	}
}
