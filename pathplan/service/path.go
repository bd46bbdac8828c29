package service

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/pathplan/service/planpb"
)

// path is a connection's, in the direction in which this end sends.
type path struct {
	c      *Client
	id     string
	conn   ccl.PathConn
	move   func()
	closed bool
	lanes  int  // that the connection has; the client's lock
	asked  bool // the client's lock

	mu       sync.Mutex
	changed  chan struct{} // closed when ready changes
	want     []hops        // the plan, by lane
	where    map[uint16]hops
	ready    [][]uint16           // sets of ports that take want, each for one attempt
	spent    map[uint16]time.Time // ports that were given
	given    []uint16             // ports that the transport has
	on       []hops               // the plan that these are of
	next     []hops               // the plan that ready is of
	working  bool
	again    bool // the plan has changed meanwhile
	verified time.Time
	moved    time.Time
	last     []ccl.LaneState
	lossy    []bool          // lanes, by the last look
	carried  []ccl.LaneState // when what lanes carry was last told
	told     time.Time
}

const (
	// moveEvery bounds how often a connection is moved.
	moveEvery = 500 * time.Millisecond
	// bulk is how many bytes make a direction one that is planned. A ring's connections
	// carry data one way; a plan that took the other way for as busy would be uneven.
	bulk = 256 << 10
	// restFor is longer than a closed connection's address is kept from use (TIME_WAIT).
	restFor = 70 * time.Second
	// spares is how many sets of ports are at hand.
	spares = 3
	// lossMax is the share of segments lost from which a lane is lossy.
	lossMax = 0.03
	// lossBytes is how much must have been acknowledged to say so, twice in a row: a sender that
	// finds out how much its path takes loses some once.
	lossBytes = 1 << 20
)

