package ccl_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/ccl/ccltest"
	"github.com/lockstep-ccl/lockstep/record"
)

// TestGPUNodesAbort: streams that wait for the network are let go.
func TestGPUNodesAbort(t *testing.T) {
	_, gpus := gpuRanks(t)
	nodes := []int{0, 0, 1, 1}
	n := len(nodes)
	calls := map[string]func(*ccl.Comm, *ccl.Stream, *memory, int) error{
		"allreduce": func(c *ccl.Comm, s *ccl.Stream, m *memory, size int) error {
			return c.AllReduce(s, m.bytes(ccl.Float32, 0, size), m.bytes(ccl.Float32, 0, size), ccl.Sum)
		},
		"broadcast": func(c *ccl.Comm, s *ccl.Stream, m *memory, size int) error {
			return c.Broadcast(s, m.bytes(ccl.Float32, 0, size), m.bytes(ccl.Float32, 0, size), n-1)
		},
		"send": func(c *ccl.Comm, s *ccl.Stream, m *memory, size int) error {
			if c.Rank() == 0 && size > 1<<20 { // what fits into what the network buffers is sent at once
				return c.Send(s, m.bytes(ccl.Uint8, 0, size), n-1)
			}
			return c.Recv(s, m.bytes(ccl.Uint8, 0, size), n-1)
		},
	}
	for name, call := range calls {
		for _, size := range []int{1000, 8 << 20} {
			t.Run(fmt.Sprintf("%s of %d bytes", name, size), func(t *testing.T) {
				held := make([]any, 2*n) // until Close has seen kernels leave
				ranks(t, n, onGPUs(t, gpus, onNodes(nodes)), func(ctx context.Context, c *ccl.Comm) error {
					s := c.NewStream()
					m, err := newMemory(ctx, c, size, false)
					if err != nil {
						return err
					}
					held[2*c.Rank()], held[2*c.Rank()+1] = s, m
					if err := do(ctx, s, c.Barrier(s)); err != nil && !errors.Is(err, ccl.ErrAborted) {
						return err
					}
					if c.Rank() == n-1 {
						c.Abort(errors.New("on purpose"))
						return errExpected
					}
					begun := time.Now()
					for range 2 {
						if err == nil {
							err = call(c, s, m, size)
						}
					}
					if err == nil {
						err = s.Wait(ctx)
					}
					if err := wantError(c, err, ccl.ErrAborted, begun); err != nil {
						return err
					}
					return errExpected
				})
				runtime.KeepAlive(held)
			})
		}
	}
}

// TestGPUNodesMismatch: nodes that disagree on a call learn it.
func TestGPUNodesMismatch(t *testing.T) {
	_, gpus := gpuRanks(t)
	type call func(*ccl.Comm, *ccl.Stream, *memory) error
	allReduce := func(dt ccl.DType, n int, op ccl.Op) call {
		return func(c *ccl.Comm, s *ccl.Stream, m *memory) error {
			b := m.bytes(dt, 0, n*dt.Size())
			return c.AllReduce(s, b, b, op)
		}
	}
	message := func(n int) call {
		return func(c *ccl.Comm, s *ccl.Stream, m *memory) error {
			if c.Rank() == 0 {
				return c.Send(s, m.bytes(ccl.Uint8, 0, n), 1)
			}
			return c.Recv(s, m.bytes(ccl.Uint8, 0, n), 0)
		}
	}
	for name, calls := range map[string][2]call{
		"count":    {allReduce(ccl.Float32, 10, ccl.Sum), allReduce(ccl.Float32, 11, ccl.Sum)},
		"operator": {allReduce(ccl.Float32, 100_000, ccl.Sum), allReduce(ccl.Float32, 100_000, ccl.Avg)},
		"barrier":  {allReduce(ccl.Float32, 10, ccl.Sum), func(c *ccl.Comm, s *ccl.Stream, _ *memory) error { return c.Barrier(s) }},
		"message":  {message(100), message(3 << 20)},
	} {
		t.Run(name, func(t *testing.T) {
			held := make([]any, 4)
			ranks(t, 2, onGPUs(t, gpus, onNodes([]int{0, 1})), func(ctx context.Context, c *ccl.Comm) error {
				s := c.NewStream()
				m, err := newMemory(ctx, c, 4<<20, false)
				if err != nil {
					return err
				}
				held[2*c.Rank()], held[2*c.Rank()+1] = s, m
				begun := time.Now()
				err = do(ctx, s, calls[c.Rank()](c, s, m))
				if err == nil { // the rank that had nothing to hear learns it next time
					err = do(ctx, s, c.Barrier(s))
				}
				if err := wantError(c, err, ccl.ErrMismatch, begun); err != nil {
					return err
				}
				return errExpected
			})
			runtime.KeepAlive(held)
		})
	}
}

