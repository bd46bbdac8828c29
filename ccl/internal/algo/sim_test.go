package algo_test

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"

	"pgregory.net/rapid"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
)

// sim runs the schedules of all ranks against each other, in random order. A pipe holds at most
// credit bytes.
type sim struct {
	t      rapid.TB
	credit int
	ranks  []*simRank
	pipes  map[[3]int]*pipe // source, destination, 1 for lines
	kept   []kept
}

// kept is a Kept send. Its bytes must be the same at the end of the operation.
type kept struct {
	rank int
	step algo.Step
	in   []byte // the sender's memory, by reference
	sent []byte // a copy
}

type pipe struct {
	bytes    []byte
	messages []int // lengths of the messages begun, in order
}

type simRank struct {
	rank   int
	call   algo.Call
	sched  *algo.Schedule
	space  [4][]byte
	at     []int // current step of each track
	pos    []int // bytes of it that have moved
	gates  []int // numbers of the gates passed
	divide int64
}

const elem = 8 // every element is an int64, also where the schedule is for 16-bit floats

func (s *sim) pipe(from, to int, ll bool) *pipe {
	k := [3]int{from, to, 0}
	if ll {
		k[2] = 1
	}
	if s.pipes[k] == nil {
		s.pipes[k] = &pipe{}
	}
	return s.pipes[k]
}

// step advances one track a little. It reports whether anything moved.
func (s *sim) step(r *simRank, track int) bool {
	steps := r.sched.Tracks[track]
	if r.at[track] == len(steps) {
		return false
	}
	st := &steps[r.at[track]]
	if r.at[1-track] < int(st.Need) {
		return false
	}
	if st.Act == algo.Gate {
		r.gates = append(r.gates, st.Len)
		r.at[track]++
		return true
	}
	begin := r.pos[track] == 0
	n := st.Len - r.pos[track]
	switch st.Act {
	case algo.Send:
		p := s.pipe(r.rank, int(st.Peer), st.LL)
		if begin {
			if len(p.bytes) >= s.credit {
				return false
			}
			p.messages = append(p.messages, st.Len)
		}
		n = min(n, s.credit-len(p.bytes))
		src := r.space[st.Src.Space][st.Src.Off+r.pos[track]:]
		p.bytes = append(p.bytes, src[:n]...)
		if st.Kept {
			s.kept = append(s.kept, kept{r.rank, *st, src[:n], bytes.Clone(src[:n])})
		}
	case algo.Recv, algo.RecvReduce:
		p := s.pipe(int(st.Peer), r.rank, st.LL)
		if begin {
			if len(p.messages) == 0 {
				return false
			}
			if p.messages[0] != st.Len {
				s.t.Fatalf("rank %d expects %d bytes from %d, which sent %d", r.rank, st.Len, st.Peer, p.messages[0])
			}
			p.messages = p.messages[1:]
		}
		n = min(n, len(p.bytes))
		if st.Act == algo.RecvReduce {
			n -= n % elem
		}
		s.store(r, st, track, n, p.bytes[:n], st.Act == algo.RecvReduce)
		p.bytes = p.bytes[n:]
	case algo.Copy, algo.Fold:
		s.store(r, st, track, n, append([]byte(nil), r.space[st.Src.Space][st.Src.Off:][:n]...), false)
	}
	r.pos[track] += n
	if r.pos[track] == st.Len {
		r.at[track]++
		r.pos[track] = 0
		return true
	}
	return n > 0
}

// store writes n bytes of step st to its Dst: in, plus Src if withSrc.
func (s *sim) store(r *simRank, st *algo.Step, track, n int, in []byte, withSrc bool) {
	pos := r.pos[track]
	dst := r.space[st.Dst.Space][st.Dst.Off+pos:][:n]
	other := dst
	if withSrc {
		other = r.space[st.Src.Space][st.Src.Off+pos:][:n]
	}
	for i := 0; i < n; i += elem {
		if n-i < elem { // a copy may stop within an element
			copy(dst[i:], in[i:])
			break
		}
		v := int64(binary.LittleEndian.Uint64(in[i:]))
		if withSrc || st.Act == algo.Fold {
			v += int64(binary.LittleEndian.Uint64(other[i:]))
		}
		if st.Scale {
			v /= r.divide
		}
		binary.LittleEndian.PutUint64(dst[i:], uint64(v))
	}
}

// run runs all tracks to their end. It fails the test on a deadlock, or if bytes are left in a pipe.
func (s *sim) run(rng *rand.Rand) {
	type lane struct{ rank, track int }
	var lanes []lane
	for _, r := range s.ranks {
		for t := range r.sched.Tracks {
			lanes = append(lanes, lane{r.rank, t})
		}
	}
	for {
		moved := false
		rng.Shuffle(len(lanes), func(i, j int) { lanes[i], lanes[j] = lanes[j], lanes[i] })
		for _, l := range lanes {
			for burst := 1 + rng.IntN(3); burst > 0 && s.step(s.ranks[l.rank], l.track); burst-- {
				moved = true
			}
		}
		if moved {
			continue
		}
		for _, r := range s.ranks {
			for t, steps := range r.sched.Tracks {
				if r.at[t] < len(steps) {
					s.t.Fatalf("deadlock: rank %d track %d at step %d of %d: %+v", r.rank, t, r.at[t], len(steps), steps[r.at[t]])
				}
			}
		}
		for k, p := range s.pipes {
			if len(p.bytes)+len(p.messages) > 0 {
				s.t.Fatalf("pipe %v ends with %d bytes and %d messages unread", k, len(p.bytes), len(p.messages))
			}
		}
		return
	}
}
