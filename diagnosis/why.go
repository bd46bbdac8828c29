package diagnosis

import (
	"fmt"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

// This file writes the sentences of Verdict.Why.

func seconds(ns int64) string { return fmt.Sprintf("%.1f s", float64(ns)/1e9) }

func clock(ns int64) string { return time.Unix(0, ns).UTC().Format("15:04:05.000") }

func millis(ns float64) string {
	switch {
	case ns < 1e5:
		return fmt.Sprintf("%.1f µs", ns/1e3)
	case ns < 1e8:
		return fmt.Sprintf("%.1f ms", ns/1e6)
	}
	return fmt.Sprintf("%.0f ms", ns/1e6)
}

func plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

func ranksOf(nodes []blamed) string {
	var b strings.Builder
	for i, n := range nodes {
		if i == maxCulprits {
			fmt.Fprintf(&b, " and %d more", len(nodes)-i)
			break
		}
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%d", n.node)
	}
	return b.String()
}

func (e *Engine) whyNotEntered(f *finding, c *cause) {
	p := &e.pass
	who := "rank " + ranksOf(c.nodes) + " has"
	if len(c.nodes) > 1 {
		who = "ranks " + ranksOf(c.nodes) + " have"
	}
	wait := e.graph.edges[c.edge]
	entered := int64(0)
	if wait.since > 0 {
		entered = p.now - max(wait.since, e.resumed)
	}
	inside := 1
	if int(wait.from) >= len(p.state) {
		inside = e.hang.nodes[e.extra(wait.from)].waiting
	}
	switch {
	case p.state[c.nodes[0].node].sick() && e.hasEntered(c.nodes[0].node, c.comm, f.Seq):
		f.why("%s entered %s #%d on %s and not come out for %s; %s held up", who, f.Coll, f.Seq, f.CommName, seconds(entered), plural(f.Victims, "rank is", "ranks are"))
	case f.Coll == record.Send || f.Coll == record.Recv:
		f.why("%s not come to the other end of rank %d's %s on %s for %s; %s held up", who, wait.from, f.Coll, f.CommName, seconds(entered), plural(f.Victims, "rank is", "ranks are"))
	default:
		f.why("%s not entered %s #%d on %s for %s; %s there, %s held up in all", who, f.Coll, f.Seq, f.CommName, seconds(entered),
			plural(inside, "member waits", "members wait"), plural(f.Victims, "rank is", "ranks are"))
	}
	for _, b := range c.nodes {
		f.why("%s", e.excuseSentence(b, c.reason))
	}
	if f.soft && c.confirm > int64(e.cfg.ConfirmAfter) {
		f.why("held up by this for %s; a pause of this kind (%s) is confirmed as a hang after %s", seconds(min(p.now-c.nodes[0].since, entered)), c.reason, seconds(c.confirm))
	}
}

func (e *Engine) hasEntered(rank, ci int32, seq uint64) bool {
	members := e.pass.ev.Comms[ci].Members
	for i := range members {
		if members[i].World == rank {
			return members[i].Started >= seq
		}
	}
	return false
}

func (e *Engine) excuseSentence(b blamed, reason string) string {
	p := &e.pass
	r := &p.ev.Ranks[b.node]
	name := fmt.Sprintf("rank %d (pid %d on %s)", b.node, r.PID, p.nodeName(b.node))
	last := "since it was last active at " + clock(b.since)
	if b.since == 0 {
		last = "since it started"
	}
	switch {
	case reason == reasonStopped:
		return fmt.Sprintf("%s is stopped (state T) since %s", name, clock(r.ProcAt))
	case reason == reasonDisk:
		return fmt.Sprintf("%s is in uninterruptible sleep (state D) since %s", name, clock(r.ProcAt))
	case reason == reasonGone:
		return fmt.Sprintf("%s is gone since %s and never closed its recorder", name, clock(r.ProcAt))
	case reason == reasonExited:
		return fmt.Sprintf("%s ended in good order at %s while others count on it", name, clock(r.ProcAt))
	case strings.HasPrefix(reason, "xid_"):
		return fmt.Sprintf("%s: its GPU reported Xid %d; nothing %s", name, r.Xid, last)
	case reason == reasonIdle:
		return fmt.Sprintf("%s is alive, uses %.2f cores and does no I/O %s", name, r.CPU, last)
	case reason == reasonComputing:
		return fmt.Sprintf("%s uses %.2f cores and has not called a collective %s", name, r.CPU, last)
	case reason == reasonIO && r.Proc == ProcDisk:
		return fmt.Sprintf("%s reads or writes storage and is in uninterruptible sleep (state D) since %s", name, clock(r.ProcAt))
	case reason == reasonIO:
		return fmt.Sprintf("%s reads or writes storage (%.2f cores) %s", name, r.CPU, last)
	case reason == reasonNodeLost:
		return fmt.Sprintf("%s: its agent is lost, last report at %s", name, clock(p.ev.Nodes[r.Node].LastSeen))
	case reason == reasonUnknown:
		return fmt.Sprintf("rank %d: no agent can see its process; nothing %s", b.node, last)
	}
	return fmt.Sprintf("%s is in its own %s since %s", name, reason, clock(r.MarkAt))
}

func (e *Engine) whyCircle(f *finding, c *cause) {
	f.why("ranks %s wait for each other and for nobody else", ranksOf(c.nodes))
	for _, b := range c.nodes {
		if i := e.graph.out[b.node]; i >= 0 {
			w := &e.graph.edges[i]
			members := e.pass.ev.Comms[w.comm].Members
			for k := range members {
				if m := &members[k]; m.World == b.node && m.Open() {
					f.why("rank %d is in %s #%d on %s for %s", b.node, m.Coll, m.Finished+1, e.pass.ev.Comms[w.comm].Name, seconds(e.pass.now-m.StartedAt))
				}
			}
		}
	}
}

func (e *Engine) whyStalled(f *finding, c *cause) {
	p := &e.pass
	f.why("all that it takes have entered %s #%d on %s; %s held up, and no rank or other connection explains it",
		f.Coll, f.Seq, f.CommName, plural(f.Victims, "rank is", "ranks are"))
	for _, b := range c.nodes {
		x := &e.hang.nodes[e.extra(b.node)]
		if x.conn < 0 {
			f.why("rank %d sends to rank %d and both are in, for %s", x.src, x.dst, seconds(p.now-x.since))
			continue
		}
		k := &p.ev.Conns[x.conn]
		waits := "its receiver is in and gets nothing"
		if k.RxWaitingSince > 0 {
			waits = "its receiver has waited for " + seconds(p.now-k.RxWaitingSince)
		}
		last := "nothing ever completed on it"
		if k.LastCompletion > 0 {
			last = "the last completion was at " + clock(k.LastCompletion)
		}
		if k.TxBlockedSince > 0 && k.Outstanding == 0 {
			f.why("connection %d → %d (%s %s): the sender has had no credit for %s, %s, %s", x.src, x.dst, k.Transport, k.Name, seconds(p.now-k.TxBlockedSince), waits, last)
		} else {
			f.why("connection %d → %d (%s %s): %d bytes posted and not taken, %s, %s", x.src, x.dst, k.Transport, k.Name, k.Outstanding, waits, last)
		}
	}
}

func (e *Engine) whySilent(f *finding, c *cause) {
	f.why("all members have entered %s #%d on %s; %s held up", f.Coll, f.Seq, f.CommName, plural(f.Victims, "rank is", "ranks are"))
	for _, b := range c.nodes {
		f.why("rank %d is inside, waits for nobody and has sent nothing since %s while its receivers wait", b.node, clock(b.since))
	}
}

func (e *Engine) whyTransfer(f *finding, c *cause) {
	x := &e.hang.nodes[e.extra(c.nodes[0].node)]
	f.why("all members have entered %s #%d on %s and %s not come out for %s", x.coll, x.seq, f.CommName, plural(x.waiting, "has", "have"), seconds(e.pass.now-x.since))
	f.why("no connection of %s reports what it waits for: the ranks named are only those inside", f.CommName)
}

func (e *Engine) whyUnformed(f *finding, age int64) {
	f.why("%s been joining %s for %s", plural(f.Victims, "member has", "members have"), f.CommName, seconds(age))
	f.why("%s of the job never been seen", plural(len(f.Culprits), "rank has", "ranks have"))
}

func (e *Engine) whyGone(f *finding, first *dead, n int) {
	f.why("%s", e.excuseSentence(blamed{node: first.rank, since: first.at}, reasonGone))
	if n > 1 {
		f.why("%d ranks died at about the same time", n)
	}
	if f.CommName != "" {
		f.why("of %s, %s on it and %s aborted", f.CommName, plural(first.peers, "live member counts", "live members count"), plural(first.gave, "member has", "members have"))
	}
	if later := e.pass.ended - n; later > 0 {
		f.why("%s ended after it or in good order: not to blame", plural(later, "other rank", "other ranks"))
	}
}

func (e *Engine) whyLate(f *finding, s *slowRank) {
	c := &e.pass.ev.Comms[s.comm]
	if s.alone {
		f.why("rank %d spends %s of its own before an operation, %.1f times the %s of those that do the same work; it has no history yet",
			s.rank, millis(s.own), s.own/max(s.base, 1), millis(s.base))
	} else {
		f.why("rank %d spends %s of its own before an operation, %.1f times its usual %s; the middle rank spends %.1f times",
			s.rank, millis(s.own), s.own/max(s.base, 1), millis(s.base), s.common)
	}
	f.why("in the last window this cost %s; its peers on %s were inside collectives %s longer for it, while it was not",
		millis(s.excess), e.pass.ev.Comms[s.felt].Name, millis(s.growth))
	if s.last > 0 {
		f.why("it entered last in %d of %d sampled collectives of %s", s.last, s.of, c.Name)
	}
	f.why("so for %s, since %s", plural(s.slow, "window", "windows"), clock(s.since))
}

func (e *Engine) whyDelayed(f *finding, pat *pattern, worst *slowConn) {
	p := &e.pass
	if k := &f.Culprits[0]; k.Kind != CulpritConnection {
		f.why("%d connections of %s %s are slow", len(pat.cells), k.Kind, strings.TrimPrefix(key(*k), k.Kind.String()+"/"))
	}
	for i := range e.slowConns {
		s := &e.slowConns[i]
		told := false
		for _, c := range pat.cells {
			told = told || c == s.cell
		}
		if s.level == 0 || !told {
			continue
		}
		c := &p.ev.Conns[s.conn]
		usual := "its usual"
		if s.alone {
			usual = fmt.Sprintf("that of the %s beside it, it has no history yet:", plural(s.peers, "connection", "connections"))
		}
		line := fmt.Sprintf("connection %d → %d (%s %s, %s) takes %s from post to completion", s.cell.src, s.cell.dst, c.Transport, c.Name, p.ev.Comms[s.comm].Name, millis(s.delay))
		if s.base > 0 {
			line += fmt.Sprintf(", %.1f times %s %s", s.delay/s.base, usual, millis(s.base))
		}
		f.why("%s; its receiver waited for bytes on the way in %.0f%% of the looks; its monitor finds %.0f%% of the windows slow, cause %s", line, 100*s.flight, 100*s.share, c.Cause)
	}
	if worst.cost > 0 {
		f.why("members of %s are inside its operations for %.0f%% of the time more than usual", f.CommName, 100*worst.cost)
	}
	f.why("so for %s, since %s", plural(worst.slow, "window", "windows"), clock(worst.since))
}
