package diagnosis

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/lockstep-ccl/lockstep/record"
)

// blamed is one node where blame ends.
type blamed struct {
	node  int32
	since int64 // nothing has moved there since
	fell  int64 // when its process fell out, 0 when it did not

	suspect, confirm int64 // its own patience; 0: the cause's
}

// onset estimates when the fault began.
func (b *blamed) onset() int64 { return max(b.since, b.fell) }

// cause is a group of them with the same thing wrong: one finding in the making.
type cause struct {
	excuse
	class Class
	kind  causeKind
	nodes []blamed
	comm  int32    // where they are waited for
	edge  int32    // the wait that shows it best, -1 when none
	odd   []int32  // of ranks that wait for each other, those that left the order of calls
	calls []string // sentences that show it
}

type causeKind uint8

const (
	causeRank     causeKind = iota // ranks that have not entered
	causeConn                      // connections that do not deliver
	causeSilent                    // ranks that are in and do not send
	causeTransfer                  // an operation that all have entered, and no more is known
	causeCircle                    // ranks that wait for each other
)

// hangs finds who holds up operations that are open for too long. A hang is seen in one
// pass; what is learnt is how long ranks are away that come back.
type hangs struct {
	*view
	graph waitGraph
	hang  hangScratch
	odd   oddMemo
	// absent are ranks that were waited for in the last pass.
	absent []absence
}

func (d *hangs) forget() {
	d.odd.ranks, d.absent = nil, d.absent[:0]
	for i := range d.ranks {
		d.ranks[i].away = false
	}
}

