package preflight

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestEveryPairMeetsOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 40).Draw(t, "ranks")
		rounds := tournament(n)
		if want := n - 1 + n%2; len(rounds) != want {
			t.Fatalf("%d rounds of %d ranks, want %d", len(rounds), n, want)
		}
		met := map[[2]int]int{}
		for _, round := range rounds {
			for a, b := range round {
				if b == idle {
					continue
				}
				if int(round[b]) != a || int(b) == a {
					t.Fatalf("rank %d meets %d, which meets %d", a, b, round[b])
				}
				met[[2]int{a, int(b)}]++
			}
		}
		for a := range n {
			for b := range n {
				if a != b && met[[2]int{a, b}] != 1 {
					t.Fatalf("%d and %d meet %d times", a, b, met[[2]int{a, b}])
				}
			}
		}
	})
}

// healthy is a survey of ranks on nodes with noise.
func healthy(nodes, per int) *survey {
	r := rand.New(rand.NewPCG(1, 2))
	s := newSurvey(nodes * per)
	for i := range s.ranks {
		s.ranks[i] = rankState{node: fmt.Sprintf("n%d", i/per), device: "cpu", self: self{20e9 * (1 + r.Float64()/10), 8e9}}
	}
	for a := range s.size() {
		for b := range s.size() {
			if a != b {
				bandwidth, latency := 100e9, 5e-6
				if !s.sameNode(a, b) {
					bandwidth, latency = 20e9, 30e-6
				}
				*s.edge(a, b) = edge{done: true, bandwidth: bandwidth * (1 - r.Float64()/10), latency: latency, latencyP99: 2 * latency}
			}
		}
	}
	return s
}

var usual = Limits{Tolerance: 1.5}

func TestReportNamesWhatWasPlanted(t *testing.T) {
	for _, test := range []struct {
		name       string
		nodes, per int
		plant      func(*survey)
		kind, text string
		edges      int
		bad        string
	}{
		{"nothing", 4, 2, func(*survey) {}, "", "", 0, ""},
		{"half a link", 4, 2, func(s *survey) { s.edge(1, 6).bandwidth /= 2 }, "connection", "rank 1 (n0) → rank 6 (n3): 9.", 1, "n0 n3"},
		{"a late pair", 4, 2, func(s *survey) { s.edge(1, 0).latency, s.edge(0, 1).latency = 90e-6, 90e-6 }, "connection", "rank 0 (n0) ↔ rank 1 (n0): 90.0 µs at worst, 5.0 µs is typical", 2, "n0"},
		{"one way slow and a pair late by it", 4, 2, func(s *survey) {
			s.edge(1, 6).bandwidth /= 9
			s.edge(1, 6).latency, s.edge(6, 1).latency = 290e-6, 290e-6
		}, "connection", "rank 1 (n0) → rank 6 (n3): ", 1, "n0 n3"},
		{"a sender", 3, 4, func(s *survey) {
			for b := range s.size() {
				s.edge(5, b).bandwidth /= 3
			}
		}, "source", "everything that rank 5 (n1) sends: ", 11, "n1"},
		{"a receiver", 3, 4, func(s *survey) {
			for a := range s.size() {
				s.edge(a, 5).bandwidth /= 3
			}
		}, "destination", "everything that rank 5 (n1) receives: ", 11, "n1"},
		{"a rank's device", 3, 4, func(s *survey) {
			for b := range s.size() {
				s.edge(5, b).bandwidth /= 3
				s.edge(b, 5).bandwidth /= 3
			}
		}, "rank", "everything that rank 5 (n1) sends and receives: ", 22, "n1"},
		{"a switch between two nodes", 4, 4, func(s *survey) {
			for a := range 4 {
				for b := 8; b < 12; b++ {
					s.edge(a, b).bandwidth /= 3
					s.edge(b, a).bandwidth /= 3
				}
			}
		}, "block", "node n0 ↔ node n2: ", 32, "n0 n2"},
		{"a node's uplink", 6, 2, func(s *survey) {
			for a := range s.size() {
				for b := range s.size() {
					if (s.ranks[a].node == "n3") != (s.ranks[b].node == "n3") {
						s.edge(a, b).bandwidth /= 3
					}
				}
			}
		}, "node", "everything between node n3 and others: ", 40, "n3"},
		{"blocked", 4, 1, func(s *survey) {
			*s.edge(2, 1) = edge{done: true, blocked: true, err: "time is up"}
		}, "connection", "rank 2 (n2) → rank 1 (n1): blocked: time is up", 1, "n1 n2"},
		{"a slow host", 4, 2, func(s *survey) { s.ranks[3].self.Memory /= 2 }, "rank", "rank 3 (n1): its memory copies 1", 0, "n1"},
		{"a throttled core", 4, 2, func(s *survey) { s.ranks[3].self.Compute = 3e9 }, "rank", "rank 3 (n1): it computes 3.00 GFLOP/s on one core, 8.00 is typical", 0, "n1"},
		{"a silent rank", 4, 2, func(s *survey) { s.lose(3, "does not answer") }, "rank", "rank 3 (n1): does not answer", 0, "n1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := healthy(test.nodes, test.per)
			test.plant(s)
			r := newReport(s, usual, time.Now(), nil)
			if got := strings.Join(r.Bad, " "); got != test.bad {
				t.Errorf("bad nodes %q, want %q", got, test.bad)
			}
			if len(r.Good)+len(r.Bad) != test.nodes {
				t.Errorf("good %q and bad %q of %d nodes", r.Good, r.Bad, test.nodes)
			}
			if test.kind == "" {
				if len(r.Findings) != 0 || r.status() != 0 {
					t.Fatalf("%+v", r.Findings)
				}
				return
			}
			if len(r.Findings) != 1 || r.status() != StatusBad {
				t.Fatalf("want one finding, got %+v", r.Findings)
			}
			if f := r.Findings[0]; f.Kind != test.kind || !strings.HasPrefix(f.Text, test.text) || f.Edges != test.edges {
				t.Errorf("want a %s %q of %d edges, got %+v", test.kind, test.text, test.edges, f)
			}
		})
	}
}

