package algo

import (
	"slices"

	"github.com/lockstep-ccl/lockstep/record"
)

// Act is what one step does.
type Act uint8

const (
	Send       Act = iota // Src → peer
	Recv                  // peer → Dst
	RecvReduce            // Dst = Src op (from peer)
	Fold                  // Dst = Dst op Src, local
	Copy                  // Dst = Src, local
	Gate                  // wait until the operation's gate number Len is open
	Join                  // wait until all other tracks have ended
)

// Space is the memory that an offset counts in.
type Space uint16

const (
	SendBuf Space = iota // the caller's send buffer
	RecvBuf              // the caller's receive buffer
	Scratch              // the engine's own memory
	// Acc is scratch that holds every 16-bit float as a float32; offsets and
	// lengths count as if the elements had their own type's size.
	Acc
)

// Ref is a place in a Space, in bytes.
type Ref struct {
	Space Space
	Off   int
}

func (r Ref) plus(n int) Ref { return Ref{r.Space, r.Off + n} }

// Step is one move of a track.
type Step struct {
	Act Act
	// LL: the bytes travel as low-latency lines, each tagged with the call's
	// signature; otherwise through the byte stream.
	LL bool
	// Header: the message opens with the call's signature (byte stream only).
	// Set on the first message of each connection and direction.
	Header bool
	// Scale: divide what was written to Dst by the number of ranks (Avg).
	Scale bool
	Peer  int32
	// Need is how many steps the schedule's other track must have completed
	// before this one may begin. Only schedules of two tracks use it.
	Need     int32
	Dst, Src Ref
	// Kept, of a Send: no step writes Src between this one and the operation's end,
	// so a link may send the bytes zero-copy.
	Kept bool
	// First and Last, of a Recv or RecvReduce through the byte stream: the step is the first, or
	// the last, of its Leg.
	First, Last bool
	Len         int // bytes, equal at both ends of a message; a Gate's number
	// Whole is the length of the message that a step of only a header opens. The two
	// ends may divide the message differently, at multiples of 64 bytes.
	Whole int
}

// Track is a list of steps that run one after the other. Tracks run
// concurrently; each direction of each connection belongs to one track.
type Track []Step

// Schedule is one rank's part of one collective. It is immutable once built.
type Schedule struct {
	Algo    record.Algo
	Proto   record.Proto
	Tracks  []Track
	Scratch int // bytes of Scratch used
	Acc     int // bytes of Acc used, counted like its offsets
}

// OnlySends reports whether the schedule does no more with a Space than send its bytes
// zero-copy (Kept, through the byte stream), and to none of the ranks in near.
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

// The two tracks of every collective's schedule.
const (
	tx = 0
	rx = 1
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
	b.markLegs()
	return &Schedule{
		Algo: b.choice.Algo, Proto: b.choice.Proto,
		Tracks:  []Track{b.tracks[tx], b.tracks[rx]},
		Scratch: b.scratch, Acc: b.acc,
	}
}

// markLegs marks the first and last step of each Leg.
func (b *builder) markLegs() {
	last := map[Leg]int{}
	for i := range b.tracks[rx] {
		if st := &b.tracks[rx][i]; st.Peer >= 0 && !st.LL && (st.Act == Recv || st.Act == RecvReduce) {
			_, met := last[st.Leg()]
			st.First, last[st.Leg()] = !met, i
		}
	}
	for _, i := range last {
		b.tracks[rx][i].Last = true
	}
}

// Leg is what one peer sends in one phase: data to reduce, or data to store as it is.
type Leg struct {
	Peer   int32
	Reduce bool
}

// Leg returns the leg of a Recv or RecvReduce.
func (s *Step) Leg() Leg { return Leg{s.Peer, s.Act == RecvReduce} }

// done returns how many steps a track has so far. A later step of the other track
// passes it as need to come after all of them.
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

func (b *builder) message(track int, s Step) {
	if s.Len == 0 {
		return // both ends agree on it, so neither waits
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

// recvReduce is dst = src op incoming; last marks the final contribution.
func (b *builder) recvReduce(peer int, dst, src Ref, n, need int, last bool) {
	b.message(rx, Step{Act: RecvReduce, Peer: int32(peer), Dst: dst, Src: src, Len: n, Need: int32(need), Scale: last && b.call.Op == record.Avg})
}

// local appends a Copy or Fold.
func (b *builder) local(track int, act Act, dst, src Ref, n, need int, last bool) {
	if n == 0 {
		return
	}
	b.add(track, Step{Act: act, Peer: -1, Dst: dst, Src: src, Len: n, Need: int32(need), Scale: last && b.call.Op == record.Avg})
}

// copyOwn brings this rank's own contribution of an out-of-place call to its
// receive buffer. It rides at the end of the send track, where it overlaps the
// wait for others.
func (b *builder) copyOwn(dst, src Ref, n int) {
	if !b.call.InPlace && !b.call.Apart {
		b.local(tx, Copy, dst, src, n, 0, false)
	}
}

// wide reports whether contributions are summed in float32 before they are
// rounded: 16-bit floats with more than two contributions.
func (b *builder) wide(contributions int) bool {
	return contributions > 2 && (b.call.DType == record.Float16 || b.call.DType == record.BFloat16)
}

// span is a range of bytes of the call's buffers.
type span struct{ off, len int }

// part is the i-th of n parts of s. Parts begin at multiples of 64 bytes from
// s.off, so no element is split and messages stay aligned; the last ones may be
// short or empty.
func (s span) part(i, n int) span {
	per := (s.len + n - 1) / n
	per = (per + 63) &^ 63
	lo := min(i*per, s.len)
	hi := min(lo+per, s.len)
	return span{s.off + lo, hi - lo}
}

// blocks returns how many blocks of at most size bytes (a multiple of 64) s has.
func (s span) blocks(size int) int { return (s.len + size - 1) / size }

func (s span) block(i, size int) span {
	lo := min(i*size, s.len)
	hi := min(lo+size, s.len)
	return span{s.off + lo, hi - lo}
}

func mod(a, n int) int {
	a %= n
	if a < 0 {
		a += n
	}
	return a
}
