package accept

import (
	"container/list"
	"net/netip"
)

// class is a set of connections in the order in which they were added. All operations take constant
// time.
type class struct {
	max, perAddr int
	order        list.List // of *Conn
	byAddr       map[netip.Addr]*group
	rotation     list.List    // of *group, the next one first
	bySize       []*list.List // of *group, by its length
	most         int          // length of the longest group
}

// group holds a class's connections of one address, oldest first.
type group struct {
	list.List
	turn, size *list.Element
}

func newClass(most, perAddr int) class {
	return class{max: most, perAddr: perAddr, byAddr: make(map[netip.Addr]*group), bySize: []*list.List{{}}}
}

// add adds a connection that is in no class.
func (s *class) add(c *Conn) {
	of := s.byAddr[c.addr]
	if of == nil {
		of = &group{}
		s.byAddr[c.addr] = of
		of.turn = s.rotation.PushBack(of)
	} else {
		s.bySize[of.Len()].Remove(of.size)
	}
	c.in, c.at, c.by = s, s.order.PushBack(c), of.PushBack(c)
	s.resized(of)
}

// remove removes a connection of this class.
func (s *class) remove(c *Conn) {
	s.order.Remove(c.at)
	of := s.byAddr[c.addr]
	s.bySize[of.Len()].Remove(of.size)
	if of.Remove(c.by); of.Len() == 0 {
		delete(s.byAddr, c.addr)
		s.rotation.Remove(of.turn)
	} else {
		s.resized(of)
	}
	for s.most > 0 && s.bySize[s.most].Len() == 0 {
		s.most--
	}
	c.in, c.at, c.by = nil, nil, nil
}

// resized moves a group to the list of its length.
func (s *class) resized(of *group) {
	n := of.Len()
	for len(s.bySize) <= n {
		s.bySize = append(s.bySize, &list.List{})
	}
	of.size = s.bySize[n].PushBack(of)
	s.most = max(s.most, n)
}

// count returns how many connections an address has.
func (s *class) count(addr netip.Addr) int {
	if g := s.byAddr[addr]; g != nil {
		return g.Len()
	}
	return 0
}

// victim returns the connection to evict before another one of addr is added, or nil if there is room.
// It is the oldest of addr if that has too many, or else of an address that has the most.
func (s *class) victim(addr netip.Addr) *Conn {
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

// next returns the connection whose turn it is, nil if there is none. Addresses take turns. The oldest
// connection of each goes first.
func (s *class) next() *Conn {
	e := s.rotation.Front()
	if e == nil {
		return nil
	}
	s.rotation.MoveToBack(e)
	return e.Value.(*group).Front().Value.(*Conn)
}
