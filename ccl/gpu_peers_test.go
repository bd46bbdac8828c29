package ccl_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/cudatest"
	"github.com/lockstep-ccl/lockstep/record"
)

// recorders keeps the recorders of ranks by rank, to read them while they run.
type recorders struct {
	mu    sync.Mutex
	paths map[int]string
}

func (r *recorders) keep(cfg *ccl.Config) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.paths == nil {
		r.paths = map[int]string{}
	}
	r.paths[cfg.Rank] = cfg.Recorder.Path()
}

func (r *recorders) open(rank int) (*record.Reader, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return record.Open(r.paths[rank])
}

// peerCalls are collectives of each algorithm that stamps by peer.
func peerCalls(n int) (all []call) {
	for _, coll := range []record.CollKind{record.AllReduce, record.ReduceScatter, record.AllGather, record.AlltoAll, record.Broadcast, record.Reduce} {
		all = append(all, call{coll: coll, dt: ccl.Float32, op: ccl.Sum, root: n - 1, count: 20_000})
	}
	return all
}

// peersAreStamped skips a test where recorders are on a disk.
func peersAreStamped(t *testing.T) {
	t.Helper()
	if st := (unix.Statfs_t{}); !faked && unix.Statfs(record.DefaultDir(), &st) == nil && st.Type != unix.TMPFS_MAGIC {
		t.Skipf("%s is on a disk: peers are stamped in memory that the GPU shares, only", record.DefaultDir())
	}
}

// TestGPUPeers: of each operation every peer is stamped, by each algorithm, replays of a graph
// included, and what was stamped fits the operation; a peer that comes late has come late
// for everyone, and nobody else has; a pair whose link is slow is slow to read for the two, and
// for nobody else.
func TestGPUPeers(t *testing.T) {
	n, gpus := gpuRanks(t)
	peersAreStamped(t)
	n = min(n, 3)
	for _, way := range []string{"ll", "ll12", "chain", "sym"} {
		t.Run(way, func(t *testing.T) {
			var recs recorders
			by := func(cfg *ccl.Config) { cfg.GPU.Algo, cfg.GPU.Peers = way, "on" }
			ranks(t, n, onGPUs(t, gpus, recs.keep, by), func(ctx context.Context, c *ccl.Comm) error {
				r, err := recs.open(c.Rank())
				if err != nil {
					return err
				}
				defer r.Close()
				m, err := newMemory(ctx, c, 16<<20, true)
				if err != nil {
					return err
				}
				s, buf := c.NewStream(), make([]record.Stamp, 64)
				for _, k := range peerCalls(n) {
					check, err := k.device(ctx, c, s, m, 0)
					if err := do(ctx, s, err); err != nil {
						return err
					}
					if err := check(); err != nil {
						return err
					}
					st, err := lastStamp(r, buf, k.coll)
					if err != nil {
						return err
					}
					if err := wholeRow(c, &st, way == "sym"); err != nil {
						return fmt.Errorf("%v: %w", k.coll, err)
					}
				}
				if err := replayed(ctx, c, s, m, r, buf, way == "sym"); err != nil {
					return err
				}
				return m.free(ctx)
			})
		})
	}
}

// replayed checks the rows of what a graph replays.
func replayed(ctx context.Context, c *ccl.Comm, s *ccl.Stream, m *memory, r *record.Reader, all []record.Stamp, windows bool) error {
	gpus, err := ccl.Devices()
	if err != nil {
		return err
	}
	buf := m.bytes(ccl.Float32, 0, 80_000)
	g, err := capture(ctx, c, s, gpus, func() error { return c.AllReduce(s, buf, buf, ccl.Max) })
	if err != nil {
		return err
	}
	for range 3 {
		if err := do(ctx, s, g.Launch(s)); err != nil {
			return err
		}
		st, err := lastStamp(r, all, record.AllReduce)
		if err != nil {
			return err
		}
		if err := wholeRow(c, &st, windows); err != nil || !st.Replay() {
			return fmt.Errorf("replayed %v: %w", st.Replay(), err)
		}
	}
	return g.Close()
}

// wholeRow checks the row of an operation that all ranks take part in.
func wholeRow(c *ccl.Comm, st *record.Stamp, windows bool) error {
	for p, s := range st.Peers {
		switch {
		case s.Seen != (p < c.Size() && p != c.Rank()):
			return fmt.Errorf("rank %d, peer %d: seen %v: %+v", c.Rank(), p, s.Seen, st)
		case !s.Seen:
		case int64(s.There) > st.End-st.Start || s.Came > s.There || s.There == 0:
			return fmt.Errorf("rank %d, peer %d of an operation of %d ns: %+v", c.Rank(), p, st.End-st.Start, s)
		case windows != (s.Trip != 0):
			return fmt.Errorf("rank %d, peer %d: a read took %d ns", c.Rank(), p, s.Trip)
		}
	}
	return nil
}

