package local_test

import (
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/wire/pki"
	"github.com/lockstep-ccl/lockstep/deploy/local"
)

// closedWeb is an authority, its certificates and a password.
func closedWeb(t *testing.T) *local.Web {
	t.Helper()
	dir := t.TempDir()
	ca, err := pki.New(dir)
	if err != nil {
		t.Fatal(err)
	}
	serve, err := ca.IssueWeb("serve", []string{"127.0.0.1"}, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	ask, err := ca.IssueWeb("ask", nil, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	w := &local.Web{
		Serve: local.KeyPair{CertFile: serve.CertFile, KeyFile: serve.KeyFile}, Ask: local.KeyPair{CertFile: ask.CertFile, KeyFile: ask.KeyFile},
		CAFile: serve.CAFile, User: "who", PasswordFile: filepath.Join(dir, "password"),
	}
	for range 2 { // another run in the same directory
		if err := local.WritePassword(w.PasswordFile); err != nil {
			t.Fatal(err)
		}
	}
	if info, err := os.Stat(w.PasswordFile); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the password's file: %v, %v", info.Mode(), err)
	}
	return w
}

func passwordOf(t *testing.T, w *local.Web) string {
	b, err := os.ReadFile(w.PasswordFile)
	if err != nil {
		t.Error(err)
	}
	return strings.TrimSpace(string(b))
}

// mutual is TLS that asks for a certificate of the same authority.
func mutual(t *testing.T, w *local.Web) *tls.Config {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(w.Serve.CertFile, w.Serve.KeyFile)
	if err != nil {
		t.Fatal(err)
	}
	pem, err := os.ReadFile(w.CAFile)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem)
	return &tls.Config{Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool, MinVersion: tls.VersionTLS13}
}

// askPages asks a closed server as a person would, by curl too, and as anybody.
func askPages(t *testing.T, w *local.Web, url string) {
	t.Helper()
	known, err := w.Client()
	if err != nil {
		t.Fatal(err)
	}
	defer known.CloseIdleConnections()
	conf := mutual(t, w)
	anybody := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: conf.ClientCAs, MinVersion: tls.VersionTLS13}}}
	for _, c := range []struct {
		client *http.Client
		want   int
	}{{known, http.StatusOK}, {anybody, http.StatusUnauthorized}} {
		resp, err := c.client.Get(url)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != c.want {
			t.Errorf("%s: %s, want %d", url, resp.Status, c.want)
		}
	}
	if resp, err := anybody.Get(strings.Replace(url, "https:", "http:", 1)); err == nil {
		resp.Body.Close()
		if resp.StatusCode == http.StatusOK {
			t.Errorf("%s answers in plain text", url)
		}
	}
	curl, err := exec.LookPath("curl")
	if err != nil {
		t.Log("curl is not here: its configuration is not tried")
		return
	}
	file := filepath.Join(t.TempDir(), "curl")
	if err := w.WriteCurl(file); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(curl, "-sS", "-f", "-K", file, url).CombinedOutput(); err != nil {
		t.Errorf("curl -K %s %s: %v: %s", file, url, err, out)
	}
}
