package pathplan

import (
	"fmt"
	"testing"
	"time"
)

var t0 = time.Unix(1_700_000_000, 0)

const gbit = int64(1e9)

// paper is C4P's own testbed: 16 hosts of 8 NICs of 2 × 200G, 8 leaves, 1:1.
func paper() Topology {
	return Clos(ClosShape{Hosts: 16, NICs: 8, Groups: 2, LeafPairs: 2, Spines: 8, PortRate: 200 * gbit, LinkRate: 800 * gbit})
}

// pairs are ring all-reduces of two hosts each, in different groups of leaves: from every
// NIC to the same of the other host.
func pairs(hosts, nics, lanes int) (reqs []Request) {
	for j := range hosts / 2 {
		for dir := range 2 {
			for n := range nics {
				src, dst := j+dir*hosts/2, j+(1-dir)*hosts/2
				reqs = append(reqs, Request{
					Conn:  ConnID{"t", fmt.Sprintf("job%d", j), fmt.Sprintf("%d-%d-%d", src, dst, n)},
					Src:   NIC{fmt.Sprintf("host%d", src), fmt.Sprintf("nic%d", n)},
					Dst:   NIC{fmt.Sprintf("host%d", dst), fmt.Sprintf("nic%d", n)},
					Lanes: lanes,
				})
			}
		}
	}
	return reqs
}

func newPlanner(t testing.TB, top Topology, o Options) *Planner {
	t.Helper()
	p, err := New(top, o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestPaperEven(t *testing.T) {
	for _, lanes := range []int{2, 4} {
		p := newPlanner(t, paper(), Options{Steered: true})
		if _, err := p.Allocate(t0, pairs(16, 8, lanes)); err != nil {
			t.Fatal(err)
		}
		for _, l := range p.Links() {
			if l.Planned != 800*gbit {
				t.Errorf("%d lanes: %s carries %d, want all of its %d", lanes, l.Link, l.Planned, l.Rate)
			}
		}
	}
}

func TestPaperJobByJob(t *testing.T) {
	p := newPlanner(t, paper(), Options{Steered: true})
	reqs := pairs(16, 8, 2)
	for i := 0; i < len(reqs); i += 16 {
		if _, err := p.Allocate(t0, reqs[i:i+16]); err != nil {
			t.Fatal(err)
		}
		var most, least int64 = 0, 1 << 60
		for _, l := range p.Links() {
			most, least = max(most, l.Planned), min(least, l.Planned)
		}
	}
}

func BenchmarkAllocate(b *testing.B) {
	for _, hosts := range []int{16, 1250} {
		b.Run(fmt.Sprint(hosts*8), func(b *testing.B) {
			groups := (hosts + 7) / 8
			for b.Loop() {
				b.StopTimer()
				p := newPlanner(b, Clos(ClosShape{Hosts: hosts, NICs: 8, Groups: groups, LeafPairs: 2, Spines: 8, PortRate: 200 * gbit, LinkRate: 800 * gbit}), Options{Steered: true})
				reqs := pairs(hosts, 8, 2)
				b.StartTimer()
				if _, err := p.Allocate(t0, reqs); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
