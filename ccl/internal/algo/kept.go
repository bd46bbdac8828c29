package algo

import (
	"cmp"
	"slices"
)

// write is a step that changes the receive buffer.
type write struct {
	off, end, track, at int
}

// markKept finds the sends of the caller's memory whose bytes no step changes
// after they may have been sent: other than before them in their own track, or by
// a step that they need.
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

// shift is what to add to an offset of the send buffer of an in-place call for the
// same byte's in the receive buffer: one is rank's share of the other where that has
// every rank's.
func (c *Call) shift(rank int) int {
	return -c.Coll.Traits().InPlace(rank) * c.bytes()
}

// changed reports whether a write may come to s's bytes, at off of the receive buffer,
// after it began.
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
