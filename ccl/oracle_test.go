package ccl_test

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/record"
)

// A call is one collective of a test; its oracle is plain Go over float64, with
// values small enough for every type.
type call struct {
	coll    record.CollKind
	dt      ccl.DType
	op      ccl.Op
	count   int // by the convention of the collective's NCCL counterpart
	root    int
	inPlace bool
	salt    int
}

func (k call) value(rank, i int) float64 {
	if k.op == ccl.Prod {
		if (i+rank+k.salt)%7 == 0 {
			return 2
		}
		return 1
	}
	return float64((i*5 + rank*3 + k.salt) % 8)
}

func (k call) reduced(n, i int) float64 {
	v := k.value(0, i)
	for r := 1; r < n; r++ {
		x := k.value(r, i)
		switch k.op {
		case ccl.Prod:
			v *= x
		case ccl.Max:
			v = max(v, x)
		case ccl.Min:
			v = min(v, x)
		default:
			v += x
		}
	}
	if k.op == ccl.Avg {
		v /= float64(n)
	}
	return v
}

// shares is how many counts the send and receive buffers hold.
func (k call) shares(n int) (send, recv int) {
	switch k.coll {
	case record.AllGather, record.Gather:
		return 1, n
	case record.ReduceScatter, record.Scatter:
		return n, 1
	case record.AlltoAll:
		return n, n
	}
	return 1, 1
}

// want is element i of rank's receive buffer, if it is defined.
func (k call) want(rank, n, i int) (float64, bool) {
	switch k.coll {
	case record.AllReduce:
		return k.reduced(n, i), true
	case record.Reduce:
		return k.reduced(n, i), rank == k.root
	case record.ReduceScatter:
		return k.reduced(n, rank*k.count+i), true
	case record.Broadcast:
		return k.value(k.root, i), true
	case record.AllGather:
		return k.value(i/k.count, i%k.count), true
	case record.Gather:
		return k.value(i/k.count, i%k.count), rank == k.root
	case record.Scatter:
		return k.value(k.root, rank*k.count+i), true
	case record.AlltoAll:
		return k.value(i/k.count, rank*k.count+i%k.count), true
	}
	return 0, false
}

// start calls k on c and returns the check of its result.
func (k call) start(c *ccl.Comm, s *ccl.Stream) (check func() error, err error) {
	n, rank, es := c.Size(), c.Rank(), k.dt.Size()
	ss, rs := k.shares(n)
	send, recv := make([]byte, ss*k.count*es), make([]byte, rs*k.count*es)
	if k.inPlace {
		whole := make([]byte, max(len(send), len(recv)))
		send, recv = whole, whole
		if own := rank * k.count * es; ss < rs {
			send = whole[own:][:k.count*es]
		} else if rs < ss {
			recv = whole[own:][:k.count*es]
		}
	}
	for i := 0; i < len(send)/es; i++ {
		put(k.dt, send[i*es:], k.value(rank, i))
	}
	a, b := ccl.Bytes(k.dt, send), ccl.Bytes(k.dt, recv)
	switch k.coll {
	case record.AllReduce:
		err = c.AllReduce(s, a, b, k.op)
	case record.Reduce:
		err = c.Reduce(s, a, b, k.op, k.root)
	case record.ReduceScatter:
		err = c.ReduceScatter(s, a, b, k.op)
	case record.Broadcast:
		err = c.Broadcast(s, a, b, k.root)
	case record.AllGather:
		err = c.AllGather(s, a, b)
	case record.Gather:
		err = c.Gather(s, a, b, k.root)
	case record.Scatter:
		err = c.Scatter(s, a, b, k.root)
	case record.AlltoAll:
		err = c.AlltoAll(s, a, b)
	case record.Barrier:
		err = c.Barrier(s)
	}
	return func() error {
		var wrong []string
		for i := 0; i < len(recv)/es; i++ {
			v, ok := k.want(rank, n, i)
			if !ok {
				return nil
			}
			if k.dt <= ccl.Uint64 {
				v = math.Trunc(v)
			}
			if got := get(k.dt, recv[i*es:]); math.Abs(got-v) > rounding[k.dt]*math.Abs(v) {
				wrong = append(wrong, fmt.Sprintf("%d is %v, want %v", i, got, v))
			}
		}
		if len(wrong) > 0 {
			return fmt.Errorf("%+v: rank %d of %d: %d elements wrong: %s", k, rank, n, len(wrong), strings.Join(wrong[:min(len(wrong), 20)], "; "))
		}
		return nil
	}, err
}

