package ccl_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/record"
)

// onGPUs prepares ranks of one node, each on a GPU.
func onGPUs(t *testing.T, gpus int, change ...func(*ccl.Config)) func(*ccl.Config) {
	return func(cfg *ccl.Config) {
		cfg.Device = ccl.GPU(cfg.Rank % gpus)
		rec, err := record.Create(record.Options{
			Identity:   record.Identity{Job: "gpu", Rank: int32(cfg.Rank), WorldSize: int32(cfg.Size)},
			StampSlots: record.GPUStampSlots,
		})
		if err != nil {
			t.Error(err)
			return
		}
		cfg.Recorder = rec
		t.Cleanup(func() { // a process has so many of one name
			_ = rec.Close()
			_ = os.Remove(rec.Path())
		})
		for _, f := range change {
			f(cfg)
		}
	}
}

// memory is a rank's device memory of a test, in a window or not.
type memory struct {
	c      *ccl.Comm
	mem    *ccl.Memory
	window *ccl.Window
}

func newMemory(ctx context.Context, c *ccl.Comm, size int, window bool) (*memory, error) {
	m := &memory{c: c}
	var err error
	if m.mem, err = c.MemAlloc(size); err == nil && window {
		m.window, err = c.WindowRegister(ctx, m.mem)
	}
	return m, err
}

func (m *memory) free(ctx context.Context) error {
	var err error
	if m.window != nil {
		err = m.window.Deregister(ctx)
	}
	return errors.Join(err, m.mem.Free())
}

// bytes is n bytes from off.
func (m *memory) bytes(dt ccl.DType, off, n int) ccl.Buffer {
	return ccl.OnDevice(dt, m.mem.Ptr()+uintptr(off), n/dt.Size())
}

// device is start on device memory: areas at offsets that shift makes odd.
func (k call) device(ctx context.Context, c *ccl.Comm, s *ccl.Stream, m *memory, shift int) (check func() error, err error) {
	return k.deviceBy(ctx, c, s, m, shift, func(f func() error) error { return f() })
}

// deviceBy is device that has launch make the call.
func (k call) deviceBy(ctx context.Context, c *ccl.Comm, s *ccl.Stream, m *memory, shift int, launch func(func() error) error) (check func() error, err error) {
	n, rank, es := c.Size(), c.Rank(), k.dt.Size()
	ss, rs := k.shares(n)
	sendBytes, recvBytes := ss*k.count*es, rs*k.count*es
	shift *= es
	second := (max(sendBytes, recvBytes) + shift + 4096) &^ 15
	send, recv := m.bytes(k.dt, shift, sendBytes), m.bytes(k.dt, second+shift, recvBytes)
	if k.inPlace {
		own := rank * k.count * es
		whole := max(sendBytes, recvBytes)
		send, recv = m.bytes(k.dt, shift, whole), m.bytes(k.dt, shift, whole)
		if ss < rs {
			send = m.bytes(k.dt, shift+own, sendBytes)
		} else if rs < ss {
			recv = m.bytes(k.dt, shift+own, recvBytes)
		}
	}
	in, out := make([]byte, sendBytes), make([]byte, recvBytes)
	for i := range out {
		out[i] = 0x5a
	}
	for i := 0; i < len(in)/es; i++ {
		put(k.dt, in[i*es:], k.value(rank, i))
	}
	if err := errors.Join(c.CopyIn(recv, out), c.CopyIn(send, in)); err != nil {
		return nil, err
	}
	if err := do(ctx, s, c.Barrier(s)); err != nil {
		return nil, err
	}
	err = launch(func() error { return k.on(c, s, send, recv) })
	return func() error {
		if err := c.CopyOut(out, recv); err != nil {
			return err
		}
		wrong, first := 0, ""
		for i := 0; i < len(out)/es; i++ {
			v, ok := k.want(rank, n, i)
			if !ok {
				return nil
			}
			if k.dt <= ccl.Uint64 {
				v = math.Trunc(v)
			}
			if got := get(k.dt, out[i*es:]); !(math.Abs(got-v) <= rounding[k.dt]*math.Abs(v)) {
				if wrong++; wrong == 1 {
					first = fmt.Sprintf("element %d is %v, want %v", i, got, v)
				}
			}
		}
		if wrong > 0 {
			algo, sms := c.GPUAlgo()
			return fmt.Errorf("%+v by %v/%d: rank %d of %d: %d of %d elements wrong: %s", k, algo, sms, rank, n, wrong, len(out)/es, first)
		}
		return nil
	}, err
}

