package ccl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/bootstrap"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/gpu"
	"github.com/lockstep-ccl/lockstep/record"
)

// gpuPart is what a communicator of GPU ranks has besides.
type gpuPart struct {
	comm  *gpu.Comm
	ctl   *bootstrap.Control // of the node's ranks; nil on a single node, as is
	nodes *gpuNodes
	calls atomic.Uint64 // on device memory, for errors
}

// newGPU makes the GPU side; all ranks call it.
func (c *Comm) newGPU(ctx context.Context) (_ *gpuPart, err error) {
	algo, err := gpu.ParseAlgo(c.cfg.GPU.Algo)
	if err != nil {
		return nil, fmt.Errorf("%w: Config.GPU.Algo: %w", ErrInvalid, err)
	}
	cfg := gpu.Config{
		Device: c.cfg.Device.Ordinal(), Rank: c.rank, Size: c.size, Name: c.name,
		Exchange: c.ctl.AllGather, Key: c.ctl.Key("gpu"), Dir: runtimeDir(c.cfg.Secret),
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
	g := &gpuPart{}
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
	place, err := c.gpuPlace(ctx, dev)
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
		g.nodes, err = c.newGPUNodes(g.comm, place)
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
		if g.nodes != nil {
			g.nodes.c.executor.wake() // it lets go of streams when no NIC reads their slots
		}
	}
}

// over lets go of streams, when nothing is sent any more.
func (g *gpuPart) over() {
	if g != nil {
		g.nodes.release()
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
	g.nodes.halt()
	g.nodes.release() // what the executor has not come to would never end
	err := g.comm.Close(ctx)
	if g.nodes != nil && err == nil { // else the GPU may still use its memory
		err = g.nodes.free()
	}
	if g.ctl != nil {
		err = errors.Join(err, g.ctl.Close())
	}
	return err
}

// gpuStream is the CUDA side of a Stream.
type gpuStream struct {
	on      Device
	stream  *cuda.Stream
	handle  uintptr // of a foreign stream
	foreign bool
	comms   []*Comm // that have used it since the last Wait
}

// attach gives s its CUDA stream, and a hold of the device of its own: a Stream
// outlives communicators.
func (s *Stream) attach(d Device) error {
	g := &s.gpu
	if g.foreign && g.on != d {
		return fmt.Errorf("%w: a stream of %v for a rank on %v", ErrInvalid, g.on, d)
	}
	drv, err := cuda.Open()
	if err != nil {
		return err
	}
	dev, err := drv.Device(d.Ordinal())
	if err != nil {
		return err
	}
	cs := dev.StreamOf(g.handle)
	if !g.foreign {
		if cs, err = dev.NewStream(0); err != nil {
			return errors.Join(err, dev.Close())
		}
	}
	runtime.AddCleanup(s, func(own bool) {
		if own {
			_ = cs.Close()
		}
		_ = dev.Close()
	}, !g.foreign)
	g.stream, g.on, s.device = cs, d, true
	return nil
}

// owned is the CUDA stream with what keeps it.
func (s *Stream) owned(cs *cuda.Stream) gpu.Stream {
	if s.gpu.foreign {
		return gpu.Stream{Stream: cs}
	}
	return gpu.Stream{Stream: cs, Owner: s}
}

// cudaStream is the CUDA stream of s for c's device.
func (c *Comm) cudaStream(s *Stream) (*cuda.Stream, error) {
	g := &s.gpu
	if g.stream == nil {
		if err := s.attach(c.cfg.Device); err != nil {
			return nil, err
		}
	}
	if g.on != c.cfg.Device {
		return nil, fmt.Errorf("%w: a stream of %v for a rank on %v", ErrInvalid, g.on, c.cfg.Device)
	}
	for i, u := range g.comms {
		if u == c {
			if i != len(g.comms)-1 {
				g.comms = append(append(g.comms[:i], g.comms[i+1:]...), c)
			}
			return g.stream, nil
		}
	}
	g.comms = append(g.comms, c)
	return g.stream, nil
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
	if kind == record.Gather || kind == record.Scatter {
		return c.rootedGPU(s, kind, send, recv, root)
	}
	if c.gpu != nil && c.gpu.nodes != nil {
		return c.gpu.nodes.submit(s, kind, send, recv, op, root, count, shares, dt)
	}
	cs, err := c.enter(kind, s)
	if err != nil {
		return err
	}
	if count == 0 && kind != record.Barrier {
		return nil
	}
	o := gpu.Op{
		Coll: kind, DType: dt, RedOp: op, Root: root, Count: uint64(count),
		Send: cuda.Ptr(send.dev), Recv: cuda.Ptr(recv.dev),
		Bytes: uint64(count * dt.Size() * shares), Stream: s.id, InPlace: send.dev == recv.dev,
	}
	return c.launched(kind, c.gpu.comm.Run(s.owned(cs), &o))
}

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
	o := operation{coll: kind, dtype: record.Uint8, root: int32(root), count: count}
	collect(func(send bool, b Buffer, peer int) {
		msgs = append(msgs, gpu.Message{Peer: peer, Send: send, Buf: cuda.Ptr(b.dev), Bytes: uint64(b.size())})
		if send {
			o.bytes += uint64(b.size())
		}
	})
	if n := c.gpu.nodes; n != nil {
		return n.exchange(s, cs, &o, msgs, nil)
	}
	return c.launched(kind, c.gpu.comm.Exchange(s.owned(cs), kind, msgs, s.id))
}

