package diagnosis

import "github.com/lockstep-ccl/lockstep/record"

// This file says what does not move inside operations, and since when.

// lastEntered is when the last of a communicator's members came into an operation:
// what holds it up from then on is not that somebody is missing. Where nobody can be
// further without those who are said to be inside, their reports are late, and it is now.
func (d *hangs) lastEntered(ci int32, seq uint64, coll record.CollKind) int64 {
	last := int64(0)
	if d.comms[ci].p2p {
		return last // its operations are not of all
	}
	members := d.ev.Comms[ci].Members
	for i := range members {
		m := &members[i]
		switch {
		case m.Started < seq || !inComm(m):
		case m.Finished <= seq:
			last = max(last, m.StartedAt)
		case coll.Synchronizes():
			return d.now
		}
	}
	return last
}

// cameIn takes down for the members of an operation that all have entered when that was so: until
// then they waited for the last of them, and so did who waits for them elsewhere.
func (d *hangs) cameIn(ci int32, open []int32, seq uint64) {
	s, members := &d.hang, d.ev.Comms[ci].Members
	last := d.lastEntered(ci, seq, members[open[0]].Coll)
	for _, i := range open {
		last = max(last, members[i].StartedAt)
	}
	for _, i := range open {
		if w := members[i].World; s.full[w] == 0 || last > s.fullAt[w] {
			s.full[w], s.fullAt[w] = ci+1, last
		}
	}
}

// silentAt makes a cause of a rank that is inside an operation that all have entered and waits for
// nobody. Others may wait for it in another communicator: what it is in holds them up all the same.
func (d *hangs) silentAt(c *cause, n int32) {
	cfg := &d.cfg
	if full := d.hang.full[n]; full > 0 && !d.graph.edges[c.edge].conn {
		c.comm = full - 1
	}
	usual := d.stalledAfter(&d.comms[c.comm])
	c.class, c.kind = CommunicationHang, causeSilent
	c.excuse = excuse{
		reason: reasonStalled, firm: 1, since: max(d.lastTransfer(n, c.comm), d.hang.fullAt[n]),
		suspect: usual, confirm: max(int64(cfg.ConfirmAfter), usual*3/2),
	}
	if d.young(c.comm) { // nothing tells yet how long it takes to send: of thousands of ranks that start, some are late
		c.confirm = max(c.confirm, int64(cfg.StartupPatience)/3)
	}
}

// lastTransfer is when a rank inside an operation last moved a byte.
func (d *hangs) lastTransfer(rank, ci int32) int64 {
	since := d.hang.active[rank]
	for _, k := range d.connsOf(ci) {
		c := &d.ev.Conns[k]
		if d.end(c, c.Src) == rank {
			since = max(since, c.LastPost)
		}
		if d.end(c, c.Dst) == rank {
			since = max(since, c.LastCompletion)
		}
	}
	return since
}

// stuck reports whether a connection does not deliver: it holds what its
// receiver waits for, or both its ends wait for each other, or its sender has
// left the operation that the receiver is still in. Only a sender that is in an
// operation of the communicator itself knows what has been taken.
func (d *hangs) stuck(c *Conn) bool {
	if c.RxWaitingSince == 0 || !d.bothAlive(c) {
		return false
	}
	members := d.ev.Comms[c.Comm].Members
	src, dst := &members[c.Src], &members[c.Dst]
	p2p, inside := d.comms[c.Comm].p2p, d.openFor(src) >= 0
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
func (d *hangs) mayHold(c *Conn) bool {
	return c.RxWaitingSince > 0 && c.Outstanding > 0 && d.bothAlive(c)
}

func (d *hangs) stuckConn(k int32) int32 {
	c, node := &d.ev.Conns[k], &d.hang.connNode[k]
	if *node == 0 {
		members := d.ev.Comms[c.Comm].Members
		src, m := &members[c.Src], &members[c.Dst]
		// The receiver may have waited for the sender to come first.
		since := max(c.RxWaitingSince, c.LastCompletion, src.StartedAt, m.StartedAt)
		if dst := d.end(c, c.Dst); dst >= 0 && c.LastPost > d.heard(dst) {
			since = max(since, c.LastPost) // of these bytes the receiver has not told yet: they may have come
		}
		*node = 1 + d.addNode(waitNode{
			kind: waitConn, comm: c.Comm, conn: k, src: d.end(c, c.Src), dst: d.end(c, c.Dst), seq: m.Finished + 1, coll: m.Coll,
			since: since,
		})
	}
	return *node - 1
}

// pairConn is the node of the connection between two matched ends.
func (d *hangs) pairConn(ci, src, dst int32) int32 {
	for _, k := range d.connsOf(ci) {
		if c := &d.ev.Conns[k]; c.Src == src && c.Dst == dst {
			return d.stuckConn(k)
		}
	}
	id := [3]int32{ci, src, dst}
	node, ok := d.hang.pairNode[id]
	if !ok {
		members := d.ev.Comms[ci].Members
		m := &members[dst]
		node = d.addNode(waitNode{
			kind: waitConn, comm: ci, conn: -1, src: members[src].World, dst: m.World,
			seq: m.Finished + 1, coll: m.Coll, since: max(m.StartedAt, members[src].StartedAt),
		})
		if d.hang.pairNode == nil {
			d.hang.pairNode = map[[3]int32]int32{}
		}
		d.hang.pairNode[id] = node
	}
	return node
}
