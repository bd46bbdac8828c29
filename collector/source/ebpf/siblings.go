package ebpf

import (
	"cmp"
	"slices"
)

// siblings are a parent's members on this node, and what came of one of its splits.
type siblings struct {
	parent   uint64
	nth      uint32
	children map[uint64][]*member // by the new communicator's id
}

// member is one process's part in a split.
type member struct {
	r      *rank
	e      *entry // the new communicator
	parent int32  // rank in the one that it was split from
}

// place finds rank and size of communicators that ncclCommSplit made, for parents of which all members are
// on this node: of each its color and its key are known then, and NCCL orders by key and former rank. (Of others,
// memory.go has to look at NCCL's own structure.) A look is no snapshot: what was there in full at the look before
// has all its children in this one.
func (s *Source) place(byPID map[int][]*entry, now int64) {
	parents := map[uint64][]*member{}
	splits := map[[2]uint64]*siblings{}
	for pid, entries := range byPID {
		r := s.ranks[pid]
		for _, e := range entries {
			if e.key.Comm&joiningKey != 0 || e.Id == 0 {
				continue
			}
			if rank, size := r.placeOf(e); rank >= 0 && size > 0 {
				parents[e.Id] = append(parents[e.Id], &member{r: r, e: e, parent: rank})
			}
		}
	}
	for pid, entries := range byPID {
		for _, e := range entries {
			if e.key.Comm&joiningKey != 0 || e.Parent == 0 || e.Id == 0 || e.Nth == 0 {
				continue
			}
			key := [2]uint64{e.Parent, uint64(e.Nth)}
			x := splits[key]
			if x == nil {
				x = &siblings{parent: e.Parent, nth: e.Nth, children: map[uint64][]*member{}}
				splits[key] = x
			}
			r := s.ranks[pid]
			if i := slices.IndexFunc(parents[e.Parent], func(m *member) bool { return m.r == r }); i >= 0 {
				x.children[e.Id] = append(x.children[e.Id], &member{r: r, e: e, parent: parents[e.Parent][i].parent})
			}
		}
	}
	ready := map[[2]uint64]bool{}
	for key, x := range splits {
		if !complete(parents[x.parent], x.nth) {
			continue
		}
		ready[key] = true
		if !s.ready[key] {
			continue
		}
		for _, members := range x.children {
			slices.SortFunc(members, func(a, b *member) int { return cmp.Or(cmp.Compare(a.e.Key, b.e.Key), cmp.Compare(a.parent, b.parent)) })
			for i, m := range members {
				if m.e.Size < 0 {
					m.r.looked[m.e.key.Comm] = &looked{created: m.e.Created, rank: int32(i), size: int32(len(members)), at: now, times: maxLooks}
				}
			}
		}
	}
	s.ready = ready
}

// complete reports whether all members of a communicator are here, each once, and through with its nth split.
func complete(members []*member, nth uint32) bool {
	if len(members) == 0 {
		return false
	}
	seen := map[int32]bool{}
	for _, m := range members {
		_, size := m.r.placeOf(m.e)
		if int(size) != len(members) || seen[m.parent] || m.e.Settled < nth {
			return false
		}
		seen[m.parent] = true
	}
	return true
}

// placeOf is what is known of a communicator by now: from its making, or found out since.
func (r *rank) placeOf(e *entry) (rank, size int32) {
	if l := r.looked[e.key.Comm]; e.Size < 0 && l != nil && l.created == e.Created {
		return l.rank, l.size
	}
	return e.Rank, e.Size
}
