// Package local runs a real Prometheus, a real Alertmanager and a real Jaeger as child
// processes on loopback, for the demo and for the tests.
//
// In: the scrape targets, the rule files and the webhook to call. Out: the
// URLs of both servers, and errors that quote the log of a server that died.
// [Find] takes their programs from PATH when they are recent enough and else
// builds them, once, from the Go modules pinned in modules/ into the user's
// cache, so that it also works where no repository is checked out.
//
// It is not a deployment for production: loopback only, data that lives as
// long as Config.Dir. With Config.Web the first two and what they ask are behind
// TLS and a password; Jaeger is not.
//
// To update a pin, copy modules/X.mod and X.sum to go.mod and go.sum of an
// empty folder, run go get -tool PACKAGE@VERSION and go mod tidy there, and
// copy them back. Jaeger's sums begin as a copy of its own go.sum: a module that it needs is no longer
// in the checksum database.
package local
