package service

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/internal/accept"
	"github.com/lockstep-ccl/lockstep/pathplan/probe"
	"github.com/lockstep-ccl/lockstep/pathplan/service/planpb"
)

// ClientOptions say whose connections are planned. Planner, Node and Job are required.
type ClientOptions struct {
	Planner     string // HOST:PORT
	Credentials credentials.TransportCredentials
	Node, Job   string
	Ports       int           // source ports that are traced for a connection, 256
	FirstPort   int           // of those that are used, 20000: below what kernels choose from
	LastPort    int           // 31999; those of RoCE v2 are 49152 to 65535, as devices make them
	Rate        int           // traces a second, 4000
	Verify      time.Duration // 500 ms: how often lanes' paths are looked at while a rank waits
	Log         *slog.Logger
}

// Client is a ccl.PathPlan that asks a planner. Safe for concurrent use.
type Client struct {
	o    ClientOptions
	conn *grpc.ClientConn
	hops func(context.Context, probe.TraceOptions) ([]probe.Hops, error) // probe.Trace
	ctx  context.Context
	stop context.CancelFunc
	wg   sync.WaitGroup
	wake chan struct{}
	over chan struct{} // closed when the client is
	once sync.Once
	left chan struct{} // closed when the planner knows, or cannot be told

	mu      sync.Mutex
	paths   map[string]*path
	release []string
	signals map[signal]*planpb.Signal
	loads   map[signal]*planpb.Load
	anew    bool // a stream has begun: everything is to be said
	next    int  // port to trace next
	roce    int  // and of RoCE v2; not where other processes of the host begin, which bind them, too
	used    map[uint16]string
}

type signal struct {
	conn string
	lane uint32
}

// maxConns bounds the connections of a client.
const maxConns = 4096

// NewClient returns a client. It connects in its own time.
func NewClient(o ClientOptions) (*Client, error) {
	if o.Planner == "" || o.Node == "" || o.Job == "" || o.Credentials == nil {
		return nil, errors.New("planner's client: address, credentials, node and job are all needed")
	}
	for _, d := range []struct {
		v  *int
		or int
	}{{&o.Ports, 256}, {&o.FirstPort, 20000}, {&o.LastPort, 31999}, {&o.Rate, 4000}} {
		if *d.v == 0 {
			*d.v = d.or
		}
	}
	if o.FirstPort < 1024 || o.LastPort > 65535 || o.LastPort-o.FirstPort < o.Ports {
		return nil, fmt.Errorf("planner's client: source ports %d to %d: want %d or more from 1024 on", o.FirstPort, o.LastPort, o.Ports+1)
	}
	if o.Verify == 0 {
		o.Verify = 500 * time.Millisecond
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	conn, err := grpc.NewClient(o.Planner, grpc.WithTransportCredentials(o.Credentials), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 5 * time.Second, Timeout: 5 * time.Second}), grpc.WithNoProxy(), grpc.WithContextDialer(accept.DialContext))
	if err != nil {
		return nil, fmt.Errorf("planner's client: %w", err)
	}
	c := &Client{o: o, conn: conn, hops: probe.Trace, wake: make(chan struct{}, 1), over: make(chan struct{}), left: make(chan struct{}), paths: map[string]*path{}, signals: map[signal]*planpb.Signal{}, loads: map[signal]*planpb.Load{}, used: map[uint16]string{}, next: o.FirstPort, roce: firstRoCE + rand.IntN(lastRoCE-firstRoCE+1)}
	c.ctx, c.stop = context.WithCancel(context.Background())
	c.wg.Go(c.follow)
	return c, nil
}

// leaveFor bounds how long a client that is closed takes to tell the planner.
const leaveFor = 500 * time.Millisecond

// Close ends the client, and tells the planner that its connections need their paths no more; those
// that are still there go on as they are.
func (c *Client) Close() error {
	c.once.Do(func() { close(c.over) })
	t := time.NewTimer(leaveFor)
	defer t.Stop()
	select {
	case <-c.left:
	case <-t.C:
	}
	c.stop()
	err := c.conn.Close()
	c.wg.Wait()
	return err
}

func (c *Client) ring() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// Open implements ccl.PathPlan.
func (c *Client) Open(pc ccl.PathConn, move func()) ccl.Path {
	p := &path{c: c, id: connName(pc.Comm, pc.Rank, pc.Peer), conn: pc, move: move, changed: make(chan struct{}), spent: map[uint16]time.Time{}}
	if !pc.Local.Is4() || !pc.Remote.Addr().Is4() || pc.Local.IsLoopback() {
		p.closed = true // nothing to plan
		return p
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.paths) >= maxConns || c.isOver() {
		p.closed = true
		return p
	}
	for c.paths[p.id] != nil { // of a communicator that has come again
		p.id += "'"
	}
	c.paths[p.id] = p
	return p
}

// follow speaks with the planner, again and again.
func (c *Client) follow() {
	defer close(c.left)
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
		began := time.Now()
		err := c.stream()
		if c.isOver() {
			return
		}
		c.o.Log.Debug("no planner: connections keep the paths that they have", "planner", c.o.Planner, "err", err)
		if time.Since(began) > 10*time.Second {
			wait = 50 * time.Millisecond
		}
		select {
		case <-c.over:
			return
		case <-time.After(wait):
		}
	}
}

