package ccl_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/record"
)

// The tests of this file measure real GPUs, two of them; docs/design/cuda.md has how to run them.

// realPair skips a test where there are not two real GPUs.
func realPair(t *testing.T) {
	t.Helper()
	if _, gpus := gpuRanks(t); faked || gpus < 2 {
		t.Skip("this measures two real GPUs")
	}
	peersAreStamped(t)
}

// TestGPUPeersBesideEvents: what is stamped by peer lies within CUDA events around the
// operation, and a peer came when it says itself that it began.
func TestGPUPeersBesideEvents(t *testing.T) {
	realPair(t)
	const rounds = 100
	for _, way := range []string{"ll", "ll12", "sym", "bulk"} {
		var recs recorders
		var mu sync.Mutex
		stamps := [2][]record.Stamp{}
		by := func(cfg *ccl.Config) { cfg.GPU.Algo, cfg.GPU.Peers = way, "on" }
		ranks(t, 2, onGPUs(t, 2, recs.keep, by), func(ctx context.Context, c *ccl.Comm) error {
			r, err := recs.open(c.Rank())
			if err != nil {
				return err
			}
			defer r.Close()
			m, err := newMemory(ctx, c, 32<<20, true)
			if err != nil {
				return err
			}
			s, between, got, err := timedRounds(ctx, c, r, m, way, rounds)
			if err != nil {
				return err
			}
			mu.Lock()
			stamps[c.Rank()] = got
			mu.Unlock()
			beyond := make([]int64, 0, rounds)
			for i := range got {
				x := got[i].Peers[1-c.Rank()]
				beyond = append(beyond, int64(between[i])-int64(x.There))
				if !x.Seen || beyond[i] < -1000 { // events have half a microsecond's resolution
					return fmt.Errorf("%s, round %d: %v between the events, the peer: %+v", way, i, between[i], x)
				}
			}
			slices.Sort(beyond)
			t.Logf("%-5s rank %d: events minus the peer's last word: least %5d ns, median %5d ns", way, c.Rank(), beyond[0], beyond[rounds/2])
			return errors.Join(s.Wait(ctx), m.free(ctx))
		})
		if t.Failed() {
			return
		}
		var off []int64
		for i := range rounds {
			for me := range 2 {
				a, b := &stamps[me][i], &stamps[1-me][i]
				if came := int64(a.Peers[1-me].Came); came > 100_000 { // it was waited for, for as long as it was late
					off = append(off, came-(b.Start-a.Start))
				}
			}
		}
		slices.Sort(off)
		if len(off) < rounds/2 {
			t.Errorf("%s: of %d rounds with a late rank %d were seen", way, rounds, len(off))
			continue
		}
		t.Logf("%-5s: when a late peer came, minus its own word of when it began: from %d to %d ns, median %d ns, %d times", way, off[0], off[len(off)-1], off[len(off)/2], len(off))
		if mid := off[len(off)/2]; mid < -50_000 || mid > 50_000 {
			t.Errorf("%s: a peer's coming is off by %d ns", way, mid)
		}
	}
}

