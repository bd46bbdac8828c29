package local

import (
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"os"
	"strings"

	"golang.org/x/crypto/bcrypt"
)

// Web is how web listeners are closed: by TLS and a password, in the form of exporter-toolkit's
// web configuration, which Prometheus, Alertmanager and Lockstep's own parts all read. A nil
// *Web leaves them open.
type Web struct {
	// Serve is the listeners' certificate, Ask the one of who asks them. One authority has
	// signed both.
	Serve, Ask   KeyPair
	CAFile       string
	User         string
	PasswordFile string // the password, and perhaps a line's end
}

// KeyPair names two PEM files.
type KeyPair struct{ CertFile, KeyFile string }

// WritePassword makes a password's file, of mode 0600, in the place of the one that was there.
func WritePassword(path string) error {
	_ = os.Remove(path) // what is still there then is an error below
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("write a password: %w", err)
	}
	if _, err = f.WriteString(rand.Text() + "\n"); err == nil {
		err = f.Close()
	}
	return err
}

// WriteConfig writes the configuration of a listener. mutual asks for the client's certificate
// in the place of a password: for listeners whose own tokens take the header that it would.
func (w *Web) WriteConfig(path string, mutual bool) error {
	server := object{"cert_file": w.Serve.CertFile, "key_file": w.Serve.KeyFile, "min_version": "TLS13"}
	config := object{"tls_server_config": server}
	if mutual {
		server["client_auth_type"], server["client_ca_file"] = "RequireAndVerifyClientCert", w.CAFile
		return writeYAML(path, config)
	}
	password, err := w.password()
	if err != nil {
		return err
	}
	// A password that is random needs no slow hash, and is looked at in each scrape's time.
	hash, err := bcrypt.GenerateFromPassword([]byte(password), bcrypt.MinCost)
	if err != nil {
		return fmt.Errorf("hash the password of %s: %w", w.PasswordFile, err)
	}
	config["basic_auth_users"] = object{w.User: string(hash)}
	return writeYAML(path, config)
}

// WriteCurl writes a configuration of curl's (curl -K FILE URL) that asks as Client does.
func (w *Web) WriteCurl(path string) error {
	password, err := w.password()
	if err != nil {
		return err
	}
	text := fmt.Sprintf("cacert = %q\ncert = %q\nkey = %q\nuser = %q\n", w.CAFile, w.Ask.CertFile, w.Ask.KeyFile, w.User+":"+password)
	return os.WriteFile(path, []byte(text), 0o600)
}

func (w *Web) password() (string, error) {
	b, err := os.ReadFile(w.PasswordFile)
	if err != nil {
		return "", fmt.Errorf("web password: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// URL is that of a listener at host:port.
func (w *Web) URL(address string) string {
	if w == nil {
		return "http://" + address
	}
	return "https://" + address
}

// Client asks listeners with certificate and password.
func (w *Web) Client() (*http.Client, error) {
	transport := &http.Transport{}
	if w == nil {
		return &http.Client{Transport: transport}, nil
	}
	pem, err := os.ReadFile(w.CAFile)
	if err != nil {
		return nil, fmt.Errorf("web client: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("web client: there is no certificate in %s", w.CAFile)
	}
	pair, err := tls.LoadX509KeyPair(w.Ask.CertFile, w.Ask.KeyFile)
	if err != nil {
		return nil, fmt.Errorf("web client: %w", err)
	}
	password, err := w.password()
	if err != nil {
		return nil, err
	}
	transport.TLSClientConfig = &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13}
	return &http.Client{Transport: withPassword{transport, w.User, password}}, nil
}

// withPassword adds the password to requests that bring no token of their own.
type withPassword struct {
	*http.Transport
	user, password string
}

func (t withPassword) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Header.Get("Authorization") == "" {
		req = req.Clone(req.Context())
		req.SetBasicAuth(t.user, t.password)
	}
	return t.Transport.RoundTrip(req)
}

// ask adds to a part of Prometheus's or Alertmanager's configuration how it asks, with the
// password when it has no token.
func (w *Web) ask(o object, password bool) object {
	if w == nil {
		return o
	}
	o["tls_config"] = object{"ca_file": w.CAFile, "cert_file": w.Ask.CertFile, "key_file": w.Ask.KeyFile}
	if password {
		o["scheme"] = "https"
		o["basic_auth"] = object{"username": w.User, "password_file": w.PasswordFile}
	}
	return o
}
