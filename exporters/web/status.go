package web

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis"
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
	// Situations fold ranks that stand alike, what needs eyes first; MoreSituations are left out.
	Situations     []Situation    `json:"situations"`
	MoreSituations int            `json:"more_situations"`
	Communicators  []Communicator `json:"communicators"` // those that hold somebody up first
	MoreComms      int            `json:"more_communicators"`
	Untracked      uint64         `json:"untracked"`
	Unseen         int            `json:"unseen_ranks"`      // that no agent tells of now
	Diagnosis      float64        `json:"diagnosis_seconds"` // the last pass
	// Connections are at most 64 paths between ranks, those that are broken or slow first.
	Connections []Connection `json:"connections"`

	now       time.Time
	standings []Standing
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
	// Timeline is what happened, in order: onset, verdicts, alert, webhook, action, recovery.
	Timeline []Event `json:"timeline"`
	// Links; the latter two are absent when the master was not told where these are.
	Runbook   string `json:"runbook,omitempty"` // on this server
	Dashboard string `json:"dashboard,omitempty"`
	Trace     string `json:"trace,omitempty"`
}

// Event is a moment of an incident's life.
type Event struct {
	At     time.Time `json:"at"`
	Offset float64   `json:"offset_seconds"` // since the onset
	Kind   string    `json:"kind"`           // onset, suspected, confirmed, closed, or a kind of note
	Text   string    `json:"text"`
}

// Culprit is whom an incident blames.
type Culprit struct {
	Kind   string `json:"kind"`
	Name   string `json:"name"`
	Node   string `json:"node,omitempty"`
	Reason string `json:"reason,omitempty"`
	rank   int32
	peer   int32
}

// Matrix is a communicator's delays as ratios to the median of their kind.
type Matrix struct {
	Communicator string       `json:"communicator"`
	Size         int          `json:"size"`
	Ratio        [][]*float64 `json:"ratio,omitempty"` // by source, then destination; null without a connection; absent when too large
	Worst        []Delay      `json:"worst"`           // slowest first
	World        []int32      `json:"world_ranks"`     // by rank in the communicator; -1 is one that nobody has reported
	Tells        bool         `json:"tells"`           // an open incident is about it
	bad          map[[2]int]bool
}

// Delay is one connection.
type Delay struct {
	Source           int     `json:"source"` // rank in the communicator
	Destination      int     `json:"destination"`
	SourceWorld      int     `json:"source_world"` // rank in the world
	DestinationWorld int     `json:"destination_world"`
	Ratio            float64 `json:"ratio"`
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
	RTT           float64 `json:"rtt_seconds,omitempty"` // between the two hosts
	told          bool    // broken, slow, or carried by another path
}

func connection(c *collector.ConnDetail) Connection {
	return Connection{
		Communicator: c.Comm, Source: c.Rank, Destination: c.PeerWorld, Transport: c.Transport.String(), Name: c.Name,
		NIC: c.NIC, Port: c.Port, Rail: c.Rail, QueuePair: c.QP, PeerQueuePair: c.PeerQP, Address: c.Address,
		State: c.State.String(), Cause: c.Cause.String(), Windows: c.Windows, Slow: c.Slow, Bandwidth: c.BytesPerSec,
		Latency: float64(c.LatencyNs) / 1e9, Switches: c.Switches, Outages: c.Outages, Resent: c.Resent,
		RTT:  float64(c.RTTNs) / 1e9,
		told: c.Anomaly() > 1,
	}
}

type status struct {
	snapshot func() *collector.MasterSnapshot
	job      func() *collector.JobView // nil where only verdicts are known
	links    Links
	now      func() time.Time
}

