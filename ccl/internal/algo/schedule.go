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
