package diagnosis

import (
	"cmp"
	"slices"

	"github.com/lockstep-ccl/lockstep/record"
)

// hangScratch is what a pass with something held up works on.
type hangScratch struct {
	nodes   []waitNode // nodes of the graph beyond the ranks
	active  []int64    // by rank: last time its program or an operation moved
	inside  []int32    // by rank: operations that it is in
	member  []bool     // by rank: belongs to some communicator
	heldFor []int64    // by rank: for how long it has been in a held operation
	left    []int64    // by rank: when it left its last operation, or, before the first one, when its communicator was seen first
	entered []int64    // by rank: when it entered the first of those that it is in, 0 when it is in none
	away    int64      // the longest that any rank was outside before what it is in now, ns
	starts  []int32
	open    []int32 // members of one communicator
	blind   []int32 // of them, those that nothing says for whom they wait

	joined, outside int // ranks in communicators; of them in no operation

	connOf    []int32 // connections ordered by communicator
	connFirst []int32 // by communicator: its first in connOf
	haveConns bool
	connNode  []int32            // by connection: 1 + its node, 0 when it has none
	pairNode  map[[3]int32]int32 // the same for pairs without one, by communicator and members
	unknown   int32              // the node of kind waitUnknown, -1 while there is none
}

// waitNode is a node that is no rank.
type waitNode struct {
	kind     waitKind
	comm     int32
	conn     int32 // index into Evidence.Conns, -1 when the pair has none
	src, dst int32 // world ranks
	seq      uint64
	coll     record.CollKind
	waiting  int   // members inside the operation
	since    int64 // of the first that entered; of the last byte for a connection
	last     int64 // of anything in the communicator, for a transfer
	known    int64 // how far that is known
}

type waitKind uint8

const (
	waitMissing  waitKind = iota // an operation that members have not entered
	waitTransfer                 // one that all have entered, with no connection to tell more
	waitConn                     // a connection that does not deliver
	waitUnknown                  // somebody nobody has reported: never blamed
)

// buildGraph adds a wait for every open member: for those who have not entered
// its collective, for its peer, or for the connections inside.
func (e *Engine) buildGraph() {
	p, s := &e.pass, &e.hang
	n := len(p.state)
	e.graph.reset(n)
	s.nodes, s.starts = s.nodes[:0], s.starts[:0]
	s.active, s.inside = zeroed(s.active, n), zeroed(s.inside, n)
	s.member, s.heldFor = zeroed(s.member, n), zeroed(s.heldFor, n)
	s.left, s.entered, s.away = zeroed(s.left, n), zeroed(s.entered, n), 0
	s.joined, s.outside, s.unknown = 0, 0, -1
	s.connNode = zeroed(s.connNode, len(p.ev.Conns))
	clear(s.pairNode)

	for ci := range p.ev.Comms {
		if !e.comms[ci].former {
			e.waitsIn(int32(ci))
		}
	}
	for _, ci := range p.held {
		patience := int64(e.cfg.SuspectAfter)
		if !p.sick {
			patience = e.suspectAfter(&e.comms[ci])
		}
		c := &p.ev.Comms[ci]
		for i := range c.Members {
			m := &c.Members[i]
			if open := e.openFor(m); open >= patience {
				if s.heldFor[m.World] == 0 {
					s.starts = append(s.starts, m.World)
				}
				s.heldFor[m.World] = max(s.heldFor[m.World], open)
			}
		}
	}
	e.abandoned()
	for r := range s.member {
		if s.left[r] > 0 && s.entered[r] > 0 {
			s.away = max(s.away, s.entered[r]-s.left[r])
		}
		if h := &e.ranks[r].mark; !h.open {
			s.active[r] = max(s.active[r], h.seen) // closing a mark is progress
		}
		if s.member[r] && p.state[r] == rankAlive {
			s.joined++
			if s.inside[r] == 0 {
				s.outside++
			}
		}
	}
}

// said reports whether Coll and Peer, which are of the operation enqueued last,
// are of the one that the member is in.
func said(m *Member) bool { return m.Enqueued <= m.Finished+1 }

