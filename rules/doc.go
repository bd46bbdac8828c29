// Package rules holds Lockstep's Prometheus alerting rules as Go.
//
// In: the metrics of exporters/names, which are the only ones a rule can name,
// and a [Config] of thresholds. Out: [Generate] writes a rules file;
// lockstep.rules.yaml is what it writes for [DefaultConfig]. The alerts that a
// master's verdicts raise carry the verdict in their labels, which is all that
// the remediator reads; the fallbacks tell hang from slowness, and
// communication from the rest, out of the agents' metrics alone while no master
// answers; the others watch the pipeline itself.
//
// It decides nothing: verdicts are debounced by the master and acted on by the
// remediator's policy. Every alert has a page in docs/runbooks and a promtool
// test in testdata.
package rules

//go:generate go run ./internal/gen -o lockstep.rules.yaml
