package remediatorcmd

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
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
	JSON      bool   `name:"json" help:"Write JSON: an array of open breakers."`
	Close     string `placeholder:"SCOPE" help:"Close this breaker: total, units or job:NAME. Refused actions are not replayed."`
}

// Help implements kong's help provider.
func (*Breaker) Help() string {
	return `A breaker opens when more actions were asked for than its bounds allow, and stays open, over
restarts too, until a person has looked and closes it. Closing replays nothing: a job that was
refused a restart and still hangs must be restarted by hand.

Examples:
  lockstep breaker --token-file operator-token                     list open breakers
  lockstep breaker --token-file operator-token --close job:llm     let the job be acted on again
  lockstep breaker --token-file operator-token --json | jq '.[].scope'`
}

// Run lists or closes.
func (c *Breaker) Run(ctx context.Context, out io.Writer) error {
	token, err := readToken(c.TokenFile)
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
		resp, err := http.DefaultClient.Do(req)
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
		if err := call(http.MethodPost, "/api/v1/breakers/close?scope="+url.QueryEscape(c.Close), &map[string]string{}); err != nil {
			return err
		}
		fmt.Fprintf(out, "closed %s\n", c.Close)
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
