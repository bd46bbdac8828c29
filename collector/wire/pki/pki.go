// Package pki issues the certificates by which agents, masters and the remediator
// know each other, for clusters that have no issuer of their own (cert-manager and
// SPIRE issue the same names, see wire.Identity).
//
// An authority is a directory with ca.crt and ca.key. What flows in are identities;
// what flows out are files of one certificate and its key each, readable by their
// owner only, replaced in one step so that a process that reads them again at each
// handshake never sees half of a pair for long. It keeps no list of what it issued:
// certificates are short-lived, and are replaced rather than revoked.
package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/wire"
)

const (
	caLife = 10 * 365 * 24 * time.Hour
	// backdated allows for clocks that differ.
	backdated = 5 * time.Minute
)

// Authority signs certificates.
type Authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// Init makes an authority in a directory that has none yet.
func Init(dir string) (*Authority, error) {
	for _, name := range []string{"ca.crt", "ca.key"} {
		if _, err := os.Lstat(filepath.Join(dir, name)); !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("authority in %s: %s is there already; remove it to begin anew, which makes all certificates that it signed worthless", dir, name)
		}
	}
	return New(dir)
}

// New makes an authority in a directory, in the place of the one that was there.
func New(dir string) (*Authority, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("authority: %w", err)
	}
	now := time.Now()
	a := &Authority{dir: dir}
	key, cert, err := a.sign("ca", &x509.Certificate{
		Subject: pkix.Name{CommonName: "Lockstep authority"}, NotBefore: now.Add(-backdated), NotAfter: now.Add(caLife),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign,
	})
	if err != nil {
		return nil, err
	}
	a.key, a.cert = key, cert
	return a, nil
}

// Open reads the authority in a directory.
func Open(dir string) (*Authority, error) {
	certFile, keyFile := filepath.Join(dir, "ca.crt"), filepath.Join(dir, "ca.key")
	certDER, err := block(certFile, "CERTIFICATE")
	if err != nil {
		return nil, err
	}
	keyDER, err := block(keyFile, "PRIVATE KEY")
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(certDER)
	if err != nil {
		return nil, fmt.Errorf("authority: %s: %w", certFile, err)
	}
	key, err := x509.ParsePKCS8PrivateKey(keyDER)
	if err != nil {
		return nil, fmt.Errorf("authority: %s: %w", keyFile, err)
	}
	ec, ok := key.(*ecdsa.PrivateKey)
	if !ok || !ec.PublicKey.Equal(cert.PublicKey) {
		return nil, fmt.Errorf("authority: %s is not the key of %s", keyFile, certFile)
	}
	return &Authority{dir: dir, cert: cert, key: ec}, nil
}

func block(file, kind string) ([]byte, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("authority: %w (lockstep pki init makes one)", err)
	}
	b, _ := pem.Decode(text)
	if b == nil || b.Type != kind {
		return nil, fmt.Errorf("authority: %s holds no PEM %s", file, kind)
	}
	return b.Bytes, nil
}

// Issue writes NAME.crt and NAME.key for an identity, over those that are there.
// hosts are the names and addresses by which the holder is dialled.
func (a *Authority) Issue(name string, id wire.Identity, hosts []string, life time.Duration) (wire.TLS, error) {
	if err := id.Check(); err != nil {
		return wire.TLS{}, fmt.Errorf("certificate: %w", err)
	}
	return a.issue(name, id.URIs(), hosts, life)
}

// IssueWeb is Issue for web listeners and who asks them: the certificate speaks for no part of
// Lockstep, so its holder can report nothing and order nothing.
func (a *Authority) IssueWeb(name string, hosts []string, life time.Duration) (wire.TLS, error) {
	return a.issue(name, nil, hosts, life)
}

func (a *Authority) issue(name string, uris []*url.URL, hosts []string, life time.Duration) (wire.TLS, error) {
	now := time.Now()
	if life <= 0 || now.Add(life).After(a.cert.NotAfter) {
		return wire.TLS{}, fmt.Errorf("certificate of %s: a life of %v, want above 0 and within the authority's, until %s", name, life, a.cert.NotAfter.Format(time.DateOnly))
	}
	c := &x509.Certificate{
		Subject: pkix.Name{CommonName: name}, NotBefore: now.Add(-backdated), NotAfter: now.Add(life),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		URIs:        uris,
	}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			c.IPAddresses = append(c.IPAddresses, ip)
		} else {
			c.DNSNames = append(c.DNSNames, h)
		}
	}
	if _, _, err := a.sign(name, c); err != nil {
		return wire.TLS{}, err
	}
	at := func(file string) string { return filepath.Join(a.dir, file) }
	return wire.TLS{CertFile: at(name + ".crt"), KeyFile: at(name + ".key"), CAFile: at("ca.crt")}, nil
}

// sign writes a certificate and a new key for it; the authority's own signs itself.
func (a *Authority) sign(name string, c *x509.Certificate) (*ecdsa.PrivateKey, *x509.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("key of %s: %w", name, err)
	}
	if c.SerialNumber, err = rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127)); err != nil {
		return nil, nil, fmt.Errorf("certificate of %s: %w", name, err)
	}
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
	if err != nil {
		return nil, nil, fmt.Errorf("certificate of %s: %w", name, err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, nil, fmt.Errorf("certificate of %s: %w", name, err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, nil, fmt.Errorf("key of %s: %w", name, err)
	}
	// The key first: a reader between the two finds a pair that does not fit, and tries again.
	if err := a.write(name+".key", "PRIVATE KEY", raw); err != nil {
		return nil, nil, err
	}
	return key, cert, a.write(name+".crt", "CERTIFICATE", der)
}

// write replaces a file in one step.
func (a *Authority) write(name, kind string, der []byte) error {
	f, err := os.CreateTemp(a.dir, "."+name+"-*") // mode 0600
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	defer os.Remove(f.Name())
	err = errors.Join(pem.Encode(f, &pem.Block{Type: kind, Bytes: der}), f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), filepath.Join(a.dir, name))
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}
