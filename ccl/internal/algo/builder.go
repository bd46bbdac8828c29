package algo

import "github.com/lockstep-ccl/lockstep/record"

// builder collects a collective's two tracks.
type builder struct {
	call   Call
	place  Place
	choice Choice
	tracks [2]Track
	met    [2][]bool // peers whose connection has carried a message, by direction

	scratch, acc int
}

func newBuilder(call Call, place Place, choice Choice) *builder {
	b := &builder{call: call, place: place, choice: choice}
	b.met[tx] = make([]bool, place.Size)
	b.met[rx] = make([]bool, place.Size)
	return b
}

func (b *builder) schedule() *Schedule {
	markKept(b.tracks[:], &b.call, b.place.Rank)
	markLegs(b.tracks[rx])
	return &Schedule{
		Algo: b.choice.Algo, Proto: b.choice.Proto,
		Tracks:  []Track{b.tracks[tx], b.tracks[rx]},
		Scratch: b.scratch, Acc: b.acc,
	}
}

// done returns the number of steps in track. A step of the other track with this number as Need
// waits for all of them.
func (b *builder) done(track int) int { return len(b.tracks[track]) }

func (b *builder) add(track int, s Step) {
	if s.Dst.Space == Scratch && s.Act != Send {
		b.scratch = max(b.scratch, s.Dst.Off+s.Len)
	}
	if s.Dst.Space == Acc && s.Act != Send {
		b.acc = max(b.acc, s.Dst.Off+s.Len)
	}
	b.tracks[track] = append(b.tracks[track], s)
}

// message adds a Send, Recv or RecvReduce.
func (b *builder) message(track int, s Step) {
	if s.Len == 0 {
		return // the peer's schedule omits the message, too
	}
	s.LL = b.choice.Proto == record.ProtoLL
	s.Header = !s.LL && !b.met[track][s.Peer]
	b.met[track][s.Peer] = true
	b.add(track, s)
}

func (b *builder) send(peer int, src Ref, n, need int) {
	b.message(tx, Step{Act: Send, Peer: int32(peer), Src: src, Len: n, Need: int32(need)})
}

func (b *builder) recv(peer int, dst Ref, n, need int) {
	b.message(rx, Step{Act: Recv, Peer: int32(peer), Dst: dst, Len: n, Need: int32(need)})
}

// recvReduce adds dst = src op (from peer). last says that it completes the sum, which Avg then
// divides.
func (b *builder) recvReduce(peer int, dst, src Ref, n, need int, last bool) {
	b.message(rx, Step{Act: RecvReduce, Peer: int32(peer), Dst: dst, Src: src, Len: n, Need: int32(need), Scale: last && b.call.Op == record.Avg})
}

// local adds a Copy or Fold. last is as for recvReduce.
func (b *builder) local(track int, act Act, dst, src Ref, n, need int, last bool) {
	if n == 0 {
		return
	}
	b.add(track, Step{Act: act, Peer: -1, Dst: dst, Src: src, Len: n, Need: int32(need), Scale: last && b.call.Op == record.Avg})
}

// copyOwn copies this rank's own contribution to its receive buffer, unless the call is in place or
// Apart. It is on the send track, which otherwise idles while this rank waits for others.
func (b *builder) copyOwn(dst, src Ref, n int) {
	if !b.call.InPlace && !b.call.Apart {
		b.local(tx, Copy, dst, src, n, 0, false)
	}
}

// wide reports whether contributions are summed in Acc. That is for 16-bit floats, which would
// otherwise be rounded after each addition. Two contributions need only one addition.
func (b *builder) wide(contributions int) bool {
	return contributions > 2 && (b.call.DType == record.Float16 || b.call.DType == record.BFloat16)
}

// span is a range of bytes in the call's buffers.
type span struct{ off, len int }

// part returns the i-th of n parts of s. Parts begin at multiples of 64 bytes from s.off, so no
// element is split and messages stay aligned. The last parts may be short or empty.
func (s span) part(i, n int) span {
	per := (s.len + n - 1) / n
	per = (per + 63) &^ 63
	lo := min(i*per, s.len)
	hi := min(lo+per, s.len)
	return span{s.off + lo, hi - lo}
}

// blocks returns how many blocks of at most size bytes (a multiple of 64) s has.
func (s span) blocks(size int) int { return (s.len + size - 1) / size }

// block returns block i of s.
func (s span) block(i, size int) span {
	lo := min(i*size, s.len)
	hi := min(lo+size, s.len)
	return span{s.off + lo, hi - lo}
}

// mod returns a modulo n, from 0 to n-1 also for a negative a.
func mod(a, n int) int {
	a %= n
	if a < 0 {
		a += n
	}
	return a
}

// alone builds a collective of a single rank. It is a copy or nothing.
func (b *builder) alone() {
	if b.call.Coll.HasData() {
		b.copyOwn(Ref{RecvBuf, 0}, Ref{SendBuf, 0}, b.call.bytes())
	}
}
