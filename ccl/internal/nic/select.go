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
	GPU  string // bus id in any form, "" if the rank has none
	NUMA int    // node of the rank's memory if it has no GPU, -1 if unknown
	// LocalRank is the rank's index on its node. Ranks without a GPU take turns at equally near
	// NICs.
	LocalRank int
}

// ErrNoPort says that no port can be used. The error's text has the reason for each.
var ErrNoPort = errors.New("no usable RDMA port")

// candidate is a port that can be used.
type candidate struct {
	Port
	nic   string
	index int // index of the device
}

// Select returns the ports that a rank can use: its primary first, then its backup (another port of the
// same NIC, or else the next NIC), then the others. Usable says why other ports cannot be used.
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
			// A port of another link layer helps only if the peer has one, too.
			isFirst(a.Layer == primary.Layer, b.Layer == primary.Layer),
			cmp.Compare(a.Distance, b.Distance),
			-cmp.Compare(a.Rate, b.Rate),
			// Devices after the primary come first, so that not all ranks of a node have the
			// same backup.
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

// why describes a port's distance in words.
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

// isFirst is a comparison that orders true before false.
func isFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// equallyNear returns how many ports are as good as the first.
func equallyNear(all []candidate) int {
	n := 1
	for n < len(all) && all[n].Distance == all[0].Distance && all[n].Rate == all[0].Rate && all[n].Layer == all[0].Layer {
		n++
	}
	return n
}

// turn returns which of the nearest ports a rank takes. GPUs with the same nearest ports take turns in
// PCIe order, ranks without a GPU in the order of their indices.
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

// candidates returns the ports that can be used, the nearest first. Equally near ports are ordered by
// rate, and then the first ports of all NICs come before their second ones.
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

// where returns the place of a rank.
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
	return place{numa: -1}, nil // sysfs does not show the GPU, as in some sandboxes: all NICs are at the same distance
}

// Usable returns why a port cannot be used, or nil.
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

// hasPhysical reports whether d is a virtual function whose physical function may be used. The two share
// a port, so they are not two paths.
func (t *Tree) hasPhysical(d *Device, o *Override) bool {
	return d.VirtualOf != "" && slices.ContainsFunc(t.Devices, func(pf Device) bool {
		return pf.BusID == d.VirtualOf && slices.ContainsFunc(pf.Ports, func(p Port) bool { return o.allows(p.Device, p.Num) })
	})
}
