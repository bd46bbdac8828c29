package preflight

import (
	"math"
	"slices"
	"strconv"
	"time"
)

// Report is what a check has found. It is data: whoever has it may write, print and
// change it.
type Report struct {
	Verdict string    `json:"verdict"` // one of those below; incomplete with the Error
	Error   string    `json:"error,omitempty"`
	Began   time.Time `json:"began"`
	Seconds float64   `json:"seconds"`

	Ranks    []Rank    `json:"ranks"`
	Typical  []Typical `json:"typical"`
	Findings []Finding `json:"findings"`
	BadEdges int       `json:"bad_edges"`
	Good     []string  `json:"good_nodes"`
	Bad      []string  `json:"bad_nodes"`

	// The delay matrix, a row a source: bytes per second (0 when nothing arrives),
	// seconds of half a round trip, and its 99th percentile; null: not measured.
	Bandwidth  [][]Value `json:"bandwidth"`
	Latency    [][]Value `json:"latency"`
	LatencyP99 [][]Value `json:"latency_p99"`

	// Faults are why an edge is bad, a row a source.
	Faults [][]Fault `json:"-"`
	// TypicalTogether is how many bytes per second a rank sends while all do, 0: not measured.
	TypicalTogether float64 `json:"-"`
}

// Verdicts.
const (
	VerdictGood       = "good"
	VerdictBad        = "bad"
	VerdictIncomplete = "incomplete"
)

// Rank is what was measured of a rank itself, 0 when it was not.
type Rank struct {
	Node     string  `json:"node"`
	Device   string  `json:"device"`
	Memory   float64 `json:"memory_bytes_per_second"`
	Compute  float64 `json:"compute_operations_per_second"`
	Together float64 `json:"together_bytes_per_second,omitempty"`
	Gone     string  `json:"gone,omitempty"`
	Error    string  `json:"error,omitempty"`
}

// Typical is the norm of a kind of edges.
type Typical struct {
	Kind      string  `json:"kind"`
	Edges     int     `json:"edges"`
	Bandwidth float64 `json:"bandwidth"`
	Latency   float64 `json:"latency"`
}

// Value is a measurement, NaN where there is none.
type Value float64

// MarshalJSON writes NaN as null.
func (v Value) MarshalJSON() ([]byte, error) {
	if math.IsNaN(float64(v)) {
		return []byte("null"), nil
	}
	return strconv.AppendFloat(nil, float64(v), 'g', 6, 64), nil
}

// Kind is that of an edge, as Typical has it.
func (r *Report) Kind(src, dst int) string {
	if r.Ranks[src].Node == r.Ranks[dst].Node {
		return kindNames[withinNode]
	}
	return kindNames[betweenNodes]
}

// Unmeasured is the report of a check whose ranks did not meet, because of err.
func Unmeasured(ranks int, began time.Time, err error) *Report {
	return newReport(newSurvey(max(ranks, 1)), Limits{}, began, err)
}

// newReport judges a survey; err is why it is not complete, if it is not.
func newReport(s *survey, l Limits, began time.Time, err error) *Report {
	j := judge(s, l)
	r := &Report{
		Verdict: VerdictGood, Began: began.UTC().Round(time.Millisecond), Seconds: time.Since(began).Seconds(),
		Findings: s.findings(j), Good: []string{}, Bad: []string{}, TypicalTogether: j.together,
	}
	for i := range s.ranks {
		st := &s.ranks[i]
		r.Ranks = append(r.Ranks, Rank{st.node, st.device, st.self.Memory, st.self.Compute, st.together, st.gone, st.err})
	}
	for kind, n := range j.norms {
		if n.edges > 0 {
			r.Typical = append(r.Typical, Typical{kindNames[kind], n.edges, n.bandwidth, n.latency})
		}
	}
	for row := range slices.Chunk(j.bad, s.size()) {
		r.Faults = append(r.Faults, row)
	}
	for _, f := range j.bad {
		if f != 0 {
			r.BadEdges++
		}
	}
	r.Bandwidth = s.matrix(func(e *edge) float64 { return e.bandwidth }, true)
	r.Latency = s.matrix(func(e *edge) float64 { return e.latency }, false)
	r.LatencyP99 = s.matrix(func(e *edge) float64 { return e.latencyP99 }, false)
	switch {
	case len(r.Findings) > 0:
		r.Verdict = VerdictBad
	case err != nil:
		r.Verdict = VerdictIncomplete
	}
	if err != nil {
		r.Error = err.Error()
	}
	for _, name := range s.nodes().names {
		switch {
		case name == "": // of a rank that never said where it is
		case slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.about(name) }):
			r.Bad = append(r.Bad, name)
		case err == nil:
			r.Good = append(r.Good, name)
		}
	}
	return r
}

// matrix is a value of all edges, NaN where there is none; zero tells whether a 0
// of a blocked edge is a value.
func (s *survey) matrix(of func(*edge) float64, zero bool) [][]Value {
	rows := make([][]Value, s.size())
	for src := range rows {
		rows[src] = make([]Value, s.size())
		for dst := range rows[src] {
			e := s.edge(src, dst)
			v := of(e)
			if v == 0 && !(zero && e.blocked) {
				v = math.NaN()
			}
			rows[src][dst] = Value(v)
		}
	}
	return rows
}

// status is what rank 0 tells the others of a report, and the exit status of all.
func (r *Report) status() int {
	switch r.Verdict {
	case VerdictGood:
		return 0
	case VerdictBad:
		return StatusBad
	}
	return statusIncomplete
}