// TestGPUNodesCapture: what the CPU takes part in is not captured, and says so.
func TestGPUNodesCapture(t *testing.T) {
	_, gpus := gpuRanks(t)
	ranks(t, 2, onGPUs(t, gpus, onNodes([]int{0, 1})), func(ctx context.Context, c *ccl.Comm) error {
		s := c.NewStream()
		m, err := newMemory(ctx, c, 4096, false)
		if err != nil {
			return err
		}
		b := m.bytes(ccl.Float32, 0, 4096)
		if _, err := s.Capture(ccl.GPU(c.Rank()%gpus), func() error { return c.AllReduce(s, b, b, ccl.Sum) }); !errors.Is(err, ccl.ErrInvalid) {
			return fmt.Errorf("a captured AllReduce between nodes returns %w", err)
		}
		return errors.Join(do(ctx, s, c.AllReduce(s, b, b, ccl.Sum)), m.free(ctx)) // still in order
	})
}

// TestGPUNodesRecord: an operation leaves one record, of the communicator's only
// sequence, with the GPU's times.
func TestGPUNodesRecord(t *testing.T) {
	_, gpus := gpuRanks(t)
	nodes := []int{0, 0, 1, 1}
	paths := make([]string, len(nodes))
	keep := func(cfg *ccl.Config) { paths[cfg.Rank] = cfg.Recorder.Path() }
	const ops, size = 6, 1 << 20
	ranks(t, len(nodes), onGPUs(t, gpus, onNodes(nodes), keep), func(ctx context.Context, c *ccl.Comm) error {
		s := c.NewStream()
		m, err := newMemory(ctx, c, size, true)
		if err != nil {
			return err
		}
		b := m.bytes(ccl.Float32, 0, size)
		for i := range ops {
			if i%2 == 0 {
				err = c.AllReduce(s, b, b, ccl.Sum)
			} else {
				err = c.Broadcast(s, b, b, 3)
			}
			if err := do(ctx, s, err); err != nil {
				return err
			}
		}
		r, err := record.Open(paths[c.Rank()])
		if err != nil {
			return err
		}
		defer r.Close()
		if k := r.Comms(nil)[0]; k.Stamps+k.Copies != 0 || k.Started != ops || k.Finished != ops || k.Ops != ops {
			return fmt.Errorf("communicator %+v after %d operations", k, ops)
		}
		records := make([]record.Record, 1000)
		seq := uint64(0)
		for _, w := range records[:r.Next(records)] {
			if w.Kind != record.KindWhole {
				continue
			}
			coll := record.AllReduce
			if seq%2 == 1 {
				coll = record.Broadcast
			}
			seq++
			if w.Seq != seq || w.Coll != coll || w.Bytes != size || w.Algo != record.AlgoHierarchical || w.Flags&record.FlagStamped == 0 || w.DType != record.Float32 || w.Dur <= 0 || w.Code != uint8(record.ResultOK) {
				return fmt.Errorf("operation %d is %+v", seq, w)
			}
		}
		if seq != ops {
			return fmt.Errorf("%d records of %d operations", seq, ops)
		}
		return m.free(ctx)
	})
}

