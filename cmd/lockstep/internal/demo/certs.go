package demo

import (
	"time"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/collector/wire/pki"
)

// certs issues what the parts of the demo know each other by: the demo runs as a
// cluster would, with authentication everywhere.
type certs struct{ ca *pki.Authority }

func newCerts(dir string) (certs, error) {
	ca, err := pki.New(dir)
	return certs{ca}, err
}

// flags issues a certificate and returns the command line that uses it.
func (c certs) flags(name string, id wire.Identity, hosts ...string) ([]string, error) {
	id.Domain = "demo.lockstep.local"
	files, err := c.ca.Issue(name, id, hosts, 7*24*time.Hour)
	if err != nil {
		return nil, err
	}
	return []string{"--tls.cert=" + files.CertFile, "--tls.key=" + files.KeyFile, "--tls.ca=" + files.CAFile}, nil
}
