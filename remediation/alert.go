package remediation

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/alertmanager/template"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// Errors of a webhook that changes nothing. Each is counted under its own result.
var (
	ErrMalformed    = errors.New("malformed webhook")
	ErrTruncated    = errors.New("truncated webhook: Alertmanager left alerts out, not acting on a partial view (raise max_alerts)")
	ErrVersion      = errors.New("unknown webhook version")
	ErrUnauthorized = errors.New("unauthorized")
)

// MaxWebhookBytes and MaxWebhookAlerts bound one request.
const (
	MaxWebhookBytes  = 1 << 20
	MaxWebhookAlerts = 256
)

// Alert is what remediation reads of one alert: who broke step, and why.
type Alert struct {
	Name        string    `json:"name"`
	Job         string    `json:"job"`
	Incident    string    `json:"incident"`
	Class       string    `json:"class"`
	Level       string    `json:"level"`
	CulpritKind string    `json:"culprit_kind,omitempty"`
	Culprit     string    `json:"culprit,omitempty"`
	Rank        int       `json:"rank"`              // -1 when the alert names none
	Attempt     *int      `json:"attempt,omitempty"` // of the job, that the incident is about
	Node        string    `json:"node,omitempty"`
	Reason      string    `json:"reason,omitempty"`
	Fingerprint string    `json:"fingerprint"`
	StartsAt    time.Time `json:"starts_at"`
	Opened      time.Time `json:"opened,omitzero"` // the incident, by its master's word
}

// began is when it began: by its master's word once there is one, since whoever posts the alert picks StartsAt.
func (a *Alert) began() time.Time {
	if !a.Opened.IsZero() {
		return a.Opened
	}
	return a.StartsAt
}

// key identifies one firing of an alert: Alertmanager repeats a notification
// with the same fingerprint and start.
func (a *Alert) key() string {
	return a.Fingerprint + "|" + a.StartsAt.UTC().Format(time.RFC3339Nano)
}

// actionID names the one action that an incident may lead to. It is derived, so
// that two alerts of one incident, or one alert read twice, mean the same action.
func (a *Alert) actionID() string {
	h := sha256.Sum256([]byte(a.Job + "\x00" + a.Incident))
	return hex.EncodeToString(h[:8])
}

// message is Alertmanager's webhook, version 4.
type message struct {
	template.Data
	Version         string `json:"version"`
	GroupKey        string `json:"groupKey"`
	TruncatedAlerts uint64 `json:"truncatedAlerts"`
}

// decode reads a webhook. Fields that it does not know are ignored (a newer
// Alertmanager may send more), fields that it needs are checked: an alert that
// lacks one is not returned and makes bad grow.
func decode(r io.Reader) (firing []Alert, resolved int, bad int, err error) {
	body, err := io.ReadAll(io.LimitReader(r, MaxWebhookBytes+1))
	if err != nil {
		return nil, 0, 0, fmt.Errorf("%w: read body: %w", ErrMalformed, err)
	}
	if len(body) > MaxWebhookBytes {
		return nil, 0, 0, fmt.Errorf("%w: body is over %d bytes", ErrMalformed, MaxWebhookBytes)
	}
	var m message
	if err := json.Unmarshal(body, &m); err != nil {
		return nil, 0, 0, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if m.Version != "4" {
		return nil, 0, 0, fmt.Errorf("%w: %.16q, want \"4\"", ErrVersion, m.Version)
	}
	if m.TruncatedAlerts > 0 {
		return nil, 0, 0, fmt.Errorf("%w (%d left out)", ErrTruncated, m.TruncatedAlerts)
	}
	if len(m.Alerts) == 0 {
		return nil, 0, 0, fmt.Errorf("%w: no alerts", ErrMalformed)
	}
	if len(m.Alerts) > MaxWebhookAlerts {
		return nil, 0, 0, fmt.Errorf("%w: %d alerts, at most %d", ErrMalformed, len(m.Alerts), MaxWebhookAlerts)
	}
	for i := range m.Alerts {
		al := &m.Alerts[i]
		switch al.Status {
		case "resolved":
			resolved++
			continue
		case "firing":
		default:
			bad++
			continue
		}
		a := Alert{
			Name:        al.Labels["alertname"],
			Job:         al.Labels[names.LabelJob],
			Incident:    al.Labels[names.LabelIncident],
			Class:       al.Labels[names.LabelClass],
			Level:       al.Labels[names.LabelLevel],
			CulpritKind: al.Labels[names.LabelCulpritKind],
			Culprit:     al.Labels[names.LabelCulprit],
			Node:        al.Labels[names.LabelNode],
			Reason:      al.Labels[names.LabelReason],
			Rank:        -1,
			Fingerprint: al.Fingerprint,
			StartsAt:    al.StartsAt,
		}
		rank, errRank := number(al.Labels[names.LabelRank])
		attempt, errAttempt := number(al.Labels[names.LabelAttempt])
		if errors.Join(errRank, errAttempt, a.check()) != nil {
			bad++
			continue
		}
		if rank != nil {
			a.Rank = *rank
		}
		a.Attempt = attempt
		firing = append(firing, a)
	}
	return firing, resolved, bad, nil
}

// check says whether an alert carries what a decision needs.
func (a *Alert) check() error {
	for _, f := range []struct {
		name, v  string
		optional bool
	}{
		{"alertname", a.Name, false}, {names.LabelJob, a.Job, false}, {names.LabelIncident, a.Incident, false},
		{names.LabelClass, a.Class, false}, {names.LabelLevel, a.Level, false}, {"fingerprint", a.Fingerprint, false},
		{names.LabelCulprit, a.Culprit, true}, {names.LabelCulpritKind, a.CulpritKind, true},
		{names.LabelNode, a.Node, true}, {names.LabelReason, a.Reason, true},
	} {
		if f.v == "" && !f.optional {
			return fmt.Errorf("alert without %s", f.name)
		}
		if len(f.v) > 512 || strings.ContainsRune(f.v, 0) {
			return fmt.Errorf("alert with an unusable %s", f.name)
		}
	}
	if a.StartsAt.IsZero() {
		return errors.New("alert without startsAt")
	}
	return nil
}

// number reads an optional label that is a small number.
func number(s string) (*int, error) {
	if s == "" {
		return nil, nil
	}
	n, err := strconv.Atoi(s)
	if err == nil && (n < 0 || n > 1<<24) {
		err = strconv.ErrRange
	}
	return &n, err
}
