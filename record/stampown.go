package record

import (
	"cmp"
	"slices"
)

// ownTime works out what a process did outside of operations: what lies before each
// of them, and after the former one on its device, of whichever communicator.
// Communicators are read one after the other, so an operation counts only when
// all that ended before it must have been read.
type ownTime struct {
	spans []ownSpan
	ends  map[uint16]*ownEnds // by device
}

type ownSpan struct {
	comm       *stampComm
	start, end uint64 // GPU time
}

type ownEnds struct {
	last  uint64 // of what has been counted
	known uint64 // all that ended until then have been read
	next  uint64 // known, after another look
}

// maxSpans bounds what waits to be counted.
const maxSpans = 1 << 14

func (o *ownTime) add(c *stampComm, s *rawStamp) {
	if o.ends == nil {
		o.ends = map[uint16]*ownEnds{}
	}
	if c.ends == nil {
		if c.ends = o.ends[c.device]; c.ends == nil {
			c.ends = &ownEnds{}
			o.ends[c.device] = c.ends
		}
	}
	c.ends.next = max(c.ends.next, s.end)
	if o.spans = append(o.spans, ownSpan{c, s.start, s.end}); len(o.spans) == maxSpans {
		o.look()
		o.settle()
	}
}

// look begins another look; false when there is nothing to count.
func (o *ownTime) look() bool {
	for _, e := range o.ends {
		e.known = e.next
	}
	return len(o.spans) > 0
}

// settle counts what can be counted.
func (o *ownTime) settle() {
	if len(o.spans) == 0 {
		return
	}
	slices.SortFunc(o.spans, func(a, b ownSpan) int { return cmp.Compare(a.start, b.start) })
	left := o.spans[:0]
	for _, s := range o.spans {
		e := s.comm.ends
		if s.end > e.known {
			left = append(left, s)
			continue
		}
		if e.last != 0 && s.start > e.last {
			sum, own := &s.comm.sums, s.start-e.last
			sum.own += own
			sum.maxOwn = max(sum.maxOwn, own)
		}
		e.last = max(e.last, s.end)
	}
	clear(o.spans[len(left):])
	o.spans = left
}