// Ports implements ccl.Path.
func (p *path) Ports(ctx context.Context, lanes int) []uint16 {
	if p.closed {
		return nil
	}
	for {
		p.mu.Lock()
		if len(p.want) == 0 { // nothing is planned yet: see bulk
			p.mu.Unlock()
			return nil
		}
		ready, changed := p.ready, p.changed
		if len(ready) > 0 && len(ready[0]) >= lanes {
			p.moved = time.Now()
			if !p.conn.RoCE { // a queue pair leaves its port at once
				for _, port := range slices.Concat(p.given, ready[0]) { // connections that end rest from now on
					p.spent[port] = p.moved
				}
			}
			p.given, p.ready, p.on = ready[0], ready[1:], p.next
			p.mu.Unlock()
			return ready[0]
		}
		p.mu.Unlock()
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// ask has the connection planned.
func (p *path) ask(lanes int) {
	p.c.mu.Lock()
	defer p.c.mu.Unlock()
	if p.lanes == 0 {
		p.lanes = lanes
		p.c.ring()
	}
}

// plan takes in what the planner says.
func (p *path) plan(lanes []*planpb.Lane) {
	var want []hops
	for _, l := range lanes {
		spine, _ := netip.ParseAddr(l.GetSpine())
		leaf, _ := netip.ParseAddr(l.GetLeaf())
		want = append(want, hops{spine, leaf})
	}
	p.mu.Lock()
	p.want = want
	p.mu.Unlock()
	p.work()
}

// work finds ports for the plan, beside what else goes on.
func (p *path) work() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.again = true; p.working || p.c.ctx.Err() != nil {
		return
	}
	p.working = true
	p.c.wg.Go(func() {
		for {
			p.mu.Lock()
			if !p.again || p.closed || p.c.ctx.Err() != nil {
				p.working = false
				p.mu.Unlock()
				return
			}
			p.again = false
			p.mu.Unlock()
			p.settle()
		}
	})
}

// settle checks that the connection's lanes take the planned paths, and has them moved
// when they do not.
func (p *path) settle() {
	p.mu.Lock()
	want, given, known, on, ready := slices.Clone(p.want), slices.Clone(p.given), p.where, p.on, len(p.ready) > 0 && slices.Equal(p.next, p.want)
	p.mu.Unlock()
	if ready && !slices.Equal(on, want) {
		p.move() // nobody has taken them
		return
	}
	if !slices.ContainsFunc(want, func(h hops) bool { return h.spine.IsValid() }) {
		return // nothing is planned, or within one leaf
	}
	if len(given) > 0 && slices.Equal(on, want) {
		if p.still(want, known) {
			return
		}
		known = nil // switches hash otherwise than they did
	}
	busy := p.busy()
	ports, ok := pick(want, busy, known)
	if ok && known != nil { // what was learnt may be of another time
		now, err := p.c.trace(p.conn, ports)
		ok = err == nil && holds(want, ports, now)
	}
	if !ok {
		var err error
		var sure bool
		if known, sure, err = p.learn(want, busy); err != nil {
			return
		}
		p.mu.Lock()
		p.where = known
		p.mu.Unlock()
		if ports, ok = pick(want, busy, known); !ok {
			for i, port := range ports {
				if port == 0 && sure && want[i].spine.IsValid() {
					p.c.say(&planpb.Signal{Conn: p.id, Lane: uint32(i), Nowhere: true, Spine: want[i].spine.String(), Leaf: want[i].leaf.String()})
				}
			}
		}
	}
	if slices.Max(ports) == 0 {
		return
	}
	sets := [][]uint16{ports}
	for len(sets) < spares { // an attempt may have to be made again
		for _, port := range sets[len(sets)-1] {
			busy[port] = true
		}
		more, ok := pick(want, busy, known)
		if !ok {
			break
		}
		sets = append(sets, more)
	}
	p.offer(sets, want)
}

// enough is how many of the ports traced a path has to have had, by chance, for one that none of
// them takes to be gone (e^-8); mostTraced bounds how many are traced for that.
const (
	enough     = 8
	mostTraced = 4096
)

// learn finds out where source ports lead, and whether so many were found that a path without any is
// no accident.
func (p *path) learn(want []hops, busy map[uint16]bool) (known map[uint16]hops, sure bool, err error) {
	known = map[uint16]hops{}
	for traced := 0; ; {
		more, err := p.c.trace(p.conn, p.c.ports(p.c.o.Ports, p.conn.RoCE))
		if err != nil {
			return nil, false, err
		}
		maps.Copy(known, more)
		traced += p.c.o.Ports
		paths := map[hops]bool{}
		for _, h := range known {
			paths[h] = true
		}
		sure = len(known) >= enough*(len(paths)+1)
		if _, ok := pick(want, busy, known); ok || sure || len(more) == 0 || traced+p.c.o.Ports > mostTraced {
			return known, sure, nil
		}
	}
}

// offer gives the transport other ports.
func (p *path) offer(sets [][]uint16, want []hops) {
	p.mu.Lock()
	given := slices.Clone(p.given)
	p.mu.Unlock()
	p.c.mu.Lock()
	for port, id := range p.c.used {
		if id == p.id && !slices.Contains(given, port) {
			delete(p.c.used, port)
		}
	}
	for _, ports := range sets {
		for _, port := range ports {
			if port != 0 && !p.conn.RoCE {
				p.c.used[port] = p.id
			}
		}
	}
	p.c.mu.Unlock()
	p.mu.Lock()
	p.ready, p.next = p.ready[:0:0], want
	for _, set := range sets {
		if !slices.ContainsFunc(set, func(port uint16) bool { _, spent := p.spent[port]; return spent }) {
			p.ready = append(p.ready, set)
		}
	}
	close(p.changed)
	p.changed = make(chan struct{})
	early := moveEvery - time.Since(p.moved)
	p.mu.Unlock()
	if early > 0 {
		t := time.NewTimer(early)
		defer t.Stop()
		select {
		case <-p.c.ctx.Done():
			return
		case <-t.C:
		}
	}
	p.move()
}

// canaries is how many ports a lane's path is checked by. The lane's own cannot be traced
// while it has a connection.
const canaries = 2

// still reports whether ports that took the planned paths do so now, and so the lanes'.
func (p *path) still(want []hops, known map[uint16]hops) bool {
	var check []uint16
	busy := p.busy()
	p.mu.Lock()
	for _, set := range p.ready { // the transport may be at it
		for _, port := range set {
			busy[port] = true
		}
	}
	p.mu.Unlock()
	for _, w := range want {
		n := 0
		for port, h := range known {
			if n < canaries && h == w && !busy[port] && !slices.Contains(check, port) {
				check = append(check, port)
				n++
			}
		}
	}
	now, err := p.c.trace(p.conn, check)
	if err != nil {
		return true
	}
	for _, port := range check {
		if now[port] != known[port] {
			return false
		}
	}
	return true
}

// holds reports whether ports take the planned paths.
func holds(want []hops, ports []uint16, where map[uint16]hops) bool {
	for i, w := range want {
		if i >= len(ports) || ports[i] == 0 || where[ports[i]] != w {
			return false
		}
	}
	return true
}

// busy is the ports that cannot be given: other connections', and those that this one had
// a short while ago, whose old connections the kernel may still know.
func (p *path) busy() map[uint16]bool {
	p.c.mu.Lock()
	defer p.c.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	busy := map[uint16]bool{}
	for port, id := range p.c.used {
		if id != p.id && !p.conn.RoCE {
			busy[port] = true
		}
	}
	for port, at := range p.spent {
		if time.Since(at) > restFor && !slices.Contains(p.given, port) {
			delete(p.spent, port)
			continue
		}
		busy[port] = true
	}
	return busy
}

// pick finds a port for each lane, 0 where none is known.
func pick(want []hops, busy map[uint16]bool, where map[uint16]hops) (ports []uint16, ok bool) {
	ports, ok = make([]uint16, len(want)), true
	for i, w := range want {
		for port, h := range where {
			if h == w && !busy[port] && !slices.Contains(ports, port) && (ports[i] == 0 || port < ports[i]) {
				ports[i] = port
			}
		}
		ok = ok && ports[i] != 0
	}
	return ports, ok
}

// Seen implements ccl.Path.
func (p *path) Seen(lanes []ccl.LaneState) {
	if p.closed {
		return
	}
	p.mu.Lock()
	now := time.Now()
	if len(p.given) > 0 && now.Sub(p.moved) > moveEvery {
		for i, l := range lanes {
			if i >= len(p.given) || l.Port != p.given[i] {
				p.on = nil // an attempt went on without: try again
			}
		}
	}
	verify := now.Sub(p.verified) >= p.c.o.Verify
	sent := uint64(0)
	for _, l := range lanes {
		sent += l.Acked
	}
	if sent >= bulk && len(p.want) == 0 {
		defer p.ask(len(lanes))
	}
	for _, load := range p.loads(now, lanes) {
		defer p.c.carry(load)
	}
	var bad []int
	for i, l := range lanes {
		if i < len(p.last) && p.last[i].Port == l.Port {
			acked, sent, lost := l.Acked-p.last[i].Acked, l.Segments-p.last[i].Segments, lostSince(p.last[i], l)
			if acked < lossBytes && !l.Stalled {
				continue // not yet
			}
			lossy := acked >= lossBytes && float64(lost) > lossMax*float64(sent)
			if l.Stalled || lossy && p.lossy[i] {
				bad = append(bad, i)
			}
			p.last[i], p.lossy[i] = l, lossy
			continue
		}
		if i >= len(p.last) {
			p.last, p.lossy = append(p.last, l), append(p.lossy, false)
		} else {
			p.last[i], p.lossy[i] = l, false
		}
	}
	if len(bad) > 0 && now.Sub(p.verified) >= moveEvery/2 {
		verify = true
	}
	if verify {
		p.verified = now
	}
	p.mu.Unlock()
	for _, i := range bad {
		p.c.say(&planpb.Signal{Conn: p.id, Lane: uint32(i), Congested: true})
	}
	if verify {
		p.work()
	}
}

// loadEvery is how often the planner is told what lanes carry.
const loadEvery = time.Second

// loads is what lanes have carried since the planner was last told, when that is due and
// they are on the plan's ports. The lock is held.
func (p *path) loads(now time.Time, lanes []ccl.LaneState) (out []*planpb.Load) {
	took := now.Sub(p.told)
	if took < loadEvery || len(p.on) == 0 {
		return nil
	}
	for i, l := range lanes {
		if took < 2*loadFor && i < len(p.carried) && i < len(p.given) && p.carried[i].Port == l.Port && p.given[i] == l.Port && l.Acked >= p.carried[i].Acked {
			out = append(out, &planpb.Load{Conn: p.id, Lane: uint32(i), Rate: uint64(float64(l.Acked-p.carried[i].Acked) / took.Seconds()), Speed: l.Speed,
				Segments: l.Segments - p.carried[i].Segments, Lost: lostSince(p.carried[i], l)})
		}
	}
	p.carried, p.told = append(p.carried[:0], lanes...), now
	return out
}

// lostSince is how many of a lane's segments were lost between two looks. What was taken for lost may turn out
// to have come.
func lostSince(before, now ccl.LaneState) uint32 {
	if n := now.Lost - before.Lost; n <= now.Segments-before.Segments {
		return n
	}
	return 0
}

// Close implements ccl.Path.
func (p *path) Close() {
	if p.closed {
		return
	}
	p.c.mu.Lock()
	defer p.c.mu.Unlock()
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	if c := p.c; c.paths[p.id] == p {
		delete(c.paths, p.id)
		for port, id := range c.used {
			if id == p.id {
				delete(c.used, port)
			}
		}
		if len(c.release) < maxConns {
			c.release = append(c.release, p.id)
		}
		c.ring()
	}
}
