package web

import (
	"cmp"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html/template"
	"math"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis/replay"
	"github.com/lockstep-ccl/lockstep/exporters/internal/label"
	"github.com/lockstep-ccl/lockstep/exporters/names"
)

const (
	staleAfter   = 5 * time.Second
	maxMatrix    = 32 // ranks; a larger communicator shows its worst connections
	worstShown   = 10
	worstFrom    = 1.5 // ratio from which a connection is worth a line
	refreshAfter = 2   // seconds
)

// Status is what /api/v1/status returns and what the page shows. Fields are
// only ever added.
type Status struct {
	Job       string     `json:"job"`
	At        time.Time  `json:"at"`
	Stale     bool       `json:"stale"`  // the master has not published for a while
	Health    string     `json:"health"` // confirmed, suspected, healthy; unknown when nodes or ranks are out of sight, or none has been seen
	Attempt   uint32     `json:"attempt"`
	Step      uint64     `json:"step"`
	WorldSize int        `json:"world_size"`
	Ranks     []Count    `json:"ranks"`
	Agents    []Agent    `json:"agents"`
	Open      []Incident `json:"open_incidents"`
	Closed    []Incident `json:"closed_incidents"` // newest first
	Delay     []Matrix   `json:"delay_matrices"`
	// Connections are at most 64 paths between ranks, those that are broken or slow first.
	Connections []Connection `json:"connections"`
	Untracked   uint64       `json:"untracked"`
	Unseen      int          `json:"unseen_ranks"`      // that no agent tells of now
	Diagnosis   float64      `json:"diagnosis_seconds"` // the last pass

	now time.Time
}

// Count is how many ranks are in a state.
type Count struct {
	State string `json:"state"`
	Ranks int    `json:"ranks"`
}

// Agent is one node's agent.
type Agent struct {
	Node       string    `json:"node"`
	State      string    `json:"state"`
	LastSeen   time.Time `json:"last_seen"`
	Ranks      int       `json:"ranks"`
	ClockError float64   `json:"clock_error_seconds"`
}

// Incident is a fault, open or closed.
type Incident struct {
	ID           string     `json:"id"`
	Class        string     `json:"class"`
	Level        string     `json:"level"`
	Culprits     []Culprit  `json:"culprits"`
	Communicator string     `json:"communicator"`
	Collective   string     `json:"collective"`
	Sequence     uint64     `json:"sequence"`
	Victims      int        `json:"victims"`
	Evidence     []string   `json:"evidence"`
	Attempt      uint32     `json:"attempt"`
	TraceID      string     `json:"trace_id,omitempty"`
	Since        time.Time  `json:"since"`
	Opened       time.Time  `json:"opened"`
	Confirmed    *time.Time `json:"confirmed,omitempty"`
	Closed       *time.Time `json:"closed,omitempty"`
	Recording    string     `json:"recording,omitempty"` // file in the incidents folder of the master's state directory, for lockstep diagnose
}

// Culprit is whom an incident blames.
type Culprit struct {
	Kind   string `json:"kind"`
	Name   string `json:"name"`
	Node   string `json:"node,omitempty"`
	Reason string `json:"reason,omitempty"`
}

// Matrix is a communicator's delays as ratios to the median of their kind.
type Matrix struct {
	Communicator string       `json:"communicator"`
	Size         int          `json:"size"`
	Ratio        [][]*float64 `json:"ratio,omitempty"` // by source, then destination; null without a connection; absent when too large
	Worst        []Delay      `json:"worst"`           // slowest first
}

// Delay is one connection.
type Delay struct {
	Source      int     `json:"source"`
	Destination int     `json:"destination"`
	Ratio       float64 `json:"ratio"`
}

// Connection is one path from a rank to another.
type Connection struct {
	Communicator  string  `json:"communicator"`
	Source        int32   `json:"source"`
	Destination   int32   `json:"destination"`
	Transport     string  `json:"transport"`
	Name          string  `json:"name"` // NIC and port of both ends, or their addresses
	NIC           string  `json:"nic,omitempty"`
	Port          int     `json:"port,omitempty"`
	Rail          int     `json:"rail,omitempty"` // from 1
	QueuePair     uint64  `json:"queue_pair,omitempty"`
	PeerQueuePair uint32  `json:"peer_queue_pair,omitempty"`
	Address       string  `json:"address,omitempty"`
	State         string  `json:"state"`
	Cause         string  `json:"cause"` // of slowness now, none when it is not slow
	Windows       uint64  `json:"windows"`
	Slow          uint64  `json:"slow_windows"`
	Bandwidth     float64 `json:"last_bandwidth_bytes_per_second"`
	Latency       float64 `json:"last_latency_seconds"`
	Switches      uint64  `json:"switches"`
	Outages       uint64  `json:"outages"`
	Resent        uint64  `json:"resent_bytes"`
}

