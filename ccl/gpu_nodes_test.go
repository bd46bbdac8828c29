package ccl_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/record"
)

// The tests of this file spread ranks of one machine over logical nodes.

// layouts are the nodes of ranks.
var layouts = []struct {
	name  string
	nodes []int
}{
	{"2 nodes of 2", []int{0, 0, 1, 1}},
	{"2 nodes of 1", []int{0, 1}},
	{"3 uneven nodes", []int{0, 0, 1, 2}},
	{"2 nodes in turn", []int{0, 1, 0, 1}},
	{"3 nodes of 2", []int{0, 0, 1, 1, 2, 2}},
}

// placed skips a layout for which there are too few GPUs: ranks of a node that share
// one wait for each other with kernels that need room beside each other, and for good
// where a call of one that loads kernels, or makes a stream, waits for what runs there.
func placed(t *testing.T, nodes []int) (gpus int) {
	_, gpus = gpuRanks(t)
	if len(nodes) > gpus && !faked {
		t.Skipf("%d ranks on %d GPUs", len(nodes), gpus)
	}
	return gpus
}

func onNodes(nodes []int) func(*ccl.Config) {
	return func(cfg *ccl.Config) { cfg.Node = fmt.Sprintf("node%d", nodes[cfg.Rank]) }
}

// TestGPUNodes runs every collective × type × operator × size between nodes, in place
// and not, in windows and not.
func TestGPUNodes(t *testing.T) {
	for _, l := range layouts {
		for _, window := range []bool{true, false} {
			if testing.Short() && !window {
				continue
			}
			t.Run(fmt.Sprintf("%s, window %v", l.name, window), func(t *testing.T) {
				gpus := placed(t, l.nodes)
				everyCall(t, len(l.nodes), window, nodeCalls(len(l.nodes), nodeCounts), onGPUs(t, gpus, onNodes(l.nodes)))
			})
		}
	}
}

var nodeCounts = []int{1, 3, 1000, 40_000, 600_003}

// nodeCalls is gpuCalls, and for fake GPUs some of more than one chunk.
func nodeCalls(n int, counts []int) (list []call) {
	list = gpuCalls(n, counts)
	if faked {
		for _, coll := range kinds {
			list = append(list, call{coll, ccl.Float32, ccl.Sum, 200_003, len(list) % n, false, len(list)})
		}
	}
	return list
}

// TestGPUNodesMessages sends messages of many sizes at once between all ranks, several
// of each pair, and lone ones round a ring.
func TestGPUNodesMessages(t *testing.T) {
	for _, l := range layouts {
		for _, window := range []bool{true, false} {
			if testing.Short() && window {
				continue
			}
			t.Run(fmt.Sprintf("%s, window %v", l.name, window), func(t *testing.T) {
				gpus := placed(t, l.nodes)
				everyMessage(t, len(l.nodes), window, onGPUs(t, gpus, onNodes(l.nodes)))
			})
		}
	}
}

// everyMessage sends messages of many sizes at once between all ranks, and a token
// round a ring.
func everyMessage(t *testing.T, n int, window bool, prepare func(*ccl.Config)) {
	ranks(t, n, prepare, func(ctx context.Context, c *ccl.Comm) error {
		s := c.NewStream()
		list, area := messages(n, 3, []int{0, 5, 8 << 10, 100_001, 256<<10 + 16, 700_003, 5_000_001})
		m, err := newMemory(ctx, c, 2*area+32, window)
		if err != nil {
			return err
		}
		for salt := range 2 {
			err := post(ctx, c, m, list, area, salt, func(call func(*ccl.Stream) error) error { return do(ctx, s, call(s)) })
			if err != nil {
				return err
			}
		}
		// A token that passes every rank twice.
		token := m.bytes(ccl.Int32, 0, 3<<20)
		next, prev := (c.Rank()+1)%n, (c.Rank()+n-1)%n
		for round := range 2 {
			if round > 0 || c.Rank() > 0 {
				if err := c.Recv(s, token, prev); err != nil {
					return err
				}
			}
			if round == 0 || c.Rank() < n-1 {
				if err := c.Send(s, token, next); err != nil {
					return err
				}
			}
		}
		if err := s.Wait(ctx); err != nil {
			return err
		}
		return m.free(ctx)
	})
}

// TestGPUNodesDependentMessages: a rank's message to one peer does not wait for that
// to another, which comes late, wherever the two are.
func TestGPUNodesDependentMessages(t *testing.T) {
	const size = 24 << 20
	for _, nodes := range [][]int{{0, 1, 2}, {0, 1, 0}, {0, 0, 1}, {0, 0, 0}} {
		t.Run(fmt.Sprint("nodes ", nodes), func(t *testing.T) {
			ranks(t, 3, onGPUs(t, placed(t, nodes), onNodes(nodes)), func(ctx context.Context, c *ccl.Comm) error {
				s := c.NewStream()
				m, err := newMemory(ctx, c, 2*size, false)
				if err != nil {
					return err
				}
				a, b := m.bytes(ccl.Uint8, 0, size), m.bytes(ccl.Uint8, size, size)
				switch c.Rank() {
				case 0:
					err = c.Group(s, func(g *ccl.Group) error { return errors.Join(g.Send(a, 2), g.Send(b, 1)) })
				case 1:
					err = errors.Join(c.Recv(s, a, 0), c.Send(s, a, 2))
				case 2:
					err = errors.Join(c.Recv(s, a, 1), c.Recv(s, b, 0))
				}
				if err := do(ctx, s, err); err != nil {
					return err
				}
				return m.free(ctx)
			})
		})
	}
}

