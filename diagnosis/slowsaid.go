package diagnosis

import (
	"fmt"
	"maps"
	"slices"

	"github.com/lockstep-ccl/lockstep/record"
)

// This file makes findings of slow connections.

// findings reports slow connections, by what they have in common. Those at
// a rank that is late itself are left to that finding.
func (d *slowLinks) findings(found []finding) []finding {
	slow := d.cells()
	if len(slow) == 0 {
		return found
	}
	transports := map[record.Transport]bool{}
	for i := range d.slow {
		if s := &d.slow[i]; slices.Contains(slow, s.cell) {
			transports[d.ev.Conns[s.conn].Transport] = true
		}
	}
	around := d.around(slow, transports)
	patterns := d.betweenNodes(&slow)
	patterns = append(patterns, patternsBeside(slow, around, func(r int32) int32 { return nodeOf(d.ev, r) })...)
	for i := range patterns {
		if f, ok := d.finding(&patterns[i]); ok {
			found = append(found, f)
		}
	}
	return found
}

// cells returns the slow connections that are told. Where both ways between two ranks are, the one comes first on
// which looks clearly see more bytes.
func (d *slowLinks) cells() (slow []cell) {
	var looks []float32
	for i := range d.slow {
		s := &d.slow[i]
		if s.level == 0 || d.lateEnd(s.cell) || d.lateElsewhere(s) {
			continue
		}
		at := slices.Index(slow, s.cell)
		if at < 0 {
			at = len(slow)
			slow, looks = append(slow, s.cell), append(looks, 0)
		}
		looks[at] = max(looks[at], d.conns[s.conn].looks)
	}
	for i, c := range slow {
		if back := slices.Index(slow, cell{c.dst, c.src}); back > i && looks[back] > clearlyMore*looks[i] {
			slow[i], slow[back] = slow[back], slow[i]
			looks[i], looks[back] = looks[back], looks[i]
		}
	}
	return slow
}

// clearlyMore is how many times as many looks are.
const clearlyMore = 2

// around returns what is around slow connections on their transports: all that have an end or a node in
// common with them, and of these the ones that are slow too by the word of their monitors.
func (d *slowLinks) around(slow []cell, transports map[record.Transport]bool) (x surroundings) {
	at := map[cell]bool{}
	add := func(to *[]cell, k cell) {
		if !slices.Contains(slow, k) && !slices.Contains(*to, k) && len(*to) < 4*maxSlow {
			*to = append(*to, k)
		}
	}
	for i := range d.ev.Conns {
		c := &d.ev.Conns[i]
		if c.Comm < 0 || int(c.Comm) >= len(d.ev.Comms) || !transports[c.Transport] || c.Windows == 0 {
			continue
		}
		k := cell{d.end(c, c.Src), d.end(c, c.Dst)}
		again, other := d.blamedAgain(int32(i)), d.notByRTT(int32(i))
		if again && other {
			continue // its monitor and its RTT do not agree: it tells nothing
		}
		again = again || d.besideByRTT(int32(i))
		if at[k] && !again || !slices.ContainsFunc(slow, func(s cell) bool {
			return s.src == k.src || s.dst == k.dst || s.src == k.dst || s.dst == k.src || d.sameNode(s, k)
		}) {
			continue
		}
		if !at[k] {
			at[k] = true
			x.all = append(x.all, k)
		}
		if again {
			add(&x.beside, k)
		}
		if slices.ContainsFunc(slow, func(s cell) bool { return s.src == k.src || s.dst == k.dst }) && d.blamedLong(int32(i)) {
			add(&x.lasting, k)
		}
	}
	return x
}

// finding writes a pattern up; false when none of its connections is told.
func (d *slowLinks) finding(pat *pattern) (f finding, ok bool) {
	f = d.ofPattern(pat)
	f.Since = never
	var worst *slowConn
	affected := map[int32]bool{}
	for i := range d.slow {
		s := &d.slow[i]
		if s.level == 0 || !slices.Contains(pat.cells, s.cell) {
			continue
		}
		f.Level, f.Since = max(f.Level, s.level), min(f.Since, s.since)
		affected[s.comm] = true
		if worst == nil || s.worse(worst) {
			worst = s
		}
	}
	for ci := range affected {
		f.Victims = max(f.Victims, len(d.ev.Comms[ci].Members))
	}
	if worst == nil {
		return f, false
	}
	c := &d.ev.Comms[worst.comm]
	f.setComm(c)
	f.lastOf(c)
	d.whyDelayed(&f, pat, worst)
	return f, true
}