var kinds = []record.CollKind{
	record.AllReduce, record.Reduce, record.ReduceScatter, record.Broadcast, record.AllGather,
	record.Gather, record.Scatter, record.AlltoAll, record.Barrier,
}

// TestEveryKindIsHeldAgainstTheOracle: kinds has all but those that go as messages, of
// which TestPointToPoint has cases.
func TestEveryKindIsHeldAgainstTheOracle(t *testing.T) {
	for k := record.CollNone + 1; k.Known(); k++ {
		if !k.Traits().Varies() && !slices.Contains(kinds, k) {
			t.Errorf("%v is not among kinds", k)
		}
	}
}

func reduces(k record.CollKind) bool {
	return k == record.AllReduce || k == record.Reduce || k == record.ReduceScatter
}

// calls lists what a size and a placement are tested with: every type and
// operator, or with few set some of them.
func calls(n int, counts []int, few bool) []call {
	var list []call
	for _, coll := range kinds {
		for dt := ccl.Int8; dt <= ccl.BFloat16; dt++ {
			for op := ccl.Sum; op <= ccl.Avg; op++ {
				if !reduces(coll) && (op != ccl.Sum || dt != ccl.Int8 && dt != ccl.Float64) {
					continue
				}
				if few && (dt != ccl.Float16 && dt != ccl.Float32 && dt != ccl.Int8 || op == ccl.Prod || op == ccl.Max) {
					continue
				}
				for i, count := range counts {
					list = append(list, call{coll, dt, op, count, (i + int(op)) % n, (i+int(dt)+int(op))%2 == 0, len(list)})
				}
			}
		}
	}
	return list
}

func runCalls(list []call) func(ctx context.Context, c *ccl.Comm) error {
	return func(ctx context.Context, c *ccl.Comm) error {
		s := c.NewStream()
		var checks []func() error
		for i, k := range list {
			check, err := k.start(c, s)
			if err != nil {
				return err
			}
			if checks = append(checks, check); i%5 != 4 && i < len(list)-1 {
				continue // a few at once
			}
			if err := s.Wait(ctx); err != nil {
				return err
			}
			for _, check := range checks {
				if err := check(); err != nil {
					return err
				}
			}
			checks = checks[:0]
		}
		return nil
	}
}

// TestCollectives runs every collective with every type, operator and a few
// odd counts, on several numbers of ranks, on one node and on several.
func TestCollectives(t *testing.T) {
	counts := []int{0, 1, 3, 13, 255, 4099}
	for _, n := range []int{1, 2, 3, 4, 5, 8} {
		for _, per := range []int{n, 2, 1} {
			if per > n || per == 1 && n > 4 {
				continue
			}
			t.Run(fmt.Sprintf("%d ranks, %d a node", n, per), func(t *testing.T) {
				ranks(t, n, nodes(per), runCalls(calls(n, counts, n == 8 || per == 1)))
			})
		}
	}
}

// TestOverrides runs every algorithm and protocol where it exists.
func TestOverrides(t *testing.T) {
	for algo := record.AlgoDirect; algo <= record.AlgoHierarchical; algo++ {
		for proto := record.ProtoLL; proto <= record.ProtoSimple; proto++ {
			for _, n := range []int{3, 4} {
				t.Run(fmt.Sprintf("%v/%v/%d", algo, proto, n), func(t *testing.T) {
					prepare := func(cfg *ccl.Config) {
						nodes(2)(cfg)
						cfg.Algo, cfg.Proto = algo, proto
					}
					ranks(t, n, prepare, runCalls(calls(n, []int{7, 1000}, true)))
				})
			}
		}
	}
}

