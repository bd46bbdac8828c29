package transport

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/ccl/internal/nic"
	"github.com/lockstep-ccl/lockstep/ccl/internal/rdma"
	"github.com/lockstep-ccl/lockstep/record"
)

func TestPair(t *testing.T) {
	port := func(name, addr string) portInfo {
		p := netip.MustParsePrefix(addr)
		return portInfo{Device: name, Num: 1, Layer: nic.Ethernet, GID: p.Addr().As16(), Subnet: p.Masked()}
	}
	info := func(ports ...portInfo) *rdmaInfo { return &rdmaInfo{Lanes: 1, Window: 1 << 20, Ports: ports} }
	a := info(port("a0", "10.0.0.1/24"), port("a1", "10.0.1.1/24"))
	b := info(port("b1", "10.0.1.2/24"), port("b0", "10.0.0.2/24"))
	for _, c := range []struct {
		name         string
		mine, theirs *rdmaInfo
		want         string // the paths, or a part of the error
	}{
		{"rails", a, b, "a0/1->b0/1 a1/1->b1/1"},
		{"one port each", info(a.Ports[0]), info(b.Ports[1]), "a0/1->b0/1"},
		{"a backup at one end", a, info(b.Ports[1]), "a0/1->b0/1 a1/1->b0/1"},
		{"TCP here", nil, b, "rank 1 is to use TCP"},
		{"TCP there", a, nil, "rank 2 is to use TCP"},
		{"no port there", a, &rdmaInfo{Why: "no driver"}, "rank 2 has no RDMA: no driver"},
		{"InfiniBand there", a, info(portInfo{Device: "ib0", Num: 1, Layer: nic.InfiniBand}), "no port of rank 1 is on a network with one of rank 2"},
		{"lanes", a, &rdmaInfo{Lanes: 99, Window: 1 << 20, Ports: b.Ports}, "99"},
		{"window", a, &rdmaInfo{Lanes: 1, Window: 1<<20 + 1, Ports: b.Ports}, "1048577"},
		{"ports", a, &rdmaInfo{Lanes: 1, Window: 1 << 20, Ports: make([]portInfo, 99)}, "99 ports"},
	} {
		say := func(paths []string, err error) string {
			if err != nil {
				return err.Error()
			}
			return strings.Join(paths, " ")
		}
		names := func(me, peer int, mine, theirs *rdmaInfo) ([]string, []string, error) {
			paths, err := pair(me, peer, mine, theirs)
			var there, back []string
			for i := range paths[:min(2, len(paths))] {
				there = append(there, paths[i].String())
				paths[i].Own, paths[i].Peer = paths[i].Peer, paths[i].Own
				back = append(back, paths[i].String())
			}
			return there, back, err
		}
		there, _, err := names(1, 2, c.mine, c.theirs)
		if got := say(there, err); !strings.Contains(got, c.want) || err == nil && got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
		// The other rank finds the same paths.
		_, back, err2 := names(2, 1, c.theirs, c.mine)
		if say(back, nil) != say(there, nil) || (err == nil) != (err2 == nil) {
			t.Errorf("%s: rank 2 has %s, %v", c.name, say(back, nil), err2)
		}
	}
}

// TestRDMAOrTCP: without ports at one end or both the ranks meet over TCP, and one
// says why, unless no machine knows RDMA.
func TestRDMAOrTCP(t *testing.T) {
	for _, c := range []struct {
		name string
		why  [2]error // nil: it has ports
		says int
	}{
		{"one has none", [2]error{1: errors.New("no NIC here")}, 1},
		{"one knows none", [2]error{0: fmt.Errorf("no NIC here: %w", fs.ErrNotExist)}, 1},
		{"both have none", [2]error{errors.New("no NIC here"), errors.New("no NIC here")}, 1},
		{"nobody knows any", [2]error{fs.ErrNotExist, fs.ErrNotExist}, 0},
	} {
		t.Run(c.name, func(t *testing.T) { testRDMAOrTCP(t, c.why, c.says) })
	}
}

func testRDMAOrTCP(t *testing.T, missing [2]error, says int) {
	said := make(chan error, 8)
	goroutines(t, overRDMA, 2, func(c *Config) {
		c.RDMA.Net = NetAuto
		c.RDMA.Note = func(why error) { said <- why }
		if why := missing[c.Rank]; why != nil {
			c.RDMA.Ports, c.RDMA.Why = nil, why
		}
	}, func(m *Mesh, rank, size int) error {
		if m.overRDMA(1 - rank) {
			t.Error("RDMA with a rank that has none")
		}
		return exchange(m, rank, size, 4, 5, 4096)
	})
	close(said)
	n := 0
	for why := range said {
		if n++; !strings.Contains(why.Error(), "no NIC here") {
			t.Errorf("said: %v", why)
		}
	}
	if n != says {
		t.Errorf("said %d times, want %d", n, says)
	}
}

