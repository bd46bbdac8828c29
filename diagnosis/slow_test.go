package diagnosis_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/diagnosistest"
)

// TestUnevenPipeline: a last stage that also computes the loss does more work than
// the others. Its ranks are no stragglers, also where all stages share a communicator.
func TestUnevenPipeline(t *testing.T) {
	var faults []diagnosistest.Fault
	for r := 12; r < 16; r++ {
		faults = append(faults, diagnosistest.Fault{Kind: diagnosistest.SlowRank, Rank: r, Factor: 3})
	}
	for seed := range uint64(4) {
		cfg := diagnosistest.Config{Seed: seed, DP: 2, TP: 2, PP: 4, World: true, NoSteps: seed%2 == 0, Faults: faults}
		if h := run(cfg, time.Minute); len(h.first) != 0 {
			t.Errorf("%+v\n%s", cfg, h)
		}
	}
}

func TestSharedSlowdownsAreNobodys(t *testing.T) {
	h := run(diagnosistest.Config{Seed: 5, Faults: []diagnosistest.Fault{{Kind: diagnosistest.SlowAll, At: 10 * time.Second, Until: 40 * time.Second, Factor: 4}}}, time.Minute)
	if len(h.first) != 0 {
		t.Error(h)
	}
}

func TestSlowFaultsEnd(t *testing.T) {
	for _, f := range []diagnosistest.Fault{
		{Kind: diagnosistest.SlowRank, Rank: 2, Factor: 4},
		{Kind: diagnosistest.SlowConn, Rank: 2, Peer: 0, Factor: 60},
	} {
		f.At, f.Until = 10*time.Second, 25*time.Second
		j, e, h := diagnosistest.New(diagnosistest.Config{Seed: 8, Faults: []diagnosistest.Fault{f}}), diagnosis.New(diagnosis.Config{}), newHistory()
		watch(j, e, h, f.Until)
		if len(h.last) != 1 || h.last[0].Level != diagnosis.Confirmed || h.last[0].Culprits[0].Rank != 2 {
			t.Errorf("%+v: %v\n%s", f, h.last, h)
		}
		watch(j, e, h, 10*time.Second)
		if len(h.last) != 0 || len(h.confirmed) != 1 {
			t.Errorf("%+v: still %v\n%s", f, h.last, h)
		}
	}
}

// TestSlowVerdictsKeepTheirNames: a verdict's communicator and culprit are labels of
// an alert, which is another alert when they change.
func TestSlowVerdictsKeepTheirNames(t *testing.T) {
	for seed := range uint64(4) {
		for _, f := range []diagnosistest.Fault{
			{Kind: diagnosistest.SlowRank, At: 8 * time.Second, Rank: 2, Factor: 4},
			{Kind: diagnosistest.SlowConn, At: 8 * time.Second, Rank: 2, Peer: 4, Factor: 60},
		} {
			cfg := diagnosistest.Config{DP: 4, World: true, Seed: seed, Faults: []diagnosistest.Fault{f}}
			j, e := diagnosistest.New(cfg), diagnosis.New(diagnosis.Config{})
			names := map[string]bool{}
			for j.Now() < 40*time.Second {
				j.Advance(passEvery)
				for _, v := range e.Diagnose(j.Evidence()) {
					if v.Level == diagnosis.Confirmed {
						names[fmt.Sprint(v.Class, v.CommName, v.Culprits[0])] = true
					}
				}
			}
			if len(names) != 1 {
				t.Errorf("seed %d, %+v: told under %d names: %v", seed, f, len(names), names)
			}
		}
	}
}

func TestSlowFromTheStart(t *testing.T) {
	h := run(diagnosistest.Config{DP: 4, Seed: 9, Faults: []diagnosistest.Fault{{Kind: diagnosistest.SlowRank, Rank: 6, Factor: 4}}}, 20*time.Second)
	if _, ok := h.confirmed["noncommunication_slow rank 6 straggler"]; !ok || len(h.first) != 1 {
		t.Error(h)
	}
}

func TestSlowNode(t *testing.T) {
	var faults []diagnosistest.Fault
	for r := range 4 {
		faults = append(faults, diagnosistest.Fault{Kind: diagnosistest.SlowRank, At: 10 * time.Second, Rank: 4 + r, Factor: 3})
	}
	h := run(diagnosistest.Config{DP: 4, TP: 4, PP: 1, Seed: 10, Faults: faults}, 25*time.Second)
	if _, ok := h.confirmed["noncommunication_slow nodeb straggler"]; !ok {
		t.Error(h)
	}
}

func TestStragglerIsSeenByItsArrivals(t *testing.T) {
	cfg := diagnosistest.Config{Seed: 11, MapError: 50 * time.Millisecond, Faults: []diagnosistest.Fault{{Kind: diagnosistest.SlowRank, At: 10 * time.Second, Rank: 2, Factor: 4}}}
	h := run(cfg, 25*time.Second)
	if !strings.Contains(h.String(), "entered last in") {
		t.Errorf("clocks that differ by up to 100 ms hide who entered last:\n%s", h)
	}
}
