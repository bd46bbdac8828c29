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

// A browser or Prometheus whose SYN finds the backlog full retries only after 1 s, and a long backlog that
// is full takes long to drain. So when the backlog fills up, a socket filter on the listener drops a
// share of the SYNs of the addresses that connect most. (It is a classic BPF program, which needs no
// privilege.) SYNs of other addresses pass. If no address and no network stands out, no SYN is
// dropped. The share is only as large as the backlog requires, because other clients may share an
// address with a flood.

const (
	// The filter drops more if more than 1/tightenAt of the backlog is in use and it does not shrink,
	// and less if less than 1/loosenAt is.
	tightenAt, loosenAt = 16, 32
	// If more than 1/halveAt is in use, the share that passes is halved.
	halveAt = 6
	// The filter drops more at most every tightenEvery, and less at most every loosenEvery.
	tightenEvery, loosenEvery = 10 * time.Millisecond, 100 * time.Millisecond
	// Of passAll SYNs, the filter lets at least passLeast pass. With a sixty-fourth, a client that
	// shared its address with a flood could wait for 22 s. With a quarter, its second or third SYN
	// passes.
	passAll, passLeast = 256, 64
	// A sample has at least minSample connections before it is used, and at most maxSample.
	minSample, maxSample = 256, 8192
	// maxPrefixes is how many addresses or networks the filter may have.
	maxPrefixes = 64
)

// synFilter keeps a listener's backlog from filling up. One goroutine at a time may use it, except for
// used.
type synFilter struct {
	used     atomic.Bool        // there has been a filter, which connections may have inherited
	pass     int                // of passAll; 0 if there is no filter
	waiting  int                // connections in the backlog at the last change
	since    time.Time          // of the last change
	sample   map[netip.Addr]int // recent connections
	n        int                // connections in sample
	prefixes []netip.Prefix
}

// count adds a connection to the sample.
func (s *synFilter) count(addr netip.Addr) {
	if s.n >= maxSample { // only recent connections count
		s.sample, s.n = nil, 0
	}
	if s.sample == nil {
		s.sample = map[netip.Addr]int{}
	}
	s.sample[addr]++
	s.n++
}

// adjust makes the filter drop more or less, as the backlog requires, whose length is backlog. It returns
// when to call it again, zero for not before more connections wait.
func (s *synFilter) adjust(ln *net.TCPListener, now time.Time, backlog int) (next time.Time) {
	_, wait, err := backlogOf(ln)
	if err != nil {
		return time.Time{}
	}
	switch age := now.Sub(s.since); {
	case wait > backlog/tightenAt && age >= tightenEvery:
		most := s.prefixes
		if s.n >= minSample {
			most = merge(s.prefixes, heaviest(s.sample, s.n))
		}
		passes := cmp.Or(s.pass, passAll)
		switch {
		case wait < s.waiting && s.pass != 0: // it shrinks
		case wait > backlog/halveAt:
			passes = max(passes/2, passLeast)
		default:
			passes = max(passes*7/8, passLeast)
		}
		if len(most) > 0 && (passes != s.pass || !slices.Equal(most, s.prefixes)) {
			s.attach(ln, now, passes, most)
		} else {
			s.since = now
		}
		s.waiting = wait
	case wait < backlog/loosenAt && s.pass > 0 && age >= loosenEvery:
		s.attach(ln, now, s.pass+s.pass/16+1, s.prefixes)
	}
	if s.pass == 0 {
		return time.Time{}
	}
	return now.Add(loosenEvery)
}

// attach replaces the listener's filter, or removes it if all SYNs are to pass.
func (s *synFilter) attach(ln *net.TCPListener, now time.Time, passes int, most []netip.Prefix) {
	raw, err := ln.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		if passes >= passAll {
			passes, most = 0, nil
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0)
			return
		}
		code := program(most, passes)
		err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(code)), Filter: &code[0]})
	})
	s.since = now // also after an error: the kernel may have no filters
	if err == nil {
		s.used.Store(true)
		s.pass, s.prefixes = passes, most
	}
	s.sample, s.n = nil, 0
}

// merge returns the prefixes of both lists. Those of before still count: their SYNs were dropped, so the
// sample cannot have them. If that is too many, it returns those of now.
func merge(before, now []netip.Prefix) []netip.Prefix {
	all := slices.Concat(before, now)
	slices.SortFunc(all, netip.Prefix.Compare)
	if all = slices.Compact(all); len(all) > maxPrefixes && len(now) > 0 {
		return now
	}
	return all
}

// heaviest returns the addresses, or else the networks, that made at least half of the n connections in
// sample, each of them far more than one. It returns nil if none stand out.
func heaviest(sample map[netip.Addr]int, n int) []netip.Prefix {
	for level := range 4 { // a host, and ever larger networks
		sums := map[netip.Prefix]int{}
		for a, k := range sample {
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
			if i == maxPrefixes || sums[p] < max(8, n/maxPrefixes) {
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

// Offsets at which a socket filter loads the network header, and a random number.
const (
	network = 0x1_0000_0000 - 0x100000
	random  = 0x1_0000_0000 - 0x1000 + 56
)

// program returns a filter that drops SYNs from the prefixes, and lets passes of passAll pass.
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
		stmt(load, random), stmt(and, passAll-1), jump(least, uint32(passes), 1, 0), stmt(ret, keep),
		stmt(loadB, network), stmt(shift, 4), jump(equal, 4, 1, 0), stmt(over, uint32(len(four)+1)),
	}
	code = append(append(code, four...), stmt(ret, keep))
	return append(append(code, six...), stmt(ret, keep))
}