func TestFirmLimits(t *testing.T) {
	s := healthy(2, 2)
	r := newReport(s, Limits{Tolerance: 1.5, MinBandwidth: 50e9}, time.Now(), nil)
	if r.BadEdges != 8 {
		t.Errorf("%d edges below 50 GB/s, want the 8 between nodes", r.BadEdges)
	}
	if f := r.Findings; len(f) != 1 || f[0].Kind != "all" || f[0].Edges != 8 || !strings.HasPrefix(f[0].Text, "most connections between nodes (8 of 8): 1") || len(r.Bad) != 2 {
		t.Errorf("bad nodes %q, %+v", r.Bad, f)
	}
	if r := newReport(s, Limits{Tolerance: 1.5, MaxLatency: 29 * time.Microsecond}, time.Now(), nil); r.BadEdges != 8 {
		t.Errorf("%d edges above 29 µs, want the 8 between nodes", r.BadEdges)
	}
}

// What is not complete keeps no node that it did not find bad, and none it did not see.
func TestIncompleteReport(t *testing.T) {
	s := newSurvey(3)
	for i, node := range []string{"a", "b", ""} {
		s.ranks[i].node = node
	}
	r := newReport(s, usual, time.Now(), fmt.Errorf("time is up"))
	if r.Verdict != "incomplete" || r.status() != 1 || len(r.Good) != 0 || len(r.Bad) != 0 {
		t.Errorf("%+v", r)
	}
	b, err := json.Marshal(r)
	if err != nil || !bytes.Contains(b, []byte(`"bandwidth":[[null,null,null]`)) {
		t.Errorf("%s, %v", b, err)
	}
}

func TestTheWayThatIsBlocked(t *testing.T) {
	for _, test := range []struct {
		a, b   measured
		ab, ba bool
	}{
		{measured{Sent: 5, Got: 5, Bandwidth: 1, Latency: 1}, measured{Sent: 5, Got: 5, Bandwidth: 1}, false, false},
		{measured{Sent: 5, Got: 4, Err: "late"}, measured{Sent: 4, Got: 4, Err: "aborted"}, true, false},
		{measured{Sent: 5, Got: 4, Err: "aborted"}, measured{Sent: 5, Got: 5, Err: "late"}, false, true},
		{measured{Err: "no way"}, measured{Err: "no way"}, true, true},
	} {
		s := newSurvey(2)
		s.pair(0, 1, &test.a, &test.b)
		if ab, ba := s.edge(0, 1).blocked, s.edge(1, 0).blocked; ab != test.ab || ba != test.ba {
			t.Errorf("%+v, %+v: blocked %v, %v", test.a, test.b, ab, ba)
		}
		// Measured again without trouble, it never was.
		s.pair(0, 1, &measured{Bandwidth: 2, Latency: 3}, &measured{Bandwidth: 2})
		if e := s.edge(0, 1); e.blocked || e.err != "" || e.bandwidth != 2 || e.latency == 0 || e.latency > 3 {
			t.Errorf("after a second measurement: %+v", e)
		}
	}
}

// TestCutShort: an edge on which something moved until all time was up is not blocked by that.
func TestCutShort(t *testing.T) {
	busy, silent, well := measured{Err: "aborted", Quiet: 0.1}, measured{Err: "not done within", Quiet: 20}, measured{}
	for i, tt := range []struct {
		a, b measured
		want bool
	}{{well, well, false}, {busy, busy, true}, {silent, busy, true}, {silent, silent, false}, {well, silent, false}, {busy, well, true}} {
		if got := cutShort(&tt.a, &tt.b); got != tt.want || cutShort(&tt.b, &tt.a) != tt.want {
			t.Errorf("%d: %v", i, got)
		}
	}
}

func TestReportsFit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := func(of string) string {
			return strings.Repeat(rapid.SampledFrom([]string{"x", "\x00", "→", "\xff"}).Draw(t, of+" char"), rapid.IntRange(0, 300).Draw(t, of+" length"))
		}
		const most = math.MaxFloat64
		in := report{
			Node: strings.Repeat("n", rapid.IntRange(1, 255).Draw(t, "node")), Device: "cuda:7", Self: &self{most, most}, Together: most, Err: text("error"),
			Pair: &measured{Latency: most, LatencyP99: most, Bandwidth: most, Sent: 1 << 40, Got: 1 << 40, Quiet: most, Err: text("the pair's error")},
		}
		b, err := in.encode()
		if err != nil || len(b) != reportSize {
			t.Fatalf("%d bytes, %v", len(b), err)
		}
		out, ok := decodeReport(b)
		in.Pair.Err = out.Pair.Err // what is no UTF-8 is replaced
		if !ok || out.Node != in.Node || *out.Pair != *in.Pair {
			t.Fatalf("%+v became %+v", in, out)
		}
	})
	if _, ok := decodeReport(make([]byte, reportSize)); ok {
		t.Error("what never came is taken for a report")
	}
}

func FuzzDecodeReport(f *testing.F) {
	f.Add([]byte(`{"node":"a","pair":{"sent":1,"got":2}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, ok := decodeReport(b)
		if ok {
			s := newSurvey(2)
			s.take(1, &r)
			if r.Pair != nil {
				s.pair(0, 1, &measured{}, r.Pair)
			}
			newReport(s, usual, time.Now(), nil)
		}
	})
}