// timedRounds runs AllReduce, each time with one rank late, and returns the time between events
// around it and its stamps.
func timedRounds(ctx context.Context, c *ccl.Comm, r *record.Reader, m *memory, way string, rounds int) (s *ccl.Stream, between []time.Duration, got []record.Stamp, err error) {
	drv, err := cuda.Open()
	if err != nil {
		return nil, nil, nil, err
	}
	dev, err := drv.Device(c.Rank())
	if err != nil {
		return nil, nil, nil, err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	var ev [2]*cuda.Event
	for i := range ev {
		if ev[i], err = dev.NewEvent(true); err != nil {
			return nil, nil, nil, err
		}
		defer ev[i].Close()
	}
	size := 256 << 10
	if way == "sym" || way == "bulk" {
		size = 8 << 20
	}
	s = c.NewStream()
	buf, all := m.bytes(ccl.Float32, 0, size), make([]record.Stamp, 64)
	if err := do(ctx, s, c.AllReduce(s, buf, buf, ccl.Sum)); err != nil { // loads what it needs
		return nil, nil, nil, err
	}
	for i := range rounds {
		if err := do(ctx, s, c.Barrier(s)); err != nil {
			return nil, nil, nil, err
		}
		for r.Stamps(all) > 0 {
		}
		if i%2 == c.Rank() {
			time.Sleep(time.Millisecond)
		}
		stream := dev.StreamOf(s.CUDA())
		if err := errors.Join(stream.Record(ev[0]), c.AllReduce(s, buf, buf, ccl.Sum), stream.Record(ev[1]), s.Wait(ctx)); err != nil {
			return nil, nil, nil, err
		}
		d, err := ev[1].Elapsed(ev[0])
		if err != nil {
			return nil, nil, nil, err
		}
		st, err := lastStamp(r, all, record.AllReduce)
		if err != nil {
			return nil, nil, nil, err
		}
		between, got = append(between, time.Duration(d)), append(got, st)
	}
	return s, between, got, nil
}

// TestGPUPeersCost prints what the recorder costs in captured graphs: off, on, with stamps by peer.
func TestGPUPeersCost(t *testing.T) {
	realPair(t)
	const ops, replays, turns = 32, 40, 3
	sizes := []int{8, 256, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 8 << 20}
	modes := []string{"recorder off", "recorder on", "by peer"}
	best := map[string][]time.Duration{}
	for range turns {
		for _, mode := range modes {
			how := func(cfg *ccl.Config) {
				cfg.GPU.Peers = map[string]string{modes[2]: "on"}[mode]
				if mode == modes[0] {
					cfg.Recorder = nil
				}
			}
			var mu sync.Mutex
			took := make([]time.Duration, len(sizes))
			ranks(t, 2, onGPUs(t, 2, how), func(ctx context.Context, c *ccl.Comm) error {
				for i, size := range sizes {
					d, err := graphTime(ctx, c, size, ops, replays)
					if err != nil {
						return err
					}
					mu.Lock()
					took[i] = max(took[i], d) // the slower rank's
					mu.Unlock()
				}
				return nil
			})
			if t.Failed() {
				return
			}
			if best[mode] == nil {
				best[mode] = took
			}
			for i := range took {
				best[mode][i] = min(best[mode][i], took[i])
			}
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "AllReduce of 2 GPUs in graphs of %d, ns an operation, the best of %d medians\n%10s", ops, turns, "bytes")
	for _, mode := range modes {
		fmt.Fprintf(&b, " %14s", mode)
	}
	for i, size := range sizes {
		off := best[modes[0]][i]
		fmt.Fprintf(&b, "\n%10d %14d", size, off.Nanoseconds())
		for _, mode := range modes[1:] {
			d := best[mode][i]
			fmt.Fprintf(&b, " %7d %+5d", d.Nanoseconds(), (d - off).Nanoseconds())
		}
	}
	t.Log(b.String())
}

// graphTime is how long an AllReduce of so many bytes takes in a graph of ops, by events.
func graphTime(ctx context.Context, c *ccl.Comm, size, ops, replays int) (median time.Duration, err error) {
	drv, err := cuda.Open()
	if err != nil {
		return 0, err
	}
	dev, err := drv.Device(c.Rank())
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	m, err := newMemory(ctx, c, max(size, 4096), true)
	if err != nil {
		return 0, err
	}
	s, buf := c.NewStream(), m.bytes(ccl.Float32, 0, size)
	if err := do(ctx, s, c.AllReduce(s, buf, buf, ccl.Sum)); err != nil {
		return 0, err
	}
	g, err := s.Capture(ccl.GPU(c.Rank()), func() error {
		for range ops {
			if err := c.AllReduce(s, buf, buf, ccl.Sum); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	var ev [2]*cuda.Event
	for i := range ev {
		if ev[i], err = dev.NewEvent(true); err != nil {
			return 0, err
		}
		defer ev[i].Close()
	}
	var all []time.Duration
	for range replays {
		if err := do(ctx, s, c.Barrier(s)); err != nil {
			return 0, err
		}
		stream := dev.StreamOf(s.CUDA())
		if err := g.Launch(s); err != nil { // whose start the ranks do not share
			return 0, err
		}
		if err := errors.Join(stream.Record(ev[0]), g.Launch(s), stream.Record(ev[1]), s.Wait(ctx)); err != nil {
			return 0, err
		}
		d, err := ev[1].Elapsed(ev[0])
		if err != nil {
			return 0, err
		}
		all = append(all, time.Duration(d)/time.Duration(ops))
	}
	slices.Sort(all)
	return all[len(all)/2], errors.Join(g.Close(), m.free(ctx))
}
