package ccl_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/cudatest"
)

// ints is n int32 elements of value v in device memory from off.
func (m *memory) ints(off, n int, v float64) (ccl.Buffer, error) {
	b := make([]byte, 4*n)
	for i := range n {
		put(ccl.Int32, b[4*i:], v)
	}
	buf := m.bytes(ccl.Int32, off, 4*n)
	return buf, m.c.CopyIn(buf, b)
}

// all checks that every element is v.
func (m *memory) all(buf ccl.Buffer, v float64) error {
	b := make([]byte, 4*buf.Count())
	if err := m.c.CopyOut(b, buf); err != nil {
		return err
	}
	for i := range buf.Count() {
		if got := get(ccl.Int32, b[4*i:]); got != v {
			return fmt.Errorf("element %d is %v, want %v", i, got, v)
		}
	}
	return nil
}

// TestGPUGraphOutlivesStream: a graph is good after the stream that it was captured
// on has gone.
func TestGPUGraphOutlivesStream(t *testing.T) {
	n, gpus := gpuRanks(t)
	ranks(t, n, onGPUs(t, gpus), func(ctx context.Context, c *ccl.Comm) error {
		m, err := newMemory(ctx, c, 1<<20, true)
		if err != nil {
			return err
		}
		buf, err := m.ints(0, 1000, 1)
		if err != nil {
			return err
		}
		capture := func() (*ccl.Graph, error) {
			s := c.NewStream()
			return s.Capture(ccl.GPU(c.Rank()%gpus), func() error { return c.AllReduce(s, buf, buf, ccl.Sum) })
		}
		g, err := capture()
		if err != nil {
			return err
		}
		s := c.NewStream()
		if err := do(ctx, s, c.Broadcast(s, buf, buf, 0)); err != nil { // the communicator forgets the other stream
			return err
		}
		for range 3 {
			runtime.GC()
			time.Sleep(10 * time.Millisecond) // clean-ups run by themselves
		}
		if err := do(ctx, s, g.Launch(s)); err != nil {
			return err
		}
		return errors.Join(m.all(buf, float64(n)), g.Close(), m.free(ctx))
	})
}

// TestGPUCaptureKeepsOrder: an operation comes after those before it though another
// was captured in between.
func TestGPUCaptureKeepsOrder(t *testing.T) {
	n, gpus := gpuRanks(t)
	ranks(t, n, onGPUs(t, gpus), func(ctx context.Context, c *ccl.Comm) error {
		m, err := newMemory(ctx, c, 8<<20, true)
		if err != nil {
			return err
		}
		const count = 1000
		var bufs [3]ccl.Buffer
		for i := range bufs {
			if bufs[i], err = m.ints(i<<20, count, float64(i+1)); err != nil {
				return err
			}
		}
		first, graph, last := c.NewStream(), c.NewStream(), c.NewStream()
		if err := do(ctx, first, c.Barrier(first)); err != nil {
			return err
		}
		if c.Rank() == n-1 {
			time.Sleep(200 * time.Millisecond) // the others' first operation is under way meanwhile
		}
		if err := c.AllReduce(first, bufs[0], bufs[0], ccl.Sum); err != nil {
			return err
		}
		g, err := graph.Capture(ccl.GPU(c.Rank()%gpus), func() error { return c.AllReduce(graph, bufs[1], bufs[1], ccl.Sum) })
		if err != nil {
			return err
		}
		if err := c.AllReduce(last, bufs[2], bufs[2], ccl.Sum); err != nil {
			return err
		}
		if err := errors.Join(first.Wait(ctx), last.Wait(ctx)); err != nil {
			return err
		}
		return errors.Join(m.all(bufs[0], float64(n)), m.all(bufs[1], 2), m.all(bufs[2], float64(3*n)), g.Close(), m.free(ctx))
	})
}

// TestGPUCloseWaitsForGraph: Close ends nothing under a graph's hands, on whatever
// stream it was launched.
func TestGPUCloseWaitsForGraph(t *testing.T) {
	n, gpus := gpuRanks(t)
	ops := 300
	if faked { // they are slow, and slower on a busy machine: Close waits for seconds
		ops = 30
	}
	for _, foreign := range []bool{false, true} {
		t.Run(fmt.Sprintf("foreign %v", foreign), func(t *testing.T) {
			held := make([]any, n)
			ranks(t, n, onGPUs(t, gpus), func(ctx context.Context, c *ccl.Comm) error {
				m, err := newMemory(ctx, c, 1<<20, true)
				if err != nil {
					return err
				}
				buf, err := m.ints(0, 1000, 0)
				if err != nil {
					return err
				}
				s, on := c.NewStream(), c.NewStream()
				if err := do(ctx, on, c.Broadcast(on, buf, buf, 0)); err != nil {
					return err
				}
				if err := m.window.Deregister(ctx); err != nil {
					return err
				}
				held[c.Rank()] = []any{m, s, on}
				if foreign {
					on = ccl.StreamOf(on.CUDA(), ccl.GPU(c.Rank()%gpus))
				}
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
				if err := g.Launch(on); err != nil {
					return err
				}
				if err := c.Close(); err != nil {
					return err
				}
				if done, err := on.Query(); err != nil || !done {
					return fmt.Errorf("the graph still runs after Close (%v)", err)
				}
				return errors.Join(g.Close(), m.mem.Free())
			})
			runtime.KeepAlive(held)
		})
	}
}

