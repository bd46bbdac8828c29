package diagnosis

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/lockstep-ccl/lockstep/record"
)

// This file tells the odd one out of ranks that wait for each other: all ranks of one
// role make the same calls in the same order, so the few that differ from the many have
// left it. What ranks called last says so best; else how far each has come on each
// of its communicators does.

const (
	// maxPeers bounds how many ranks beside those that wait for each other are compared,
	// maxWays how many different ways they may have come.
	maxPeers = 512
	maxWays  = 64
)

// oddMemo is who is odd of some ranks, as of a moment ago.
type oddMemo struct {
	ranks, odd []int32
	why        []string
	at         int64
}

// of tells the odd ones out, anew once a second.
func (o *oddMemo) of(v *view, nodes []blamed) (odd []int32, why []string) {
	ranks := make([]int32, len(nodes))
	for i := range nodes {
		ranks[i] = nodes[i].node
	}
	slices.Sort(ranks)
	if o.ranks == nil || !slices.Equal(ranks, o.ranks) || v.now-o.at >= int64(v.cfg.SuspectAfter) {
		o.ranks, o.at = ranks, v.now
		o.odd, o.why = v.oddOnes(ranks)
	}
	return o.odd, o.why
}

// part is a communicator's place in a rank's program: dp of 16 is dp of 16 on every
// rank, whichever it is.
type part struct {
	name string // without numbers
	size int
	nth  int // of several that look alike
}

// position is how far a rank has come.
type position struct {
	rank  int32
	parts map[part]uint64 // operations entered, by communicator that numbers them for all
	open  map[part]bool
	calls []callOf
	names map[part]string
	alike int // how many have come the same way, itself included; 0 when counted with another
}

// callOf is one call, as ranks of the same role compare it.
type callOf struct {
	part
	calling
	seq uint64
}

func (c callOf) String() string { return fmt.Sprintf("%s #%d on %s", c.coll, c.seq, c.name) }

// partOf names a communicator without the numbers that tell it from those of other ranks.
func partOf(c *Comm) part {
	name := strings.Map(func(r rune) rune {
		if r >= '0' && r <= '9' || strings.ContainsRune(".-_:/ ", r) {
			return -1
		}
		return r
	}, c.Name)
	return part{name: name, size: len(c.Members)}
}

// positions returns where ranks and those that may be their peers have come to, the
// ranks first.
func (v *view) positions(ranks []int32) []position {
	at := make(map[int32]int, len(ranks)+maxPeers)
	var all []position
	add := func(r int32) {
		if _, ok := at[r]; !ok && v.world(r) >= 0 && len(all) < len(ranks)+maxPeers {
			at[r] = len(all)
			all = append(all, position{rank: r, parts: map[part]uint64{}, open: map[part]bool{}, names: map[part]string{}})
		}
	}
	for _, r := range ranks {
		add(r)
	}
	for ci := range v.ev.Comms {
		members := v.ev.Comms[ci].Members
		if v.comms[ci].former || !slices.ContainsFunc(members, func(m Member) bool { return slices.Contains(ranks, m.World) }) {
			continue
		}
		for i := range members {
			add(members[i].World)
		}
	}
	for r := range v.state {
		add(int32(r))
	}
	ids := map[uint64]int{}
	for ci := range v.ev.Comms {
		c := &v.ev.Comms[ci]
		if v.comms[ci].former {
			continue
		}
		ids[c.ID] = ci
		for i := range c.Members {
			m := &c.Members[i]
			k, ok := at[m.World]
			if !ok || m.State == record.CommLeft {
				continue
			}
			p := &all[k]
			key := partOf(c)
			for _, taken := p.names[key]; taken; _, taken = p.names[key] {
				key.nth++
			}
			p.names[key] = c.Name
			if !v.comms[ci].p2p {
				p.parts[key], p.open[key] = m.Started, m.Open()
			}
		}
	}
	for i := range all {
		all[i].calls = v.callsOf(&all[i], ids)
	}
	return all
}

// callsOf returns a rank's last calls as others can compare them.
func (v *view) callsOf(p *position, ids map[uint64]int) []callOf {
	var calls []callOf
	of := v.ev.Ranks[p.rank].Calls
	for i := range of[:min(len(of), MaxCalls)] {
		x := &of[i]
		ci, ok := ids[x.Comm]
		if !ok {
			continue
		}
		c := callOf{part: partOf(&v.ev.Comms[ci]), seq: x.Seq, calling: called(&Member{Coll: x.Coll, Peer: x.Peer, Bytes: x.Bytes})}
		for p.names[c.part] != v.ev.Comms[ci].Name && c.nth < len(p.names) {
			c.nth++
		}
		if v.comms[ci].p2p {
			c.seq = 0 // each rank's own
		}
		if x.Coll.PointToPoint() {
			c.bytes, c.coll = 0, record.Group // neighbours do the opposite, of other sizes
		}
		calls = append(calls, c)
	}
	return calls
}

// samePlace reports whether two ranks have the same communicators to their program.
func samePlace(a, b *position) bool {
	if len(a.names) != len(b.names) {
		return false
	}
	for k := range a.names {
		if _, ok := b.names[k]; !ok {
			return false
		}
	}
	return true
}

