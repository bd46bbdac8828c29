package fabricsim

import (
	"fmt"
	"slices"

	"github.com/lockstep-ccl/lockstep/pathplan"
)

// Goodput is the part of a link's rate that carries data: C4P's ring all-reduce reaches
// 360 of 400 Gbit/s.
const Goodput = 0.9

// Gbit is a bit/s by which rates are shown.
const Gbit = 1e9

// Fabric is a topology, its links' states, and the seeds of its switches' hashes. Not safe
// for concurrent use.
type Fabric struct {
	Topology pathplan.Topology
	seed     uint64
	links    map[pathplan.Link]int32
	tx, rx   map[pathplan.Port]int32
	leaf     map[pathplan.Port]string
	capacity []float64
	down     map[pathplan.Link]bool
	ups      map[string][]pathplan.Link // a leaf's uplinks, in order
	downs    map[[2]string][]pathplan.Link
}

// New is a fabric whose links are all up. Another seed is another run: other hashes, other
// source ports.
func New(t pathplan.Topology, seed uint64) *Fabric {
	f := &Fabric{Topology: t, seed: seed, links: map[pathplan.Link]int32{}, tx: map[pathplan.Port]int32{}, rx: map[pathplan.Port]int32{},
		leaf: map[pathplan.Port]string{}, down: map[pathplan.Link]bool{}, ups: map[string][]pathplan.Link{}, downs: map[[2]string][]pathplan.Link{}}
	add := func(rate int64) int32 {
		f.capacity = append(f.capacity, float64(rate)*Goodput)
		return int32(len(f.capacity) - 1)
	}
	for _, l := range t.Links {
		f.links[l.Link] = add(l.Rate)
		if slices.Contains(t.Leaves, l.From) {
			f.ups[l.From] = append(f.ups[l.From], l.Link)
		} else {
			f.downs[[2]string{l.From, l.To}] = append(f.downs[[2]string{l.From, l.To}], l.Link)
		}
	}
	for _, p := range t.Ports {
		f.tx[p.Port], f.rx[p.Port], f.leaf[p.Port] = add(p.Rate), add(p.Rate), p.Leaf
	}
	return f
}

// Cut takes a cable down, in both directions; Mend puts it back.
func (f *Fabric) Cut(l pathplan.Link)  { f.down[l], f.down[l.Reverse()] = true, true }
func (f *Fabric) Mend(l pathplan.Link) { delete(f.down, l); delete(f.down, l.Reverse()) }

// hash is what a switch makes of a packet's addresses and ports.
func (f *Fabric) hash(at string, words ...uint64) uint64 {
	h := f.seed*0x9e3779b97f4a7c15 + 0x632be59bd9b4e019
	for i := range len(at) {
		h = (h ^ uint64(at[i])) * 0x100000001b3
	}
	for _, w := range words {
		h ^= w
		h ^= h >> 30
		h *= 0xbf58476d1ce4e5b9
		h ^= h >> 27
		h *= 0x94d049bb133111eb
		h ^= h >> 31
	}
	return h
}

// Hashed is the way of a lane that nobody has planned: the bond picks the NIC's port, the
// leaf a spine, the spine one of the leaves that lead to the destination: its left or its
// right port, whichever. Links that are down are not among the choices.
func (f *Fabric) Hashed(src, dst pathplan.NIC, sourcePort uint64) ([]int32, error) {
	flow := f.flow(src, dst, sourcePort)
	sides := f.sides(src)
	if len(sides) == 0 {
		return nil, fmt.Errorf("%s has no port", src)
	}
	return f.hashedFrom(sides[f.hash("bond", flow)%uint64(len(sides))], dst, flow)
}

func (f *Fabric) flow(src, dst pathplan.NIC, sourcePort uint64) uint64 {
	return f.hash(src.String()+">"+dst.String(), sourcePort)
}

// hashedFrom is the way of a lane that leaves by a given port.
func (f *Fabric) hashedFrom(from pathplan.Port, dst pathplan.NIC, flow uint64) ([]int32, error) {
	to := f.sides(dst)
	for _, p := range to {
		if f.leaf[p] == f.leaf[from] {
			return []int32{f.tx[from], f.rx[p]}, nil
		}
	}
	var ups []pathplan.Link
	for _, up := range f.ups[f.leaf[from]] {
		if !f.down[up] && len(f.exits(up.To, to)) > 0 {
			ups = append(ups, up)
		}
	}
	if len(ups) == 0 {
		return nil, fmt.Errorf("%s reaches %s by no spine", from, dst)
	}
	up := ups[f.hash(f.leaf[from], flow)%uint64(len(ups))]
	exits := f.exits(up.To, to)
	out := exits[f.hash(up.To, flow)%uint64(len(exits))]
	return []int32{f.tx[from], f.links[up], f.links[out.link], f.rx[out.port]}, nil
}

type exit struct {
	link pathplan.Link
	port pathplan.Port
}

// exits are a spine's links to leaves where one of the ports is.
func (f *Fabric) exits(spine string, ports []pathplan.Port) (out []exit) {
	for _, p := range ports {
		for _, l := range f.downs[[2]string{spine, f.leaf[p]}] {
			if !f.down[l] {
				out = append(out, exit{l, p})
			}
		}
	}
	return out
}

func (f *Fabric) sides(n pathplan.NIC) (out []pathplan.Port) {
	for _, side := range []pathplan.Side{pathplan.Left, pathplan.Right} {
		if p := (pathplan.Port{NIC: n, Side: side}); f.leaf[p] != "" {
			out = append(out, p)
		}
	}
	return out
}

// Planned is the way of a lane with an assignment. ok is false where a link of it is down.
func (f *Fabric) Planned(src, dst pathplan.NIC, a *pathplan.Assignment) (links []int32, ok bool) {
	from, to := pathplan.Port{NIC: src, Side: a.Side}, pathplan.Port{NIC: dst, Side: a.Side}
	if a.Path == (pathplan.Path{}) {
		return []int32{f.tx[from], f.rx[to]}, f.leaf[from] == f.leaf[to]
	}
	return []int32{f.tx[from], f.links[a.Path.Up], f.links[a.Path.Down], f.rx[to]}, !f.down[a.Path.Up] && !f.down[a.Path.Down]
}
