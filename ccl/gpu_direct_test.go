package ccl_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/ccl/ccltest"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/cudatest"
	"github.com/lockstep-ccl/lockstep/ccl/internal/rdma"
	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs/verbstest"
	"github.com/lockstep-ccl/lockstep/record"
)

// The tests of this file have fake NICs read fake GPUs' memory. What they read has no
// address at which the CPU could: a test in which it does ends with a fault.

// onFakes skips where the GPUs are real, which have no use for fake NICs.
func onFakes(t *testing.T) (gpus int) {
	t.Helper()
	_, gpus = gpuRanks(t)
	if !faked {
		t.Skip("fake NICs cannot read a real GPU's memory")
	}
	return gpus
}

// reading has NICs read the GPUs' memory, or not.
func reading(t *testing.T, mode ccl.GPUDirect) func(*ccl.Config) {
	if mode == ccl.GPUDirectRequire {
		onFakes(t)
	}
	return func(cfg *ccl.Config) { cfg.GPUDirect = mode }
}

// direct is gpusOverRDMA with NICs that read the GPUs' memory, or not.
func direct(gpus, per int, mode ccl.GPUDirect) func(*ccl.Config) {
	return func(cfg *ccl.Config) {
		gpusOverRDMA(gpus, per)(cfg)
		cfg.GPUDirect = mode
	}
}

// TestGPUDirect: what NICs read from the GPUs' memory gives the same bits as what they
// read from pinned memory, and it is as many bytes as there are to send, of the collectives
// that need no CPU for them.
func TestGPUDirect(t *testing.T) {
	for _, l := range []struct{ n, per int }{{2, 1}, {4, 2}, {3, 1}} {
		t.Run(fmt.Sprintf("%d ranks, %d a node", l.n, l.per), func(t *testing.T) {
			gpus := onFakes(t)
			verbstest.New(t, oneRail())
			nodes, count := l.n/l.per, 300_007/l.per // of each share: more chunks than slots, and an odd last one
			// What all ranks together send, in shares. Two nodes exchange everything, of which
			// each rank of a node sends a part; among more, the CPU reduces.
			sends := map[record.CollKind]int{
				record.AllGather: l.n * (nodes - 1), record.AlltoAll: l.n * (l.n - l.per), record.Broadcast: 1,
				record.Gather: l.n - l.per, record.Scatter: l.n - l.per,
			}
			if nodes == 2 {
				sends[record.AllReduce], sends[record.ReduceScatter], sends[record.Reduce] = 2, l.n, 1
			}
			results := map[ccl.GPUDirect][][]byte{}
			for _, mode := range []ccl.GPUDirect{ccl.GPUDirectOff, ccl.GPUDirectRequire} {
				out := make([][]byte, l.n)
				ranks(t, l.n, direct(gpus, l.per, mode), func(ctx context.Context, c *ccl.Comm) error {
					for _, coll := range kinds[:len(kinds)-1] { // Barrier sends nothing
						b, sent, err := random(ctx, c, coll, count)
						if err != nil {
							return fmt.Errorf("%v: %w", coll, err)
						}
						out[c.Rank()] = append(out[c.Rank()], b...)
						want := sends[coll] * count * 4
						switch {
						case mode == ccl.GPUDirectOff:
							if sent != 0 {
								return fmt.Errorf("%v: %d bytes from the GPUs' memory, which is off", coll, sent)
							}
						case nodes > 2 && (coll == record.Broadcast || coll == record.Reduce):
							if sent == 0 { // to, and from, how many of the others root passes them is the model's choice
								return fmt.Errorf("%v: nothing from the GPUs' memory", coll)
							}
						case sent > want || sent < want-64<<10*l.n*(l.n-1):
							return fmt.Errorf("%v: %d bytes from the GPUs' memory, want %d but for small rests", coll, sent, want)
						}
					}
					return nil
				})
				results[mode] = out
			}
			for r, want := range results[ccl.GPUDirectOff] {
				if got := results[ccl.GPUDirectRequire][r]; !bytes.Equal(got, want) || len(want) < 6*count*4 {
					t.Errorf("rank %d has other bits than without", r)
				}
			}
		})
	}
}

