package rdma

// phase is where a lane is in its life.
type phase uint8

const (
	seeking  phase = iota // no path is known to work at both ends
	running               // one path carries traffic
	draining              // a switch has begun; the queue pair left may still complete receives
	waiting               // this side's count is final and told; the peer's is not known yet
)

// pathState is what this end has of a path.
type pathState uint8

const (
	pathDown    pathState = iota // nothing
	pathOffered                  // a queue pair that waits for the peer's
	pathLive                     // connected
	pathStopped                  // in error; completions may still come
)

// path is one of a lane's ways to the peer. A queue pair that was lost is
// replaced by one of a later generation.
type path struct {
	state   pathState
	gen     uint32
	mine    endpoint // offered
	theirs  endpoint // offered by the peer, of theirGen
	toldGen uint32   // theirs' generation, 0: none
}

// entry is a message of a lane that the peer's software has not acknowledged:
// what has to be sent again when it was lost.
type entry struct {
	kind kind
	pad  uint8  // bytes of padding before it in the stream
	num  uint32 // of the data chunk or line, numbering bits only
	n    uint32 // bytes
	pos  uint64 // of data: its place in the stream; of a line: its number
	from source // of data: where it lies, unless in the outbox
}

// source is a place in registered memory; nowhere is the zero value.
type source struct {
	addr   uint64
	region *Region
}

// lane is one of a connection's parallel ways. Positions count messages.
type lane struct {
	// Sending. acked ≤ transmitted ≤ posted but after a switch, when acked is the
	// receiver's word and transmitted follows it.
	log         []entry // those in [acked, posted), by position mod depth
	posted      uint64  // handed to a queue pair, or owed to the next one
	transmitted uint64  // the peer's NIC has them
	acked       uint64  // the peer's software has counted them

	// Receiving.
	received uint64 // completions counted
	told     uint64 // received, as the peer was last told
	owes     bool   // what was told may be lost

	phase  phase
	epoch  uint32
	choice bool              // the switch of this epoch is one by choice, at this end
	active int               // path in use or last in use, -1 before any
	alive  [maxPlaces]uint32 // waiting: the generations in this side's SWITCH
	theirs *message          // the peer's SWITCH of this epoch
	hope   bool              // seeking: the peer has not said that it looks no longer
	paths  [maxPlaces]path
}

// gaveUp is what the peer said when it ended the connection.
type gaveUp struct {
	text   string
	noPath bool
}

func (g *gaveUp) Error() string { return "the peer gave up: " + g.text }

// maxSkip bounds how many generations of a path a peer may have used up alone.
const maxSkip = 1 << 16

// begin leaves the lane's path: a fault, the peer's word, or a better path. The
// last is willing, and so is who follows it.
func (m *machine) begin(i int, willing bool) {
	l := &m.lanes[i]
	l.epoch++
	l.choice = willing
	l.phase = draining
	if l.active >= 0 {
		switch p := &l.paths[l.active]; p.state {
		case pathLive:
			p.state = pathStopped
			m.act.stop(i, l.active, willing)
			return
		case pathStopped:
			return
		}
	}
	m.settle(i)
}

// stopped tells that a queue pair which stop has stopped is drained: all its
// completions have been delivered here, and it writes nowhere any more.
func (m *machine) stopped(i, p int) {
	l := &m.lanes[i]
	if l.paths[p].state != pathStopped {
		return
	}
	l.paths[p].state = pathDown
	if l.phase == draining && p == l.active {
		m.settle(i)
	}
}

// settle tells the peer what has arrived, which is final for the path left.
func (m *machine) settle(i int) {
	l := &m.lanes[i]
	l.phase = waiting
	for p := range l.paths {
		l.alive[p] = 0
		if l.paths[p].state == pathLive {
			l.alive[p] = l.paths[p].gen
		}
	}
	m.act.tell(&message{kind: msgSwitch, lane: uint8(i), epoch: l.epoch, received: l.received, alive: l.alive, spares: m.spares, willing: l.choice})
	if l.theirs != nil {
		m.finish(i)
	}
}