func (s *status) view() *Status {
	snap := s.snapshot()
	if snap == nil {
		return nil
	}
	v := &Status{
		Job: snap.Job, At: snap.At, Attempt: snap.Attempt, Step: snap.Step, WorldSize: snap.WorldSize,
		Untracked: snap.Overflow, Unseen: snap.Unseen, Diagnosis: snap.DiagnosisLast.Seconds(),
		Ranks: []Count{}, Agents: []Agent{}, Open: []Incident{}, Closed: []Incident{}, Delay: []Matrix{}, Situations: []Situation{}, Connections: []Connection{},
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
		s.links.of(snap.Job, &in, v.now)
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
			v.Delay = append(v.Delay, matrix(m, v.Open))
		}
	}
	slices.SortStableFunc(v.Delay, func(a, b Matrix) int {
		if a.Tells != b.Tells {
			if a.Tells {
				return -1
			}
			return 1
		}
		return 0
	})
	if s.job != nil {
		job := s.job()
		v.standings = Stand(job, v.Open)
		if more := 0; len(v.standings) > 0 {
			v.Situations, more = Fold(v.standings)
			v.MoreSituations = more
		}
		v.Communicators, v.MoreComms = communicators(job)
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
		out.Culprits = append(out.Culprits, Culprit{Kind: c.Kind.String(), Name: c.String(), Node: c.Node, Reason: c.Reason, rank: c.Rank, peer: peerOf(&c)})
	}
	if !in.Confirmed.IsZero() {
		out.Confirmed = &in.Confirmed
	}
	if !in.Closed.IsZero() {
		out.Closed = &in.Closed
	}
	out.Timeline = timeline(in, &out)
	return out
}

// peerOf is the culprit's other end, -1 when it has none.
func peerOf(c *diagnosis.Culprit) int32 {
	if c.Kind == diagnosis.CulpritConnection {
		return c.Peer
	}
	return -1
}

// timeline is an incident's life: the master's own moments, and what others told it.
func timeline(in *collector.Incident, out *Incident) []Event {
	list := []Event{{At: out.Since, Kind: "onset", Text: "the first sign of it, as found later"}}
	add := func(at time.Time, kind, text string) {
		if !at.IsZero() {
			list = append(list, Event{At: at, Kind: kind, Text: text})
		}
	}
	if in.Opened.Before(in.Confirmed) || in.Confirmed.IsZero() {
		add(in.Opened, names.LevelSuspected, "the master has a suspicion")
	}
	add(in.Confirmed, names.LevelConfirmed, "the master is sure: an alert may follow")
	for _, n := range in.Notes {
		add(n.At, n.Kind, n.Text)
	}
	add(in.Closed, "closed", "gone for long enough, or the job was started again")
	slices.SortStableFunc(list, func(a, b Event) int { return a.At.Compare(b.At) })
	for i := range list {
		list[i].Offset = list[i].At.Sub(out.Since).Seconds()
	}
	return list
}

func matrix(m collector.DelayMatrix, open []Incident) Matrix {
	out := Matrix{Communicator: m.Comm, Size: m.Size, Worst: []Delay{}, World: m.World}
	if len(out.World) != m.Size { // a snapshot of before
		out.World = make([]int32, m.Size)
		for i := range out.World {
			out.World[i] = -1
		}
	}
	if m.Size <= maxMatrix {
		out.Ratio = make([][]*float64, m.Size)
	}
	out.bad = blamedCells(out.World, m.Comm, open)
	out.Tells = len(out.bad) > 0
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
				out.Worst = append(out.Worst, Delay{src, dst, int(out.World[src]), int(out.World[dst]), ratio})
			}
		}
	}
	slices.SortStableFunc(out.Worst, func(a, b Delay) int { return cmp.Compare(b.Ratio, a.Ratio) })
	out.Worst = out.Worst[:min(len(out.Worst), worstShown)]
	return out
}

// blamedCells are the connections of a communicator that open incidents blame: what is red.
func blamedCells(world []int32, comm string, open []Incident) map[[2]int]bool {
	bad := map[[2]int]bool{}
	for i := range open {
		if open[i].Communicator != comm || open[i].Class != names.ClassCommunicationSlow && open[i].Class != names.ClassCommunicationHang {
			continue
		}
		for _, c := range open[i].Culprits {
			for src, a := range world {
				for dst, b := range world {
					if src == dst || a < 0 || b < 0 {
						continue
					}
					switch c.Kind {
					case diagnosis.CulpritConnection.String():
						bad[[2]int{src, dst}] = bad[[2]int{src, dst}] || a == c.rank && b == c.peer
					case diagnosis.CulpritSource.String():
						bad[[2]int{src, dst}] = bad[[2]int{src, dst}] || a == c.rank
					case diagnosis.CulpritDest.String():
						bad[[2]int{src, dst}] = bad[[2]int{src, dst}] || b == c.rank
					}
				}
			}
		}
	}
	for k, is := range bad {
		if !is {
			delete(bad, k)
		}
	}
	return bad
}
