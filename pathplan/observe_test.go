package pathplan

import (
	"math"
	"testing"
	"time"
)

// TestForeignLoad: room is made for what others send over a link, and noise moves nothing.
func TestForeignLoad(t *testing.T) {
	p := newPlanner(t, paper(), Options{Steered: true})
	mustAllocate(t, p, pairs(16, 8, 4)[:64]) // half of the hosts, so that there is room
	p.settleForeign(t, 0.03, 0)
	moves := p.settleForeign(t, 0.9, 20)
	onLink := 0.0
	for _, l := range p.links[p.byLink[dying]].lanes {
		onLink += float64(l.load)
	}
	if least, _ := p.loads(func(l *link) bool { return l.up && p.leaves[l.leaf] == "leaf0" && l.Link != dying }); len(moves) == 0 ||
		onLink/800e9 > least {
		t.Errorf("%d moves; %.3f of ours are left on a link that others fill, elsewhere %.3f", len(moves), onLink/800e9, least)
	}
}

// settleForeign measures others' load on one link for 30 s, all links as planned.
func (p *Planner) settleForeign(t *testing.T, share float64, most int) (moves []Move) {
	t.Helper()
	now := t0.Add(time.Minute)
	for i := range 300 {
		now = now.Add(100 * time.Millisecond)
		var loads []LinkLoad
		for _, l := range p.Links() {
			noise := 1 + 0.02*math.Sin(float64(i)*float64(len(l.Link.To)))
			rate := float64(l.Planned) * noise
			if l.Link == dying {
				rate += share * float64(l.Rate)
			}
			loads = append(loads, LinkLoad{l.Link, int64(rate)})
		}
		p.Observe(now, loads, nil)
		moves = append(moves, p.Rebalance(now, 8)...)
	}
	if most == 0 && len(moves) > 0 {
		t.Errorf("noise moved %d lanes", len(moves))
	}
	p.invariants(t)
	return moves
}

// hear tells the planner of all lanes whether they say network.
func (p *Planner) hear(now time.Time, says func(l *lane) bool) {
	var signals []LaneSignal
	for _, j := range p.jobs {
		for _, c := range j.conns {
			for i := range c.lanes {
				signals = append(signals, LaneSignal{Conn: c.id, Lane: i, Congested: says(&c.lanes[i])})
			}
		}
	}
	p.Observe(now, nil, signals)
}

// TestCongestedLink: lanes leave a link that does not carry what it should (their windows
// say network), no more than need be; where all say network, nobody is blamed.
func TestCongestedLink(t *testing.T) {
	p := newPlanner(t, paper(), Options{Steered: true})
	mustAllocate(t, p, pairs(16, 8, 4))
	run := func(says func(l *lane) bool) (moves []Move) {
		now := p.now.Add(time.Minute)
		for range 200 {
			now = now.Add(100 * time.Millisecond)
			if err := p.Renew(now, "t", "job0"); err != nil {
				t.Fatal(err)
			}
			p.hear(now, says)
			moves = append(moves, p.Rebalance(now, 8)...)
		}
		p.invariants(t)
		return moves
	}
	if moves := run(func(*lane) bool { return true }); len(moves) > 0 {
		t.Errorf("all say network: %d moves, the first %+v", len(moves), moves[0])
	}
	slow := p.byLink[dying]
	before := p.links[slow].planned
	moves := run(func(l *lane) bool { return l.up == slow && p.links[slow].planned > 400*gbit })
	if after := p.links[slow].planned; after > before*6/10 || after == 0 {
		t.Errorf("a link of half its rate carried %d, now %d", before, after)
	}
	if len(moves) == 0 || moves[0].Reason != Congested {
		t.Errorf("moves: %+v", moves)
	}
}

// TestUnevenlyShared: a link is not slow whose lanes carry what is fair, together, though one of them has most of
// it, as connections over TCP may; it is where all of them carry less.
func TestUnevenlyShared(t *testing.T) {
	p := newPlanner(t, paper(), Options{Steered: true})
	mustAllocate(t, p, pairs(16, 8, 4))
	up := p.byLink[dying]
	blamed := func(most float64) bool {
		now := p.now.Add(time.Minute)
		for range 100 {
			now = now.Add(100 * time.Millisecond)
			var signals []LaneSignal
			for i, l := range p.links[up].lanes {
				s := LaneSignal{Conn: l.conn.id, Lane: l.index, Congested: true, Part: 0.5}
				if i%4 == 0 {
					s.Congested, s.Part = false, most
				}
				signals = append(signals, s)
			}
			for i := range p.links {
				if i != int(up) && p.links[i].up {
					for _, l := range p.links[i].lanes {
						signals = append(signals, LaneSignal{Conn: l.conn.id, Lane: l.index, Part: 1})
					}
				}
			}
			p.Observe(now, nil, signals)
		}
		return p.links[up].derate > 0
	}
	if blamed(2.5) {
		t.Error("its lanes have all of it, and it is taken for slower")
	}
	if !blamed(1) {
		t.Error("its lanes have five eighths of it, and it is not taken for slower")
	}
}

// TestExcused: a link whose lanes suffered from another, of its spine or its leaf, is not taken for
// slow once that is found, nor when it is back.
func TestExcused(t *testing.T) {
	p := newPlanner(t, paper(), Options{Steered: true})
	mustAllocate(t, p, pairs(16, 8, 4))
	now := t0.Add(time.Minute)
	suffers := p.byLink[Link{From: "leaf2", To: dying.To}]
	for range 3 {
		for range 60 {
			now = now.Add(100 * time.Millisecond)
			p.hear(now, func(l *lane) bool { return l.up == suffers })
		}
		if p.links[suffers].derate == 0 {
			t.Fatal("a link whose lanes say network is not taken for slower")
		}
		p.mustSet(t, now, LinkState{Down: p.links[p.byLink[dying]].class == well}, dying)
		if d := p.links[suffers].derate; d > 0 {
			t.Errorf("it was another link, and this one counts as slower by %.2f", d)
		}
	}
	// One that was blamed for long stays so, and nobody else is for what no longer counts: half of all say network.
	says := func(seconds int, who func(l *lane) bool) {
		for range 10 * seconds {
			now = now.Add(100 * time.Millisecond)
			p.hear(now, who)
		}
	}
	says(60, func(l *lane) bool { return l.up == suffers })
	before := p.links[suffers].derate
	p.mustSet(t, now, LinkState{}, dying)
	p.mustSet(t, now, LinkState{Down: true}, dying)
	if d := p.links[suffers].derate; d != before || d == 0 {
		t.Errorf("a link that was slow for a minute counted as slower by %.2f, and now by %.2f", before, d)
	}
	says(600, func(l *lane) bool { return false })
	most := func(l *lane) bool { return p.links[l.up].spine < int32(len(p.spines)*5/8) }
	says(10, most)
	p.mustSet(t, now, LinkState{}, dying)
	says(3, most)
	for i := range p.links {
		if k := &p.links[i]; k.derate > 0.05 && i != int(suffers) {
			t.Fatalf("most say network, and %v is blamed", k.Link)
		}
	}
	p.invariants(t)
}