// finish ends a switch. Both ends have both SWITCH messages, and choose the
// same path: the first that both call alive in the same generation.
func (m *machine) finish(i int) {
	l := &m.lanes[i]
	t := l.theirs
	l.theirs = nil
	if t.received < l.acked || t.received > l.posted {
		_ = m.corrupt("lane %d: the peer received %d messages, of %d posted and %d acknowledged", i, t.received, l.posted, l.acked)
		return
	}
	l.acked, l.transmitted = t.received, t.received
	from := l.active
	to := -1
	for p := range l.paths {
		if l.alive[p] != 0 && l.alive[p] == t.alive[p] {
			to = p
			break
		}
	}
	if to < 0 {
		// What is alive here and was not there may be by now: its offer came before
		// its SWITCH, and so did ours.
		l.phase, l.active = seeking, -1
		m.seek(i)
		return
	}
	l.phase, l.active, l.hope = running, to, true
	if p := &l.paths[to]; p.state != pathLive || p.gen != l.alive[to] {
		m.begin(i, false) // it has broken meanwhile
		return
	}
	m.act.chosen(i, to)
	again, bytes := l.posted-l.acked, uint64(0)
	l.owes = l.received > 0 // credit on the old path may be lost
	for s := l.acked; s < l.posted; s++ {
		e := &l.log[s%m.depth]
		bytes += uint64(e.n)
		m.act.post(i, to, s, e)
	}
	m.act.switched(i, from, to, again, bytes)
	// This rank may have ended its operation meanwhile, when no lane could tell.
	m.release()
}

// seek begins to use a path where the lane has none.
func (m *machine) seek(i int) {
	l := &m.lanes[i]
	if l.phase != seeking {
		return
	}
	for p := range l.paths {
		if l.paths[p].state == pathLive {
			m.begin(i, false)
			return
		}
	}
}

// fault tells that a path of a lane does not work, whatever the reason.
func (m *machine) fault(i, p int) { m.lose(i, p, true) }

// lose gives up this end's queue pair of a path, and tells the peer unless it
// knows, or will hear of it in a SWITCH.
func (m *machine) lose(i, p int, tell bool) {
	l := &m.lanes[i]
	path := &l.paths[p]
	switch path.state {
	case pathOffered:
		path.state = pathDown
		m.act.drop(i, p)
	case pathLive:
		if l.phase == running && l.active == p {
			m.begin(i, false)
			return
		}
		path.state = pathStopped
		m.act.stop(i, p, false)
	default:
		return
	}
	if tell {
		m.act.tell(&message{kind: msgDown, lane: uint8(i), path: uint8(p), gen: path.gen})
	}
}

// wants reports whether a path waits for a new queue pair of this end's, and
// whether the peer's is there already or the lane has no other.
func (m *machine) wants(i, p int) (wanted, urgent bool) {
	l := &m.lanes[i]
	path := &l.paths[p]
	return path.state == pathDown, path.toldGen > path.gen || l.phase == seeking
}

// offer gives a path that is down a new queue pair of this end's.
func (m *machine) offer(i, p int, at endpoint) {
	path := &m.lanes[i].paths[p]
	path.gen = max(path.gen+1, path.toldGen)
	path.mine, path.state = at, pathOffered
	m.tellOffer(i, p)
}

func (m *machine) tellOffer(i, p int) {
	path := &m.lanes[i].paths[p]
	m.act.tell(&message{kind: msgOffer, lane: uint8(i), path: uint8(p), gen: path.gen, at: path.mine})
	if path.toldGen == path.gen {
		m.connect(i, p)
	}
}

// connect joins this end's queue pair to the peer's of the same generation.
func (m *machine) connect(i, p int) {
	path := &m.lanes[i].paths[p]
	path.toldGen = 0
	if !m.act.connect(i, p, path.theirs) {
		m.lose(i, p, true)
		return
	}
	path.state = pathLive
	m.seek(i)
}

