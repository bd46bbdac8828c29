package remediatorcmd

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestBreakerOverTLS: a remediator behind a CA of its own that asks for a certificate is reached with
// --ca, --cert and --key, and not without; the token goes to no other host.
func TestBreakerOverTLS(t *testing.T) {
	var heard []string
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		heard = append(heard, r.Header.Get("Authorization"))
		if r.URL.Path == "/moved/api/v1/breakers" {
			http.Redirect(w, r, "/api/v1/breakers", http.StatusTemporaryRedirect)
			return
		}
		_, _ = w.Write([]byte("[]"))
	}))
	s.TLS = &tls.Config{ClientAuth: tls.RequireAnyClientCert}
	s.Config.ErrorLog = nil
	s.StartTLS()
	defer s.Close()
	dir := t.TempDir()
	file := func(name, kind string, b []byte) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: b}), 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	own := s.TLS.Certificates[0]
	key, err := x509.MarshalPKCS8PrivateKey(own.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	good := Breaker{
		URL: s.URL, TokenFile: filepath.Join(dir, "token"), CA: file("ca.crt", "CERTIFICATE", own.Certificate[0]),
		Cert: file("own.crt", "CERTIFICATE", own.Certificate[0]), Key: file("own.key", "PRIVATE KEY", key),
	}
	if err := os.WriteFile(good.TokenFile, []byte(strings.Repeat("t", 40)), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		what, want string
		heard      int
		change     func(*Breaker)
	}{
		{"all of it", "", 1, func(*Breaker) {}},
		{"no CA", "certificate", 0, func(b *Breaker) { b.CA = "" }},
		{"no certificate", "remediator", 0, func(b *Breaker) { b.Cert, b.Key = "", "" }},
		{"half of it", "--cert and --key", 0, func(b *Breaker) { b.Key = "" }},
		{"a key for a CA", "no certificate in", 0, func(b *Breaker) { b.CA = b.Key }},
		{"in the clear", "in the clear", 0, func(b *Breaker) { b.URL = "http://192.0.2.1:9410" }},
		{"in the clear by name", "in the clear", 0, func(b *Breaker) { b.URL = "http://remediator:9410" }},
		{"no URL", "want the remediator's address", 0, func(b *Breaker) { b.URL = "remediator:9410" }},
		{"sent on", "307", 1, func(b *Breaker) { b.URL += "/moved" }},
	} {
		t.Run(c.what, func(t *testing.T) {
			b, out := good, &bytes.Buffer{}
			c.change(&b)
			heard = nil
			switch err := b.Run(t.Context(), out); {
			case c.want == "" && (err != nil || !strings.Contains(out.String(), "no breaker is open")):
				t.Errorf("%v, %q", err, out)
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
				t.Errorf("%v, want %q", err, c.want)
			case len(heard) != c.heard:
				t.Errorf("the server heard %q", heard)
			}
		})
	}
}

// TestCloseAgain: --again is told to the remediator, what came of it to who asked, and alone it makes no sense.
func TestCloseAgain(t *testing.T) {
	var asked string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = r.FormValue("scope") + " " + r.FormValue("again")
		_, _ = w.Write([]byte(`{"closed": "job:llm", "again": 3}`))
	}))
	defer s.Close()
	b := Breaker{URL: s.URL, TokenFile: filepath.Join(t.TempDir(), "token"), Close: "job:llm", Again: true}
	if err := os.WriteFile(b.TokenFile, []byte(strings.Repeat("t", 40)), 0o600); err != nil {
		t.Fatal(err)
	}
	out := &bytes.Buffer{}
	if err := errors.Join(b.Validate(), b.Run(t.Context(), out)); err != nil || asked != "job:llm true" || out.String() != "closed job:llm\n3 refused alerts are decided anew\n" {
		t.Errorf("%v: asked %q, told %q", err, asked, out)
	}
	if b.Close = ""; b.Validate() == nil {
		t.Error("--again without --close is taken")
	}
}
