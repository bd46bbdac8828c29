package rdma

import (
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// TestSchedules: whatever is lost, late or broken, at whichever end, bytes and
// lines arrive once, in order and intact, nothing counted is written again, and
// everything arrives as soon as one path stays up.
func TestSchedules(t *testing.T) {
	n := 12_000
	if testing.Short() {
		n = 1500
	}
	switches, resent, willing, moves := 0, 0, 0, 0
	for seed := range uint64(n) {
		s, err := run(seeded(seed), 200+int(seed%8)*200, false)
		if err != nil {
			s, err = run(seeded(seed), 200+int(seed%8)*200, true)
			if len(s.trace) > 120 {
				s.trace = s.trace[len(s.trace)-120:]
			}
			t.Fatalf("seed %d: %v\n%s\n%v", seed, err, strings.Join(s.trace, "\n"), s)
		}
		switches += s.switches
		resent += s.resent
		willing += s.willing
		moves += s.moves
	}
	t.Logf("%d switches, %d of them to another queue pair of the same path, %d messages sent again, %d paths left by choice", switches, moves, resent, willing)
	if switches < n || resent < n || willing < n/8 || moves < n/8 {
		t.Error("the schedules hardly break anything")
	}
}

// TestSchedulesShrink draws its schedules from rapid, which finds short ones.
func TestSchedulesShrink(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func(n int) int { return rapid.IntRange(0, n-1).Draw(t, "") }
		if s, err := run(draw, rapid.IntRange(0, 200).Draw(t, "steps"), true); err != nil {
			t.Fatalf("%v\n%s\n%v", err, strings.Join(s.trace, "\n"), s)
		}
	})
}

// deaf is an actor that carries nothing out. Credit that is written silently is
// lost, as it is while an earlier such write is on its way.
type deaf struct {
	actor
	m        *machine
	posted   []int // by lane
	silently []int
}

func (d *deaf) post(lane, _ int, _ uint64, _ *entry) { d.posted[lane]++ }
func (d *deaf) credit(lane, _ int, _ block) {
	d.silently[lane]++
	d.m.lanes[lane].owes = true
}

// TestGrantOfEveryLane: what a lane counted is told again when the word of it may be
// lost, although another lane has told last what was consumed.
func TestGrantOfEveryLane(t *testing.T) {
	d := &deaf{posted: make([]int, 2), silently: make([]int, 2)}
	d.m = newMachine(shape{ring: 1 << 20, maxChunk: 1 << 10, depth: 16, table: 64, lanes: 2}, d)
	m := d.m
	for i := range m.lanes {
		m.lanes[i].phase, m.lanes[i].active = running, 0
	}
	// Lane 1 has no message left, so its count is told silently, and lost.
	full := &m.lanes[1]
	full.posted = m.depth
	for num := range uint32(4) {
		if err := m.arrive(1, 0, num, 64); err != nil {
			t.Fatal(err)
		}
	}
	m.grant(true)
	if d.silently[1] != 1 || !full.owes {
		t.Fatalf("lane 1 told %d times silently, owes %v", d.silently[1], full.owes)
	}
	// Lane 0 tells what is consumed.
	m.consume(4 * 64)
	m.grant(false)
	if m.rx.toldBy != 0 || d.posted[0] != 1 {
		t.Fatalf("lane %d told, %d notes", m.rx.toldBy, d.posted[0])
	}
	// The peer has had an answer to all that lane 1 sent.
	full.acked, full.transmitted = m.depth, m.depth
	if !m.credits() {
		t.Error("nothing is to be told")
	}
	m.grant(true)
	if d.posted[1] != 1 || full.owes {
		t.Errorf("lane 1 told %d times, still owes %v", d.posted[1], full.owes)
	}
}
