package ccl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"

	"github.com/lockstep-ccl/lockstep/ccl/internal/bootstrap"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/gpu"
	"github.com/lockstep-ccl/lockstep/ccl/internal/proxy"
	"github.com/lockstep-ccl/lockstep/ccl/internal/symm"
	"github.com/lockstep-ccl/lockstep/record"
)

// gpuPart is what a communicator of GPU ranks has besides.
type gpuPart struct {
	comm  *gpu.Comm
	ctl   *bootstrap.Control // of the node's ranks; nil on a single node, as is
	proxy *proxy.Proxy       // what crosses nodes
	wake  func()             // the executor
	calls atomic.Uint64      // on device memory, for errors
}

// newGPU makes the GPU side; all ranks call it.
func (c *Comm) newGPU(ctx context.Context) (_ *gpuPart, err error) {
	algo, err := gpu.ParseAlgo(c.cfg.GPU.Algo)
	if err != nil {
		return nil, fmt.Errorf("%w: Config.GPU.Algo: %w", ErrInvalid, err)
	}
	cfg := gpu.Config{
		Device: c.cfg.Device.Ordinal(), Rank: c.rank, Size: c.size, Name: c.name,
		Exchange: c.ctl.AllGather, Key: c.ctl.Key("gpu"), Dir: runtimeDir(c.cfg.Secret, c.cfg.logger()),
		Recording: c.log.gpu, Live: c.log.live,
		Force: algo, Blocks: c.cfg.GPU.Blocks, Threads: c.cfg.GPU.Threads, Pace: c.cfg.GPU.Pace,
		Failed: func(err error) { c.gpuBroke(err) },
	}
	if path := c.cfg.GPU.Table; path != "" {
		if cfg.Table, err = os.ReadFile(path); err != nil {
			return nil, fmt.Errorf("%w: Config.GPU.Table: %w", ErrInvalid, err)
		}
		if _, err = gpu.ParseTable(cfg.Table); err != nil {
			return nil, fmt.Errorf("%w: Config.GPU.Table: %s: %w", ErrInvalid, path, err)
		}
	}
	g := &gpuPart{wake: c.executor.wake}
	defer func() {
		if err != nil {
			_ = g.close(context.Background())
		}
	}()
	drv, err := cuda.Open()
	if err != nil {
		return nil, err
	}
	// Open until the communicator has the device as well: a context takes a while to make.
	dev, err := drv.Device(c.cfg.Device.Ordinal())
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	reach := symm.Config{Device: dev, Rank: c.rank, Size: c.size, Exchange: c.ctl.AllGather, Key: c.ctl.Key("reach"), Dir: runtimeDir(c.cfg.Secret, c.cfg.logger())}
	place, err := proxy.Place(ctx, c.place, reach, c.noteApart)
	if err != nil {
		return nil, err
	}
	local := place.Local
	if len(local) < c.size {
		// The node's ranks meet by themselves.
		c.log.live.HostTells()
		index := slices.Index(local, c.rank)
		if g.ctl, err = c.ctl.Regroup(ctx, local, index, "node"); err != nil {
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
	if g.ctl != nil {
		g.proxy, err = proxy.New(proxy.Config{
			Rank: c.rank, Size: c.size, Device: c.cfg.Device.Ordinal(), Place: place, GPU: g.comm, Mesh: c.mesh, Executor: proxyExecutor{c},
			Choose: c.choose, Direct: c.cfg.GPUDirect, Reads: c.cfg.Faults != nil, Note: c.noteDirect,
		})
		if err = c.together(ctx, err); err != nil {
			return nil, err
		}
	}
	return g, nil
}

// together is this rank's error, or else another's: all ranks have made something, or none.
func (c *Comm) together(ctx context.Context, mine error) error {
	var text []byte
	if mine != nil {
		text = []byte(mine.Error())
		text = text[:min(len(text), bootstrap.MaxBlob)]
	}
	all, err := c.ctl.AllGather(ctx, text)
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

func (g *gpuPart) abort() {
	if g != nil {
		g.comm.Abort()
		if g.proxy != nil {
			g.wake() // it lets go of streams when no NIC reads their slots
		}
	}
}

// over lets go of streams, when nothing is sent any more.
func (g *gpuPart) over() {
	if g != nil {
		g.proxy.Release()
	}
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

// noteApart says once which GPUs are apart, and what comes of it.
func (c *Comm) noteApart(pairs, groups, reason string) {
	if c.proc.once(pairs + " " + groups + " " + reason) {
		c.cfg.logger().Warn("GPUs of one node cannot reach each other's memory: between these groups of ranks operations go through host memory, as between nodes",
			"communicator", c.name, "ranks", pairs, "groups", groups, "reason", reason)
	}
}

// noteDirect says of each GPU once that it is so, and once that it is not.
func (c *Comm) noteDirect(why error) {
	type note struct {
		device Device
		chosen bool
	}
	if !c.proc.once(note{c.cfg.Device, why == nil}) {
		return
	}
	if why == nil {
		c.cfg.logger().Info("GPUDirect: NICs read the GPU's memory between nodes", "communicator", c.name, "rank", c.rank, "device", c.cfg.Device)
	} else {
		c.cfg.logger().Info("no GPUDirect: what goes between nodes is copied to host memory", "communicator", c.name, "rank", c.rank, "device", c.cfg.Device, "reason", why)
	}
}

// enter checks that the communicator takes calls on device memory.
func (c *Comm) enter(kind record.CollKind, s *Stream) (*cuda.Stream, error) {
	if c.gpu == nil {
		return nil, c.noGPU(kind.String())
	}
	if f := c.failed.Load(); f != nil || c.closing.Load() {
		if f == nil {
			f = &failureClosed
		}
		return nil, &Error{Op: kind.String(), Comm: c.name, Rank: c.rank, Peer: f.peer, Err: f.err}
	}
	cs, err := c.cudaStream(s)
	if err != nil {
		return nil, c.gpuError(kind.String(), err)
	}
	if c.cfg.Faults != nil {
		if d := c.cfg.Faults.Entry(c.name); d > 0 {
			if err := c.gpu.comm.Occupy(cs, d); err != nil {
				return nil, c.launched(kind, err)
			}
		}
	}
	return cs, nil
}

// submitGPU launches a collective on device memory.
func (c *Comm) submitGPU(s *Stream, kind record.CollKind, send, recv Buffer, op Op, root, count, shares int, dt DType) error {
	if send.p != nil && send.n > 0 || recv.p != nil && recv.n > 0 {
		return c.invalid(kind, "one buffer is in host memory, the other in device memory")
	}
	if t := kind.Traits(); t.Root != record.RootNone && t.Parted() {
		return c.rootedGPU(s, kind, send, recv, root)
	}
	cs, err := c.enter(kind, s)
	if err != nil {
		return err
	}
	if count == 0 && kind.HasData() {
		return nil
	}
	bytes, inPlace := uint64(count*dt.Size()*shares), send.dev == recv.dev
	if p := c.gpu.proxy; p != nil {
		o := proxy.Call{
			Coll: kind, DType: dt, Op: op, InPlace: inPlace, Root: int32(root), Count: count, Bytes: bytes, Stream: s.id,
		}
		return c.crossed(kind, p.Run(s.owned(cs), &o, cuda.Ptr(send.dev), cuda.Ptr(recv.dev), c.putter(s, &o)))
	}
	o := gpu.Op{
		Coll: kind, DType: dt, RedOp: op, Root: root, Count: uint64(count),
		Send: cuda.Ptr(send.dev), Recv: cuda.Ptr(recv.dev),
		Bytes: bytes, Stream: s.id, InPlace: inPlace,
	}
	return c.launched(kind, c.gpu.comm.Run(s.owned(cs), &o))
}

// putter puts the network's part of a call in the queue.
func (c *Comm) putter(s *Stream, o *proxy.Call) func(*proxy.Op) error {
	return func(x *proxy.Op) error {
		return c.put(s, &operation{
			coll: o.Coll, dtype: o.DType, redop: o.Op, inPlace: o.InPlace, root: o.Root, count: o.Count, bytes: o.Bytes, proxy: x,
		})
	}
}

// crossed is what becomes of the error of a call that crosses nodes.
func (c *Comm) crossed(kind record.CollKind, err error) error {
	var caller *proxy.CallerError
	var many *proxy.TooManyError
	switch {
	case errors.As(err, &caller):
		return caller.Err
	case errors.As(err, &many), errors.Is(err, proxy.ErrCaptured):
		return c.invalid(kind, "%v", err)
	}
	return c.launched(kind, err)
}

// proxyExecutor is the communicator's executor as package proxy asks for it.
type proxyExecutor struct{ c *Comm }

func (e proxyExecutor) Wake()                  { e.c.executor.wake() }
func (e proxyExecutor) Busy() bool             { return e.c.queue.last() != e.c.queue.finished.Load() }
func (e proxyExecutor) Last() uint64           { return e.c.queue.last() }
func (e proxyExecutor) Drive(seq uint64) error { return e.c.drive(background, seq) }
func (e proxyExecutor) Failed() bool           { return e.c.failed.Load() != nil }
func (e proxyExecutor) Broke(err error)        { e.c.gpuBroke(err) }

// launched is what becomes of a launch's error. A rank that could not launch what
// its peers have would leave them waiting.
func (c *Comm) launched(kind record.CollKind, err error) error {
	n := c.gpu.calls.Add(1)
	if err == nil {
		return nil
	}
	f := c.gpuBroke(fmt.Errorf("%v: %w", kind, err))
	return &Error{Op: kind.String(), Comm: c.name, Seq: n, Rank: c.rank, Peer: f.peer, Err: f.err}
}

// gpuBroke makes an error of the GPU side the end of the communicator.
func (c *Comm) gpuBroke(err error) *failure {
	if errors.Is(err, gpu.ErrClosed) {
		return &failureClosed // by another goroutine, since the call has begun
	}
	f := &failure{-1, fmt.Errorf("%w: rank %d: %w", ErrInternal, c.rank, err)}
	if size := (*gpu.SizeError)(nil); errors.As(err, &size) {
		f = &failure{size.Peer, fmt.Errorf("%w: rank %d: %w", ErrMismatch, c.rank, err)}
	}
	c.fail(f, true)
	return f
}

// exchangeGPU launches sends and receives of device memory that collect lists. root
// and count are what ranks must agree on.
func (c *Comm) exchangeGPU(s *Stream, kind record.CollKind, root, count int, collect func(add func(send bool, b Buffer, peer int))) error {
	cs, err := c.enter(kind, s)
	if err != nil {
		return err
	}
	var msgs []gpu.Message
	o := proxy.Call{Coll: kind, DType: record.Uint8, Root: int32(root), Count: count, Stream: s.id}
	collect(func(send bool, b Buffer, peer int) {
		msgs = append(msgs, gpu.Message{Peer: peer, Send: send, Buf: cuda.Ptr(b.dev), Bytes: uint64(b.size())})
		if send {
			o.Bytes += uint64(b.size())
		}
	})
	if p := c.gpu.proxy; p != nil {
		return c.crossed(kind, p.Exchange(s.owned(cs), &o, msgs, c.putter(s, &o)))
	}
	return c.launched(kind, c.gpu.comm.Exchange(s.owned(cs), kind, msgs, s.id))
}

func (c *Comm) groupGPU(s *Stream, g *Group) error {
	return c.exchangeGPU(s, record.Group, -1, 0, func(add func(send bool, b Buffer, peer int)) {
		for i, m := range g.msgs {
			add(m.Send, g.device[i], int(m.Peer))
		}
	})
}

// rootedGPU is a collective whose root exchanges a part with everyone: Gather and Scatter.
func (c *Comm) rootedGPU(s *Stream, kind record.CollKind, send, recv Buffer, root int) error {
	gather := kind.Traits().Root == record.RootTo
	count := send.size() // of one rank's share
	if !gather {
		count = recv.size()
	}
	return c.exchangeGPU(s, kind, root, count, func(add func(send bool, b Buffer, peer int)) {
		if c.rank == root {
			whole, part := recv, send
			if !gather {
				whole, part = send, recv
			}
			n := whole.n / c.size
			for p := range c.size {
				if p != root {
					add(!gather, whole.Slice(p*n, (p+1)*n), p)
				}
			}
			own := whole.Slice(root*n, (root+1)*n)
			if own.dev != part.dev {
				if gather {
					add(true, part, root)
					add(false, own, root)
				} else {
					add(true, own, root)
					add(false, part, root)
				}
			}
			return
		}
		if gather {
			add(true, send, root)
		} else {
			add(false, recv, root)
		}
	})
}
