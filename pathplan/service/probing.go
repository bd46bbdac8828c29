package service

import (
	"cmp"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/lockstep-ccl/lockstep/pathplan"
	"github.com/lockstep-ccl/lockstep/pathplan/probe"
	"github.com/lockstep-ccl/lockstep/pathplan/service/planpb"
)

// Probing says how a fabric is probed. Zero values are the defaults.
type Probing struct {
	Every  time.Duration // 500 ms: one round, of one host a leaf to one host of each other leaf
	Window time.Duration // 6 s: what links are judged by
	Port   uint16        // of responders; probe.Port
	Ports  int           // source ports to trace, 256
	Count  int           // probes from each of a way's ports in a round, 10
	Rate   int           // probes a second of one host, 1000
}

const (
	maxProbers = 1 << 14
	// maxTasks bounds a prober's tasks of one round.
	maxTasks = 16
	// maxWays bounds what one result may tell of.
	maxWays = 256
	// absentFrom is how many source ports must have been traced from, or to, a leaf for a
	// link that none takes to be absent.
	absentFrom = 192
	// absentFor is for how long none may have taken it.
	absentFor = 2500 * time.Millisecond
	// maxResults bounds the window.
	maxResults = 1 << 14
)

// prober is the server's side of probing; the server's lock guards it.
type prober struct {
	s       *Server
	o       Probing
	hosts   map[string]*probing // by node
	byLeaf  map[string][]pathplan.HostPort
	leaves  []string
	last    time.Time // round
	told    time.Time // of losses that no switch names
	tasks   uint64
	results []outcome
	bad     map[pathplan.Link]time.Time // that this has found, until they are well
	state   map[pathplan.Link]pathplan.LinkState
	since   map[pathplan.Link]time.Time // when it was found
	sent    map[pathplan.Link]uint64
	lost    map[pathplan.Link]uint64
}

// probing is a host with a prober.
type probing struct {
	out   chan *planpb.Task
	asked map[uint64]pair
}

// pair is the ends of a task.
type pair struct {
	src, dst pathplan.NIC
	at       time.Time
}

// outcome is what one task told of, in links.
type outcome struct {
	at     time.Time
	from   []string // leaves
	to     []string
	traced int              // source ports whose path has a name
	ways   []pathplan.Probe // Over: source's access, up, down, destination's access
	blind  []pathplan.Probe // Over: source to destination
}

func newProber(s *Server, o Probing) *prober {
	o.Every, o.Window = cmp.Or(o.Every, 500*time.Millisecond), cmp.Or(o.Window, 6*time.Second)
	o.Port, o.Ports, o.Count, o.Rate = cmp.Or(o.Port, probe.Port), cmp.Or(o.Ports, 256), cmp.Or(o.Count, 10), cmp.Or(o.Rate, 1000)
	p := &prober{
		s: s, o: o, hosts: map[string]*probing{}, byLeaf: map[string][]pathplan.HostPort{}, leaves: s.o.Fabric.Leaves,
		bad: map[pathplan.Link]time.Time{}, state: map[pathplan.Link]pathplan.LinkState{}, since: map[pathplan.Link]time.Time{}, sent: map[pathplan.Link]uint64{}, lost: map[pathplan.Link]uint64{},
	}
	for _, h := range s.o.Fabric.Ports {
		if h.Addr != "" {
			p.byLeaf[h.Leaf] = append(p.byLeaf[h.Leaf], h)
		}
	}
	return p
}

