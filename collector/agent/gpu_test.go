package agent

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// A rank's GPU is reported when it changes, and not otherwise.
func TestReportsGPUs(t *testing.T) {
	p := process()
	r := &rank{p: p, job: &job{}}
	report := func() *wire.Rank {
		var rep wire.Report
		r.report(&rep, 100)
		if len(rep.Ranks) == 0 {
			return nil
		}
		return rep.Ranks[0]
	}
	if w := report(); w == nil || w.Gpu != nil || w.Xid != 0 {
		t.Fatalf("without a GPU: %v", w)
	}
	p.Xid = 79
	p.GPU = diagnosis.GPU{Seen: true, Index: 3, XidAt: 1, LostAt: 2, ThrottledAt: 3, Throttle: diagnosis.ThrottleHWThermal, UnresponsiveAt: 4}
	w := report()
	if w == nil || w.Xid != 79 || w.Gpu == nil {
		t.Fatalf("with one: %v", w)
	}
	if g := w.Gpu; g.Index != 3 || g.MonoXidNs != 1 || g.MonoLostNs != 2 || g.MonoThrottledNs != 3 || g.Throttle != 0x40 || g.MonoUnresponsiveNs != 4 {
		t.Errorf("GPU: %v", g)
	}
	if w := report(); w != nil {
		t.Errorf("unchanged, and reported again: %v", w)
	}
}

type fake struct {
	err  error
	gpus *collector.GPUs
}

func (f *fake) Update(v *source.View) error {
	v.GPUs = f.gpus
	return f.err
}

// A source without hardware is up and has no data; one that fails is down.
// An agent whose passes do not end is not ready.
func TestReady(t *testing.T) {
	a := newAgent(t)
	if err := a.Ready(); err != nil {
		t.Error(err)
	}
	a.snapshot.Store(&collector.AgentSnapshot{At: time.Now().Add(-time.Minute)})
	if err := a.Ready(); err == nil {
		t.Error("ready a minute after its last pass")
	}
}

func TestSourceStatus(t *testing.T) {
	f := &fake{err: fmt.Errorf("%w: no library", source.ErrNoData)}
	a, err := New(Options{Node: "n", Dir: t.TempDir(), Sources: []NamedSource{{"nvml", f}}})
	if err != nil {
		t.Fatal(err)
	}
	last := func() collector.SourceStatus {
		a.update(t.Context(), 1)
		a.publish()
		s := a.Snapshot()
		if s.GPUs != f.gpus {
			t.Errorf("the snapshot has %v, the source %v", s.GPUs, f.gpus)
		}
		return s.Sources[len(s.Sources)-1]
	}
	if s := last(); !s.Up || !s.NoData || s.Err != "" {
		t.Errorf("no data: %+v", s)
	}
	f.err, f.gpus = errors.New("hangs"), &collector.GPUs{UnresponsiveAt: 1}
	if s := last(); s.Up || s.NoData || s.Err != "hangs" {
		t.Errorf("failing: %+v", s)
	}
	f.err = nil
	if s := last(); !s.Up || s.NoData || s.Err != "" {
		t.Errorf("well: %+v", s)
	}
}