// waitsIn adds the waits of one communicator's members.
func (e *Engine) waitsIn(ci int32) {
	p, s := &e.pass, &e.hang
	c := &p.ev.Comms[ci]
	s.open, s.blind = s.open[:0], s.blind[:0]
	for i := range c.Members {
		m := &c.Members[i]
		w := p.world(m.World)
		if w < 0 {
			continue
		}
		s.active[w] = max(s.active[w], m.EnqueuedAt, m.StartedAt, m.FinishedAt)
		s.member[w] = s.member[w] || inComm(m)
		s.left[w] = max(s.left[w], m.FinishedAt)
		if e.openFor(m) < 0 {
			continue
		}
		s.inside[w]++
		if s.entered[w] == 0 || m.StartedAt < s.entered[w] {
			s.entered[w] = m.StartedAt
		}
		if s.left[w] == 0 {
			s.left[w] = e.comms[ci].since
		}
		switch {
		case m.Coll == record.Group, e.comms[ci].p2p && !said(m):
			if len(e.connsOf(ci)) == 0 {
				s.blind = append(s.blind, int32(i))
			} else {
				e.waitsAtConns(ci, int32(i), e.unknown())
			}
		case pointToPoint(m.Coll):
			e.waitsForPeer(ci, int32(i))
		default:
			s.open = append(s.open, int32(i))
		}
	}
	if len(s.blind) > 0 {
		e.waitsBlind(ci)
	}
	if len(s.open) == 0 {
		return
	}
	if e.comms[ci].p2p {
		e.waitsMixed(ci)
		return
	}
	at := func(i int32) uint64 { return c.Members[i].Finished + 1 }
	if !slices.IsSortedFunc(s.open, func(a, b int32) int { return cmp.Compare(at(a), at(b)) }) {
		slices.SortStableFunc(s.open, func(a, b int32) int { return cmp.Compare(at(a), at(b)) })
	}
	// Members that wait at a later operation wait for what those at an earlier
	// one wait for, and for these: each operation names only the members that
	// the one before has not named.
	before, lower := int32(-1), uint64(0)
	for i := 0; i < len(s.open); {
		j, seq := i, at(s.open[i])
		for j < len(s.open) && at(s.open[j]) == seq {
			j++
		}
		before = e.waitsAt(ci, s.open[i:j], seq, lower, before)
		lower, i = seq, j
	}
}

// waitsAt adds the waits of the members that are in operation seq. It returns
// the node that stands for its missing members, or before when none is missing.
func (e *Engine) waitsAt(ci int32, open []int32, seq, lower uint64, before int32) int32 {
	c := &e.pass.ev.Comms[ci]
	first := &c.Members[open[0]]
	if root := first.Peer; said(first) && (first.Coll == record.Broadcast || first.Coll == record.Scatter) && before < 0 &&
		root >= 0 && int(root) < len(c.Members) && c.Members[root].Started < seq {
		// Everything comes from the root: the others that are not there matter to nobody yet.
		node := e.missing(ci, open)
		e.blameMember(ci, node, root, first.StartedAt)
		return node
	}
	node := before
	own := false
	for i := range c.Members {
		m := &c.Members[i]
		if m.Started >= seq || m.Started < lower {
			continue
		}
		if !own {
			node, own = e.missing(ci, open), true
			if before >= 0 {
				e.graph.wait(waitEdge{from: node, to: before, comm: ci})
			}
		}
		e.blameMember(ci, node, int32(i), e.hang.nodes[e.extra(node)].since)
	}
	switch {
	case own:
	case before >= 0:
		for _, i := range open {
			e.graph.wait(waitEdge{from: c.Members[i].World, to: before, comm: ci, since: c.Members[i].StartedAt})
		}
	default:
		e.waitsInside(ci, open, seq)
	}
	return node
}

