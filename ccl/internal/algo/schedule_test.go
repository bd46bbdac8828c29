package algo_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/record"
)

func value(rank, i int) int64 { return int64(rank+1)*1_000_003 + int64(i)*7 }

func fill(b []byte, f func(i int) int64) []byte {
	for i := 0; i < len(b)/elem; i++ {
		binary.LittleEndian.PutUint64(b[i*elem:], uint64(f(i)))
	}
	return b
}

// buffers returns one rank's buffers, laid out and filled as the collective requires.
func buffers(call algo.Call, rank, n int) (send, recv []byte) {
	share := call.Count * elem
	ss, rs := share, share
	switch call.Coll {
	case record.AllGather, record.Gather:
		rs = n * share
	case record.ReduceScatter, record.Scatter:
		ss = n * share
	case record.AlltoAll:
		ss, rs = n*share, n*share
	}
	if !call.InPlace {
		return fill(make([]byte, ss), func(i int) int64 { return value(rank, i) }), make([]byte, rs)
	}
	switch {
	case ss == rs:
		send = fill(make([]byte, ss), func(i int) int64 { return value(rank, i) })
		return send, send
	case ss < rs:
		recv = make([]byte, rs)
		return fill(recv[rank*share:][:share], func(i int) int64 { return value(rank, i) }), recv
	default:
		send = fill(make([]byte, ss), func(i int) int64 { return value(rank, i) })
		return send, send[rank*share:][:share]
	}
}

// want returns element i of rank's result. ok is false if the result is not defined.
func want(call algo.Call, rank, n, i int) (v int64, ok bool) {
	sum := func(i int) int64 {
		var s int64
		for r := range n {
			s += value(r, i)
		}
		if call.Op == record.Avg {
			s /= int64(n)
		}
		return s
	}
	root := int(call.Root)
	switch call.Coll {
	case record.AllReduce:
		return sum(i), true
	case record.Reduce:
		return sum(i), rank == root
	case record.ReduceScatter:
		return sum(rank*call.Count + i), true
	case record.Broadcast:
		return value(root, i), true
	case record.AllGather:
		return value(i/call.Count, i%call.Count), true
	case record.Gather:
		return value(i/call.Count, i%call.Count), rank == root
	case record.Scatter:
		return value(root, rank*call.Count+i), true
	case record.AlltoAll:
		return value(i/call.Count, rank*call.Count+i%call.Count), true
	}
	return 0, false
}

var algos = map[record.CollKind][]record.Algo{
	record.AllReduce:     {record.AlgoDirect, record.AlgoDoubling, record.AlgoHierarchical, record.AlgoRing},
	record.ReduceScatter: {record.AlgoDirect, record.AlgoRing},
	record.AllGather:     {record.AlgoDirect, record.AlgoRing},
	record.Broadcast:     {record.AlgoDirect, record.AlgoTree, record.AlgoRing},
	record.Reduce:        {record.AlgoDirect, record.AlgoTree, record.AlgoRing},
	record.AlltoAll:      {record.AlgoDirect},
	record.Gather:        {record.AlgoDirect},
	record.Scatter:       {record.AlgoDirect},
	record.Barrier:       {record.AlgoDirect, record.AlgoDoubling},
}

// TestEveryCollectiveHasAnAlgorithm: every collective that Messages does not build has an entry in
// the catalogue and in algos.
func TestEveryCollectiveHasAnAlgorithm(t *testing.T) {
	for k := record.CollNone + 1; k.Known(); k++ {
		if k.Traits().Varies() {
			continue
		}
		if len(algos[k]) == 0 {
			t.Errorf("no algorithm of %v is tested", k)
		}
		for _, a := range algos[k] {
			call := algo.Call{Coll: k, DType: record.Float64, Root: 0, Count: 8, InPlace: true}
			if _, err := algo.Build(call, algo.NewPlace(0, []int32{0, 0, 1, 1}, 2), algo.Choice{Algo: a, Proto: record.ProtoSimple}); err != nil {
				t.Error(err)
			}
		}
	}
}

