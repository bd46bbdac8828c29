package accept

import (
	"container/list"
	"net/netip"
)

// class is a set of connections in the order in which they came. No operation grows with it.
type class struct {
	max, perAddr int
	order        list.List // of *Conn
	byAddr       map[netip.Addr]*group
	turns        list.List    // of *group, who is next first
	bySize       []*list.List // of *group
	most         int          // of one address
}

// group is a class's connections of one address, oldest first.
type group struct {
	list.List
	turn, size *list.Element
}

func newClass(most, perAddr int) class {
	return class{max: most, perAddr: perAddr, byAddr: make(map[netip.Addr]*group), bySize: []*list.List{{}}}
}

func (s *class) add(c *Conn) {
	of := s.byAddr[c.addr]
	if of == nil {
		of = &group{}
		s.byAddr[c.addr] = of
		of.turn = s.turns.PushBack(of)
	} else {
		s.bySize[of.Len()].Remove(of.size)
	}
	c.in, c.at, c.by = s, s.order.PushBack(c), of.PushBack(c)
	s.sized(of)
}

func (s *class) remove(c *Conn) {
	s.order.Remove(c.at)
	of := s.byAddr[c.addr]
	s.bySize[of.Len()].Remove(of.size)
	if of.Remove(c.by); of.Len() == 0 {
		delete(s.byAddr, c.addr)
		s.turns.Remove(of.turn)
	} else {
		s.sized(of)
	}
	for s.most > 0 && s.bySize[s.most].Len() == 0 {
		s.most--
	}
	c.in, c.at, c.by = nil, nil, nil
}

// sized notes how many connections an address has now.
func (s *class) sized(of *group) {
	n := of.Len()
	for len(s.bySize) <= n {
		s.bySize = append(s.bySize, &list.List{})
	}
	of.size = s.bySize[n].PushBack(of)
	s.most = max(s.most, n)
}

// of is how many an address has.
func (s *class) of(addr netip.Addr) int {
	if g := s.byAddr[addr]; g != nil {
		return g.Len()
	}
	return 0
}

// excess is who must go before one more of addr may come, nil when there is room: the
// oldest of that address when it has too many, else of the one that has most.
func (s *class) excess(addr netip.Addr) *Conn {
	of := s.byAddr[addr]
	switch {
	case of != nil && of.Len() >= s.perAddr:
	case s.order.Len() >= s.max:
		if of == nil || of.Len() < s.most {
			of = s.bySize[s.most].Front().Value.(*group)
		}
	default:
		return nil
	}
	return of.Front().Value.(*Conn)
}

// next is whose turn it is, nil for nobody's: addresses take turns, and the oldest of each goes first.
func (s *class) next() *Conn {
	e := s.turns.Front()
	if e == nil {
		return nil
	}
	s.turns.MoveToBack(e)
	return e.Value.(*group).Front().Value.(*Conn)
}
