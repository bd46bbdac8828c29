package accept

import (
	"container/list"
	"net/netip"
)

// class is a set of connections in the order in which they came.
type class struct {
	max, perAddr int
	order        list.List // of *Conn
	byAddr       map[netip.Addr]*list.List
}

func newClass(most, perAddr int) class {
	return class{max: most, perAddr: perAddr, byAddr: make(map[netip.Addr]*list.List)}
}

func (s *class) add(c *Conn) {
	of := s.byAddr[c.addr]
	if of == nil {
		of = list.New()
		s.byAddr[c.addr] = of
	}
	c.in, c.at, c.by = s, s.order.PushBack(c), of.PushBack(c)
}

func (s *class) remove(c *Conn) {
	s.order.Remove(c.at)
	of := s.byAddr[c.addr]
	if of.Remove(c.by); of.Len() == 0 {
		delete(s.byAddr, c.addr)
	}
	c.in, c.at, c.by = nil, nil, nil
}

// excess is who must go before one more of addr may come, nil when there is room: the
// oldest of that address when it has too many, else of the one that has most.
func (s *class) excess(addr netip.Addr) *Conn {
	of := s.byAddr[addr]
	switch {
	case of != nil && of.Len() >= s.perAddr:
	case s.order.Len() >= s.max:
		for _, o := range s.byAddr {
			if of == nil || o.Len() > of.Len() {
				of = o
			}
		}
	default:
		return nil
	}
	return of.Front().Value.(*Conn)
}