// TestLarge moves messages that are many times what connections buffer.
func TestLarge(t *testing.T) {
	for _, per := range []int{3, 1} {
		ranks(t, 3, nodes(per), runCalls([]call{
			{record.AllReduce, ccl.Float32, ccl.Sum, 3_000_001, 0, true, 0},
			{record.AllReduce, ccl.Float16, ccl.Avg, 1_000_003, 0, false, 0},
			{record.AllGather, ccl.Int64, ccl.Sum, 300_001, 0, true, 0},
			{record.ReduceScatter, ccl.BFloat16, ccl.Sum, 1_000_001, 0, false, 0},
			{record.Broadcast, ccl.Uint8, ccl.Sum, 9_000_001, 2, false, 0},
			{record.Reduce, ccl.Float64, ccl.Max, 700_001, 1, true, 0},
			{record.AlltoAll, ccl.Int32, ccl.Sum, 500_001, 0, true, 0},
			{record.AlltoAll, ccl.Int32, ccl.Sum, 500_001, 0, false, 0},
			{record.Gather, ccl.Float32, ccl.Sum, 500_001, 0, true, 0},
			{record.Scatter, ccl.Float32, ccl.Sum, 500_001, 2, true, 0},
		}))
	}
}

// TestSameBits: all ranks get the same bits from AllReduce, and the same ones
// every time, however floats round.
func TestSameBits(t *testing.T) {
	for _, per := range []int{5, 2, 1} {
		for _, count := range []int{5, 300, 20_000} {
			ranks(t, 5, nodes(per), func(ctx context.Context, c *ccl.Comm) error {
				s := c.NewStream()
				rng := rand.New(rand.NewPCG(uint64(c.Rank()), 7))
				in, first := make([]float32, count), make([]float32, count)
				for i := range in {
					in[i] = rng.Float32()*2000 - 1000
				}
				all := make([]float32, count*c.Size())
				for round := range 3 {
					out := make([]float32, count)
					if err := do(ctx, s, c.AllReduce(s, ccl.Of(in), ccl.Of(out), ccl.Sum)); err != nil {
						return err
					}
					if err := do(ctx, s, c.AllGather(s, ccl.Of(out), ccl.Of(all))); err != nil {
						return err
					}
					for r := range c.Size() {
						if !slices.Equal(all[r*count:][:count], out) {
							return fmt.Errorf("%d elements: rank %d has other bits than rank %d", count, r, c.Rank())
						}
					}
					if round == 0 {
						copy(first, out)
					} else if !slices.Equal(first, out) {
						return fmt.Errorf("%d elements: other bits than the first time", count)
					}
				}
				return nil
			})
		}
	}
}

// TestHalfAccuracy: on one node, sums of 16-bit floats are rounded once.
func TestHalfAccuracy(t *testing.T) {
	const n, count = 4, 10_000
	in := func(rank, i int) ccl.BF16 {
		return ccl.ToBF16(float32(math.Sin(float64(i*n+rank)) * 100))
	}
	ranks(t, n, nil, func(ctx context.Context, c *ccl.Comm) error {
		s := c.NewStream()
		x := make([]ccl.BF16, count)
		for i := range x {
			x[i] = in(c.Rank(), i)
		}
		if err := do(ctx, s, c.AllReduce(s, ccl.Of(x), ccl.Of(x), ccl.Sum)); err != nil {
			return err
		}
		for i := range x {
			var exact float64
			for r := range n {
				exact += float64(in(r, i).Float32())
			}
			// Half a unit in the last place, and float32's own errors on the way.
			tolerance := math.Abs(exact)/(1<<8) + 400.0/(1<<23)
			if got := float64(x[i].Float32()); math.Abs(got-exact) > tolerance {
				return fmt.Errorf("element %d is %v, want %v within %v", i, got, exact, tolerance)
			}
		}
		return nil
	})
}

