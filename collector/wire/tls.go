package wire

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// TLS names the files of mutual TLS. All three are PEM; the files are read
// again for every handshake, so a rotated certificate needs no restart and
// ends no stream.
type TLS struct {
	CertFile string
	KeyFile  string
	CAFile   string // signs both ends' certificates
	// ServerName is the name in the master's certificate, for agents; "" is the host dialled.
	ServerName string
	// Log is told when the files cannot be read again, and when they can; slog.Default() when nil.
	Log *slog.Logger
}

// LogTo returns t with a log, where it has none of its own; nil for nil.
func (t *TLS) LogTo(log *slog.Logger) *TLS {
	if t == nil || t.Log != nil {
		return t
	}
	with := *t
	with.Log = log
	return &with
}

// MasterOf returns the credentials with which to dial the master of a job: the
// other end must be that by its certificate. Plain text when t is nil, and then, on
// this host, the other end must be of this process's user or root.
func (t *TLS) MasterOf(job string) (credentials.TransportCredentials, error) {
	if t == nil {
		return Loopback(), nil
	}
	c, err := t.Credentials()
	if r, ok := c.(*reloading); ok {
		r.verify = func(id Identity) error { return id.Master(job) }
	}
	return c, err
}

// PlannerOf returns the credentials with which to dial a fabric's planner, as MasterOf does
// those for a master.
func (t *TLS) PlannerOf() (credentials.TransportCredentials, error) {
	if t == nil {
		return Loopback(), nil
	}
	c, err := t.Credentials()
	if r, ok := c.(*reloading); ok {
		r.verify = Identity.Planner
	}
	return c, err
}

// Credentials returns the transport credentials of either end: plain text
// when t is nil, else mutual TLS 1.3. It fails when the files cannot be used now.
func (t *TLS) Credentials() (credentials.TransportCredentials, error) {
	if t == nil {
		return insecure.NewCredentials(), nil
	}
	if t.CertFile == "" || t.KeyFile == "" || t.CAFile == "" {
		return nil, errors.New("tls: certificate, key and CA file are all needed: each end authenticates the other")
	}
	if err := private(t.KeyFile); err != nil {
		return nil, err
	}
	cfg, err := t.load()
	if err != nil {
		return nil, err
	}
	own, err := x509.ParseCertificate(cfg.Certificates[0].Certificate[0])
	if err == nil {
		_, err = IdentityIn(own)
	}
	if err != nil {
		return nil, fmt.Errorf("tls: own certificate %s: %w", t.CertFile, err)
	}
	r := &reloading{files: *t, log: cmp.Or(t.Log, slog.Default()), good: new(atomic.Pointer[tls.Config]), failing: new(atomic.Bool)}
	r.good.Store(cfg)
	certificates.note(t.CertFile, own.NotAfter, nil)
	return r, nil
}

// private refuses a secret that others than its owner and group can read.
func private(file string) error {
	fi, err := os.Stat(file)
	if err != nil {
		return fmt.Errorf("tls: key: %w", err)
	}
	if fi.Mode().Perm()&0o027 != 0 {
		return fmt.Errorf("tls: key %s is open to others (mode %04o): chmod 600 it (defaultMode: 0440 of a Kubernetes volume)", file, fi.Mode().Perm())
	}
	return nil
}

func (t *TLS) load() (*tls.Config, error) {
	cert, err := tls.LoadX509KeyPair(t.CertFile, t.KeyFile)
	if err != nil {
		return nil, fmt.Errorf("tls: load certificate %s and key %s: %w", t.CertFile, t.KeyFile, err)
	}
	pem, err := os.ReadFile(t.CAFile)
	if err != nil {
		return nil, fmt.Errorf("tls: read CA: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("tls: %s holds no PEM certificate", t.CAFile)
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{cert},
		RootCAs:      pool,
		ClientCAs:    pool,
		ClientAuth:   tls.RequireAndVerifyClientCert,
	}, nil
}

// Certificate is how a process's own certificate is doing.
type Certificate struct {
	File    string
	Expires time.Time // of the last that could be read
	Err     error     // why it, its key or its CA could not be read when they were last
}

// Certificates returns those that this process has used, by file.
func Certificates() []Certificate { return certificates.list() }

// certificates is of the process, as its files are.
var certificates registry

type registry struct {
	mu   sync.Mutex
	last map[string]Certificate
}

func (r *registry) note(file string, expires time.Time, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.last == nil {
		r.last = map[string]Certificate{}
	}
	c := r.last[file]
	if c.File, c.Err = file, err; err == nil {
		c.Expires = expires
	}
	r.last[file] = c
}

func (r *registry) list() []Certificate {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.SortedFunc(maps.Values(r.last), func(a, b Certificate) int { return cmp.Compare(a.File, b.File) })
}

// reloading builds its configuration anew for each handshake.
type reloading struct {
	files   TLS
	log     *slog.Logger
	good    *atomic.Pointer[tls.Config]
	failing *atomic.Bool         // the last reading did; said once
	verify  func(Identity) error // of the server, nil: whoever the CA signed
}

// load reads the files again. While they cannot be used (a certificate is being
// replaced, and its key has not been), those that could be last are.
func (r *reloading) load() *tls.Config {
	cfg, err := r.files.load()
	if err == nil {
		cert, _ := x509.ParseCertificate(cfg.Certificates[0].Certificate[0]) // it was when it was loaded
		certificates.note(r.files.CertFile, cert.NotAfter, nil)
	}
	if err != nil {
		certificates.note(r.files.CertFile, time.Time{}, err)
		if !r.failing.Swap(true) {
			r.log.Error("certificates cannot be read again: those that could be last are used until they end", "err", err)
		}
		return r.good.Load().Clone()
	}
	if r.failing.Swap(false) {
		r.log.Info("certificates can be read again", "file", r.files.CertFile)
	}
	r.good.Store(cfg)
	return cfg.Clone()
}

func (r *reloading) ClientHandshake(ctx context.Context, authority string, c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	cfg := r.load()
	sameDomain(cfg, r.verify)
	return credentials.NewTLS(cfg).ClientHandshake(ctx, cmp.Or(r.files.ServerName, authority), c)
}

func (r *reloading) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	cfg := r.load()
	sameDomain(cfg, nil)
	return credentials.NewTLS(cfg).ServerHandshake(c)
}

// sameDomain has a handshake fail unless the peer's identity is of the own
// certificate's trust domain, and as verify wants it.
func sameDomain(cfg *tls.Config, verify func(Identity) error) {
	cfg.VerifyConnection = func(s tls.ConnectionState) error {
		id, err := IdentityIn(s.PeerCertificates[0])
		if err != nil {
			return err
		}
		leaf, err := x509.ParseCertificate(cfg.Certificates[0].Certificate[0])
		if err != nil {
			return err
		}
		own, err := IdentityIn(leaf)
		switch {
		case err != nil:
			return fmt.Errorf("own certificate: %w", err)
		case id.Domain != own.Domain:
			return fmt.Errorf("%w: %s is of another trust domain than %s", ErrIdentity, id, own)
		case verify != nil:
			return verify(id)
		}
		return nil
	}
}

func (r *reloading) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls", ServerName: r.files.ServerName}
}

func (r *reloading) Clone() credentials.TransportCredentials {
	c := *r
	return &c
}

// OverrideServerName is part of the interface; gRPC deprecates it.
func (r *reloading) OverrideServerName(name string) error {
	r.files.ServerName = name
	return nil
}