// own reports whether element i of rank's result is its own contribution.
func own(call algo.Call, rank, i int) bool {
	switch call.Coll {
	case record.AllGather, record.Gather, record.AlltoAll:
		return i/call.Count == rank
	case record.Broadcast, record.Scatter:
		return rank == int(call.Root)
	}
	return false
}

func check(t rapid.TB, call algo.Call, nodes []int32, choice algo.Choice, credit int, rng *rand.Rand) {
	n := len(nodes)
	s := &sim{t: t, credit: credit, pipes: map[[3]int]*pipe{}}
	for r := range n {
		// A 16-bit type makes Build choose float32 accumulators; the simulator's
		// elements are 8 bytes, so the count is scaled to give the same bytes.
		c := call
		c.Count = call.Count * elem / call.DType.Size()
		sched, err := algo.Build(c, algo.NewPlace(r, nodes, 2), choice)
		if err != nil {
			t.Skip(err)
		}
		// Some ranks set Apart, if their schedule then only sends from SendBuf.
		mine := call
		if n > 1 && rng.IntN(2) == 0 {
			c.InPlace, c.Apart = false, true
			if other, err := algo.Build(c, algo.NewPlace(r, nodes, 2), choice); err == nil && other.OnlySends(algo.SendBuf, nil) {
				mine.InPlace, mine.Apart, sched = false, true, other
			}
		}
		if len(sched.Tracks) != 2 {
			t.Fatalf("%d tracks", len(sched.Tracks))
		}
		rank := &simRank{rank: r, call: mine, sched: sched, at: make([]int, 2), pos: make([]int, 2), divide: int64(n)}
		send, recv := buffers(mine, r, n)
		rank.space = [4][]byte{send, recv, make([]byte, sched.Scratch), make([]byte, sched.Acc)}
		headers := map[[2]int]bool{}
		for ti, track := range sched.Tracks {
			for _, st := range track {
				if st.Act <= algo.RecvReduce && (st.Act == algo.Send) != (ti == 0) {
					t.Fatalf("rank %d: %+v on track %d", r, st, ti)
				}
				if key := [2]int{ti, int(st.Peer)}; st.Act <= algo.RecvReduce && !st.LL {
					if st.Header == headers[key] {
						t.Fatalf("rank %d: header %v on %v, seen before: %v", r, st.Header, key, headers[key])
					}
					headers[key] = true
				}
			}
		}
		s.ranks = append(s.ranks, rank)
	}
	s.run(rng)
	for _, k := range s.kept {
		if !bytes.Equal(k.in, k.sent) {
			t.Fatalf("%v %v, rank %d: bytes that %+v sends do not stay as they are", call, choice, k.rank, k.step)
		}
	}
	for r, rank := range s.ranks {
		out := rank.space[algo.RecvBuf]
		for i := 0; i < len(out)/elem; i++ {
			v, ok := want(call, r, n, i)
			if rank.call.Apart && own(call, r, i) {
				v = 0 // Apart: it is not written
			}
			if got := int64(binary.LittleEndian.Uint64(out[i*elem:])); ok && got != v {
				t.Fatalf("%v %v, rank %d of %d, element %d: got %d, want %d", call, choice, r, n, i, got, v)
			}
		}
	}
}

