package diagnosis

import (
	"fmt"
	"slices"
)

// This file writes what a person needs to check a hang's verdict: the waits that lead to
// the culprit, and what would have made it another.

// maxChain bounds the waits that are told.
const maxChain = 8

// chain tells the waits from the held-up rank that is farthest from a culprit down to it.
func (d *hangs) chain(culprit int32) []string {
	g := &d.graph
	next := map[int32]int32{culprit: -1} // by node: the edge that leads towards the culprit
	queue := []int32{culprit}
	far := culprit
	for i := 0; i < len(queue); i++ {
		for e := g.in[queue[i]]; e >= 0 && len(queue) < maxPeers; e = g.edges[e].nextIn {
			from := g.edges[e].from
			if _, seen := next[from]; seen {
				continue
			}
			next[from] = e
			queue = append(queue, from)
			if int(from) < len(d.state) && d.hang.heldFor[from] > 0 {
				far = from
			}
		}
	}
	var waits []string
	for n := far; next[n] >= 0 && len(waits) < maxChain; {
		e := g.edges[next[n]]
		to, in := e.to, e
		if int(to) >= len(d.state) && next[to] >= 0 { // an operation: for whom, is the next edge's
			in = g.edges[next[to]]
			to = in.to
		}
		waits = append(waits, d.waitSentence(n, to, &e))
		if to == n {
			break
		}
		n = to
	}
	return waits
}

// waitSentence says for whom or what a node of the graph waits.
func (d *hangs) waitSentence(from, to int32, e *waitEdge) string {
	who := fmt.Sprintf("rank %d", from)
	if int(from) >= len(d.state) {
		who = "all there"
	}
	in := ""
	if e.comm >= 0 && int(e.comm) < len(d.ev.Comms) {
		c := &d.ev.Comms[e.comm]
		in = " on " + c.Name
		if i := slices.IndexFunc(c.Members, func(m Member) bool { return m.World == from }); i >= 0 && c.Members[i].Open() {
			in = fmt.Sprintf(" in %s #%d%s", c.Members[i].Coll, c.Members[i].Finished+1, in)
		}
	}
	if int(to) < len(d.state) {
		return fmt.Sprintf("%s waits%s for rank %d", who, in, to)
	}
	switch x := &d.hang.nodes[d.extra(to)]; x.kind {
	case waitConn:
		return fmt.Sprintf("%s waits%s for what rank %d sends to rank %d", who, in, x.src, x.dst)
	case waitTransfer:
		return fmt.Sprintf("%s waits%s for what all have entered", who, in)
	}
	return fmt.Sprintf("%s waits%s for somebody that nobody has reported", who, in)
}

// counter says what would end a hang, or change who is blamed for it.
func (d *hangs) counter(f *finding, c *cause) string {
	op := fmt.Sprintf("%s #%d on %s", f.Coll, f.Seq, f.CommName)
	first := c.nodes[0].node
	switch c.kind {
	case causeRank:
		switch c.reason {
		case reasonNodeLost:
			return fmt.Sprintf("the agent of node %s reporting again, with its ranks at work", d.nodeName(first))
		case reasonStopped:
			return fmt.Sprintf("rank %d being continued and entering %s", first, op)
		}
		return fmt.Sprintf("rank %d entering %s, or waiting for another", first, op)
	case causeConn:
		x := &d.hang.nodes[d.extra(first)]
		return fmt.Sprintf("a completion between rank %d and rank %d, or one of them leaving %s", x.src, x.dst, op)
	case causeCircle:
		return fmt.Sprintf("rank %d calling what the others wait in", f.Culprits[0].Rank)
	}
	return fmt.Sprintf("bytes moving in %s", op)
}
