package algo

import (
	"cmp"
	"slices"
)

// write is a step that writes bytes off to end of the receive buffer.
type write struct {
	off, end, track, at int
}

// markKept sets Kept on those of rank's sends from the caller's buffers whose bytes no step writes
// after the send has begun. Steps that precede the send in its track, or that it needs, do not
// count: they are complete by then.
func markKept(tracks []Track, call *Call, rank int) {
	var writes []write
	longest := 0
	for t, track := range tracks {
		for i := range track {
			if s := &track[i]; s.Act != Send && s.Dst.Space == RecvBuf {
				writes = append(writes, write{s.Dst.Off, s.Dst.Off + s.Len, t, i})
				longest = max(longest, s.Len)
			}
		}
	}
	slices.SortFunc(writes, func(a, b write) int { return cmp.Compare(a.off, b.off) })
	for t, track := range tracks {
		for i := range track {
			s := &track[i]
			switch {
			case s.Act != Send || s.LL:
			case s.Src.Space == SendBuf && !call.InPlace:
				s.Kept = true
			case s.Src.Space == RecvBuf:
				s.Kept = !changed(writes, longest, s, s.Src.Off, t, i)
			case s.Src.Space == SendBuf:
				s.Kept = !changed(writes, longest, s, s.Src.Off+call.shift(rank), t, i)
			}
		}
	}
}

// shift returns what an in-place call must add to an offset in the send buffer to get the same
// byte's offset in the receive buffer. One of these buffers may be rank's share of the other.
func (c *Call) shift(rank int) int {
	return -c.Coll.Traits().InPlace(rank) * c.bytes()
}

// changed reports whether a write may change the bytes that s sends after s has begun. They lie at
// off in the receive buffer. writes are sorted by off, and none is longer than longest bytes.
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
