package diagnosis

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/lockstep-ccl/lockstep/record"
)

// reasonMismatch is a rank that called another operation than the others under
// the same sequence number: the program's fault, though all are inside.
const reasonMismatch = "mismatch"

// calling is what a member says its operation is.
type calling struct {
	coll  record.CollKind
	bytes uint64
	root  int32
}

// version is a call with the world ranks that made it.
type version struct {
	calling
	ranks []blamed
}

func (c calling) String() string {
	s := fmt.Sprintf("%s of %d bytes", c.coll, c.bytes)
	if c.root >= 0 {
		s += fmt.Sprintf(" with root %d", c.root)
	}
	return s
}

// called returns the member's operation as far as all members must agree on it.
func called(m *Member) calling {
	c := calling{coll: m.Coll, bytes: m.Bytes, root: -1}
	switch t := m.Coll.Traits(); {
	case t.Varies() && !t.PointToPoint, t.Root != record.RootNone && t.Parted():
		c.bytes = 0
	case t.Root != record.RootNone:
		c.root = m.Peer
	}
	return c
}

// disagreement finds what members of a communicator that are inside mean by the
// highest sequence that any of them has enqueued, when they do not mean the same,
// the commonest first. Those that gave it up for another reason count: who sees a mismatch
// exits, and the rest lose it. Only the last call is told, so those that have enqueued less
// say nothing of it; nil when fewer than two do, or all agree.
func (v *view) disagreement(ci int32) (seq uint64, versions []version) {
	members, p2p := v.ev.Comms[ci].Members, v.comms[ci].p2p
	for i := range members {
		if m := &members[i]; m.inMismatch() && (!p2p || m.State == record.CommAborted) {
			seq = max(seq, m.Enqueued)
		}
	}
	if seq == 0 {
		return 0, nil
	}
	for i := range members {
		m := &members[i]
		means := (m.inMismatch() || m.State == record.CommAborted) && m.Enqueued == seq
		if p2p { // sequences are each rank's own: what failed counts, and the collective that others are inside of
			failed := m.failedLast() && m.Fault != record.ResultOK
			means = (failed || inComm(m) && m.Open() && m.Enqueued == m.Started) && !m.Coll.PointToPoint()
		}
		if !means || v.world(m.World) < 0 {
			continue
		}
		c := called(m)
		if c.coll == record.CollNone {
			continue
		}
		versions = withCaller(versions, c, m.World)
	}
	if len(versions) < 2 {
		if p2p {
			return 0, nil
		}
		if seq, versions = v.disagreementBefore(ci); versions == nil {
			return 0, nil
		}
	}
	slices.SortStableFunc(versions, func(a, b version) int { return cmp.Compare(len(b.ranks), len(a.ranks)) })
	return seq, versions
}

// disagreementBefore compares what members called as the first operation that is open at one
// of them, by the last calls of those that are held up. NCCL's ranks call ahead of their GPUs,
// and a kernel may end with less than another member's wants: then the members' last calls are
// other ones, and who called the wrong operation is past it.
func (v *view) disagreementBefore(ci int32) (seq uint64, versions []version) {
	c := &v.ev.Comms[ci]
	for i := range c.Members {
		if m := &c.Members[i]; inComm(m) && m.Open() && (seq == 0 || m.Finished+1 < seq) {
			seq = m.Finished + 1
		}
	}
	if seq == 0 {
		return 0, nil
	}
	for i := range c.Members {
		world := c.Members[i].World
		if v.world(world) < 0 {
			continue
		}
		calls := v.ev.Ranks[world].Calls
		at := slices.IndexFunc(calls, func(x Call) bool { return x.Comm == c.ID && x.Seq == seq })
		if at < 0 || calls[at].Coll == record.CollNone || calls[at].Coll.Traits().PointToPoint {
			continue
		}
		x := &calls[at]
		versions = withCaller(versions, called(&Member{Coll: x.Coll, Peer: x.Peer, Bytes: x.Bytes}), world)
	}
	if len(versions) < 2 {
		return 0, nil
	}
	return seq, versions
}

