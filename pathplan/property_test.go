package pathplan

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

// invariants are what holds of a plan after every call.
func (p *Planner) invariants(t *testing.T) {
	t.Helper()
	planned, count := make([]int64, len(p.links)), make([]int, len(p.links))
	lanes := 0
	ports := map[usedPort]*lane{}
	for _, j := range p.jobs {
		inJob := 0
		for _, c := range j.conns {
			sum := 0
			var side [2]int
			for i := range c.lanes {
				l := &c.lanes[i]
				lanes++
				inJob++
				sum += l.share
				side[l.side] += l.share
				if l.share < 0 {
					t.Fatalf("%v lane %d has share %d", c.id, i, l.share)
				}
				from, to := p.ends(l)
				if l.port != 0 {
					u := usedBy(c, l.port)
					if ports[u] != nil {
						t.Fatalf("%v lane %d and %v have the same source port", c.id, i, ports[u].conn.id)
					}
					if _, ok := p.used[u]; !ok {
						t.Fatalf("%v lane %d: its source port is not counted", c.id, i)
					}
					ports[u] = l
				}
				if l.up == none {
					continue
				}
				up, down := &p.links[l.up], &p.links[l.down]
				if up.leaf != from || down.leaf != to || up.spine != down.spine || !up.up || down.up {
					t.Fatalf("%v lane %d from leaf %d to %d is on %s", c.id, i, from, to, p.path(l.up, l.down))
				}
				if !p.opt.Steered && l.port == 0 {
					t.Fatalf("%v lane %d has a path and no source port", c.id, i)
				}
				if up.lanes[l.at[0]] != l || down.lanes[l.at[1]] != l {
					t.Fatalf("%v lane %d is not in its links' lists", c.id, i)
				}
				for _, id := range [2]int32{l.up, l.down} {
					planned[id] += l.load
					count[id]++
				}
			}
			if sum != ShareUnit {
				t.Fatalf("%v: shares add up to %d", c.id, sum)
			}
			if side[Left] > 0 && side[Right] > 0 && len(c.lanes) > 1 && side[Left] != side[Right] {
				t.Fatalf("%v: left %d, right %d", c.id, side[Left], side[Right])
			}
		}
		if inJob != j.lanes || len(j.conns) == 0 {
			t.Fatalf("job %v has %d lanes, counts %d", j.id, inJob, j.lanes)
		}
	}
	if lanes != p.lanes || len(ports) != len(p.used) {
		t.Fatalf("%d lanes and %d source ports, counted %d and %d", lanes, len(ports), p.lanes, len(p.used))
	}
	for i := range p.links {
		if k := &p.links[i]; k.planned != planned[i] || len(k.lanes) != count[i] {
			t.Fatalf("%s: planned %d with %d lanes, lanes say %d and %d", k.Link, k.planned, len(k.lanes), planned[i], count[i])
		}
	}
	for i := range p.fabric.ports {
		for end := range 2 {
			var sum int64
			for _, c := range p.fabric.ports[i].conns[end] {
				sum += c.use[p.fabric.ports[i].Side]
			}
			for _, u := range p.fabric.ports[i].uses[end] {
				sum -= u.use
			}
			if sum != 0 {
				t.Fatalf("%s: uses are %d off", p.fabric.ports[i].Port, sum)
			}
		}
	}
}

// alive: no lane is on a dead link that has another way.
func (p *Planner) alive(t *testing.T) {
	t.Helper()
	for i := range p.links {
		if p.links[i].class != dead {
			continue
		}
		for _, l := range p.links[i].lanes {
			if from, to := p.ends(l); p.joined(from, to) && p.table(l.conn, l.side) == nil == p.opt.Steered {
				t.Fatalf("%v lane %d is still on dead %s", l.conn.id, l.index, p.links[i].Link)
			}
		}
	}
}

// hashed is a PortMap as a prober of a fabric would learn it: source ports 1000 to 1000+n
// by a hash with a seed.
func hashed(top *Topology, key PortKey, seed uint64, n int) PortMap {
	var from string
	for _, h := range top.Ports {
		if h.Port == key.Src {
			from = h.Leaf
		}
	}
	m := PortMap{Key: key, Version: seed, Learnt: t0}
	for _, l := range top.Links {
		if l.From == from {
			m.Paths = append(m.Paths, PathPorts{Path: Path{Up: l.Link, Down: Link{From: l.To, To: key.DstLeaf}}})
		}
	}
	for port := range n {
		h := rand.New(rand.NewPCG(seed, uint64(port))).IntN(len(m.Paths))
		m.Paths[h].Ports = append(m.Paths[h].Ports, uint16(1000+port))
	}
	return m
}

// world drives a planner with whatever may happen.
type world struct {
	t   *testing.T
	r   *rand.Rand
	top Topology
	p   *Planner
	now time.Time
}

