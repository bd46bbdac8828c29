package algo

// reduceScatterDirect: every rank sends each other rank its share, block by block, and adds what
// arrives. 16-bit floats are rounded once.
func (b *builder) reduceScatterDirect() {
	n, r, size := b.place.Size, b.place.Rank, b.call.bytes()
	everyone := b.place.everyone()
	share := span{0, size}
	for i := range share.blocks(b.choice.Block) {
		blk := share.block(i, b.choice.Block)
		for k := 1; k < n; k++ {
			to := mod(r+k, n)
			b.send(to, Ref{SendBuf, to*size + blk.off}, blk.len, 0)
		}
		b.collect(everyone, r, Ref{RecvBuf, blk.off}, Ref{SendBuf, r*size + blk.off}, blk.len, true)
	}
}

// reduceScatterRing: partial sums pass along the ring, each to its owner. Those of 16-bit floats are
// rounded at every hop.
func (b *builder) reduceScatterRing() {
	n, size, grain := b.place.Size, b.call.bytes(), b.choice.Block
	next := b.place.Ring[mod(b.place.Pos+1, n)]
	prev := b.place.Ring[mod(b.place.Pos-1, n)]
	share := span{0, size}
	blocks := share.blocks(grain)
	// Hop k sends the sum for the rank k+1 positions before this one. Hop k-1 received it into one
	// of two halves of Scratch.
	half := func(k int) Ref { return Ref{Scratch, (k & 1) * ((size + 63) &^ 63)} }
	for k := range n - 1 {
		owner := b.place.Ring[mod(b.place.Pos-k-1, n)]
		for i := range blocks {
			blk := share.block(i, grain)
			if k == 0 {
				b.send(next, Ref{SendBuf, owner*size + blk.off}, blk.len, 0)
			} else {
				b.send(next, half(k-1).plus(blk.off), blk.len, (k-1)*blocks+i+1)
			}
		}
		owner = b.place.Ring[mod(b.place.Pos-k-2, n)]
		for i := range blocks {
			blk := share.block(i, grain)
			dst, need := half(k).plus(blk.off), 0
			if k == n-2 {
				dst = Ref{RecvBuf, blk.off}
			} else if k >= 2 {
				need = (k-1)*blocks + i + 1 // this half's last content has been sent
			}
			b.recvReduce(prev, dst, Ref{SendBuf, owner*size + blk.off}, blk.len, need, k == n-2)
		}
	}
}

// allGatherDirect: every rank sends its share to every other rank, block by block.
func (b *builder) allGatherDirect() {
	n, r, size := b.place.Size, b.place.Rank, b.call.bytes()
	share := span{0, size}
	for i := range share.blocks(b.choice.Block) {
		blk := share.block(i, b.choice.Block)
		for k := 1; k < n; k++ {
			b.send(mod(r+k, n), Ref{SendBuf, blk.off}, blk.len, 0)
			from := mod(r-k, n)
			b.recv(from, Ref{RecvBuf, from*size + blk.off}, blk.len, 0)
		}
	}
	b.copyOwn(Ref{RecvBuf, r * size}, Ref{SendBuf, 0}, size)
}

// allGatherRing: every share passes once around the ring.
func (b *builder) allGatherRing() {
	n, size, grain := b.place.Size, b.call.bytes(), b.choice.Block
	next := b.place.Ring[mod(b.place.Pos+1, n)]
	prev := b.place.Ring[mod(b.place.Pos-1, n)]
	share := span{0, size}
	blocks := share.blocks(grain)
	for k := range n - 1 {
		out := b.place.Ring[mod(b.place.Pos-k, n)]
		in := b.place.Ring[mod(b.place.Pos-k-1, n)]
		for i := range blocks {
			blk := share.block(i, grain)
			if k == 0 {
				b.send(next, Ref{SendBuf, blk.off}, blk.len, 0)
			} else {
				b.send(next, Ref{RecvBuf, out*size + blk.off}, blk.len, (k-1)*blocks+i+1)
			}
			b.recv(prev, Ref{RecvBuf, in*size + blk.off}, blk.len, 0)
		}
	}
	b.copyOwn(Ref{RecvBuf, b.place.Rank * size}, Ref{SendBuf, 0}, size)
}

// allToAll: in round k every rank sends to the k-th rank after it and receives from the k-th before
// it, so no rank gets messages from all others at once. In place, each block is first copied to
// Scratch, because what arrives overwrites it.
func (b *builder) allToAll() {
	n, r, size := b.place.Size, b.place.Rank, b.call.bytes()
	grain := min(b.choice.Block, max((size+63)&^63, 64)) // grain is Scratch's size per rank
	share := span{0, size}
	for i := range share.blocks(grain) {
		blk := share.block(i, grain)
		src := func(to int) Ref { return Ref{SendBuf, to*size + blk.off} }
		if b.call.InPlace {
			for k := 1; k < n; k++ {
				to := mod(r+k, n)
				b.local(tx, Copy, Ref{Scratch, to * grain}, Ref{SendBuf, to*size + blk.off}, blk.len, 0, false)
			}
			src = func(to int) Ref { return Ref{Scratch, to * grain} }
		}
		aside := b.done(tx)
		for k := 1; k < n; k++ {
			to, from := mod(r+k, n), mod(r-k, n)
			b.send(to, src(to), blk.len, 0)
			b.recv(from, Ref{RecvBuf, from*size + blk.off}, blk.len, aside)
		}
	}
	b.copyOwn(Ref{RecvBuf, r * size}, Ref{SendBuf, r * size}, size)
}

// gather: every rank sends its share to the root.
func (b *builder) gather() {
	n, r, root, size := b.place.Size, b.place.Rank, int(b.call.Root), b.call.bytes()
	if r != root {
		b.send(root, Ref{SendBuf, 0}, size, 0)
		return
	}
	for k := 1; k < n; k++ {
		from := mod(r+k, n)
		b.recv(from, Ref{RecvBuf, from * size}, size, 0)
	}
	b.copyOwn(Ref{RecvBuf, r * size}, Ref{SendBuf, 0}, size)
}

// scatter: the root sends every rank its share.
func (b *builder) scatter() {
	n, r, root, size := b.place.Size, b.place.Rank, int(b.call.Root), b.call.bytes()
	if r != root {
		b.recv(root, Ref{RecvBuf, 0}, size, 0)
		return
	}
	for k := 1; k < n; k++ {
		to := mod(r+k, n)
		b.send(to, Ref{SendBuf, to * size}, size, 0)
	}
	b.copyOwn(Ref{RecvBuf, 0}, Ref{SendBuf, r * size}, size)
}