func (c *Client) isOver() bool {
	select {
	case <-c.over:
		return true
	default:
		return false
	}
}

func (c *Client) stream() error {
	ctx, cancel := context.WithCancel(c.ctx)
	defer cancel()
	s, err := planpb.NewPlannerClient(c.conn).Plan(ctx)
	if err != nil {
		return err
	}
	if err := s.Send(&planpb.Need{Hello: &planpb.Hello{Version: version, Node: c.o.Node, Job: c.o.Job}}); err != nil {
		return err
	}
	c.mu.Lock()
	c.anew = true
	c.mu.Unlock()
	c.ring()
	var sending sync.WaitGroup
	sending.Go(func() {
		for {
			for need := c.need(); need != nil; need = c.need() {
				if s.Send(need) != nil {
					cancel()
					return
				}
			}
			select {
			case <-ctx.Done():
				return
			case <-c.over:
				if s.CloseSend() != nil { // else the planner ends the stream
					cancel()
				}
				return
			case <-c.wake:
			}
		}
	})
	defer sending.Wait()
	defer cancel()
	for {
		m, err := s.Recv()
		if err != nil {
			return err
		}
		for _, a := range m.GetAssigned() {
			c.assigned(a)
		}
	}
}

// perMessage bounds what one message holds.
const perMessage = 256

// need is what the planner has yet to hear, nil for nothing.
func (c *Client) need() *planpb.Need {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := &planpb.Need{}
	if c.anew {
		c.anew = false
		for _, p := range c.paths {
			p.asked = false
		}
	}
	for _, p := range c.paths {
		if len(m.Requests) == perMessage {
			break
		}
		if !p.asked && p.lanes > 0 {
			p.asked = true
			m.Requests = append(m.Requests, &planpb.Request{Conn: p.id, Src: p.conn.Local.String(), Dst: p.conn.Remote.Addr().String(), Lanes: uint32(p.lanes)})
		}
	}
	n := min(len(c.release), perMessage)
	m.Release, c.release = c.release[:n:n], c.release[n:]
	for k, s := range c.signals {
		if len(m.Signals) == perMessage {
			break
		}
		m.Signals = append(m.Signals, s)
		delete(c.signals, k)
	}
	for k, l := range c.loads {
		if len(m.Loads) == perMessage {
			break
		}
		m.Loads = append(m.Loads, l)
		delete(c.loads, k)
	}
	if len(m.Requests)+len(m.Release)+len(m.Signals)+len(m.Loads) == 0 {
		return nil
	}
	return m
}

func (c *Client) assigned(a *planpb.Assigned) {
	c.mu.Lock()
	p := c.paths[a.GetConn()]
	c.mu.Unlock()
	if p == nil {
		return
	}
	if a.GetError() != "" {
		c.o.Log.Debug("the planner has no path", "conn", a.GetConn(), "err", a.GetError())
		return
	}
	p.plan(a.GetLanes())
}

// say notes what a lane's sender has measured.
func (c *Client) say(s *planpb.Signal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := signal{s.Conn, s.Lane}
	if _, ok := c.signals[k]; ok || len(c.signals) < maxConns {
		c.signals[k] = s
		c.ring()
	}
}

// carry notes what a lane carries.
func (c *Client) carry(l *planpb.Load) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := signal{l.Conn, l.Lane}
	if _, ok := c.loads[k]; ok || len(c.loads) < maxConns {
		c.loads[k] = l
		c.ring()
	}
}

// firstRoCE and lastRoCE are the source ports that RoCE v2's devices make of flow labels.
const firstRoCE, lastRoCE = 0xc000, 0xffff

// ports are source ports to trace, which no connection of this process has. Queue pairs take none
// from each other.
func (c *Client) ports(n int, roce bool) (ports []uint16) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if roce {
		for range n {
			ports = append(ports, uint16(c.roce))
			if c.roce++; c.roce > lastRoCE {
				c.roce = firstRoCE
			}
		}
		return ports
	}
	for range c.o.LastPort - c.o.FirstPort + 1 {
		if len(ports) == n {
			break
		}
		port := uint16(c.next)
		if c.next++; c.next > c.o.LastPort {
			c.next = c.o.FirstPort
		}
		if _, taken := c.used[port]; !taken {
			ports = append(ports, port)
		}
	}
	return ports
}

// trace finds out where source ports lead.
func (c *Client) trace(pc ccl.PathConn, ports []uint16) (map[uint16]hops, error) {
	o := probe.TraceOptions{Src: pc.Local, Dst: pc.Remote, Ports: ports, Rate: c.o.Rate}
	if pc.RoCE { // a packet of no queue pair, whose TTL runs out on the way
		o.Proto = probe.UDP
	}
	at, err := c.hops(c.ctx, o)
	if err != nil {
		return nil, err
	}
	m := make(map[uint16]hops, len(ports))
	for i, h := range at {
		if h[0].IsValid() && h[1].IsValid() {
			m[ports[i]] = hops{h[0], h[1]}
		}
	}
	return m, nil
}

// hops are the addresses by which a path's spine and leaf answer.
type hops struct{ spine, leaf netip.Addr }
