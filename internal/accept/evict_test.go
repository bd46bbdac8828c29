package accept

import (
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"
)

func TestEvictsOldestOfLargestAddress(t *testing.T) {
	d, addr := open(t, Options{MaxUnauthenticated: 4, MaxPerAddr: 3, Serve: waits})
	come := func(from string) net.Conn {
		time.Sleep(grace) // all others are past their grace
		n := d.Counts().Accepted
		c := dial(t, addr, from)
		eventually(t, "accepted", func() bool { return d.Counts().Accepted > n })
		return c
	}
	a1, a2, a3 := come("127.0.0.1"), come("127.0.0.1"), come("127.0.0.1")
	come("127.0.0.1") // over its cap
	if !hangsUp(a1) {
		t.Error("the oldest of an address over its cap is still there")
	}
	come("127.0.0.2") // there is no room now
	come("127.0.0.3")
	if !hangsUp(a2) {
		t.Error("the oldest of the address that has most is still there")
	}
	_ = a3
	if c := d.Counts(); c.Refused[Crowded] != 2 || c.AllRefused() != 2 || c.Accepted != 6 {
		t.Errorf("%+v", c)
	}
}

// TestAuthenticatedStay: an authenticated connection is not evicted, and leaves room for an
// unauthenticated one.
func TestAuthenticatedStay(t *testing.T) {
	var authenticated atomic.Int32
	d, addr := open(t, Options{MaxUnauthenticated: 2, MaxPerAddr: 2, Serve: func(c *Conn) {
		var b [1]byte
		if _, err := io.ReadFull(c, b[:]); err == nil {
			c.Authenticated()
			c.Authenticated()
			authenticated.Add(1)
			_, _ = io.Copy(c, c)
		}
	}})
	member := dial(t, addr, "127.0.0.1")
	member.Write([]byte{1})
	eventually(t, "authenticated", func() bool { return authenticated.Load() == 1 })
	for range 10 { // without room they are reset at once
		if c, err := net.Dial("tcp", addr); err == nil {
			defer c.Close()
		}
	}
	eventually(t, "crowded", func() bool { return d.Counts().Refused[Crowded] == 8 })
	member.Write([]byte{2})
	var b [1]byte
	if _, err := io.ReadFull(member, b[:]); err != nil || b[0] != 2 {
		t.Errorf("an authenticated connection was evicted: %v", err)
	}
}

// TestPlausibleStay: unauthenticated connections do not evict a plausible one before it is read. A
// replay gains nothing else.
func TestPlausibleStay(t *testing.T) {
	const room = 8
	read := make(chan struct{})
	d, addr := open(t, Options{
		MaxUnauthenticated: room, PeekSize: 4, Inspect: mine,
		Serve: func(c *Conn) {
			<-read // as late as possible
			var b [4]byte
			if _, err := io.ReadFull(c, b[:]); err != nil {
				return
			}
			switch string(b[:]) {
			case "mine":
				c.Authenticated()
				_, _ = c.Write(b[:])
			case "mime": // a replay
				c.Refuse(Replayed)
			}
			waits(c)
		},
	})
	member, mime := dial(t, addr, "127.0.0.1"), dial(t, addr, "127.0.0.1")
	member.Write([]byte("mine"))
	mime.Write([]byte("mime"))
	flood := func(n uint64) {
		for range n {
			if c, err := net.Dial("tcp", addr); err == nil { // else reset at once
				defer c.Close()
				_, _ = c.Write([]byte("what"))
			}
		}
	}
	flood(50)
	time.Sleep(2 * grace)
	flood(50)
	close(read)
	var b [4]byte
	if _, err := io.ReadFull(member, b[:]); err != nil {
		t.Errorf("a member was evicted: %v", err)
	}
	eventually(t, "replayed", func() bool { return d.Counts().Refused[Replayed] == 1 })
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.plausible.order.Len() != 0 || d.authenticated.order.Len() != 1 {
		t.Errorf("%d are plausible, %d authenticated", d.plausible.order.Len(), d.authenticated.order.Len())
	}
}

