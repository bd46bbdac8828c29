package accept

import (
	"cmp"
	"encoding/binary"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// A browser or Prometheus whose SYN finds the kernel's queue full tries again after 1 s, and in a full queue
// it waits for thousands. So when the queue grows, a filter at the listener (a classic BPF program, which needs
// no privilege) drops a share of the SYNs of those addresses from which most come, before they
// take a place. Those of other addresses pass. Where no address, and no network, stands out, nobody is dropped.
// The share follows the queue: no more is dropped than would find it full, for who shares an address with a flood.

const (
	// The filter drops more while more than 1/besieged of the queue's places are taken, and not fewer than before; less
	// when less than 1/relieved are.
	besieged, relieved = 16, 32
	// More than 1/overrun is far too many.
	overrun = 6
	// between two changes of the filter, and before it drops less
	stricter, milder = 10 * time.Millisecond, 100 * time.Millisecond
	// everyone is the share that passes without a filter, and fewest what passes of the largest flood. A sixty-fourth
	// kept who shares its address out for up to 22 s; a quarter lets its second or third SYN in.
	everyone, fewest = 256, 64
	// A window of counts has at least enough connections, and at most counted addresses.
	enough, counted = 256, 8192
	// barred is how many addresses or networks the filter knows.
	barred = 64
)

// siege keeps a listener's queue from filling. It is for one goroutine at a time.
type siege struct {
	was    atomic.Bool // there has been a filter: connections may have inherited it. For all.
	passes int         // of everyone, 0: there is no filter
	wait   int         // connections that waited when it was changed
	since  time.Time
	from   map[netip.Addr]int // connections of late
	n      int
	barred []netip.Prefix
}

// count notes whence a connection has come.
func (s *siege) count(addr netip.Addr) {
	if s.n >= counted { // what was counted last is what counts
		s.from, s.n = nil, 0
	}
	if s.from == nil {
		s.from = map[netip.Addr]int{}
	}
	s.from[addr]++
	s.n++
}

// look has the filter drop more or less, and returns when to look again, zero for not before the queue grows.
func (s *siege) look(ln *net.TCPListener, now time.Time, long int) (next time.Time) {
	_, wait, err := queueOf(ln)
	if err != nil {
		return time.Time{}
	}
	switch age := now.Sub(s.since); {
	case wait > long/besieged && age >= stricter:
		most := s.barred
		if s.n >= enough {
			most = join(s.barred, heavy(s.from, s.n))
		}
		passes := cmp.Or(s.passes, everyone)
		switch {
		case wait < s.wait && s.passes != 0: // it is being worked off
		case wait > long/overrun:
			passes = max(passes/2, fewest)
		default:
			passes = max(passes*7/8, fewest)
		}
		if len(most) > 0 && (passes != s.passes || !slices.Equal(most, s.barred)) {
			s.set(ln, now, passes, most)
		} else {
			s.since = now
		}
		s.wait = wait
	case wait < long/relieved && s.passes > 0 && age >= milder:
		s.set(ln, now, s.passes+s.passes/16+1, s.barred)
	}
	if s.passes == 0 {
		return time.Time{}
	}
	return now.Add(milder)
}

func (s *siege) set(ln *net.TCPListener, now time.Time, passes int, most []netip.Prefix) {
	raw, err := ln.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		if passes >= everyone {
			passes, most = 0, nil
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0)
			return
		}
		code := program(most, passes)
		err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(code)), Filter: &code[0]})
	})
	s.since = now // and if the kernel has no filters, it is asked again no sooner
	if err == nil {
		s.was.Store(true)
		s.passes, s.barred = passes, most
	}
	s.from, s.n = nil, 0
}

// join adds those that stand out now to those that did before the filter dropped them: they would be back at once.
func join(before, now []netip.Prefix) []netip.Prefix {
	all := slices.Concat(before, now)
	slices.SortFunc(all, netip.Prefix.Compare)
	if all = slices.Compact(all); len(all) > barred && len(now) > 0 {
		return now
	}
	return all
}

// heavy are the addresses, or else the networks, that together have made at least half of n connections, each of them far more than one; nil
// where none stand out.
func heavy(from map[netip.Addr]int, n int) []netip.Prefix {
	for level := range 4 { // a host, and ever larger networks
		sums := map[netip.Prefix]int{}
		for a, k := range from {
			bits := 32 - 8*level
			if a.Is6() {
				bits = 64 - 8*level
			}
			if p, err := a.Prefix(bits); err == nil {
				sums[p] += k
			}
		}
		all := slices.SortedFunc(maps.Keys(sums), func(a, b netip.Prefix) int {
			if sums[a] != sums[b] {
				return sums[b] - sums[a]
			}
			return a.Addr().Compare(b.Addr())
		})
		together := 0
		for i, p := range all {
			if i == barred || sums[p] < max(8, n/barred) {
				all = all[:i]
				break
			}
			together += sums[p]
		}
		if 2*together >= n && len(all) > 0 {
			slices.SortFunc(all, netip.Prefix.Compare)
			return all
		}
	}
	return nil
}

// Where a socket filter finds the network header, and a random number.
const (
	network = 0x1_0000_0000 - 0x100000
	random  = 0x1_0000_0000 - 0x1000 + 56
)

// program drops SYNs from any of the networks, all but a share.
func program(from []netip.Prefix, passes int) []unix.SockFilter {
	const keep, drop = 1<<32 - 1, 0
	stmt := func(code uint16, k uint32) unix.SockFilter { return unix.SockFilter{Code: code, K: k} }
	jump := func(code uint16, k uint32, yes, no uint8) unix.SockFilter {
		return unix.SockFilter{Code: code, Jt: yes, Jf: no, K: k}
	}
	const (
		load, loadB = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_LD | unix.BPF_B | unix.BPF_ABS
		and, shift  = unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, unix.BPF_ALU | unix.BPF_RSH | unix.BPF_K
		equal, over = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_JMP | unix.BPF_JA
		least       = unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K
		ret         = unix.BPF_RET | unix.BPF_K
	)
	var four, six []unix.SockFilter
	for _, p := range from {
		a, mask := p.Addr(), ^uint64(0)
		if a.Is4() {
			b := a.As4()
			mask <<= 64 - p.Bits()
			four = append(four, stmt(load, network+12), stmt(and, uint32(mask>>32)), jump(equal, binary.BigEndian.Uint32(b[:]), 0, 1), stmt(ret, drop))
			continue
		}
		b := a.As16()
		mask <<= 64 - p.Bits()
		six = append(six,
			stmt(load, network+8), stmt(and, uint32(mask>>32)), jump(equal, binary.BigEndian.Uint32(b[:4]), 0, 4),
			stmt(load, network+12), stmt(and, uint32(mask)), jump(equal, binary.BigEndian.Uint32(b[4:8]), 0, 1), stmt(ret, drop))
	}
	code := []unix.SockFilter{
		stmt(loadB, 13), stmt(and, 0x12), jump(equal, 0x02, 1, 0), stmt(ret, keep), // no SYN, or one with ACK
		stmt(load, random), stmt(and, everyone-1), jump(least, uint32(passes), 1, 0), stmt(ret, keep),
		stmt(loadB, network), stmt(shift, 4), jump(equal, 4, 1, 0), stmt(over, uint32(len(four)+1)),
	}
	code = append(append(code, four...), stmt(ret, keep))
	return append(append(code, six...), stmt(ret, keep))
}