func connection(c *collector.ConnDetail) Connection {
	return Connection{
		Communicator: c.Comm, Source: c.Rank, Destination: c.PeerWorld, Transport: c.Transport.String(), Name: c.Name,
		NIC: c.NIC, Port: c.Port, Rail: c.Rail, QueuePair: c.QP, PeerQueuePair: c.PeerQP, Address: c.Address,
		State: c.State.String(), Cause: c.Cause.String(), Windows: c.Windows, Slow: c.Slow, Bandwidth: c.BytesPerSec,
		Latency: float64(c.LatencyNs) / 1e9, Switches: c.Switches, Outages: c.Outages, Resent: c.Resent,
	}
}

type status struct {
	snapshot func() *collector.MasterSnapshot
	now      func() time.Time
}

func newStatus(snapshot func() *collector.MasterSnapshot, now func() time.Time) *status {
	return &status{snapshot, now}
}

func (s *status) view() *Status {
	snap := s.snapshot()
	if snap == nil {
		return nil
	}
	v := &Status{
		Job: snap.Job, At: snap.At, Attempt: snap.Attempt, Step: snap.Step, WorldSize: snap.WorldSize,
		Untracked: snap.Overflow, Unseen: snap.Unseen, Diagnosis: snap.DiagnosisLast.Seconds(),
		Ranks: []Count{}, Agents: []Agent{}, Open: []Incident{}, Closed: []Incident{}, Delay: []Matrix{}, Connections: []Connection{},
		now: s.now(),
	}
	v.Stale = v.now.Sub(snap.At) > staleAfter
	for _, state := range label.ProcStates {
		if n := snap.Ranks[state]; n > 0 {
			v.Ranks = append(v.Ranks, Count{label.ProcState(state), n})
		}
	}
	for _, a := range snap.Agents {
		v.Agents = append(v.Agents, Agent{a.Node, label.Agent(a), a.LastSeen, a.Ranks, a.MapError.Seconds()})
	}
	v.Health = "healthy"
	if len(v.Agents) == 0 || v.Lost() > 0 || v.WorldSize == 0 || v.Unseen > 0 || v.Stale {
		v.Health = "unknown"
	}
	for i := range snap.Incidents {
		in := incident(&snap.Incidents[i])
		if snap.Recording != nil {
			in.Recording = replay.IncidentFile(in.ID)
		}
		if in.Closed != nil {
			v.Closed = append(v.Closed, in)
			continue
		}
		v.Open = append(v.Open, in)
		if v.Health != names.LevelConfirmed {
			v.Health = in.Level
		}
	}
	slices.SortStableFunc(v.Closed, func(a, b Incident) int { return b.Closed.Compare(*a.Closed) })
	// What may be acted on comes first, then what began first.
	slices.SortStableFunc(v.Open, func(a, b Incident) int {
		if a.Level != b.Level {
			if a.Level == names.LevelConfirmed {
				return -1
			}
			return 1
		}
		return a.Since.Compare(b.Since)
	})
	for _, m := range snap.Delay {
		if m.Size > 0 && len(m.Ratio) == m.Size*m.Size {
			v.Delay = append(v.Delay, matrix(m))
		}
	}
	for i := range snap.Connections {
		v.Connections = append(v.Connections, connection(&snap.Connections[i]))
	}
	return v
}

func incident(in *collector.Incident) Incident {
	d := &in.Verdict
	out := Incident{
		ID: in.ID, Class: d.Class.String(), Level: d.Level.String(), Communicator: d.CommName,
		Collective: d.Coll.String(), Sequence: d.Seq, Victims: d.Victims, Attempt: in.Attempt,
		TraceID: label.TraceID(in.TraceID), Since: time.Unix(0, d.Since), Opened: in.Opened,
		Evidence: append([]string{}, d.Why...), Culprits: []Culprit{},
	}
	if d.Since == 0 {
		out.Since = in.Opened
	}
	out.Evidence = append(out.Evidence, d.Chain...)
	if d.Undetermined != "" {
		out.Evidence = append(out.Evidence, "not told: "+d.Undetermined)
	}
	if d.Counter != "" {
		out.Evidence = append(out.Evidence, "would change it: "+d.Counter)
	}
	for _, c := range d.Culprits {
		out.Culprits = append(out.Culprits, Culprit{c.Kind.String(), c.String(), c.Node, c.Reason})
	}
	if !in.Confirmed.IsZero() {
		out.Confirmed = &in.Confirmed
	}
	if !in.Closed.IsZero() {
		out.Closed = &in.Closed
	}
	return out
}

