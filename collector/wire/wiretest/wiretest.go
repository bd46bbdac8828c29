// Package wiretest makes the certificates that tests of mutual TLS need.
package wiretest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/wire"
)

// Authority signs certificates into a directory of a test's.
type Authority struct {
	t    testing.TB
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewAuthority returns an authority with a certificate of its own.
func NewAuthority(t testing.TB) *Authority {
	a := &Authority{t: t, dir: t.TempDir()}
	a.Renew()
	return a
}

// Renew replaces the authority's key and certificate: what it signed is void.
func (a *Authority) Renew() {
	a.key, a.cert = a.sign("ca", &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}, nil)
}

// sign writes name.crt and name.key; without a parent, the certificate signs itself.
func (a *Authority) sign(name string, c *x509.Certificate, parent *Authority) (*ecdsa.PrivateKey, *x509.Certificate) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	c.SerialNumber, _ = rand.Int(rand.Reader, big.NewInt(1<<62))
	c.Subject = pkix.Name{CommonName: name}
	c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	signer, by := key, c
	if parent != nil {
		signer, by = parent.key, parent.cert
	}
	der, err := x509.CreateCertificate(rand.Reader, c, by, &key.PublicKey, signer)
	if err != nil {
		a.t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	raw, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	a.write(name+".crt", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	a.write(name+".key", pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: raw}))
	return key, cert
}

func (a *Authority) write(name string, text []byte) {
	if err := os.WriteFile(filepath.Join(a.dir, name), text, 0o600); err != nil {
		a.t.Fatal(err)
	}
}

// Issue signs a certificate, good for an agent and for a master at 127.0.0.1 or
// master.example, over the one of that name if there is one.
func (a *Authority) Issue(name string) wire.TLS {
	a.sign(name, &x509.Certificate{
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"master.example"},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}, a)
	return wire.TLS{CertFile: filepath.Join(a.dir, name+".crt"), KeyFile: filepath.Join(a.dir, name+".key"), CAFile: filepath.Join(a.dir, "ca.crt")}
}