// ofPattern begins the finding of slow connections that have something in common.
func (v *view) ofPattern(pat *pattern) (f finding) {
	f.Class = CommunicationSlow
	for _, k := range pat.culprits {
		k.Reason = reasonNetwork
		if k.Kind == CulpritNode {
			k.Node, k.Rank = v.ev.Nodes[k.Rank].Name, -1
		} else {
			k.Node = v.nodeName(k.Rank)
		}
		f.blame(k)
	}
	f.ordered = len(pat.culprits) == 1
	if pat.two[1] > 0 {
		f.Undetermined = fmt.Sprintf("whether it is %s, %s or what connects them: what is slow is between these two, and what they have with others tells nothing", v.ev.Nodes[pat.two[0]].Name, v.ev.Nodes[pat.two[1]].Name)
	}
	return f
}

// lateEnd reports whether an end of a connection is told to be late itself.
func (d *slowLinks) lateEnd(at cell) bool {
	late := func(x slowRank) bool { return x.level > 0 && (x.rank == at.src || x.rank == at.dst) }
	return slices.ContainsFunc(d.stragglers.slow, late) || slices.ContainsFunc(d.drags.slow, late) ||
		slices.ContainsFunc(d.arrivals.late, func(x lateRank) bool { return x.rank == at.src || x.rank == at.dst })
}

// lateElsewhere reports whether a slow connection on which no bytes are seen is one of ranks that wait for
// another one, whose lateness explains what the job takes longer: in pipelines what is sent to such
// ranks is taken late.
func (d *slowLinks) lateElsewhere(s *slowConn) bool {
	if s.flight >= seenFlight || d.drags.windows < horizons[0] {
		return false
	}
	small := d.cfg.SlowShare / 4
	if d.drags.unexplained < small && int(s.comm) < len(d.drags.grown) && float64(d.drags.grown[s.comm]) < small {
		told := func(x slowRank) bool { return x.level > 0 } // what it spends explains it, and no transfer takes longer
		return len(d.arrivals.late) > 0 || slices.ContainsFunc(d.stragglers.slow, told) || slices.ContainsFunc(d.drags.slow, told)
	}
	return slices.ContainsFunc(d.arrivals.late, func(x lateRank) bool { return d.drags.slower(horizons[0])-x.cost < small })
}

// seenFlight is the share of the looks that see bytes on their way to a receiver that waits.
const seenFlight = 0.1

// betweenNodes takes those out of slow that are between two nodes, of a transport that is
// slow everywhere.
func (d *slowLinks) betweenNodes(slow *[]cell) (together []pattern) {
	for _, t := range slices.Sorted(maps.Keys(d.between)) {
		var p pattern
		*slow = slices.DeleteFunc(*slow, func(x cell) bool {
			if !slices.ContainsFunc(d.slow, func(s slowConn) bool { return s.cell == x && d.ev.Conns[s.conn].Transport == t }) {
				return false
			}
			p.cells = append(p.cells, x)
			p.culprits = append(p.culprits, Culprit{Kind: CulpritConnection, Rank: x.src, Peer: x.dst})
			return true
		})
		if len(p.cells) > 0 {
			p.two = d.between[t]
			together = append(together, p)
		}
	}
	return together
}

func (v *view) sameNode(a, b cell) bool {
	ev := v.ev
	for _, x := range []int32{a.src, a.dst} {
		for _, y := range []int32{b.src, b.dst} {
			if n := nodeOf(ev, x); n >= 0 && n == nodeOf(ev, y) {
				return true
			}
		}
	}
	return false
}

// lastOf names a communicator's latest collective: the one worth a trace.
func (f *finding) lastOf(c *Comm) {
	for i := range c.Members {
		if m := &c.Members[i]; m.Finished > f.Seq {
			f.Seq, f.Coll = m.Finished, m.Coll
		}
	}
}
