package service

import (
	"cmp"
	"context"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/pathplan"
	"github.com/lockstep-ccl/lockstep/pathplan/probe"
	"github.com/lockstep-ccl/lockstep/pathplan/service/planpb"
)

// network is a fabric of switches that hash, answer probes whose TTL runs out, and lose
// packets; planner and probers are the real ones, in virtual time.
type network struct {
	t      *testing.T
	f      Fabric
	s      *Server
	now    time.Time
	spines int
	pods   int
	loss   map[pathplan.Link]float64
	r      *rand.Rand
	seed   uint64
	hosts  []*simHost
	lies   func(host string, r *planpb.Result)
	took   time.Duration // of what is being done
	to     netip.Addr    // whom the result is about that is told
	ever   map[pathplan.Link]bool
}

// simHost is a host with its prober.
type simHost struct {
	name string
	pod  int
	addr netip.Addr
	p    *Prober
	h    *probing
	done time.Time
	out  *planpb.Result
}

// newFabric is pods of dual-port hosts, each pod with a left and a right leaf.
func newFabric(pods, spines, each int) (f Fabric) {
	f.Topology = pathplan.Clos(pathplan.ClosShape{Hosts: pods * each, NICs: 1, Groups: pods, LeafPairs: 1, Spines: spines, PortRate: 1e9, LinkRate: 1e9})
	for i := range f.Ports {
		var h int
		fmt.Sscanf(f.Ports[i].Host, "host%d", &h)
		f.Ports[i].Addr = fmt.Sprintf("10.3.%d.1", h)
	}
	for i, l := range f.Topology.Links {
		f.Interfaces = append(f.Interfaces, Interface{Link: l.Link, Addr: netip.AddrFrom4([4]byte{10, 200, byte(i >> 8), byte(i)})})
	}
	return f
}

// newRoutes is a network between the hosts of a planner's two pods of two, for what routes and traces say.
func newRoutes(t *testing.T, s *Server, spines int) *network {
	n := &network{t: t, r: rand.New(rand.NewPCG(1, 2)), f: s.o.Fabric, pods: 2, spines: spines, loss: map[pathplan.Link]float64{}, seed: 1}
	for h := range 4 {
		n.hosts = append(n.hosts, &simHost{pod: h / 2, addr: addrOf(h)})
	}
	return n
}

