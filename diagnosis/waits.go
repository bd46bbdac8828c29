package diagnosis

import (
	"cmp"
	"slices"

	"github.com/lockstep-ccl/lockstep/record"
)

// hangScratch is what a pass with something held up works on.
type hangScratch struct {
	nodes   []waitNode   // nodes of the graph beyond the ranks
	active  []int64      // by rank: last time its program or an operation moved
	inside  []int32      // by rank: operations that it is in
	member  []bool       // by rank: belongs to some communicator
	heldFor []int64      // by rank: for how long it has been in a held operation
	left    []int64      // by rank: when it left its last operation, or, before the first one, when its communicator was seen first
	entered []int64      // by rank: when it entered the first of those that it is in, 0 when it is in none
	away    int64        // the longest that any rank was outside before what it is in now, ns
	full    []int32      // by rank: 1 + the communicator of the operation it is in that all have entered, the one last entered; 0: none
	fullAt  []int64      // by rank: when the last came into that
	failed  []int32      // ranks whose GPUs keep them in an operation
	without []memberGone // communicators with a member that is dead or silent
	starts  []int32
	open    []int32 // members of one communicator
	blind   []int32 // of them, those that nothing says for whom they wait

	joined, outside int // ranks in communicators; of them in no operation

	connNode []int32            // by connection: 1 + its node, 0 when it has none
	pairNode map[[3]int32]int32 // the same for pairs without one, by communicator and members
	unknown  int32              // the node of kind waitUnknown, -1 while there is none
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
func (d *hangs) buildGraph() {
	s := &d.hang
	n := len(d.state)
	d.graph.reset(n)
	s.nodes, s.starts, s.failed = s.nodes[:0], s.starts[:0], s.failed[:0]
	s.active, s.inside = zeroed(s.active, n), zeroed(s.inside, n)
	s.member, s.heldFor = zeroed(s.member, n), zeroed(s.heldFor, n)
	s.left, s.entered, s.away = zeroed(s.left, n), zeroed(s.entered, n), 0
	s.full, s.fullAt = zeroed(s.full, n), zeroed(s.fullAt, n)
	s.joined, s.outside, s.unknown = 0, 0, -1
	s.connNode = zeroed(s.connNode, len(d.ev.Conns))
	clear(s.pairNode)

	for ci := range d.ev.Comms {
		if !d.comms[ci].former {
			d.waitsIn(int32(ci))
		}
	}
	for _, ci := range d.held {
		patience := int64(d.cfg.SuspectAfter)
		if !d.sick {
			patience = d.suspectAfter(&d.comms[ci])
		}
		c := &d.ev.Comms[ci]
		for i := range c.Members {
			m := &c.Members[i]
			if open := d.openFor(m); open >= patience {
				if s.heldFor[m.World] == 0 {
					s.starts = append(s.starts, m.World)
				}
				s.heldFor[m.World] = max(s.heldFor[m.World], open)
			}
		}
	}
	d.abandoned()
	for r := range s.member {
		if s.left[r] > 0 && s.entered[r] > 0 {
			s.away = max(s.away, s.entered[r]-s.left[r])
		}
		if h := &d.ranks[r].mark; !h.open {
			s.active[r] = max(s.active[r], h.seen) // closing a mark is progress
		}
		if s.member[r] && d.state[r] == rankAlive {
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
func (d *hangs) waitsIn(ci int32) {
	s := &d.hang
	c := &d.ev.Comms[ci]
	s.open, s.blind = s.open[:0], s.blind[:0]
	for i := range c.Members {
		m := &c.Members[i]
		w := d.world(m.World)
		if w < 0 {
			continue
		}
		s.active[w] = max(s.active[w], m.EnqueuedAt, m.StartedAt, m.FinishedAt)
		s.member[w] = s.member[w] || inComm(m)
		s.left[w] = max(s.left[w], m.FinishedAt)
		if d.openFor(m) < 0 {
			continue
		}
		s.inside[w]++
		if s.entered[w] == 0 || m.StartedAt < s.entered[w] {
			s.entered[w] = m.StartedAt
		}
		if s.left[w] == 0 {
			s.left[w] = d.comms[ci].since
		}
		switch {
		case m.Coll == record.Group, d.comms[ci].p2p && !said(m):
			if len(d.connsOf(ci)) == 0 {
				s.blind = append(s.blind, int32(i))
			} else {
				d.waitsAtConns(ci, int32(i), d.unknown())
			}
		case m.Coll.PointToPoint():
			d.waitsForPeer(ci, int32(i))
		default:
			s.open = append(s.open, int32(i))
		}
	}
	if len(s.blind) > 0 {
		d.waitsBlind(ci)
	}
	if len(s.open) == 0 {
		return
	}
	if d.comms[ci].p2p {
		d.waitsMixed(ci)
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
		before = d.waitsAt(ci, s.open[i:j], seq, lower, before)
		lower, i = seq, j
	}
}

// waitsAt adds the waits of the members that are in operation seq. It returns
// the node that stands for its missing members, or before when none is missing.
func (d *hangs) waitsAt(ci int32, open []int32, seq, lower uint64, before int32) int32 {
	c := &d.ev.Comms[ci]
	first := &c.Members[open[0]]
	if root := first.Peer; said(first) && first.Coll.Traits().Root == record.RootFrom && before < 0 &&
		root >= 0 && int(root) < len(c.Members) && c.Members[root].Started < seq {
		// Everything comes from the root: the others that are not there matter to nobody yet.
		node := d.missing(ci, open)
		d.blameMember(ci, node, root, first.StartedAt)
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
			node, own = d.missing(ci, open), true
			if before >= 0 {
				d.graph.wait(waitEdge{from: node, to: before, comm: ci})
			}
		}
		d.blameMember(ci, node, int32(i), d.hang.nodes[d.extra(node)].since)
	}
	switch {
	case own:
	case before >= 0:
		for _, i := range open {
			d.graph.wait(waitEdge{from: c.Members[i].World, to: before, comm: ci, since: c.Members[i].StartedAt})
		}
	default:
		d.waitsInside(ci, open, seq)
	}
	return node
}

// waitsMixed handles collectives on a communicator that also carries sends and
// receives: sequence numbers do not compare, so who is in the same kind of
// collective, or left it after this one began, has entered.
func (d *hangs) waitsMixed(ci int32) {
	s := &d.hang
	c := &d.ev.Comms[ci]
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
			node = d.missing(ci, s.open)
		}
		d.blameMember(ci, node, int32(i), since)
	}
	if node < 0 {
		d.waitsInside(ci, s.open, first.Finished+1)
	}
}

// waitsBlind adds the waits of members in sends and receives whose peers are not
// told, in a communicator without connections that could tell (GPUs of one node):
// for all members that are in nothing there. Those that wait elsewhere lead on, and
// who works is soon there.
func (d *hangs) waitsBlind(ci int32) {
	s := &d.hang
	members := d.ev.Comms[ci].Members
	node := int32(-1)
	for i := range members {
		if m := &members[i]; d.openFor(m) >= 0 || !inComm(m) {
			continue
		}
		if node < 0 {
			node = d.missing(ci, s.blind)
		}
		d.blameMember(ci, node, int32(i), d.hang.nodes[d.extra(node)].since)
	}
	if node < 0 {
		d.operation(waitTransfer, ci, s.blind)
	}
}

// missing adds a node for an operation with missing members, and the waits of
// those inside for it.
func (d *hangs) missing(ci int32, open []int32) int32 {
	return d.operation(waitMissing, ci, open)
}

func (d *hangs) operation(kind waitKind, ci int32, open []int32) int32 {
	c := &d.ev.Comms[ci]
	first := &c.Members[open[0]]
	op := waitNode{kind: kind, comm: ci, conn: -1, seq: first.Finished + 1, coll: first.Coll, waiting: len(open), since: never}
	for _, i := range open {
		op.since = min(op.since, c.Members[i].StartedAt)
	}
	if kind == waitTransfer {
		op.known = d.now
		for _, i := range open {
			op.known = min(op.known, d.known(c.Members[i].World))
		}
		for i := range c.Members {
			op.last = max(op.last, c.Members[i].StartedAt, c.Members[i].FinishedAt)
		}
	}
	node := d.addNode(op)
	for _, i := range open {
		m := &c.Members[i]
		d.graph.wait(waitEdge{from: m.World, to: node, comm: ci, since: m.StartedAt})
	}
	return node
}

func (d *hangs) blameMember(ci, node, member int32, since int64) {
	to := d.world(d.ev.Comms[ci].Members[member].World)
	if to < 0 {
		to = d.unknown()
	}
	d.graph.wait(waitEdge{from: node, to: to, comm: ci, since: since})
}

func (d *hangs) unknown() int32 {
	if d.hang.unknown < 0 {
		d.hang.unknown = d.addNode(waitNode{kind: waitUnknown, conn: -1})
	}
	return d.hang.unknown
}

func (d *hangs) addNode(n waitNode) int32 {
	d.hang.nodes = append(d.hang.nodes, n)
	return d.graph.node()
}

// extra returns the index of a graph node in hang.nodes.
func (d *hangs) extra(node int32) int { return int(node) - len(d.state) }

// waitsInside adds the waits of an operation that all have entered: for members
// whose process is no more, else along the connections.
func (d *hangs) waitsInside(ci int32, open []int32, seq uint64) {
	c := &d.ev.Comms[ci]
	sick := int32(-1)
	for i := range c.Members {
		m := &c.Members[i]
		if w := d.world(m.World); w >= 0 && d.state[w].sick() && m.Open() && m.Finished < seq {
			if sick < 0 {
				sick = d.missing(ci, open)
			}
			d.blameMember(ci, sick, int32(i), m.StartedAt)
		}
	}
	if sick >= 0 {
		return
	}
	if i := d.failedInside(ci, seq); i >= 0 {
		others := slices.DeleteFunc(slices.Clone(open), func(o int32) bool { return o == i })
		if len(others) > 0 {
			d.blameMember(ci, d.missing(ci, others), i, c.Members[i].StartedAt)
			d.hang.failed = append(d.hang.failed, c.Members[i].World)
			return
		}
	}
	d.cameIn(ci, open, seq)
	told, posted := false, false
	for _, k := range d.connsOf(ci) {
		conn := &d.ev.Conns[k]
		told = told || conn.RxWaitingSince > 0 || conn.TxBlockedSince > 0
		posted = posted || conn.Outstanding > 0
	}
	if !told && !posted {
		if !d.waitsForStopped(ci, open, seq) {
			d.operation(waitTransfer, ci, open)
		}
		return
	}
	if !told {
		// The transport does not say who waits: what is under way says where.
		for _, k := range d.connsOf(ci) {
			conn := &d.ev.Conns[k]
			if conn.Outstanding > 0 && d.end(conn, conn.Dst) >= 0 && d.end(conn, conn.Src) >= 0 && c.Members[conn.Dst].Finished < seq {
				node := d.stuckConn(k)
				for _, i := range open {
					m := &c.Members[i]
					d.graph.wait(waitEdge{from: m.World, to: node, comm: ci, conn: true, since: m.StartedAt})
				}
			}
		}
		return
	}
	for _, i := range open {
		d.waitsAtConns(ci, i, -1)
	}
}

// waitsForStopped adds the waits of members inside for those that have left the operation
// and are stopped: what the others need may not have left their process yet. It reports
// whether there are any. Of two causes, the one with evidence of its own is told: a job
// without connections has none of a link's.
func (d *hangs) waitsForStopped(ci int32, open []int32, seq uint64) bool {
	node := int32(-1)
	for i := range d.ev.Comms[ci].Members {
		m := &d.ev.Comms[ci].Members[i]
		if w := d.world(m.World); w < 0 || d.state[w] != rankStopped || m.Finished < seq || !inComm(m) {
			continue
		}
		if node < 0 {
			node = d.missing(ci, open)
		}
		d.blameMember(ci, node, int32(i), m.FinishedAt)
	}
	return node >= 0
}

// waitsAtConns adds what a member inside an operation waits for by its
// connections: a receiver for its sender, a sender without credit for its
// receiver, both for the connection when it has what the receiver wants.
// otherwise is what it waits for when no connection says so, -1 for nobody.
func (d *hangs) waitsAtConns(ci, member, otherwise int32) {
	from := d.ev.Comms[ci].Members[member].World
	for _, k := range d.connsOf(ci) {
		conn := &d.ev.Conns[k]
		var since int64
		var other int32
		switch {
		case conn.Dst == member && conn.RxWaitingSince > 0:
			since, other = conn.RxWaitingSince, d.end(conn, conn.Src)
		case conn.Src == member && conn.TxBlockedSince > 0:
			since, other = conn.TxBlockedSince, d.end(conn, conn.Dst)
		default:
			continue
		}
		edge := waitEdge{from: from, to: other, comm: ci, conn: true, since: since}
		switch {
		case other < 0:
			edge.to = d.unknown()
		case d.stuck(conn):
			edge.to = d.stuckConn(k)
		case d.mayHold(conn):
			edge.holds = k + 1
		}
		d.graph.wait(edge)
		otherwise = -1
	}
	if otherwise >= 0 {
		d.graph.wait(waitEdge{from: from, to: otherwise, comm: ci})
	}
}

// waitsForPeer adds what a member in a Send or Recv waits for.
func (d *hangs) waitsForPeer(ci, member int32) {
	c := &d.ev.Comms[ci]
	m := &c.Members[member]
	if m.Peer < 0 || int(m.Peer) >= len(c.Members) || m.Peer == member {
		d.waitsAtConns(ci, member, d.unknown())
		return
	}
	peer := &c.Members[m.Peer]
	w := d.world(peer.World)
	if w < 0 {
		w = d.unknown()
	} else if d.openFor(peer) >= 0 && peer.Peer == member && peer.Coll.PointToPoint() && peer.Coll != record.Group && peer.Coll != m.Coll {
		// Both ends are in: it is up to the connection between them.
		src, dst := member, m.Peer
		if m.Coll == record.Recv {
			src, dst = dst, src
		}
		w = d.pairConn(ci, src, dst)
	}
	edge := waitEdge{from: m.World, to: w, comm: ci, since: m.StartedAt}
	if m.Coll == record.Recv && int(w) < len(d.state) {
		for _, k := range d.connsOf(ci) {
			if conn := &d.ev.Conns[k]; conn.Src == m.Peer && conn.Dst == member {
				if d.stuck(conn) {
					edge.to = d.stuckConn(k)
				} else if d.mayHold(conn) {
					edge.holds = k + 1
				}
			}
		}
	}
	d.graph.wait(edge)
}
