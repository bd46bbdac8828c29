package remediatorcmd

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/progress"
	"github.com/lockstep-ccl/lockstep/remediation"
)

// Breaker is `lockstep breaker`: what is open, and closing it.
type Breaker struct {
	URL       string `default:"http://127.0.0.1:9410" placeholder:"URL" help:"The remediator (default: ${default})."`
	TokenFile string `required:"" type:"existingfile" placeholder:"FILE" help:"File with the operator's bearer token (lockstep remediator --operator-token-file)."`
	CA        string `name:"ca" type:"existingfile" placeholder:"FILE" help:"CA of the remediator's web certificate, where the system's do not do."`
	Cert      string `name:"cert" type:"existingfile" placeholder:"FILE" help:"Own certificate (PEM), where the remediator asks for one."`
	Key       string `name:"key" type:"existingfile" placeholder:"FILE" help:"Its private key; only its owner may read it."`
	JSON      bool   `name:"json" help:"Write JSON: an array of open breakers."`
	Close     string `placeholder:"SCOPE" help:"Close this breaker: total, units or job:NAME. Refused actions are not replayed without --again."`
	Again     bool   `help:"With --close: what it has refused is decided anew, where the job's master says that the incident is still open."`
}

// Help implements kong's help provider.
func (*Breaker) Help() string {
	return `A breaker opens when more actions were asked for than its bounds allow, and stays open, over
restarts too, until a person has looked and closes it. Closing replays nothing: a job that was
refused a restart and still hangs must be restarted by hand, or --again has it decided anew: its
master is asked whether the incident is still open, and the breakers count.

Examples:
  lockstep breaker --token-file operator-token                     list open breakers
  lockstep breaker --token-file operator-token --close job:llm     let the job be acted on again
  lockstep breaker --token-file operator-token --close job:llm --again   and act on what was refused, if it is still so
  lockstep breaker --token-file operator-token --json | jq '.[].scope'

Beyond loopback the token goes over TLS only: --url https://HOST:9410 --ca ca.crt.`
}

// client speaks to the remediator. The token is worth a restart, so it goes to nobody in the clear
// but on this machine, and a redirect is not followed with it.
func (c *Breaker) client() (*http.Client, error) {
	u, err := url.Parse(c.URL)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, fmt.Errorf("breaker: --url %s: want the remediator's address, such as http://127.0.0.1:9410", c.URL)
	}
	if ip := net.ParseIP(u.Hostname()); u.Scheme == "http" && u.Hostname() != "localhost" && !ip.IsLoopback() {
		return nil, fmt.Errorf("breaker: --url %s: the token would be sent in the clear: use https, or run this on the remediator's host", c.URL)
	}
	transport := &http.Transport{TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12}, Proxy: http.ProxyFromEnvironment}
	if c.CA != "" {
		pem, err := os.ReadFile(c.CA)
		if err != nil {
			return nil, fmt.Errorf("breaker: --ca: %w", err)
		}
		transport.TLSClientConfig.RootCAs = x509.NewCertPool()
		if !transport.TLSClientConfig.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("breaker: --ca: there is no certificate in %s", c.CA)
		}
	}
	if (c.Cert == "") != (c.Key == "") {
		return nil, errors.New("breaker: --cert and --key go together")
	}
	if c.Cert != "" {
		pair, err := tls.LoadX509KeyPair(c.Cert, c.Key)
		if err != nil {
			return nil, fmt.Errorf("breaker: --cert, --key: %w", err)
		}
		transport.TLSClientConfig.Certificates = []tls.Certificate{pair}
	}
	return &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}, nil
}

// Validate implements kong's check of a command line.
func (c *Breaker) Validate() error {
	if c.Again && c.Close == "" {
		return errors.New("--again goes with --close")
	}
	return nil
}

// Run lists or closes.
func (c *Breaker) Run(ctx context.Context, out io.Writer) error {
	token, err := readToken(c.TokenFile)
	if err != nil {
		return err
	}
	client, err := c.client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	waiting := progress.Start("asking the remediator at " + c.URL)
	defer waiting.Stop()
	call := func(method, path string, v any) error {
		req, err := http.NewRequestWithContext(ctx, method, strings.TrimSuffix(c.URL, "/")+path, nil)
		if err != nil {
			return err
		}
		req.Header.Set("Authorization", "Bearer "+string(token))
		resp, err := client.Do(req)
		if err != nil {
			return fmt.Errorf("remediator: %w", err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
		switch {
		case err != nil:
			return fmt.Errorf("remediator: %s: %w", path, err)
		case resp.StatusCode != http.StatusOK:
			return fmt.Errorf("remediator: %s: %s", resp.Status, strings.TrimSpace(string(b)))
		}
		return json.Unmarshal(b, v)
	}
	if c.Close != "" {
		form := url.Values{"scope": {c.Close}, "again": {fmt.Sprint(c.Again)}}
		var done struct{ Again int }
		if err := call(http.MethodPost, "/api/v1/breakers/close?"+form.Encode(), &done); err != nil {
			return err
		}
		if fmt.Fprintf(out, "closed %s\n", c.Close); c.Again {
			fmt.Fprintf(out, "%d refused alerts are decided anew\n", done.Again)
		}
		return nil
	}
	var open []remediation.BreakerState
	if err := call(http.MethodGet, "/api/v1/breakers", &open); err != nil {
		return err
	}
	waiting.Stop()
	if c.JSON {
		enc := json.NewEncoder(out)
		enc.SetIndent("", "  ")
		return enc.Encode(append([]remediation.BreakerState{}, open...))
	}
	if len(open) == 0 {
		fmt.Fprintln(out, "no breaker is open")
		return nil
	}
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "SCOPE\tSINCE\tWHY")
	for _, b := range open {
		fmt.Fprintf(w, "%s\t%s\t%s\n", b.Scope, b.Since.Format(time.RFC3339), b.Why)
	}
	return w.Flush()
}
