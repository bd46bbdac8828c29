package algo

// Piece is one collective of a chain. It runs on Members, which may be part of a communicator.
type Piece struct {
	Call   Call
	Place  *Place // its ranks are indices of Members
	Choice Choice
	// Members lists communicator ranks.
	Members    []int
	Send, Recv Ref // the call's buffers
}

// A chain's gates.
const (
	Ready    = iota // both tracks wait here before they begin a piece
	Sent            // the send track passes it after a piece
	Received        // the receive track passes it after a piece
	Left            // passed once, after the last piece of both tracks
	gates
)

// GateNumber returns the number (Step.Len) of a piece's gate.
func GateNumber(piece, gate int) int { return piece*gates + gate }

// GateOf is the inverse of GateNumber.
func GateOf(number int) (piece, gate int) { return number / gates, number % gates }

// ahead is how many pieces may be in flight at once.
const ahead = 2

// Chain returns the schedule of collectives that run one after the other, each between gates.
// A piece begins while messages of the previous one are in flight, so the two have separate
// scratch memory. Chain fails as Build does.
func Chain(pieces []Piece) (*Schedule, error) {
	out := &Schedule{Tracks: make([]Track, 2)}
	parts := make([]*Schedule, len(pieces))
	for i := range pieces {
		p := &pieces[i]
		s, err := Build(p.Call, *p.Place, p.Choice)
		if err != nil {
			return nil, err
		}
		parts[i] = s
		out.Algo, out.Proto = s.Algo, s.Proto
		out.Scratch, out.Acc = max(out.Scratch, s.Scratch), max(out.Acc, s.Acc)
	}
	out.Scratch, out.Acc = (out.Scratch+63)&^63, (out.Acc+63)&^63
	var ended [][2]int32 // number of steps of each track up to the end of each piece
	for i, s := range parts {
		begun := [2]int32{int32(len(out.Tracks[tx])) + 1, int32(len(out.Tracks[rx])) + 1}
		for t := range out.Tracks {
			gate := Step{Act: Gate, Peer: -1, Len: GateNumber(i, Ready)}
			if i >= ahead {
				gate.Need = ended[i-ahead][1-t]
			}
			out.Tracks[t] = append(out.Tracks[t], gate)
			for _, st := range s.Tracks[t] {
				// Kept holds within the piece only. After Sent, zero-copy sends may still read
				// its memory: whoever reuses that must wait for their completions.
				step := Step{
					Act: st.Act, LL: st.LL, Header: st.Header, Scale: st.Scale, Peer: st.Peer, Need: st.Need,
					Dst: pieces[i].moved(out, i, st.Dst), Src: pieces[i].moved(out, i, st.Src), Len: st.Len, Kept: st.Kept,
				}
				if st.Need > 0 {
					step.Need += begun[1-t]
				}
				if st.Peer >= 0 {
					step.Peer = int32(pieces[i].Members[st.Peer])
				}
				out.Tracks[t] = append(out.Tracks[t], step)
			}
			out.Tracks[t] = append(out.Tracks[t], Step{Act: Gate, Peer: -1, Len: GateNumber(i, Sent+t)})
		}
		ended = append(ended, [2]int32{int32(len(out.Tracks[tx])), int32(len(out.Tracks[rx]))})
	}
	out.Tracks[rx] = append(out.Tracks[rx], Step{Act: Gate, Peer: -1, Need: int32(len(out.Tracks[tx])), Len: GateNumber(len(pieces), Left)})
	markLegs(out.Tracks[rx])
	out.Scratch, out.Acc = ahead*out.Scratch, ahead*out.Acc
	return out, nil
}

// moved returns the place in the chain's memory of a Ref of piece i.
func (p *Piece) moved(out *Schedule, i int, r Ref) Ref {
	switch r.Space {
	case SendBuf:
		return p.Send.plus(r.Off)
	case RecvBuf:
		return p.Recv.plus(r.Off)
	case Scratch:
		return r.plus(i % ahead * out.Scratch)
	}
	return r.plus(i % ahead * out.Acc)
}