// Probe implements the service.
func (s *Server) Probe(g planpb.Planner_ProbeServer) error {
	first, err := hello(g.Context(), g.Recv)
	if err != nil {
		return err
	}
	node := first.GetHello().GetNode()
	if err := s.who(g.Context(), first.GetHello(), true); err != nil {
		return err
	}
	h := &probing{out: make(chan *planpb.Task, maxTasks), asked: map[uint64]pair{}}
	s.mu.Lock()
	_, twice := s.probing.hosts[node]
	full := len(s.probing.hosts) >= maxProbers
	if !twice && !full {
		s.probing.hosts[node] = h
	}
	s.mu.Unlock()
	if twice || full {
		s.Refused.Add(1)
		return status.Errorf(codes.AlreadyExists, "node %s has a prober already, or there are %d", node, maxProbers)
	}
	defer func() {
		s.mu.Lock()
		delete(s.probing.hosts, node)
		s.mu.Unlock()
	}()
	failed := make(chan error, 1)
	go func() { // ends with the stream
		for {
			m, err := g.Recv()
			if err == nil && len(m.GetResult().GetWays()) > maxWays {
				err = status.Errorf(codes.ResourceExhausted, "more than %d ways", maxWays)
			}
			if err != nil {
				failed <- err
				return
			}
			s.mu.Lock()
			s.probing.take(h, m.GetResult(), time.Now())
			s.mu.Unlock()
		}
	}()
	for {
		select {
		case err := <-failed:
			if g.Context().Err() != nil {
				return nil
			}
			return err
		case <-g.Context().Done():
			return nil
		case t := <-h.out:
			if err := g.Send(t); err != nil {
				return err
			}
		}
	}
}

// take notes a result of a task that was this prober's.
func (p *prober) take(h *probing, r *planpb.Result, now time.Time) {
	ends, ok := h.asked[r.GetId()]
	if !ok {
		return
	}
	delete(h.asked, r.GetId())
	f := &p.s.o.Fabric
	o := outcome{at: now, traced: int(r.GetTraced() - min(r.GetTraced(), r.GetUnknown())), from: p.leavesOf(ends.src), to: p.leavesOf(ends.dst)}
	for _, w := range r.GetWays() {
		if w.GetSpine() == "" && w.GetLeaf() == "" { // between these hosts, over whatever switches
			sent := int(min(w.GetSent(), 1<<16))
			o.blind = append(o.blind, pathplan.Probe{Over: []pathplan.Link{{From: ends.src.String(), To: ends.dst.String()}}, Sent: sent, Lost: min(int(w.GetLost()), sent)})
			continue
		}
		a, err1 := netip.ParseAddr(w.GetSpine())
		b, err2 := netip.ParseAddr(w.GetLeaf())
		up, ok1 := f.links[a]
		down, ok2 := f.links[b]
		if err1 != nil || err2 != nil || !ok1 || !ok2 || up.To != down.From || !slices.Contains(o.from, up.From) || !slices.Contains(o.to, down.To) {
			continue // no way between these hosts
		}
		sent := int(min(w.GetSent(), 1<<16))
		lost := min(int(w.GetLost()), sent)
		o.ways = append(o.ways, pathplan.Probe{
			Over: []pathplan.Link{{From: ends.src.String(), To: up.From}, up, down, {From: down.To, To: ends.dst.String()}}, Sent: sent, Lost: lost,
		})
		for _, l := range []pathplan.Link{up, down} {
			p.sent[l] += uint64(sent)
			p.lost[l] += uint64(lost)
		}
	}
	if p.results = append(p.results, o); len(p.results) > maxResults {
		p.results = p.results[1:]
	}
}

func (p *prober) leavesOf(n pathplan.NIC) (leaves []string) {
	for _, h := range p.s.o.Fabric.Ports {
		if h.NIC == n {
			leaves = append(leaves, h.Leaf)
		}
	}
	return leaves
}

// judge begins a round when it is time, and says which links are bad.
func (p *prober) judge(now time.Time) {
	if now.Sub(p.last) >= p.o.Every {
		p.last = now
		p.round(now)
	}
	for len(p.results) > 0 && now.Sub(p.results[0].at) > p.o.Window {
		p.results = p.results[1:]
	}
	var probes []pathplan.Probe
	seen, from, to := map[pathplan.Link]bool{}, map[string]int{}, map[string]int{}
	for _, o := range p.results {
		recent := now.Sub(o.at) < absentFor
		for _, l := range o.from {
			if recent {
				from[l] += o.traced
			}
		}
		for _, l := range o.to {
			if recent {
				to[l] += o.traced
			}
		}
		for _, w := range o.ways {
			if recent {
				seen[w.Over[1]], seen[w.Over[2]] = true, true
			}
			if w.Sent > 0 {
				probes = append(probes, w)
			}
		}
	}
	p.blind(now)
	found := map[pathplan.Link]pathplan.LinkState{}
	for _, s := range pathplan.Infer(probes, pathplan.InferOptions{}) {
		for _, l := range s.Links {
			if _, ours := p.s.o.Fabric.addrs[l]; ours {
				found[l] = pathplan.LinkState{Loss: s.Loss, Down: s.Loss > 0.9}
			}
		}
	}
	leaf := map[string]bool{}
	for _, l := range p.leaves {
		leaf[l] = true
	}
	for l := range p.s.o.Fabric.addrs {
		if up := leaf[l.From]; !seen[l] && (up && from[l.From] >= absentFrom || !up && to[l.To] >= absentFrom) {
			found[l] = pathplan.LinkState{Down: true, Loss: 1}
		}
	}
	p.apply(now, found, seen)
}

