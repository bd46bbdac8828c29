package ccl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"

	"github.com/lockstep-ccl/lockstep/ccl/internal/bootstrap"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/executor"
	"github.com/lockstep-ccl/lockstep/ccl/internal/gpu"
	"github.com/lockstep-ccl/lockstep/ccl/internal/proxy"
	"github.com/lockstep-ccl/lockstep/ccl/internal/symm"
	"github.com/lockstep-ccl/lockstep/ccl/internal/transport"
)

// gpuPart is what a communicator of GPU ranks has besides.
type gpuPart struct {
	gpuMember
	ctl   *bootstrap.Control // of the node's ranks; nil on a single node, as is
	proxy *proxy.Proxy       // what goes between nodes
}

// newGPU makes the GPU side of x's communicator as c says; all ranks call it.
func newGPU(ctx context.Context, c *Config, x *executor.Executor, mesh *transport.Mesh) (_ *gpuPart, err error) {
	algo, err := gpu.ParseAlgo(c.GPU.Algo)
	if err != nil {
		return nil, fmt.Errorf("%w: Config.GPU.Algo: %w", ErrInvalid, err)
	}
	peers, err := gpu.ParsePeers(c.GPU.Peers)
	if err != nil {
		return nil, fmt.Errorf("%w: Config.GPU.Peers: %w", ErrInvalid, err)
	}
	if n := c.GPU.Staging; n != 0 && (n < 2 || n > 4096 || n%2 != 0) {
		return nil, fmt.Errorf("%w: Config.GPU.Staging: %d MiB, want an even number from 2 to 4096", ErrInvalid, n)
	}
	g := &gpuPart{gpuMember: gpuMember{x: x, device: c.Device}}
	cfg := gpu.Config{
		Device: c.Device.Ordinal(), Rank: x.Rank, Size: x.Size, Name: x.Name,
		Exchange: x.Control.AllGather, Key: x.Control.Key("gpu"), Dir: runtimeDir(c.Secret, c.logger()),
		Recording: x.Log.GPU(), Live: x.Log.Live(),
		Force: algo, Blocks: c.GPU.Blocks, Threads: c.GPU.Threads, Pace: c.GPU.Pace, Peers: peers, Stage: uint64(c.GPU.Staging) << 20,
	}
	if path := c.GPU.Table; path != "" {
		if cfg.Table, err = os.ReadFile(path); err != nil {
			return nil, fmt.Errorf("%w: Config.GPU.Table: %w", ErrInvalid, err)
		}
		if _, err = gpu.ParseTable(cfg.Table); err != nil {
			return nil, fmt.Errorf("%w: Config.GPU.Table: %s: %w", ErrInvalid, path, err)
		}
	}
	defer func() {
		if err != nil {
			_ = g.close(context.Background())
		}
	}()
	drv, err := cuda.Open()
	if err != nil {
		return nil, err
	}
	log, process := c.logger(), x.Process // of the communicator nothing else is kept
	drv.Crowded(func(gpu, streams, queues int) { noteCrowded(log, process, gpu, streams, queues) })
	// This reference keeps the context, which takes long to make, until the communicator has
	// its own.
	dev, err := drv.Device(c.Device.Ordinal())
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	reach := symm.Config{Device: dev, Rank: x.Rank, Size: x.Size, Exchange: x.Control.AllGather, Key: x.Control.Key("reach"), Dir: runtimeDir(c.Secret, c.logger())}
	place, err := proxy.Place(ctx, x.Place, reach, func(pairs, groups, reason string) { noteApart(c, x, pairs, groups, reason) })
	if err != nil {
		return nil, err
	}
	local := place.Local
	if len(local) < x.Size {
		// The node's ranks meet by themselves.
		x.Log.Live().HostTells()
		index := slices.Index(local, x.Rank)
		if g.ctl, err = x.Control.Regroup(ctx, local, index, "node"); err != nil {
			return nil, err
		}
		cfg.Rank, cfg.Size = index, len(local)
		cfg.Exchange, cfg.Key, cfg.HostTells = localExchange(g.ctl, local), g.ctl.Key("gpu"), true
	}
	if g.comm, err = gpu.New(ctx, cfg); err != nil {
		if other := (*gpu.SetupError)(nil); errors.As(err, &other) {
			err = fmt.Errorf("%w: rank %d: %w", ErrMismatch, local[other.Rank], err)
		}
		return nil, err
	}
	if cfg.Rank == 0 {
		noteRefused(c, x, g.comm.Refused())
	}
	if g.ctl != nil {
		g.proxy, err = proxy.New(proxy.Config{
			Rank: x.Rank, Size: x.Size, Device: c.Device.Ordinal(), Place: place, GPU: g.comm, Mesh: mesh, Executor: proxyExecutor{x, g},
			Choose: x.Choose, Direct: c.GPUDirect, Reads: c.Faults != nil, Note: func(why error) { noteDirect(c, x, why) },
		})
		if err = together(ctx, x.Control, err); err != nil {
			return nil, err
		}
	}
	return g, nil
}