// waitsMixed handles collectives on a communicator that also carries sends and
// receives: sequence numbers do not compare, so who is in the same kind of
// collective, or left it after this one began, has entered.
func (e *Engine) waitsMixed(ci int32) {
	s := &e.hang
	c := &e.pass.ev.Comms[ci]
	first := &c.Members[s.open[0]]
	since := first.StartedAt
	for _, i := range s.open {
		since = min(since, c.Members[i].StartedAt)
	}
	node := int32(-1)
	for i := range c.Members {
		m := &c.Members[i]
		if m.Coll == first.Coll && (m.Open() || m.FinishedAt >= since) {
			continue
		}
		if node < 0 {
			node = e.missing(ci, s.open)
		}
		e.blameMember(ci, node, int32(i), since)
	}
	if node < 0 {
		e.waitsInside(ci, s.open, first.Finished+1)
	}
}

// waitsBlind adds the waits of members in sends and receives whose peers are not
// told, in a communicator without connections that could tell (GPUs of one node):
// for all members that are in nothing there. Those that wait elsewhere lead on, and
// who works is soon there.
func (e *Engine) waitsBlind(ci int32) {
	s := &e.hang
	members := e.pass.ev.Comms[ci].Members
	node := int32(-1)
	for i := range members {
		if m := &members[i]; e.openFor(m) >= 0 || !inComm(m) {
			continue
		}
		if node < 0 {
			node = e.missing(ci, s.blind)
		}
		e.blameMember(ci, node, int32(i), e.hang.nodes[e.extra(node)].since)
	}
	if node < 0 {
		e.operation(waitTransfer, ci, s.blind)
	}
}

// missing adds a node for an operation with missing members, and the waits of
// those inside for it.
func (e *Engine) missing(ci int32, open []int32) int32 {
	return e.operation(waitMissing, ci, open)
}

func (e *Engine) operation(kind waitKind, ci int32, open []int32) int32 {
	c := &e.pass.ev.Comms[ci]
	first := &c.Members[open[0]]
	op := waitNode{kind: kind, comm: ci, conn: -1, seq: first.Finished + 1, coll: first.Coll, waiting: len(open), since: never}
	for _, i := range open {
		op.since = min(op.since, c.Members[i].StartedAt)
	}
	if kind == waitTransfer {
		op.known = e.pass.now
		for _, i := range open {
			op.known = min(op.known, e.pass.known(c.Members[i].World))
		}
		for i := range c.Members {
			op.last = max(op.last, c.Members[i].StartedAt, c.Members[i].FinishedAt)
		}
	}
	node := e.addNode(op)
	for _, i := range open {
		m := &c.Members[i]
		e.graph.wait(waitEdge{from: m.World, to: node, comm: ci, since: m.StartedAt})
	}
	return node
}

func (e *Engine) blameMember(ci, node, member int32, since int64) {
	to := e.pass.world(e.pass.ev.Comms[ci].Members[member].World)
	if to < 0 {
		to = e.unknown()
	}
	e.graph.wait(waitEdge{from: node, to: to, comm: ci, since: since})
}

func (e *Engine) unknown() int32 {
	if e.hang.unknown < 0 {
		e.hang.unknown = e.addNode(waitNode{kind: waitUnknown, conn: -1})
	}
	return e.hang.unknown
}

func (e *Engine) addNode(n waitNode) int32 {
	e.hang.nodes = append(e.hang.nodes, n)
	return e.graph.node()
}

// extra returns the index of a graph node in hang.nodes.
func (e *Engine) extra(node int32) int { return int(node) - len(e.pass.state) }

