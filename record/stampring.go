package record

import (
	"sync/atomic"
)

// stampRing follows one ring of slots.
type stampRing struct {
	slots []diskStamp // its length is a power of two
	next  uint64      // sequence to hand over next
	top   uint64      // newest that has begun
	after uint64      // GPU time that all from next on begin after
}

// rawStamp is a slot's content, of one moment.
type rawStamp struct {
	seq                 uint64
	desc                uint16
	start, arrived, end uint64
}

type slotState int

const (
	slotNone    slotState = iota // not begun, or overwritten
	slotBegun                    // begun, its start is not known
	slotRunning                  // its start is known
	slotEnded
)

func (g *stampRing) slot(seq uint64) *diskStamp { return &g.slots[seq&uint64(len(g.slots)-1)] }

// advance finds the newest operation that has begun.
func (g *stampRing) advance() {
	for range g.slots {
		switch seq := atomic.LoadUint64(&g.slot(g.top+1).id) >> 16; {
		case seq == g.top+1:
			g.top = seq
			continue
		case seq > g.top+1 && (seq^(g.top+1))&uint64(len(g.slots)-1) == 0:
			// A lap behind, or more: any slot may have the newest.
			for i := range g.slots {
				seq := atomic.LoadUint64(&g.slots[i].id) >> 16
				if seq&uint64(len(g.slots)-1) == uint64(i) {
					g.top = max(g.top, seq)
				}
			}
		}
		return
	}
}

// look reads one operation's slot. A start before the given time is one
// that the slot still has from its former operation.
func (g *stampRing) look(seq, after uint64) (rawStamp, slotState) {
	d := g.slot(seq)
	var s rawStamp
	for try := 0; ; try++ {
		id := atomic.LoadUint64(&d.id)
		s = rawStamp{seq: id >> 16, desc: uint16(id), start: atomic.LoadUint64(&d.start), arrived: atomic.LoadUint64(&d.arrived), end: atomic.LoadUint64(&d.end)}
		if s.seq != seq {
			return s, slotNone
		}
		if atomic.LoadUint64(&d.id) == id && atomic.LoadUint64(&d.start) == s.start &&
			atomic.LoadUint64(&d.arrived) == s.arrived && atomic.LoadUint64(&d.end) == s.end {
			break
		}
		if try == 3 { // it changes under every look: the next pass will see
			return s, slotBegun
		}
	}
	switch {
	case s.start == 0 || s.start < after:
		return s, slotBegun
	case s.end < s.start:
		return s, slotRunning
	}
	return s, slotEnded
}

// candidate returns the operation to hand over next, and how many were lost before it.
func (g *stampRing) candidate() (s rawStamp, st slotState, lost uint64) {
	if len(g.slots) == 0 {
		return s, slotNone, 0
	}
	n := uint64(len(g.slots))
	for range 3 {
		if g.top >= n && g.next <= g.top-n { // lapped
			lost += g.top - n + 1 - g.next
			g.next = g.top - n + 1
		}
		if g.next > g.top {
			return s, slotNone, lost
		}
		if s, st = g.look(g.next, g.after); st == slotEnded {
			return s, st, lost
		}
		if st == slotNone { // overwritten since top was found
			g.advance()
			if g.top >= n && g.next <= g.top-n {
				continue
			}
			return s, slotNone, lost // hostile: a sequence went back
		}
		if g.next == g.top {
			return s, st, lost
		}
		// Younger ones have begun. When the next has ended, and this one still
		// has not, nobody will ever tell its end.
		if _, later := g.look(g.next+1, g.after); later != slotEnded {
			return s, st, lost
		}
		if s, st = g.look(g.next, g.after); st == slotEnded {
			return s, st, lost
		}
		lost++
		g.next++
	}
	return s, slotNone, lost
}

// last looks at the ring's newest operation, and moves end to the end of its last.
func (g *stampRing) last(end *uint64) (rawStamp, slotState) {
	if g.top == 0 {
		return rawStamp{}, slotNone
	}
	after := uint64(0)
	if g.next == g.top {
		after = g.after
	}
	if before, st := g.look(g.top-1, 0); st != slotNone && len(g.slots) > 1 && g.top > 1 {
		after = max(after, before.start)
		if st == slotEnded {
			*end = max(*end, before.end)
		}
	}
	s, st := g.look(g.top, after)
	switch st {
	case slotNone: // overwritten since top was found: something has begun
		return rawStamp{seq: g.top}, slotBegun
	case slotEnded:
		*end = max(*end, s.end)
	}
	return s, st
}

func (g *stampRing) pending() uint64 {
	return g.top + 1 - min(g.next, g.top+1)
}
