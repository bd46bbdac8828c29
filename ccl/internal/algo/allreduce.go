package algo

// allReduceOneShot: every rank sends its vector to all others and reduces all contributions
// itself. It takes one round, so it suits tiny messages.
func (b *builder) allReduceOneShot() {
	n, r, size := b.place.Size, b.place.Rank, b.call.bytes()
	for k := 1; k < n; k++ {
		b.send(mod(r+k, n), Ref{SendBuf, 0}, size, 0)
	}
	sent := b.done(tx)
	out, own := Ref{RecvBuf, 0}, Ref{SendBuf, 0}
	sum := out
	switch {
	case b.wide(n):
		sum = Ref{Acc, 0}
	case b.call.InPlace: // sends may still read own when the first sums are stored
		sum = Ref{Scratch, 0}
	}
	// Each rank adds the contributions in rank order, so all ranks get the same bits.
	has := false // sum holds a contribution
	for p := range n {
		last := p == n-1 && sum == out
		switch {
		case p != r && has:
			b.recvReduce(p, sum, sum, size, 0, last)
		case p != r && p == 0 && r == 1: // one step adds the contributions of ranks 0 and 1
			b.recvReduce(p, sum, own, size, 0, n == 2 && sum == out)
		case p != r && p == 1 && r == 0:
			b.recvReduce(p, sum, own, size, 0, last)
		case p != r:
			b.recv(p, sum, size, 0)
		case p > 1:
			b.local(rx, Fold, sum, own, size, 0, last)
		}
		has = has || p != r
	}
	if sum != out {
		need := 0
		if b.call.InPlace {
			need = sent
		}
		b.local(rx, Copy, out, sum, size, need, true)
	}
}

// allReduceStaged runs a reduce-scatter at each level, and then an all-gather at each level in
// reverse order. Blocks of the vector are pipelined through these stages.
//
// On one node it is the two-shot algorithm: each rank receives all contributions to its part
// of the vector, and sends the sum to all. On several nodes it is the hierarchical algorithm: a
// link between nodes carries 1/len(Local) of the data.
//
// 16-bit floats are summed in float32 within a level. Each level rounds once, so the partial
// sums that cross nodes are rounded.
func (b *builder) allReduceStaged() {
	b.stages(b.place.levels())
}

// stages is allReduceStaged over nested groups. Every rank is in one group of each level, and the
// groups of a level have equal size.
func (b *builder) stages(levels [][]int) {
	self := make([]int, len(levels)) // this rank's index in each level's group
	for l, group := range levels {
		for i, r := range group {
			if r == b.place.Rank {
				self[l] = i
			}
		}
	}
	whole := span{0, b.call.bytes()}
	grain := b.choice.Block * b.place.Size
	blocks, stages := whole.blocks(grain), 2*len(levels)
	need := make([]int, stages+1) // rx steps that must be complete before stage s sends its block
	for t := 0; t < blocks+stages-1; t++ {
		for s := min(stages-1, t); s >= 0; s-- {
			// Later stages go first, because their blocks are still in the cache.
			block := t - s
			if block >= blocks {
				continue
			}
			level := s
			if s >= len(levels) {
				level = stages - 1 - s
			}
			region := whole.block(block, grain)
			for l := range level {
				region = region.part(self[l], len(levels[l]))
			}
			if s < len(levels) {
				b.scatterStage(levels[level], self[level], level, region, need[s], level == len(levels)-1)
			} else {
				b.gatherStage(levels[level], self[level], region, need[s])
			}
			need[s+1] = b.done(rx)
		}
	}
}

// scatterStage is a reduce-scatter of region over group. The sum of part self goes to RecvBuf. last
// says that no level follows.
func (b *builder) scatterStage(group []int, self, level int, region span, need int, last bool) {
	m := len(group)
	from := SendBuf
	if level > 0 {
		from = RecvBuf // the sum of the level below
	}
	for k := 1; k < m; k++ {
		j := mod(self+k, m)
		p := region.part(j, m)
		b.send(group[j], Ref{from, p.off}, p.len, need)
	}
	own := region.part(self, m)
	b.collect(group, self, Ref{RecvBuf, own.off}, Ref{from, own.off}, own.len, last)
}

// collect receives a contribution of size bytes from every other member of the group, and stores
// their sum with own in out. It starts with the predecessor, as each member sends to its
// successor first.
func (b *builder) collect(group []int, self int, out, own Ref, size int, last bool) {
	m, src, sum := len(group), own, out
	if b.wide(m) {
		sum = Ref{Acc, 0}
	}
	for k := 1; k < m; k++ {
		dst := sum
		if k == m-1 {
			dst = out
		}
		b.recvReduce(group[mod(self-k, m)], dst, src, size, 0, last && k == m-1)
		src = dst
	}
}

