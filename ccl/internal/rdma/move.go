package rdma

import "time"

// How a lane moves to another way through the fabric. Switches choose by a hash of addresses
// and ports, so a queue pair's UDP source port is its way; it has one for life. A path has
// two places for queue pairs: when the one in use is to send from another port, a new one is
// made in the other place, connected and tried while the lane goes on. Then the lane switches
// as it does back to its primary: by choice, and nothing is lost, or there twice. What a
// queue pair sends from is this end's alone; the peer, whose queue pair is replaced with it,
// hears of no port.

// SetPorts says from which UDP source ports the lanes' queue pairs over a path are to send;
// 0, and none, is the device's choice. A queue pair that is connected keeps its port where
// that is so, or where the connection has no Moves.
func (c *Conn) SetPorts(path int, ports []uint16) {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	c.wish(path, ports)
	c.w.schedule()
}

// Ports are those that SetPorts has said last, but for those of queue pairs that broke
// since, which are 0. They replace what is in the slice.
func (c *Conn) Ports(path int, ports []uint16) []uint16 {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	ports = ports[:0]
	for i := range c.ports {
		ports = append(ports, c.ports[i][path])
	}
	return ports
}

func (c *Conn) wish(path int, ports []uint16) {
	for i := range c.ports {
		if c.ports[i][path] = 0; i < len(ports) {
			c.ports[i][path] = ports[i]
		}
	}
}

// places is how many queue pairs a lane of this connection can have.
func (c *Conn) places() int { return c.first(len(c.pairs)) }

// first is the first place of a path.
func (c *Conn) first(path int) int {
	if c.m.spares {
		return 2 * path
	}
	return path
}

// misplaced reports whether a lane's queue pair sends from another port than it is to.
func (c *Conn) misplaced(i int) bool {
	l := &c.m.lanes[i]
	if !c.m.spares || l.phase != running {
		return false
	}
	q := c.qps[i][l.active]
	port := c.ports[i][q.path]
	return port != 0 && port != q.source
}

// carries reports whether a place, -1 for none, has a queue pair that is connected.
func (c *Conn) carries(i, place int) bool {
	return place >= 0 && c.m.lanes[i].paths[place].state == pathLive
}

// spare reports whether a place without a queue pair needs none: the path has one in its
// other place, or is to have. When that one is misplaced, or the peer has offered, it does.
func (c *Conn) spare(i, place int) bool {
	l := &c.m.lanes[i]
	other := c.m.sibling(place)
	if other < 0 || l.paths[place].toldGen > l.paths[place].gen {
		return false
	}
	switch l.paths[other].state {
	case pathLive, pathOffered:
		return l.active != other || !c.misplaced(i)
	default:
		return place > other
	}
}

// show has the watcher hear of a path's queue pair in this place from now on.
func (c *Conn) show(lane, place int) {
	q := c.qps[lane][place]
	c.shown[lane][q.path] = place
	c.tries[lane][q.path].left = time.Time{}
	if c.announce(lane, q.path, PathNew); q.proved {
		c.announce(lane, q.path, PathUp)
	}
}

// tellUp tells that a write over a queue pair has completed.
func (c *Conn) tellUp(q *queuePair) {
	if c.shown[q.lane][q.path] == q.place {
		c.announce(q.lane, q.path, PathUp)
	}
}
