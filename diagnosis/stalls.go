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

// entered is lastEntered of the operation that a rank is in.
func (d *hangs) entered(rank, ci int32) int64 {
	members := d.ev.Comms[ci].Members
	for i := range members {
		if m := &members[i]; m.World == rank {
			return d.lastEntered(ci, m.Finished+1, m.Coll)
		}
	}
	return 0
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
		*node = 1 + d.addNode(waitNode{
			kind: waitConn, comm: c.Comm, conn: k, src: d.end(c, c.Src), dst: d.end(c, c.Dst), seq: m.Finished + 1, coll: m.Coll,
			// The receiver may have waited for the sender to come first.
			since: max(c.RxWaitingSince, c.LastCompletion, src.StartedAt, m.StartedAt),
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
