package process

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/remediation"
)

// RestartRequest asks for a restart. Exclude lists ranks whose slots are to be
// left out in favour of spares. Action makes the request idempotent; Attempt,
// when given, is the only one that it may end.
type RestartRequest struct {
	Action  string `json:"action"`
	Attempt *int   `json:"attempt,omitempty"`
	Exclude []int  `json:"exclude,omitempty"`
	Reason  string `json:"reason,omitempty"`
}

// RestartReply says what was done.
type RestartReply struct {
	Attempt  int       `json:"attempt"`            // the attempt that the action led to; when nothing was done, the one that runs
	At       time.Time `json:"at,omitzero"`        // when it was started; zero when nothing was done
	Repeated bool      `json:"repeated,omitempty"` // done for an earlier request with this action's id
	Detail   string    `json:"detail"`
}

// Status is the supervisor's state.
type Status struct {
	Job      string       `json:"job"`
	Attempt  int          `json:"attempt"`
	State    string       `json:"state"` // starting, running, holding, restarting, done, failed, stopped
	Since    time.Time    `json:"since"`
	Ranks    []RankStatus `json:"ranks"`
	Spares   []int        `json:"spares"`   // free slots
	Excluded []int        `json:"excluded"` // slots taken out
	// Units is how many there are where a unit is a host; Out are those left out, Standby those that stand by.
	Units   int      `json:"units,omitempty"`
	Out     []string `json:"out,omitempty"`
	Standby []string `json:"standby,omitempty"`
	Heard   []string `json:"heard,omitempty"` // hosts whose supervisors are connected
	Why     string   `json:"why,omitempty"`   // how the last attempt ended
}

// RankStatus is one rank's process.
type RankStatus struct {
	Rank  int    `json:"rank"`
	Slot  int    `json:"slot"`
	Node  string `json:"node"`
	PID   int    `json:"pid"`
	State string `json:"state"` // running, exited
	Exit  string `json:"exit,omitempty"`
	Unit  string `json:"unit,omitempty"` // what an exclusion takes out, where it is no slot
}

// Client talks to a supervisor's control socket.
type Client struct{ http *http.Client }

// NewClient returns a client of the Unix socket at path. Nothing is dialed yet.
func NewClient(path string) *Client {
	d := net.Dialer{}
	return &Client{&http.Client{Transport: &http.Transport{
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return d.DialContext(ctx, "unix", path) },
		DisableKeepAlives: true,
	}}}
}

// Status asks for the supervisor's state.
func (c *Client) Status(ctx context.Context) (*Status, error) {
	var s Status
	return &s, c.call(ctx, http.MethodGet, "/v1/status", nil, &s)
}

// Restart restarts the job and returns when the new attempt's processes have
// been started, or why nothing was done. When ctx ends first the restart may
// happen all the same; asking again with the same action id tells. The error
// wraps remediation.ErrGone when the job has ended.
func (c *Client) Restart(ctx context.Context, r RestartRequest) (*RestartReply, error) {
	var reply RestartReply
	return &reply, c.call(ctx, http.MethodPost, "/v1/restart", r, &reply)
}

func (c *Client) call(ctx context.Context, method, path string, in, out any) error {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = strings.NewReader(string(b))
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://supervisor"+path, body)
	if err != nil {
		return err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return fmt.Errorf("supervisor: %w", err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	switch {
	case err != nil:
		return fmt.Errorf("supervisor: %s: %w", path, err)
	case resp.StatusCode == http.StatusGone:
		return fmt.Errorf("%w: %s", remediation.ErrGone, strings.TrimSpace(string(b)))
	case resp.StatusCode != http.StatusOK:
		return fmt.Errorf("supervisor: %s: %s: %s", path, resp.Status, strings.TrimSpace(string(b)))
	}
	return json.Unmarshal(b, out)
}

// Actuator restarts jobs through their supervisors' control sockets.
type Actuator struct {
	// Socket returns the control socket of a job's supervisor.
	Socket func(job string) (path string, ok bool)
}

// Name implements remediation.Actuator.
func (*Actuator) Name() string { return "process" }

// FencesItself implements remediation.SelfFencing: the supervisor starts an attempt when it has
// reaped the processes of the one before.
func (*Actuator) FencesItself(remediation.ActionKind) bool { return true }

// Inventory implements remediation.Actuator: a unit is a slot, or a host where the job has several.
func (a *Actuator) Inventory(ctx context.Context, job string) (remediation.Inventory, error) {
	c, err := a.client(job)
	if err != nil {
		return remediation.Inventory{}, err
	}
	s, err := c.Status(ctx)
	if err != nil {
		return remediation.Inventory{}, err
	}
	units := s.Units
	if units == 0 {
		units = len(s.Ranks) + len(s.Spares) + len(s.Excluded)
	}
	return remediation.Inventory{
		Units: units,
		Unit: func(rank int) string {
			for _, r := range s.Ranks {
				switch {
				case r.Rank == rank && r.Unit != "":
					return r.Unit
				case r.Rank == rank:
					return fmt.Sprintf("%s/slot%d", job, r.Slot)
				}
			}
			return ""
		},
	}, nil
}

// Act implements remediation.Actuator.
func (a *Actuator) Act(ctx context.Context, act remediation.Action) (remediation.Answer, error) {
	c, err := a.client(act.Job)
	if err != nil {
		return remediation.Answer{}, err
	}
	req := RestartRequest{Action: act.ID, Attempt: act.Attempt, Reason: act.Reason}
	switch act.Kind {
	case remediation.ActionRestart:
	case remediation.ActionExclude:
		req.Exclude = []int{act.Rank}
	default:
		return remediation.Answer{}, fmt.Errorf("process actuator cannot %q", act.Kind)
	}
	r, err := c.Restart(ctx, req)
	if err != nil {
		return remediation.Answer{}, err
	}
	return remediation.Answer{At: r.At, Detail: r.Detail}, nil
}

func (a *Actuator) client(job string) (*Client, error) {
	path, ok := a.Socket(job)
	if !ok {
		return nil, fmt.Errorf("%w: no supervisor is known for job %q", remediation.ErrGone, job)
	}
	return NewClient(path), nil
}