// withCaller is versions with one more rank that called c.
func withCaller(versions []version, c calling, world int32) []version {
	k := slices.IndexFunc(versions, func(v version) bool { return v.calling == c })
	if k < 0 {
		k = len(versions)
		versions = append(versions, version{calling: c})
	}
	versions[k].ranks = append(versions[k].ranks, blamed{node: world})
	return versions
}

// inMismatch reports whether the member is in an operation, or was until it was told
// that others mean another one by it.
func (m *Member) inMismatch() bool {
	return inComm(m) && m.Open() || m.State == record.CommAborted && m.Fault == record.ResultMismatch
}

// mismatched turns a hang inside an operation into the program's fault when its
// members do not mean the same operation.
func (d *hangs) mismatched(c *cause) {
	if c.class != CommunicationHang {
		return
	}
	if _, versions := d.disagreement(c.comm); versions != nil {
		c.class, c.reason, c.firm = NoncommunicationHang, reasonMismatch, 2
		c.suspect, c.confirm = int64(d.cfg.SuspectAfter), int64(d.cfg.ConfirmAfter)
		for i := range c.nodes {
			c.nodes[i].suspect, c.nodes[i].confirm = 0, 0
		}
	}
}

// blameMismatch blames whoever differs from most; without a majority whoever left the
// order of calls that others of the same role keep, or everybody.
func (v *view) blameMismatch(f *finding, ci int32, memo *oddMemo) {
	seq, versions := v.disagreement(ci)
	f.Seq, f.Coll = seq, versions[0].coll
	wrong := versions[1:]
	var odd []int32
	var shown []string
	if len(versions[0].ranks) == len(versions[1].ranks) {
		var all []blamed
		for _, x := range versions {
			all = append(all, x.ranks...)
		}
		if wrong = v.outvoted(ci, seq, versions); wrong == nil {
			odd, shown = memo.of(v, all)
			wrong = versions
		}
	}
	if len(wrong) == len(versions) && len(odd) == 0 {
		f.Undetermined = "which of these ranks called what it should not: as many called the one as the other"
		var odd string
		if wrong, odd = v.strangeFirst(ci, wrong); odd != "" {
			shown, f.ordered = append(shown, odd), true
		}
	}
	for _, x := range wrong {
		for _, r := range x.ranks {
			if len(odd) == 0 || slices.Contains(odd, r.node) {
				f.blame(v.rankCulprit(r.node, reasonMismatch))
			}
		}
	}
	for _, s := range shown {
		f.why("%s", s)
	}
	for _, v := range versions {
		f.why("#%d on %s is %s for rank %s", seq, f.CommName, v.calling, ranksOf(v.ranks))
	}
	others := versions[0]
	if slices.ContainsFunc(others.ranks, func(b blamed) bool { return b.node == f.Culprits[0].Rank }) {
		others = versions[1]
	}
	f.Counter = fmt.Sprintf("rank %d calling %s as #%d on %s, as the others do", f.Culprits[0].Rank, others.calling, seq, f.CommName)
	f.why("all members must call the same operations in the same order: the program differs between these ranks")
}

// strangeFirst orders versions of a call: first those of a kind that nobody was seen to end
// there well before, when another was. That is a hint and no more: a job calls some rarely.
func (v *view) strangeFirst(ci int32, versions []version) (ordered []version, why string) {
	kinds := v.comms[ci].kinds
	known := func(x version) bool { return kinds>>(x.coll&31)&1 == 1 }
	ordered = slices.Clone(versions)
	slices.SortStableFunc(ordered, func(a, b version) int { return boolCompare(known(a), known(b)) })
	if first := ordered[0]; !known(first) && known(ordered[len(ordered)-1]) {
		why = fmt.Sprintf("no %s was seen on %s before, and %s was", first.coll, v.ev.Comms[ci].Name, ordered[len(ordered)-1].coll)
	}
	return ordered, why
}