// waitsInside adds the waits of an operation that all have entered: for members
// whose process is no more, else along the connections.
func (e *Engine) waitsInside(ci int32, open []int32, seq uint64) {
	p := &e.pass
	c := &p.ev.Comms[ci]
	sick := int32(-1)
	for i := range c.Members {
		m := &c.Members[i]
		if w := p.world(m.World); w >= 0 && p.state[w].sick() && m.Open() && m.Finished < seq {
			if sick < 0 {
				sick = e.missing(ci, open)
			}
			e.blameMember(ci, sick, int32(i), m.StartedAt)
		}
	}
	if sick >= 0 {
		return
	}
	told, posted := false, false
	for _, k := range e.connsOf(ci) {
		conn := &p.ev.Conns[k]
		told = told || conn.RxWaitingSince > 0 || conn.TxBlockedSince > 0
		posted = posted || conn.Outstanding > 0
	}
	if !told && !posted {
		e.operation(waitTransfer, ci, open)
		return
	}
	if !told {
		// The transport does not say who waits: what is under way says where.
		for _, k := range e.connsOf(ci) {
			conn := &p.ev.Conns[k]
			if conn.Outstanding > 0 && e.end(conn, conn.Dst) >= 0 && e.end(conn, conn.Src) >= 0 {
				node := e.stuckConn(k)
				for _, i := range open {
					m := &c.Members[i]
					e.graph.wait(waitEdge{from: m.World, to: node, comm: ci, conn: true, since: m.StartedAt})
				}
			}
		}
		return
	}
	for _, i := range open {
		e.waitsAtConns(ci, i, -1)
	}
}

// waitsAtConns adds what a member inside an operation waits for by its
// connections: a receiver for its sender, a sender without credit for its
// receiver, both for the connection when it has what the receiver wants.
// otherwise is what it waits for when no connection says so, -1 for nobody.
func (e *Engine) waitsAtConns(ci, member, otherwise int32) {
	p := &e.pass
	from := p.ev.Comms[ci].Members[member].World
	for _, k := range e.connsOf(ci) {
		conn := &p.ev.Conns[k]
		var since int64
		var other int32
		switch {
		case conn.Dst == member && conn.RxWaitingSince > 0:
			since, other = conn.RxWaitingSince, e.end(conn, conn.Src)
		case conn.Src == member && conn.TxBlockedSince > 0:
			since, other = conn.TxBlockedSince, e.end(conn, conn.Dst)
		default:
			continue
		}
		edge := waitEdge{from: from, to: other, comm: ci, conn: true, since: since}
		switch {
		case other < 0:
			edge.to = e.unknown()
		case e.stuck(conn):
			edge.to = e.stuckConn(k)
		case e.mayHold(conn):
			edge.holds = k + 1
		}
		e.graph.wait(edge)
		otherwise = -1
	}
	if otherwise >= 0 {
		e.graph.wait(waitEdge{from: from, to: otherwise, comm: ci})
	}
}

// waitsForPeer adds what a member in a Send or Recv waits for.
func (e *Engine) waitsForPeer(ci, member int32) {
	p := &e.pass
	c := &p.ev.Comms[ci]
	m := &c.Members[member]
	if m.Peer < 0 || int(m.Peer) >= len(c.Members) || m.Peer == member {
		e.waitsAtConns(ci, member, e.unknown())
		return
	}
	peer := &c.Members[m.Peer]
	w := p.world(peer.World)
	if w < 0 {
		w = e.unknown()
	} else if e.openFor(peer) >= 0 && peer.Peer == member && pointToPoint(peer.Coll) && peer.Coll != record.Group && peer.Coll != m.Coll {
		// Both ends are in: it is up to the connection between them.
		src, dst := member, m.Peer
		if m.Coll == record.Recv {
			src, dst = dst, src
		}
		w = e.pairConn(ci, src, dst)
	}
	edge := waitEdge{from: m.World, to: w, comm: ci, since: m.StartedAt}
	if m.Coll == record.Recv && int(w) < len(p.state) {
		for _, k := range e.connsOf(ci) {
			if conn := &p.ev.Conns[k]; conn.Src == m.Peer && conn.Dst == member {
				if e.stuck(conn) {
					edge.to = e.stuckConn(k)
				} else if e.mayHold(conn) {
					edge.holds = k + 1
				}
			}
		}
	}
	e.graph.wait(edge)
}

