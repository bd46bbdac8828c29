package pathplan

import (
	"fmt"
	"time"
)

// mapKey is a PortKey by number; dst is none where any port on the leaf is meant.
type mapKey struct{ src, leaf, dst int32 }

// pathID is a pair of links.
type pathID struct{ up, down int32 }

// portTable is a PortMap as the planner uses it.
type portTable struct {
	version uint64
	learnt  time.Time
	paths   map[pathID][]uint16
	ports   int // and paths, and one: what it costs to keep
}

// usedPort is a source port between two NICs.
type usedPort struct {
	src, dst int32
	port     uint16
}

// path is the path that a source port hashes to.
func (t *portTable) path(port uint16) (up, down int32, ok bool) {
	for id, ports := range t.paths {
		for _, p := range ports {
			if p == port {
				return id.up, id.down, true
			}
		}
	}
	return none, none, false
}

// table is the map that holds for a connection's packets, or nil.
func (p *Planner) table(c *conn, side Side) *portTable {
	if p.opt.Steered || len(p.maps) == 0 || c.dst[side] == none {
		return nil
	}
	key := mapKey{c.src[side], p.fabric.ports[c.dst[side]].leaf, c.dst[side]}
	if t := p.maps[key]; t != nil {
		return t
	}
	key.dst = none
	return p.maps[key]
}

func usedBy(c *conn, port uint16) usedPort {
	id := func(sides [2]int32) int32 { return max(sides[Left], sides[Right]) }
	return usedPort{id(c.src), id(c.dst), port}
}

// free says whether no other lane between the same NICs has a source port.
func (p *Planner) free(l *lane, port uint16) bool {
	if l.port == port {
		return true
	}
	_, taken := p.used[usedBy(l.conn, port)]
	return !taken
}

// takePort gives a lane another source port, or with 0 none.
func (p *Planner) takePort(l *lane, port uint16) {
	if l.port == port && port == 0 {
		return
	}
	if l.port != 0 {
		delete(p.used, usedBy(l.conn, l.port))
	}
	if l.port = port; port != 0 {
		p.used[usedBy(l.conn, port)] = struct{}{}
	}
}

// steers says whether a lane can be put on a path.
func (p *Planner) steers(t *portTable, l *lane, up, down int32) bool {
	return p.opt.Steered || t != nil && p.pick(t, l, up, down) != 0
}

// pick returns a source port of a path, 0 for none: not always the same one, so that a lane
// that comes back does not meet its own connection of before.
func (p *Planner) pick(t *portTable, l *lane, up, down int32) uint16 {
	if t == nil {
		return 0
	}
	ports := t.paths[pathID{up, down}]
	for i := range ports {
		if port := ports[(i+l.moves)%len(ports)]; port != 0 && p.free(l, port) {
			return port
		}
	}
	return 0
}

// SetPorts replaces a map of source ports. Lanes whose source port now takes another path
// are counted there from now on; Rebalance moves them where that is worth it. ErrStale: the
// planner has a later version.
func (p *Planner) SetPorts(now time.Time, m PortMap) error {
	key, t, err := p.checkMap(&m)
	if err != nil {
		return fmt.Errorf("source ports from %.400s to %.130s: %w", m.Key.Src, m.Key.DstLeaf, err)
	}
	old := p.maps[key]
	if old != nil {
		if old.version > m.Version {
			return fmt.Errorf("source ports from %s to %s: version %d, have %d: %w", m.Key.Src, m.Key.DstLeaf, m.Version, old.version, ErrStale)
		}
		p.ports -= old.ports
	}
	if p.ports+t.ports > p.opt.Limits.Ports {
		if old != nil {
			p.ports += old.ports
		}
		return fmt.Errorf("source ports from %s to %s: %d in all maps, at most %d: %w", m.Key.Src, m.Key.DstLeaf, p.ports+t.ports, p.opt.Limits.Ports, ErrLimit)
	}
	p.ports += t.ports
	p.maps[key] = t
	p.now, p.unsteered = now, true
	p.relocate(key.src, t)
	return nil
}

// relocate counts a port's lanes where the map says that they are.
func (p *Planner) relocate(src int32, t *portTable) {
	var where map[uint16]pathID
	for _, c := range p.fabric.ports[src].conns[0] {
		for i := range c.lanes {
			l := &c.lanes[i]
			if l.port == 0 || c.src[l.side] != src || p.table(c, l.side) != t {
				continue
			}
			if where == nil {
				where = make(map[uint16]pathID, t.ports)
				for id, ports := range t.paths {
					for _, port := range ports {
						where[port] = id
					}
				}
			}
			id, known := where[l.port]
			if known && id == (pathID{l.up, l.down}) {
				continue
			}
			p.lift(l)
			if known {
				p.place(l, id.up, id.down)
			}
		}
	}
}

// checkMap numbers what a map names.
func (p *Planner) checkMap(m *PortMap) (mapKey, *portTable, error) {
	src, ok := p.byPort[m.Key.Src]
	leaf, ok2 := p.byLeaf[m.Key.DstLeaf]
	key := mapKey{src, leaf, none}
	if !ok || !ok2 {
		return key, nil, fmt.Errorf("no such port or leaf: %w", ErrUnknown)
	}
	if m.Key.Dst != (Port{}) {
		if key.dst, ok = p.byPort[m.Key.Dst]; !ok || p.fabric.ports[key.dst].leaf != leaf {
			return key, nil, fmt.Errorf("port %.400s is not on the leaf: %w", m.Key.Dst, ErrUnknown)
		}
	}
	if y := m.Learnt.Year(); y < 0 || y > 9999 {
		return key, nil, fmt.Errorf("learnt in the year %d: %w", y, ErrInvalid)
	}
	t := &portTable{version: m.Version, learnt: m.Learnt, paths: make(map[pathID][]uint16, len(m.Paths)), ports: 1}
	var seen [1 << 16 / 64]uint64
	for _, path := range m.Paths {
		up, down, ok := p.pathOf(path.Path, p.fabric.ports[src].leaf, leaf)
		if !ok {
			return key, nil, fmt.Errorf("path %.500s: not between them: %w", path.Path, ErrUnknown)
		}
		for _, port := range path.Ports {
			if port == 0 || seen[port/64]&(1<<(port%64)) != 0 {
				return key, nil, fmt.Errorf("source port %d: is 0 or there twice: %w", port, ErrInvalid)
			}
			seen[port/64] |= 1 << (port % 64)
		}
		t.paths[pathID{up, down}] = append(t.paths[pathID{up, down}], path.Ports...)
		t.ports += 1 + len(path.Ports)
	}
	return key, t, nil
}