// better is the live path that a lane is to run on rather than its own, -1 for none: one
// before it, or a queue pair that is there to take its own one's place.
func (m *machine) better(i int) int {
	l := &m.lanes[i]
	if l.phase != running {
		return -1
	}
	for p := range l.paths {
		if l.paths[p].state == pathLive && (m.pathOf(p) < m.pathOf(l.active) || p == m.sibling(l.active)) {
			return p
		}
	}
	return -1
}

// failback leaves a path for a better one.
func (m *machine) failback(i int) {
	if m.better(i) >= 0 {
		m.begin(i, true)
	}
}

// handle takes in a control message.
func (m *machine) handle(g *message) error {
	if m.err != nil {
		return m.err
	}
	if int(g.lane) >= len(m.lanes) || int(g.path) >= places(m.spares) || g.kind == msgSwitch && g.spares != m.spares {
		return m.corrupt("control message %d for path %d of lane %d", g.kind, g.path, g.lane)
	}
	i, p := int(g.lane), int(g.path)
	l := &m.lanes[i]
	path := &l.paths[p]
	switch g.kind {
	case msgSwitch:
		switch idle := l.phase == running || l.phase == seeking; {
		case l.theirs != nil, idle && g.epoch != l.epoch+1, !idle && g.epoch != l.epoch:
			return m.corrupt("lane %d: SWITCH of epoch %d at epoch %d", i, g.epoch, l.epoch)
		case idle:
			l.theirs = g
			m.begin(i, g.willing)
		default:
			if l.theirs = g; l.phase == waiting {
				m.finish(i)
			}
		}
	case msgOffer:
		switch {
		case g.gen == 0 || g.gen > path.gen+maxSkip || !g.at.valid():
			return m.corrupt("lane %d: offer of generation %d at %d: %+v", i, g.gen, path.gen, g.at)
		case g.gen > path.gen:
			if path.state == pathLive {
				m.lose(i, p, false)
			}
			path.theirs, path.toldGen = g.at, g.gen
			if path.state == pathOffered {
				path.gen = g.gen
				m.tellOffer(i, p)
			}
		case g.gen == path.gen && path.state == pathOffered:
			path.theirs, path.toldGen = g.at, g.gen
			m.connect(i, p)
		case g.gen == path.gen && path.state == pathLive:
			return m.corrupt("lane %d: a second offer of generation %d", i, g.gen)
		} // else the peer will hear, or has, that this end gave it up
	case msgDown:
		if path.toldGen == g.gen {
			path.toldGen = 0
		}
		if g.gen == path.gen && path.state == pathLive {
			m.lose(i, p, false)
		}
	case msgExpired:
		l.hope = false
	case msgFail:
		m.err = &gaveUp{text: g.text, noPath: p == 1}
	default:
		return m.corrupt("control message of kind %d", g.kind)
	}
	return m.err
}

// takes reports whether the peer may send on a path now.
func (l *lane) takes(p int) bool {
	switch l.phase {
	case running, draining:
		return p == l.active
	case waiting:
		// It may have this side's SWITCH already.
		return p != l.active && l.alive[p] != 0
	}
	return false
}

// room is how many more messages a lane takes.
func (m *machine) room(l *lane) int {
	if l.phase != running {
		return 0
	}
	return int(m.depth - (l.posted - min(l.acked, l.transmitted)))
}

// queue appends a message to a lane with room, and posts it.
func (m *machine) queue(i int, e entry) {
	l := &m.lanes[i]
	s := l.posted
	l.log[s%m.depth] = e
	l.posted++
	m.act.post(i, l.active, s, &l.log[s%m.depth])
}

// sent tells that a lane's messages before position s have been transmitted
// over path p.
func (m *machine) sent(i, p int, s uint64) {
	if l := &m.lanes[i]; l.phase == running && l.active == p && s > l.transmitted && s <= l.posted {
		l.transmitted = s
	}
}

// bit is where a number has its bit in a set of 64.
func bit(n uint64) uint64 { return 1 << (n % 64) }