func (c *Comm) groupGPU(s *Stream, g *Group) error {
	return c.exchangeGPU(s, record.Group, -1, 0, func(add func(send bool, b Buffer, peer int)) {
		for i, m := range g.msgs {
			add(m.send, g.device[i], int(m.peer))
		}
	})
}

// rootedGPU is Gather and Scatter: what root exchanges with everyone.
func (c *Comm) rootedGPU(s *Stream, kind record.CollKind, send, recv Buffer, root int) error {
	count := send.size() // of one rank's share
	if kind == record.Scatter {
		count = recv.size()
	}
	return c.exchangeGPU(s, kind, root, count, func(add func(send bool, b Buffer, peer int)) {
		gather := kind == record.Gather
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

// spinGPU is how long a Wait polls before it sleeps: a sleep takes longer than most
// operations.
const spinGPU = time.Millisecond

// waitGPU waits for the content of the CUDA stream.
func (s *Stream) waitGPU(ctx context.Context) error {
	g := &s.gpu
	if g.stream == nil {
		return nil
	}
	began := time.Now()
	for {
		done, err := g.stream.Query()
		if err != nil {
			return s.gpuFailed(err)
		}
		if done {
			break
		}
		if waited := time.Since(began); waited < spinGPU {
			runtime.Gosched()
		} else {
			time.Sleep(min(waited/20, 200*time.Microsecond))
		}
		if ctx.Err() != nil {
			for _, c := range g.comms {
				return c.interrupted(ctx, c.gpu.calls.Load())
			}
			return context.Cause(ctx)
		}
	}
	return s.gpuDone()
}

// gpuDone tells whether what has ended is good: kernels leave early when their
// communicator is over.
func (s *Stream) gpuDone() error {
	comms := s.gpu.comms
	s.gpu.comms = comms[:0]
	for _, c := range comms {
		if f := c.failed.Load(); f != nil && f != &failureClosed {
			return &Error{Op: "Wait", Comm: c.name, Seq: c.gpu.calls.Load(), Rank: c.rank, Peer: f.peer, Err: f.err}
		}
	}
	return nil
}

// gpuFailed makes a driver's error the end of the communicators that used the stream:
// after one the CUDA context is of no use.
func (s *Stream) gpuFailed(err error) error {
	err = fmt.Errorf("%w: %w", ErrInternal, err)
	for _, c := range s.gpu.comms {
		c.fail(&failure{-1, fmt.Errorf("rank %d: %w", c.rank, err)}, true)
	}
	for _, c := range s.gpu.comms {
		return &Error{Op: "Wait", Comm: c.name, Seq: c.gpu.calls.Load(), Rank: c.rank, Peer: -1, Err: err}
	}
	return err
}

func (s *Stream) queryGPU() (done bool, err error) {
	if s.gpu.stream == nil {
		return true, nil
	}
	done, err = s.gpu.stream.Query()
	switch {
	case err != nil:
		return true, s.gpuFailed(err)
	case !done:
		return false, nil
	}
	return true, s.gpuDone()
}