func newNetwork(t *testing.T, r *rand.Rand, pods, spines, each int) *network {
	t.Helper()
	n := &network{t: t, r: r, spines: spines, pods: pods, now: time.Now(), loss: map[pathplan.Link]float64{}, seed: r.Uint64(), ever: map[pathplan.Link]bool{}}
	n.f = newFabric(pods, spines, each)
	s, err := New(Options{Fabric: n.f, Listen: "127.0.0.1:0", Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	n.s, n.f = s, s.o.Fabric
	s.probing.rand = rand.New(rand.NewPCG(r.Uint64(), 1))
	for h := range pods * each {
		host := &simHost{name: fmt.Sprintf("host%d", h), pod: h / each, addr: addrOf(h), h: &probing{out: make(chan *planpb.Task, maxTasks), asked: map[uint64]pair{}}}
		host.p = &Prober{o: ProberOptions{FirstPort: 33000, MaxRate: 5000}, maps: map[hostPair]*known{}, now: func() time.Time { return n.now }}
		host.p.trace = n.trace
		host.p.ping = n.ping
		s.probing.hosts[host.name] = host.h
		n.hosts = append(n.hosts, host)
	}
	return n
}

func (n *network) hash(what string, src, dst netip.Addr, port uint16, of int) int {
	h := fnv.New64a()
	a, b := src.As4(), dst.As4()
	h.Write(append(append(append([]byte(what), a[:]...), b[:]...), byte(port), byte(port>>8)))
	x := (h.Sum64() ^ n.seed) * 0x9e3779b97f4a7c15 // FNV's low bits are poor
	return int((x ^ x>>29) * 0xbf58476d1ce4e5b9 >> 33 % uint64(of))
}

func (n *network) pod(a netip.Addr) int { return n.hosts[a.As4()[2]].pod }

// route is how a packet goes between hosts.
func (n *network) route(src, dst netip.Addr, port uint16) (up, down pathplan.Link) {
	leaf := fmt.Sprintf("leaf%d", 2*n.pod(src)+n.hash("host", src, dst, port, 2))
	spine := fmt.Sprintf("spine%d", n.hash(leaf, src, dst, port, n.spines))
	return pathplan.Link{From: leaf, To: spine}, pathplan.Link{From: spine, To: fmt.Sprintf("leaf%d", 2*n.pod(dst)+n.hash(spine, src, dst, port, 2))}
}

func (n *network) passes(links ...pathplan.Link) bool {
	for _, l := range links {
		if x := n.loss[l]; x > 0 && n.r.Float64() < x {
			return false
		}
	}
	return true
}

func (n *network) trace(_ context.Context, o probe.TraceOptions) ([]probe.Hops, error) {
	first, last, tries := cmp.Or(o.FirstHop, 2), cmp.Or(o.LastHop, 3), cmp.Or(o.Tries, 2)
	out := make([]probe.Hops, len(o.Ports))
	silent := false
	for i, port := range o.Ports {
		out[i] = make(probe.Hops, last-first+1)
		up, down := n.route(o.Src, o.Dst.Addr(), port)
		back := fmt.Sprintf("leaf%d", 2*n.pod(o.Src)+n.hash("back", o.Src, o.Dst.Addr(), port, 2))
		spine := fmt.Sprintf("spine%d", n.hash("back"+down.To, o.Src, o.Dst.Addr(), port, n.spines))
		for hop := first; hop <= last; hop++ {
			answered := false
			for k := 0; k < tries && !answered; k++ {
				n.took += time.Second / time.Duration(o.Rate)
				if hop == 2 {
					answered = n.passes(up, pathplan.Link{From: up.To, To: back})
				} else {
					answered = n.passes(up, down, pathplan.Link{From: down.To, To: spine}, pathplan.Link{From: spine, To: back})
				}
			}
			if answered {
				out[i][hop-first] = n.f.addrs[[]pathplan.Link{up, down}[hop-2]]
			}
			silent = silent || !answered
		}
	}
	if silent {
		n.took += time.Duration((len(o.Ports)+63)/64) * 2 * o.Timeout
	}
	return out, nil
}

func (n *network) ping(_ context.Context, o probe.PingOptions) ([]probe.Ping, error) {
	out := make([]probe.Ping, len(o.Ports))
	heard := false
	for _, port := range o.Ports { // some answer must come back
		up, down := n.route(o.Src, o.Dst.Addr(), port)
		x, y := n.route(o.Dst.Addr(), o.Src, port)
		heard = heard || n.passes(up, down, x, y)
	}
	missing := false
	for i, port := range o.Ports {
		out[i] = probe.Ping{Port: port, Sent: 3, Lost: 3}
		if !heard {
			continue
		}
		up, down := n.route(o.Src, o.Dst.Addr(), port)
		out[i] = probe.Ping{Port: port, Sent: o.Count, Answered: true, Lost: lost(n.r, o.Count, 1-(1-n.loss[up])*(1-n.loss[down]))}
		missing = missing || out[i].Lost > 0
	}
	n.took += time.Duration(o.Count*len(o.Ports)) * time.Second / time.Duration(o.Rate)
	if missing || !heard {
		n.took += 400 * time.Millisecond
	}
	return out, nil
}

// lost is how many of some packets are.
func lost(r *rand.Rand, count int, x float64) (n int) {
	if x <= 0 {
		return 0
	}
	if x >= 1 {
		return count
	}
	for i := 0; ; n++ {
		if i += 1 + int(math.Log(1-r.Float64())/math.Log1p(-x)); i > count {
			return n
		}
	}
}

// run has the network go on until what is asked for is so, or for some time.
func (n *network) run(most time.Duration, until func() bool) time.Duration {
	n.s.mu.Lock()
	defer n.s.mu.Unlock()
	p := n.s.probing
	const step = 100 * time.Millisecond
	for began := n.now; ; n.now = n.now.Add(step) {
		p.judge(n.now)
		for l := range p.bad {
			n.ever[l] = true
		}
		if until() || n.now.Sub(began) >= most {
			return n.now.Sub(began)
		}
		for _, h := range n.hosts {
			if h.out != nil && !n.now.Before(h.done) {
				if n.lies != nil {
					n.to = netip.MustParseAddr(n.f.Ports[slices.IndexFunc(n.f.Ports, func(p pathplan.HostPort) bool { return p.NIC == h.h.asked[h.out.Id].dst })].Addr)
					n.lies(h.name, h.out)
				}
				p.take(h.h, h.out, n.now)
				h.out = nil
			}
			if h.out == nil {
				select {
				case t := <-h.h.out:
					n.took = 0
					h.out = h.p.do(context.Background(), t)
					h.done = n.now.Add(n.took)
				default:
				}
			}
		}
	}
}

func (n *network) bad() (out []string) {
	for l := range n.s.probing.bad {
		out = append(out, l.String())
	}
	slices.Sort(out)
	return out
}

// same: exactly the links that lose are taken for bad.
func (n *network) same() bool {
	if len(n.s.probing.bad) != len(n.loss) {
		return false
	}
	for l := range n.loss {
		if n.s.probing.bad[l] == nil {
			return false
		}
	}
	return true
}

func (n *network) anyLink() pathplan.Link {
	l := pathplan.Link{From: fmt.Sprintf("leaf%d", n.r.IntN(2*n.pods)), To: fmt.Sprintf("spine%d", n.r.IntN(n.spines))}
	if n.r.IntN(2) == 0 {
		l = l.Reverse()
	}
	return l
}

// alike: in a fabric of two pods, both links of a spine from one pod, or to it, that lose a
// share cannot be told from both of the other's: each path crosses one of each.
func (n *network) alike(l pathplan.Link, x float64) bool {
	for o, y := range n.loss {
		both := l.From == o.From && sibling(l.To, o.To) || l.To == o.To && sibling(l.From, o.From)
		if n.pods == 2 && both && (x < 1 || y < 1) {
			return true
		}
	}
	return false
}

func sibling(a, b string) bool {
	var i, k int
	_, err1 := fmt.Sscanf(a, "leaf%d", &i)
	_, err2 := fmt.Sscanf(b, "leaf%d", &k)
	return err1 == nil && err2 == nil && i != k && i/2 == k/2
}

// TestBadLinks: 1, 2, 3 dead or lossy links, from the start or later, in random places of
// random fabrics: planner and probers find all, blame none that is well, and see that they
// are well again.
func TestBadLinks(t *testing.T) {
	rounds := uint64(1)
	if n, err := strconv.ParseUint(os.Getenv("PATHPLAN_TEST_PLACES"), 10, 32); err == nil {
		rounds = n
	}
	for _, kind := range []struct {
		name string
		loss func(r *rand.Rand) float64
	}{
		{"dead", func(*rand.Rand) float64 { return 1 }},
		{"lossy", func(r *rand.Rand) float64 { return 0.01 + 0.2*r.Float64()*r.Float64() }},
		{"either", func(r *rand.Rand) float64 { return []float64{1, 0.02, 0.1, 0.5}[r.IntN(4)] }},
	} {
		for bad := 1; bad <= 3; bad++ {
			if testing.Short() && bad != 2 {
				continue // under the race detector
			}
			t.Run(fmt.Sprintf("%s-%d", kind.name, bad), func(t *testing.T) {
				var took, again []time.Duration
				for seed := range rounds {
					r := rand.New(rand.NewPCG(seed, uint64(bad)))
					n := newNetwork(t, r, 2+r.IntN(3), 4+r.IntN(5), 2+r.IntN(3))
					if r.IntN(2) == 0 {
						n.run(5*time.Second, func() bool { return false })
					}
					for len(n.loss) < bad {
						if l, x := n.anyLink(), kind.loss(r); !n.alike(l, x) {
							n.loss[l] = x
						}
					}
					at := fmt.Sprintf("seed %d, %d pods, %d spines, %d hosts: %v lose", seed, n.pods, n.spines, len(n.hosts), n.loss)
					took = append(took, n.run(2*time.Minute, n.same))
					n.run(5*time.Second, func() bool { return false })
					if !n.same() {
						t.Errorf("%s, and %v are bad; %v may be", at, n.bad(), n.s.probing.unsure)
					} else if testing.Verbose() {
						t.Logf("%s: %v", at, took[len(took)-1])
					}
					for l := range n.ever {
						if n.loss[l] == 0 {
							t.Errorf("%s, and %v was blamed", at, l)
						}
					}
					clear(n.loss)
					again = append(again, n.run(2*time.Minute, n.same))
					if !n.same() {
						t.Errorf("%s nothing any more, and %v are bad", at, n.bad())
					}
				}
				slices.Sort(took)
				slices.Sort(again)
				t.Logf("found in %v (median), %v (worst); well again in %v, %v", took[len(took)/2], took[len(took)-1], again[len(again)/2], again[len(again)-1])
			})
		}
	}
}

// TestBadLinksInARow: links go bad, are well again and others go bad, for as long as a fabric
// lives. What was told while one was bad is no word against another, and never more than the
// bad ones are blamed.
func TestBadLinksInARow(t *testing.T) {
	places, rounds := uint64(2), 8
	if n, err := strconv.ParseUint(os.Getenv("PATHPLAN_TEST_PLACES"), 10, 32); err == nil {
		places = n
	}
	if testing.Short() {
		places = 1
	}
	var took []time.Duration
	for seed := range places {
		r := rand.New(rand.NewPCG(seed, 11))
		n := newNetwork(t, r, 2+r.IntN(2), 4+r.IntN(3), 2+r.IntN(2))
		n.run(10*time.Second, func() bool { return false })
		for round := range rounds {
			clear(n.ever)
			for range 1 + r.IntN(3) {
				if l, x := n.anyLink(), []float64{1, 0.01, 0.1}[r.IntN(3)]; !n.alike(l, x) {
					n.loss[l] = x
				}
			}
			at := fmt.Sprintf("seed %d, round %d, %d pods, %d spines, %d hosts: %v lose", seed, round, n.pods, n.spines, len(n.hosts), n.loss)
			took = append(took, n.run(2*time.Minute, n.same))
			n.run(5*time.Second, func() bool { return false })
			if !n.same() {
				t.Errorf("%s, and %v are bad; %v may be", at, n.bad(), n.s.probing.unsure)
			}
			for l := range n.ever {
				if n.loss[l] == 0 {
					t.Errorf("%s, and %v was blamed", at, l)
				}
			}
			clear(n.loss)
			n.run(3*time.Minute, n.same)
			if !n.same() {
				t.Errorf("%s nothing any more, and %v are bad", at, n.bad())
			}
		}
	}
	slices.Sort(took)
	t.Logf("found in %v (median), %v (worst)", took[len(took)/2], took[len(took)-1])
}

// TestOneLiar: one host's prober that lies, of loss that there is not or as host of a
// responder that counts too little, has no link blamed, and hides none for long that is bad.
func TestOneLiar(t *testing.T) {
	for seed := range uint64(2) {
		r := rand.New(rand.NewPCG(seed, 7))
		n := newNetwork(t, r, 3, 4, 3)
		liar := n.hosts[r.IntN(len(n.hosts))]
		framed := pathplan.Link{From: fmt.Sprintf("leaf%d", 2*liar.pod), To: "spine1"}
		far := pathplan.Link{From: "spine2", To: fmt.Sprintf("leaf%d", 2*((liar.pod+1)%n.pods))}
		near := pathplan.Link{From: "spine3", To: fmt.Sprintf("leaf%d", 2*liar.pod)}
		to := map[string]bool{}
		for _, l := range []pathplan.Link{far, near} {
			to[n.f.addrs[l].String()] = true
		}
		n.lies = func(host string, res *planpb.Result) {
			for _, w := range res.Samples {
				mine := host == liar.name && (w.Spine == n.f.addrs[framed].String() || w.Leaf == n.f.addrs[far].String())
				if mine || n.to == liar.addr && w.Leaf == n.f.addrs[near].String() { // its responder counts too little
					w.Sent, w.Lost, w.Retraced, w.Reached = 1<<20, 1<<20, 8, 0
				}
			}
			if host == liar.name && seed%2 == 1 { // or says that no port goes there
				res.Samples = slices.DeleteFunc(res.Samples, func(w *planpb.PathSample) bool { return w.Spine == n.f.addrs[framed].String() })
			}
		}
		n.run(20*time.Second, func() bool { return false })
		if len(n.ever) > 0 {
			t.Errorf("seed %d: %s lies, and %v are blamed", seed, liar.name, n.ever)
		}
		clear(n.ever)
		l := pathplan.Link{From: fmt.Sprintf("leaf%d", 2*liar.pod+1), To: "spine0"}
		n.loss[l] = 1
		if took := n.run(30*time.Second, n.same); !n.same() {
			t.Errorf("seed %d: %v is dead, and %v are bad after %v", seed, l, n.bad(), took)
		}
	}
}
