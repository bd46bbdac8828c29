// Command helm writes the remediator's rights into chart lockstep, from their one source:
// deploy/kubernetes/rbac.yaml, which the tests of remediation/kubernetes compare with what
// it asks for. Rules and dashboards have one source too: the chart's files are links to
// rules/lockstep.rules.yaml and dashboards/json, which helm follows.
//
// In flows the working tree; out flows templates/rbac.yaml of the chart. The package's tests
// read what the charts render to, for the values in testdata: each object is what
// Kubernetes' own types know, the rights are those granted, no container has more than it
// needs, and nothing of a running job belongs to a chart.
package main

//go:generate go run .
