package replay

import (
	"errors"
	"fmt"
	"slices"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// Limits bound what a recording may make its reader keep; the defaults are those of
// a master (collector/master.Limits). Zero fields take them.
type Limits struct {
	Nodes   int // 16,384
	Ranks   int // 131,072
	Comms   int // 65,536
	Members int // of all communicators together; 1,048,576
	Conns   int // 524,288
	Cells   int // of all arrivals together (collectives × members); 1,048,576
}

// maxArrivals bounds arrivals by number.
const maxArrivals = 4096

func (l Limits) withDefaults() Limits {
	def := func(v *int, d int) {
		if *v <= 0 {
			*v = d
		}
	}
	def(&l.Nodes, 1<<14)
	def(&l.Ranks, 1<<17)
	def(&l.Comms, 1<<16)
	def(&l.Members, 1<<20)
	def(&l.Conns, 1<<19)
	def(&l.Cells, 1<<20)
	return l
}

// state is Evidence as flat tables, which is how it travels.
type state struct {
	job      string
	now      int64
	paused   bool
	nodes    []diagnosis.Node
	ranks    []diagnosis.Rank
	comms    []comm
	members  []diagnosis.Member // of all comms, one after the other
	conns    []diagnosis.Conn
	arrivals []arrival
	starts   []int64 // of all arrivals, one after the other
	ends     []int64

	calls []diagnosis.Call // what ranks' Calls point into, in a copy
}

type comm struct {
	id   uint64
	name string
	size int32
}

type arrival struct {
	comm         int32
	seq          uint64
	coll         record.CollKind
	starts, ends int32
}

// copyFrom takes a copy of ev that shares nothing with it.
func (s *state) copyFrom(ev *diagnosis.Evidence) {
	s.job, s.now, s.paused = ev.Job, ev.Now, ev.Paused
	s.nodes = append(s.nodes[:0], ev.Nodes...)
	s.conns = append(s.conns[:0], ev.Conns...)
	s.ranks = append(s.ranks[:0], ev.Ranks...)
	calls := 0
	for i := range s.ranks {
		calls += len(s.ranks[i].Calls)
	}
	s.calls = slices.Grow(s.calls[:0], calls)
	for i := range s.ranks {
		if r := &s.ranks[i]; r.Calls != nil {
			from := len(s.calls)
			s.calls = append(s.calls, r.Calls...)
			r.Calls = s.calls[from:len(s.calls):len(s.calls)]
		}
	}
	s.comms, s.members = s.comms[:0], s.members[:0]
	for i := range ev.Comms {
		c := &ev.Comms[i]
		s.comms = append(s.comms, comm{c.ID, c.Name, int32(len(c.Members))})
		s.members = append(s.members, c.Members...)
	}
	s.arrivals, s.starts, s.ends = s.arrivals[:0], s.starts[:0], s.ends[:0]
	for i := range ev.Arrivals {
		a := &ev.Arrivals[i]
		s.arrivals = append(s.arrivals, arrival{a.Comm, a.Seq, a.Coll, int32(len(a.Start)), int32(len(a.End))})
		s.starts = append(s.starts, a.Start...)
		s.ends = append(s.ends, a.End...)
	}
}

// view makes ev show the state, without copying the tables.
func (s *state) view(ev *diagnosis.Evidence) {
	ev.Job, ev.Now, ev.Paused = s.job, s.now, s.paused
	ev.Nodes, ev.Ranks, ev.Conns = s.nodes, s.ranks, s.conns
	ev.Comms = ev.Comms[:0]
	from := 0
	for i := range s.comms {
		c := &s.comms[i]
		to := from + int(c.size)
		ev.Comms = append(ev.Comms, diagnosis.Comm{ID: c.id, Name: c.name, Members: s.members[from:to:to]})
		from = to
	}
	ev.Arrivals = ev.Arrivals[:0]
	start, end := 0, 0
	for i := range s.arrivals {
		a := &s.arrivals[i]
		s1, e1 := start+int(a.starts), end+int(a.ends)
		ev.Arrivals = append(ev.Arrivals, diagnosis.Arrival{Comm: a.comm, Seq: a.seq, Coll: a.coll, Start: s.starts[start:s1:s1], End: s.ends[end:e1:e1]})
		start, end = s1, e1
	}
}

// reset empties the tables.
func (s *state) reset() {
	clear(s.ranks) // they point to calls
	s.nodes, s.ranks, s.comms, s.members = s.nodes[:0], s.ranks[:0], s.comms[:0], s.members[:0]
	s.conns, s.arrivals, s.starts, s.ends = s.conns[:0], s.arrivals[:0], s.starts[:0], s.ends[:0]
}

// shape is how long the tables are.
type shape struct {
	nodes, ranks, comms, members, conns, arrivals, starts, ends int
}

func (s *state) shape() shape {
	return shape{len(s.nodes), len(s.ranks), len(s.comms), len(s.members), len(s.conns), len(s.arrivals), len(s.starts), len(s.ends)}
}

func (s *state) resize(to shape) {
	s.nodes = resized(s.nodes, to.nodes)
	s.ranks = resized(s.ranks, to.ranks)
	s.comms = resized(s.comms, to.comms)
	s.members = resized(s.members, to.members)
	s.conns = resized(s.conns, to.conns)
	s.arrivals = resized(s.arrivals, to.arrivals)
	s.starts = resized(s.starts, to.starts)
	s.ends = resized(s.ends, to.ends)
}

func resized[T any](t []T, n int) []T {
	old := len(t)
	if n <= old {
		clear(t[n:])
		return t[:n]
	}
	t = slices.Grow(t, n-old)[:n]
	clear(t[old:])
	return t
}

func (l *Limits) check(to shape) error {
	for _, t := range []struct {
		what     string
		n, limit int
	}{
		{"nodes", to.nodes, l.Nodes}, {"ranks", to.ranks, l.Ranks}, {"communicators", to.comms, l.Comms}, {"members", to.members, l.Members},
		{"connections", to.conns, l.Conns}, {"arrivals", to.arrivals, maxArrivals}, {"cells of arrivals", max(to.starts, to.ends), l.Cells},
	} {
		if t.n > t.limit {
			return fmt.Errorf("%d %s, at most %d are read", t.n, t.what, t.limit)
		}
	}
	return nil
}

// valid reports whether the tables fit together as those of a master do, so that an
// engine can be given them.
func (s *state) valid() error {
	members := 0
	for i := range s.comms {
		n := int(s.comms[i].size)
		if n < 0 || n > len(s.members) {
			return errShape
		}
		members += n
	}
	if members != len(s.members) {
		return errShape
	}
	for i := range s.ranks {
		if n := s.ranks[i].Node; n < -1 || int(n) >= len(s.nodes) {
			return fmt.Errorf("rank %d is on node %d of %d", i, n, len(s.nodes))
		}
	}
	for i := range s.members {
		if w := s.members[i].World; w < -1 || int(w) >= len(s.ranks) {
			return fmt.Errorf("a member is rank %d of %d", w, len(s.ranks))
		}
	}
	for i := range s.conns {
		k := &s.conns[i]
		if k.Comm < 0 || int(k.Comm) >= len(s.comms) || !within(k.Src, s.comms[k.Comm].size) || !within(k.Dst, s.comms[k.Comm].size) {
			return fmt.Errorf("connection %d is of no communicator's members", i)
		}
	}
	starts, ends := 0, 0
	for i := range s.arrivals {
		a := &s.arrivals[i]
		if a.comm < 0 || int(a.comm) >= len(s.comms) || a.starts != s.comms[a.comm].size || a.ends != a.starts {
			return fmt.Errorf("arrival %d is of no communicator's members", i)
		}
		starts, ends = starts+int(a.starts), ends+int(a.ends)
	}
	if starts != len(s.starts) || ends != len(s.ends) {
		return errShape
	}
	return nil
}

var errShape = errors.New("tables that do not fit together")

func within(i, n int32) bool { return i >= 0 && i < n }

// moved compares two lists of communicators: from tells of each of cur which one of
// old it was, -1 for a new one. ok is false when they are the same as far as both go,
// so that there is nothing to move.
func moved(old, cur []comm) (from []int32, ok bool) {
	same := func(a, b *comm) bool { return a.id == b.id && a.size == b.size }
	n := 0
	for n < len(old) && n < len(cur) && same(&old[n], &cur[n]) {
		n++
	}
	if n == len(old) {
		return nil, false
	}
	at := make(map[uint64]int32, len(old))
	for i := len(old) - 1; i >= 0; i-- {
		at[old[i].id] = int32(i)
	}
	from = make([]int32, len(cur))
	for i := range cur {
		from[i] = -1
		if o, ok := at[cur[i].id]; ok && same(&old[o], &cur[i]) {
			from[i] = o
			delete(at, cur[i].id) // an index is used once
		}
	}
	return from, true
}

// move rearranges the communicators; those that are left out take their members,
// connections and arrivals with them, the others' follow in the order that they had.
func (s *state) move(from []int32) error {
	to := make([]int32, len(s.comms))
	for i := range to {
		to[i] = -1
	}
	offset := make([]int, len(s.comms))
	sum := 0
	for i := range s.comms {
		offset[i] = sum
		if sum += int(s.comms[i].size); s.comms[i].size < 0 || sum > len(s.members) {
			return errShape
		}
	}
	comms := make([]comm, len(from))
	var members []diagnosis.Member
	for i, f := range from {
		if f < -1 || int(f) >= len(s.comms) || f >= 0 && to[f] >= 0 {
			return errors.New("communicators rearranged that are none")
		}
		if f < 0 {
			continue // its size is 0 until its row is read
		}
		to[f] = int32(i)
		comms[i] = s.comms[f]
		members = append(members, s.members[offset[f]:offset[f]+int(comms[i].size)]...)
	}
	conns := s.conns[:0]
	for _, k := range s.conns {
		if within(k.Comm, int32(len(to))) && to[k.Comm] >= 0 {
			k.Comm = to[k.Comm]
			conns = append(conns, k)
		}
	}
	arrivals, starts, ends := s.arrivals[:0], s.starts[:0], s.ends[:0]
	fromStart, fromEnd := 0, 0
	for _, a := range s.arrivals {
		s0, e0 := fromStart, fromEnd
		fromStart, fromEnd = fromStart+int(a.starts), fromEnd+int(a.ends)
		if a.starts < 0 || a.ends < 0 || fromStart > len(s.starts) || fromEnd > len(s.ends) {
			return errShape
		}
		if within(a.comm, int32(len(to))) && to[a.comm] >= 0 {
			a.comm = to[a.comm]
			arrivals = append(arrivals, a)
			starts, ends = append(starts, s.starts[s0:fromStart]...), append(ends, s.ends[e0:fromEnd]...)
		}
	}
	s.comms, s.members, s.conns, s.arrivals, s.starts, s.ends = comms, members, conns, arrivals, starts, ends
	return nil
}

// dropped returns how many arrivals at the front of old are not in cur any more.
func dropped(old, cur []arrival) int {
	if len(old) == 0 || len(cur) == 0 {
		return len(old)
	}
	n := slices.IndexFunc(old, func(a arrival) bool { return a.comm == cur[0].comm && a.seq == cur[0].seq })
	if n < 0 {
		return len(old)
	}
	return n
}

// drop removes n arrivals from the front.
func (s *state) drop(n int) error {
	if n > len(s.arrivals) {
		return errShape
	}
	starts, ends := 0, 0
	for _, a := range s.arrivals[:n] {
		if starts, ends = starts+int(a.starts), ends+int(a.ends); a.starts < 0 || a.ends < 0 || starts > len(s.starts) || ends > len(s.ends) {
			return errShape
		}
	}
	s.arrivals = append(s.arrivals[:0], s.arrivals[n:]...)
	s.starts = append(s.starts[:0], s.starts[starts:]...)
	s.ends = append(s.ends[:0], s.ends[ends:]...)
	return nil
}