// gpuWays are the ways to force, with counts that each can have.
var gpuWays = []struct {
	way    string
	counts []int
}{
	{"ll", []int{1, 3, 13, 255, 1024, 4099, 8192}},
	{"ll2", []int{1, 3, 13, 255, 4099, 32768}},
	{"ll12", []int{1, 3, 13, 255, 1024, 4099, 20_000, 70_000}},
	{"sym", []int{1, 3, 13, 255, 4099, 100_003, 262144}},
	{"bulk", []int{1, 13, 4099, 100_003, 262144}},
	{"ce", []int{1, 13, 4099, 100_003, 2_000_003}},
	{"pushbulk", []int{1, 13, 4099, 100_003, 2_000_003}},
	{"ring", []int{1, 13, 4099, 100_003, 300_000}},
	{"chain", []int{1, 3, 13, 4099, 100_003, 1_200_003, 3_000_001}},
	{"", []int{1, 1000, 40_000, 3_000_001}},
}

// TestGPU runs every collective × way × type × operator × size on device memory,
// registered and not, aligned and not, in place and not.
func TestGPU(t *testing.T) {
	n, gpus := gpuRanks(t)
	for _, w := range gpuWays {
		for _, window := range []bool{true, false} {
			if !window && w.way == "ce" {
				continue // needs windows, and would take another way
			}
			t.Run(fmt.Sprintf("way %q, window %v", w.way, window), func(t *testing.T) {
				if faked && (w.way == "bulk" || w.way == "pushbulk") {
					t.Skip("the fake GPUs' compute capability is 8.0")
				}
				force := func(cfg *ccl.Config) { cfg.GPU.Algo = w.way }
				counts := w.counts
				if testing.Short() { // under the race detector: what the host does depends on few of them
					counts = counts[max(0, len(counts)-3):]
				}
				everyCall(t, n, window, gpuCalls(n, counts), onGPUs(t, gpus, force))
			})
		}
	}
}

// everyCall runs the calls on device memory of n ranks.
func everyCall(t *testing.T, n int, window bool, list []call, prepare func(*ccl.Config)) {
	most := 0
	for _, k := range list {
		most = max(most, k.count)
	}
	ranks(t, n, prepare, func(ctx context.Context, c *ccl.Comm) error {
		m, err := newMemory(ctx, c, 2*(most*8*n)+1<<20, window)
		if err != nil {
			return err
		}
		if err := onDevice(ctx, c, m, list); err != nil {
			return err
		}
		return m.free(ctx)
	})
}

