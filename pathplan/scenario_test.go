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

// mapped is a planner that has the maps of all ports, hashed with a seed.
func mapped(t *testing.T, top Topology, seed uint64) *Planner {
	t.Helper()
	p := newPlanner(t, top, Options{})
	learn(t, p, top, t0, seed)
	return p
}

func learn(t *testing.T, p *Planner, top Topology, now time.Time, seed uint64) {
	t.Helper()
	for _, h := range top.Ports {
		for i, leaf := range top.Leaves {
			if leaf != h.Leaf && i%2 == int(h.Side) {
				if err := p.SetPorts(now, hashed(&top, PortKey{Src: h.Port, DstLeaf: leaf}, seed, 300)); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

// TestSourcePorts: with learnt maps, every lane has a source port of its path; a planner
// that has lost its state takes over what runs; and when switches hash anew, lanes are
// counted where they now are, and moved.
func TestSourcePorts(t *testing.T) {
	top := Clos(ClosShape{Hosts: 16, NICs: 2, Groups: 2, LeafPairs: 1, Spines: 4, PortRate: 200 * gbit, LinkRate: 800 * gbit})
	p := mapped(t, top, 1)
	reqs := pairs(16, 2, 4)
	out := mustAllocate(t, p, reqs)
	if least, most := p.loads(func(*link) bool { return true }); least < 0.999 || most > 1.001 {
		t.Errorf("links carry %.3f to %.3f", least, most)
	}
	for _, a := range out {
		where := p.table(p.jobs[jobID{"t", a.Conn.Job}].conns[a.Conn.Conn], a.Side)
		if up, down, ok := where.path(a.SourcePort); !ok || p.path(up, down) != a.Path || a.Stale {
			t.Fatalf("%+v: its source port takes another path", a)
		}
	}
	again := mapped(t, top, 1)
	now := map[ConnID][]uint16{}
	for _, a := range out {
		now[a.Conn] = append(now[a.Conn], a.SourcePort)
	}
	for i := range reqs {
		reqs[i].Current = now[reqs[i].Conn]
	}
	for i, a := range mustAllocate(t, again, reqs) {
		if a != out[i] {
			t.Fatalf("a planner without memory says %+v, the one before %+v", a, out[i])
		}
	}
	later := t0.Add(time.Hour)
	for _, a := range p.Assignments(ConnID{Tenant: "t", Job: "job0"}) {
		if a.Stale {
			t.Error("stale at once")
		}
	}
	fresh, err := p.Allocate(later, reqs[:1])
	if err != nil || !fresh[0].Stale {
		t.Errorf("an hour later: %+v, %v", fresh, err)
	}
	learn(t, p, top, later, 2)
	p.invariants(t)
	if err := p.SetPorts(later, hashed(&top, PortKey{Src: top.Ports[0].Port, DstLeaf: "leaf2"}, 1, 10)); !errors.Is(err, ErrStale) {
		t.Errorf("an older map: %v", err)
	}
	if least, most := p.loads(func(*link) bool { return true }); most-least < 0.2 {
		t.Errorf("after new hashes links carry %.3f to %.3f: nothing was counted anew", least, most)
	}
	p.settle10(t, &later, 20)
	if least, most := p.loads(func(*link) bool { return true }); most-least > 0.13 {
		t.Errorf("rebalanced links carry %.3f to %.3f", least, most)
	}
}

// TestUnsteered: without a map, lanes hash as they like; with one they get a path.
func TestUnsteered(t *testing.T) {
	top := Clos(ClosShape{Hosts: 16, NICs: 2, Groups: 2, LeafPairs: 1, Spines: 4, PortRate: 200 * gbit, LinkRate: 800 * gbit})
	p := newPlanner(t, top, Options{})
	for _, a := range mustAllocate(t, p, pairs(16, 2, 4)) {
		if a.SourcePort != 0 || a.Path != (Path{}) {
			t.Fatalf("nothing is known, and yet %+v", a)
		}
	}
	now := t0.Add(time.Minute)
	learn(t, p, top, now, 1)
	p.settle10(t, &now, 20)
	if least, most := p.loads(func(*link) bool { return true }); least < 0.98 || most > 1.02 {
		t.Errorf("links carry %.3f to %.3f", least, most)
	}
}

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
				signals = append(signals, LaneSignal{c.id, i, says(&c.lanes[i])})
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
