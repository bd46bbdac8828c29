package prom

import (
	"cmp"
	"math"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/exporters/internal/label"
	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// maxMatrix is the largest communicator whose delay matrix becomes series.
const maxMatrix = 32

// Master exports one job's master. It is safe for concurrent scrapes.
type Master struct {
	snapshot func() *collector.MasterSnapshot
	families *families

	mu      sync.Mutex
	latency *prometheus.HistogramVec
	counted map[string]bool // incidents in latency, as long as snapshots show them
	newest  time.Time       // snapshot that counted reflects
}

var _ prometheus.Collector = (*Master)(nil)

// NewMaster returns an exporter of the snapshots that snapshot returns. It must
// return at once; nil means that there is none yet.
func NewMaster(snapshot func() *collector.MasterSnapshot, opts Options) *Master {
	opts = opts.withDefaults(4000)
	return &Master{
		snapshot: snapshot,
		families: newFamilies(names.Master, opts.SeriesPerFamily, names.IncidentLatency),
		latency:  HistogramVec(names.IncidentLatency, 0.5, 1, 2, 3, 5, 10, 30, 60, 300),
		counted:  map[string]bool{},
	}
}

// Describe implements prometheus.Collector.
func (m *Master) Describe(ch chan<- *prometheus.Desc) {
	m.families.Describe(ch)
	m.latency.Describe(ch)
}

// Collect implements prometheus.Collector.
func (m *Master) Collect(ch chan<- prometheus.Metric) {
	p := m.families.begin(ch)
	if s := m.snapshot(); s != nil {
		sendIncidents(p, s)
		sendAgents(p, s)
		sendMatrix(p, s)
		for _, state := range label.ProcStates {
			p.send(names.JobRanks, float64(s.Ranks[state]), s.Job, label.ProcState(state))
		}
		p.send(names.JobWorldSize, float64(s.WorldSize), s.Job)
		p.send(names.JobStep, float64(s.Step), s.Job)
		p.send(names.JobAttempt, float64(s.Attempt), s.Job)
		p.send(names.Diagnoses, float64(s.Diagnoses), s.Job)
		p.send(names.DiagnosisSeconds, float64(s.DiagnosisNs)/1e9, s.Job)
		p.send(names.MasterOverflow, float64(s.Overflow), s.Job)
		p.send(names.MasterRefused, float64(s.Refused), s.Job)
		sendRecording(p, s)
		p.send(names.MasterDenied, float64(s.Denied), s.Job)
		p.send(names.MasterHandshakes, float64(s.Handshakes), s.Job)
		p.send(names.MasterMessages, float64(s.Messages), s.Job)
		p.send(names.MasterForeign, float64(s.Foreign), s.Job)
		p.send(names.MasterDuplicates, float64(s.Duplicates), s.Job)
		p.send(names.MasterFences, float64(s.Fences.Proven), s.Job, "proven")
		p.send(names.MasterFences, float64(s.Fences.Unproven), s.Job, "unproven")
		p.send(names.MasterFences, float64(s.Fences.Refused), s.Job, "refused")
		p.send(names.MasterFenced, float64(s.FencedAttempt), s.Job)
		p.send(names.MasterDisagree, float64(s.Disagreeing), s.Job)
		p.send(names.JobUnseen, float64(s.Unseen), s.Job)
		insecure := 0.0
		if s.Insecure {
			insecure = 1
		}
		p.send(names.MasterInsecure, insecure, s.Job)
		m.observeLatency(s)
	}
	m.latency.Collect(ch)
	p.end()
}

func sendIncidents(p *pass, s *collector.MasterSnapshot) {
	type kind struct {
		class diagnosis.Class
		level diagnosis.Level
	}
	open := map[kind]int{}
	for i := range s.Incidents {
		in := &s.Incidents[i]
		if !in.Closed.IsZero() {
			continue
		}
		v := &in.Verdict
		open[kind{v.Class, v.Level}]++
		culprit := diagnosis.Culprit{Rank: -1, Peer: -1}
		if len(v.Culprits) > 0 {
			culprit = v.Culprits[0]
		}
		rank, peer := culprit.Rank, culprit.Peer
		if v.Undetermined != "" {
			rank, peer = -1, -1 // one of several: nobody may be excluded for it
		}
		p.send(names.IncidentInfo, 1, s.Job, in.ID, v.Class.String(), v.Level.String(),
			culprit.Kind.String(), culprit.String(), label.Rank(rank), label.Rank(peer),
			culprit.Node, v.CommName, culprit.Reason, strconv.FormatUint(uint64(in.Attempt), 10), label.TraceID(in.TraceID))
	}
	for _, class := range diagnosis.Classes() {
		for _, level := range []diagnosis.Level{diagnosis.Suspected, diagnosis.Confirmed} {
			p.send(names.IncidentsOpen, float64(open[kind{class, level}]), s.Job, class.String(), level.String())
		}
		p.send(names.Incidents, float64(s.Opened[class]), s.Job, class.String())
		p.send(names.IncidentConfirms, float64(s.Confirmed[class]), s.Job, class.String())
	}
}

func sendAgents(p *pass, s *collector.MasterSnapshot) {
	states := map[string]int{names.StateConnected: 0, names.StateDisconnected: 0, names.StateLost: 0}
	var worst time.Duration
	for _, a := range s.Agents {
		worst = max(worst, a.MapError)
		states[label.Agent(a)]++
		if a.Lost {
			p.send(names.AgentLostInfo, 1, s.Job, a.Node)
		}
	}
	for state, n := range states {
		p.send(names.AgentsConnected, float64(n), s.Job, state)
	}
	p.send(names.NodeClockError, worst.Seconds(), s.Job)
}

func sendRecording(p *pass, s *collector.MasterSnapshot) {
	r := s.Recording
	if r == nil {
		return
	}
	p.send(names.RecordingBytes, float64(r.Bytes), s.Job)
	for reason, n := range r.Skipped {
		p.send(names.RecordingSkipped, float64(n), s.Job, reason)
	}
	if !r.Oldest.IsZero() {
		p.send(names.RecordingReach, s.At.Sub(r.Oldest).Seconds(), s.Job)
	}
}

// sendMatrix sends the delay of every connection. Communicators that share a
// name share its series; the slowest counts.
func sendMatrix(p *pass, s *collector.MasterSnapshot) {
	type cell struct {
		comm     string
		src, dst int
	}
	worst := map[cell]float64{}
	var order []cell
	for _, m := range s.Delay {
		if m.Size > maxMatrix || m.Size*m.Size > len(m.Ratio) {
			continue
		}
		for src := range m.Size {
			for dst := range m.Size {
				ratio := float64(m.Ratio[src*m.Size+dst])
				if math.IsNaN(ratio) {
					continue
				}
				c := cell{m.Comm, src, dst}
				before, known := worst[c]
				if !known {
					order = append(order, c)
				}
				worst[c] = max(before, ratio)
			}
		}
	}
	// The cap, when it cuts, cuts the fast ones.
	slices.SortStableFunc(order, func(a, b cell) int { return cmp.Compare(worst[b], worst[a]) })
	for _, c := range order {
		p.send(names.DelayRatio, worst[c], s.Job, c.comm, label.Rank(int32(c.src)), label.Rank(int32(c.dst)))
	}
}

// observeLatency counts every confirmed incident once. An incident stays in
// the snapshots for long after it closes, so no scrape interval misses it.
func (m *Master) observeLatency(s *collector.MasterSnapshot) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if s.At.Before(m.newest) {
		return // a scrape that began earlier and came later
	}
	m.newest = s.At
	shown := make(map[string]bool, len(s.Incidents))
	for i := range s.Incidents {
		in := &s.Incidents[i]
		if in.Confirmed.IsZero() {
			continue
		}
		shown[in.ID] = true
		if !m.counted[in.ID] && in.Verdict.Since != 0 {
			m.latency.WithLabelValues(valid(s.Job), in.Verdict.Class.String()).
				Observe(seconds(in.Confirmed.UnixNano() - in.Verdict.Since))
		}
	}
	m.counted = shown
}
