package record

// Traits is what is true of a kind of collective, whoever carries it out. This
// table is a collective's one definition: checks of arguments and signatures,
// staging on GPUs, spans, reports and diagnosis derive from it.
type Traits struct {
	// Send and Recv are what a rank brings and gets. Counts follow NCCL: a call's
	// count is that of one rank's part, or of the buffer where there are no parts.
	Send, Recv Share
	// Root is what the root of a rooted collective is to the others.
	Root Root
	// Reduces: an operator combines what the ranks bring.
	Reduces bool
	// PointToPoint: each rank calls for itself. The members of the communicator have
	// no common call, so no common number and no common span.
	PointToPoint bool
	// Synchronizes: no member leaves before all have entered. Of an AlltoAllv that is
	// not known: a pair that exchanges nothing need not meet.
	Synchronizes bool
}

// Share is how much of a buffer belongs to a call of count elements.
type Share uint8

const (
	ShareNone   Share = iota // there is no such buffer
	ShareOne                 // count elements
	ShareAll                 // count elements of each rank, by rank
	ShareVaries              // each rank says how many for each pair
)

// Of is how many times count elements a buffer has in a communicator of so many ranks.
func (s Share) Of(ranks int) int {
	switch s {
	case ShareOne:
		return 1
	case ShareAll:
		return ranks
	}
	return 0
}

// Root is the part that the root of a collective has.
type Root uint8

const (
	RootNone Root = iota // all ranks are alike
	RootFrom             // root alone has a send buffer, and the others wait for it
	RootTo               // root alone has a receive buffer, and waits for the others
)

var traits = [numColl]Traits{
	AllReduce:     {Send: ShareOne, Recv: ShareOne, Reduces: true, Synchronizes: true},
	Reduce:        {Send: ShareOne, Recv: ShareOne, Root: RootTo, Reduces: true},
	Broadcast:     {Send: ShareOne, Recv: ShareOne, Root: RootFrom},
	AllGather:     {Send: ShareOne, Recv: ShareAll, Synchronizes: true},
	ReduceScatter: {Send: ShareAll, Recv: ShareOne, Reduces: true, Synchronizes: true},
	AlltoAll:      {Send: ShareAll, Recv: ShareAll, Synchronizes: true},
	AlltoAllv:     {Send: ShareVaries, Recv: ShareVaries},
	Gather:        {Send: ShareOne, Recv: ShareAll, Root: RootTo},
	Scatter:       {Send: ShareAll, Recv: ShareOne, Root: RootFrom},
	Send:          {Send: ShareOne, PointToPoint: true},
	Recv:          {Recv: ShareOne, PointToPoint: true},
	Barrier:       {Synchronizes: true},
	Group:         {Send: ShareVaries, Recv: ShareVaries, PointToPoint: true},
}

// Traits is the row of k, the zero Traits for a kind that this version does not know.
func (k CollKind) Traits() *Traits {
	if k < numColl {
		return &traits[k]
	}
	return &traits[CollNone]
}

// Known reports whether k is a kind of this version, CollNone not among them.
func (k CollKind) Known() bool { return k > CollNone && k < numColl }

// Collective reports whether every member of the communicator calls k, under a
// common number. An unknown kind counts as one.
func (k CollKind) Collective() bool { return k != CollNone && !k.Traits().PointToPoint }

// PointToPoint reports whether each rank calls k for itself.
func (k CollKind) PointToPoint() bool { return k.Traits().PointToPoint }

// Reduces reports whether an operator combines what the ranks bring.
func (k CollKind) Reduces() bool { return k.Traits().Reduces }

// Synchronizes reports whether no member leaves before all have entered.
func (k CollKind) Synchronizes() bool { return k.Traits().Synchronizes }

// HasData reports whether k moves elements: a barrier has none. An unknown kind counts as
// one that does.
func (k CollKind) HasData() bool {
	t := k.Traits()
	return t.Send != ShareNone || t.Recv != ShareNone || !k.Known()
}

// Varies reports whether counts differ by pair of ranks, so that ranks agree on a
// message's count and not on the call's.
func (t *Traits) Varies() bool {
	return t.Send == ShareVaries || t.Recv == ShareVaries || t.PointToPoint
}

// SamePayload reports whether all members' calls have the same payload. Of a rooted collective in parts NCCL's
// ranks may give counts that only the root looks at.
func (t *Traits) SamePayload() bool {
	return !t.Varies() && !(t.Root != RootNone && t.Parted())
}

// Parted reports whether a buffer has a part for each rank.
func (t *Traits) Parted() bool { return t.Send == ShareAll || t.Recv == ShareAll }

// Shares is how many parts of count elements the larger buffer has: what a call's
// payload counts.
func (t *Traits) Shares(ranks int) int { return max(t.Send.Of(ranks), t.Recv.Of(ranks), 1) }

// InPlace is where rank's receive buffer begins in its send buffer, in counts, when
// the call is in place: one buffer is rank's part of the other where that has all.
func (t *Traits) InPlace(rank int) int {
	switch {
	case t.Send == ShareOne && t.Recv == ShareAll:
		return -rank
	case t.Send == ShareAll && t.Recv == ShareOne:
		return rank
	}
	return 0
}
