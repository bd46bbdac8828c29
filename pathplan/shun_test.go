package pathplan

import (
	"testing"
	"time"
)

// TestNowhere: a path whose lane's sender finds no port for it is left by its tenant's lanes with
// the next calls, by them alone, until a link there is back, or for a while.
func TestNowhere(t *testing.T) {
	p := newPlanner(t, paper(), Options{Steered: true})
	reqs := pairs(16, 8, 4)
	for _, tenant := range []string{"t", "u"} {
		for i := range reqs {
			reqs[i].Conn.Tenant, reqs[i].Conn.Job = tenant, "job0"
		}
		mustAllocate(t, p, reqs)
	}
	now := t0.Add(time.Minute)
	l := &p.jobs[jobID{"t", "job0"}].named("")[0].lanes[0]
	gone := p.route(l, l.up)
	on := func(tenant string) (n int) {
		for _, c := range p.jobs[jobID{tenant, "job0"}].named("") {
			for i := range c.lanes {
				if o := &c.lanes[i]; o.up != none && p.route(o, o.up) == gone {
					n++
				}
			}
		}
		return n
	}
	others := on("u")
	if on("t") < 2 || others < 2 {
		t.Fatalf("%d and %d lanes are on the path: too few to tell", on("t"), others)
	}
	call := func() (moves []Move) {
		now = now.Add(500 * time.Millisecond)
		for _, tenant := range []string{"t", "u"} {
			if err := p.Renew(now, tenant, "job0"); err != nil {
				t.Fatal(err)
			}
		}
		p.Observe(now, nil, nil)
		moves = p.Rebalance(now, 64)
		p.invariants(t)
		return moves
	}
	p.Observe(now, nil, []LaneSignal{{Conn: l.conn.id, Lane: 0, Nowhere: true}})
	for _, m := range call() {
		if m.Reason == Dead && m.Conn.Tenant != "t" {
			t.Errorf("another tenant's word moved %+v", m)
		}
	}
	for range 2 * (shunFor - time.Second) / time.Second {
		if n := on("t"); n > 0 {
			t.Fatalf("%d lanes are on the path, %v after the word", n, now.Sub(t0))
		}
		call()
	}
	if on("u") == 0 {
		t.Error("the other tenant's lanes have left, too")
	}
	for range 6 {
		call()
	}
	if p.shunning != 0 || p.shuns(l, p.uplinks(gone.from)[gone.spine]) {
		t.Error("still shunned after its time")
	}

	// Of paths that are all shunned, lanes stay where they are; a link that is back ends it.
	for range 200 {
		p.Observe(now, nil, []LaneSignal{{Conn: l.conn.id, Lane: 0, Nowhere: true}})
		call()
	}
	if l.up == none || !p.shuns(l, l.up) {
		t.Error("a lane has a path that is not shunned, of none")
	}
	up := p.links[l.up].Link
	for _, s := range []LinkState{{Down: true}, {}} {
		if err := p.SetLink(now, up, s); err != nil {
			t.Fatal(err)
		}
	}
	if p.shuns(l, p.byLink[up]) {
		t.Error("shunned, of a link that is back")
	}
	if err := p.Release(ConnID{Tenant: "t", Job: "job0"}); err != nil {
		t.Fatal(err)
	}
	if p.shunning != 0 {
		t.Error("shunned by a tenant that is gone")
	}
}
