package top

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/exporters/web"
)

const (
	answerWithin = 10 * time.Second
	maxAnswer    = 256 << 20
)

// master is a job's master, asked over HTTP.
type master struct {
	base   *url.URL
	client *http.Client
}

func newMaster(at, ca, passwordFile string) (*master, error) {
	if !strings.Contains(at, "://") {
		at = "http://" + at
	}
	u, err := url.Parse(at)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, fmt.Errorf("top: --master: want the address of a master's pages, such as http://127.0.0.1:9402")
	}
	if passwordFile != "" {
		if u.User.Username() == "" {
			return nil, errors.New("top: --password-file: whose password? Name the user in --master: https://USER@HOST:PORT")
		}
		b, err := os.ReadFile(passwordFile)
		if err != nil {
			return nil, fmt.Errorf("top: --password-file: %w", err)
		}
		u.User = url.UserPassword(u.User.Username(), strings.TrimSpace(string(b)))
	}
	transport := &http.Transport{Proxy: http.ProxyFromEnvironment}
	if ca != "" {
		pem, err := os.ReadFile(ca)
		if err != nil {
			return nil, fmt.Errorf("top: --ca: %w", err)
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("top: --ca: there is no certificate in %s", ca)
		}
		transport.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	}
	return &master{u, &http.Client{Transport: transport, Timeout: answerWithin}}, nil
}

func (m *master) look(ctx context.Context) ([]View, error) {
	var st web.Status
	var ranks web.Standings
	if err := m.get(ctx, "api/v1/status", &st); err != nil {
		return nil, err
	}
	if err := m.get(ctx, "api/v1/ranks", &ranks); err != nil {
		return nil, err
	}
	return []View{{
		Job: st.Job, Where: m.base.Redacted(), At: st.At, Health: st.Health, Attempt: st.Attempt, Step: st.Step, WorldSize: st.WorldSize,
		Open: st.Open, Ranks: ranks.Ranks, Stale: st.Stale,
	}}, nil
}

func (m *master) get(ctx context.Context, path string, v any) error {
	u := m.base.JoinPath(path)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return fmt.Errorf("ask %s: %w", u.Redacted(), err)
	}
	resp, err := m.client.Do(req)
	if err != nil {
		return fmt.Errorf("ask the master (is it there, and is --master the address of its pages, not of its agents?): %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		why, _ := io.ReadAll(io.LimitReader(resp.Body, 300))
		return fmt.Errorf("ask %s: %s: %s", u.Redacted(), resp.Status, clean(strings.TrimSpace(string(why))))
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(v); err != nil {
		return errors.Join(fmt.Errorf("ask %s: its answer is not what a master's is", u.Redacted()), err)
	}
	return nil
}
