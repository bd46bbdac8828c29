package ccl_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/cudatest"
	"github.com/lockstep-ccl/lockstep/record"
)

// The tests of this file make fake GPUs unable to reach each other's memory, or reach it by PCIe
// alone.

var apartLayouts = []struct {
	name  string
	pairs [][2]int
	nodes []int // nil: one
}{
	{"two pairs in turn", [][2]int{{0, 1}, {1, 2}, {2, 3}, {3, 0}}, nil},
	{"one apart", [][2]int{{3, 0}, {3, 1}, {3, 2}}, nil},
	{"a chain", [][2]int{{0, 2}, {0, 3}, {1, 3}}, nil}, // 1 and 2 reach each other, and are in different groups
	{"one of two nodes", [][2]int{{0, 1}}, []int{0, 0, 1, 1}},
}

// separated makes pairs of GPUs apart until the test ends.
func separated(t *testing.T, pairs [][2]int) (n, gpus int) {
	if _, gpus = gpuRanks(t); !faked {
		t.Skip("real GPUs reach each other, or they do not")
	}
	t.Cleanup(cudatest.Heal)
	for _, p := range pairs {
		cudatest.Separate(p[0], p[1])
	}
	return 4, gpus
}

func TestGPUApart(t *testing.T) {
	for i, l := range apartLayouts {
		if testing.Short() && i != 2 { // the chain has what the others have, and more; nodes have tests of their own
			continue
		}
		t.Run(l.name, func(t *testing.T) {
			n, gpus := separated(t, l.pairs)
			prepare := onGPUs(t, gpus, func(cfg *ccl.Config) {
				if l.nodes != nil {
					onNodes(l.nodes)(cfg)
				}
			})
			everyCall(t, n, i%2 == 0, nodeCalls(n, nodeCounts), prepare)
			everyMessage(t, n, i%2 == 1, prepare)
		})
	}
}

// TestGPUApartAbort: streams that wait for GPUs which are apart are let go, and
// survivors go on in a communicator whose GPUs are apart again.
func TestGPUApartAbort(t *testing.T) {
	n, gpus := separated(t, [][2]int{{0, 2}, {0, 3}, {1, 2}, {1, 3}})
	const size = 8 << 20
	held := make([]any, 2*n) // until Close has seen kernels leave
	var ready atomic.Int32
	ranks(t, n, onGPUs(t, gpus), func(ctx context.Context, c *ccl.Comm) error {
		s := c.NewStream()
		m, err := newMemory(ctx, c, size, false)
		if err != nil {
			return err
		}
		held[2*c.Rank()], held[2*c.Rank()+1] = s, m
		if err := do(ctx, s, c.Barrier(s)); err != nil {
			return err
		}
		if c.Rank() == n-1 { // as good as dead: it does not come
			ready.Add(1)
			for c.Err() == nil && ctx.Err() == nil {
				time.Sleep(time.Millisecond)
			}
			return errExpected
		}
		buf := m.bytes(ccl.Float32, 0, size)
		if err := c.AllReduce(s, buf, buf, ccl.Sum); err != nil {
			return err
		}
		ready.Add(1)
		if c.Rank() == 0 {
			for int(ready.Load()) < n && ctx.Err() == nil {
				time.Sleep(time.Millisecond)
			}
			c.Abort(errors.New("on purpose"))
		}
		if err := s.Wait(ctx); !errors.Is(err, ccl.ErrAborted) {
			return fmt.Errorf("got %v, want an abort", err)
		}
		d, err := c.Shrink(ctx, []int{n - 1}, ccl.ShrinkAbort, "survivors")
		if err != nil {
			return err
		}
		b, err := newMemory(ctx, d, 16<<20, false)
		if err != nil {
			return err
		}
		if err := onDevice(ctx, d, b, nodeCalls(n-1, []int{1, 1000})); err != nil {
			return err
		}
		if err := errors.Join(b.free(ctx), d.Close()); err != nil {
			return err
		}
		return errExpected
	})
	runtime.KeepAlive(held)
}