// blind tells of hosts between which packets are lost, where no switch says on which link.
func (p *prober) blind(now time.Time) {
	if now.Sub(p.told) < p.o.Window {
		return
	}
	var probes []pathplan.Probe
	for _, o := range p.results {
		probes = append(probes, o.blind...)
	}
	for _, s := range pathplan.Infer(probes, pathplan.InferOptions{}) {
		p.told = now
		p.s.o.Log.Warn("packets are lost, and no switch says where", "between", s.Links[0].From, "and", s.Links[0].To, "loss", s.Loss)
	}
}

// wellAfter is for how long a bad link must look well.
const wellAfter = 2 * time.Second

// apply tells the planner which links are bad, and which are no more.
func (p *prober) apply(now time.Time, found map[pathplan.Link]pathplan.LinkState, seen map[pathplan.Link]bool) {
	for l, st := range found {
		p.bad[l] = now
		if old, known := p.state[l]; !known || old.Down != st.Down {
			p.s.o.Log.Warn("link is bad", "link", l.String(), "down", st.Down, "loss", st.Loss)
			_ = p.s.planner.SetLink(now, l, st)
			p.state[l] = st
			if !known {
				p.since[l] = now
			}
			p.s.decided(Decision{At: now, Link: l, State: st})
		}
	}
	for l, at := range p.bad {
		if _, still := found[l]; !still && seen[l] && now.Sub(at) >= wellAfter {
			p.s.o.Log.Info("link is well again", "link", l.String())
			_ = p.s.planner.SetLink(now, l, pathplan.LinkState{})
			p.s.decided(Decision{At: now, Link: l, Since: p.since[l]})
			delete(p.bad, l)
			delete(p.state, l)
			delete(p.since, l)
		}
	}
}

// round has one host of each leaf, chosen anew, probe one of each other.
func (p *prober) round(now time.Time) {
	chosen := map[string]pathplan.HostPort{}
	for leaf, ports := range p.byLeaf {
		var there []pathplan.HostPort
		for _, h := range ports {
			if p.hosts[h.Host] != nil {
				there = append(there, h)
			}
		}
		if len(there) > 0 {
			chosen[leaf] = there[rand.IntN(len(there))]
		}
	}
	done := map[[2]string]bool{}
	for _, i := range rand.Perm(len(p.leaves)) {
		for _, j := range rand.Perm(len(p.leaves)) {
			a, ok1 := chosen[p.leaves[i]]
			b, ok2 := chosen[p.leaves[j]]
			key := [2]string{a.Addr, b.Addr}
			if i == j || !ok1 || !ok2 || a.Host == b.Host || done[key] {
				continue
			}
			if meet(p.leavesOf(a.NIC), p.leavesOf(b.NIC)) {
				continue // within a leaf no spine is crossed
			}
			done[key] = true
			h := p.hosts[a.Host]
			for id, t := range h.asked {
				if now.Sub(t.at) > p.o.Window {
					delete(h.asked, id)
				}
			}
			if len(h.asked) >= maxTasks {
				continue
			}
			p.tasks++
			t := &planpb.Task{Id: p.tasks, Src: a.Addr, Dst: netip.AddrPortFrom(mustAddr(b.Addr), p.o.Port).String(), Ports: uint32(p.o.Ports), Count: uint32(p.o.Count), Rate: uint32(p.o.Rate)}
			select {
			case h.out <- t:
				h.asked[t.Id] = pair{a.NIC, b.NIC, now}
			default:
			}
		}
	}
}

func meet(a, b []string) bool {
	return slices.ContainsFunc(a, func(l string) bool { return slices.Contains(b, l) })
}

// mustAddr is an address that Fabric.check has parsed.
func mustAddr(s string) netip.Addr { return netip.MustParseAddr(s) }
