package wire

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"

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
	if _, err := t.load(); err != nil {
		return nil, err
	}
	return &reloading{files: *t}, nil
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

// reloading builds its configuration anew for each handshake.
type reloading struct{ files TLS }

func (r *reloading) ClientHandshake(ctx context.Context, authority string, c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	cfg, err := r.files.load()
	if err != nil {
		return nil, nil, err
	}
	return credentials.NewTLS(cfg).ClientHandshake(ctx, cmp.Or(r.files.ServerName, authority), c)
}

func (r *reloading) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	cfg, err := r.files.load()
	if err != nil {
		return nil, nil, err
	}
	return credentials.NewTLS(cfg).ServerHandshake(c)
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
