package algo_test

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/record"
)

// TestChain runs chains of in-place collectives on all rails at once.
func TestChain(t *testing.T) {
	for _, coll := range []record.CollKind{record.AllReduce, record.ReduceScatter, record.AlltoAll, record.AllGather} {
		for _, a := range algos[coll] {
			t.Run(coll.String()+"/"+a.String(), func(t *testing.T) { rapid.Check(t, func(t *rapid.T) { chain(t, coll, a) }) })
		}
	}
}

func chain(t *rapid.T, coll record.CollKind, a record.Algo) {
	nodes, rails := rapid.IntRange(2, 5).Draw(t, "nodes"), rapid.IntRange(1, 3).Draw(t, "rails")
	counts := rapid.SliceOfN(rapid.IntRange(1, 60), 1, 6).Draw(t, "counts")
	choice := algo.Choice{Algo: a, Proto: record.ProtoSimple, Block: 64}
	dt := rapid.SampledFrom([]record.DType{record.Int64, record.Float16}).Draw(t, "type")
	call := func(count int) algo.Call {
		return algo.Call{Coll: coll, DType: dt, Root: -1, Count: count, InPlace: true}
	}
	s := &sim{t: t, credit: 64, pipes: map[[3]int]*pipe{}}
	index := make([]int32, nodes)
	for i := range index {
		index[i] = int32(i)
	}
	mark := func(rank int) int64 { return int64(rank%rails) * 1_000_000_007 } // tells rails apart
	for r := range nodes * rails {
		place := algo.NewPlace(r/rails, index, 2)
		var members []int
		for i := range nodes {
			members = append(members, i*rails+r%rails)
		}
		var pieces []algo.Piece
		var memory []byte
		for _, n := range counts {
			send, recv := buffers(call(n), place.Rank, nodes)
			whole, own := send, place.Rank*n*elem
			p := algo.Piece{Call: call(n), Place: &place, Choice: choice, Members: members}
			p.Call.Count = n * elem / dt.Size() // as in check
			p.Send = algo.Ref{Space: algo.SendBuf, Off: len(memory)}
			p.Recv = p.Send
			switch {
			case len(send) < len(recv):
				whole = recv
				p.Send.Off += own
			case len(send) > len(recv):
				p.Recv.Off += own
			}
			pieces, memory = append(pieces, p), append(memory, whole...)
		}
		for i := 0; i < len(memory); i += elem {
			if v := binary.LittleEndian.Uint64(memory[i:]); v != 0 {
				binary.LittleEndian.PutUint64(memory[i:], v+uint64(mark(r)))
			}
		}
		sched, err := algo.Chain(pieces)
		if err != nil {
			t.Fatal(err)
		}
		s.ranks = append(s.ranks, &simRank{
			rank: r, sched: sched, at: make([]int, 2), pos: make([]int, 2), divide: 1,
			space: [4][]byte{memory, memory, make([]byte, sched.Scratch), make([]byte, sched.Acc)},
		})
	}
	s.run(rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "order"), 0)))
	for _, k := range s.kept {
		if !bytes.Equal(k.in, k.sent) {
			t.Fatalf("%v %v, rank %d: bytes that %+v sends do not stay as they are", coll, choice, k.rank, k.step)
		}
	}
	if coll == record.AllGather && len(s.kept) == 0 && slices.Max(counts) > 0 {
		t.Fatal("a chain keeps nothing")
	}
	for r, rank := range s.ranks {
		off, node := 0, r/rails
		for _, n := range counts {
			send, recv := buffers(call(n), node, nodes)
			out := rank.space[0][off:][:max(len(send), len(recv))]
			off += len(out)
			if len(recv) < len(send) {
				out = out[node*n*elem:][:len(recv)]
			}
			for i := range len(out) / elem {
				v, _ := want(call(n), node, nodes, i)
				if v += mark(r); coll == record.AllReduce || coll == record.ReduceScatter {
					v += int64(nodes-1) * mark(r)
				}
				if got := int64(binary.LittleEndian.Uint64(out[i*elem:])); got != v {
					t.Fatalf("rank %d, element %d of %d: got %d, want %d", r, i, n, got, v)
				}
			}
		}
		// Each track passes its gate once per piece, in order. Left comes last.
		for _, gate := range []int{algo.Sent, algo.Received} {
			var done []int
			for _, g := range rank.gates {
				if piece, which := algo.GateOf(g); which == gate {
					done = append(done, piece)
				}
			}
			if len(done) != len(counts) || !slices.IsSorted(done) {
				t.Fatalf("rank %d: pieces %v of %d are done", r, done, len(counts))
			}
		}
		if last := rank.gates[len(rank.gates)-1]; last != algo.GateNumber(len(counts), algo.Left) {
			t.Fatalf("rank %d: gate %d is last", r, last)
		}
	}
}
