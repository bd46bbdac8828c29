package ccl_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/cudatest"
	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis"
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

// TestGPUPeersNamed: two ranks whose operations change, and one of which is late now and then,
// are nobody's fault; when another process copies over the link between them, matrix and verdict
// name the pair. LOCKSTEP_TEST_FAKE_LINK=1 has it run on fake GPUs, with a link that is made slow.
func TestGPUPeersNamed(t *testing.T) {
	if !faked || os.Getenv("LOCKSTEP_TEST_FAKE_LINK") == "" {
		realPair(t)
	}
	p := unbalancedPair(t, 40*time.Second)
	began := time.Now()
	if faked {
		for _, k := range [][2]int{{0, 1}, {1, 0}} {
			cudatest.SlowLink(k[0], k[1], 50_000)
			defer cudatest.SlowLink(k[0], k[1], 0)
		}
	} else {
		end, err := startCopies()
		if err != nil {
			t.Fatal(err)
		}
		defer end()
	}
	named := func() bool {
		return slices.ContainsFunc(p.incidents(), func(i collector.Incident) bool {
			return i.Verdict.Class == diagnosis.CommunicationSlow && !i.Opened.Before(began) && slices.ContainsFunc(i.Verdict.Culprits, func(k diagnosis.Culprit) bool {
				return k.Kind == diagnosis.CulpritConnection && min(k.Rank, k.Peer) == 0 && max(k.Rank, k.Peer) == 1
			})
		})
	}
	// It goes on for 12 s, so that the ranks tell what they stamp.
	for last := began.Add(60 * time.Second); time.Now().Before(last) && (!named() || time.Since(began) < 12*time.Second); time.Sleep(2 * time.Second) {
		t.Logf("another process copies, %2.0f s: %s; %s", time.Since(began).Seconds(), p.matrix(), p.verdicts())
	}
	if !named() {
		t.Errorf("nobody names the link that another process copies over: %s", p.verdicts())
	}
	for _, i := range p.incidents() {
		t.Logf("verdict: %s\n  %s", sentence(i), strings.Join(i.Verdict.Why, "\n  "))
	}
}

// unbalancedPair starts two ranks under a pipeline, which must not name a link for so long.
func unbalancedPair(t *testing.T, healthy time.Duration) *pipeline {
	var recs recorders
	var stop atomic.Bool
	p := startPipeline(t, "gpu", []string{os.Getenv("LOCKSTEP_RUNTIME_DIR")})
	by := func(cfg *ccl.Config) {
		if faked {
			cfg.GPU.Peers, cfg.GPU.Algo = "on", "sym" // which reads
		}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		ranks(t, 2, onGPUs(t, 2, recs.keep, by), func(ctx context.Context, c *ccl.Comm) error { return unbalanced(ctx, t, c, &recs, &stop) })
	}()
	t.Cleanup(func() { stop.Store(true); <-done })
	// The first seconds load kernels, for which there may be no cubins.
	for end := time.Now().Add(healthy); time.Now().Before(end); time.Sleep(5 * time.Second) {
		t.Logf("healthy: %s; %s", p.matrix(), p.verdicts())
	}
	if slices.ContainsFunc(p.incidents(), func(i collector.Incident) bool { return i.Verdict.Class == diagnosis.CommunicationSlow }) {
		t.Errorf("a link is named though nothing is wrong with it: %s", p.verdicts())
	}
	return p
}

// TestGPUPeersBesideGEMM: a GEMM that comes and goes beside the collectives, on both GPUs or on
// one, takes multiprocessors and memory from them, and no link is named. The GEMM is that of
// bench/peers/nccl: LD_PRELOAD=libgemm.so GEMM_OUT=file GEMM_RANKS=2 GEMM_TURNS=5,5.
func TestGPUPeersBesideGEMM(t *testing.T) {
	realPair(t)
	if os.Getenv("GEMM_OUT") == "" || os.Getenv("GEMM_RANKS") == "" {
		t.Skip("no GEMM runs beside: preload libgemm.so")
	}
	p := unbalancedPair(t, 60*time.Second)
	for _, i := range p.incidents() {
		t.Logf("verdict: %s\n  %s", sentence(i), strings.Join(i.Verdict.Why, "\n  "))
	}
}

