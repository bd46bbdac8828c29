package ccl_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/record"
)

// TestGPUStamps compares what the flight recorder says of operations with CUDA
// events around them, and with the host's clock: an operation lies between its
// events, and between the call and the end of Wait. It prints how near.
func TestGPUStamps(t *testing.T) {
	n, gpus := gpuRanks(t)
	var mu sync.Mutex
	paths := map[int]string{}
	keep := func(cfg *ccl.Config) {
		mu.Lock()
		defer mu.Unlock()
		paths[cfg.Rank] = cfg.Recorder.Path()
	}
	const rounds = 50
	ranks(t, n, onGPUs(t, gpus, keep), func(ctx context.Context, c *ccl.Comm) error {
		s := c.NewStream()
		m, err := newMemory(ctx, c, 32<<20, true)
		if err != nil {
			return err
		}
		drv, err := cuda.Open()
		if err != nil {
			return err
		}
		dev, err := drv.Device(c.Rank() % gpus)
		if err != nil {
			return err
		}
		defer dev.Close()
		var ev [2]*cuda.Event
		for i := range ev {
			if ev[i], err = dev.NewEvent(true); err != nil {
				return err
			}
			defer ev[i].Close()
		}
		mu.Lock()
		path := paths[c.Rank()]
		mu.Unlock()
		r, err := record.Open(path)
		if err != nil {
			return err
		}
		defer r.Close()
		sizes := []int{8, 4096, 256 << 10, 16 << 20}
		if faked {
			sizes = sizes[:2]
		}
		first := r.Devices(nil)[0].Anchor
		last := uint64(0) // its sequence
		for _, size := range sizes {
			buf := m.bytes(ccl.Float32, 0, size)
			if err := do(ctx, s, c.AllReduce(s, buf, buf, ccl.Sum)); err != nil { // loads what it needs
				return err
			}
			stream := dev.StreamOf(s.CUDA())
			var off, early, late, stated []int64
			stamps := make([]record.Stamp, 64)
			st, err := stampAfter(r, stamps, record.AllReduce, last)
			if err != nil {
				return err
			}
			last = st.Seq
			for range rounds {
				if err := do(ctx, s, c.Barrier(s)); err != nil {
					return err
				}
				called := record.Now()
				if err := stream.Record(ev[0]); err != nil {
					return err
				}
				if err := c.AllReduce(s, buf, buf, ccl.Sum); err != nil {
					return err
				}
				if err := stream.Record(ev[1]); err != nil {
					return err
				}
				if err := s.Wait(ctx); err != nil {
					return err
				}
				seen := record.Now()
				between, err := ev[1].Elapsed(ev[0])
				if err != nil {
					return err
				}
				st, err := stampAfter(r, stamps, record.AllReduce, last)
				if err != nil {
					return err
				}
				last = st.Seq
				off = append(off, int64(between)-(st.End-st.Start))
				early = append(early, st.Start+st.Err-called)
				late = append(late, seen-(st.End-st.Err))
				stated = append(stated, st.Err)
				if early[len(early)-1] < 0 || late[len(late)-1] < 0 {
					now := r.Devices(nil)[0]
					return fmt.Errorf("%d bytes: an operation began %d ns before it was called, or ended %d ns after it was seen to have ended, by a clock said to be known to ±%d ns, %v after its last handshake (±%d ns); %s",
						size, called-(st.Start+st.Err), st.End-st.Err-seen, st.Err, time.Duration(st.Start-now.Anchor.Mono), now.Anchor.Err, gained(first, now.Anchor))
				}
			}
			for _, v := range [][]int64{off, early, late, stated} {
				slices.Sort(v)
			}
			if !faked && off[0] < -1000 { // events have half a microsecond's resolution
				return fmt.Errorf("%d bytes: an operation took %d ns longer than the time between the events around it", size, -off[0])
			}
			if c.Rank() == 0 {
				gpu := r.Devices(nil)[0]
				t.Logf("AllReduce of %8d bytes: events minus stamps: median %5d ns, worst %5d ns; start after call: least %d ns; seen after end: least %d ns; clock known to ±%d to ±%d ns, at a handshake to ±%d ns; %s",
					size, off[rounds/2], off[rounds-1], early[0], late[0], stated[0], stated[rounds-1], gpu.Anchor.Err, gained(first, gpu.Anchor))
			}
		}
		return m.free(ctx)
	})
}

// gained says how much faster the host's clock runs than the GPU's, by two anchors.
func gained(from, to record.DeviceAnchor) string {
	d := to.GPU - from.GPU
	if d <= 0 {
		return "rates not measured yet"
	}
	ppm := func(ns int64) float64 { return float64(ns) / float64(d) * 1e6 }
	return fmt.Sprintf("the host's clock gains %.1f ± %.1f ppm on the GPU's", ppm(to.Mono-from.Mono-d), ppm(to.Err+from.Err))
}

// lastStamp is the last ended operation of a kind that r has not told yet.
func lastStamp(r *record.Reader, buf []record.Stamp, coll record.CollKind) (last record.Stamp, err error) {
	return stampAfter(r, buf, coll, 0)
}

// stampAfter is lastStamp of operations after a sequence: where the host brings stamps to the
// recorder, one before may come first.
func stampAfter(r *record.Reader, buf []record.Stamp, coll record.CollKind, seq uint64) (last record.Stamp, err error) {
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		n := r.Stamps(buf)
		for _, s := range buf[:n] {
			if s.Coll == coll && s.End != 0 && s.Seq > seq {
				last = s
			}
		}
		if n == 0 && last.End != 0 {
			return last, nil
		}
	}
	return last, fmt.Errorf("no stamp of %v", coll)
}

// TestGPURecorderTellsPeers: an operation on device memory between nodes is recorded with what each
// peer sent, also if it goes in many chunks. The times lie within the operation's.
func TestGPURecorderTellsPeers(t *testing.T) {
	const late = 20 * time.Millisecond
	nodes := []int{0, 1, 2}
	gpus := placed(t, nodes)
	paths := make([]string, len(nodes))
	keep := func(cfg *ccl.Config) { paths[cfg.Rank] = cfg.Recorder.Path() }
	ranks(t, len(nodes), onGPUs(t, gpus, onNodes(nodes), keep), func(ctx context.Context, c *ccl.Comm) error {
		s := c.NewStream()
		m, err := newMemory(ctx, c, 8<<20, false)
		if err != nil {
			return err
		}
		b := m.bytes(ccl.Float32, 0, 4<<20)
		if err := do(ctx, s, c.AllReduce(s, b, b, ccl.Sum)); err != nil { // loads what it needs
			return err
		}
		if c.Rank() == 1 {
			time.Sleep(late)
		}
		if err := do(ctx, s, c.AllReduce(s, b, b, ccl.Sum)); err != nil {
			return err
		}
		r, err := record.Open(paths[c.Rank()])
		if err != nil {
			return err
		}
		defer r.Close()
		var legs []record.Record
		records := make([]record.Record, 1000)
		for _, op := range records[:r.Next(records)] {
			switch op.Kind {
			case record.KindPhase:
				legs = append(legs, op)
			case record.KindWhole:
				if op.Seq == 2 {
					checkLegs(t, len(nodes), c.Rank(), legs, op)
					waited := int64(0)
					for _, l := range legs {
						waited += l.Wait + l.Stall
					}
					if c.Rank() == 0 && waited < int64(late/2) {
						t.Errorf("rank 0 has waited for %v, rank 1 was %v late", time.Duration(waited), late)
					}
				}
				legs = nil
			}
		}
		return m.free(ctx)
	})
}
