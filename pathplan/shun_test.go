package pathplan

import (
	"testing"
	"time"
)

// TestNowhere: a lane whose sender finds no port of its path leaves the spine with the next
// call, alone; it keeps away until a link there is back, or for a while.
func TestNowhere(t *testing.T) {
	p := newPlanner(t, paper(), Options{Steered: true})
	mustAllocate(t, p, pairs(16, 8, 4))
	now := t0.Add(time.Minute)
	lost := p.jobs[jobID{"t", "job0"}].named("")[0].lanes
	l := &lost[0]
	spine := p.links[l.up].spine
	say := func() []Move {
		now = now.Add(time.Second)
		p.Observe(now, nil, []LaneSignal{{Conn: l.conn.id, Lane: 0, Nowhere: true}})
		return p.Rebalance(now, 8)
	}
	keeps := func(d time.Duration) {
		t.Helper()
		for end := now.Add(d); now.Before(end); {
			now = now.Add(500 * time.Millisecond)
			if err := p.Renew(now, "t", "job0"); err != nil {
				t.Fatal(err)
			}
			p.Observe(now, nil, nil)
			p.Rebalance(now, 8)
			p.invariants(t)
			if p.links[l.up].spine == spine {
				t.Fatalf("on the shunned spine again after %v", d-end.Sub(now))
			}
		}
	}
	moves := say()
	left := 0
	for _, m := range moves {
		if m.Conn == l.conn.id && m.Lane == 0 {
			left++
			if m.Reason != Dead || m.Path == m.From {
				t.Errorf("moved %+v", m)
			}
		}
	}
	if left != 1 {
		t.Fatalf("of %d moves %d are the lane's", len(moves), left)
	}
	keeps(shunFor - time.Second)
	if !p.shuns(l, p.uplinks(int32(0))[spine]) {
		t.Error("the spine is not shunned any more")
	}
	now = now.Add(2 * time.Second)
	p.Observe(now, nil, nil)
	if len(p.shunned) > 0 {
		t.Error("still shunned after its time")
	}

	// It comes to shun every spine but the last, and is left where it is when there is no other.
	for range 3 * len(p.uplinks(0)) {
		say()
		p.invariants(t)
		if n := len(p.shunned[l]); n > maxShuns {
			t.Fatalf("%d spines are shunned", n)
		}
	}
	spine = p.shunned[l][0].spine
	p.trust(spine)
	for _, s := range p.shunned[l] {
		if s.spine == spine {
			t.Error("shunned still, of a spine that is back")
		}
	}
	if err := p.Release(l.conn.id); err != nil {
		t.Fatal(err)
	}
	if len(p.shunned) > 0 {
		t.Error("shunned by a lane that is gone")
	}
}
