package algo

import "github.com/lockstep-ccl/lockstep/record"

// broadcastDirect: the root sends to every other rank, block by block.
func (b *builder) broadcastDirect() {
	n, r, root := b.place.Size, b.place.Rank, int(b.call.Root)
	whole := span{0, b.call.bytes()}
	for i := range whole.blocks(b.choice.Block) {
		blk := whole.block(i, b.choice.Block)
		if r != root {
			b.recv(root, Ref{RecvBuf, blk.off}, blk.len, 0)
			continue
		}
		for k := 1; k < n; k++ {
			b.send(mod(r+k, n), Ref{SendBuf, blk.off}, blk.len, 0)
		}
	}
	b.copyRoot()
}

// copyRoot copies the root's own data in an out-of-place Broadcast.
func (b *builder) copyRoot() {
	if b.place.Rank == int(b.call.Root) {
		b.copyOwn(Ref{RecvBuf, 0}, Ref{SendBuf, 0}, b.call.bytes())
	}
}

// broadcastTree: a binomial tree. After round k, 2^k ranks have the data.
func (b *builder) broadcastTree() {
	n, root, size := b.place.Size, int(b.call.Root), b.call.bytes()
	v := mod(b.place.Rank-root, n) // this rank's number, counted from the root
	src := Ref{SendBuf, 0}
	low := 1
	for low < n && v&low == 0 {
		low *= 2
	}
	if v != 0 {
		b.recv(mod(v-low+root, n), Ref{RecvBuf, 0}, size, 0)
		src = Ref{RecvBuf, 0}
	}
	for d := low / 2; d > 0; d /= 2 {
		if v+d < n {
			b.send(mod(v+d+root, n), src, size, b.done(rx))
		}
	}
	b.copyRoot()
}

// chainPosition returns this rank's distance from the root along the ring, and its ring
// neighbours.
func (b *builder) chainPosition() (at, next, prev int) {
	n, start := b.place.Size, 0
	for i, r := range b.place.Ring {
		if r == int(b.call.Root) {
			start = i
		}
	}
	return mod(b.place.Pos-start, n), b.place.Ring[mod(b.place.Pos+1, n)], b.place.Ring[mod(b.place.Pos-1, n)]
}

// broadcastChain: blocks are passed along the ring, starting at the root.
func (b *builder) broadcastChain() {
	at, next, prev := b.chainPosition()
	whole := span{0, b.call.bytes()}
	for i := range whole.blocks(b.choice.Block) {
		blk := whole.block(i, b.choice.Block)
		src := Ref{SendBuf, blk.off}
		if at > 0 {
			src = Ref{RecvBuf, blk.off}
			b.recv(prev, src, blk.len, 0)
		}
		if at < b.place.Size-1 {
			b.send(next, src, blk.len, b.done(rx))
		}
	}
	b.copyRoot()
}

// reduceDirect: every rank sends to the root, which adds in a fixed order.
func (b *builder) reduceDirect() {
	r, root := b.place.Rank, int(b.call.Root)
	whole := span{0, b.call.bytes()}
	everyone := b.place.everyone()
	for i := range whole.blocks(b.choice.Block) {
		blk := whole.block(i, b.choice.Block)
		if r != root {
			b.send(root, Ref{SendBuf, blk.off}, blk.len, 0)
		} else {
			b.collect(everyone, r, Ref{RecvBuf, blk.off}, Ref{SendBuf, blk.off}, blk.len, true)
		}
	}
}

// reduceTree: a binomial tree towards the root. Partial sums of 16-bit floats are rounded at every
// level.
func (b *builder) reduceTree() {
	n, root, size := b.place.Size, int(b.call.Root), b.call.bytes()
	v := mod(b.place.Rank-root, n)
	src, sum := Ref{SendBuf, 0}, Ref{Scratch, 0}
	if v == 0 {
		sum = Ref{RecvBuf, 0}
	}
	low := 1
	for ; low < n && v&low == 0; low *= 2 {
		if v+low < n {
			b.recvReduce(mod(v+low+root, n), sum, src, size, 0, v == 0 && low*2 >= n)
			src = sum
		}
	}
	if v != 0 {
		b.send(mod(v-low+root, n), src, size, b.done(rx))
	}
}

// reduceChain: partial sums pass along the ring and end at the root. Those of 16-bit floats are
// rounded at every hop.
func (b *builder) reduceChain() {
	at, next, prev := b.chainPosition()
	n := b.place.Size
	at = mod(at-1, n) // the root's successor is first, the root n-1
	whole := span{0, b.call.bytes()}
	for i := range whole.blocks(b.choice.Block) {
		blk := whole.block(i, b.choice.Block)
		src := Ref{SendBuf, blk.off}
		if at > 0 {
			const slots = 4 // bounds the partial sums that wait to be sent
			dst, need := Ref{Scratch, i % slots * b.choice.Block}, max(i-slots+1, 0)
			if at == n-1 {
				dst, need = Ref{RecvBuf, blk.off}, 0
			}
			b.recvReduce(prev, dst, src, blk.len, need, at == n-1)
			src = dst
		}
		if at < n-1 {
			b.send(next, src, blk.len, b.done(rx))
		}
	}
}

// barrierDirect: every rank signals every other rank.
func (b *builder) barrierDirect() {
	n, r := b.place.Size, b.place.Rank
	for k := 1; k < n; k++ {
		b.signal(tx, mod(r+k, n), 0)
		b.signal(rx, mod(r-k, n), 0)
	}
}

// barrierDissemination: in round k every rank signals the rank 2^k after it. It takes log2(n)
// rounds, rounded up (Hensgen, Finkel and Manber, 1988).
func (b *builder) barrierDissemination() {
	n, r := b.place.Size, b.place.Rank
	for d := 1; d < n; d *= 2 {
		b.signal(tx, mod(r+d, n), b.done(rx))
		b.signal(rx, mod(r-d, n), 0)
	}
}

// signal adds an empty message. It is a low-latency line, because the byte stream carries no
// empty messages.
func (b *builder) signal(track, peer, need int) {
	act := Send
	if track == rx {
		act = Recv
	}
	b.choice.Proto = record.ProtoLL
	b.add(track, Step{Act: act, LL: true, Peer: int32(peer), Need: int32(need)})
}