// TestGPUPeersSlowLink: see TestGPUPeers.
func TestGPUPeersSlowLink(t *testing.T) {
	n, gpus := gpuRanks(t)
	if !faked {
		t.Skip("a slow link is injected into fake GPUs")
	}
	n = min(n, 4)
	const slow = 30 * time.Millisecond
	cudatest.SlowLink(1, 2, int(slow.Microseconds()))
	cudatest.SlowLink(2, 1, int(slow.Microseconds()))
	defer cudatest.SlowLink(1, 2, 0)
	defer cudatest.SlowLink(2, 1, 0)
	var recs recorders
	by := func(cfg *ccl.Config) { cfg.GPU.Algo, cfg.GPU.Peers = "sym", "slow" }
	ranks(t, n, onGPUs(t, gpus, recs.keep, by), func(ctx context.Context, c *ccl.Comm) error {
		r, err := recs.open(c.Rank())
		if err != nil {
			return err
		}
		defer r.Close()
		m, err := newMemory(ctx, c, 32<<20, true)
		if err != nil {
			return err
		}
		s, buf := c.NewStream(), make([]record.Stamp, 64)
		small, large := m.bytes(ccl.Float32, 0, 64<<10), m.bytes(ccl.Float32, 0, 16<<20)
		if err := do(ctx, s, c.AllReduce(s, small, small, ccl.Sum)); err != nil {
			return err
		}
		if st, err := lastStamp(r, buf, record.AllReduce); err != nil || st.Peers != [record.MaxStampPeers]record.StampPeer{} {
			return fmt.Errorf("64 KiB are stamped by peer: %+v, %w", st.Peers, err)
		}
		least := [record.MaxStampPeers]uint32{}
		for p := range least {
			least[p] = math.MaxUint32
		}
		for range 8 {
			if err := do(ctx, s, c.AllReduce(s, large, large, ccl.Sum)); err != nil {
				return err
			}
			st, err := lastStamp(r, buf, record.AllReduce)
			if err != nil {
				return err
			}
			if err := wholeRow(c, &st, true); err != nil {
				return err
			}
			for p := range n {
				if p != c.Rank() {
					least[p] = min(least[p], st.Peers[p].Trip)
				}
			}
		}
		for p := range n {
			pair := c.Rank() == 1 && p == 2 || c.Rank() == 2 && p == 1
			if p != c.Rank() && pair != (least[p] >= uint32(slow)) {
				return fmt.Errorf("rank %d: a read of rank %d's memory takes %d ns at least", c.Rank(), p, least[p])
			}
		}
		for _, k := range r.Conns(nil) {
			if k.Transport == record.TransportNVLink && (k.Peer < 0 || int(k.Peer) >= n || int(k.Peer) == c.Rank() || k.Name == "") {
				return fmt.Errorf("connection %+v", k)
			}
		}
		return m.free(ctx)
	})
}

// TestGPUPeersInMatrix: what kernels stamp by peer comes by recorder and agent to the master,
// whose delay matrix has a cell for each pair.
func TestGPUPeersInMatrix(t *testing.T) {
	peersAreStamped(t)
	n, gpus := gpuRanks(t)
	n = min(n, 3)
	if gpus < n && !faked {
		t.Skip("ranks that share a GPU take turns")
	}
	p := startPipeline(t, "gpu", []string{os.Getenv("LOCKSTEP_RUNTIME_DIR")})
	whole := func() bool {
		snapshot := p.master.Snapshot()
		if snapshot == nil {
			return false
		}
		for _, m := range snapshot.Delay {
			cells := 0
			for _, ratio := range m.Ratio {
				if ratio > 0 { // not NaN
					cells++
				}
			}
			if m.Size == n && cells == n*(n-1) {
				return true
			}
		}
		return false
	}
	var mu sync.Mutex
	var decided []bool
	goesOn := func(round int) bool { // the same for all ranks
		mu.Lock()
		defer mu.Unlock()
		if round == len(decided) {
			decided = append(decided, round == 0 || !whole())
		}
		return decided[round]
	}
	by := func(cfg *ccl.Config) { cfg.GPU.Algo, cfg.GPU.Peers = "sym", "on" }
	ranks(t, n, onGPUs(t, gpus, by), func(ctx context.Context, c *ccl.Comm) error {
		m, err := newMemory(ctx, c, 4<<20, true)
		if err != nil {
			return err
		}
		s, buf := c.NewStream(), m.bytes(ccl.Float32, 0, 256<<10)
		for round := 0; goesOn(round); round++ { // or until ctx ends, and that is an error
			for range 8 {
				if err := do(ctx, s, c.AllReduce(s, buf, buf, ccl.Sum)); err != nil {
					return err
				}
			}
		}
		return m.free(ctx)
	})
}

// TestGPUPeersShareGPU: of two ranks that share a GPU one has a recorder, so it alone stamps by peer. The
// driver loads the kernels for that only while nothing runs on the device, where the other rank's kernel
// may already wait for this rank.
func TestGPUPeersShareGPU(t *testing.T) {
	gpuRanks(t) // or skip
	peersAreStamped(t)
	for _, coll := range []record.CollKind{record.AllReduce, record.AllGather} {
		t.Run(coll.String(), func(t *testing.T) {
			called := make(chan struct{})
			by := func(cfg *ccl.Config) {
				if cfg.GPU.Peers = "on"; cfg.Rank == 1 {
					cfg.Recorder = nil
				}
			}
			ranks(t, 2, onGPUs(t, 1, by), func(ctx context.Context, c *ccl.Comm) error {
				s := c.NewStream()
				m, err := newMemory(ctx, c, 16<<20, true)
				if err != nil {
					return err
				}
				k := call{coll: coll, dt: ccl.Float32, op: ccl.Sum, count: 20_000}
				check, err := k.deviceBy(ctx, c, s, m, 0, func(launch func() error) error {
					if c.Rank() == 1 {
						defer close(called)
						return launch()
					}
					<-called
					return returns(launch)
				})
				if err := do(ctx, s, err); err != nil {
					return err
				}
				return errors.Join(check(), m.free(ctx))
			})
		})
	}
}
