package diagnosis

import (
	"cmp"
	"slices"

	"github.com/lockstep-ccl/lockstep/record"
)

// blamed is one node where blame ends.
type blamed struct {
	node  int32
	since int64 // nothing has moved there since
	fell  int64 // when its process fell out, 0 when it did not
}

// onset estimates when the fault began.
func (b *blamed) onset() int64 { return max(b.since, b.fell) }

// cause is a group of them with the same thing wrong: one finding in the making.
type cause struct {
	excuse
	class Class
	kind  causeKind
	nodes []blamed
	comm  int32 // where they are waited for
	edge  int32 // the wait that shows it best, -1 when none
}

type causeKind uint8

const (
	causeRank     causeKind = iota // ranks that have not entered
	causeConn                      // connections that do not deliver
	causeSilent                    // ranks that are in and do not send
	causeTransfer                  // an operation that all have entered, and no more is known
	causeCircle                    // ranks that wait for each other
)

// hangs builds the wait graph of everything open and blames whoever the held
// operations wait for in the end.
func (e *Engine) hangs(found []finding) []finding {
	e.buildGraph()
	if len(e.hang.starts) == 0 {
		return found
	}
	ends, circles := e.graph.blame(e.hang.starts)
	var causes []cause
	lost := true
	for _, n := range ends {
		if c, ok := e.causeAt(n); ok {
			e.mismatched(&c)
			lost = lost && c.reason == reasonNodeLost
			causes = merge(causes, c)
		}
	}
	for _, circle := range circles {
		if c, ok := e.causeOf(circle); ok {
			e.mismatched(&c)
			lost = false
			causes = append(causes, c)
		}
	}
	slices.SortStableFunc(causes, func(a, b cause) int { return cmp.Compare(b.firm, a.firm) })

	// A weaker cause is left out when a firmer one was there before or at about
	// the same time: survivors of a fault look idle.
	firm, firmSince := -1, int64(never)
	for i := range found {
		firm, firmSince = 2, min(firmSince, found[i].Since)
	}
	for i := range causes {
		c := &causes[i]
		switch {
		case c.reason == reasonGone: // told by deaths
		case c.reason == reasonNodeLost && !lost: // what is stale explains nothing that others explain
		case c.firm < firm && firmSince <= c.since+int64(e.cfg.SuspectAfter):
		default:
			if f, ok := e.judge(c); ok && (c.firm == 2 || !e.wake(&f, c.since)) {
				found = append(found, f)
				if c.firm > firm {
					firm, firmSince = c.firm, f.Since
				}
			}
		}
	}
	return found
}

func merge(causes []cause, c cause) []cause {
	for i := range causes {
		x := &causes[i]
		if x.class != c.class || x.kind != c.kind || x.reason != c.reason {
			continue
		}
		x.nodes = append(x.nodes, c.nodes...)
		x.suspect, x.confirm = min(x.suspect, c.suspect), min(x.confirm, c.confirm)
		if c.since < x.since {
			x.since, x.comm, x.edge = c.since, c.comm, c.edge
		}
		return causes
	}
	return append(causes, c)
}

// causeAt says what is wrong with a node where blame ends; false when it is
// nobody's business.
func (e *Engine) causeAt(n int32) (cause, bool) {
	p, cfg := &e.pass, &e.cfg
	c := cause{edge: -1}
	if int(n) >= len(p.state) {
		x := &e.hang.nodes[e.extra(n)]
		usual := e.suspectAfter(&e.comms[x.comm])
		c.class, c.comm = CommunicationHang, x.comm
		c.excuse = excuse{reason: reasonStalled, since: x.since}
		switch x.kind {
		case waitConn:
			c.kind, c.firm = causeConn, 2
			c.suspect, c.confirm = int64(cfg.SuspectAfter), max(int64(cfg.ConfirmAfter), usual)
			if e.young(x.comm) { // it may still be connecting
				c.confirm = max(c.confirm, int64(cfg.StartupPatience)/3)
			}
		case waitTransfer:
			// Nothing tells the connection: too little to act on one of the ranks soon.
			c.kind, c.suspect, c.confirm = causeTransfer, usual, max(int64(cfg.Grace), usual)
			c.since = x.last
		default:
			return c, false
		}
		c.nodes = []blamed{{node: n, since: c.since}}
		return c, true
	}
	first := int64(never)
	for i := e.graph.in[n]; i >= 0; i = e.graph.edges[i].nextIn {
		if w := &e.graph.edges[i]; c.edge < 0 || w.since < first {
			first, c.edge, c.comm = w.since, i, w.comm
		}
	}
	if c.edge < 0 {
		return c, false
	}
	switch {
	case p.state[n] == rankLost:
		if !p.lostNode(p.ev.Ranks[n].Node) {
			return c, false
		}
		c.class = NoncommunicationHang
		c.excuse = excuse{reason: reasonNodeLost, since: e.hang.active[n], suspect: int64(cfg.LostAfter) / 2, confirm: int64(cfg.LostAfter)}
		if m := p.ev.Ranks[n].Mark; paused(m) { // only the agent may be lost, and the pause go on
			c.confirm = max(c.confirm, e.patienceFor(e.markLength(m)))
		}
	case p.state[n] == rankAlive && e.hang.inside[n] > 0:
		c.class, c.kind = CommunicationHang, causeSilent
		usual := e.suspectAfter(&e.comms[c.comm])
		c.excuse = excuse{reason: reasonStalled, firm: 1, since: e.lastTransfer(n, c.comm), suspect: usual, confirm: max(int64(cfg.ConfirmAfter), usual*3/2)}
	default:
		c.class = NoncommunicationHang
		c.excuse = e.excuseOf(n, c.comm)
	}
	c.nodes = []blamed{{node: n, since: c.since, fell: c.fell}}
	return c, true
}

