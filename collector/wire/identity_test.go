package wire_test

import (
	"crypto/x509"
	"net/url"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lockstep-ccl/lockstep/collector/wire"
)

func TestIdentityIsWhatItWasIssuedFor(t *testing.T) {
	for _, id := range []wire.Identity{
		{Domain: "d", Role: wire.RoleAgent, Node: "gpu-01.example"},
		{Domain: "d", Role: wire.RoleAgent, Node: "n", Jobs: []string{"a", "b-1"}},
		{Domain: "d", Role: wire.RoleMaster, Jobs: []string{"llm"}},
		{Domain: "d", Role: wire.RoleRemediator},
		{Domain: "d", Role: wire.RolePlanner},
	} {
		other := &url.URL{Scheme: "spiffe", Host: "d", Path: "/ns/x/sa/y"}
		got, err := wire.IdentityIn(&x509.Certificate{URIs: append(id.URIs(), other)})
		if d := cmp.Diff(id, got); err != nil || d != "" {
			t.Errorf("%s: %v %s", id, err, d)
		}
	}
}

func TestIdentityErrors(t *testing.T) {
	for uris, want := range map[string]string{
		"":                                   "has no name",
		"https://d/lockstep/agent/n":         "has no name",
		"spiffe://d/lockstep/king":           "means nothing",
		"spiffe://d/lockstep/agent/a%2Fb":    "no SPIFFE ID",
		"spiffe://d/lockstep/agent/..":       "node name",
		"spiffe://d/lockstep/agent/n/job/A_": "job name",
		"spiffe://d/lockstep/master/":        "job name",
		"spiffe://d/lockstep/agent/n spiffe://d/lockstep/agent/m":             "another identity",
		"spiffe://d/lockstep/agent/n spiffe://d/lockstep/remediator":          "another identity",
		"spiffe://d/lockstep/agent/n spiffe://e/lockstep/agent/n":             "another identity",
		"spiffe://d/lockstep/agent/n/job/a spiffe://d/lockstep/agent/n":       "all jobs, or each",
		"spiffe://d/lockstep/agent/n spiffe://d/lockstep/agent/n/job/a":       "all jobs, or each",
		"spiffe://d/lockstep/agent/n/job/a spiffe://d/lockstep/agent/m/job/a": "another identity",
	} {
		cert := &x509.Certificate{}
		for _, s := range strings.Fields(uris) {
			u, err := url.Parse(s)
			if err != nil {
				t.Fatal(err)
			}
			cert.URIs = append(cert.URIs, u)
		}
		if id, err := wire.IdentityIn(cert); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, %v; want %q", uris, id, err, want)
		}
	}
}

func TestWhoMayWhat(t *testing.T) {
	all := wire.Identity{Domain: "d", Role: wire.RoleAgent, Node: "n"}
	some := wire.Identity{Domain: "d", Role: wire.RoleAgent, Node: "n", Jobs: []string{"a"}}
	master := wire.Identity{Domain: "d", Role: wire.RoleMaster, Jobs: []string{"a"}}
	remediator := wire.Identity{Domain: "d", Role: wire.RoleRemediator}
	for what, c := range map[string]struct {
		err  error
		good bool
	}{
		"an agent of its node":           {all.Agent("n", "b"), true},
		"an agent of another node":       {all.Agent("m", "b"), false},
		"an agent of its job":            {some.Agent("n", "a"), true},
		"an agent of another job":        {some.Agent("n", "b"), false},
		"a master as agent":              {master.Agent("", "a"), false},
		"a master of its job":            {master.Master("a"), true},
		"a master of another job":        {master.Master("b"), false},
		"an agent as master":             {some.Master("a"), false},
		"a remediator":                   {remediator.Remediator(), true},
		"a remediator as master":         {remediator.Master("a"), false},
		"a master as remediator":         {master.Remediator(), false},
		"an agent as remediator":         {all.Remediator(), false},
		"a planner":                      {wire.Identity{Domain: "d", Role: wire.RolePlanner}.Planner(), true},
		"an agent as planner":            {all.Planner(), false},
		"a certificate without identity": {wire.Identity{}.Agent("", ""), false},
	} {
		if (c.err == nil) != c.good {
			t.Errorf("%s: %v", what, c.err)
		}
	}
}

func FuzzIdentity(f *testing.F) {
	f.Add("spiffe://d/lockstep/agent/n/job/a")
	f.Add("spiffe://d/lockstep/master/a")
	f.Fuzz(func(t *testing.T, s string) {
		u, err := url.Parse(s)
		if err != nil {
			return
		}
		id, err := wire.IdentityIn(&x509.Certificate{URIs: []*url.URL{u}})
		if err != nil {
			return
		}
		again, err := wire.IdentityIn(&x509.Certificate{URIs: id.URIs()})
		if d := cmp.Diff(id, again); err != nil || d != "" {
			t.Errorf("%q: %v %s", s, err, d)
		}
	})
}

// A name is read in one form only: what two readers could read differently is nobody's.
func TestOnlyPlainSPIFFEIDs(t *testing.T) {
	for _, bad := range []string{
		"spiffe://user@d/lockstep/remediator", "spiffe://d:1/lockstep/remediator", "spiffe://d/lockstep/remediator?x", "spiffe://d/lockstep/remediator#x",
		"spiffe://d/lockstep/%72emediator", "spiffe://D/lockstep/remediator", "spiffe:///lockstep/remediator",
	} {
		u, err := url.Parse(bad)
		if err != nil {
			t.Fatal(err)
		}
		if id, err := wire.IdentityIn(&x509.Certificate{URIs: []*url.URL{u}}); err == nil {
			t.Errorf("%s: %v", bad, id)
		}
	}
}