func (w *world) step() {
	r, p := w.r, w.p
	w.now = w.now.Add(time.Duration(r.IntN(3000)) * time.Millisecond)
	switch r.IntN(10) {
	case 0, 1, 2:
		w.allocate()
	case 3:
		_ = p.Release(ConnID{Tenant: fmt.Sprint("t", r.IntN(3)), Job: fmt.Sprint("j", r.IntN(6))})
	case 4:
		l := w.top.Links[r.IntN(len(w.top.Links))].Link
		if r.IntN(5) == 0 {
			h := w.top.Ports[r.IntN(len(w.top.Ports))]
			l = Link{From: h.Port.String(), To: h.Leaf}
		}
		state := []LinkState{{Down: true}, {Loss: 0.01}, {}, {}, {}}[r.IntN(5)]
		if err := p.SetLink(w.now, l, state); err != nil {
			w.t.Fatal(err)
		}
	case 5:
		p.Expire(w.now)
	case 6:
		var loads []LinkLoad
		for _, l := range w.top.Links {
			loads = append(loads, LinkLoad{l.Link, r.Int64N(l.Rate)})
		}
		var signals []LaneSignal
		var losses []LaneLoss
		for _, a := range p.Assignments(ConnID{Tenant: "t1", Job: "j1"}) {
			signals = append(signals, LaneSignal{a.Conn, a.Lane, r.IntN(4) == 0, r.IntN(20) == 0, 2 * r.Float64()})
			losses = append(losses, LaneLoss{a.Conn, a.Lane, r.IntN(1000), r.IntN(20)})
		}
		p.Observe(w.now, loads, signals)
		p.ObserveLosses(w.now, losses)
	case 7:
		if !p.opt.Steered {
			src, dst := w.top.Ports[r.IntN(len(w.top.Ports))], w.top.Ports[r.IntN(len(w.top.Ports))]
			if src.Leaf != dst.Leaf && src.Side == dst.Side {
				key := PortKey{Src: src.Port, DstLeaf: dst.Leaf}
				if err := p.SetPorts(w.now, hashed(&w.top, key, uint64(w.now.UnixNano()), 200)); err != nil {
					w.t.Fatal(err)
				}
			}
		}
	case 8:
		most := r.IntN(20)
		moves := p.Rebalance(w.now, most)
		if len(moves) > most {
			w.t.Fatalf("%d moves, asked for %d at most", len(moves), most)
		}
		for _, m := range moves {
			w.told(m.Assignment)
		}
	case 9:
		snap := p.Snapshot()
		if _, err := p.Restore(w.now, snap); err != nil {
			w.t.Fatal(err)
		}
	}
	p.invariants(w.t)
}

// told: what the planner says is what it has.
func (w *world) told(a Assignment) {
	w.t.Helper()
	for _, b := range w.p.Assignments(a.Conn) {
		if b.Lane == a.Lane && (b.Path != a.Path || b.SourcePort != a.SourcePort || b.Share != a.Share || b.Side != a.Side) {
			w.t.Fatalf("told %+v, has %+v", a, b)
		}
	}
}

func (w *world) allocate() {
	r := w.r
	id := ConnID{Tenant: fmt.Sprint("t", r.IntN(3)), Job: fmt.Sprint("j", r.IntN(6))}
	var reqs []Request
	hosts := r.Perm(8)[:2+r.IntN(6)]
	lanes := 1 + r.IntN(5)
	for i, h := range hosts {
		for n := range 2 {
			q := Request{Conn: id, Src: NIC{fmt.Sprint("host", h), fmt.Sprint("nic", n)}, Lanes: lanes, Weight: r.IntN(3),
				Dst: NIC{fmt.Sprint("host", hosts[(i+1)%len(hosts)]), fmt.Sprint("nic", n)}}
			q.Conn.Conn = fmt.Sprint(i, "/", n)
			if r.IntN(10) == 0 {
				q.Current = []uint16{uint16(1000 + r.IntN(200))}
			}
			reqs = append(reqs, q)
		}
	}
	out, err := w.p.Allocate(w.now, reqs)
	if err != nil && !errors.Is(err, ErrNoPath) && !errors.Is(err, ErrLimit) {
		w.t.Fatal(err)
	}
	for _, a := range out {
		w.told(a)
	}
}

// rounds is fewer with -short: under the race detector, which has nothing to find here.
func rounds(n int) int {
	if testing.Short() {
		return n / 5
	}
	return n
}

// TestAnyHistory: whatever happens, in whatever order, the plan's rules hold; and when it
// ends, rebalancing does too, with no lane left on a dead link.
func TestAnyHistory(t *testing.T) {
	for seed := range uint64(rounds(80)) {
		r := rand.New(rand.NewPCG(seed, 0))
		top := Clos(ClosShape{Hosts: 8, NICs: 2, Groups: 1 << r.IntN(3), LeafPairs: 1 + r.IntN(2), Spines: 2 + 2*r.IntN(4),
			Planes: r.IntN(2) == 0, SinglePort: r.IntN(4) == 0, PortRate: 200 * gbit, LinkRate: (200 + 200*r.Int64N(4)) * gbit})
		o := Options{Steered: r.IntN(2) == 0, EqualShares: r.IntN(3) == 0}
		if r.IntN(3) == 0 {
			o.Limits.LanesPerTenant = 60
		}
		w := &world{t: t, r: r, top: top, p: newPlanner(t, top, o), now: t0}
		for range 120 {
			w.step()
		}
		w.quiet(seed)
	}
}

