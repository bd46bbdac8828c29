package algo

import (
	"cmp"
	"slices"
)

// write is a step that changes the receive buffer.
type write struct {
	off, end, track, at int
}

// markKept sets Kept on the sends of the caller's memory whose bytes no step writes
// after the send has begun. Steps before it in its track, and those that it needs, are
// over by then.
func (b *builder) markKept() {
	var writes []write
	longest := 0
	for t, track := range b.tracks {
		for i := range track {
			if s := &track[i]; s.Act != Send && s.Dst.Space == RecvBuf {
				writes = append(writes, write{s.Dst.Off, s.Dst.Off + s.Len, t, i})
				longest = max(longest, s.Len)
			}
		}
	}
	slices.SortFunc(writes, func(a, b write) int { return cmp.Compare(a.off, b.off) })
	for t, track := range b.tracks {
		for i := range track {
			s := &track[i]
			switch {
			case s.Act != Send || s.LL:
			case s.Src.Space == SendBuf && !b.call.InPlace:
				s.Kept = true
			case s.Src.Space == RecvBuf:
				s.Kept = !changed(writes, longest, s, s.Src.Off, t, i)
			case s.Src.Space == SendBuf:
				s.Kept = !changed(writes, longest, s, s.Src.Off+b.call.shift(b.place.Rank), t, i)
			}
		}
	}
}

// shift is a byte's offset in the receive buffer less that in the send buffer, for an
// in-place call: one buffer may be rank's share of the other.
func (c *Call) shift(rank int) int {
	return -c.Coll.Traits().InPlace(rank) * c.bytes()
}

// changed reports whether a write may hit s's bytes, at off of the receive buffer,
// after s began.
func changed(writes []write, longest int, s *Step, off, track, at int) bool {
	first, _ := slices.BinarySearchFunc(writes, off-longest, func(w write, off int) int { return cmp.Compare(w.off, off) })
	for _, w := range writes[first:] {
		if w.off >= off+s.Len {
			break
		}
		before := w.track == track && w.at < at || w.track != track && w.at < int(s.Need)
		if w.end > off && !before {
			return true
		}
	}
	return false
}
