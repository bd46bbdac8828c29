package service

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/pathplan"
	"github.com/lockstep-ccl/lockstep/pathplan/service/planpb"
)

// A round has one host of each leaf, chosen anew, probe one of each other leaf, over all paths.
// Links that may be bad are looked at closely beside that: by more probes, from two hosts at
// the link's leaf and one elsewhere, over their spine's paths alone.

// maxFocus bounds the spines whose links are looked at closely in a round.
const maxFocus = 3

// What is looked at closely gets focusedTimes as many probes from each port of a path, at
// focusedRate times the rate: a link that loses 1 % takes some thousand to prove, and a job
// waits for it meanwhile.
const (
	focusedTimes = 6
	focusedRate  = 5
)

func (p *prober) round(now time.Time) {
	for _, h := range p.hosts {
		for id, t := range h.asked {
			if now.Sub(t.at) > 2*p.o.Window {
				delete(h.asked, id)
			}
		}
	}
	p.focus(now)
	chosen := map[string]pathplan.HostPort{}
	for _, leaf := range p.leaves {
		if some := p.some(leaf, 1); len(some) > 0 {
			chosen[leaf] = some[0]
		}
	}
	done := map[[2]string]bool{}
	for _, i := range p.rand.Perm(len(p.leaves)) {
		for _, j := range p.rand.Perm(len(p.leaves)) {
			a, ok1 := chosen[p.leaves[i]]
			b, ok2 := chosen[p.leaves[j]]
			key := [2]string{a.Addr, b.Addr}
			if i == j || !ok1 || !ok2 || done[key] {
				continue
			}
			done[key] = true
			p.task(now, a, b, "")
		}
	}
}

// some are hosts of a leaf that have probers, in any order.
func (p *prober) some(leaf string, most int) (out []pathplan.HostPort) {
	ports := p.byLeaf[leaf]
	for _, i := range p.rand.Perm(len(ports)) {
		if len(out) < most && p.hosts[ports[i].Host] != nil {
			out = append(out, ports[i])
		}
	}
	return out
}

// focus looks closely at links that may be bad, or, now and then, are well again.
func (p *prober) focus(now time.Time) {
	var known []pathplan.Link
	if p.rounds++; p.rounds%slowLooks == 0 {
		for l := range p.bad {
			known = append(known, l)
		}
	}
	// What senders say comes last: a tenant must not keep probers from what they have found themselves.
	look := slices.Concat(p.inAnyOrder(slices.Collect(maps.Keys(p.unsure))), p.inAnyOrder(known), p.inAnyOrder(p.s.planner.Suspects()))
	spines := map[string]bool{}
	for _, l := range look {
		up, spine, leaf := p.leaf[l.From], p.spineOf(l), l.To
		if up {
			leaf = l.From
		}
		if spines[spine] || len(spines) >= maxFocus {
			continue // a look at one of a spine's is one at them all
		}
		spines[spine] = true
		over := spine
		if since, unsure := p.unsure[l]; unsure && now.Sub(since) > p.o.Window && p.rand.IntN(controlEvery) == 0 {
			over = p.control(leaf, spine, up)
		}
		near := p.some(leaf, 2)
		var far []pathplan.HostPort
		for _, i := range p.rand.Perm(len(p.leaves)) {
			for _, h := range p.some(p.leaves[i], 2) {
				if len(far) < 3 && !slices.ContainsFunc(append(near, far...), func(o pathplan.HostPort) bool { return o.Host == h.Host }) {
					far = append(far, h)
				}
			}
		}
		for _, a := range near {
			for _, b := range far {
				p.directed(now, a, b, over, up)
			}
		}
		for i := 1; i < len(far); i++ { // how the paths' other links are without it
			p.directed(now, far[0], far[i], spine, up)
		}
	}
}

// controlEvery is how rarely a look at a link that is in doubt for long goes over another spine.
const controlEvery = 4

// control is another spine by which a leaf is reached: that nothing is lost over it clears the
// hosts' own links, which are all that is left to blame in the place of a leaf's one bad link.
func (p *prober) control(leaf, spine string, up bool) string {
	for _, i := range p.rand.Perm(len(p.s.o.Fabric.Spines)) {
		l := pathplan.Link{From: leaf, To: p.s.o.Fabric.Spines[i]}
		if !up {
			l = l.Reverse()
		}
		if _, is := p.s.o.Fabric.addrs[l]; is && l.To != spine && l.From != spine && p.bad[l] == nil {
			return p.spineOf(l)
		}
	}
	return spine
}

func (p *prober) inAnyOrder(list []pathplan.Link) []pathplan.Link {
	slices.SortFunc(list, func(a, b pathplan.Link) int { return cmp.Or(cmp.Compare(a.From, b.From), cmp.Compare(a.To, b.To)) })
	p.rand.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	return list
}

func (p *prober) directed(now time.Time, a, b pathplan.HostPort, spine string, up bool) {
	if !up {
		a, b = b, a
	}
	p.task(now, a, b, spine)
}

// task has a host probe another, over one spine where that is given.
func (p *prober) task(now time.Time, a, b pathplan.HostPort, spine string) {
	h := p.hosts[a.Host]
	from := p.leavesOf(a.NIC)
	if h == nil || h.waiting(spine != "") || a.Host == b.Host || meet(from, p.leavesOf(b.NIC)) {
		return // busy, or within a leaf: no spine is crossed
	}
	p.tasks++
	t := &planpb.Task{Id: p.tasks, Src: a.Addr, Dst: netip.AddrPortFrom(mustAddr(b.Addr), p.o.Port).String(), Ports: uint32(p.o.Ports), Count: uint32(p.o.Count), Rate: uint32(p.o.Rate)}
	if spine != "" {
		for _, leaf := range from {
			if addr, ok := p.s.o.Fabric.addrs[pathplan.Link{From: leaf, To: spine}]; ok {
				t.Spines = append(t.Spines, addr.String())
			}
		}
	}
	each := probedPorts
	if len(t.Spines) > 0 {
		each = focusedPorts
		t.Count *= focusedTimes
		t.Rate *= focusedRate
	}
	select {
	case h.out <- t:
		h.asked[t.Id] = pair{src: a.NIC, dst: b.NIC, at: now, most: each * int(t.Count), close: spine != ""}
	default:
	}
}

// waiting reports whether a host has a task of a kind that waits or is being done: what it
// tells must be of now, and what is looked at closely must not keep it from the rest.
func (h *probing) waiting(close bool) bool {
	for _, t := range h.asked {
		if t.close == close {
			return true
		}
	}
	return false
}

func meet(a, b []string) bool {
	return slices.ContainsFunc(a, func(l string) bool { return slices.Contains(b, l) })
}

// mustAddr is an address that Fabric.check has parsed.
func mustAddr(s string) netip.Addr { return netip.MustParseAddr(s) }