// maxStray is how many calls a rank makes at most between leaving the order and being
// stuck for it. Ranks whose calls part before are of different roles: the first stage of
// a pipeline receives less than the others.
const maxStray = 8

// diverge returns where two ranks' calls part, as indices into theirs; ok is false when
// one has only come further than the other, when nothing shows where they meet, and when
// they parted long ago.
func diverge(a, b *position) (i, j int, ok bool) {
	for i = range a.calls {
		if a.calls[i].seq == 0 {
			continue
		}
		if j = slices.Index(b.calls, a.calls[i]); j < 0 {
			continue
		}
		for i < len(a.calls) && j < len(b.calls) && a.calls[i] == b.calls[j] {
			i, j = i+1, j+1
		}
		return i, j, i < len(a.calls) && j < len(b.calls) && len(a.calls)-i <= maxStray && len(b.calls)-j <= maxStray
	}
	return 0, 0, false
}

// differs reports whether a rank cannot have come by the way that another came, by the
// numbers of operations alone: it is further in one place and less far in another, or
// in the same operation with another past.
func differs(a, b *position) bool {
	less, more, same := false, false, false
	for k, n := range a.parts {
		m := b.parts[k]
		less, more = less || n < m, more || n > m
		same = same || n == m && a.open[k] && b.open[k]
	}
	return less && more || same && (less || more)
}

// oddOnes returns which of the ranks have left the order of calls that most of their role
// keep, with sentences that show both; none when that cannot be told.
func (v *view) oddOnes(ranks []int32) (odd []int32, why []string) {
	all := v.positions(ranks)
	n := min(len(ranks), len(all))
	if n < 2 {
		return nil, nil
	}
	all = append(all[:n:n], slices.DeleteFunc(all[n:], func(p position) bool {
		return !slices.ContainsFunc(all[:n], func(r position) bool { return samePlace(&r, &p) })
	})...)
	if told := slices.ContainsFunc(all[:n], func(p position) bool { return len(p.calls) == 0 }); !told {
		odd, ref := minority(all, n, func(a, b *position) bool {
			_, _, parted := diverge(a, b)
			return parted
		})
		if len(odd) > 0 {
			return whoAndWhy(all, odd, func(p *position) []string { return sequences(p, &all[ref]) })
		}
	}
	odd1, ref := minority(all, n, differs)
	return whoAndWhy(all, odd1, func(p *position) []string { return places(p, &all[ref]) })
}

// minority returns which of the first n positions differ from the one that most agree
// with, and that one; none unless these are fewer than those that agree.
func minority(all []position, n int, differ func(a, b *position) bool) (odd []int, ref int) {
	ways := map[string]int{}
	var first []int
	for i := range all {
		way := all[i].way()
		k, ok := ways[way]
		if !ok {
			k, ways[way] = i, i
			first = append(first, i)
		}
		all[i].alike = 0
		all[k].alike++
	}
	if len(first) > maxWays {
		return nil, 0
	}
	best := 0
	for _, i := range first {
		agree := 0
		for _, j := range first {
			if samePlace(&all[i], &all[j]) && !differ(&all[i], &all[j]) {
				agree += all[j].alike
			}
		}
		if agree > best {
			best, ref = agree, i
		}
	}
	for i := range all[:n] {
		if samePlace(&all[i], &all[ref]) && differ(&all[i], &all[ref]) {
			odd = append(odd, i)
		}
	}
	if len(odd) == n || best <= len(odd) || best < 2 {
		return nil, ref
	}
	return odd, ref
}

// way is the same for ranks that have come the same way.
func (p *position) way() string {
	var keys []string
	for k := range p.names {
		keys = append(keys, fmt.Sprint(k, p.parts[k], p.open[k]))
	}
	slices.Sort(keys)
	return fmt.Sprint(keys, p.calls)
}

func whoAndWhy(all []position, odd []int, show func(p *position) []string) (ranks []int32, why []string) {
	for i, k := range odd {
		ranks = append(ranks, all[k].rank)
		if i == 0 {
			why = show(&all[k])
		}
	}
	slices.Sort(ranks)
	return ranks, why
}

// sequences shows the calls of two ranks from before where they part.
func sequences(p, ref *position) []string {
	i, j, _ := diverge(p, ref)
	const before, after = 2, 3
	show := func(x *position, at int) string {
		var said []string
		for k := max(0, at-before); k < min(len(x.calls), at+after); k++ {
			said = append(said, x.calls[k].String())
		}
		return fmt.Sprintf("rank %d called %s", x.rank, strings.Join(said, ", then "))
	}
	return []string{show(p, i), show(ref, j)}
}

// places shows how far two ranks have come.
func places(p, ref *position) []string {
	show := func(x *position) string {
		var keys []part
		for k, n := range x.parts {
			if n != p.parts[k] || n != ref.parts[k] || x.open[k] {
				keys = append(keys, k)
			}
		}
		slices.SortFunc(keys, func(a, b part) int { return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.nth, b.nth)) })
		var said []string
		for _, k := range keys {
			s := "has come to"
			if x.open[k] {
				s = "is in"
			}
			said = append(said, fmt.Sprintf("%s #%d on %s", s, x.parts[k], x.names[k]))
		}
		return fmt.Sprintf("rank %d %s", x.rank, strings.Join(said, " and "))
	}
	return []string{show(p), show(ref)}
}
