package service

import (
	"cmp"
	"math/rand/v2"
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
	Window time.Duration // 6 s: what links are judged by at least; those that lose little, by up to 8 of it
	Port   uint16        // of responders; probe.Port
	Ports  int           // source ports to trace, 256
	Count  int           // probes from each of a path's ports in a round, 10
	Rate   int           // probes a second of one host, 1000; five times as many where a link may be bad
}

const (
	maxProbers = 1 << 14
	// maxTasks bounds a prober's tasks of one round.
	maxTasks = 16
	// maxPaths bounds the paths of one result.
	maxPaths = 256
	// maxBucket bounds the entries of a bucket.
	maxBucket = 1 << 14
)

// prober is the server's side of probing; the server's lock guards it.
type prober struct {
	s       *Server
	o       Probing
	hosts   map[string]*probing // by node
	byLeaf  map[string][]pathplan.HostPort
	leaves  []string
	leaf    map[string]bool
	rand    *rand.Rand
	last    time.Time       // round
	alone   map[string]bool // hosts that are alone on their leaves
	warned  time.Time       // of losses that no switch names
	tasks   uint64
	told    []bucket // what probers told of, oldest first
	heard   bool     // something since links were last judged
	judged  time.Time
	looks   int
	rounds  int
	blinds  []pathplan.Probe // between hosts, where no switch answers
	traces  []traced
	unsure  map[pathplan.Link]time.Time // that may be bad, and are looked at closely: since when
	bad     map[pathplan.Link]*badLink
	found   map[pathplan.Link]int       // how often it was, of late
	cleared map[pathplan.Link]time.Time // when it was last well again
	mended  map[string]time.Time        // the same, of any of a spine's links: what was told of the spine before is of another time
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
	most     int  // probes that it asks for, of one path
	close    bool // it looks closely at some paths
}

func newProber(s *Server, o Probing) *prober {
	o.Every, o.Window = cmp.Or(o.Every, 500*time.Millisecond), cmp.Or(o.Window, 6*time.Second)
	o.Port, o.Ports, o.Count, o.Rate = cmp.Or(o.Port, probe.Port), cmp.Or(o.Ports, 256), cmp.Or(o.Count, 10), cmp.Or(o.Rate, 1000)
	p := &prober{
		s: s, o: o, hosts: map[string]*probing{}, byLeaf: map[string][]pathplan.HostPort{}, leaves: s.o.Fabric.Leaves,
		leaf: map[string]bool{}, rand: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())), alone: map[string]bool{}, bad: map[pathplan.Link]*badLink{}, found: map[pathplan.Link]int{}, cleared: map[pathplan.Link]time.Time{}, mended: map[string]time.Time{}, sent: map[pathplan.Link]uint64{}, lost: map[pathplan.Link]uint64{},
	}
	for _, h := range s.o.Fabric.Ports {
		if h.Addr != "" {
			p.byLeaf[h.Leaf] = append(p.byLeaf[h.Leaf], h)
		}
	}
	for _, l := range p.leaves {
		p.leaf[l] = true
	}
	for _, ports := range p.byLeaf {
		host := ports[0].Host
		p.alone[host] = !slices.ContainsFunc(ports, func(h pathplan.HostPort) bool { return h.Host != host })
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
	if err := s.who(g.Context(), first.GetHello(), hostProber); err != nil {
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
			if err == nil && len(m.GetResult().GetSamples()) > maxPaths {
				err = status.Errorf(codes.ResourceExhausted, "more than %d paths", maxPaths)
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
	from, to := p.leavesOf(ends.src), p.leavesOf(ends.dst)
	t := traced{at: now, src: ends.src.Host, dst: ends.dst.Host, from: from, to: to, named: int(r.GetTraced() - min(r.GetTraced(), r.GetUnknown())), took: map[pathplan.Link]int{}, reached: map[string]int{}, passed: map[string]int{}}
	hosts := [2]string{p.doubted(ends.src.Host), p.doubted(ends.dst.Host)}
	p.heard = true
	for _, s := range r.GetSamples() {
		sent := int(min(s.GetSent(), uint32(ends.most)))
		lost := min(int(s.GetLost()), sent)
		if s.GetSpine() == "" && s.GetLeaf() == "" { // between these hosts, over whatever switches
			p.blinds = append(p.blinds, pathplan.Probe{Over: []pathplan.Link{{From: ends.src.String(), To: ends.dst.String()}}, Sent: sent, Lost: lost})
			continue
		}
		up, okUp := f.link(s.GetSpine())
		down, okDown := f.link(s.GetLeaf())
		okUp, okDown = okUp && slices.Contains(from, up.From), okDown && slices.Contains(to, down.To)
		ports := int(min(s.GetPorts(), uint32(p.o.Ports)))
		switch {
		case okUp && s.GetLeaf() == "":
			t.took[up] += ports
			t.reached[up.To] += ports
			continue
		case okDown && s.GetSpine() == "":
			t.took[down] += ports
			t.passed[down.From] += ports
			continue
		case !okUp || !okDown || up.To != down.From:
			continue // no path between these hosts
		}
		t.took[up] += ports
		t.took[down] += ports
		t.reached[up.To] += ports
		access, last := pathplan.Link{From: ends.src.String(), To: up.From}, pathplan.Link{From: down.To, To: ends.dst.String()}
		p.tell(now, pathplan.Probe{Over: []pathplan.Link{access, up, down, last}, Sent: sent, Lost: lost, Hosts: hosts})
		if retraced := int(min(s.GetRetraced(), focusedPorts)); retraced > 0 && lost == sent && sent >= allLost {
			p.again(now, pathplan.Probe{Over: []pathplan.Link{access, up}, Sent: retraced, Hosts: hosts}, min(int(s.GetReached()), retraced), from)
		}
		for _, l := range []pathplan.Link{up, down} {
			p.sent[l] += uint64(sent)
			p.lost[l] += uint64(lost)
		}
	}
	p.traces = append(p.traces, t)
}

// again notes of how many ports of a dead path the spine was heard. Who hears it has reached
// it; who does not may have, and the answer was lost: on either leaf's link from the spine.
func (p *prober) again(now time.Time, pr pathplan.Probe, reached int, from []string) {
	if reached > 1 {
		pr.Sent = reached
	} else if reached == 0 {
		pr.Lost = pr.Sent
		for _, leaf := range from {
			pr.Over = append(pr.Over, pathplan.Link{From: pr.Over[1].To, To: leaf})
		}
	} else {
		return
	}
	p.tell(now, pr)
}

// doubted is whose word is asked to be confirmed: nobody's who is alone on its leaf, and so
// says of links that it alone uses.
func (p *prober) doubted(host string) string {
	if p.alone[host] {
		return ""
	}
	return host
}

func (p *prober) leavesOf(n pathplan.NIC) (leaves []string) {
	for _, h := range p.s.o.Fabric.Ports {
		if h.NIC == n {
			leaves = append(leaves, h.Leaf)
		}
	}
	return leaves
}