// lastTransfer is when a rank inside an operation last moved a byte.
func (e *Engine) lastTransfer(rank, ci int32) int64 {
	since := e.hang.active[rank]
	for _, k := range e.connsOf(ci) {
		c := &e.pass.ev.Conns[k]
		if e.end(c, c.Src) == rank {
			since = max(since, c.LastPost)
		}
		if e.end(c, c.Dst) == rank {
			since = max(since, c.LastCompletion)
		}
	}
	return since
}

// causeOf says what a circle is: a deadlock of the program when operations
// wait for each other, a stalled transfer when the circle only follows
// connections inside one operation.
func (e *Engine) causeOf(circle []int32) (cause, bool) {
	c := cause{class: CommunicationHang, kind: causeCircle, edge: -1}
	c.excuse = excuse{reason: reasonStalled, firm: 1, suspect: int64(e.cfg.SuspectAfter), confirm: 2 * int64(e.cfg.ConfirmAfter)}
	first := int64(never)
	held := int32(-1)
	for _, n := range circle {
		if int(n) < len(e.pass.state) {
			c.nodes = append(c.nodes, blamed{node: n, since: e.hang.active[n]})
			c.since = max(c.since, e.hang.active[n])
		}
		for i := e.graph.out[n]; i >= 0; i = e.graph.edges[i].nextOut {
			w := &e.graph.edges[i]
			if _, inside := slices.BinarySearch(circle, w.to); !inside {
				continue
			}
			if w.holds > 0 && (held < 0 || w.since < e.graph.edges[held].since) {
				held = i
			}
			if !w.conn {
				c.class, c.reason, c.confirm = NoncommunicationHang, reasonDeadlock, int64(e.cfg.ConfirmAfter)
			}
			if w.since > 0 && w.since < first {
				first, c.edge, c.comm = w.since, i, w.comm
			}
		}
	}
	if held >= 0 {
		// The circle closes over a connection with bytes on it: they are late,
		// and the sender went on to wait for what their receiver sends next.
		w := e.graph.edges[held]
		node := e.stuckConn(w.holds - 1)
		e.graph.wait(waitEdge{from: w.from, to: node, comm: w.comm, conn: true, since: w.since})
		return e.causeAt(node)
	}
	return c, len(c.nodes) > 0 && c.edge >= 0
}

// judge weighs a cause: how long somebody has been held up by it and it has
// not moved, whichever is shorter, against the patience that it deserves.
func (e *Engine) judge(c *cause) (finding, bool) {
	s := &e.hang
	waited, victims := int64(0), 0
	nodes := make([]int32, len(c.nodes))
	for i, b := range c.nodes {
		nodes[i] = b.node
		if c.kind == causeCircle {
			waited = max(waited, s.heldFor[b.node])
			victims++
		}
	}
	e.graph.upstream(nodes, func(n int32) {
		if int(n) < len(s.heldFor) {
			waited = max(waited, s.heldFor[n])
			victims++
		}
	})
	longest, level, stuck := int64(0), Suspected, c.nodes[:0]
	for _, b := range c.nodes {
		known := e.knownAt(b.node)
		still := min(waited, known-max(b.since, e.resumed))
		if still < c.suspect {
			continue
		}
		stuck = append(stuck, b)
		longest = max(longest, still)
		if still >= c.confirm && known-max(b.fell, e.resumed) >= c.confirm {
			level = Confirmed
		}
	}
	if len(stuck) == 0 || (c.kind == causeCircle && len(stuck) < len(nodes)) {
		return finding{}, false
	}
	c.nodes = stuck
	slices.SortStableFunc(c.nodes, func(a, b blamed) int { return cmp.Compare(a.since, b.since) })
	if c.kind == causeRank && c.firm < 2 && c.reason != reasonNodeLost && e.shared(c.nodes[0].node) {
		return finding{}, false
	}
	f := e.hangFinding(c, victims)
	f.still, f.Level = longest, level
	return f, true
}

// knownAt returns how far the state of a graph node is known.
func (e *Engine) knownAt(n int32) int64 {
	p := &e.pass
	if int(n) < len(p.state) {
		if p.state[n] == rankLost {
			return p.now // only its silence counts
		}
		return p.known(n)
	}
	switch x := &e.hang.nodes[e.extra(n)]; x.kind {
	case waitConn:
		return min(p.known(x.src), p.known(x.dst))
	case waitTransfer:
		return x.known
	}
	return p.now
}

