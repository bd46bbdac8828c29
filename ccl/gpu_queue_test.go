package ccl_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/record"
)

// TestGPUBackToBack queues large operations of the copy engines, of many pieces
// each, without waiting in between, and checks the last.
func TestGPUBackToBack(t *testing.T) {
	n, all := gpuRanks(t)
	if n = min(n, all); n < 2 {
		t.Skip("ranks that share a GPU take no copy engines")
	}
	for _, tt := range []struct {
		coll record.CollKind
		gpus int
	}{
		{record.AllReduce, all}, {record.Reduce, all}, {record.ReduceScatter, all}, {record.Broadcast, all}, {record.AllGather, all}, {record.AlltoAll, all},
	} {
		coll, gpus := tt.coll, tt.gpus
		t.Run(fmt.Sprintf("%s on %d GPUs", coll, gpus), func(t *testing.T) {
			force := func(cfg *ccl.Config) { cfg.GPU.Algo = "ce" }
			ranks(t, n, onGPUs(t, gpus, force), func(ctx context.Context, c *ccl.Comm) error {
				s := c.NewStream()
				const count = 5_000_000 // of the whole: pieces enough for both channels to turn
				m, err := newMemory(ctx, c, 2*4*count+1<<20, true)
				if err != nil {
					return err
				}
				k := call{coll: coll, dt: ccl.Float32, op: ccl.Sum, count: count, root: 1}
				if ss, rs := k.shares(n); max(ss, rs) > 1 {
					k.count /= n
				}
				check, err := k.device(ctx, c, s, m, 0)
				if err != nil {
					return err
				}
				for range 6 {
					if err := k.again(c, s, m); err != nil {
						return err
					}
				}
				if err := s.Wait(ctx); err != nil {
					return err
				}
				if algo, _ := c.GPUAlgo(); algo != record.AlgoCopyEngine {
					return fmt.Errorf("ran by %s, not the copy engines", algo)
				}
				if err := check(); err != nil {
					return err
				}
				return m.free(ctx)
			})
		})
	}
}

// TestGPUShared: ranks that share a GPU take no copy engines, asked for or not: four ranks on two H200s, and two
// on one, waited for each other for good.
func TestGPUShared(t *testing.T) {
	const count = 5_000_000 // of float32
	_, all := gpuRanks(t)
	for gpus := 1; gpus <= min(all, 2); gpus++ {
		t.Run(fmt.Sprintf("two ranks on %d", gpus), func(t *testing.T) {
			force := func(cfg *ccl.Config) { cfg.GPU.Algo = "ce" }
			ranks(t, 2, onGPUs(t, gpus, force), func(ctx context.Context, c *ccl.Comm) error {
				s := c.NewStream()
				m, err := newMemory(ctx, c, 4*4*count+1<<20, true)
				if err != nil {
					return err
				}
				k := call{coll: record.AllGather, dt: ccl.Float32, count: count}
				check, err := k.device(ctx, c, s, m, 0)
				if err != nil {
					return err
				}
				if err := errors.Join(s.Wait(ctx), check()); err != nil {
					return err
				}
				if algo, _ := c.GPUAlgo(); (algo == record.AlgoCopyEngine) != (gpus == 2) {
					return fmt.Errorf("two ranks on %d GPUs: ran by %s", gpus, algo)
				}
				return m.free(ctx)
			})
		})
	}
}

// again calls k on the buffers that device laid out.
func (k call) again(c *ccl.Comm, s *ccl.Stream, m *memory) error {
	es := k.dt.Size()
	ss, rs := k.shares(c.Size())
	sendBytes, recvBytes := ss*k.count*es, rs*k.count*es
	second := (max(sendBytes, recvBytes) + 4096) &^ 15
	return k.on(c, s, m.bytes(k.dt, 0, sendBytes), m.bytes(k.dt, second, recvBytes))
}

// gpuQueuesRole is the role of the process of TestGPUQueues.
const gpuQueuesRole = "gpu queues"

// TestGPUQueues: a process is told once that its streams are more than the GPU's hardware queues, however
// many communicators and streams there are beyond, and not while there are as many. It is a process of its
// own, since streams of earlier tests are there until they are collected.
func TestGPUQueues(t *testing.T) {
	gpuRanks(t) // or skip
	for queues, want := range map[int][]string{
		5:  {"one communicator: 0 warnings", "all: 1 warnings", "queues=5 cure=\"set CUDA_DEVICE_MAX_CONNECTIONS=32"},
		32: {"one communicator: 0 warnings", "all: 0 warnings"},
	} {
		t.Run(fmt.Sprint(queues), func(t *testing.T) {
			p := startRank(t, freeID(t), 0, 1, 1, gpuQueuesRole, "LOCKSTEP_DEVICE=cuda:0", fmt.Sprintf("CUDA_DEVICE_MAX_CONNECTIONS=%d", queues))
			for _, text := range want {
				p.expect(t, 0, text)
			}
			for line := range p.lines {
				t.Errorf("it also says %q", line)
			}
		})
	}
}

func gpuQueues() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var said bytes.Buffer
	warnings := func(of string) {
		fmt.Printf("%s: %d warnings\n", of, strings.Count(said.String(), "more CUDA streams than hardware queues"))
	}
	c, cfg, err := initFromEnv(ctx, func(cfg *ccl.Config) { cfg.Log = slog.New(slog.NewTextHandler(&said, nil)) })
	if err != nil {
		return err
	}
	defer cfg.Recorder.Close()
	warnings("one communicator")
	m, err := newMemory(ctx, c, 1<<20, false)
	if err != nil {
		return err
	}
	more, err := c.Split(ctx, 0, 0, "more")
	if err != nil {
		return err
	}
	buf := m.bytes(ccl.Float32, 0, 1<<10)
	streams := make([]*ccl.Stream, 8)
	for i := range streams {
		streams[i] = c.NewStream()
		if err := do(ctx, streams[i], more.AllReduce(streams[i], buf, buf, ccl.Sum)); err != nil {
			return err
		}
	}
	runtime.KeepAlive(streams)
	if err := errors.Join(more.Close(), m.free(ctx), c.Close()); err != nil {
		return err
	}
	warnings("all")
	if _, how, found := strings.Cut(said.String(), "queues="); found {
		how, _, _ = strings.Cut(how, " before")
		fmt.Println("queues=" + how)
	}
	return nil
}