// TestEveryAlgorithm runs every algorithm of every collective on random shapes. Connections may
// buffer very little, so that a schedule that can deadlock does.
func TestEveryAlgorithm(t *testing.T) {
	for coll, list := range algos {
		for _, a := range list {
			t.Run(fmt.Sprintf("%v/%v", coll, a), func(t *testing.T) {
				rapid.Check(t, func(rt *rapid.T) {
					n := rapid.IntRange(1, 9).Draw(rt, "ranks")
					per := rapid.IntRange(1, n).Draw(rt, "ranks per node")
					nodes := make([]int32, n)
					for i := range nodes {
						nodes[i] = int32(i / per)
						if rapid.Bool().Draw(rt, "scatter nodes") {
							nodes[i] = int32(i % ((n + per - 1) / per))
						}
					}
					if rapid.Bool().Draw(rt, "equal nodes") {
						for i := range nodes {
							nodes[i] = int32(i / per)
						}
					}
					call := algo.Call{
						Coll:    coll,
						DType:   rapid.SampledFrom([]record.DType{record.Int64, record.Float16}).Draw(rt, "type"),
						Op:      rapid.SampledFrom([]record.RedOp{record.Sum, record.Avg}).Draw(rt, "op"),
						Count:   rapid.IntRange(0, 400).Draw(rt, "count"),
						InPlace: rapid.Bool().Draw(rt, "in place"),
					}
					switch coll {
					case record.Reduce, record.Broadcast, record.Gather, record.Scatter:
						call.Root = int32(rapid.IntRange(0, n-1).Draw(rt, "root"))
						if call.InPlace && int(call.Root) >= n {
							call.InPlace = false
						}
					case record.Barrier:
						call.Count = 0
					}
					choice := algo.Choice{
						Algo:  a,
						Proto: rapid.SampledFrom([]record.Proto{record.ProtoSimple, record.ProtoLL}).Draw(rt, "proto"),
						Block: rapid.SampledFrom([]int{64, 256, 1 << 20}).Draw(rt, "block"),
					}
					if _, err := algo.Build(call, algo.NewPlace(0, nodes, 2), choice); err != nil {
						rt.Skip("not for this place")
					}
					credit := rapid.SampledFrom([]int{64, 200, 1 << 20}).Draw(rt, "credit")
					check(rt, call, nodes, choice, credit, rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "seed"), 1)))
				})
			})
		}
	}
}

// TestChoose: all ranks choose the same, and Build can build it.
func TestChoose(t *testing.T) {
	m := algo.DefaultModel()
	for coll := range algos {
		for n := 1; n <= 9; n++ {
			for _, per := range []int{1, 2, 3, n} {
				nodes := make([]int32, n)
				for i := range nodes {
					nodes[i] = int32(i / per)
				}
				for _, count := range []int{0, 1, 100, 10_000, 1_000_000} {
					call := algo.Call{Coll: coll, DType: record.Float32, Count: count}
					var first algo.Choice
					for r := range n {
						p := algo.NewPlace(r, nodes, 2)
						choice := m.Choose(call, &p, algo.Overrides{})
						if _, err := algo.Build(call, p, choice); err != nil {
							t.Fatal(err)
						}
						if r == 0 {
							first = choice
						} else if choice != first {
							t.Fatalf("%v ×%d on %d ranks, %d a node: rank %d picks %+v, rank 0 %+v", coll, count, n, per, r, choice, first)
						}
					}
				}
			}
		}
	}
}

// TestChooseBetweenNodes: the first block of a chain between nodes is as long as the blocks that are
// sent there, so a chain of many nodes takes longer to fill than a tree takes for a medium call.
func TestChooseBetweenNodes(t *testing.T) {
	m := algo.DefaultModel()
	for _, tt := range []struct {
		ranks, bytes int
		want         record.Algo
	}{
		{8, 512 << 10, record.AlgoTree}, {8, 2 << 20, record.AlgoRing},
		{16, 1 << 20, record.AlgoTree}, {16, 4 << 20, record.AlgoRing},
		{128, 4 << 20, record.AlgoTree}, {128, 16 << 20, record.AlgoRing},
	} {
		nodes := make([]int32, tt.ranks)
		for i := range nodes {
			nodes[i] = int32(i)
		}
		p := algo.NewPlace(0, nodes, 64)
		call := algo.Call{Coll: record.Broadcast, DType: record.Float32, Count: tt.bytes / 4}
		choice := m.Choose(call, &p, algo.Overrides{})
		if choice.Algo != tt.want || choice.Block < 128<<10 {
			t.Errorf("Broadcast of %d bytes on %d nodes: %+v, want %v", tt.bytes, tt.ranks, choice, tt.want)
		}
	}
}