// together returns this rank's error, or else another rank's: a step succeeds on all ranks or
// on none.
func together(ctx context.Context, ctl *bootstrap.Control, mine error) error {
	var text []byte
	if mine != nil {
		text = []byte(mine.Error())
		text = text[:min(len(text), bootstrap.MaxBlob(ctl.Size()))]
	}
	all, err := ctl.AllGather(ctx, text)
	if mine != nil || err != nil {
		return cmp.Or(mine, err)
	}
	for r, text := range all {
		if len(text) > 0 {
			return fmt.Errorf("rank %d: %s", r, text)
		}
	}
	return nil
}

// Abort ends what runs on the GPU.
func (g *gpuPart) Abort() {
	g.comm.Abort()
	if g.proxy != nil {
		g.x.Wake() // it lets go of streams when no NIC reads their slots
	}
}

// Release lets go of streams, when nothing is sent any more.
func (g *gpuPart) Release() { g.proxy.Release() }

// last is the last operation's algorithm, and on how many multiprocessors it ran.
func (g *gpuPart) last() (algo Algo, sms int) {
	algo, sms = g.comm.Last()
	if g.proxy != nil {
		algo = g.proxy.Algo()
	}
	return algo, sms
}

// finish waits for the GPU to have done what was called.
func (g *gpuPart) finish(ctx context.Context) error {
	if g == nil {
		return nil
	}
	return g.comm.Finish(ctx)
}

// close frees everything; the executor has stopped.
func (g *gpuPart) close(ctx context.Context) error {
	if g == nil {
		return nil
	}
	g.proxy.Halt()
	g.proxy.Release() // what the executor has not come to would never end
	err := g.comm.Close(ctx)
	if g.proxy != nil && err == nil { // else the GPU may still use its memory
		err = g.proxy.Free()
	}
	if g.ctl != nil {
		err = errors.Join(err, g.ctl.Close())
	}
	return err
}

// localExchange is an exchange among the members of this node; who is lost is told by
// its rank in the communicator.
func localExchange(ctl *bootstrap.Control, local []int) func(context.Context, []byte) ([][]byte, error) {
	return func(ctx context.Context, blob []byte) ([][]byte, error) {
		blobs, err := ctl.AllGather(ctx, blob)
		if lost := (*bootstrap.LostError)(nil); errors.As(err, &lost) && lost.Rank >= 0 && lost.Rank < len(local) {
			err = &bootstrap.LostError{Rank: local[lost.Rank], Reason: lost.Reason}
		}
		return blobs, err
	}
}

// noteApart logs once which GPUs cannot reach each other's memory, and what follows from it.
func noteApart(c *Config, x *executor.Executor, pairs, groups, reason string) {
	if x.Process.Once(pairs + " " + groups + " " + reason) {
		c.logger().Warn("GPUs of one node cannot reach each other's memory: between these groups of ranks operations go through host memory, as between nodes",
			"communicator", x.Name, "ranks", pairs, "groups", groups, "reason", reason)
	}
}

// noteRefused logs once why the algorithm that was asked for is taken by no collective.
func noteRefused(c *Config, x *executor.Executor, why string) {
	if why != "" && x.Process.Once("refused "+c.GPU.Algo+" "+why) {
		c.logger().Warn("operations on GPUs go without the algorithm that was asked for: they take others",
			"communicator", x.Name, "algorithm", c.GPU.Algo, "reason", why)
	}
}

// noteCrowded logs once that CUDA streams of this library share hardware queues. One that waits for
// another rank then holds up the others of its queue, among them maybe what that rank waits for.
func noteCrowded(log *slog.Logger, p *executor.Process, gpu, streams, queues int) {
	if !p.Once("crowded") {
		return
	}
	cure := fmt.Sprintf("set CUDA_DEVICE_MAX_CONNECTIONS=%d before the process first uses CUDA", cuda.MaxConnections)
	if queues >= cuda.MaxConnections {
		cure = "use fewer communicators and streams on a GPU: there are no more queues"
	}
	log.Warn("a GPU has more CUDA streams than hardware queues: one that waits for another rank may hold up others, and then for good",
		"device", GPU(gpu), "streams", streams, "queues", queues, "cure", cure)
}

// noteDirect logs once for each GPU that NICs read its memory, and once that they do not.
func noteDirect(c *Config, x *executor.Executor, why error) {
	type note struct {
		device Device
		chosen bool
	}
	if !x.Process.Once(note{c.Device, why == nil}) {
		return
	}
	if why == nil {
		c.logger().Info("GPUDirect: NICs read the GPU's memory between nodes", "communicator", x.Name, "rank", x.Rank, "device", c.Device)
	} else {
		c.logger().Info("no GPUDirect: what goes between nodes is copied to host memory", "communicator", x.Name, "rank", x.Rank, "device", c.Device, "reason", why)
	}
}

// proxyExecutor is the communicator's executor as package proxy asks for it.
type proxyExecutor struct {
	x *executor.Executor
	g *gpuPart
}

func (e proxyExecutor) Wake()                  { e.x.Wake() }
func (e proxyExecutor) Busy() bool             { return e.x.Last() != e.x.Finished() }
func (e proxyExecutor) Last() uint64           { return e.x.Last() }
func (e proxyExecutor) Drive(seq uint64) error { return e.x.Drive(context.Background(), seq) }
func (e proxyExecutor) Failed() bool           { return e.x.Over() != nil }
func (e proxyExecutor) Broke(err error)        { e.g.broke(err) }