// TestGPUMemoryOutlivesComm: memory of one communicator can be used with the next,
// and freed.
func TestGPUMemoryOutlivesComm(t *testing.T) {
	n, gpus := gpuRanks(t)
	mems := make([]*ccl.Memory, n)
	ranks(t, n, onGPUs(t, gpus), func(_ context.Context, c *ccl.Comm) (err error) {
		mems[c.Rank()], err = c.MemAlloc(1 << 20)
		return err
	})
	ranks(t, n, onGPUs(t, gpus), func(ctx context.Context, c *ccl.Comm) error {
		m := &memory{c: c, mem: mems[c.Rank()]}
		var err error
		if m.window, err = c.WindowRegister(ctx, m.mem); err != nil {
			return err
		}
		buf, err := m.ints(0, 1000, 1)
		if err != nil {
			return err
		}
		s := c.NewStream()
		if err := do(ctx, s, c.AllReduce(s, buf, buf, ccl.Sum)); err != nil {
			return err
		}
		if err := errors.Join(m.all(buf, float64(n)), m.window.Deregister(ctx), c.Close()); err != nil {
			return err
		}
		return m.mem.Free()
	})
}

// TestGPUContextLost: an error of the driver ends every communicator that used the
// stream, so that no peer waits for this rank in any of them.
func TestGPUContextLost(t *testing.T) {
	if gpuRanks(t); !faked {
		t.Skip("real drivers do not fail on demand")
	}
	defer cudatest.Heal()
	// One rank and no recorder: nobody else asks the driver for a stream's state.
	ranks(t, 1, func(cfg *ccl.Config) { cfg.Device = ccl.GPU(0) }, func(ctx context.Context, c *ccl.Comm) error {
		other, err := c.Split(ctx, 0, 0, "other")
		if err != nil {
			return err
		}
		defer other.Close()
		m, err := newMemory(ctx, c, 1000, false)
		if err != nil {
			return err
		}
		s, buf := c.NewStream(), m.bytes(ccl.Int32, 0, 1000)
		if err := errors.Join(c.AllReduce(s, buf, buf, ccl.Sum), other.AllReduce(s, buf, buf, ccl.Sum)); err != nil {
			return err
		}
		cudatest.Fail("cuStreamQuery", 700, 1)
		if err := s.Wait(ctx); !errors.Is(err, ccl.ErrInternal) {
			return fmt.Errorf("got %v, want the driver's error", err)
		}
		if c.Err() == nil || other.Err() == nil {
			return fmt.Errorf("a communicator goes on: %v, %v", c.Err(), other.Err())
		}
		return errExpected
	})
}

// TestGPUSetupMismatch: ranks that would choose different ways are told so when they
// meet, and do not wait for each other in their first operation.
func TestGPUSetupMismatch(t *testing.T) {
	_, gpus := gpuRanks(t)
	const n = 2
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	id := freeID(t)
	var all sync.WaitGroup
	for r := range n {
		all.Go(func() {
			c, err := ccl.Init(ctx, ccl.Config{
				ID: id, Rank: r, Size: n, Secret: secret, Node: "node", Device: ccl.GPU(r % gpus),
				GPU: ccl.GPUConfig{Algo: []string{"ll", "sym"}[r]},
			})
			if !errors.Is(err, ccl.ErrMismatch) {
				t.Errorf("rank %d: %v", r, err)
			}
			_ = c.Close()
		})
	}
	all.Wait()
}

// TestGPUThreads: blocks of half a warp would never find their way through lines.
func TestGPUThreads(t *testing.T) {
	for _, n := range []int{-32, 16, 48, 1024} {
		_, err := ccl.Init(t.Context(), ccl.Config{ID: freeID(t), Size: 1, Secret: secret, GPU: ccl.GPUConfig{Threads: n}})
		if !errors.Is(err, ccl.ErrInvalid) {
			t.Errorf("%d threads: %v", n, err)
		}
	}
}

// TestGPUGraphInGraph: a graph that becomes part of another one does not run yet, and
// draws no other stream into the capture.
func TestGPUGraphInGraph(t *testing.T) {
	n, gpus := gpuRanks(t)
	if !faked {
		t.Skip("not every driver captures the launch of a graph")
	}
	ranks(t, n, onGPUs(t, gpus), func(ctx context.Context, c *ccl.Comm) error {
		m, err := newMemory(ctx, c, 4<<20, true)
		if err != nil {
			return err
		}
		var bufs [2]ccl.Buffer
		for i := range bufs {
			if bufs[i], err = m.ints(i<<20, 1000, 1); err != nil {
				return err
			}
		}
		on, of, own, other := ccl.GPU(c.Rank()%gpus), c.NewStream(), c.NewStream(), c.NewStream()
		inner, err := of.Capture(on, func() error { return c.AllReduce(of, bufs[0], bufs[0], ccl.Sum) })
		if err != nil {
			return err
		}
		if err := do(ctx, own, c.Broadcast(own, bufs[0], bufs[0], 0)); err != nil {
			return err
		}
		foreign := ccl.StreamOf(own.CUDA(), on)
		if err := do(ctx, foreign, c.Broadcast(foreign, bufs[0], bufs[0], 0)); err != nil {
			return err
		}
		outer, err := foreign.Capture(on, func() error {
			if err := inner.Launch(foreign); err != nil {
				return err
			}
			return c.AllReduce(other, bufs[1], bufs[1], ccl.Sum)
		})
		if err != nil {
			return err
		}
		if err := errors.Join(other.Wait(ctx), m.all(bufs[0], 1), m.all(bufs[1], float64(n))); err != nil {
			return err
		}
		if err := do(ctx, foreign, outer.Launch(foreign)); err != nil {
			return err
		}
		runtime.KeepAlive(own)
		return errors.Join(m.all(bufs[0], float64(n)), outer.Close(), inner.Close(), m.free(ctx))
	})
}