// stuck reports whether a connection does not deliver: it holds what its
// receiver waits for, or both its ends wait for each other, or its sender has
// left the operation that the receiver is still in. Only a sender that is in an
// operation of the communicator itself knows what has been taken.
func (e *Engine) stuck(c *Conn) bool {
	if c.RxWaitingSince == 0 || !e.bothAlive(c) {
		return false
	}
	members := e.pass.ev.Comms[c.Comm].Members
	src, dst := &members[c.Src], &members[c.Dst]
	p2p, inside := e.comms[c.Comm].p2p, e.openFor(src) >= 0
	switch {
	case !p2p && src.Finished > dst.Finished:
		return true
	case inside:
		return c.Outstanding > 0 || c.TxBlockedSince > 0
	}
	return p2p && c.Outstanding > 0 && c.LastPost > dst.FinishedAt
}

// mayHold reports whether a connection may hold what its receiver waits for: so
// its sender, who has gone on, knew last.
func (e *Engine) mayHold(c *Conn) bool {
	return c.RxWaitingSince > 0 && c.Outstanding > 0 && e.bothAlive(c)
}

func (e *Engine) bothAlive(c *Conn) bool {
	src, dst := e.end(c, c.Src), e.end(c, c.Dst)
	return src >= 0 && dst >= 0 && e.pass.state[src] == rankAlive && e.pass.state[dst] == rankAlive
}

// end returns the world rank of a connection's end, -1 when not known.
func (e *Engine) end(c *Conn, member int32) int32 {
	members := e.pass.ev.Comms[c.Comm].Members
	if member < 0 || int(member) >= len(members) {
		return -1
	}
	return e.pass.world(members[member].World)
}

func (e *Engine) stuckConn(k int32) int32 {
	c, node := &e.pass.ev.Conns[k], &e.hang.connNode[k]
	if *node == 0 {
		members := e.pass.ev.Comms[c.Comm].Members
		src, m := &members[c.Src], &members[c.Dst]
		*node = 1 + e.addNode(waitNode{
			kind: waitConn, comm: c.Comm, conn: k, src: e.end(c, c.Src), dst: e.end(c, c.Dst), seq: m.Finished + 1, coll: m.Coll,
			// The receiver may have waited for the sender to come first.
			since: max(c.RxWaitingSince, c.LastCompletion, src.StartedAt, m.StartedAt),
		})
	}
	return *node - 1
}

// pairConn is the node of the connection between two matched ends.
func (e *Engine) pairConn(ci, src, dst int32) int32 {
	for _, k := range e.connsOf(ci) {
		if c := &e.pass.ev.Conns[k]; c.Src == src && c.Dst == dst {
			return e.stuckConn(k)
		}
	}
	id := [3]int32{ci, src, dst}
	node, ok := e.hang.pairNode[id]
	if !ok {
		members := e.pass.ev.Comms[ci].Members
		m := &members[dst]
		node = e.addNode(waitNode{
			kind: waitConn, comm: ci, conn: -1, src: members[src].World, dst: m.World,
			seq: m.Finished + 1, coll: m.Coll, since: max(m.StartedAt, members[src].StartedAt),
		})
		if e.hang.pairNode == nil {
			e.hang.pairNode = map[[3]int32]int32{}
		}
		e.hang.pairNode[id] = node
	}
	return node
}

// connsOf returns the indices of a communicator's connections; they are
// ordered on first use in a pass.
func (e *Engine) connsOf(ci int32) []int32 {
	p, s := &e.pass, &e.hang
	if !s.haveConns {
		s.haveConns = true
		n := len(p.ev.Comms)
		s.connFirst = zeroed(s.connFirst, n+2)
		for i := range p.ev.Conns {
			if k := p.ev.Conns[i].Comm; k >= 0 && int(k) < n {
				s.connFirst[k+2]++
			}
		}
		for k := 2; k < n+2; k++ {
			s.connFirst[k] += s.connFirst[k-1]
		}
		s.connOf = zeroed(s.connOf, int(s.connFirst[n+1]))
		for i := range p.ev.Conns {
			if k := p.ev.Conns[i].Comm; k >= 0 && int(k) < n {
				s.connOf[s.connFirst[k+1]] = int32(i)
				s.connFirst[k+1]++
			}
		}
	}
	return s.connOf[s.connFirst[ci]:s.connFirst[ci+1]]
}
