package diagnosis

import (
	"fmt"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

// This file writes the sentences of Verdict.Why for hangs.

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

func (d *hangs) whyNotEntered(f *finding, c *cause) {
	who := "rank " + ranksOf(c.nodes) + " has"
	if len(c.nodes) > 1 {
		who = "ranks " + ranksOf(c.nodes) + " have"
	}
	wait := d.graph.edges[c.edge]
	entered := int64(0)
	if wait.since > 0 {
		entered = d.now - max(wait.since, d.resumed)
	}
	inside := 1
	if int(wait.from) >= len(d.state) {
		inside = d.hang.nodes[d.extra(wait.from)].waiting
	}
	began, ended := d.progressOf(c.nodes[0].node, c.comm)
	switch sick := d.state[c.nodes[0].node].sick(); {
	case sick && ended >= f.Seq && f.Seq > 0:
		f.why("%s left %s #%d on %s %s ago, and %s still inside: what it was to send may not have left its process", who, f.Coll, f.Seq, f.CommName,
			seconds(entered), plural(inside, "member is", "members are"))
	case sick && began >= f.Seq:
		f.why("%s entered %s #%d on %s and not come out for %s; %s held up", who, f.Coll, f.Seq, f.CommName, seconds(entered), plural(f.Victims, "rank is", "ranks are"))
	case f.Coll == record.Send || f.Coll == record.Recv:
		f.why("%s not come to the other end of rank %d's %s on %s for %s; %s held up", who, wait.from, f.Coll, f.CommName, seconds(entered), plural(f.Victims, "rank is", "ranks are"))
	default:
		f.why("%s not entered %s #%d on %s for %s; %s there, %s held up in all", who, f.Coll, f.Seq, f.CommName, seconds(entered),
			plural(inside, "member waits", "members wait"), plural(f.Victims, "rank is", "ranks are"))
	}
	for _, b := range c.nodes {
		f.why("%s", d.excuseSentence(b, c.reason))
		f.whyOffCPU(d.ev, b.node)
	}
	if f.soft && c.confirm > int64(d.cfg.ConfirmAfter) {
		f.why("held up by this for %s; a pause of this kind (%s) is confirmed as a hang after %s", seconds(min(d.now-c.nodes[0].since, entered)), c.reason, seconds(c.confirm))
	}
}

// progressOf returns the last operations that a rank has begun and ended on a communicator.
func (v *view) progressOf(rank, ci int32) (began, ended uint64) {
	members := v.ev.Comms[ci].Members
	for i := range members {
		if members[i].World == rank {
			return members[i].Started, members[i].Finished
		}
	}
	return 0, 0
}

func (v *view) excuseSentence(b blamed, reason string) string {
	s := v.reasonSentence(b, reason)
	if r := &v.ev.Ranks[b.node]; r.Mark == record.MarkDataLoading {
		s += ", by its own word in its data loader since " + clock(r.MarkAt)
	}
	return s
}

func (v *view) reasonSentence(b blamed, reason string) string {
	r := &v.ev.Ranks[b.node]
	name := fmt.Sprintf("rank %d (pid %d on %s)", b.node, r.PID, v.nodeName(b.node))
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
		return fmt.Sprintf("%s is gone since %s%s and never closed its recorder", name, clock(v.endedAt(b.node)), r.Exit.howEnded())
	case reason == reasonExited:
		return fmt.Sprintf("%s ended in good order at %s%s while others count on it", name, clock(v.endedAt(b.node)), r.Exit.howEnded())
	case strings.HasPrefix(reason, "xid_"):
		return fmt.Sprintf("%s: its GPU reported Xid %d; nothing %s", name, r.Xid, last)
	case reason == reasonIdle:
		return fmt.Sprintf("%s is alive, uses %.2f cores and does no I/O %s", name, r.CPU, last)
	case reason == reasonCPU:
		return fmt.Sprintf("%s wants to run and is not let: for %.0f %% of the time it waits for a CPU, for %.0f %% its cgroup's quota holds it back (%.2f cores used) %s",
			name, 100*r.Starved, 100*r.Throttled, r.CPU, last)
	case reason == reasonComputing:
		return fmt.Sprintf("%s uses %.2f cores and has not called a collective %s", name, r.CPU, last)
	case reason == reasonIO && r.Proc == ProcDisk:
		return fmt.Sprintf("%s reads or writes storage and is in uninterruptible sleep (state D) since %s", name, clock(r.ProcAt))
	case reason == reasonIO:
		return fmt.Sprintf("%s reads or writes storage (%.2f cores) %s", name, r.CPU, last)
	case reason == reasonNodeLost:
		return fmt.Sprintf("%s: its agent is lost, last report at %s", name, clock(v.ev.Nodes[r.Node].LastSeen))
	case reason == reasonUnknown:
		return fmt.Sprintf("rank %d: no agent can see its process; nothing %s", b.node, last)
	}
	return fmt.Sprintf("%s is in its own %s since %s", name, reason, clock(r.MarkAt))
}