func matrix(m collector.DelayMatrix) Matrix {
	out := Matrix{Communicator: m.Comm, Size: m.Size, Worst: []Delay{}}
	if m.Size <= maxMatrix {
		out.Ratio = make([][]*float64, m.Size)
	}
	for src := range m.Size {
		for dst := range m.Size {
			ratio := float64(m.Ratio[src*m.Size+dst])
			known := !math.IsNaN(ratio) && !math.IsInf(ratio, 0)
			if out.Ratio != nil {
				var cell *float64
				if known {
					cell = &ratio
				}
				out.Ratio[src] = append(out.Ratio[src], cell)
			}
			if known && ratio >= worstFrom {
				out.Worst = append(out.Worst, Delay{src, dst, ratio})
			}
		}
	}
	slices.SortStableFunc(out.Worst, func(a, b Delay) int { return cmp.Compare(b.Ratio, a.Ratio) })
	out.Worst = out.Worst[:min(len(out.Worst), worstShown)]
	return out
}

func (s *status) json(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	v := s.view()
	if v == nil {
		w.WriteHeader(http.StatusServiceUnavailable)
		fmt.Fprintln(w, `{"error":"the master has not published a snapshot yet"}`)
		return
	}
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	_ = enc.Encode(v) // an error here is a reader that left
}

//go:embed status.html
var pageSource string

//go:embed status.css
var styleSheet string

var page = template.Must(template.New("status").Funcs(template.FuncMap{
	"clock": func(t time.Time) string { return t.UTC().Format("15:04:05") },
	"stamp": func(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05 UTC") },
	"heat":  heat,
	"ratio": func(r float64) string { return strconv.FormatFloat(r, 'f', 1, 64) },
	"micro": func(s float64) string { return (time.Duration(s * 1e9)).Round(time.Microsecond).String() },
	"style": func() template.CSS { return template.CSS(styleSheet) },
}).Parse(pageSource))

// heat returns the class of a cell: cool when normal, hot at four times the median.
func heat(ratio float64) string {
	for class, from := range []float64{0, 1.25, 1.5, 2, 4} {
		if ratio < from {
			return "h" + strconv.Itoa(class-1)
		}
	}
	return "h4"
}

// Lost is how many nodes the master has lost sight of.
func (s *Status) Lost() (n int) {
	for _, a := range s.Agents {
		if a.State == names.StateLost {
			n++
		}
	}
	return n
}

// Confirmed is how many open incidents may be acted on.
func (s *Status) Confirmed() (n int) {
	for _, in := range s.Open {
		if in.Level == names.LevelConfirmed {
			n++
		}
	}
	return n
}

// Ago says how long before the page was rendered t was.
func (s *Status) Ago(t time.Time) string { return span(s.now.Sub(t)) }

// Lasted says how long a closed incident was open, from its onset.
func (in Incident) Lasted() string { return span(in.Closed.Sub(in.Since)) }

func span(d time.Duration) string {
	d = max(d, 0)
	switch {
	case d < 10*time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < time.Minute:
		return fmt.Sprintf("%.0f s", d.Seconds())
	case d < time.Hour:
		return fmt.Sprintf("%d min %d s", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h %d min", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%d days", int(d.Hours()/24))
}

// The page may load nothing and run nothing but its own style sheet.
var contentPolicy = func() string {
	sum := sha256.Sum256([]byte(styleSheet))
	return "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; style-src 'sha256-" +
		base64.StdEncoding.EncodeToString(sum[:]) + "'"
}()

func (s *status) html(w http.ResponseWriter, r *http.Request) {
	refresh := refreshAfter
	if n, err := strconv.Atoi(r.URL.Query().Get("refresh")); err == nil && n >= 0 && n <= 3600 {
		refresh = n
	}
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Cache-Control", "no-store")
	h.Set("Content-Security-Policy", contentPolicy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	_ = page.Execute(w, struct { // an error here is a reader that left
		Refresh int
		*Status
	}{refresh, s.view()})
}
