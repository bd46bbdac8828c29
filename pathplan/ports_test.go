package pathplan

import (
	"errors"
	"testing"
	"time"
)

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