// outvoted returns the versions of a call that communicators which do the same work
// for other ranks contradict, when they agree with one of them.
func (v *view) outvoted(ci int32, seq uint64, versions []version) (wrong []version) {
	if v.comms[ci].p2p {
		return nil // sequences are each rank's own
	}
	votes, right := make([]int, len(versions)), -1
	for k := range v.ev.Comms {
		c := &v.ev.Comms[k]
		if int32(k) == ci || v.comms[k].former || partOf(c) != partOf(&v.ev.Comms[ci]) {
			continue
		}
		for i := range c.Members {
			m := &c.Members[i]
			at := slices.IndexFunc(versions, func(x version) bool { return x.calling == called(m) })
			if at >= 0 && m.Enqueued == seq && v.world(m.World) >= 0 {
				votes[at]++
				right = at
			}
		}
	}
	if right < 0 || slices.ContainsFunc(votes, func(n int) bool { return n > 0 && n != votes[right] }) {
		return nil
	}
	for i, x := range versions {
		if i != right {
			wrong = append(wrong, x)
		}
	}
	return wrong
}

// mismatches finds communicators that ended because their members called different
// operations: the library noticed, and no hang came of it.
type mismatches struct {
	*view
	odd oddMemo
}

func (d *mismatches) forget() { d.odd.ranks = nil }

func (d *mismatches) find(found []finding) []finding {
	if len(found) > 0 {
		return found
	}
	told := d.namings()
	at := slices.IndexFunc(told, func(n naming) bool { return n.why == record.ResultMismatch })
	if at < 0 || d.open.consequence(told[at].at) {
		return found
	}
	n := &told[at]
	f := finding{hang: true, still: d.now - max(n.at, d.resumed)}
	f.Class, f.Level, f.Since = NoncommunicationHang, Suspected, n.at
	if f.still >= int64(d.cfg.GoneAfter) {
		f.Level = Confirmed
	}
	f.setComm(&d.ev.Comms[n.comm])
	members := d.ev.Comms[n.comm].Members
	for i := range members {
		if members[i].State == record.CommAborted {
			f.Victims++
		}
	}
	if _, versions := d.disagreement(n.comm); versions != nil {
		d.blameMismatch(&f, n.comm, &d.odd)
	} else if odd, by := mostNamed(told, n.comm); odd >= 0 {
		f.blame(d.rankCulprit(odd, reasonMismatch))
		f.why("%d ranks gave up %s because rank %d called another operation: rank %s", len(by), f.CommName, odd, ranksOf(by))
	} else {
		f.blame(d.rankCulprit(n.to, reasonMismatch))
		f.blame(d.rankCulprit(n.from, reasonMismatch))
		f.Undetermined = "which of these ranks called what it should not: what they called is not told"
		f.why("rank %d gave up %s at %s because rank %d called another operation", n.from, f.CommName, clock(n.at), n.to)
	}
	return append(found, f)
}

// mostNamed is the rank that several others say called another operation in a communicator, and
// who they are; -1 when none is named by two, or more of them name another one.
func mostNamed(told []naming, comm int32) (odd int32, by []blamed) {
	named := map[int32][]blamed{}
	gaveUp := map[int32]bool{} // who names itself noticed by itself, and others heard that from it
	for _, n := range told {
		if n.comm == comm && n.from == n.to {
			gaveUp[n.to] = true
		}
	}
	for _, n := range told {
		if n.comm == comm && n.why == record.ResultMismatch && !gaveUp[n.to] && !slices.ContainsFunc(named[n.to], func(b blamed) bool { return b.node == n.from }) {
			named[n.to] = append(named[n.to], blamed{node: n.from})
		}
	}
	odd = -1
	most := 1
	for rank, from := range named {
		switch {
		case len(from) > most:
			odd, most = rank, len(from)
		case len(from) == most:
			odd = -1
		}
	}
	if odd < 0 {
		return -1, nil
	}
	return odd, named[odd]
}
