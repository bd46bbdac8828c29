package preflight

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Report is what --json writes.
type Report struct {
	Verdict string    `json:"verdict"` // good, bad, or incomplete with the Error
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

	survey *survey
	judged *judgement
}

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

// newReport judges a survey; err is why it is not complete, if it is not.
func newReport(s *survey, l limits, began time.Time, err error) *Report {
	j := judge(s, l)
	r := &Report{
		Verdict: "good", Began: began.UTC().Round(time.Millisecond), Seconds: time.Since(began).Seconds(),
		Findings: s.findings(j), Good: []string{}, Bad: []string{}, survey: s, judged: j,
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
		r.Verdict = "bad"
	case err != nil:
		r.Verdict = "incomplete"
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

// status is the exit status that a report stands for.
func (r *Report) status() int {
	switch r.Verdict {
	case "good":
		return 0
	case "bad":
		return StatusBad
	}
	return 1
}

// summary is the report in a line.
func (r *Report) summary() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %d ranks on %d nodes", strings.ToUpper(r.Verdict), len(r.Ranks), len(r.survey.nodes().names))
	for _, t := range r.Typical {
		fmt.Fprintf(&b, "; %s %s, %s", t.Kind, gigabytes(t.Bandwidth), micros(t.Latency))
	}
	if t := r.judged.together; t > 0 {
		fmt.Fprintf(&b, "; all at once %s a rank", gigabytes(t))
	}
	if r.Verdict == "bad" {
		fmt.Fprintf(&b, "; %d bad edges, keep out: %s", r.BadEdges, strings.Join(r.Bad, " "))
	}
	if r.Error != "" {
		fmt.Fprintf(&b, "; incomplete: %s", r.Error)
	}
	return b.String()
}

// save writes the files that the command line asks for.
func (r *Report) save(c *Cmd) error {
	if c.JSON != "" {
		b, err := json.Marshal(r)
		if err != nil {
			return err
		}
		if err := replace(c.JSON, append(b, '\n')); err != nil {
			return err
		}
	}
	if c.Good != "" {
		var b strings.Builder
		for _, name := range r.Good {
			fmt.Fprintln(&b, name)
		}
		if err := replace(c.Good, []byte(b.String())); err != nil {
			return err
		}
	}
	if c.Prom != "" {
		return r.textfile(c.Prom)
	}
	return nil
}

// replace writes a file as a whole: whoever reads it sees the old one or the new.
func replace(path string, b []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*") // mode 0600
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	_, err = f.Write(b)
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}
