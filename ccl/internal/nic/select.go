package nic

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Near is where a rank is.
type Near struct {
	GPU  string // bus id in any form; "" when the rank has none
	NUMA int    // node of the rank's memory when it has no GPU; -1: unknown
	// LocalRank is the rank's number on its node. Ranks that no GPU tells apart
	// take turns at NICs that are equally near.
	LocalRank int
}

// ErrNoPort says that no port can be used; the text says why of each.
var ErrNoPort = errors.New("no usable RDMA port")

// candidate is a port that can be used.
type candidate struct {
	Port
	nic   string
	index int // of the device
}

// Select orders the ports that can be used by a rank: its primary first, then its
// backup (another port of the same NIC, else the next NIC), then the others. A
// port that cannot be used is left out; Usable says why.
func (t *Tree) Select(near Near, o Override) ([]Port, error) {
	all, err := t.candidates(near, o)
	if err != nil {
		return nil, err
	}
	equal := equallyNear(all)
	first := t.turn(all[:equal], near, o)
	primary := all[first]
	order := slices.Concat(all[first:first+1], all[:first], all[first+1:])
	slices.SortStableFunc(order[1:], func(a, b candidate) int {
		return cmp.Or(
			isFirst(a.nic == primary.nic, b.nic == primary.nic),
			// On another kind of network the peer would have to have one there, too.
			isFirst(a.Layer == primary.Layer, b.Layer == primary.Layer),
			cmp.Compare(a.Distance, b.Distance),
			-cmp.Compare(a.Rate, b.Rate),
			// Those that follow the primary come first, so that not all ranks of a
			// node have the same backup.
			isFirst(a.index > primary.index, b.index > primary.index))
	})
	out := make([]Port, len(order))
	for i := range order {
		c := &order[i]
		c.Why = c.why(near)
		switch {
		case i > 0 && c.nic == primary.nic:
			c.Why = "other port of the NIC, " + c.Why
		case i == 0 && equal > 1:
			c.Why += fmt.Sprintf(", one of %d as near", equal)
		}
		out[i] = c.Port
	}
	return out, nil
}

// why says in words how far a port is.
func (c *candidate) why(near Near) string {
	from := "the GPU"
	if near.GPU == "" {
		from = "the rank"
	}
	via := ""
	if c.Data {
		via = " by its data function"
	}
	switch c.Distance {
	case Unknown:
		return "at an unknown distance from " + from + via
	case Far:
		return "on another NUMA node than " + from + via
	}
	return "on the " + c.Distance.String() + " of " + from + via
}

// isFirst orders what has a property before what has not.
func isFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// equallyNear counts the ports that are as good as the first.
func equallyNear(all []candidate) int {
	n := 1
	for n < len(all) && all[n].Distance == all[0].Distance && all[n].Rate == all[0].Rate && all[n].Layer == all[0].Layer {
		n++
	}
	return n
}

// turn picks among the nearest ports: GPUs that have the same ones take turns in
// PCIe order, ranks without a GPU in the order of their numbers.
func (t *Tree) turn(nearest []candidate, near Near, o Override) int {
	own, isGPU := BusID(near.GPU)
	n := 0
	for _, g := range t.GPUs {
		if !isGPU || len(nearest) == 1 {
			break
		}
		if g.BusID == own {
			return n % len(nearest)
		}
		theirs, err := t.candidates(Near{GPU: g.BusID, NUMA: -1}, o)
		if err == nil && slices.EqualFunc(theirs[:equallyNear(theirs)], nearest, func(a, b candidate) bool { return a.Name() == b.Name() }) {
			n++
		}
	}
	return max(near.LocalRank, 0) % len(nearest)
}

// candidates are the ports that can be used, nearest first; of equally near ones
// the fastest, and the first ports of all NICs before their second ones.
func (t *Tree) candidates(near Near, o Override) ([]candidate, error) {
	at, err := t.where(near)
	if err != nil {
		return nil, err
	}
	var all []candidate
	var reasons []string
	for i := range t.Devices {
		d := &t.Devices[i]
		for _, p := range d.Ports {
			g, err := t.usable(d, &p, &o)
			if err != nil {
				reasons = append(reasons, fmt.Sprintf("%s %v", p.Name(), err))
				continue
			}
			p.GIDIndex, p.GID, p.Addr, p.Subnet = g.Index, g.Raw, g.Addr, g.Subnet
			c := candidate{Port: p, nic: d.nic, index: i}
			c.Distance, c.Data = at.distance(d.place), d.data != nil
			if c.Data {
				c.Distance = at.distance(*d.data)
			}
			all = append(all, c)
		}
	}
	if len(all) == 0 {
		if len(reasons) == 0 {
			reasons = []string{"there is no RDMA device in /sys/" + classRDMA}
		}
		return nil, fmt.Errorf("%w: %s", ErrNoPort, strings.Join(reasons, "; "))
	}
	slices.SortStableFunc(all, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.Distance, b.Distance), -cmp.Compare(a.Rate, b.Rate), cmp.Compare(a.Layer, b.Layer))
	})
	nth, seen := map[string]int{}, map[string]int{}
	nearest := all[:equallyNear(all)]
	for i := range nearest {
		nth[nearest[i].Name()] = seen[nearest[i].nic]
		seen[nearest[i].nic]++
	}
	slices.SortStableFunc(nearest, func(a, b candidate) int { return cmp.Compare(nth[a.Name()], nth[b.Name()]) })
	return all, nil
}

// where is the place of a rank.
func (t *Tree) where(near Near) (place, error) {
	if near.GPU == "" {
		return place{numa: near.NUMA}, nil
	}
	id, ok := BusID(near.GPU)
	if !ok {
		return place{}, fmt.Errorf("select a NIC near %q: that is no PCIe address like 0000:1b:00.0", near.GPU)
	}
	if p, ok := t.pci[id]; ok {
		return p, nil
	}
	return place{numa: -1}, nil // a GPU that sysfs does not show, as in some sandboxes: all NICs are as near
}

// Usable says why a port cannot be used, nil when it can.
func (t *Tree) Usable(p *Port, o Override) error {
	for i := range t.Devices {
		if t.Devices[i].Name == p.Device {
			_, err := t.usable(&t.Devices[i], p, &o)
			return err
		}
	}
	return errors.New("is not of this node")
}

func (t *Tree) usable(d *Device, p *Port, o *Override) (*GID, error) {
	switch {
	case !o.allows(p.Device, p.Num):
		return nil, fmt.Errorf("is not in the list %q", o.text)
	case !d.RC:
		return nil, errors.New("is no InfiniBand or RoCE device")
	case p.Layer == LayerUnknown:
		return nil, errors.New("has an unknown link layer")
	case p.State != StateActive:
		return nil, fmt.Errorf("is %s (link %s)", p.State, cmp.Or(p.PhysState, "unknown"))
	case t.hasPhysical(d, o):
		return nil, fmt.Errorf("is a virtual function of %s, which is here, too", d.VirtualOf)
	}
	return p.pick(o.prefix)
}

// hasPhysical reports whether a virtual function's physical one may be used as
// well: it shares its port, so it is no second path.
func (t *Tree) hasPhysical(d *Device, o *Override) bool {
	return d.VirtualOf != "" && slices.ContainsFunc(t.Devices, func(pf Device) bool {
		return pf.BusID == d.VirtualOf && slices.ContainsFunc(pf.Ports, func(p Port) bool { return o.allows(p.Device, p.Num) })
	})
}