// TestGPUNodesDelayRank: what a rank's GPU was late by is waiting on the others, those of
// its node and of another one, and not transfer; and who was late is known where it shows.
func TestGPUNodesDelayRank(t *testing.T) {
	nodes := []int{0, 0, 1, 1}
	gpus := placed(t, nodes)
	n := len(nodes)
	const late, delay, rounds, size, small = 3, 100 * time.Millisecond, 3, 64 << 10, 4096
	cases := []struct {
		name string
		algo string
		met  bool // the node's ranks meet first, in a kernel
		far  bool // the other node waits, too
		call func(*ccl.Comm, *ccl.Stream, *memory) error
	}{
		{"Barrier", "", true, true, func(c *ccl.Comm, s *ccl.Stream, _ *memory) error { return c.Barrier(s) }},
		{"AllReduce", "", true, true, func(c *ccl.Comm, s *ccl.Stream, m *memory) error {
			b := m.bytes(ccl.Float32, 0, size)
			return c.AllReduce(s, b, b, ccl.Sum)
		}},
		{"AllReduce that begins with a copy", "sym", true, true, func(c *ccl.Comm, s *ccl.Stream, m *memory) error {
			b := m.bytes(ccl.Float32, 0, size)
			return c.AllReduce(s, b, b, ccl.Sum)
		}},
		{"ReduceScatter, a part of each share", "", true, true, func(c *ccl.Comm, s *ccl.Stream, m *memory) error {
			return c.ReduceScatter(s, m.bytes(ccl.Float32, 0, n*small), m.bytes(ccl.Float32, size/2, small), ccl.Sum)
		}},
		{"AllReduce by copy engines", "ce", false, true, func(c *ccl.Comm, s *ccl.Stream, m *memory) error {
			b := m.bytes(ccl.Float32, 0, size)
			return c.AllReduce(s, b, b, ccl.Sum)
		}},
		{"Reduce, which messages end", "", true, false, func(c *ccl.Comm, s *ccl.Stream, m *memory) error {
			return c.Reduce(s, m.bytes(ccl.Float32, 0, size), m.bytes(ccl.Float32, 0, size), ccl.Sum, late)
		}},
		{"Broadcast of the late rank", "", true, true, func(c *ccl.Comm, s *ccl.Stream, m *memory) error {
			b := m.bytes(ccl.Float32, 0, size)
			return c.Broadcast(s, b, b, late)
		}},
		{"AlltoAll", "", false, true, func(c *ccl.Comm, s *ccl.Stream, m *memory) error {
			return c.AlltoAll(s, m.bytes(ccl.Float32, 0, n*small), m.bytes(ccl.Float32, size/2, n*small))
		}},
	}
	for _, algo := range []string{"", "sym", "ce"} {
		if algo == "ce" && n > gpus {
			continue // ranks that share a GPU take no copy engines
		}
		paths, all := make([]string, n), make([][]record.Record, n)
		delayed := func(cfg *ccl.Config) {
			inj := ccltest.New()
			if cfg.Rank == late {
				inj.DelayRank(delay)
			}
			cfg.Faults, cfg.GPU.Algo, paths[cfg.Rank] = inj, algo, cfg.Recorder.Path()
		}
		ranks(t, n, onGPUs(t, gpus, onNodes(nodes), delayed), func(ctx context.Context, x *ccl.Comm) error {
			s := x.NewStream()
			m, err := newMemory(ctx, x, size, false)
			if err != nil {
				return err
			}
			b := m.bytes(ccl.Float32, 0, small) // makes s a stream of the GPU, and loads kernels
			if err := do(ctx, s, x.AllReduce(s, b, b, ccl.Sum)); err != nil {
				return err
			}
			for _, c := range cases {
				for range rounds {
					if c.algo != algo {
						continue
					}
					if err := do(ctx, s, x.Barrier(s)); err != nil { // not all calls before made all ranks wait
						return err
					}
					if err := do(ctx, s, c.call(x, s, m)); err != nil {
						return err
					}
				}
			}
			r, err := record.Open(paths[x.Rank()])
			if err != nil {
				return err
			}
			defer r.Close()
			records := make([]record.Record, 1000)
			for _, w := range records[:r.Next(records)] {
				if w.Kind == record.KindWhole {
					all[x.Rank()] = append(all[x.Rank()], w)
				}
			}
			return m.free(ctx)
		})
		seq := 1 // the first one has loaded kernels
		for _, c := range cases {
			if c.algo != algo {
				continue
			}
			var wrong []string // of each round: ranks share the processors, and anything may be late for once
			good := !c.met     // what the hosts' polling says is too coarse on busy processors
			for range rounds {
				seq += 2
				before := len(wrong)
				for r := range n {
					if len(all[r]) < seq {
						t.Fatalf("%s: rank %d has %d records", c.name, r, len(all[r]))
					}
					w, near := all[r][seq-1], nodes[r] == nodes[late]
					if w.Seq != uint64(seq) || w.Flags&record.FlagStamped == 0 {
						t.Fatalf("%s: rank %d has record %+v", c.name, r, w)
					}
					wait, transfer := time.Duration(w.Wait), time.Duration(w.Dur-w.Wait)
					switch {
					case r == late && wait > delay/2,
						r != late && (near || c.far) && (wait < delay/2 || transfer > wait),
						(r == late-1 || r == late-2 && c.far) && w.Peer != late:
						wrong = append(wrong, fmt.Sprintf("rank %d waited for %v (rank %d last), and transferred for %v", r, wait, w.Peer, transfer))
					}
				}
				good = good || len(wrong) == before
			}
			if !good {
				t.Errorf("%s, where rank %d was %v late:\n%s", c.name, late, delay, strings.Join(wrong, "\n"))
			}
		}
	}
}