// hangFinding writes a cause up.
func (e *Engine) hangFinding(c *cause, victims int) finding {
	f := finding{hang: true}
	f.Class, f.Victims, f.Since = c.class, victims, c.nodes[0].onset()
	if f.Since == 0 && c.edge >= 0 { // it has never done anything: others wait since then
		f.Since = e.graph.edges[c.edge].since
	}
	f.Seq, f.Coll = e.waitedFor(c)
	f.setComm(&e.pass.ev.Comms[c.comm])
	if c.reason == reasonMismatch {
		e.blameMismatch(&f, c.comm)
		return f
	}
	switch c.kind {
	case causeRank:
		if c.reason == reasonNodeLost {
			for _, b := range c.nodes {
				f.blame(Culprit{Kind: CulpritNode, Rank: -1, Peer: -1, Node: e.pass.nodeName(b.node), Reason: c.reason})
			}
		} else {
			for _, b := range c.nodes {
				f.blame(e.rankCulprit(b.node, c.reason))
			}
		}
		f.soft = c.firm < 2
		e.whyNotEntered(&f, c)
	case causeCircle:
		for _, b := range c.nodes {
			f.blame(e.rankCulprit(b.node, c.reason))
		}
		e.whyCircle(&f, c)
	case causeConn:
		cells := make([]cell, 0, len(c.nodes))
		for _, b := range c.nodes {
			x := &e.hang.nodes[e.extra(b.node)]
			cells = append(cells, cell{src: x.src, dst: x.dst})
		}
		for _, k := range rowOrColumn(cells) {
			k.Node, k.Reason = e.pass.nodeName(max(k.Rank, k.Peer)), c.reason
			if k.Rank >= 0 {
				k.Node = e.pass.nodeName(k.Rank)
			}
			f.blame(k)
		}
		e.whyStalled(&f, c)
	case causeSilent:
		e.blameSilent(&f, c)
		e.whySilent(&f, c)
	case causeTransfer:
		x := &e.hang.nodes[e.extra(c.nodes[0].node)]
		members := e.pass.ev.Comms[x.comm].Members
		for i := range members {
			if e.openFor(&members[i]) >= 0 && members[i].Finished < x.seq {
				f.blame(e.rankCulprit(members[i].World, c.reason))
			}
		}
		e.whyTransfer(&f, c)
	}
	return f
}

// blameSilent blames what a rank inside an operation does not send: the
// connection to the one receiver that waits for it, or all that it sends.
func (e *Engine) blameSilent(f *finding, c *cause) {
	for _, b := range c.nodes {
		var peers []int32
		for i := e.graph.in[b.node]; i >= 0; i = e.graph.edges[i].nextIn {
			if w := &e.graph.edges[i]; w.conn && int(w.from) < len(e.pass.state) && !slices.Contains(peers, w.from) {
				peers = append(peers, w.from)
			}
		}
		k := e.rankCulprit(b.node, c.reason)
		switch len(peers) {
		case 0:
		case 1:
			k.Kind, k.Peer = CulpritConnection, peers[0]
		default:
			k.Kind = CulpritSource
		}
		f.blame(k)
	}
}

func (e *Engine) rankCulprit(rank int32, reason string) Culprit {
	return Culprit{Kind: CulpritRank, Rank: rank, Peer: -1, Node: e.pass.nodeName(rank), Reason: reason}
}

// waitedFor returns the operation that a cause is best seen at.
func (e *Engine) waitedFor(c *cause) (uint64, record.CollKind) {
	n := c.nodes[0].node
	if c.edge >= 0 {
		n = e.graph.edges[c.edge].from
	}
	if int(n) >= len(e.pass.state) {
		x := &e.hang.nodes[e.extra(n)]
		return x.seq, x.coll
	}
	members := e.pass.ev.Comms[c.comm].Members
	for i := range members {
		if m := &members[i]; m.World == n && m.Open() {
			return m.Finished + 1, m.Coll
		}
	}
	return 0, record.CollNone
}

// unformed finds communicators that some members have been joining for long.
// Who is missing is known only when a rank was never seen at all.
func (e *Engine) unformed(found []finding) []finding {
	p := &e.pass
	for ci := range p.ev.Comms {
		h := &e.comms[ci]
		age := p.now - max(h.since, e.resumed)
		if !h.joining || h.former || age < 2*int64(e.cfg.StartupPatience) || len(found) > 0 {
			continue
		}
		f := finding{hang: true, soft: true, still: age}
		f.Class, f.Level, f.Since = NoncommunicationHang, Suspected, h.since
		c := &p.ev.Comms[ci]
		f.setComm(c)
		for i := range c.Members {
			if c.Members[i].State == record.CommJoining {
				f.Victims++
			}
		}
		for r := range p.ev.Ranks {
			if p.state[r] == rankAbsent && len(f.Culprits) < maxCulprits {
				f.blame(e.rankCulprit(int32(r), reasonNotJoined))
			}
		}
		if len(f.Culprits) > 0 {
			e.whyUnformed(&f, age)
			found = append(found, f)
		}
	}
	return found
}
