package service

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	"github.com/lockstep-ccl/lockstep/internal/accept"
	"github.com/lockstep-ccl/lockstep/pathplan/probe"
	"github.com/lockstep-ccl/lockstep/pathplan/service/planpb"
)

// ProberOptions are a host's prober's. Planner, Node and Credentials are required.
type ProberOptions struct {
	Planner     string
	Credentials credentials.TransportCredentials
	Node        string
	Listen      netip.AddrPort // of its responder; any address, probe.Port
	// FirstPort is the first source port that probes leave from, 33000.
	FirstPort int
	// MaxRate bounds what a planner can ask for, in probes a second; 5000.
	MaxRate int
	Log     *slog.Logger
}

// Prober probes for a planner from one host, and answers other hosts' probes. It needs no
// privilege.
type Prober struct {
	o    ProberOptions
	r    *probe.Responder
	maps map[hostPair]*known

	// The network, and the clock.
	trace func(context.Context, probe.TraceOptions) ([]probe.Hops, error)
	ping  func(context.Context, probe.PingOptions) ([]probe.Ping, error)
	now   func() time.Time
}

// hostPair is a source and the responder that it probes.
type hostPair struct {
	src netip.Addr
	dst netip.AddrPort
}

// known is what a prober has learnt of the paths between two hosts.
type known struct {
	where  map[uint16]hops
	parts  map[hops]int // ports of which only one of the two switches answered
	traced int
	learnt time.Time
}

const (
	// relearn is how old a map gets.
	relearn = 1500 * time.Millisecond
	// relearnClose is the same where some paths are looked at closely: the time is for probes.
	relearnClose = 4 * time.Second
	// probedPorts is how many of a path's source ports are probed.
	probedPorts = 2
	// focusedPorts is the same, of few paths that are looked at closely.
	focusedPorts = 8
	// allLost is how many probes must be lost, and all, for a path to be traced again.
	allLost = 4
	maxMaps = 256
	// blindPorts is how many source ports are probed where no switch answers.
	blindPorts = 16
)

// NewProber opens a prober's responder.
func NewProber(o ProberOptions) (*Prober, error) {
	if o.Planner == "" || o.Node == "" || o.Credentials == nil {
		return nil, errors.New("prober: planner, credentials and node are all needed")
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.FirstPort == 0 {
		o.FirstPort = 33000
	}
	if o.MaxRate == 0 {
		o.MaxRate = 5000
	}
	if !o.Listen.IsValid() {
		o.Listen = netip.AddrPortFrom(netip.IPv4Unspecified(), probe.Port)
	}
	if o.FirstPort < 1024 || o.FirstPort > 60000 {
		return nil, fmt.Errorf("prober: first source port %d: want 1024 to 60000", o.FirstPort)
	}
	r, err := probe.Listen(o.Listen)
	if err != nil {
		return nil, err
	}
	return &Prober{o: o, r: r, maps: map[hostPair]*known{}, trace: probe.Trace, ping: probe.PingPorts, now: time.Now}, nil
}

// Run probes, and answers, until ctx ends.
func (p *Prober) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	responding := make(chan error, 1)
	go func() { responding <- p.r.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-responding; err != nil {
			p.o.Log.Warn("the responder has ended", "err", err)
		}
	}()
	conn, err := grpc.NewClient(p.o.Planner, grpc.WithTransportCredentials(p.o.Credentials), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 5 * time.Second, Timeout: 5 * time.Second}), grpc.WithNoProxy(), grpc.WithContextDialer(accept.DialContext))
	if err != nil {
		return fmt.Errorf("prober: %w", err)
	}
	defer conn.Close()
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
		err := p.serve(ctx, conn)
		if ctx.Err() != nil {
			return nil
		}
		p.o.Log.Debug("no planner to probe for", "planner", p.o.Planner, "err", err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
	}
}

func (p *Prober) serve(ctx context.Context, conn *grpc.ClientConn) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := planpb.NewPlannerClient(conn).Probe(ctx)
	if err != nil {
		return err
	}
	if err := s.Send(&planpb.ProbeUp{Hello: &planpb.Hello{Version: version, Node: p.o.Node}}); err != nil {
		return err
	}
	for {
		t, err := s.Recv()
		if err != nil {
			return err
		}
		r := p.do(ctx, t)
		if err := s.Send(&planpb.ProbeUp{Result: r}); err != nil {
			return err
		}
	}
}