// TestSettledNamesPeer: a rank that waits for a peer to consume what was sent without a copy is
// recorded as one that waits for that peer's credit, until it has.
func TestSettledNamesPeer(t *testing.T) {
	for name, settled := range map[string]func(*Mesh, int) bool{
		"at the end": func(m *Mesh, _ int) bool { return m.Settled() },
		"in between": func(m *Mesh, size int) bool {
			for r := 1; r < size; r++ {
				if !m.Consumed(r, m.Mark(r)) {
					return false
				}
			}
			return true
		},
	} {
		t.Run(name, func(t *testing.T) { namesPeer(t, settled) })
	}
}

func namesPeer(t *testing.T, settled func(m *Mesh, size int) bool) {
	rec, err := record.Create(record.Options{Dir: t.TempDir(), Identity: record.Identity{Job: "j"}})
	if err != nil {
		t.Fatal(err)
	}
	defer rec.Close()
	read, err := record.Open(rec.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	const size, late = 3, 2
	comm, _ := rec.AddComm(record.CommEntry{ID: 1, Name: "test", Size: size})
	mem, err := unix.Mmap(-1, 0, 256<<10, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	region, err := rdma.Register(mem)
	if err != nil {
		t.Fatal(err)
	}
	defer region.Close()
	blocked := func() (peers []int32) {
		for _, c := range read.Conns(nil) {
			if c.TxBlockedSince > 0 {
				peers = append(peers, c.Peer)
			}
		}
		return slices.Compact(peers) // of each of its lanes
	}
	consume := make(chan struct{})
	sendKept := func(m *Mesh) error {
		release := sync.OnceFunc(func() { close(consume) })
		defer release()
		var links []Link
		for r := 1; r < size; r++ {
			l, err := m.Link(r)
			if err != nil {
				return err
			}
			links = append(links, l)
			for b := mem; len(b) > 0; m.Wait(time.Millisecond) {
				n, err := l.TrySendKept(b)
				if err != nil {
					return err
				}
				b = b[n:]
			}
		}
		for u := wait(m); !slices.Equal(blocked(), []int32{late}); {
			if settled(m, size) {
				return errors.New("settled before all have consumed")
			}
			if err := u.again(); err != nil {
				return fmt.Errorf("waits for the credit of %v: %w", blocked(), err)
			}
		}
		release()
		for u := wait(m); !settled(m, size); {
			if err := u.again(); err != nil {
				return err
			}
		}
		if b := blocked(); len(b) > 0 {
			t.Errorf("when all have consumed it waits for %v", b)
		}
		for _, l := range links {
			if err := writeLine(m, l, nil, 1); err != nil {
				return err
			}
		}
		return nil
	}
	goroutines(t, overRDMA, size, func(c *Config) {
		if c.Rank == 0 {
			c.Recorder, c.Comm = rec, comm
		}
	}, func(m *Mesh, rank, _ int) error {
		if rank == 0 {
			return sendKept(m)
		}
		l, err := m.Link(0)
		if err != nil {
			return err
		}
		if rank == late {
			<-consume
		}
		if err := recvAll(m, l, make([]byte, len(mem))); err != nil {
			return err
		}
		m.Settled()
		var line [LinePayload]byte
		_, _, err = readLine(m, l, line[:])
		return err
	})
}

// TestZeroCopy: within an operation a part of what was sent without a copy is released when the peer has
// acknowledged it, whatever is sent after it; what was copied is the caller's at once.
func TestZeroCopy(t *testing.T) {
	const part = 128 << 10 // far less than receivers tell of by themselves
	mem, err := unix.Mmap(-1, 0, 2*part, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	region, err := rdma.Register(mem)
	if err != nil {
		t.Fatal(err)
	}
	defer region.Close()
	returned := make(chan struct{})
	goroutines(t, overRDMA, 2, nil, func(m *Mesh, rank, _ int) error {
		l, err := m.Link(1 - rank)
		if err != nil {
			return err
		}
		if rank == 1 {
			for i := range 3 {
				if err := recvAll(m, l, make([]byte, []int{1000, part, part}[i])); err != nil {
					return err
				}
				m.Acknowledge(0)
				if i == 1 {
					<-returned
				}
			}
			var line [LinePayload]byte
			_, _, err = readLine(m, l, line[:])
			return err
		}
		once := sync.OnceFunc(func() { close(returned) })
		defer once()
		if err := sendAll(m, l, make([]byte, 1000)); err != nil {
			return err
		}
		if m.Mark(1) != 0 || !m.Consumed(1, 0) {
			return errors.New("copied bytes are not released")
		}
		var marks [2]uint64
		for i := range marks {
			for b := mem[i*part:][:part]; len(b) > 0; m.Wait(time.Millisecond) {
				n, err := l.TrySendKept(b)
				if err != nil {
					return err
				}
				b = b[n:]
			}
			marks[i] = m.Mark(1)
		}
		for i, mark := range marks {
			for u := wait(m); !m.Consumed(1, mark); {
				if err := u.again(); err != nil {
					return fmt.Errorf("part %d is not returned: %w", i, err)
				}
			}
			if i == 0 && (m.Consumed(1, marks[1]) || m.Settled()) {
				return errors.New("all is returned when half is consumed")
			}
			once()
		}
		return writeLine(m, l, nil, 1)
	})
}
