package pathplan

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"time"
)

// loads are the least and most loaded of some links, as shares of their rates.
func (p *Planner) loads(of func(l *link) bool) (least, most float64) {
	least = math.Inf(1)
	for i := range p.links {
		if k := &p.links[i]; of(k) && k.class != dead {
			least, most = min(least, k.load()), max(most, k.load())
		}
	}
	return least, most
}

func (p *Planner) mustSet(t *testing.T, now time.Time, s LinkState, links ...Link) {
	t.Helper()
	for _, l := range links {
		if err := p.SetLink(now, l, s); err != nil {
			t.Fatal(err)
		}
	}
}

func mustAllocate(t *testing.T, p *Planner, reqs []Request) []Assignment {
	t.Helper()
	out, err := p.Allocate(t0, reqs)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

var dying = Link{From: "leaf0", To: "spine3"}

// TestUplinkDies: lanes leave a dead link at once, a bounded number a call; the others of
// its leaf then carry the same to within 2 %, nothing else moves, and when the link is back
// all is even again within 10 s.
func TestUplinkDies(t *testing.T) {
	p := newPlanner(t, paper(), Options{Steered: true})
	mustAllocate(t, p, pairs(16, 8, 4))
	now := t0.Add(time.Minute)
	p.mustSet(t, now, LinkState{Down: true}, dying, dying.Reverse())
	p.settle10(t, &now, 32)
	p.invariants(t)
	p.alive(t)
	for _, up := range []bool{true, false} {
		least, most := p.loads(func(l *link) bool { return l.up == up && p.leaves[l.leaf] == "leaf0" })
		if ideal := 8. / 7; most > ideal*1.02 || least < ideal*0.98 {
			t.Errorf("leaf0's links (up %v) carry %.3f to %.3f, want all %.3f", up, least, most, ideal)
		}
	}
	p.mustSet(t, now, LinkState{}, dying, dying.Reverse())
	p.settle10(t, &now, 32)
	if least, most := p.loads(func(l *link) bool { return true }); least < 0.97 || most > 1.03 {
		t.Errorf("after its return links carry %.3f to %.3f", least, most)
	}
}

// settle10 rebalances for 12 s, once every 100 ms; the last 2 s must be quiet.
func (p *Planner) settle10(t *testing.T, now *time.Time, most int) (moves []Move) {
	t.Helper()
	for i := range 120 {
		*now = now.Add(100 * time.Millisecond)
		out := p.Rebalance(*now, most)
		if len(out) > most {
			t.Fatalf("%d moves of %d", len(out), most)
		}
		if i >= 100 && len(out) > 0 {
			t.Errorf("still moving after 10 s: %+v", out[0])
		}
		moves = append(moves, out...)
	}
	return moves
}

// TestLossyIsLeft: a link that loses 1 % is left while there are others, and used when
// there are none.
func TestLossyIsLeft(t *testing.T) {
	p := newPlanner(t, paper(), Options{Steered: true})
	mustAllocate(t, p, pairs(16, 8, 2))
	now := t0.Add(time.Minute)
	p.mustSet(t, now, LinkState{Loss: 0.01}, dying)
	moves := p.settle10(t, &now, 100)
	if n := len(p.links[p.byLink[dying]].lanes); n > 0 || len(moves) == 0 || moves[0].Reason != Lossy {
		t.Errorf("%d lanes are still on the link; %d moves", n, len(moves))
	}
	for s := range 8 {
		p.mustSet(t, now, LinkState{Loss: 0.01}, Link{From: "leaf0", To: fmt.Sprint("spine", s)})
	}
	if moves := p.settle10(t, &now, 1000); len(moves) > 200 {
		t.Errorf("%d moves where all links lose as much", len(moves))
	}
	p.mustSet(t, now, LinkState{Down: true}, dying)
	p.settle10(t, &now, 1000)
	p.alive(t)
}

// TestTenantsTakeTurns: a tenant of few lanes does not wait for one of many.
func TestTenantsTakeTurns(t *testing.T) {
	p := newPlanner(t, paper(), Options{Steered: true})
	reqs := pairs(16, 8, 8)
	for i := range reqs {
		if reqs[i].Conn.Tenant = "many"; reqs[i].Conn.Job == "job7" {
			reqs[i].Conn.Tenant = "few"
		}
	}
	mustAllocate(t, p, reqs)
	of := map[string]int{}
	for _, l := range p.links[p.byLink[dying]].lanes {
		of[l.conn.id.Tenant]++
	}
	if of["few"] == 0 || of["many"] < 3*of["few"] {
		t.Fatalf("lanes on the link: %v", of)
	}
	p.mustSet(t, t0, LinkState{Down: true}, dying, dying.Reverse())
	moved := map[string]int{}
	for _, m := range p.Rebalance(t0.Add(time.Minute), 2*of["few"]) {
		moved[m.Conn.Tenant]++
	}
	if moved["few"] < of["few"] {
		t.Errorf("of %v lanes, the first moves were %v", of, moved)
	}
}

// TestWeights: what a tenant asks for on a NIC takes nothing from another's NIC, nor, on
// the same NIC, from another tenant.
func TestWeights(t *testing.T) {
	p := newPlanner(t, paper(), Options{Steered: true})
	req := func(tenant, conn, nic string, weight int) Request {
		return Request{Conn: ConnID{tenant, "j", conn}, Src: NIC{"host0", nic}, Dst: NIC{"host8", nic}, Lanes: 2, Weight: weight}
	}
	mustAllocate(t, p, []Request{req("a", "1", "nic0", MaxWeight), req("a", "2", "nic0", 0), req("b", "1", "nic0", 1), req("b", "1b", "nic1", 1)})
	load := func(tenant, conn string) (n int64) {
		for i := range p.jobs[jobID{tenant, "j"}].conns[conn].lanes {
			n += p.jobs[jobID{tenant, "j"}].conns[conn].lanes[i].load
		}
		return n
	}
	if n := load("b", "1"); n != 200*gbit {
		t.Errorf("one of two tenants on a NIC of 400G has %d", n)
	}
	if n := load("b", "1b"); n != 400*gbit {
		t.Errorf("alone on a NIC: %d", n)
	}
	if n := load("a", "1") + load("a", "2"); n < 199*gbit || n > 200*gbit {
		t.Errorf("the other: %d", n)
	}
	if err := p.Release(ConnID{Tenant: "a", Job: "j"}); err != nil {
		t.Fatal(err)
	}
	if n := load("b", "1"); n != 400*gbit {
		t.Errorf("when the other has gone: %d", n)
	}
	p.invariants(t)
}

func TestLeases(t *testing.T) {
	p := newPlanner(t, paper(), Options{Steered: true, Lease: 10 * time.Second})
	mustAllocate(t, p, pairs(16, 8, 2))
	if err := p.Renew(t0.Add(5*time.Second), "t", "job3"); err != nil {
		t.Fatal(err)
	}
	if err := p.Renew(t0, "other", "job3"); !errors.Is(err, ErrUnknown) {
		t.Errorf("another tenant's renewal: %v", err)
	}
	if err := p.Release(ConnID{"other", "job3", ""}); !errors.Is(err, ErrUnknown) {
		t.Errorf("another tenant's release: %v", err)
	}
	if n := p.Expire(t0.Add(9 * time.Second)); n != 0 {
		t.Errorf("%d lanes expired early", n)
	}
	if n := p.Expire(t0.Add(11 * time.Second)); n != 7*32 {
		t.Errorf("%d lanes expired, want those of seven jobs", n)
	}
	p.invariants(t)
	if n := p.Expire(t0.Add(time.Hour)); n != 32 {
		t.Errorf("%d lanes expired last", n)
	}
	if _, most := p.loads(func(*link) bool { return true }); most != 0 {
		t.Errorf("an empty plan's links carry %v", most)
	}
}

func TestRefused(t *testing.T) {
	p := newPlanner(t, paper(), Options{Steered: true, Limits: Limits{LanesPerTenant: 8, LanesPerJob: 6, Jobs: 3}})
	ok := Request{Conn: ConnID{"t", "j", "c"}, Src: NIC{"host0", "nic0"}, Dst: NIC{"host8", "nic0"}, Lanes: 2}
	long := string(make([]byte, MaxName+1))
	for _, c := range []struct {
		want   error
		change func(r *Request)
	}{
		{ErrInvalid, func(r *Request) { r.Conn.Tenant = "" }},
		{ErrInvalid, func(r *Request) { r.Conn.Job = long }},
		{ErrInvalid, func(r *Request) { r.Conn.Conn = "a\nb" }},
		{ErrInvalid, func(r *Request) { r.Lanes = 0 }},
		{ErrInvalid, func(r *Request) { r.Lanes = MaxLanes + 1 }},
		{ErrInvalid, func(r *Request) { r.Weight = -1 }},
		{ErrInvalid, func(r *Request) { r.Current = make([]uint16, 3) }},
		{ErrUnknown, func(r *Request) { r.Src.Host = "host99" }},
		{ErrUnknown, func(r *Request) { r.Dst.Name = long }},
		{ErrLimit, func(r *Request) { r.Lanes = 7 }},
	} {
		r := ok
		c.change(&r)
		r2 := ok
		r2.Conn.Conn = "other"
		out, err := p.Allocate(t0, []Request{r, r2})
		if !errors.Is(err, c.want) || len(out) != 2 {
			t.Errorf("%+v: %v and %d assignments, want %v and the other request's 2", r, err, len(out), c.want)
		}
		p.invariants(t)
	}
	for i := range 3 {
		r := ok
		r.Conn.Job, r.Lanes = fmt.Sprint("job", i), 3
		_, err := p.Allocate(t0, []Request{r})
		if (i < 2) != (err == nil) || err != nil && !errors.Is(err, ErrLimit) {
			t.Errorf("job %d: %v", i, err)
		}
	}
	// Cut off: an error for whom it concerns.
	for s := range 8 {
		p.mustSet(t, t0, LinkState{Down: true}, Link{From: "leaf0", To: fmt.Sprint("spine", s)}, Link{From: fmt.Sprint("spine", s), To: "leaf5"})
	}
	r := ok
	r.Conn.Conn = "cut"
	if _, err := p.Allocate(t0, []Request{r}); !errors.Is(err, ErrNoPath) {
		t.Errorf("without a path: %v", err)
	}
	if err := p.SetLink(t0, Link{From: "leaf0", To: "leaf1"}, LinkState{}); !errors.Is(err, ErrUnknown) {
		t.Errorf("a link that is not there: %v", err)
	}
	if err := p.SetLink(t0, dying, LinkState{Loss: math.NaN()}); !errors.Is(err, ErrInvalid) {
		t.Errorf("a loss that is no number: %v", err)
	}
}

// TestPortDies: a NIC whose left port is dead sends all by the right one, and half again
// when it is back.
func TestPortDies(t *testing.T) {
	p := newPlanner(t, paper(), Options{Steered: true})
	mustAllocate(t, p, pairs(16, 8, 4))
	access := Link{From: "host3/nic0/left", To: "leaf0"}
	now := t0.Add(time.Minute)
	for _, down := range []bool{true, false} {
		p.mustSet(t, now, LinkState{Down: down}, access)
		p.settle10(t, &now, 16)
		p.invariants(t)
		for _, j := range p.jobs {
			for _, c := range j.conns {
				onLeft := 0
				for i := range c.lanes {
					if c.lanes[i].side == Left {
						onLeft++
					}
				}
				hit := c.nics[0] == (NIC{"host3", "nic0"}) || c.nics[1] == (NIC{"host3", "nic0"})
				if want := map[bool]int{true: 0, false: 2}[hit && down]; onLeft != want {
					t.Errorf("down %v: %v has %d lanes on the left, want %d", down, c.id, onLeft, want)
				}
			}
		}
	}
}

// TestParallelLinks: two links between the same switches are used alike, and each stands in
// for the other.
func TestParallelLinks(t *testing.T) {
	top := Clos(ClosShape{Hosts: 16, NICs: 8, Groups: 2, LeafPairs: 2, Spines: 4, PortRate: 200 * gbit, LinkRate: 800 * gbit})
	for _, l := range top.Links {
		l.Index = 1
		top.Links = append(top.Links, l)
	}
	p := newPlanner(t, top, Options{Steered: true})
	mustAllocate(t, p, pairs(16, 8, 4))
	if least, most := p.loads(func(*link) bool { return true }); least < 0.999 || most > 1.001 {
		t.Errorf("links carry %.3f to %.3f", least, most)
	}
	now := t0.Add(time.Minute)
	p.mustSet(t, now, LinkState{Down: true}, Link{From: "leaf0", To: "spine1", Index: 1})
	p.settle10(t, &now, 32)
	p.invariants(t)
	p.alive(t)
	if least, most := p.loads(func(l *link) bool { return l.up && p.leaves[l.leaf] == "leaf0" }); most > 1.03*8/7 || least < 0.97*8/7 {
		t.Errorf("links carry %.3f to %.3f", least, most)
	}
}
