// Package wiretest makes the certificates that tests of mutual TLS need.
package wiretest

import (
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/collector/wire/pki"
)

// Domain is the trust domain of an Authority's certificates.
const Domain = "test.example"

// Authority signs certificates into a directory of a test's.
type Authority struct {
	t    testing.TB
	dir  string
	ca   *pki.Authority
	Life time.Duration // of the certificates that it issues
}

// NewAuthority returns an authority with a certificate of its own.
func NewAuthority(t testing.TB) *Authority {
	a := &Authority{t: t, dir: t.TempDir(), Life: time.Hour}
	a.Renew()
	return a
}

// Renew replaces the authority's key and certificate: what it signed is void.
func (a *Authority) Renew() {
	a.t.Helper()
	var err error
	if a.ca, err = pki.New(a.dir); err != nil {
		a.t.Fatal(err)
	}
}

// Agent issues the certificate of a node's agent, for all jobs when none is named,
// over the one that it had.
func (a *Authority) Agent(node string, jobs ...string) wire.TLS {
	return a.issue(strings.Join(append([]string{"agent", node}, jobs...), "-"), wire.Identity{Domain: Domain, Role: wire.RoleAgent, Node: node, Jobs: jobs})
}

// Master issues the certificate of a job's master at 127.0.0.1 or master.example.
func (a *Authority) Master(job string) wire.TLS {
	return a.issue("master-"+job, wire.Identity{Domain: Domain, Role: wire.RoleMaster, Jobs: []string{job}}, "127.0.0.1", "master.example")
}

// Remediator issues the remediator's certificate.
func (a *Authority) Remediator() wire.TLS {
	return a.issue("remediator", wire.Identity{Domain: Domain, Role: wire.RoleRemediator})
}

func (a *Authority) issue(name string, id wire.Identity, hosts ...string) wire.TLS {
	a.t.Helper()
	files, err := a.ca.Issue(name, id, hosts, a.Life)
	if err != nil {
		a.t.Fatal(err)
	}
	return files
}

// Planner issues the fabric's planner's certificate, for loopback.
func (a *Authority) Planner() wire.TLS {
	return a.issue("planner", wire.Identity{Domain: Domain, Role: wire.RolePlanner}, "127.0.0.1", "localhost")
}
