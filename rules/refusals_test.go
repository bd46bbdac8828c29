package rules_test

import (
	"regexp"
	"slices"
	"testing"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"

	"github.com/lockstep-ccl/lockstep/collector/source/recorder"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/record"
	"github.com/lockstep-ccl/lockstep/remediation/process"
	"github.com/lockstep-ccl/lockstep/rules"
)

// ofRefusals are counters of whom somebody turned away, by their names.
var ofRefusals = regexp.MustCompile(`_(refused|denied|rejected|disbelieved|foreign|duplicate|crowded)(_|$)`)

// TestEveryRefusalIsTold: a counter of refusals is in the table of docs/design/trust.md with each of its reasons, once. The
// alert that the table names tells of it; of what the table says that none does, none does.
func TestEveryRefusalIsTold(t *testing.T) {
	reasons := map[*names.Metric][]string{names.WebRefused: names.WebRefusals}
	for r := range record.NumRefusals {
		reasons[names.RankRefused] = append(reasons[names.RankRefused], r.String())
	}
	for _, r := range recorder.Refusals() {
		reasons[names.RecordersRefused] = append(reasons[names.RecordersRefused], r.String())
	}
	for _, r := range process.RefusalReasons() {
		reasons[names.CoordinatorRefused] = append(reasons[names.CoordinatorRefused], string(r))
	}
	known := map[*names.Metric][]string{}
	for _, r := range names.Refusals() {
		if (r.Alert == "") == (r.Why == "") || r.Test == "" || r.What == "" {
			t.Errorf("%s: want an alert, or why there is none, and a test: %+v", r.Metric, r)
		}
		known[r.Metric] = append(known[r.Metric], r.Reasons...)
	}
	for _, m := range names.Metrics() {
		if m.Type != names.Counter || !ofRefusals.MatchString(m.Name) {
			continue
		}
		got, there := known[m]
		if !there {
			t.Errorf("%s is not in names.Refusals: who hears of it?", m)
		}
		want := slices.Clone(reasons[m])
		slices.Sort(want)
		slices.Sort(got)
		if want != nil && !slices.Equal(got, want) {
			t.Errorf("%s has the reasons %q, names.Refusals %q", m, want, got)
		}
	}

	// selects are the series that each alert looks at.
	selects := map[string][]*parser.VectorSelector{}
	alerts, _ := parse(t, generate(t, rules.DefaultConfig()))
	for _, a := range alerts {
		expr, err := parser.NewParser(parser.Options{}).ParseExpr(a.Expr)
		if err != nil {
			t.Fatal(err)
		}
		parser.Inspect(expr, func(n parser.Node, _ []parser.Node) error {
			if v, ok := n.(*parser.VectorSelector); ok {
				selects[a.Alert] = append(selects[a.Alert], v)
			}
			return nil
		})
	}
	tells := func(alert string, m *names.Metric, reason string) bool {
		return slices.ContainsFunc(selects[alert], func(v *parser.VectorSelector) bool {
			return v.Name == m.Name && !slices.ContainsFunc(v.LabelMatchers, func(l *labels.Matcher) bool {
				return (l.Name == names.LabelReason || l.Name == names.LabelResult || l.Name == names.LabelOutcome) && !l.Matches(reason)
			})
		})
	}
	for _, r := range names.Refusals() {
		all := r.Reasons
		if all == nil {
			all = []string{""}
		}
		for _, reason := range all {
			if r.Alert != "" && !tells(r.Alert, r.Metric, reason) {
				t.Errorf("%s does not tell of %s %s", r.Alert, r.Metric, reason)
			}
			for alert := range selects {
				if alert != r.Alert && tells(alert, r.Metric, reason) {
					t.Errorf("%s tells of %s %s, and the table says otherwise", alert, r.Metric, reason)
				}
			}
		}
	}
}
