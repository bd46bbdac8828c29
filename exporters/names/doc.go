// Package names defines every metric, label and span attribute of Lockstep
// once. Exporters build their series from it; rules and dashboards can only
// refer to a metric through its variable here, so a renamed metric breaks the
// build and not an alert.
//
// Nothing flows in. Out flow the definitions, and docs/metrics.md, which
// internal/gendocs writes from them.
//
// It holds no values and imports neither Prometheus nor OpenTelemetry: a
// package that only names a metric pays for nothing else. Conventions (prefix,
// base units, _total, labels from the constants) are tested here, not left to
// review.
package names

//go:generate go run ./internal/gendocs -o ../../docs/metrics.md
