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
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/cudatest"
	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// TestGPUPeersNamed: ranks whose operations change, and one of which is late now and then, are nobody's
// fault; when another process copies over the link between GPUs 0 and 1, matrix and verdict name that
// pair, or one of its ends, and nobody else. LOCKSTEP_TEST_FAKE_LINK=1 has it run on fake GPUs, with a link that is
// made slow.
func TestGPUPeersNamed(t *testing.T) {
	if !faked || os.Getenv("LOCKSTEP_TEST_FAKE_LINK") == "" {
		realPair(t)
	}
	p := unbalancedRanks(t, 40*time.Second)
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
	isPair := func(k diagnosis.Culprit) bool {
		return k.Kind == diagnosis.CulpritConnection && min(k.Rank, k.Peer) == 0 && max(k.Rank, k.Peer) == 1
	}
	named := func() bool {
		return slices.ContainsFunc(p.incidents(), func(i collector.Incident) bool {
			return i.Verdict.Class == diagnosis.CommunicationSlow && !i.Opened.Before(began) && slices.ContainsFunc(i.Verdict.Culprits, isPair)
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
		if v := i.Verdict; v.Class == diagnosis.CommunicationSlow && len(v.Culprits) > 0 && (v.Culprits[0].Rank > 1 || v.Culprits[0].Peer > 1) {
			t.Errorf("somebody else is named: %s", sentence(i))
		}
	}
}

// unbalancedRanks starts a rank on each GPU under a pipeline, which must not name a link for so long.
func unbalancedRanks(t *testing.T, healthy time.Duration) *pipeline {
	var recs recorders
	var stop atomic.Bool
	p := startPipeline(t, "gpu", []string{os.Getenv("LOCKSTEP_RUNTIME_DIR")})
	by := func(cfg *ccl.Config) {
		if faked {
			cfg.GPU.Peers, cfg.GPU.Algo = "on", "sym" // which reads
		}
	}
	n, gpus := gpuRanks(t)
	n = min(n, gpus)
	done := make(chan struct{})
	go func() {
		defer close(done)
		ranks(t, n, onGPUs(t, n, recs.keep, by), func(ctx context.Context, c *ccl.Comm) error { return unbalanced(ctx, t, c, &recs, &stop) })
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
	p := unbalancedRanks(t, 60*time.Second)
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
		if i%16 == 16/c.Size()*c.Rank() {
			time.Sleep(500 * time.Microsecond)
		}
		buf := m.bytes(ccl.Float32, 0, size)
		err := c.AllReduce(s, buf, buf, ccl.Sum)
		if i%4 == 3 {
			share := size / c.Size() &^ 255
			err = errors.Join(err, c.AllGather(s, m.bytes(ccl.Float32, c.Rank()*share, share), m.bytes(ccl.Float32, 0, c.Size()*share)))
		}
		if err := do(ctx, s, err); err != nil {
			return err
		}
		for n := r.Stamps(stamps); n > 0; n = r.Stamps(stamps) {
			for _, st := range stamps[:n] {
				x := st.Peers[(c.Rank()+1)%c.Size()]
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