// onDevice runs and checks the calls, one after the other.
func onDevice(ctx context.Context, c *ccl.Comm, m *memory, list []call) error {
	s := c.NewStream()
	for i, k := range list {
		check, err := k.device(ctx, c, s, m, i%3)
		if err := do(ctx, s, err); err != nil {
			return err
		}
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

// gpuCalls is calls with the types that only GPUs have, and with large counts for
// few types.
func gpuCalls(n int, counts []int) (list []call) {
	for _, k := range calls(n, counts, false) {
		if k.count*k.dt.Size() > 1<<20 && k.dt != ccl.Float32 && k.dt != ccl.BFloat16 {
			continue
		}
		// The fake's reductions are of float32, and slow.
		if faked && (reduces(k.coll) && k.dt != ccl.Float32 || k.op != ccl.Sum && k.op != ccl.Avg || k.count > 5000) {
			continue
		}
		list = append(list, k)
	}
	if faked {
		return list
	}
	for _, dt := range []ccl.DType{ccl.Float8E4M3, ccl.Float8E5M2} {
		for _, op := range []ccl.Op{ccl.Sum, ccl.Max, ccl.Min, ccl.Avg} {
			for _, coll := range []record.CollKind{record.AllReduce, record.ReduceScatter, record.Reduce} {
				for i, count := range counts {
					if count < 1<<20 {
						list = append(list, call{coll, dt, op, count, i % n, i%2 == 0, len(list)})
					}
				}
			}
		}
	}
	return list
}

// TestGPUMixed runs many operations of all kinds in random order on several
// communicators and streams, unchecked but for the last of each buffer: what is
// wrong in any would show there or hang.
func TestGPUMixed(t *testing.T) {
	n, gpus := gpuRanks(t)
	rounds := 10_000
	if faked {
		rounds = 150
	}
	mixed(t, n, rounds, onGPUs(t, gpus))
}

func mixed(t *testing.T, n, rounds int, prepare func(*ccl.Config)) {
	ranks(t, n, prepare, func(ctx context.Context, c *ccl.Comm) error {
		comms := []*ccl.Comm{c}
		for i := range 2 {
			d, err := c.Split(ctx, 0, (c.Rank()+i+1)%n, fmt.Sprintf("mixed%d", i)) // other orders of ranks
			if err != nil {
				return err
			}
			defer d.Close()
			comms = append(comms, d)
		}
		type lane struct {
			s *ccl.Stream
			m *memory
		}
		lanes := make([]lane, len(comms))
		for i, d := range comms {
			m, err := newMemory(ctx, d, 16<<20, i != 1)
			if err != nil {
				return err
			}
			defer m.free(ctx)
			lanes[i] = lane{d.NewStream(), m}
		}
		rng := rand.New(rand.NewPCG(7, 11)) // the same on all ranks
		sizes := []int{1, 17, 1000, 5000, 20_000, 100_000}
		colls := kinds
		for i := range rounds {
			j := rng.IntN(len(comms))
			k := call{
				coll: colls[rng.IntN(len(colls))], dt: []ccl.DType{ccl.Float32, ccl.BFloat16, ccl.Int32, ccl.Uint8}[rng.IntN(4)],
				op: ccl.Sum, count: sizes[rng.IntN(len(sizes))], root: rng.IntN(n), inPlace: rng.IntN(2) == 0, salt: i,
			}
			if reduces(k.coll) && (faked || k.dt == ccl.Uint8) {
				k.dt = ccl.Float32
			}
			if i%50 == 49 {
				check, err := k.device(ctx, comms[j], lanes[j].s, lanes[j].m, i%3)
				if err == nil {
					err = lanes[j].s.Wait(ctx)
				}
				if err == nil {
					err = check()
				}
				if err != nil {
					return fmt.Errorf("operation %d: %w", i, err)
				}
				continue
			}
			if err := k.loose(comms[j], lanes[j].s, lanes[j].m); err != nil {
				return fmt.Errorf("operation %d: %w", i, err)
			}
		}
		for _, l := range lanes {
			if err := l.s.Wait(ctx); err != nil {
				return err
			}
		}
		return nil
	})
}

// loose calls k on whatever is in memory.
func (k call) loose(c *ccl.Comm, s *ccl.Stream, m *memory) error {
	ss, rs := k.shares(c.Size())
	return k.on(c, s, m.bytes(k.dt, 0, ss*k.count*k.dt.Size()), m.bytes(k.dt, 8<<20, rs*k.count*k.dt.Size()))
}

// on calls k on two buffers.
func (k call) on(c *ccl.Comm, s *ccl.Stream, send, recv ccl.Buffer) error {
	switch k.coll {
	case record.AllReduce:
		return c.AllReduce(s, send, recv, k.op)
	case record.Reduce:
		return c.Reduce(s, send, recv, k.op, k.root)
	case record.ReduceScatter:
		return c.ReduceScatter(s, send, recv, k.op)
	case record.Broadcast:
		return c.Broadcast(s, send, recv, k.root)
	case record.AllGather:
		return c.AllGather(s, send, recv)
	case record.Gather:
		return c.Gather(s, send, recv, k.root)
	case record.Scatter:
		return c.Scatter(s, send, recv, k.root)
	case record.AlltoAll:
		return c.AlltoAll(s, send, recv)
	}
	return c.Barrier(s)
}

// TestGPUGraph replays captured operations.
func TestGPUGraph(t *testing.T) {
	n, gpus := gpuRanks(t)
	ranks(t, n, onGPUs(t, gpus), func(ctx context.Context, c *ccl.Comm) error {
		s := c.NewStream()
		const count = 5000
		m, err := newMemory(ctx, c, 1<<20, true)
		if err != nil {
			return err
		}
		buf := m.bytes(ccl.Int32, 0, 4*count)
		in := make([]byte, 4*count)
		for i := range count {
			put(ccl.Int32, in[4*i:], 1)
		}
		if err := c.CopyIn(buf, in); err != nil {
			return err
		}
		const ops = 3
		g, err := capture(ctx, c, s, gpus, func() error {
			for range ops {
				if err := c.AllReduce(s, buf, buf, ccl.Sum); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		const replays = 3
		for range replays {
			if err := g.Launch(s); err != nil {
				return err
			}
		}
		if err := s.Wait(ctx); err != nil {
			return err
		}
		if err := c.CopyOut(in, buf); err != nil {
			return err
		}
		want := 1.0
		for range ops * replays {
			want = float64(int32(want * float64(n)))
		}
		for i := range count {
			if got := get(ccl.Int32, in[4*i:]); got != want {
				return fmt.Errorf("element %d is %v after %d replays, want %v", i, got, replays, want)
			}
		}
		return errors.Join(g.Close(), m.free(ctx))
	})
}

// TestGPUAbort: a rank that aborts, or does not come, does not leave the others
// spinning.
func TestGPUAbort(t *testing.T) {
	n, gpus := gpuRanks(t)
	for _, size := range []int{1000, 4 << 20, 64 << 20} {
		ranks(t, n, onGPUs(t, gpus), func(ctx context.Context, c *ccl.Comm) error {
			s := c.NewStream()
			m, err := newMemory(ctx, c, size, true)
			if err != nil {
				return err
			}
			buf := m.bytes(ccl.Float32, 0, size&^3)
			err = do(ctx, s, c.AllReduce(s, buf, buf, ccl.Sum))
			if errors.Is(err, ccl.ErrAborted) {
				return errExpected // the last rank was quick
			}
			if err != nil {
				return err
			}
			if c.Rank() == n-1 {
				c.Abort(errors.New("on purpose"))
				return errExpected
			}
			if err = c.AllReduce(s, buf, buf, ccl.Sum); err == nil {
				err = s.Wait(ctx)
			}
			if !errors.Is(err, ccl.ErrAborted) {
				return fmt.Errorf("%d bytes: got %v, want an abort", size, err)
			}
			return errExpected
		})
	}
}
