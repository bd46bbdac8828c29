// Package monitoring is `lockstep rules` and `lockstep dashboards`: rules, routes and
// dashboards as an operator deploys them.
//
// In flows one YAML file with what a site wants otherwise (thresholds, where runbooks
// and Grafana are, labels, addresses); out flow files for Prometheus and Alertmanager
// as they are, and the same as objects for the Prometheus operator and Grafana's
// sidecar. It contacts nobody. What it writes is what packages rules and dashboards
// hold; only the packing is here, and Alertmanager's routes, because they are about
// which alert matters beside which other one.
package monitoring