// random is what a rank has of a collective on values that are the same each time, and how
// many bytes NICs have read from GPUs' memory for it.
func random(ctx context.Context, c *ccl.Comm, coll record.CollKind, count int) (out []byte, sent int, err error) {
	k := call{coll: coll, dt: ccl.Float32, op: ccl.Sum, count: count, root: 1}
	ss, rs := k.shares(c.Size())
	m, err := newMemory(ctx, c, 4*count*(ss+rs), false)
	if err != nil {
		return nil, 0, err
	}
	in := make([]byte, 4*count*ss)
	out = make([]byte, 4*count*rs)
	rng := rand.New(rand.NewPCG(uint64(c.Rank()), uint64(coll)))
	for i := range count * ss {
		put(ccl.Float32, in[4*i:], float64(rng.Float32()*2000-1000))
	}
	s := c.NewStream()
	send, recv := m.bytes(ccl.Float32, 0, len(in)), m.bytes(ccl.Float32, len(in), len(out))
	if err := errors.Join(c.CopyIn(send, in), c.CopyIn(recv, out)); err != nil {
		return nil, 0, err
	}
	before := rdma.SentDMABuf()
	for _, step := range []func() error{
		func() error { return c.Barrier(s) }, // everyone has looked
		func() error { return k.on(c, s, send, recv) },
		func() error { return c.Barrier(s) }, // everyone has sent
	} {
		if err := do(ctx, s, step()); err != nil {
			return nil, 0, err
		}
	}
	sent = int(rdma.SentDMABuf() - before)
	if err := do(ctx, s, c.Barrier(s)); err != nil { // everyone has looked
		return nil, 0, err
	}
	if err := c.CopyOut(out, recv); err != nil {
		return nil, 0, err
	}
	return out, sent, m.free(ctx)
}

// TestGPUDirectCalls runs odd sizes, in place and not, and messages, with results that are
// known; small ones go through pinned memory, and so does what ranks of a node send to each
// other because nodes are uneven, or their ranks not side by side.
func TestGPUDirectCalls(t *testing.T) {
	for _, nodes := range [][]int{{0, 1}, {0, 0, 1, 1}, {0, 1, 2}, {0, 0, 1}, {0, 1, 0, 1}} {
		if testing.Short() && nodes[1] == 0 { // what shares a node beside another rank's is in the last
			continue
		}
		t.Run(fmt.Sprint("nodes ", nodes), func(t *testing.T) {
			gpus := onFakes(t)
			verbstest.New(t, oneRail())
			n, counts := len(nodes), []int{5, 50_001, 200_003}
			if n > 3 || testing.Short() {
				counts = counts[:2]
			}
			var list []call
			for i, coll := range kinds {
				for _, count := range counts {
					list = append(list, call{coll, ccl.Float32, ccl.Avg, count, i % n, i%2 == 0, i})
				}
			}
			prepare := func(cfg *ccl.Config) {
				overRDMAOn(func(rank int) int { return nodes[rank] })(cfg)
				cfg.Device, cfg.GPUDirect = ccl.GPU(cfg.Rank%gpus), ccl.GPUDirectRequire
			}
			everyCall(t, n, true, list, prepare)
			before := rdma.SentDMABuf()
			everyMessage(t, n, false, prepare)
			if n := rdma.SentDMABuf() - before; n < 5<<20 {
				t.Errorf("%d bytes of messages were sent from the GPUs' memory", n)
			}
		})
	}
}

// TestGPUDirectFailover: a path that breaks while a NIC reads the GPU's memory, and comes
// back, costs no bit; nor does a device that refuses the memory when it comes back.
func TestGPUDirectFailover(t *testing.T) {
	const size = 3 << 20
	gpus := onFakes(t)
	faults := append(slices.Clone(rdmaFaults), rdmaFault{"a device that refuses", func(f *verbstest.Fabric) { f.Remove("mlx5_0") }, func(f *verbstest.Fabric) {
		f.Fail("ibv_reg_dmabuf_mr", 12, 0) // ENOMEM
		f.Restore("mlx5_0")
	}})
	for _, ft := range faults {
		if !slices.Contains([]string{"to rank 0", "acknowledgements", "torn, then the port", "late packets", "a device that refuses"}, ft.name) {
			continue // much like others; TestRDMAFailover has them
		}
		t.Run(ft.name, func(t *testing.T) {
			f := verbstest.New(t, verbstest.Options{})
			breaking := ft.during(f, 2, 5)
			before := rdma.SentDMABuf()
			ranks(t, 2, direct(gpus, 1, ccl.GPUDirectRequire), faultyRounds(breaking, 9, size))
			breaking.end()
			// AllReduce and the message of both ranks, Broadcast of one.
			if n, want := rdma.SentDMABuf()-before, uint64(9*5*size); n != want {
				t.Errorf("%d bytes were sent from the GPUs' memory, want %d", n, want)
			}
		})
	}
}