// TestGPUUnlinked: a chain that is forced carries operations where NVLink joins all GPUs, and none
// where it does not, which is said once.
func TestGPUUnlinked(t *testing.T) {
	for _, linked := range []bool{true, false} {
		t.Run(fmt.Sprintf("linked %v", linked), func(t *testing.T) {
			n, gpus := separated(t, nil)
			if !linked {
				cudatest.Unlink(1, 3)
			}
			var said bytes.Buffer
			log := slog.New(slog.NewTextHandler(&said, nil)) // one write a line, under a lock of its own
			prepare := onGPUs(t, gpus, func(cfg *ccl.Config) { cfg.GPU.Algo, cfg.Log = "chain", log })
			ranks(t, n, prepare, func(ctx context.Context, c *ccl.Comm) error {
				s := c.NewStream()
				m, err := newMemory(ctx, c, 1<<20, false)
				if err != nil {
					return err
				}
				for i, coll := range []record.CollKind{record.Broadcast, record.Reduce} {
					k := call{coll: coll, dt: ccl.Float32, op: ccl.Sum, count: 3001, root: 1 + i}
					check, err := k.device(ctx, c, s, m, i)
					if err := do(ctx, s, err); err != nil {
						return err
					}
					if err := check(); err != nil {
						return err
					}
					if algo, _ := c.GPUAlgo(); (algo == record.AlgoChain) != linked {
						return fmt.Errorf("%v by %v", coll, algo)
					}
				}
				return m.free(ctx)
			})
			want := 1
			if linked {
				want = 0
			}
			if got := strings.Count(said.String(), "NVLink does not join GPU 0000:02:00.0 of rank 1 and GPU 0000:04:00.0 of rank 3"); got != want {
				t.Errorf("said %d times, want %d:\n%s", got, want, said.String())
			}
		})
	}
}

// gpuAloneRole is the role of a rank of TestGPUAlone.
const gpuAloneRole = "gpu alone"

// TestGPUAlone: ranks are processes that see their own GPU alone, as with Slurm's --gpus-per-task=1. They
// reach each other's memory, and take a chain where NVML says that NVLink joins their GPUs.
func TestGPUAlone(t *testing.T) {
	n, gpus := gpuRanks(t)
	if n = min(n, gpus, 3); n < 2 {
		t.Skip("there is one GPU")
	}
	id := freeID(t)
	var ps []*rankProcess
	for r := range n {
		sees := fmt.Sprintf("CUDA_VISIBLE_DEVICES=%d", r)
		if faked {
			sees = fmt.Sprintf("%s=%s,gpus=1,first=%d", cudatest.Env, os.Getenv(cudatest.Env), r)
		}
		ps = append(ps, startRank(t, id, r, n, n, gpuAloneRole, "LOCKSTEP_DEVICE=cuda:0", "LOCKSTEP_GPU_ALGO=chain", sees))
	}
	for r, p := range ps {
		p.expect(t, r, "right by chain")
		for line := range p.lines {
			t.Errorf("rank %d also says %q", r, line)
		}
	}
}

func gpuAlone() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if gpus, err := ccl.Devices(); gpus != 1 || err != nil {
		return fmt.Errorf("sees %d GPUs: %w", gpus, err)
	}
	c, cfg, err := initFromEnv(ctx, nil)
	if err != nil {
		return err
	}
	defer cfg.Recorder.Close()
	s := c.NewStream()
	m, err := newMemory(ctx, c, 1<<20, false)
	if err != nil {
		return err
	}
	for i, coll := range []record.CollKind{record.Broadcast, record.Reduce} {
		k := call{coll: coll, dt: ccl.Float32, op: ccl.Sum, count: 3001, root: i}
		check, err := k.device(ctx, c, s, m, i)
		if err := do(ctx, s, err); err != nil {
			return err
		}
		if err := check(); err != nil {
			return err
		}
		if algo, _ := c.GPUAlgo(); algo != record.AlgoChain {
			return fmt.Errorf("%v by %v", coll, algo)
		}
	}
	if err := errors.Join(m.free(ctx), c.Close()); err != nil {
		return err
	}
	fmt.Println("right by chain")
	return nil
}
