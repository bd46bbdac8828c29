package algo

import (
	"slices"

	"github.com/lockstep-ccl/lockstep/record"
)

// Act is the kind of a step.
type Act uint8

const (
	Send       Act = iota // Src → peer
	Recv                  // peer → Dst
	RecvReduce            // Dst = Src op (from peer)
	Fold                  // Dst = Dst op Src
	Copy                  // Dst = Src
	Gate                  // wait until the operation's gate number Len is open
	Join                  // wait until all other tracks have ended
)

// Space names the memory that an offset counts in.
type Space uint16

const (
	SendBuf Space = iota // the caller's send buffer
	RecvBuf              // the caller's receive buffer
	Scratch              // the engine's own memory
	// Acc is scratch memory for sums of 16-bit floats in float32. Offsets and lengths in it
	// count 2 bytes per element, as in the other Spaces.
	Acc
)

// Ref is a place in a Space.
type Ref struct {
	Space Space
	Off   int // bytes
}

func (r Ref) plus(n int) Ref { return Ref{r.Space, r.Off + n} }

// Step is one step of a track.
type Step struct {
	Act Act
	// LL says that the bytes go as low-latency lines, each tagged with a hash of the call's
	// signature. Other messages go through the byte stream.
	LL bool
	// Header says that the call's signature precedes the bytes in the byte stream. The first
	// message of each connection and direction has it.
	Header bool
	// Scale divides what is written to Dst by the number of ranks (Avg).
	Scale bool
	Peer  int32 // -1 for steps without a peer
	// Need is how many steps the schedule's other track must have completed before this one
	// begins. Only schedules of two tracks use it.
	Need     int32
	Dst, Src Ref
	// Kept, of a Send, says that no step writes Src from this one to the end of the operation.
	// So a link may send the bytes zero-copy.
	Kept bool
	// First and Last mark the first and last step of a Leg.
	First, Last bool
	Len         int // bytes, equal at both ends of a message; the number of a Gate
	// Whole is the length in bytes of a message that follows in several steps, if this step
	// sends or receives only its header (Len 0). The two ends may divide the message
	// differently, at multiples of 64 bytes.
	Whole int
}

// Track is a list of steps that run one after the other. Tracks run concurrently. Each direction
// of each connection belongs to one track, because a connection keeps messages in order.
type Track []Step

// Schedule is one rank's part of one operation. It is immutable once built.
type Schedule struct {
	Algo    record.Algo
	Proto   record.Proto
	Tracks  []Track
	Scratch int // size of Scratch in bytes
	Acc     int // size of Acc in bytes, counted as its offsets are
}

// OnlySends reports whether the schedule uses a Space only for zero-copy sends (Kept, through the
// byte stream) to ranks other than near. Then the CPU need not be able to read that memory.
func (s *Schedule) OnlySends(space Space, near []int) bool {
	for _, t := range s.Tracks {
		for i := range t {
			st := &t[i]
			reads := st.Src.Space == space && (st.Act == RecvReduce || st.Act == Fold || st.Act == Copy || st.Act == Send && (st.LL || !st.Kept || slices.Contains(near, int(st.Peer))))
			writes := st.Dst.Space == space && (st.Act == Recv || st.Act == RecvReduce || st.Act == Fold || st.Act == Copy)
			if reads || writes {
				return false
			}
		}
	}
	return true
}

// The tracks of a collective's schedule.
const (
	tx = 0 // all sends
	rx = 1 // all receives
)

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
	b.markKept()
	markLegs(b.tracks[rx])
	return &Schedule{
		Algo: b.choice.Algo, Proto: b.choice.Proto,
		Tracks:  []Track{b.tracks[tx], b.tracks[rx]},
		Scratch: b.scratch, Acc: b.acc,
	}
}

// markLegs marks the first and last step of each Leg of a receive track.
func markLegs(track Track) {
	last := map[Leg]int{}
	for i := range track {
		if st := &track[i]; st.Peer >= 0 && !st.LL && (st.Act == Recv || st.Act == RecvReduce) {
			_, met := last[st.Leg()]
			st.First, last[st.Leg()] = !met, i
		}
	}
	for _, i := range last {
		track[i].Last = true
	}
}

// Leg is what one peer sends through the byte stream in one phase of a collective, or in that phase
// of all collectives of a chain.
type Leg struct {
	Peer   int32
	Reduce bool // RecvReduce steps; otherwise Recv steps
}

// Leg returns the Leg that a Recv or RecvReduce step belongs to.
func (s *Step) Leg() Leg { return Leg{s.Peer, s.Act == RecvReduce} }

// done returns how many steps a track has so far. A later step of the other track waits for all of
// them if that number is its need.
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
