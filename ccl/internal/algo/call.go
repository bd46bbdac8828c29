package algo

import "github.com/lockstep-ccl/lockstep/record"

// Call is the shape of a collective: all that its schedule depends on. All ranks must pass
// the same values, except for InPlace and Apart.
type Call struct {
	Coll  record.CollKind
	DType record.DType
	Op    record.RedOp
	Root  int32 // used by Broadcast, Reduce, Gather and Scatter
	// Count is in elements, by NCCL's convention: of the whole buffer for
	// AllReduce, Reduce and Broadcast; of one rank's share for AllGather
	// (sent), ReduceScatter (received), AlltoAll, Gather and Scatter.
	Count   int
	InPlace bool
	// Apart says that this rank does not need its own contribution in its receive buffer. It
	// saves the copy of a call that is not InPlace.
	Apart bool
}

func (c *Call) bytes() int { return c.Count * c.DType.Size() }

// Place is a rank's position in the topology, as far as schedules depend on it.
type Place struct {
	Rank, Size int
	// Node is the node index of every rank. Ring lists all ranks, those of a node next to each
	// other, so that it crosses nodes as rarely as possible. Pos is this rank's index in it.
	Node []int32
	Ring []int
	Pos  int
	// Local lists the ranks of this node. Across lists the ranks at this rank's position in
	// Local on every node (its rail). It is nil if nodes have different numbers of ranks.
	Local, Across []int
	Nodes         int
	// Most and Least are the largest and smallest number of ranks on a node. Cores is the
	// smallest number of cores on a node. They are equal on all ranks, so all ranks choose the
	// same algorithm.
	Most, Least, Cores int
}

// NewPlace returns rank's Place. node is the node index of every rank. cores is Place.Cores and
// must be equal on all ranks.
func NewPlace(rank int, node []int32, cores int) Place {
	p := Place{Rank: rank, Size: len(node), Node: node, Cores: max(cores, 1)}
	members := map[int32][]int{}
	var order []int32
	for r, nd := range node {
		if members[nd] == nil {
			order = append(order, nd)
		}
		members[nd] = append(members[nd], r)
	}
	p.Nodes = len(order)
	p.Local = members[node[rank]]
	own := 0
	p.Least = len(node)
	for i, r := range p.Local {
		if r == rank {
			own = i
		}
	}
	for _, nd := range order {
		p.Ring = append(p.Ring, members[nd]...)
		p.Most, p.Least = max(p.Most, len(members[nd])), min(p.Least, len(members[nd]))
	}
	for i, r := range p.Ring {
		if r == rank {
			p.Pos = i
		}
	}
	if p.Most == p.Least {
		for _, nd := range order {
			p.Across = append(p.Across, members[nd][own])
		}
	}
	return p
}

// levels returns this rank's group at each level of allReduceStaged. On a single node that is all
// ranks. On several nodes it is this node's ranks, and then this rank's rail.
func (p *Place) levels() [][]int {
	if p.Nodes == 1 {
		return [][]int{p.Local}
	}
	if len(p.Local) == 1 {
		return [][]int{p.Across}
	}
	return [][]int{p.Local, p.Across}
}

func (p *Place) everyone() []int {
	all := make([]int, p.Size)
	for i := range all {
		all[i] = i
	}
	return all
}

// Choice is how a call runs.
type Choice struct {
	Algo  record.Algo
	Proto record.Proto
	Block int // bytes of one pipelined chunk; Build rounds it down to a multiple of 64, at least 64
}