// TestGPUDirectChoice: auto takes NICs that are near the GPU and register its memory, and
// else pinned memory; require says what lacks; by default it is off.
func TestGPUDirectChoice(t *testing.T) {
	const size = 1 << 20
	gpus := onFakes(t)
	near := []string{"0000:01:00.0", "0000:02:00.0"}
	for _, c := range []struct {
		name    string
		below   []string // GPUs below the NICs' switches
		break_  func(*verbstest.Fabric)
		change  func(*ccl.Config)
		auto    bool
		require string // the error, "" for none
	}{
		{"default", near, nil, func(cfg *ccl.Config) { cfg.GPUDirect = "" }, false, ""},
		{"near", near, nil, nil, true, ""},
		{"one far", near[:1], nil, nil, true, ""},
		{"far", nil, nil, nil, false, ""},
		{"refused", near, func(f *verbstest.Fabric) { f.Fail("ibv_reg_dmabuf_mr", 12, 0) }, nil, false, "refuses the GPU's memory"},
		{"no DMA buffers", near, func(*verbstest.Fabric) { cudatest.Deny(124) }, nil, false, "DMA_BUF_SUPPORTED"},
		{"no export", near, func(*verbstest.Fabric) { cudatest.Fail("cuMemGetHandleForAddressRange", 801, 0) }, nil, false, "cuMemGetHandleForAddressRange"},
		{"TCP", near, nil, func(cfg *ccl.Config) { cfg.Net = ccl.NetTCP }, false, "over TCP"},
		{"injected faults", near, nil, func(cfg *ccl.Config) { cfg.Faults = ccltest.New() }, false, "injected faults"},
	} {
		for _, mode := range []ccl.GPUDirect{ccl.GPUDirectAuto, ccl.GPUDirectRequire} {
			if c.name == "default" && mode != ccl.GPUDirectAuto {
				continue
			}
			t.Run(fmt.Sprintf("%s, %s", c.name, mode), func(t *testing.T) {
				o := oneRail()
				for i := range o.Devices {
					o.Devices[i].Ports = []verbstest.Port{{Rail: i % 2}}
				}
				for i, gpu := range c.below { // the backups are elsewhere
					o.Devices[2*i].GPU = gpu
				}
				f := verbstest.New(t, o)
				if c.break_ != nil {
					c.break_(f)
				}
				defer cudatest.Heal()
				prepare := func(cfg *ccl.Config) {
					direct(gpus, 1, mode)(cfg)
					if c.change != nil {
						c.change(cfg)
					}
				}
				if mode == ccl.GPUDirectRequire && c.require != "" {
					refused(t, prepare, c.require)
					return
				}
				before := rdma.SentDMABuf()
				ranks(t, 2, prepare, func(ctx context.Context, c *ccl.Comm) error {
					s := c.NewStream()
					m, err := newMemory(ctx, c, size, false)
					if err != nil {
						return err
					}
					if err := oneSum(ctx, c, s, m.bytes(ccl.Float32, 0, size)); err != nil {
						return err
					}
					return m.free(ctx)
				})
				if got, want := rdma.SentDMABuf() > before, c.auto || mode == ccl.GPUDirectRequire; got != want {
					t.Errorf("NICs read the GPUs' memory: %v, want %v", got, want)
				}
			})
		}
	}
	t.Run("refused, required by one rank", func(t *testing.T) {
		f := verbstest.New(t, oneRail())
		f.Fail("ibv_reg_dmabuf_mr", 12, 0)
		refused(t, func(cfg *ccl.Config) {
			direct(gpus, 1, []ccl.GPUDirect{ccl.GPUDirectRequire, ccl.GPUDirectOff}[cfg.Rank])(cfg)
		}, "refuses the GPU's memory")
	})
	for name, v := range map[string]string{"RANK": "0", "WORLD_SIZE": "1", "COMM_ID": freeID(t).String(), "RECORDER": "off", "GPUDIRECT": "require"} {
		t.Setenv("LOCKSTEP_"+name, v)
	}
	if cfg, err := ccl.ConfigFromEnv(); err != nil || cfg.GPUDirect != ccl.GPUDirectRequire {
		t.Errorf("GPUDirect %q from the environment, %v", cfg.GPUDirect, err)
	}
	t.Setenv("LOCKSTEP_GPUDIRECT", "yes")
	if _, err := ccl.ConfigFromEnv(); err == nil || !strings.Contains(err.Error(), `LOCKSTEP_GPUDIRECT is "yes", want auto, off or require`) {
		t.Errorf("GPUDirect yes from the environment: %v", err)
	}
	bad := ccl.Config{Size: 1, ID: freeID(t), Secret: secret, GPUDirect: "yes"}
	if _, err := ccl.Init(context.Background(), bad); !errors.Is(err, ccl.ErrInvalid) || !strings.Contains(err.Error(), `"yes"`) {
		t.Errorf("GPUDirect yes: %v", err)
	}
}

// refused: no rank joins, and one at least says why.
func refused(t *testing.T, prepare func(*ccl.Config), why string) {
	id, errs := freeID(t), make([]error, 2)
	var wg sync.WaitGroup
	for r := range errs {
		wg.Go(func() {
			cfg := ccl.Config{ID: id, Rank: r, Size: 2, Secret: secret, Timeout: 20 * time.Second}
			prepare(&cfg)
			var c *ccl.Comm
			if c, errs[r] = ccl.Init(context.Background(), cfg); errs[r] == nil {
				_ = c.Close()
			}
		})
	}
	wg.Wait()
	for r, err := range errs {
		if err == nil || !strings.Contains(err.Error(), "GPUDirect is required") || !strings.Contains(err.Error(), why) {
			t.Errorf("rank %d: %v, want an error about %q", r, err, why)
		}
	}
}
