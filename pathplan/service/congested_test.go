package service

import (
	"fmt"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/pathplan"
	"github.com/lockstep-ccl/lockstep/pathplan/service/planpb"
)

// TestSlowLanes: a link whose lanes carry less than their connections' paths is taken for
// slower than it is, and left by some; where all are alike none is.
func TestSlowLanes(t *testing.T) {
	n := newFabric(4, 4, 4)
	var paths int // paths that were changed: shares go with what is measured
	congested := 0
	s, err := New(Options{Fabric: n, Listen: "127.0.0.1:0", Log: quiet, Plan: pathplan.Options{Hold: time.Second}, Decided: func(d Decision) {
		for _, m := range d.Moves {
			if m.From != m.Path {
				paths++
			}
			if m.Reason == pathplan.Congested {
				congested++
			}
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	st := &stream{tenant: "a", job: "a", out: make(chan *planpb.Paths, 10000), conns: map[string]bool{}, loads: map[string][]carried{}}
	need := &planpb.Need{}
	for h := range 16 {
		r := request(fmt.Sprint(h), fmt.Sprintf("10.3.%d.1", h), fmt.Sprintf("10.3.%d.1", (h+4)%16))
		r.Lanes = 4
		need.Requests = append(need.Requests, r)
	}
	if err := s.take(st, need); err != nil {
		t.Fatal(err)
	}
	slow := s.Assignments("a")[0].Path.Up
	lanes := func() (on int) {
		for _, a := range s.Assignments("a") {
			if a.Path.Up == slow {
				on++
			}
		}
		return on
	}
	// run has all lanes carry what they get, each second, and counts what is moved.
	now := time.Now()
	run := func(seconds int, rate func(p pathplan.Path) uint64) (moved int) {
		before := paths
		for range seconds {
			now = now.Add(time.Second)
			m := &planpb.Need{}
			for _, a := range s.Assignments("a") {
				m.Loads = append(m.Loads, &planpb.Load{Conn: a.Conn.Conn, Lane: uint32(a.Lane), Rate: rate(a.Path)})
			}
			s.mu.Lock()
			st.carries(now, m.Loads)
			if signals := s.compared(now, st, m.Loads); len(signals) > 0 {
				s.planner.Observe(now, nil, signals)
			}
			if err := s.planner.Renew(now, "a", "a"); err != nil {
				t.Fatal(err)
			}
			s.mu.Unlock()
			s.tick(now)
		}
		return paths - before
	}
	const full = uint64(1e9 / 8 / 4)
	was := lanes()
	if moved := run(20, func(pathplan.Path) uint64 { return full }); moved > 0 {
		t.Errorf("all carry the same, and %d lanes are moved", moved)
	}
	if moved := run(20, func(pathplan.Path) uint64 { return full / 3 }); moved > 0 {
		t.Errorf("all carry less, and %d lanes are moved", moved)
	}
	for _, a := range s.Assignments("a") { // all of the link's lanes stall once
		if a.Path.Up == slow {
			st.loads[a.Conn.Conn][a.Lane].bad = now
			s.planner.Observe(now, nil, []pathplan.LaneSignal{{Conn: a.Conn, Lane: a.Lane, Congested: true}})
		}
	}
	run(10, func(pathplan.Path) uint64 { return full })
	if congested > 0 {
		t.Errorf("one stall, and %d moves for congestion", congested)
	}
	half := func(p pathplan.Path) uint64 {
		if p.Up == slow {
			return full / 2 * uint64(was) / uint64(max(1, lanes())) // the link has half of its rate
		}
		return full
	}
	run(30, half)
	if is := lanes(); is >= was || is == 0 {
		t.Errorf("a link of half its rate had %d lanes, and has %d", was, is)
	}
	// It does not go to and fro: in ten minutes the link is tried a few times.
	if moved := run(600, half); moved > 24 {
		t.Errorf("%d moves in ten minutes", moved)
	} else {
		t.Logf("%d lanes, then %d; %d moves in ten minutes", was, lanes(), moved)
	}
	run(1800, func(pathplan.Path) uint64 { return full })
	if is := lanes(); is != was {
		t.Errorf("the link is well again, and has %d lanes of %d", is, was)
	}
}

// TestWhatIsSlow: a lane is slow by how fast it is and by what it carries, both; not one that has little to
// do, nor one that shares its link with more lanes than its connection's others.
func TestWhatIsSlow(t *testing.T) {
	s, err := New(Options{Fabric: newFabric(4, 4, 4), Listen: "127.0.0.1:0", Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	st := &stream{tenant: "a", job: "a", out: make(chan *planpb.Paths, 10000), conns: map[string]bool{}, loads: map[string][]carried{}}
	need := &planpb.Need{}
	for h := range 4 { // all of one leaf: more lanes than links
		r := request(fmt.Sprint(h), fmt.Sprintf("10.3.%d.1", h), fmt.Sprintf("10.3.%d.1", h+4))
		r.Lanes = 2 + uint32(h%2)
		need.Requests = append(need.Requests, r)
	}
	if err := s.take(st, need); err != nil {
		t.Fatal(err)
	}
	const full = uint64(1e9 / 8 / 4)
	now := time.Now()
	slow := func(rate, speed uint64) bool {
		now = now.Add(time.Minute) // what was before is forgotten
		loads := []*planpb.Load{
			{Conn: "1", Lane: 0, Rate: rate, Speed: speed},
			{Conn: "1", Lane: 1, Rate: full, Speed: full},
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		st.loads = map[string][]carried{}
		st.carries(now, loads)
		for _, sig := range s.compared(now, st, loads) {
			if sig.Lane == 0 {
				return sig.Congested
			}
		}
		t.Fatal("nothing is said of the lane")
		return false
	}
	fair := s.planner.FairRates(st.id("1"), nil)
	if len(fair) != 3 || fair[0] <= 0 || fair[0] >= fair[1] {
		t.Fatalf("rates by the plan: %v", fair)
	}
	share := fair[0] / fair[1] // its link has more lanes, by the plan
	for _, c := range []struct {
		rate, speed uint64
		want        bool
	}{
		{full, full, false},
		{full / 4, full, false},
		{full, full / 4, false},
		{full / 4, 0, true}, // of who does not tell its speed
		{uint64(float64(full) * share / 4), uint64(float64(full) * share / 4), true},
		{uint64(float64(full) * share * 0.9), uint64(float64(full) * share * 0.9), false},
	} {
		if got := slow(c.rate, c.speed); got != c.want {
			t.Errorf("%d bytes/s at %d, of a share of %.2f: slow %v", c.rate, c.speed, share, got)
		}
	}
}
