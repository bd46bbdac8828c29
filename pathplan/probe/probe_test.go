package probe

import (
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/pathplan"
)

// local is this process's own: the ports of 127.0.0.1 may be taken by others as soon as they are free.
var local = netip.AddrFrom4([4]byte{127, 1 + byte(os.Getpid()>>8)&0x7f, byte(os.Getpid()), 1})

func respond(t *testing.T) *Responder {
	t.Helper()
	r, err := Listen(netip.AddrPortFrom(local, 0))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return r
}

func freePorts(t *testing.T, n int) (ports []uint16) {
	t.Helper()
	for range n {
		c, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(local, 0)))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		ports = append(ports, c.LocalAddr().(*net.UDPAddr).AddrPort().Port())
	}
	return ports
}

// TestPing: what is sent is counted, by port; nobody answers where nobody listens.
func TestPing(t *testing.T) {
	r := respond(t)
	pings, err := PingPorts(context.Background(), PingOptions{Src: local, Dst: r.Addr(), Ports: freePorts(t, 3), Count: 5, Timeout: 20 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pings {
		if p.Sent != 5 || p.Lost != 0 || !p.Answered || p.RTT <= 0 {
			t.Errorf("%+v", p)
		}
	}
	free := freePorts(t, 2)
	nobody := netip.AddrPortFrom(local, free[0])
	pings, err = PingPorts(context.Background(), PingOptions{Src: local, Dst: nobody, Ports: free[1:], Count: 5, Timeout: 10 * time.Millisecond})
	if err != nil || pings[0].Answered || pings[0].Sent == 0 || pings[0].Lost != pings[0].Sent {
		t.Errorf("%+v, %v", pings, err)
	}
	for _, o := range []PingOptions{
		{Src: local, Dst: nobody},
		{Src: local, Dst: nobody, Ports: make([]uint16, maxPorts+1)},
		{Src: netip.IPv6Loopback(), Dst: nobody, Ports: []uint16{1}},
	} {
		if _, err := PingPorts(context.Background(), o); err == nil {
			t.Errorf("%+v is taken", o)
		}
	}
}

func packet(id, nonce uint64) []byte {
	b := make([]byte, Size)
	copy(b, magic)
	binary.LittleEndian.PutUint64(b[8:], id)
	binary.LittleEndian.PutUint64(b[16:], nonce)
	return b
}

// TestResponderIsBounded: strangers cost no more than the table, are counted only at an
// address at which they receive, and are sent no more than they have sent.
func TestResponderIsBounded(t *testing.T) {
	r := &Responder{sessions: map[session]*counts{}}
	now := time.Unix(1, 0)
	from := netip.MustParseAddrPort("10.0.0.1:1000")
	b := packet(7, 12345) // a nonce that was guessed
	if !r.take(b, from, now) || len(r.sessions) != 0 {
		t.Error("a packet without the session's nonce is counted")
	}
	nonce := binary.LittleEndian.Uint64(b[16:])
	for port := range 2 * maxPorts {
		if b = packet(7, nonce); !r.take(b, netip.AddrPortFrom(from.Addr(), uint16(1000+port)), now) {
			t.Fatal("refused")
		}
	}
	if n := binary.LittleEndian.Uint32(b[28:]); n != maxPorts || len(b) != Size {
		t.Errorf("%d ports of one session in %d bytes", n, len(b))
	}
	other := packet(7, nonce)
	if r.take(other, netip.MustParseAddrPort("10.0.0.2:1000"), now); len(r.sessions) != 1 {
		t.Error("one address's nonce is another's")
	}
	for i := range uint64(3 * sessions) {
		key := session{from.Addr(), 100 + i}
		r.take(packet(key.id, r.nonce(key)), from, now.Add(time.Duration(i)*time.Millisecond))
	}
	if len(r.sessions) > sessions {
		t.Errorf("%d sessions", len(r.sessions))
	}
	for _, b := range [][]byte{nil, make([]byte, Size), packet(1, 1)[:Size-1], append(packet(1, 1), 0)} {
		if r.take(b, from, now) {
			t.Errorf("%d bytes are taken for a probe", len(b))
		}
	}
}

// TestNames: hops name a path where each has a name and they meet.
func TestNames(t *testing.T) {
	a := func(s string) netip.Addr { return netip.MustParseAddr(s) }
	up, down := pathplan.Link{From: "leaf0", To: "spine1"}, pathplan.Link{From: "spine1", To: "leaf2"}
	n := Names{a("10.0.0.1"): up, a("10.0.0.2"): down, a("10.0.0.3"): {From: "spine9", To: "leaf2"}, a("10.1.0.1"): {To: "leaf0"}, a("10.1.0.2"): {To: "spine1"}, a("10.1.0.3"): {To: "leaf2"}}
	want := pathplan.Path{Up: up, Down: down}
	for _, c := range []struct {
		hops Hops
		ok   bool
	}{
		{Hops{a("10.0.0.1"), a("10.0.0.2")}, true},
		{Hops{a("10.1.0.1"), a("10.1.0.2"), a("10.1.0.3")}, true}, // switches with one address each
		{Hops{a("10.0.0.1"), a("10.0.0.3")}, false},
		{Hops{a("10.0.0.1"), {}}, false},
		{Hops{a("10.1.0.2"), a("10.1.0.3")}, false}, // from which leaf?
		{Hops{a("10.9.9.9"), a("10.0.0.2")}, false},
		{nil, false},
	} {
		if p, ok := n.Path(c.hops); ok != c.ok || ok && p != want {
			t.Errorf("%v: %v, %v", c.hops, p, ok)
		}
	}
	paths, unknown := n.Sort([]uint16{1, 2, 3}, []Hops{{a("10.0.0.1"), a("10.0.0.2")}, {{}, {}}, {a("10.0.0.1"), a("10.0.0.2")}})
	if len(paths) != 1 || len(paths[0].Ports) != 2 || unknown != 1 {
		t.Errorf("%v, %d unknown", paths, unknown)
	}
}

// TestTraceOptions: what cannot be traced is refused; what no switch answers has no hops.
func TestTraceOptions(t *testing.T) {
	for _, o := range []TraceOptions{
		{Src: netip.IPv6Loopback(), Dst: netip.AddrPortFrom(local, 1)},
		{Src: local, Dst: netip.AddrPortFrom(local, 1), FirstHop: 3, LastHop: 2},
		{Src: local, Dst: netip.AddrPortFrom(local, 1), FirstHop: 1, LastHop: MaxTTL + 1},
	} {
		if _, err := Trace(context.Background(), o); err == nil {
			t.Errorf("%+v is taken", o)
		}
	}
	free := freePorts(t, 3)
	hops, err := Trace(context.Background(), TraceOptions{Src: local, Dst: netip.AddrPortFrom(local, free[0]), Ports: free[1:], Timeout: time.Millisecond, Tries: 1})
	if err != nil || len(hops) != 2 || hops[0][0].IsValid() {
		t.Errorf("%v, %v", hops, err)
	}
}

func FuzzTake(f *testing.F) {
	f.Add(packet(1, 2))
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := &Responder{sessions: map[session]*counts{}}
		n := len(b)
		r.take(b, netip.MustParseAddrPort("10.0.0.1:1"), time.Unix(1, 0))
		if len(b) != n {
			t.Error("the answer is longer than the question")
		}
	})
}

func FuzzOffender(f *testing.F) {
	f.Add(make([]byte, 64))
	f.Fuzz(func(_ *testing.T, oob []byte) { parseOffender(oob) })
}

func FuzzAnswer(f *testing.F) {
	f.Add(packet(1, 2))
	f.Fuzz(func(t *testing.T, b []byte) {
		p := &pinger{id: 1, pings: []Ping{{Port: 9, Sent: 3}}, sent: [][]time.Time{make([]time.Time, 3)}, seen: make([]uint32, 1)}
		p.take(0, b)
		if p.seen[0] > 3 {
			t.Error("more has come than was sent")
		}
	})
}