// TestGPUNodesManyFolds: more nodes than the GPU reduces at once.
func TestGPUNodesManyFolds(t *testing.T) {
	const n = 10
	_, gpus := gpuRanks(t)
	if faked {
		t.Skip("the fake's reductions are of float32")
	}
	ranks(t, n, onGPUs(t, gpus, nodes(1)), func(ctx context.Context, c *ccl.Comm) error {
		s := c.NewStream()
		m, err := newMemory(ctx, c, 4<<20, false)
		if err != nil {
			return err
		}
		for i, op := range []ccl.Op{ccl.Max, ccl.Min, ccl.Max} {
			k := call{record.AllReduce, ccl.Float8E4M3, op, 100_003, 0, i == 2, i}
			check, err := k.device(ctx, c, s, m, i)
			if err := do(ctx, s, err); err != nil {
				return err
			}
			if err := check(); err != nil {
				return err
			}
		}
		return m.free(ctx)
	})
}

// TestGPUNodesVector: parts of all sizes, and none, between all ranks.
func TestGPUNodesVector(t *testing.T) {
	nodes := []int{0, 0, 1, 2}
	n, gpus := len(nodes), placed(t, nodes)
	ranks(t, n, onGPUs(t, gpus, onNodes(nodes)), func(ctx context.Context, c *ccl.Comm) error {
		s := c.NewStream()
		m, err := newMemory(ctx, c, 16<<20, false)
		if err != nil {
			return err
		}
		size := func(from, to int) int { return (from*n + to) % 3 * 100_003 }
		value := func(from, to, i int) byte { return byte(from*17 + to*5 + i) }
		var sends, sendsAt, recvs, recvsAt []int
		at, back := 0, 0
		for p := range n {
			sends, sendsAt = append(sends, size(c.Rank(), p)), append(sendsAt, at)
			recvs, recvsAt = append(recvs, size(p, c.Rank())), append(recvsAt, back)
			at, back = at+sends[p], back+recvs[p]
		}
		in, out := make([]byte, at), make([]byte, back)
		for p := range n {
			for i := range sends[p] {
				in[sendsAt[p]+i] = value(c.Rank(), p, i)
			}
		}
		send, recv := m.bytes(ccl.Uint8, 0, at), m.bytes(ccl.Uint8, 8<<20, back)
		if err := c.CopyIn(send, in); err != nil {
			return err
		}
		if err := do(ctx, s, c.AlltoAllv(s, send, sends, sendsAt, recv, recvs, recvsAt)); err != nil {
			return err
		}
		if err := c.CopyOut(out, recv); err != nil {
			return err
		}
		for p := range n {
			for i := range recvs[p] {
				if got, want := out[recvsAt[p]+i], value(p, c.Rank(), i); got != want {
					return fmt.Errorf("byte %d from rank %d is %d, want %d", i, p, got, want)
				}
			}
		}
		return m.free(ctx)
	})
}

// TestGPUNodesFree: a program may free memory, which waits for the GPU, while its
// peer has yet to send.
func TestGPUNodesFree(t *testing.T) {
	nodes := []int{0, 1}
	gpus := placed(t, nodes)
	ranks(t, 2, onGPUs(t, gpus, onNodes(nodes)), func(ctx context.Context, c *ccl.Comm) error {
		s := c.NewStream()
		m, err := newMemory(ctx, c, 24<<20, false)
		if err != nil {
			return err
		}
		b := m.bytes(ccl.Uint8, 0, 24<<20)
		if c.Rank() == 0 {
			time.Sleep(100 * time.Millisecond)
			return errors.Join(do(ctx, s, c.Send(s, b, 1)), m.free(ctx))
		}
		drv, err := cuda.Open()
		if err != nil {
			return err
		}
		dev, err := drv.Device(1 % gpus)
		if err != nil {
			return err
		}
		defer dev.Close()
		other, err := dev.Alloc(1 << 20)
		if err != nil {
			return err
		}
		if err := c.Recv(s, b, 0); err != nil {
			return err
		}
		if err := dev.Free(other); err != nil {
			return err
		}
		return errors.Join(do(ctx, s, nil), m.free(ctx))
	})
}

// TestGPUNodesShareGPU: ranks of two nodes share a GPU, and reduce a type for the first time, in many
// chunks. The driver loads kernels only while nothing runs on the device, so neither rank may load them
// where anything already waits for the other.
func TestGPUNodesShareGPU(t *testing.T) {
	gpuRanks(t) // or skip
	for _, coll := range []record.CollKind{record.AllReduce, record.Reduce, record.ReduceScatter} {
		t.Run(coll.String(), func(t *testing.T) {
			called := make(chan struct{})
			ranks(t, 2, onGPUs(t, 1, onNodes([]int{0, 1})), func(ctx context.Context, c *ccl.Comm) error {
				s := c.NewStream()
				const count = 8 << 20 // 32 MiB, so eight chunks and more, of which four have a bounce buffer
				m, err := newMemory(ctx, c, 5*4*count, false)
				if err != nil {
					return err
				}
				k := call{coll: coll, dt: ccl.Float32, op: ccl.Sum, count: count}
				check, err := k.deviceBy(ctx, c, s, m, 0, func(launch func() error) error {
					if c.Rank() == 0 { // a Reduce's root, which alone folds
						select {
						case <-called:
						case <-time.After(patience / 8):
							return errors.New("rank 1's call does not return before this rank calls")
						}
					}
					err := returns(launch)
					if c.Rank() == 1 {
						close(called)
					}
					return err
				})
				if err := do(ctx, s, err); err != nil {
					return err
				}
				return errors.Join(check(), m.free(ctx))
			})
		})
	}
}