func (d *hangs) whyCircle(f *finding, c *cause) {
	f.why("ranks %s wait for each other and for nobody else", ranksOf(c.nodes))
	if len(c.odd) > 0 {
		f.why("most ranks of their role make the same calls in the same order, and rank %s another", ranksOf(f.asNodes()))
		for _, s := range c.calls {
			f.why("%s", s)
		}
	}
	for _, b := range c.nodes {
		if i := d.graph.out[b.node]; i >= 0 {
			w := &d.graph.edges[i]
			members := d.ev.Comms[w.comm].Members
			for k := range members {
				if m := &members[k]; m.World == b.node && m.Open() {
					f.why("rank %d is in %s #%d on %s for %s", b.node, m.Coll, m.Finished+1, d.ev.Comms[w.comm].Name, seconds(d.now-m.StartedAt))
				}
			}
		}
	}
}

// asNodes returns the ranks that a finding blames.
func (f *finding) asNodes() []blamed {
	nodes := make([]blamed, len(f.Culprits))
	for i := range f.Culprits {
		nodes[i].node = f.Culprits[i].Rank
	}
	return nodes
}

func (d *hangs) whyStalled(f *finding, c *cause) {
	f.why("all that it takes have entered %s #%d on %s; %s held up, and no rank or other connection explains it",
		f.Coll, f.Seq, f.CommName, plural(f.Victims, "rank is", "ranks are"))
	for _, b := range c.nodes {
		x := &d.hang.nodes[d.extra(b.node)]
		if x.conn < 0 {
			f.why("rank %d sends to rank %d and both are in, for %s", x.src, x.dst, seconds(d.now-x.since))
			continue
		}
		k := &d.ev.Conns[x.conn]
		waits := "its receiver is in and gets nothing"
		if k.RxWaitingSince > 0 {
			waits = "its receiver has waited for " + seconds(d.now-k.RxWaitingSince)
		}
		last := "nothing ever completed on it"
		if k.LastCompletion > 0 {
			last = "the last completion was at " + clock(k.LastCompletion)
		}
		if k.TxBlockedSince > 0 && k.Outstanding == 0 {
			f.why("connection %d → %d (%s): the sender has had no credit for %s, %s, %s", x.src, x.dst, k, seconds(d.now-k.TxBlockedSince), waits, last)
		} else {
			f.why("connection %d → %d (%s): %d bytes posted and not taken, %s, %s", x.src, x.dst, k, k.Outstanding, waits, last)
		}
	}
}

func (d *hangs) whySilent(f *finding, c *cause) {
	f.why("all members have entered %s #%d on %s; %s held up", f.Coll, f.Seq, f.CommName, plural(f.Victims, "rank is", "ranks are"))
	for _, b := range c.nodes {
		f.why("rank %d is inside, waits for nobody and has sent nothing since %s while its receivers wait", b.node, clock(b.since))
	}
}

func (d *hangs) whyTransfer(f *finding, c *cause) {
	x := &d.hang.nodes[d.extra(c.nodes[0].node)]
	f.why("all members have entered %s #%d on %s and %s not come out for %s", x.coll, x.seq, f.CommName, plural(x.waiting, "has", "have"), seconds(d.now-x.since))
	f.why("no connection of %s reports what it waits for: the ranks named are only those inside", f.CommName)
}

func (d *forming) whyUnformed(f *finding, age int64) {
	f.why("%s been joining %s for %s", plural(f.Victims, "member has", "members have"), f.CommName, seconds(age))
	f.why("%s of the job never been seen", plural(len(f.Culprits), "rank has", "ranks have"))
}

func (x *deaths) whyGone(f *finding, all []dead, told []naming) {
	for i := range all {
		reason := reasonGone
		if !all[i].gone {
			reason = reasonExited
		}
		f.why("%s", x.excuseSentence(blamed{node: all[i].rank, since: all[i].at}, reason))
		if i == maxWhy/2 {
			break
		}
	}
	if len(all) > 1 {
		f.why("%d ranks ended at about the same time", len(all))
	}
	first := all[0]
	if f.CommName != "" {
		f.why("of %s, %s on it and %s aborted", f.CommName, plural(first.peers, "live member counts", "live members count"), plural(first.gave, "member has", "members have"))
	}
	x.whyFollowed(f, told)
	if later := x.ended - len(all); later > 0 {
		f.why("%s ended after it or in good order: not to blame", plural(later, "other rank", "other ranks"))
	}
}

// whyFollowed says whom the others named when they gave up, a chain that ends at the culprit.
func (x *deaths) whyFollowed(f *finding, told []naming) {
	for i := range told {
		n := &told[i]
		if n.from == n.to {
			continue
		}
		f.why("rank %d gave up %s at %s: %s, rank %d", n.from, x.ev.Comms[n.comm].Name, clock(n.at), n.why, n.to)
		if i == 2 {
			break
		}
	}
}

// howEnded says how a process ended, by the word of who reaped it.
func (e *Exit) howEnded() string {
	switch {
	case e.By == ExitUnknown:
		return ""
	case e.Signal != 0:
		return fmt.Sprintf(", ended by signal %d", e.Signal)
	}
	return fmt.Sprintf(", with exit status %d", e.Code)
}