// TestGPUNodesMixed runs operations of all kinds on several communicators and streams.
func TestGPUNodesMixed(t *testing.T) {
	layout := []int{0, 0, 1, 1}
	gpus := placed(t, layout)
	rounds := 2000
	if faked {
		rounds = 100
	}
	mixed(t, len(layout), rounds, onGPUs(t, gpus, onNodes(layout)))
}

// gpuChild is a rank of TestGPUNodesLost on its GPU.
func gpuChild(role string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, cfg, err := initFromEnv(ctx, nil)
	if err != nil {
		return err
	}
	defer cfg.Recorder.Close()
	s := c.NewStream()
	const size = 1 << 20
	m, err := newMemory(ctx, c, size, false)
	if err != nil {
		return err
	}
	b := m.bytes(ccl.Float32, 0, size)
	if err := do(ctx, s, c.AllReduce(s, b, b, ccl.Sum)); err != nil {
		return err
	}
	fmt.Println("ready")
	if strings.HasSuffix(role, "victim") {
		select {} // until killed
	}
	io.ReadFull(os.Stdin, make([]byte, 1)) // the victims are dead
	begun := time.Now()
	for err == nil {
		err = do(ctx, s, c.AllReduce(s, b, b, ccl.Sum))
	}
	if e := wantError(c, err, ccl.ErrPeerLost, begun); e != nil {
		return e
	}
	small, err := c.Shrink(ctx, []int{2, 3}, ccl.ShrinkAbort, "rest")
	if err != nil {
		return err
	}
	in := make([]byte, size)
	for i := 0; i < size; i += 4 {
		put(ccl.Float32, in[i:], 1)
	}
	if err := small.CopyIn(b, in); err != nil {
		return err
	}
	last := small.NewStream()
	if err := do(ctx, last, small.AllReduce(last, b, b, ccl.Sum)); err != nil {
		return err
	}
	if err := small.CopyOut(in, b); err != nil {
		return err
	}
	fmt.Println("sum", get(ccl.Float32, in[size-4:]))
	if err := small.Close(); err != nil {
		return err
	}
	if err := c.Close(); !errors.Is(err, ccl.ErrPeerLost) {
		return fmt.Errorf("Close returns %v", err)
	}
	return nil
}

// TestGPUNodesLost kills all processes of a node: the others get an error, and go on
// together.
func TestGPUNodesLost(t *testing.T) {
	_, gpus := gpuRanks(t)
	id := freeID(t)
	var ps []*rankProcess
	for r, role := range []string{"gpu survivor", "gpu survivor", "gpu victim", "gpu victim"} {
		ps = append(ps, startRank(t, id, r, 4, 2, role, fmt.Sprintf("LOCKSTEP_DEVICE=cuda:%d", r%gpus)))
	}
	for r, p := range ps {
		p.expect(t, r, "ready")
	}
	for _, p := range ps[2:] {
		p.cmd.Process.Kill()
	}
	for _, p := range ps[:2] {
		p.stdin.Write([]byte{1})
	}
	for r, p := range ps[:2] {
		p.expect(t, r, "sum 2")
		for line := range p.lines {
			t.Errorf("rank %d also says %q", r, line)
		}
	}
}