// find builds the wait graph of everything open and blames whoever the held
// operations wait for in the end.
func (d *hangs) find(found []finding) []finding {
	d.welcome()
	if len(d.held) == 0 || slices.ContainsFunc(found, func(f finding) bool { return f.deadLink }) {
		return found
	}
	d.buildGraph()
	if len(d.hang.starts) == 0 {
		return found
	}
	ends, circles := d.graph.blame(d.hang.starts)
	var causes []cause
	lost := true
	for _, n := range ends {
		if c, ok := d.causeAt(n); ok {
			d.mismatched(&c)
			d.whileLinksSeek(&c)
			lost = lost && c.reason == reasonNodeLost
			causes = merge(causes, c)
		}
	}
	for _, circle := range circles {
		if c, ok := d.causeOf(circle); ok {
			d.mismatched(&c)
			d.whileLinksSeek(&c)
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
		d.sentAway(c)
		switch {
		case c.reason == reasonGone: // told by deaths
		case c.reason == reasonNodeLost && !lost: // what is stale explains nothing that others explain
		case c.firm < firm && firmSince <= c.since+int64(d.cfg.SuspectAfter):
		default:
			if f, ok := d.judge(c); ok && (c.firm == 2 || !d.open.wake(&f, c.since)) {
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
func (d *hangs) causeAt(n int32) (cause, bool) {
	cfg := &d.cfg
	c := cause{edge: -1}
	if int(n) >= len(d.state) {
		x := &d.hang.nodes[d.extra(n)]
		usual := d.stalledAfter(&d.comms[x.comm])
		c.class, c.comm = CommunicationHang, x.comm
		c.excuse = excuse{reason: reasonStalled, since: max(x.since, d.lastEntered(x.comm, x.seq, x.coll))}
		switch x.kind {
		case waitConn:
			c.kind, c.firm = causeConn, 2
			c.suspect, c.confirm = int64(cfg.SuspectAfter), max(int64(cfg.ConfirmAfter), usual)
			if d.young(x.comm) { // it may still be connecting
				c.confirm = max(c.confirm, int64(cfg.StartupPatience)/3)
			}
		case waitTransfer:
			// Nothing tells the connection: too little to act on one of the ranks soon.
			c.kind, c.suspect, c.confirm = causeTransfer, usual, max(int64(cfg.Grace), usual)
			c.since = x.last
		default:
			return c, false
		}
		c.nodes = []blamed{{node: n, since: c.since, suspect: c.suspect, confirm: c.confirm}}
		return c, true
	}
	first := int64(never)
	inside := d.state[n] == rankAlive && d.hang.inside[n] > 0
	for i := d.graph.in[n]; i >= 0; i = d.graph.edges[i].nextIn {
		w := &d.graph.edges[i]
		if inside && c.edge >= 0 && d.graph.edges[c.edge].conn != w.conn {
			// What it is inside of and does not send counts, not what it comes to after that.
			if w.conn {
				first, c.edge, c.comm = w.since, i, w.comm
			}
			continue
		}
		if c.edge < 0 || w.since < first {
			first, c.edge, c.comm = w.since, i, w.comm
		}
	}
	if c.edge < 0 {
		return c, false
	}
	switch {
	case d.state[n] == rankLost:
		if !d.lostNode(d.ev.Ranks[n].Node) {
			return c, false
		}
		c.class = NoncommunicationHang
		c.excuse = excuse{reason: reasonNodeLost, since: d.hang.active[n], suspect: int64(cfg.LostAfter) / 2, confirm: int64(cfg.LostAfter)}
		if m := d.ev.Ranks[n].Mark; paused(m) { // only the agent may be lost, and the pause go on
			c.confirm = max(c.confirm, d.patienceFor(d.markLength(m)))
		}
	case slices.Contains(d.hang.failed, n):
		c.class = NoncommunicationHang
		c.excuse = excuse{
			reason: fmt.Sprintf("xid_%d", d.ev.Ranks[n].Xid), firm: 2, since: d.hang.active[n],
			suspect: int64(cfg.SuspectAfter), confirm: int64(cfg.ConfirmAfter),
		}
	case inside:
		d.silentAt(&c, n)
	default:
		c.class = NoncommunicationHang
		c.excuse = d.excuseOf(n, c.comm)
		if c.firm < 2 {
			d.note(n, c.since)
		}
	}
	c.nodes = []blamed{{node: n, since: c.since, fell: c.fell, suspect: c.suspect, confirm: c.confirm}}
	return c, true
}

// causeOf says what a circle is: a deadlock of the program when operations
// wait for each other, a stalled transfer when the circle only follows
// connections inside one operation.
func (d *hangs) causeOf(circle []int32) (cause, bool) {
	c := cause{class: CommunicationHang, kind: causeCircle, edge: -1}
	c.excuse = excuse{reason: reasonStalled, firm: 1, suspect: int64(d.cfg.SuspectAfter), confirm: 2 * int64(d.cfg.ConfirmAfter)}
	first := int64(never)
	held := int32(-1)
	for _, n := range circle {
		if int(n) < len(d.state) {
			c.nodes = append(c.nodes, blamed{node: n, since: d.hang.active[n]})
			c.since = max(c.since, d.hang.active[n])
		}
		for i := d.graph.out[n]; i >= 0; i = d.graph.edges[i].nextOut {
			w := &d.graph.edges[i]
			if _, inside := slices.BinarySearch(circle, w.to); !inside {
				continue
			}
			if w.holds > 0 && (held < 0 || w.since < d.graph.edges[held].since) {
				held = i
			}
			if !w.conn {
				c.class, c.reason, c.confirm = NoncommunicationHang, reasonDeadlock, int64(d.cfg.ConfirmAfter)
			}
			if w.since > 0 && w.since < first {
				first, c.edge, c.comm = w.since, i, w.comm
			}
		}
	}
	if held >= 0 {
		// The circle closes over a connection with bytes on it: they are late,
		// and the sender went on to wait for what their receiver sends next.
		w := d.graph.edges[held]
		node := d.stuckConn(w.holds - 1)
		d.graph.wait(waitEdge{from: w.from, to: node, comm: w.comm, conn: true, since: w.since})
		return d.causeAt(node)
	}
	if c.reason == reasonDeadlock {
		c.odd, c.calls = d.odd.of(d.view, c.nodes)
	} else if c.edge >= 0 && d.openBeside(c.comm, circle) {
		// Others are inside as well, and what comes to one of the circle may come from them: on a ring
		// with one slow connection all the others stand still for most of the time.
		c.confirm = max(c.confirm, int64(d.cfg.Grace))
	}
	return c, len(c.nodes) > 0 && c.edge >= 0
}

// openBeside reports whether members of a communicator that are not of the circle are inside an operation.
func (d *hangs) openBeside(ci int32, circle []int32) bool {
	for i := range d.ev.Comms[ci].Members {
		m := &d.ev.Comms[ci].Members[i]
		if inComm(m) && m.Open() {
			if _, of := slices.BinarySearch(circle, d.world(m.World)); !of {
				return true
			}
		}
	}
	return false
}

// judge weighs a cause: how long somebody has been held up by it and it has
// not moved, whichever is shorter, against the patience that it deserves.
func (d *hangs) judge(c *cause) (finding, bool) {
	s := &d.hang
	waited, victims := int64(0), 0
	nodes := make([]int32, len(c.nodes))
	for i, b := range c.nodes {
		nodes[i] = b.node
		if c.kind == causeCircle {
			waited = max(waited, s.heldFor[b.node])
			victims++
		}
	}
	d.graph.upstream(nodes, func(n int32) {
		if int(n) < len(s.heldFor) {
			waited = max(waited, s.heldFor[n])
			victims++
		}
	})
	longest, level, stuck := int64(0), Suspected, c.nodes[:0]
	var sure []blamed // for as long as their patience lasts
	for _, b := range c.nodes {
		known := d.knownAt(b.node)
		still := min(waited-(d.now-known), known-max(b.since, d.resumed)) // it may have come since
		suspect, confirm := c.suspect, c.confirm
		if b.suspect > 0 {
			suspect, confirm = b.suspect, b.confirm
		}
		if still < suspect {
			continue
		}
		stuck = append(stuck, b)
		longest = max(longest, still)
		if still >= confirm && known-max(b.fell, d.resumed) >= confirm {
			level = Confirmed
			sure = append(sure, b)
		}
	}
	if level == Confirmed && (c.kind == causeSilent || c.kind == causeConn) {
		stuck = sure // what stalls elsewhere as well may have just begun
	}
	if len(stuck) == 0 || (c.kind == causeCircle && len(stuck) < len(nodes)) {
		return finding{}, false
	}
	c.nodes = stuck
	slices.SortStableFunc(c.nodes, func(a, b blamed) int { return cmp.Compare(a.since, b.since) })
	if c.kind == causeRank && c.firm < 2 && c.reason != reasonNodeLost && d.shared(c.nodes[0].node) {
		return finding{}, false
	}
	f := d.hangFinding(c, victims)
	f.Chain, f.Counter = d.chain(c.nodes[0].node), d.counter(&f, c)
	f.still, f.Level = longest, level
	return f, true
}

// knownAt returns how far the state of a graph node is known.
func (d *hangs) knownAt(n int32) int64 {
	if int(n) < len(d.state) {
		if d.state[n] == rankLost {
			return d.now // only its silence counts
		}
		return d.known(n)
	}
	switch x := &d.hang.nodes[d.extra(n)]; x.kind {
	case waitConn:
		return min(d.known(x.src), d.known(x.dst))
	case waitTransfer:
		return x.known
	}
	return d.now
}

// hangFinding writes a cause up.
func (d *hangs) hangFinding(c *cause, victims int) finding {
	f := finding{hang: true}
	f.Class, f.Victims, f.Since = c.class, victims, c.nodes[0].onset()
	if f.Since == 0 && c.edge >= 0 { // it has never done anything: others wait since then
		f.Since = d.graph.edges[c.edge].since
	}
	f.Seq, f.Coll = d.waitedFor(c)
	f.setComm(&d.ev.Comms[c.comm])
	if c.reason == reasonMismatch {
		d.blameMismatch(&f, c.comm, &d.odd)
		return f
	}
	switch c.kind {
	case causeRank:
		if c.reason == reasonNodeLost {
			for _, b := range c.nodes {
				f.blame(Culprit{Kind: CulpritNode, Rank: -1, Peer: -1, Node: d.nodeName(b.node), Reason: c.reason})
			}
		} else {
			d.blameRanks(&f, c)
		}
		f.soft = c.firm < 2
		d.whyNotEntered(&f, c)
	case causeCircle:
		for _, b := range c.nodes {
			if len(c.odd) == 0 || slices.Contains(c.odd, b.node) {
				f.blame(d.rankCulprit(b.node, c.reason))
			}
		}
		if c.reason == reasonDeadlock && len(c.odd) == 0 {
			f.Undetermined = "which of these ranks left the order of calls: they wait for each other, and no majority of their role shows it"
		}
		d.whyCircle(&f, c)
	case causeConn:
		cells := make([]cell, 0, len(c.nodes))
		for _, b := range c.nodes {
			x := &d.hang.nodes[d.extra(b.node)]
			cells = append(cells, cell{src: x.src, dst: x.dst})
		}
		for _, k := range rowOrColumn(cells) {
			k.Node, k.Reason = d.nodeName(max(k.Rank, k.Peer)), c.reason
			if k.Rank >= 0 {
				k.Node = d.nodeName(k.Rank)
			}
			f.blame(k)
		}
		d.whyStalled(&f, c)
	case causeSilent:
		d.blameSilent(&f, c)
		d.whySilent(&f, c)
	case causeTransfer:
		x := &d.hang.nodes[d.extra(c.nodes[0].node)]
		members := d.ev.Comms[x.comm].Members
		for i := range members {
			if d.openFor(&members[i]) >= 0 && members[i].Finished < x.seq {
				f.blame(d.rankCulprit(members[i].World, c.reason))
			}
		}
		d.whyTransfer(&f, c)
	}
	return f
}

// blameRanks blames ranks that have not come, and their node when it is all of it and
// nobody elsewhere.
func (d *hangs) blameRanks(f *finding, c *cause) {
	ranks := make([]int32, len(c.nodes))
	for i := range c.nodes {
		ranks[i] = c.nodes[i].node
	}
	if node, ok := d.wholeNode(ranks); ok {
		f.blame(Culprit{Kind: CulpritNode, Rank: -1, Peer: -1, Node: node, Reason: c.reason})
	}
	for _, r := range ranks {
		f.blame(d.rankCulprit(r, c.reason))
	}
}

// blameSilent blames what a rank inside an operation does not send: the
// connection to the one receiver that waits for it, or all that it sends.
func (d *hangs) blameSilent(f *finding, c *cause) {
	for _, b := range c.nodes {
		var peers []int32
		for i := d.graph.in[b.node]; i >= 0; i = d.graph.edges[i].nextIn {
			if w := &d.graph.edges[i]; w.conn && int(w.from) < len(d.state) && !slices.Contains(peers, w.from) {
				peers = append(peers, w.from)
			}
		}
		k := d.rankCulprit(b.node, c.reason)
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

// waitedFor returns the operation that a cause is best seen at.
func (d *hangs) waitedFor(c *cause) (uint64, record.CollKind) {
	n := c.nodes[0].node
	if c.edge >= 0 && d.graph.edges[c.edge].comm == c.comm {
		n = d.graph.edges[c.edge].from
	}
	if int(n) >= len(d.state) {
		x := &d.hang.nodes[d.extra(n)]
		return x.seq, x.coll
	}
	members := d.ev.Comms[c.comm].Members
	for i := range members {
		if m := &members[i]; m.World == n && m.Open() {
			return m.Finished + 1, m.Coll
		}
	}
	return 0, record.CollNone
}

// forming finds communicators that some members have been joining for long.
// Who is missing is known only when a rank was never seen at all.
type forming struct{ *view }

func (d *forming) forget() {}

func (d *forming) find(found []finding) []finding {
	for ci := range d.ev.Comms {
		h := &d.comms[ci]
		age := d.now - max(h.since, d.resumed)
		if !h.joining || h.former || age < 2*int64(d.cfg.StartupPatience) || len(found) > 0 {
			continue
		}
		f := finding{hang: true, soft: true, still: age}
		f.Class, f.Level, f.Since = NoncommunicationHang, Suspected, h.since
		c := &d.ev.Comms[ci]
		f.setComm(c)
		for i := range c.Members {
			if c.Members[i].State == record.CommJoining {
				f.Victims++
			}
		}
		for r := range d.ev.Ranks {
			if d.state[r] == rankAbsent && len(f.Culprits) < maxCulprits {
				f.blame(d.rankCulprit(int32(r), reasonNotJoined))
			}
		}
		if len(f.Culprits) > 0 {
			d.whyUnformed(&f, age)
			found = append(found, f)
		}
	}
	return found
}