// TestOnlySends: OnlySends holds for the schedules that do no more with a rank's contribution than
// send it.
func TestOnlySends(t *testing.T) {
	nodes := []int32{0, 1, 2, 3}
	for coll, list := range algos {
		if coll == record.Barrier {
			continue // nobody contributes anything
		}
		for _, a := range list {
			for r := range nodes {
				only := map[bool]bool{}
				for _, apart := range []bool{false, true} {
					call := algo.Call{Coll: coll, DType: record.Float32, Root: 2, Count: 1000, Apart: apart}
					s, err := algo.Build(call, algo.NewPlace(r, nodes, 2), algo.Choice{Algo: a, Proto: record.ProtoSimple, Block: 1 << 10})
					if err != nil {
						t.Fatal(err)
					}
					only[apart] = s.OnlySends(algo.SendBuf, nil)
					sends := func(st algo.Step) bool { return st.Act == algo.Send && st.Src.Space == algo.SendBuf }
					if i := slices.IndexFunc(s.Tracks[0], sends); i >= 0 && s.OnlySends(algo.SendBuf, []int{int(s.Tracks[0][i].Peer)}) {
						t.Errorf("%v %v, rank %d: what it sends to rank %d is said to go elsewhere", coll, a, r, s.Tracks[0][i].Peer)
					}
				}
				root := r == 2
				var want, copies bool // only sends with Apart; copies without Apart
				switch coll {
				case record.AllGather, record.AlltoAll:
					want, copies = true, true
				case record.Broadcast, record.Scatter, record.Gather:
					want, copies = true, root
				case record.Reduce:
					want = only[true] && !root // the leaves of a tree, the first rank of a chain
				}
				if only[true] != want || only[false] != (want && !copies) {
					t.Errorf("%v %v, rank %d: only sends %v, apart %v", coll, a, r, only[false], only[true])
				}
			}
		}
	}
	call := algo.Call{Coll: record.AllGather, DType: record.Float32, Count: 10, Apart: true}
	s, err := algo.Build(call, algo.NewPlace(0, nodes, 2), algo.Choice{Algo: record.AlgoDirect, Proto: record.ProtoLL})
	if err != nil || s.OnlySends(algo.SendBuf, nil) {
		t.Errorf("low-latency lines do not read what they send: %v", err)
	}
}

// TestKept: the rings and AlltoAll can send the expected share of their bytes zero-copy.
func TestKept(t *testing.T) {
	nodes := []int32{0, 1, 2, 3}
	for _, c := range []struct {
		coll    record.CollKind
		inPlace bool
		least   float64 // share of the bytes sent
	}{
		{record.AllReduce, false, 0.6}, {record.AllReduce, true, 0.5}, {record.AllGather, false, 1}, {record.AllGather, true, 1},
		{record.Broadcast, false, 1}, {record.ReduceScatter, false, 0.3}, {record.AlltoAll, false, 1},
	} {
		choice := algo.Choice{Algo: record.AlgoRing, Proto: record.ProtoSimple, Block: 1 << 20}
		if c.coll == record.AlltoAll {
			choice.Algo = record.AlgoDirect
		}
		kept, all := 0, 0
		for rank := range nodes {
			call := algo.Call{Coll: c.coll, DType: record.Float32, Count: 1 << 20, InPlace: c.inPlace}
			s, err := algo.Build(call, algo.NewPlace(rank, nodes, 2), choice)
			if err != nil {
				t.Fatal(err)
			}
			for _, track := range s.Tracks {
				for _, st := range track {
					if st.Act == algo.Send {
						all += st.Len
						if st.Kept {
							kept += st.Len
						}
					}
				}
			}
		}
		if share := float64(kept) / float64(all); share < c.least {
			t.Errorf("%v, in place %v: %.2f of the bytes, want %.2f", c.coll, c.inPlace, share, c.least)
		}
	}
	counts, offsets := []int{3, 0, 5, 1 << 16}, []int{0, 3, 3, 8}
	for _, track := range new(algo.Messages).AlltoAllv(1, 4, &algo.Vector{SendCounts: counts, SendOffsets: offsets, RecvCounts: counts, RecvOffsets: offsets}, 4).Tracks {
		for _, st := range track {
			if st.Act == algo.Send && !st.Kept {
				t.Errorf("AlltoAllv copies the %d bytes for rank %d", st.Len, st.Peer)
			}
		}
	}
}