// unbalanced runs operations of several kinds and sizes until stop, with a rank late now and
// then, and logs what is stamped of the peer.
func unbalanced(ctx context.Context, t *testing.T, c *ccl.Comm, recs *recorders, stop *atomic.Bool) error {
	r, err := recs.open(c.Rank())
	if err != nil {
		return err
	}
	defer r.Close()
	m, err := newMemory(ctx, c, 64<<20, true)
	if err != nil {
		return err
	}
	least := 1 << 20 // to 16 MiB
	if faked {
		least = 256 << 10
	}
	s, stamps := c.NewStream(), make([]record.Stamp, 256)
	over := make([]byte, 4)
	flag := m.bytes(ccl.Int32, 48<<20, 4)
	told := time.Now()
	var trips, moving []int64
	for i := 0; ; i++ {
		size := least << (i / 64 % 5)
		if i%16 == 8*c.Rank() {
			time.Sleep(500 * time.Microsecond)
		}
		buf := m.bytes(ccl.Float32, 0, size)
		err := c.AllReduce(s, buf, buf, ccl.Sum)
		if i%4 == 3 {
			err = errors.Join(err, c.AllGather(s, m.bytes(ccl.Float32, c.Rank()*size/2, size/2), buf))
		}
		if err := do(ctx, s, err); err != nil {
			return err
		}
		for n := r.Stamps(stamps); n > 0; n = r.Stamps(stamps) {
			for _, st := range stamps[:n] {
				x := st.Peers[1-c.Rank()]
				if x.Trip != 0 && st.End != 0 && st.Coll == record.AllReduce && st.Bytes == uint64(16*least) {
					trips, moving = append(trips, int64(x.Trip)), append(moving, int64(x.There-x.Came))
				}
			}
		}
		if time.Since(told) > 5*time.Second && len(trips) > 0 {
			slices.Sort(trips)
			slices.Sort(moving)
			t.Logf("rank %d, AllReduce of %d MiB, %d times: a read of the peer %d ns (10 %%: %d, 90 %%: %d); from its coming to its last word %d ns (%d, %d)", c.Rank(), 16*least>>20, len(trips),
				trips[len(trips)/2], trips[len(trips)/10], trips[len(trips)*9/10], moving[len(moving)/2], moving[len(moving)/10], moving[len(moving)*9/10])
			told, trips, moving = time.Now(), nil, nil
		}
		if i%64 != 63 {
			continue
		}
		// Ranks end together: rank 0 says when.
		if over[0] = 0; c.Rank() == 0 && stop.Load() {
			over[0] = 1
		}
		if err := c.CopyIn(flag, over); err != nil {
			return err
		}
		if err := do(ctx, s, c.Broadcast(s, flag, flag, 0)); err != nil {
			return err
		}
		if err := c.CopyOut(over, flag); err != nil {
			return err
		}
		if over[0] == 1 {
			return m.free(ctx)
		}
	}
}

// matrix is the delay matrix of each communicator with stamps by peer.
func (p *pipeline) matrix() string {
	var b strings.Builder
	snapshot := p.master.Snapshot()
	if snapshot == nil {
		return "nothing yet"
	}
	for _, m := range snapshot.Delay {
		fmt.Fprintf(&b, "%s %.2f ", cmp.Or(m.Comm, "world"), m.Ratio)
	}
	for _, k := range snapshot.Connections {
		if k.Transport == record.TransportNVLink {
			fmt.Fprintf(&b, "%d->%d %.0f GB/s %d ns %v slow %d of %d; ", k.Rank, k.PeerWorld, k.BytesPerSec/1e9, k.LatencyNs, k.Cause, k.Slow, k.Windows)
		}
	}
	return b.String()
}

// gpuCopiesRole is the role of a process whose copy engines copy between GPUs 0 and 1.
const gpuCopiesRole = "gpu copies"

// startCopies starts it, and returns when it copies.
func startCopies() (end func(), err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), childEnv+"="+gpuCopiesRole)
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	end = func() {
		_ = in.Close()
		_ = cmd.Wait()
	}
	var line [64]byte
	if n, err := out.Read(line[:]); err != nil || !strings.HasPrefix(string(line[:n]), "copies") {
		end()
		return nil, fmt.Errorf("the process that copies says %q: %w", line[:n], err)
	}
	return end, nil
}

// gpuCopies copies both ways by copy engines, until its standard input ends.
func gpuCopies() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	id, err := ccl.NewUniqueID(l.Addr().String())
	if err := errors.Join(err, l.Close()); err != nil {
		return err
	}
	var over atomic.Bool
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		over.Store(true)
	}()
	var mu sync.Mutex
	var decided []bool
	goesOn := func(round int) bool { // the same for both ranks
		mu.Lock()
		defer mu.Unlock()
		if round == len(decided) {
			decided = append(decided, !over.Load())
		}
		return decided[round]
	}
	errs := make(chan error, 2)
	for rank := range 2 {
		go func() {
			c, err := ccl.Init(ctx, ccl.Config{ID: id, Rank: rank, Size: 2, Secret: secret, Node: "node", Device: ccl.GPU(rank), GPU: ccl.GPUConfig{Algo: "ce"}})
			if err != nil {
				errs <- err
				return
			}
			errs <- errors.Join(copyRounds(ctx, c, goesOn), c.Close())
		}()
	}
	return errors.Join(<-errs, <-errs)
}

func copyRounds(ctx context.Context, c *ccl.Comm, goesOn func(round int) bool) error {
	const share = 256 << 20
	m, err := newMemory(ctx, c, 2*share, true)
	if err != nil {
		return err
	}
	s := c.NewStream()
	for i := 0; goesOn(i); i++ {
		for range 8 {
			if err := c.AllGather(s, m.bytes(ccl.Uint8, c.Rank()*share, share), m.bytes(ccl.Uint8, 0, 2*share)); err != nil {
				return err
			}
		}
		if err := s.Wait(ctx); err != nil {
			return err
		}
		if i == 1 && c.Rank() == 0 {
			fmt.Println("copies")
		}
	}
	return m.free(ctx)
}