// do carries a task out, within this prober's bounds.
func (p *Prober) do(ctx context.Context, t *planpb.Task) *planpb.Result {
	r := &planpb.Result{Id: t.GetId()}
	src, err1 := netip.ParseAddr(t.GetSrc())
	dst, err2 := netip.ParseAddrPort(t.GetDst())
	if err := errors.Join(err1, err2); err != nil {
		r.Error = err.Error()
		return r
	}
	rate, ports := int(min(t.GetRate(), uint32(p.o.MaxRate))), int(min(t.GetPorts(), 1024))
	age := relearn
	if len(t.GetSpines()) > 0 {
		age = relearnClose
	}
	hosts := hostPair{src, dst}
	k, err := p.learn(ctx, hosts, max(rate, 1), ports, age)
	if err != nil {
		r.Error = err.Error()
		return r
	}
	r.Traced, r.Unknown = uint32(k.traced), uint32(k.traced-len(k.where))
	for h, n := range k.parts {
		r.Samples = append(r.Samples, &planpb.PathSample{Spine: text(h.spine), Leaf: text(h.leaf), Ports: uint32(n)})
	}
	each, focused := probedPorts, map[string]bool{}
	for _, a := range t.GetSpines() {
		each, focused[a] = focusedPorts, true
	}
	byPath := map[hops]*planpb.PathSample{}
	var send []uint16
	of := map[uint16]hops{}
	for _, port := range sorted(k.where) {
		h := k.where[port]
		s := byPath[h]
		if s == nil {
			s = &planpb.PathSample{Spine: h.spine.String(), Leaf: h.leaf.String()}
			byPath[h] = s
			r.Samples = append(r.Samples, s)
		}
		if s.Ports++; s.Ports <= uint32(each) && len(send) < 64 && (len(focused) == 0 || focused[s.Spine]) {
			send = append(send, port)
			of[port] = h
		}
	}
	if len(k.where) == 0 { // no switch answers: what is lost from end to end is known all the same
		s := &planpb.PathSample{Ports: uint32(min(ports, blindPorts))}
		byPath[hops{}], r.Samples = s, append(r.Samples, s)
		for i := range min(ports, blindPorts) {
			send = append(send, uint16(p.o.FirstPort+i))
		}
	}
	if len(send) == 0 {
		return r
	}
	pings, err := p.ping(ctx, probe.PingOptions{Src: src, Dst: dst, Ports: send, Count: int(min(t.GetCount(), 1000)), Rate: max(rate, 1)})
	if err != nil {
		r.Error = err.Error()
		return r
	}
	for _, g := range pings {
		s := byPath[of[g.Port]]
		s.Sent += uint32(g.Sent)
		s.Lost += uint32(g.Lost)
		if ns := uint64(g.RTT); ns > 0 && (s.RttNs == 0 || ns < s.RttNs) {
			s.RttNs = ns
		}
	}
	if err := p.again(ctx, hosts, max(rate, 1), byPath, of); err != nil {
		r.Error = err.Error()
	}
	return r
}

func text(a netip.Addr) string {
	if !a.IsValid() {
		return ""
	}
	return a.String()
}

// again asks the spines of paths on which all is lost whether they are still reached.
func (p *Prober) again(ctx context.Context, hosts hostPair, rate int, byPath map[hops]*planpb.PathSample, of map[uint16]hops) error {
	var list []uint16
	for _, port := range sorted(of) {
		if s := byPath[of[port]]; s.Spine != "" && s.Sent >= allLost && s.Lost == s.Sent {
			list = append(list, port)
		}
	}
	if len(list) == 0 {
		return nil
	}
	at, err := p.trace(ctx, probe.TraceOptions{Proto: probe.UDP, Src: hosts.src, Dst: hosts.dst, Ports: list, FirstHop: 2, LastHop: 2, Rate: rate, Timeout: 100 * time.Millisecond})
	if err != nil {
		return err
	}
	for i, h := range at {
		s := byPath[of[list[i]]]
		if s.Retraced++; h[0].IsValid() && h[0] == of[list[i]].spine {
			s.Reached++
		}
	}
	return nil
}

func sorted(m map[uint16]hops) []uint16 {
	ports := make([]uint16, 0, len(m))
	for port := range m {
		ports = append(ports, port)
	}
	slices.Sort(ports)
	return ports
}

// learn traces the paths between two hosts anew when what is known of them is old. A port
// whose switches do not answer any more is taken to go where it went.
func (p *Prober) learn(ctx context.Context, hosts hostPair, rate, ports int, age time.Duration) (*known, error) {
	k := p.maps[hosts]
	if k != nil && p.now().Sub(k.learnt) < age {
		return k, nil
	}
	list := make([]uint16, ports)
	for i := range list {
		list[i] = uint16(p.o.FirstPort + i)
	}
	at, err := p.trace(ctx, probe.TraceOptions{Proto: probe.UDP, Src: hosts.src, Dst: hosts.dst, Ports: list, Rate: rate, Timeout: 100 * time.Millisecond})
	if err != nil {
		return nil, err
	}
	now := &known{where: map[uint16]hops{}, parts: map[hops]int{}, traced: ports, learnt: p.now()}
	for i, h := range at {
		if h[0].IsValid() && h[1].IsValid() {
			now.where[list[i]] = hops{h[0], h[1]}
		} else if k != nil {
			if old, ok := k.where[list[i]]; ok && (!h[0].IsValid() || h[0] == old.spine) {
				now.where[list[i]] = old
				continue
			}
		}
		if h[0].IsValid() != h[1].IsValid() {
			now.parts[hops{h[0], h[1]}]++
		}
	}
	if len(p.maps) >= maxMaps {
		clear(p.maps)
	}
	p.maps[hosts] = now
	return now, nil
}
