package preflight

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// latencyFloor is by how much a latency must be above the typical one: less than
// that is the scheduler's.
const latencyFloor = 20e-6

// Fault is a set of reasons why an edge or a rank is bad.
type Fault uint8

// Reasons: the first three are an edge's, the others a rank's.
const (
	LowBandwidth Fault = 1 << iota
	HighLatency
	Blocked
	SlowMemory
	SlowCompute
	SlowTogether
	Gone
	Failed
)

var faultNames = []string{"bandwidth", "latency", "blocked", "memory", "compute", "together", "gone", "error"}

func (f Fault) names() []string {
	var names []string
	for i, name := range faultNames {
		if f&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return names
}

// Edges are of two kinds, each with a norm of its own.
const (
	withinNode = iota
	betweenNodes
	numKinds
)

var kindNames = [numKinds]string{"within a node", "between nodes"}

// norm is what is typical of a kind of edges.
type norm struct {
	edges              int
	bandwidth, latency float64
}

// judgement is what is bad in a survey.
type judgement struct {
	bad       []Fault // of each edge, as the survey has them
	slowRanks map[int]Fault
	norms     [numKinds]norm
	self      self // typical
	together  float64
}

func judge(s *survey, l Limits) *judgement {
	n := s.size()
	j := &judgement{bad: make([]Fault, n*n), slowRanks: map[int]Fault{}}
	for kind := range numKinds {
		var of []int
		var slowness, latency []float64
		for i := range s.edges {
			e := &s.edges[i]
			if src, dst := i/n, i%n; !e.done || (kind == withinNode) != s.sameNode(src, dst) || s.ranks[src].gone != "" || s.ranks[dst].gone != "" {
				continue
			}
			of = append(of, i)
			if e.bandwidth > 0 {
				slowness = append(slowness, 1/e.bandwidth)
			}
			if e.latency > 0 {
				latency = append(latency, e.latency)
			}
		}
		slow, slowest := diagnosis.Norm(slowness, l.Tolerance, 0)
		late, latest := diagnosis.Norm(latency, 2*l.Tolerance, latencyFloor)
		j.norms[kind] = norm{edges: len(of), latency: late}
		if slow > 0 {
			j.norms[kind].bandwidth = 1 / slow
		}
		for _, i := range of {
			e := &s.edges[i]
			if e.blocked {
				j.bad[i] |= Blocked
			}
			if e.bandwidth > 0 && (1/e.bandwidth > slowest || e.bandwidth < l.MinBandwidth) {
				j.bad[i] |= LowBandwidth
			}
			if e.latency > 0 && (e.latency > latest || l.MaxLatency > 0 && e.latency > l.MaxLatency.Seconds()) {
				j.bad[i] |= HighLatency
			}
		}
	}
	// A round trip goes both ways. Where one way is slow, it is what makes it long, and the other is not to blame.
	for i := range j.bad {
		if back := i%n*n + i/n; j.bad[i] == HighLatency && j.bad[back]&LowBandwidth != 0 {
			j.bad[i] = 0
		}
	}
	// Ranks are compared with each other: all run the same on the same hardware.
	ranks := func(f Fault, of func(*rankState) float64) float64 {
		var costs []float64
		for i := range s.ranks {
			if v := of(&s.ranks[i]); v > 0 {
				costs = append(costs, 1/v)
			}
		}
		typical, limit := diagnosis.Norm(costs, l.Tolerance, 0)
		for i := range s.ranks {
			if v := of(&s.ranks[i]); v > 0 && 1/v > limit {
				j.slowRanks[i] |= f
			}
		}
		if typical == 0 {
			return 0
		}
		return 1 / typical
	}
	j.self.Memory = ranks(SlowMemory, func(r *rankState) float64 { return r.self.Memory })
	j.self.Compute = ranks(SlowCompute, func(r *rankState) float64 { return r.self.Compute })
	j.together = ranks(SlowTogether, func(r *rankState) float64 { return r.together })
	return j
}

// nodes are the survey's nodes in order of their first ranks.
type nodes struct {
	names []string
	of    []int32 // by rank
}

func (s *survey) nodes() nodes {
	var ns nodes
	for i := range s.ranks {
		at := slices.Index(ns.names, s.ranks[i].node)
		if at < 0 {
			at = len(ns.names)
			ns.names = append(ns.names, s.ranks[i].node)
		}
		ns.of = append(ns.of, int32(at))
	}
	return ns
}

// Finding is one thing that is bad.
type Finding struct {
	// Kind is connection (Source → Destination), source (all that Source sends),
	// destination (all that Destination receives), rank (Source, in both directions
	// or by itself), node (all that crosses the border of SourceNode) or block (from
	// SourceNode to DestinationNode, where none stands for all others), or all: most
	// edges of a kind.
	Kind            string   `json:"kind"`
	Source          *int     `json:"source,omitempty"`
	Destination     *int     `json:"destination,omitempty"`
	SourceNode      string   `json:"source_node,omitempty"`
	DestinationNode string   `json:"destination_node,omitempty"`
	BothWays        bool     `json:"both_ways,omitempty"`
	Why             []string `json:"why"`   // bandwidth, latency, blocked, memory, compute, together, gone, error
	Edges           int      `json:"edges"` // that it explains
	Text            string   `json:"text"`

	nodes []string // beside those named, to keep out
	ratio float64  // how many times worse than normal its worst edge is
}

// about reports whether the finding is a reason to keep a node out.
func (f *Finding) about(node string) bool {
	return f.SourceNode == node || f.DestinationNode == node || slices.Contains(f.nodes, node)
}

// findings explains a judgement, ranks first, then what most edges have in common.
func (s *survey) findings(j *judgement) []Finding {
	var found []Finding
	n, ns := s.size(), s.nodes()
	for r := range s.ranks {
		if f, ok := s.rankFinding(r, j); ok {
			found = append(found, f)
		}
	}
	var edges []diagnosis.Edge
	var index []int
	for i := range s.edges {
		if s.edges[i].done && s.ranks[i/n].gone == "" && s.ranks[i%n].gone == "" {
			edges = append(edges, diagnosis.Edge{Src: int32(i / n), Dst: int32(i % n), Bad: j.bad[i] != 0})
			index = append(index, i)
		}
	}
	found = append(found, s.everywhere(edges, index, j)...)
	patterns := diagnosis.ExplainEdges(edges, ns.of)
	for _, p := range bothWays(patterns) {
		f := Finding{Edges: len(p.Edges), BothWays: p.both}
		rank := func(r int32) (*int, string) {
			if r < 0 {
				return nil, ""
			}
			i := int(r)
			return &i, s.ranks[i].node
		}
		where := ""
		switch {
		case p.Kind == diagnosis.CulpritNode:
			f.Kind, f.SourceNode = "node", ns.names[p.Src]
			where = fmt.Sprintf("everything between node %s and others", f.SourceNode)
		case p.Block:
			f.Kind = "block"
			if p.Src >= 0 {
				f.SourceNode = ns.names[p.Src]
			}
			if p.Dst >= 0 {
				f.DestinationNode = ns.names[p.Dst]
			}
			where = p.between("node "+f.SourceNode, "node "+f.DestinationNode)
		default:
			f.Source, f.SourceNode = rank(p.Src)
			f.Destination, f.DestinationNode = rank(p.Dst)
			f.Kind = p.Kind.String()
			if p.both && f.Destination == nil {
				f.Kind = "rank"
			}
			where = p.between(fmt.Sprintf("rank %d (%s)", p.Src, f.SourceNode), fmt.Sprintf("rank %d (%s)", p.Dst, f.DestinationNode))
		}
		var of []int
		for _, e := range p.Edges {
			of = append(of, index[e])
		}
		f.Text, f.Why, f.ratio = s.describe(where, of, j)
		found = append(found, f)
	}
	slices.SortStableFunc(found, func(a, b Finding) int {
		return cmp.Or(cmp.Compare(b.Edges, a.Edges), cmp.Compare(b.ratio, a.ratio))
	})
	return found
}

// everywhere finds a kind of edges most of which are bad: it would be idle to name
// single ones. It takes them out of what is to be explained.
func (s *survey) everywhere(edges []diagnosis.Edge, index []int, j *judgement) (found []Finding) {
	const few = 6
	for kind := range numKinds {
		var all, bad []int
		for e, i := range index {
			if s.kind(i) == kind {
				all = append(all, e)
				if edges[e].Bad {
					bad = append(bad, e)
				}
			}
		}
		if len(all) < few || 4*len(bad) < 3*len(all) {
			continue
		}
		f := Finding{Kind: "all", Edges: len(bad)}
		var of []int
		for _, e := range bad {
			edges[e].Bad = false
			of = append(of, index[e])
			f.nodes = append(f.nodes, s.ranks[edges[e].Src].node, s.ranks[edges[e].Dst].node)
		}
		where := fmt.Sprintf("most connections %s (%d of %d)", kindNames[kind], len(bad), len(all))
		f.Text, f.Why, f.ratio = s.describe(where, of, j)
		found = append(found, f)
	}
	return found
}

// pattern is what bad edges have in common, maybe in both directions.
type pattern struct {
	diagnosis.EdgePattern
	both bool
}

// between says it in words.
func (p *pattern) between(src, dst string) string {
	switch {
	case p.Src < 0:
		return "everything that " + dst + " receives"
	case p.Dst < 0 && p.both:
		return "everything that " + src + " sends and receives"
	case p.Dst < 0:
		return "everything that " + src + " sends"
	case p.both:
		return src + " ↔ " + dst
	}
	return src + " → " + dst
}

// bothWays makes one pattern of a row and a column of the same rank, and of the
// two directions of a connection or block.
func bothWays(patterns []diagnosis.EdgePattern) []pattern {
	var found []pattern
	for _, q := range patterns {
		i := slices.IndexFunc(found, func(p pattern) bool {
			return !p.both && p.Block == q.Block && p.Src == q.Dst && p.Dst == q.Src && p.Kind != diagnosis.CulpritNode
		})
		if i < 0 {
			found = append(found, pattern{q, false})
			continue
		}
		p := &found[i]
		p.both, p.Edges = true, slices.Concat(p.Edges, q.Edges)
		if p.Kind == diagnosis.CulpritDest {
			p.Kind, p.Src, p.Dst = q.Kind, q.Src, q.Dst
		}
	}
	return found
}

// describe says what is bad about edges, by the worst of them.
func (s *survey) describe(where string, edges []int, j *judgement) (text string, why []string, ratio float64) {
	var all Fault
	var slowest, latest, stuck = -1, -1, -1
	ratio = 1
	for _, i := range edges {
		e, normal := &s.edges[i], j.norms[s.kind(i)]
		all |= j.bad[i]
		if j.bad[i]&Blocked != 0 && stuck < 0 {
			stuck, ratio = i, math.Inf(1)
		}
		if j.bad[i]&LowBandwidth != 0 {
			if slowest < 0 || e.bandwidth < s.edges[slowest].bandwidth {
				slowest = i
			}
			ratio = max(ratio, normal.bandwidth/e.bandwidth)
		}
		if j.bad[i]&HighLatency != 0 {
			if latest < 0 || e.latency > s.edges[latest].latency {
				latest = i
			}
			ratio = max(ratio, e.latency/normal.latency)
		}
	}
	worst := ""
	if len(edges) > 1 {
		worst = " at worst"
	}
	var parts []string
	if stuck >= 0 {
		parts = append(parts, "blocked: "+s.edges[stuck].err)
	}
	if slowest >= 0 {
		parts = append(parts, fmt.Sprintf("%s%s, %s is typical", Rate(s.edges[slowest].bandwidth), worst, Rate(j.norms[s.kind(slowest)].bandwidth)))
	}
	if latest >= 0 {
		parts = append(parts, fmt.Sprintf("%s%s, %s is typical", Micros(s.edges[latest].latency), worst, Micros(j.norms[s.kind(latest)].latency)))
	}
	return where + ": " + strings.Join(parts, "; "), all.names(), ratio
}

func (s *survey) kind(edge int) int {
	if s.sameNode(edge/s.size(), edge%s.size()) {
		return withinNode
	}
	return betweenNodes
}

func (s *survey) rankFinding(r int, j *judgement) (Finding, bool) {
	st := &s.ranks[r]
	f := Finding{Kind: "rank", Source: &r, SourceNode: st.node, ratio: 1}
	all := j.slowRanks[r]
	var parts []string
	part := func(is Fault, format string, args ...any) {
		if all&is != 0 {
			parts = append(parts, fmt.Sprintf(format, args...))
		}
	}
	if st.gone != "" {
		all |= Gone
	}
	if st.err != "" {
		all |= Failed
	}
	part(Gone, "%s", st.gone)
	part(Failed, "%s", st.err)
	part(SlowMemory, "its memory copies %s, %s is typical", Rate(st.self.Memory), Rate(j.self.Memory))
	part(SlowCompute, "it computes %.2f GFLOP/s on one core, %.2f is typical", st.self.Compute/1e9, j.self.Compute/1e9)
	part(SlowTogether, "it sends %s while all do, %s is typical", Rate(st.together), Rate(j.together))
	f.Why = all.names()
	f.Text = fmt.Sprintf("rank %d (%s): %s", r, cmp.Or(st.node, "node unknown"), strings.Join(parts, "; "))
	return f, all != 0
}

// Rate is bytes per second in words, as findings have it.
func Rate(v float64) string {
	switch {
	case v >= 1e8:
		return fmt.Sprintf("%.2f GB/s", v/1e9)
	case v >= 1e5:
		return fmt.Sprintf("%.2f MB/s", v/1e6)
	}
	return fmt.Sprintf("%.2f kB/s", v/1e3)
}

// Micros is seconds in words, as findings have it.
func Micros(seconds float64) string { return fmt.Sprintf("%.1f µs", seconds*1e6) }
