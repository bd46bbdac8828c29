package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/crypto/bcrypt"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/collector/wire/pki"
	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// TestMetricsBehindTLSAndAPassword: exporter-toolkit's configuration closes /metrics of
// agent, master and remediator; the remediator's own tokens go with client certificates
// instead of a password. What /metrics tells is no secret that a door believes.
func TestMetricsBehindTLSAndAPassword(t *testing.T) {
	w := &town{t: t, dir: t.TempDir(), parts: map[string]*part{}}
	addrs := freeAddrs(t, 4)
	var err error
	if w.ca, err = pki.Init(w.path("pki")); err != nil {
		t.Fatal(err)
	}
	server := files(t, w.ca, "web", wire.Identity{Role: wire.RoleMaster, Jobs: []string{"job"}}, "127.0.0.1")
	client := files(t, w.ca, "client", wire.Identity{Role: wire.RoleRemediator})
	hash, err := bcrypt.GenerateFromPassword([]byte("open sesame"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	const token = "0123456789abcdef-of-alertmanager"
	tlsConfig := fmt.Sprintf("tls_server_config: {cert_file: %s, key_file: %s", server.CertFile, server.KeyFile)
	for name, text := range map[string]string{
		"password.yml": tlsConfig + fmt.Sprintf("}\nbasic_auth_users: {prometheus: %q}\n", hash),
		"mutual.yml":   tlsConfig + fmt.Sprintf(", client_auth_type: RequireAndVerifyClientCert, client_ca_file: %s}\n", server.CAFile),
		"token":        token,
	} {
		if err := os.WriteFile(w.path(name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	w.run(t, "agent", "agent", "--node", "n", "--runtime-dir", w.path("rt"), "--web.listen-address", addrs[0], "--web.config.file", w.path("password.yml"))
	w.run(t, "master", "master", "--job", "job", "--listen", "127.0.0.1:0", "--web.listen-address", addrs[1], "--web.config.file", w.path("password.yml"))
	for i, config := range []string{"password.yml", "mutual.yml"} {
		w.run(t, "remediator-"+config, "remediator", "--journal", w.path("of-"+config, "r.db"), "--token-file", w.path("token"), "--master", "127.0.0.1:1",
			"--web.listen-address", addrs[2+i], "--web.config.file", w.path(config))
	}
	pem, err := os.ReadFile(server.CAFile)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem)
	pair, err := tls.LoadX509KeyPair(client.CertFile, client.KeyFile)
	if err != nil {
		t.Fatal(err)
	}
	ask := func(url, password, bearer string, certs ...tls.Certificate) (code int, body string, err error) {
		tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, Certificates: certs}, DisableKeepAlives: true}
		req, err := http.NewRequest(http.MethodGet, url, nil)
		if err != nil {
			t.Fatal(err)
		}
		if password != "" {
			req.SetBasicAuth("prometheus", password)
		}
		if bearer != "" {
			req.Header.Set("Authorization", "Bearer "+bearer)
		}
		resp, err := (&http.Client{Transport: tr, Timeout: bound}).Do(req)
		if err != nil {
			return 0, "", err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		return resp.StatusCode, string(b), err
	}
	for _, addr := range addrs[:3] {
		url := "https://" + addr + "/metrics"
		eventually(t, "there", func() error {
			code, body, err := ask(url, "open sesame", "")
			if err == nil && (code != 200 || !strings.Contains(body, "lockstep_build_info")) {
				err = fmt.Errorf("%d: %.100s", code, body)
			}
			if strings.Contains(body, token) || strings.Contains(body, "sesame") {
				t.Error("metrics tell a secret")
			}
			return err
		})
		for _, wrong := range []string{"", "sesame"} {
			if code, _, err := ask(url, wrong, ""); err != nil || code != 401 {
				t.Errorf("%s with the password %q: %d, %v", url, wrong, code, err)
			}
		}
		_, body, err := ask(url, "open sesame", "")
		for _, reason := range []string{names.WebAnonymous, names.WebPassword} { // of the two above
			if want := fmt.Sprintf("%s{reason=%q} 1\n", names.WebRefused, reason); err != nil || !strings.Contains(body, want) {
				t.Errorf("%s does not count %s, %v", url, want, err)
			}
		}
		if code, _, err := ask("http://"+addr+"/metrics", "", ""); err == nil && code == 200 {
			t.Errorf("%s in plain text", addr)
		}
	}
	eventually(t, "there with a certificate", func() error {
		code, _, err := ask("https://"+addrs[3]+"/api/v1/actions", "", token, pair)
		if err == nil && code != 200 {
			err = errors.New(http.StatusText(code))
		}
		return err
	})
	if code, _, err := ask("https://"+addrs[3]+"/api/v1/actions", "", "another, as long as that one", pair); err != nil || code != 401 {
		t.Errorf("another token: %d, %v", code, err)
	}
	if code, _, err := ask("https://"+addrs[3]+"/metrics", "", token); err == nil {
		t.Errorf("without a certificate: %d", code)
	}
	if list, _ := filepath.Glob(w.path("*", "r.db")); len(list) != 2 {
		t.Errorf("journals %v", list)
	}
}

// TestDemoIsClosed: who has neither password nor certificate learns nothing of a demo that runs
// with its default flags; who reads what it prints gets in.
func TestDemoIsClosed(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(context.Background(), 4*bound)
	defer cancel()
	cmd := exec.CommandContext(ctx, "lockstep", "demo", "--no-alerts", "--fault", "none", "--dir", dir)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() { cancel(); _ = cmd.Wait() }() // interrupted
	var links, hint []string
	for lines := bufio.NewScanner(out); hint == nil && lines.Scan(); {
		for _, w := range strings.Fields(lines.Text()) {
			if u, err := url.Parse(w); err == nil && u.Port() != "" && u.User == nil {
				links = append(links, w)
			}
		}
		if w := strings.Fields(lines.Text()); len(w) > 1 && w[0] == "lockstep" && w[1] == "top" {
			hint = w
		}
	}
	if len(links) < 5 || hint == nil {
		t.Fatalf("the demo prints the links %v and the hint %v", links, hint)
	}
	stranger := &http.Client{Timeout: bound, Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	for _, link := range links {
		if !strings.HasPrefix(link, "https:") {
			t.Errorf("%s is plain text", link)
		}
		for _, u := range []string{link, strings.Replace(link, "https:", "http:", 1)} {
			resp, err := stranger.Get(u)
			if err != nil {
				continue // a certificate is asked for
			}
			resp.Body.Close()
			if resp.StatusCode != http.StatusUnauthorized && resp.StatusCode != http.StatusBadRequest {
				t.Errorf("%s tells anybody: %s", u, resp.Status)
			}
		}
	}
	if text, err := exec.CommandContext(ctx, hint[0], append(hint[1:], "--once")...).CombinedOutput(); err != nil || !strings.Contains(string(text), "demo") {
		t.Errorf("%s: %v: %s", strings.Join(hint, " "), err, text)
	}
	secrets := 0
	for _, pattern := range []string{"web/*", "token", "operator-token", "pki/*.key"} {
		list, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range list {
			secrets++
			if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
				t.Errorf("%s: %v, %v", file, info.Mode(), err)
			}
		}
	}
	if secrets < 8 {
		t.Errorf("%d secrets were found", secrets)
	}
}