// gatherStage is an all-gather of region over group. Member i contributes part i.
func (b *builder) gatherStage(group []int, self int, region span, need int) {
	m := len(group)
	own := region.part(self, m)
	for k := 1; k < m; k++ {
		b.send(group[mod(self+k, m)], Ref{RecvBuf, own.off}, own.len, need)
	}
	for k := 1; k < m; k++ {
		j := mod(self-k, m)
		p := region.part(j, m)
		b.recv(group[j], Ref{RecvBuf, p.off}, p.len, 0)
	}
}

// allReduceRing: a ring reduce-scatter, then a ring all-gather (Patarasuk and Yuan, 2009). Each
// rank sends 2(n-1)/n of the data, all of it to one neighbour. Partial sums of 16-bit floats
// are rounded at every hop.
func (b *builder) allReduceRing() {
	n, whole := b.place.Size, span{0, b.call.bytes()}
	b.ring(2*(n-1), n-1, func(k int) span { return whole.part(mod(b.place.Pos-k, n), n) })
}

// ring passes parts along the ring for a number of hops. At hop k this rank sends part(k), which
// it received at hop k-1, and receives part(k+1). During the first reduceHops it adds its own
// contribution to what it receives.
func (b *builder) ring(hops, reduceHops int, part func(k int) span) {
	n, grain := b.place.Size, b.choice.Block
	next := b.place.Ring[mod(b.place.Pos+1, n)]
	prev := b.place.Ring[mod(b.place.Pos-1, n)]
	before, start := 0, 0 // number of rx steps before hops k-1 and k
	for k := range hops {
		before, start = start, b.done(rx)
		in, out := part(k+1), part(k)
		for i := range in.blocks(grain) {
			blk := in.block(i, grain)
			if k < reduceHops {
				b.recvReduce(prev, Ref{RecvBuf, blk.off}, Ref{SendBuf, blk.off}, blk.len, 0, k == reduceHops-1)
			} else {
				b.recv(prev, Ref{RecvBuf, blk.off}, blk.len, 0)
			}
		}
		for i := range out.blocks(grain) {
			blk := out.block(i, grain)
			if k == 0 {
				b.send(next, Ref{SendBuf, blk.off}, blk.len, 0)
			} else {
				b.send(next, Ref{RecvBuf, blk.off}, blk.len, before+i+1)
			}
		}
	}
}

// allReduceDoubling: recursive doubling (Thakur, Rabenseifner and Gropp, 2005). In each of
// log2(n) rounds, ranks at distance 2^k exchange and add their sums. Ranks beyond the largest
// power of two send their contribution to a partner first and get the result from it last.
// Larger vectors on a power of two ranks use recursive halving, then doubling. Sums of 16-bit
// floats are rounded in each round.
func (b *builder) allReduceDoubling() {
	n, r, size := b.place.Size, b.place.Rank, b.call.bytes()
	pow, rounds := 1, 0
	for pow*2 <= n {
		pow *= 2
		rounds++
	}
	if pow == n && size >= halvingBytes {
		b.stages(pairs(r, n))
		return
	}
	out, mine := Ref{RecvBuf, 0}, Ref{SendBuf, 0}
	if r >= pow {
		b.send(r-pow, mine, size, 0)
		b.recv(r-pow, out, size, b.done(tx))
		return
	}
	extra := r + pow
	if extra < n {
		// Not RecvBuf: the first round may store its sum there while it sends mine.
		b.recvReduce(extra, Ref{Scratch, 0}, mine, size, 0, false)
		mine = Ref{Scratch, 0}
	}
	for k := range rounds {
		// The sum must not overwrite mine, which is being sent. The last sum goes to RecvBuf,
		// unless mine lies there.
		sum := Ref{Scratch, 64 + size&^63}
		if mine == sum {
			sum = Ref{Scratch, 0}
		}
		last := k == rounds-1
		if last && (mine.Space == Scratch || !b.call.InPlace) {
			sum = out
		}
		sent := b.done(tx)
		b.send(r^1<<k, mine, size, b.done(rx))
		b.recvReduce(r^1<<k, sum, mine, size, sent, last)
		mine = sum
	}
	if mine != out {
		b.local(rx, Copy, out, mine, size, b.done(tx), false)
	}
	if extra < n {
		b.send(extra, out, size, b.done(rx))
	}
}

// pairs returns rank r's groups of two for recursive halving, the most distant first.
func pairs(r, n int) [][]int {
	var levels [][]int
	for d := n / 2; d > 0; d /= 2 {
		lo := r &^ d
		levels = append(levels, []int{lo, lo | d})
	}
	return levels
}
