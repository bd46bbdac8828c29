package preflight

// survey is what rank 0 has gathered so far.
type survey struct {
	ranks []rankState
	edges []edge // row-major by source
}

// rankState is what is known of a rank.
type rankState struct {
	node, device string
	self         self
	together     float64
	err          string
	gone         string // why it takes part no more, "" while it does
}

// edge is an ordered pair of ranks.
type edge struct {
	done       bool    // it was tried, whatever came of it
	bandwidth  float64 // bytes per second; 0: nothing
	latency    float64 // seconds; 0: nothing
	latencyP99 float64
	blocked    bool // what was sent did not arrive
	err        string
}

func newSurvey(n int) *survey {
	return &survey{ranks: make([]rankState, n), edges: make([]edge, n*n)}
}

func (s *survey) size() int                 { return len(s.ranks) }
func (s *survey) edge(src, dst int) *edge   { return &s.edges[src*len(s.ranks)+dst] }
func (s *survey) sameNode(a, b int) bool    { return s.ranks[a].node == s.ranks[b].node }
func (s *survey) lose(rank int, why string) { s.ranks[rank].gone = why }

// pair takes over what two ranks found of each other. Of an edge that was measured
// before the better values count: a transient is no fault.
func (s *survey) pair(a, b int, ma, mb *measured) {
	failed := ma.Err != "" || mb.Err != ""
	// A message that has been sent and not got is on a blocked edge. When all have
	// arrived, or none were sent, nobody can tell which way it failed.
	ab, ba := failed && ma.Sent > mb.Got, failed && mb.Sent > ma.Got
	if failed && !ab && !ba {
		ab, ba = true, true
	}
	why := ma.Err
	if why == "" || ba && mb.Err != "" {
		why = mb.Err
	}
	latency, p99 := ma.Latency, ma.LatencyP99
	if latency == 0 {
		latency, p99 = mb.Latency, mb.LatencyP99
	}
	s.edge(a, b).merge(edge{bandwidth: ma.Bandwidth, latency: latency, latencyP99: p99, blocked: ab}, why)
	s.edge(b, a).merge(edge{bandwidth: mb.Bandwidth, latency: latency, latencyP99: p99, blocked: ba}, why)
}

func (e *edge) merge(now edge, why string) {
	if now.blocked {
		now.err = why
	}
	if e.done {
		now.bandwidth = max(now.bandwidth, e.bandwidth)
		if e.latency > 0 && (now.latency == 0 || e.latency < now.latency) {
			now.latency, now.latencyP99 = e.latency, e.latencyP99
		}
		if !e.blocked {
			now.blocked, now.err = false, ""
		}
	}
	now.done = true
	*e = now
}

// take takes over a rank's word of itself.
func (s *survey) take(rank int, r *report) {
	st := &s.ranks[rank]
	if r.Node != "" {
		st.node, st.device = r.Node, r.Device
	}
	if r.Self != nil {
		st.self.Memory = max(st.self.Memory, r.Self.Memory)
		st.self.Compute = max(st.self.Compute, r.Self.Compute)
	}
	st.together = max(st.together, r.Together)
	if r.Err != "" || r.Self != nil {
		st.err = r.Err
	}
}
