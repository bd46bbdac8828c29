package remediation

import (
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// TestRefusalsAreKnown: why alerts and webhooks are refused is what names.Refusals says.
func TestRefusalsAreKnown(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	if _, err := newMetrics(reg, false, false); err != nil {
		t.Fatal(err)
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for m, good := range map[*names.Metric][]string{
		names.Disbelieved: nil,
		names.Webhooks:    {resultAccepted, resultDuplicate, resultResolved, resultStale},
	} {
		want := slices.Clone(good)
		for _, r := range names.Refusals() {
			if r.Metric == m {
				want = append(want, r.Reasons...)
			}
		}
		var got []string
		for _, f := range families {
			for _, s := range f.GetMetric() {
				if f.GetName() == m.Name {
					got = append(got, s.GetLabel()[0].GetValue())
				}
			}
		}
		slices.Sort(got)
		slices.Sort(want)
		if len(got) == 0 || !slices.Equal(got, want) {
			t.Errorf("%s has %q, names.Refusals and what is taken %q", m, got, want)
		}
	}
}
