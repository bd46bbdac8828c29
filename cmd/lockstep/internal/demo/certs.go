package demo

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/collector/wire/pki"
	"github.com/lockstep-ccl/lockstep/deploy/local"
)

// certs issues what the parts of the demo know each other by: the demo runs as a
// cluster would, with authentication everywhere.
type certs struct{ ca *pki.Authority }

const (
	certLife = 7 * 24 * time.Hour
	webUser  = "demo"
)

func newCerts(dir string) (certs, error) {
	ca, err := pki.New(dir)
	return certs{ca}, err
}

// flags issues a certificate and returns the command line that uses it.
func (c certs) flags(name string, id wire.Identity, hosts ...string) ([]string, error) {
	id.Domain = "demo.lockstep.local"
	files, err := c.ca.Issue(name, id, hosts, certLife)
	if err != nil {
		return nil, err
	}
	return []string{"--tls.cert=" + files.CertFile, "--tls.key=" + files.KeyFile, "--tls.ca=" + files.CAFile}, nil
}

// closeWeb makes what the web listeners are closed by: a password of this run's own, and
// certificates that speak for no part.
func (c *cluster) closeWeb(certs certs) error {
	dir := filepath.Join(c.dir, "web")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	server, err := certs.ca.IssueWeb("web", []string{"127.0.0.1", "localhost"}, certLife)
	if err != nil {
		return err
	}
	client, err := certs.ca.IssueWeb("web-client", nil, certLife)
	if err != nil {
		return err
	}
	w := &local.Web{
		Serve:  local.KeyPair{CertFile: server.CertFile, KeyFile: server.KeyFile},
		Ask:    local.KeyPair{CertFile: client.CertFile, KeyFile: client.KeyFile},
		CAFile: server.CAFile, User: webUser, PasswordFile: filepath.Join(dir, "password"),
	}
	if err := local.WritePassword(w.PasswordFile); err != nil {
		return err
	}
	for file, mutual := range map[string]bool{webPassword: false, webMutual: true} {
		if err := w.WriteConfig(filepath.Join(dir, file), mutual); err != nil {
			return err
		}
	}
	if c.client, err = w.Client(); err != nil {
		return err
	}
	c.web = w
	return w.WriteCurl(filepath.Join(dir, "curl"))
}

// Files of web configuration. The remediator's doors have tokens, which come where a password
// would: it asks for a certificate instead.
const (
	webPassword = "password.yml"
	webMutual   = "mutual.yml"
)

// webFlags is a part's web listener.
func (c *cluster) webFlags(address, config string) []string {
	flags := []string{"--web.listen-address", address}
	if c.web != nil {
		flags = append(flags, "--web.config.file", filepath.Join(c.dir, "web", config))
	}
	return flags
}

// signIn says how a person gets at the pages.
func (c *cluster) signIn(out *printer) {
	if c.web == nil {
		return
	}
	out.say("  %-14s user %s, password in %s; the certificates are this run's own (%s):", "sign in", c.web.User, c.web.PasswordFile, c.web.CAFile)
	out.say("  %-14s a browser warns of them once for each port (go on), then asks for user and password", "")
	out.say("  %-14s curl -K %s %s", "", filepath.Join(c.dir, "web", "curl"), c.web.URL(c.master)+"/api/v1/status")
	out.say("  %-14s lockstep top --master %s --ca %s --password-file %s", "", fmt.Sprintf("https://%s@%s", c.web.User, c.master), c.web.CAFile, c.web.PasswordFile)
	out.say("  %-14s lockstep demo --open-web: plain pages, on loopback, without a password", "")
}