// TestPointToPoint: sends, receives, groups and AlltoAllv of odd sizes.
func TestPointToPoint(t *testing.T) {
	for _, per := range []int{4, 2, 1} {
		ranks(t, 4, nodes(per), func(ctx context.Context, c *ccl.Comm) error {
			n, r := c.Size(), c.Rank()
			s := c.NewStream()
			for _, count := range []int{0, 1, 7, 1000, 300_001} {
				// A chain, then all to all in a group, itself included.
				token := make([]int32, count)
				if r > 0 {
					if err := c.Recv(s, ccl.Of(token), r-1); err != nil {
						return err
					}
				}
				if err := s.Wait(ctx); err != nil {
					return err
				}
				for i := range token {
					token[i] += int32(i)
				}
				if r < n-1 {
					if err := c.Send(s, ccl.Of(token), r+1); err != nil {
						return err
					}
				}
				out, in := make([][]int32, n), make([][]int32, n)
				err := c.Group(s, func(g *ccl.Group) error {
					for p := range n {
						out[p], in[p] = make([]int32, count+r), make([]int32, count+p)
						for i := range out[p] {
							out[p][i] = int32(1000*r + p + i)
						}
						if err := g.Send(ccl.Of(out[p]), p); err != nil {
							return err
						}
						if err := g.Recv(ccl.Of(in[p]), p); err != nil {
							return err
						}
					}
					return nil
				})
				if err := do(ctx, s, err); err != nil {
					return err
				}
				for i, v := range token {
					if v != int32((r+1)*i) {
						return fmt.Errorf("chain: rank %d has %d at %d", r, v, i)
					}
				}
				for p := range n {
					for i, v := range in[p] {
						if v != int32(1000*p+r+i) {
							return fmt.Errorf("group: rank %d has %d from %d at %d", r, v, p, i)
						}
					}
				}
				sc, so, rc, ro := make([]int, n), make([]int, n), make([]int, n), make([]int, n)
				stotal, rtotal := 0, 0
				for p := range n {
					sc[p], rc[p] = count/(r+p+1), count/(r+p+1)
					so[p], ro[p] = stotal, rtotal
					stotal, rtotal = stotal+sc[p], rtotal+rc[p]+1
				}
				a, b := make([]float64, stotal), make([]float64, rtotal)
				for p := range n {
					for i := range sc[p] {
						a[so[p]+i] = float64(r*100 + p + i)
					}
				}
				if err := do(ctx, s, c.AlltoAllv(s, ccl.Of(a), sc, so, ccl.Of(b), rc, ro)); err != nil {
					return err
				}
				for p := range n {
					for i := range rc[p] {
						if got, want := b[ro[p]+i], float64(p*100+r+i); got != want {
							return fmt.Errorf("AlltoAllv: rank %d has %v from %d at %d, want %v", r, got, p, i, want)
						}
					}
				}
			}
			return nil
		})
	}
}

// TestPrograms runs random programs over several communicators and streams.
func TestPrograms(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(2, 4).Draw(rt, "ranks")
		per := rapid.IntRange(1, n).Draw(rt, "ranks a node")
		type step struct {
			call   call
			comm   int
			stream int
			wait   bool
		}
		program := rapid.SliceOfN(rapid.Custom(func(rt *rapid.T) step {
			return step{
				call: call{
					coll:    rapid.SampledFrom(kinds).Draw(rt, "collective"),
					dt:      rapid.SampledFrom([]ccl.DType{ccl.Int32, ccl.Float32, ccl.Float16, ccl.Uint8}).Draw(rt, "type"),
					op:      rapid.SampledFrom([]ccl.Op{ccl.Sum, ccl.Max, ccl.Avg}).Draw(rt, "op"),
					count:   rapid.SampledFrom([]int{0, 1, 5, 24, 100, 5000, 70_000}).Draw(rt, "count"),
					root:    rapid.IntRange(0, n-1).Draw(rt, "root"),
					inPlace: rapid.Bool().Draw(rt, "in place"),
					salt:    rapid.IntRange(0, 100).Draw(rt, "salt"),
				},
				comm:   rapid.IntRange(0, 2).Draw(rt, "communicator"),
				stream: rapid.IntRange(0, 2).Draw(rt, "stream"),
				wait:   rapid.IntRange(0, 3).Draw(rt, "wait") == 0,
			}
		}), 1, 40).Draw(rt, "program")
		ranks(rt, n, nodes(per), func(ctx context.Context, world *ccl.Comm) error {
			comms := []*ccl.Comm{world}
			for i, split := range []struct{ color, key int }{{0, -world.Rank()}, {world.Rank() % 2, 0}} {
				c, err := world.Split(ctx, split.color, split.key, fmt.Sprintf("c%d", i))
				if err != nil {
					return err
				}
				defer c.Close()
				comms = append(comms, c)
			}
			streams := []*ccl.Stream{world.NewStream(), world.NewStream(), world.NewStream()}
			var checks []func() error
			for _, st := range program {
				c := comms[st.comm]
				k := st.call
				k.root %= c.Size()
				check, err := k.start(c, streams[st.stream])
				if err != nil {
					return err
				}
				checks = append(checks, check)
				if st.wait {
					if err := streams[st.stream].Wait(ctx); err != nil {
						return err
					}
				}
			}
			for _, s := range streams {
				if err := s.Wait(ctx); err != nil {
					return err
				}
			}
			for _, check := range checks {
				if err := check(); err != nil {
					return err
				}
			}
			return nil
		})
	})
}
