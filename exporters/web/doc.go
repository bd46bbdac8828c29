// Package web is the HTTP front of every component: a landing page, /metrics,
// /-/healthy, /-/ready, and on the master the status page for people (/status)
// and for scripts (/api/v1/status).
//
// In flow handlers, the master's snapshots and its view of the ranks; out flow
// pages rendered on the server, with nothing fetched from elsewhere, so they
// work from a terminal browser on a locked-down network. One small script, which
// the policy names by its hash, brings the page up to date in place: focus and
// what was opened stay. Without it the page reloads. TLS and basic authentication
// come from exporter-toolkit's --web.config.file, as with every Prometheus
// exporter. Profiling, when asked for, has a listener of its own.
//
// It changes nothing: no page acts on a job. Actions are the remediator's.
package web