// quiet: without news, rebalancing comes to an end.
func (w *world) quiet(seed uint64) {
	w.t.Helper()
	idle := 0
	for i := 0; idle < 12; i++ {
		w.now = w.now.Add(time.Second)
		moves := w.p.Rebalance(w.now, 50)
		w.p.invariants(w.t)
		if idle++; len(moves) > 0 {
			idle = 0
		}
		if i > 400 {
			w.t.Fatalf("seed %d: still moving after %d calls: %+v", seed, i, moves)
		}
	}
	w.p.alive(w.t)
}

// TestSnapshot: a plan comes back as it was.
func TestSnapshot(t *testing.T) {
	for seed := range uint64(rounds(30)) {
		r := rand.New(rand.NewPCG(seed, 1))
		top := Clos(ClosShape{Hosts: 8, NICs: 2, Groups: 4, LeafPairs: 1, Spines: 4, PortRate: 200 * gbit, LinkRate: 400 * gbit})
		o := Options{Steered: seed%2 == 0}
		w := &world{t: t, r: r, top: top, p: newPlanner(t, top, o), now: t0}
		for range 60 {
			w.step()
		}
		w.quiet(seed)
		snap := w.p.Snapshot()
		q := newPlanner(t, top, o)
		if dropped, err := q.Restore(w.now, snap); err != nil || dropped > 0 && len(w.p.Snapshot()) == len(q.Snapshot()) {
			t.Fatalf("seed %d: %d dropped, %v", seed, dropped, err)
		}
		q.invariants(t)
		again := newPlanner(t, top, o)
		if _, err := again.Restore(w.now, q.Snapshot()); err != nil {
			t.Fatal(err)
		}
		if a, b := q.Snapshot(), again.Snapshot(); !bytes.Equal(a, b) {
			t.Fatalf("seed %d:\n%s\n%s", seed, a, b)
		}
	}
}

// TestSame: the same calls give the same plan.
func TestSame(t *testing.T) {
	run := func() []byte {
		top := paper()
		w := &world{t: t, r: rand.New(rand.NewPCG(7, 7)), top: top, p: newPlanner(t, top, Options{Steered: true}), now: t0}
		for range 150 {
			w.step()
		}
		return w.p.Snapshot()
	}
	if a, b := run(), run(); !bytes.Equal(a, b) {
		t.Error("two plans of the same calls differ")
	}
}

func FuzzRestore(f *testing.F) {
	top := Clos(ClosShape{Hosts: 4, NICs: 1, Groups: 2, LeafPairs: 1, Spines: 2, PortRate: gbit, LinkRate: gbit})
	p, err := New(top, Options{})
	if err != nil {
		f.Fatal(err)
	}
	for _, host := range []string{"host0", "host2"} {
		for side := range Right + 1 {
			key := PortKey{Src: Port{NIC{host, "nic0"}, side}, DstLeaf: fmt.Sprint("leaf", 2+int(side))}
			if host == "host2" {
				key.DstLeaf = fmt.Sprint("leaf", int(side))
			}
			if err := p.SetPorts(t0, hashed(&top, key, 1, 8)); err != nil {
				f.Fatal(err)
			}
		}
	}
	_, err = p.Allocate(t0, []Request{
		{Conn: ConnID{"t", "j", "a"}, Src: NIC{"host0", "nic0"}, Dst: NIC{"host2", "nic0"}, Lanes: 3},
		{Conn: ConnID{"t", "j", "b"}, Src: NIC{"host2", "nic0"}, Dst: NIC{"host0", "nic0"}, Lanes: 2},
		{Conn: ConnID{"t", "k", "a"}, Src: NIC{"host0", "nic0"}, Dst: NIC{"host1", "nic0"}, Lanes: 1},
	})
	if err != nil {
		f.Fatal(err)
	}
	if err := p.SetLink(t0, Link{From: "leaf0", To: "spine1"}, LinkState{Loss: 0.25}); err != nil {
		f.Fatal(err)
	}
	f.Add(p.Snapshot())
	f.Add([]byte(`{"version":1}`))
	f.Add([]byte(`{"version":2,"links":[]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		p := newPlanner(t, top, Options{Limits: Limits{Lanes: 200, Ports: 1000}})
		if _, err := p.Restore(t0, data); err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Fatalf("an error of no kind: %v", err)
			}
			return
		}
		p.invariants(t)
		p.Rebalance(t0.Add(time.Minute), 100)
		p.invariants(t)
		q := newPlanner(t, top, Options{Limits: Limits{Lanes: 200, Ports: 1000}})
		if _, err := q.Restore(t0, p.Snapshot()); err != nil {
			t.Fatal(err)
		}
	})
}