// TestAddressesTakeTurns: addresses take turns among the queued connections, which Close closes.
func TestAddressesTakeTurns(t *testing.T) {
	turn, served := make(chan struct{}), make(chan string, 100)
	d, addr := open(t, Options{MaxServed: 1, PeekSize: 4, Inspect: mine, Serve: func(c *Conn) {
		served <- c.RemoteAddr().(*net.TCPAddr).IP.String()
		<-turn
	}})
	due := func(n int) {
		eventually(t, "due", func() bool { d.mu.Lock(); defer d.mu.Unlock(); return d.queued.order.Len() == n })
	}
	const flood = 50
	for range flood {
		dial(t, addr, "127.0.0.9").Write([]byte("mine"))
	}
	due(flood - 1)
	dial(t, addr, "127.0.0.1").Write([]byte("mine"))
	due(flood)
	for i := range 3 {
		from := <-served
		if from == "127.0.0.1" {
			break
		}
		if i == 2 {
			t.Error("another address waits for more than its turn")
		}
		turn <- struct{}{}
	}
	if n := d.Counts().AllRefused(); n != 0 {
		t.Errorf("%d are refused", n)
	}
	close(turn)
}

// TestAnotherAddressGetsIn: a connection of another address is admitted although those of the flooding
// address are within their grace.
func TestAnotherAddressGetsIn(t *testing.T) {
	d, addr := open(t, Options{MaxUnauthenticated: 20, MaxPerAddr: 20, FirstTimeout: patience, PeekSize: 4, Inspect: mine, Serve: waits})
	for range 100 {
		if c, err := net.Dial("tcp", addr); err == nil { // else reset at once
			defer c.Close()
		}
	}
	eventually(t, "all looked at", func() bool { return d.Counts().Accepted == 100 })
	d.mu.Lock() // the flood is as recent as possible
	for e := d.unauthenticated.order.Front(); e != nil; e = e.Next() {
		e.Value.(*Conn).since = time.Now().Add(time.Hour)
	}
	d.mu.Unlock()
	late := dial(t, addr, "127.0.0.2")
	eventually(t, "accepted", func() bool { return d.Counts().Accepted == 101 })
	d.mu.Lock()
	in := d.unauthenticated.count(netip.MustParseAddr("127.0.0.2"))
	d.mu.Unlock()
	if in != 1 {
		t.Error("one of another address is kept out")
	}
	late.Close()
}

// TestClass: the largest address, the next turn and the victim agree with a plain count.
func TestClass(t *testing.T) {
	s := newClass(40, 15)
	var all []*Conn
	r := rand.New(rand.NewPCG(1, 2))
	for range 20_000 {
		addr := netip.AddrFrom4([4]byte{10, 0, 0, byte(r.IntN(8))})
		if r.IntN(2) == 0 && len(all) > 0 {
			i := r.IntN(len(all))
			s.remove(all[i])
			all = slices.Delete(all, i, i+1)
		} else {
			if victim := s.victim(addr); victim != nil {
				s.remove(victim)
				all = slices.Delete(all, slices.Index(all, victim), slices.Index(all, victim)+1)
			}
			c := &Conn{addr: addr}
			s.add(c)
			all = append(all, c)
		}
		count, most := map[netip.Addr]int{}, 0
		for _, c := range all {
			count[c.addr]++
			most = max(most, count[c.addr])
		}
		if s.most != most || s.order.Len() != len(all) || len(s.byAddr) != len(count) || s.rotation.Len() != len(count) || most > 15 || len(all) > 40 {
			t.Fatalf("%d of %d, most %d: %d addresses, most %d", s.order.Len(), len(all), s.most, len(count), most)
		}
		victim := s.victim(addr)
		switch {
		case count[addr] >= 15:
			if victim == nil || victim.addr != addr {
				t.Fatal("an address over its cap")
			}
		case len(all) >= 40:
			if victim == nil || count[victim.addr] != most {
				t.Fatal("not of the address that has most")
			}
		case victim != nil:
			t.Fatal("there is room")
		}
		if next := s.next(); (next == nil) != (len(all) == 0) || next != nil && slices.Index(all, next) != slices.IndexFunc(all, func(c *Conn) bool { return c.addr == next.addr }) {
			t.Fatal("not an address's oldest is next")
		}
	}
}
