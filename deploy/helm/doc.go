// Command helm writes into the charts beside it what they take from elsewhere in the tree,
// so that each has one source: the remediator's rights (deploy/kubernetes/rbac.yaml, which
// the tests of remediation/kubernetes compare with what it asks for), the rules
// (rules/lockstep.rules.yaml) and the dashboards (dashboards/json).
//
// In flows the working tree; out flow templates/rbac.yaml and files/ of chart lockstep. The
// package's tests read what the charts render to, for the values in testdata: each object
// is what Kubernetes' own types know, the rights are those granted, no container has more
// than it needs, and nothing of a running job belongs to a chart.
package main

//go:generate go run .
