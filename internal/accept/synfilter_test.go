package accept

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/internal/accept/acceptest"
)

// try reports whether a connection from an address can be made within a time.
func try(from, to string, within time.Duration) bool {
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}, Timeout: within}
	c, err := d.Dial("tcp", to)
	if err == nil {
		c.Close()
	}
	return err == nil
}

// TestProgram: the kernel drops SYNs of the prefixes only, and established connections go on.
func TestProgram(t *testing.T) {
	l, err := Listen(":0") // of both kinds, where there are both
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ln := l.(*net.TCPListener)
	four := fmt.Sprint("127.0.0.1:", ln.Addr().(*net.TCPAddr).Port)
	six := fmt.Sprint("[::1]:", ln.Addr().(*net.TCPAddr).Port)
	hasSix := try("::1", six, 5*time.Second)
	stands := dial(t, four, "127.0.0.9")
	named := []netip.Prefix{netip.MustParsePrefix("127.0.0.9/32"), netip.MustParsePrefix("127.7.0.0/16")}
	with := func(more ...string) {
		all := slices.Clone(named)
		for i := range maxPrefixes / 2 { // long programs have far jumps
			all = append(all, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(i), 1}), 32))
			all = append(all, netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, byte(i)}), 64))
		}
		for _, p := range more {
			all = append(all, netip.MustParsePrefix(p))
		}
		s := &synFilter{}
		if s.attach(ln, time.Now(), 0, all); !s.used.Load() {
			t.Skip("this kernel has no socket filters")
		}
	}
	with("fd00::/48")
	for from, passes := range map[string]bool{"127.0.0.1": true, "127.0.0.8": true, "127.0.0.9": false, "127.7.9.9": false, "127.8.0.1": true} {
		within := 50 * time.Millisecond
		if passes {
			within = patience
		}
		if try(from, four, within) != passes {
			t.Errorf("%s: passes should be %v", from, passes)
		}
	}
	if hasSix && !try("::1", six, patience) {
		t.Error("::1 is dropped")
	}
	if with("::/64"); hasSix && try("::1", six, 50*time.Millisecond) {
		t.Error("::1 passes")
	}
	for {
		c, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		if c.RemoteAddr().String() != stands.LocalAddr().String() {
			c.Close()
			continue
		}
		_, _ = c.Write([]byte{7})
		var b [1]byte
		if _, err := stands.Read(b[:]); err != nil || b[0] != 7 {
			t.Errorf("a connection that stands: %v", err)
		}
		c.Close()
		break
	}
}

// TestSYNFilter: a backlog that fills up gets a filter for the addresses that fill it. The filter goes
// when the backlog is empty.
func TestSYNFilter(t *testing.T) {
	l, err := Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ln := l.(*net.TCPListener)
	const long = 64
	var s synFilter
	now := time.Now()
	look := func() time.Time { now = now.Add(loosenEvery); return s.adjust(ln, now, long) }
	for range 2 * minSample {
		s.count(netip.MustParseAddr("127.0.0.9"))
	}
	s.count(netip.MustParseAddr("127.0.0.1"))
	if next := look(); s.used.Load() || !next.IsZero() {
		t.Fatal("a filter for an empty queue")
	}
	for range long / tightenAt * 2 {
		dial(t, ln.Addr().String(), "127.0.0.9")
	}
	waiting := func() bool { _, wait, err := backlogOf(ln); return err == nil && wait == long/tightenAt*2 }
	eventually(t, "a queue", waiting)
	if look(); !s.used.Load() {
		t.Skip("this kernel has no socket filters")
	}
	first := s.pass
	for range 100 {
		look()
	}
	if s.pass != passLeast || first <= passLeast || len(s.prefixes) != 1 || s.prefixes[0] != netip.MustParsePrefix("127.0.0.9/32") {
		t.Errorf("%d pass, at first %d, of %v", s.pass, first, s.prefixes)
	}
	for range 2 * minSample { // dropped SYNs are not counted, those of another address are
		s.count(netip.MustParseAddr("127.0.0.10"))
	}
	if look(); len(s.prefixes) != 2 {
		t.Errorf("of two floods %v are dropped", s.prefixes)
	}
	if !try("127.0.0.1", ln.Addr().String(), patience) {
		t.Error("another address is dropped")
	}
	for range long/tightenAt*2 + 1 {
		c, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
	for i := 0; ; i++ {
		if look().IsZero() {
			break
		}
		if i > 1000 {
			t.Fatalf("a filter stays: %d pass", s.pass)
		}
	}
	if !try("127.0.0.9", ln.Addr().String(), patience) {
		t.Error("dropped after the flood")
	}
}

// TestHeaviest: what stands out is an address, or else a network, or else nothing.
func TestHeaviest(t *testing.T) {
	for _, tt := range []struct {
		name string
		from func(i int) netip.Addr
		want []string
	}{
		{"one address", func(i int) netip.Addr {
			if i%100 == 0 {
				return netip.AddrFrom4([4]byte{10, 0, 0, byte(i / 100)})
			}
			return netip.AddrFrom4([4]byte{10, 1, 1, 1})
		}, []string{"10.1.1.1/32"}},
		{"two, of both kinds", func(i int) netip.Addr {
			if i%2 == 0 {
				return netip.MustParseAddr("fd00:1:2:3::")
			}
			return netip.AddrFrom4([4]byte{10, 1, 1, 1})
		}, []string{"10.1.1.1/32", "fd00:1:2:3::/64"}},
		{"a network", func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 1, byte(i), byte(i >> 8)}) }, []string{"10.1.0.0/16"}},
		{"everybody", func(i int) netip.Addr { return netip.AddrFrom4([4]byte{byte(i), byte(i >> 8), byte(i * 7), 1}) }, nil},
	} {
		from := map[netip.Addr]int{}
		for i := range 2000 {
			from[tt.from(i)]++
		}
		var got []string
		for _, p := range heaviest(from, 2000) {
			got = append(got, p.String())
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}

// TestFloodOfOthers: a flood of whole messages from one address, more than are served, does not keep
// another address from being served. A filter that a connection inherits does it no harm.
func TestFloodOfOthers(t *testing.T) {
	l, err := Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln := l.(*net.TCPListener)
	if err := setBacklog(ln, 32); err != nil { // so that a small flood fills it
		t.Fatal(err)
	}
	d, err := New(ln, Options{MaxServed: 4, MaxUnauthenticated: 64, FirstTimeout: patience, PeekSize: 4, Inspect: mine, FilterSYNs: true, Uncounted: true, Serve: func(c *Conn) {
		b := make([]byte, 4)
		if _, err := io.ReadFull(c, b); err == nil {
			_, _ = c.Write(b)
		}
		time.Sleep(time.Millisecond)
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	before := Total()
	defer acceptest.BeginBy(32, l.Addr().String(), 400, acceptest.Silent, acceptest.Says([]byte("mine"))).Stop()
	for range 20 {
		c := dial(t, l.Addr().String(), "127.0.0.77")
		_, _ = c.Write([]byte("mi"))
		_, _ = c.Write([]byte("ne"))
		if _, err := io.ReadFull(c, make([]byte, 4)); err != nil {
			t.Errorf("another address's is not served: %v", err)
		}
		c.Close()
	}
	if Total() != before {
		t.Error("maxSample in the total")
	}
}