// TestLegs: each Leg has one First and one Last step, and its other steps lie between them.
func TestLegs(t *testing.T) {
	nodes := []int32{0, 0, 1, 1}
	for _, coll := range []record.CollKind{record.AllReduce, record.AllGather, record.ReduceScatter, record.Broadcast, record.AlltoAll} {
		for _, a := range []record.Algo{record.AlgoDirect, record.AlgoRing, record.AlgoTree, record.AlgoHierarchical} {
			for rank := range nodes {
				call := algo.Call{Coll: coll, DType: record.Float32, Count: 1 << 18}
				s, err := algo.Build(call, algo.NewPlace(rank, nodes, 2), algo.Choice{Algo: a, Proto: record.ProtoSimple, Block: 1 << 16})
				if err != nil {
					continue // this collective does not have the algorithm
				}
				checkLegs(t, s)
			}
		}
	}
}

// TestLegsOfAChain: a Leg reaches from the first piece to the last, however many pieces there are.
func TestLegsOfAChain(t *testing.T) {
	place := algo.NewPlace(1, []int32{0, 1, 2}, 2)
	for _, tt := range []struct {
		coll record.CollKind
		algo record.Algo
		want []algo.Leg
	}{
		{record.AllReduce, record.AlgoRing, []algo.Leg{{Peer: 3}, {Peer: 3, Reduce: true}}},
		{record.AllReduce, record.AlgoDirect, []algo.Leg{{Peer: 3, Reduce: true}, {Peer: 7, Reduce: true}}},
		{record.AllGather, record.AlgoDirect, []algo.Leg{{Peer: 3}, {Peer: 7}}},
		{record.AlltoAll, record.AlgoDirect, []algo.Leg{{Peer: 3}, {Peer: 7}}},
	} {
		var pieces []algo.Piece
		for range 20 {
			call := algo.Call{Coll: tt.coll, DType: record.Float32, Root: -1, Count: 1 << 10, InPlace: true}
			choice := algo.Choice{Algo: tt.algo, Proto: record.ProtoSimple, Block: 1 << 10}
			pieces = append(pieces, algo.Piece{Call: call, Place: &place, Choice: choice, Members: []int{3, 5, 7}})
		}
		s, err := algo.Chain(pieces)
		if err != nil {
			t.Fatal(err)
		}
		legs := checkLegs(t, s)
		for _, leg := range tt.want {
			if !legs[leg] || len(legs) != len(tt.want) {
				t.Errorf("%v %v: legs %v, want %v", tt.coll, tt.algo, legs, tt.want)
			}
		}
	}
}

// checkLegs checks that each Leg of s has one First and one Last step, and returns the legs.
func checkLegs(t *testing.T, s *algo.Schedule) map[algo.Leg]bool {
	t.Helper()
	open, over := map[algo.Leg]bool{}, map[algo.Leg]bool{}
	for _, track := range s.Tracks {
		for i := range track {
			st := &track[i]
			receives := st.Peer >= 0 && (st.Act == algo.Recv || st.Act == algo.RecvReduce)
			if !receives && (st.First || st.Last) {
				t.Fatalf("%v: %+v receives nothing", s.Algo, st)
			}
			if !receives {
				continue
			}
			leg := st.Leg()
			if st.First != !open[leg] || over[leg] {
				t.Fatalf("%v: %+v, begun %v, over %v", s.Algo, st, open[leg], over[leg])
			}
			open[leg], over[leg] = true, st.Last
		}
	}
	for leg := range open {
		if !over[leg] {
			t.Errorf("%v: %+v does not end", s.Algo, leg)
		}
	}
	return open
}

// TestScratch: a schedule's scratch memory is proportional to the bytes that it sends.
func TestScratch(t *testing.T) {
	const n, count = 512, 3
	node := make([]int32, n)
	for r := range node {
		node[r] = int32(r)
	}
	place := algo.NewPlace(0, node, 64)
	model := algo.DefaultModel()
	call := algo.Call{Coll: record.AlltoAll, DType: record.Float64, Root: -1, Count: count, InPlace: true}
	s, err := algo.Build(call, place, model.Choose(call, &place, algo.Overrides{}))
	if err != nil {
		t.Fatal(err)
	}
	if s.Scratch > 64*n {
		t.Errorf("AlltoAll of %d bytes sets aside %d", 8*n*count, s.Scratch)
	}
}
