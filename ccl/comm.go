package ccl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/bootstrap"
	"github.com/lockstep-ccl/lockstep/ccl/internal/engine"
	"github.com/lockstep-ccl/lockstep/ccl/internal/executor"
	"github.com/lockstep-ccl/lockstep/ccl/internal/failure"
	"github.com/lockstep-ccl/lockstep/ccl/internal/transport"
	"github.com/lockstep-ccl/lockstep/record"
)

// Comm is one rank's membership in a communicator. Its methods may be called
// from several goroutines; the order of calls is then the order of operations,
// and must be the same on all ranks.
type Comm struct {
	cfg    Config // without ID, Rank, Size
	who    failure.Member
	id     uint64
	size   int
	ctl    *bootstrap.Control
	mesh   *transport.Mesh
	x      *executor.Executor
	gpu    *gpuPart // nil on a CPU rank
	groups groupPool

	// deriving serialises Split, Shrink and Grow, which all ranks call alike. It guards
	// how often there has been a Split, and a Shrink to each list of ranks: these
	// numbers must be equal on the ranks that take part.
	deriving sync.Mutex
	splits   int
	shrinks  map[string]int

	finished atomic.Bool // Close has: what becomes of the others harms nobody
	watching sync.WaitGroup
}

// about is what a rank tells the others when it joins.
type about struct {
	Node  string `json:"node"`
	Cores int    `json:"cores"`
	GPU   bool   `json:"gpu,omitempty"`
}

// Init joins a communicator and returns when all ranks have (it is
// ncclCommInitRankConfig). It fails with ErrTimeout, naming who is missing, or
// ErrMismatch when ranks contradict each other.
func Init(ctx context.Context, cfg Config) (*Comm, error) {
	if cfg.Name == "" {
		cfg.Name = "world"
	}
	if cfg.Node == "" {
		cfg.Node = nodeName()
	}
	if cfg.Timeout <= 0 {
		cfg.Timeout = time.Minute
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
	defer cancel()
	fail := func(err error) error {
		return failure.Member{Name: cfg.Name, Rank: cfg.Rank}.Wrap("Init", err)
	}
	if err := checkNet(cfg.Net, &cfg.RDMA); err != nil {
		return nil, fail(fmt.Errorf("%w: Config.Net and Config.RDMA: %w", ErrInvalid, err))
	}
	if err := cfg.checkOutage(); err != nil {
		return nil, fail(fmt.Errorf("%w: Config.OutageTimeout is %w", ErrInvalid, err))
	}
	if err := cfg.GPUDirect.Check(); err != nil {
		return nil, fail(fmt.Errorf("%w: Config.GPUDirect is %w", ErrInvalid, err))
	}
	if n := cfg.GPU.Threads; n < 0 || n > 512 || n%32 != 0 { // kernels count in warps
		return nil, fail(fmt.Errorf("%w: Config.GPU.Threads is %d, want a multiple of 32 up to 512", ErrInvalid, n))
	}
	info, err := json.Marshal(about{Node: cfg.Node, Cores: runtime.NumCPU(), GPU: cfg.Device != CPU})
	if err != nil {
		return nil, fail(err)
	}
	proc := executor.ProcessOf(cfg.Recorder)
	log, err := executor.NewLog(proc, cfg.Device.Ordinal(), record.CommEntry{
		ID: cfg.ID.id.Uint64(), Name: cfg.Name, Rank: int32(cfg.Rank), Size: int32(cfg.Size), State: record.CommJoining,
	}, cfg.logger())
	if err != nil {
		proc.Release()
		return nil, fail(err)
	}
	ctl, err := bootstrap.Join(ctx, bootstrap.Config{
		ID: cfg.ID.id, Rank: cfg.Rank, Size: cfg.Size, Secret: cfg.Secret, Host: cfg.Interface, Info: info, Outage: cfg.OutageTimeout,
	})
	if err != nil {
		log.Aborted(failure.Of(err))
		_ = log.GPU().Close()
		proc.Release()
		return nil, fail(err)
	}
	c, err := newComm(ctx, cfg, ctl, proc, log)
	if err != nil {
		return nil, fail(err)
	}
	return c, nil
}

// newComm makes a communicator of the members of ctl, which it owns from now
// on; every member calls it.
func newComm(ctx context.Context, cfg Config, ctl *bootstrap.Control, proc *executor.Process, log *executor.Log) (_ *Comm, err error) {
	c := &Comm{
		cfg: cfg, who: failure.Member{Name: cfg.Name, Rank: ctl.Rank()}, id: ctl.ID().Uint64(), size: ctl.Size(), ctl: ctl,
	}
	defer func() {
		if err != nil {
			log.Aborted(failure.Of(err))
			_ = c.gpu.close(context.Background())
			if c.mesh != nil {
				c.mesh.Close()
			}
			ctl.Close()
			_ = log.GPU().Close()
			proc.Release()
		}
	}()
	nodes, cores := make([]int32, c.size), runtime.NumCPU()
	index := map[string]int32{}
	for r, m := range ctl.Members() {
		var a about
		if err := json.Unmarshal(m.Info, &a); err != nil {
			return nil, fmt.Errorf("rank %d's description: %w", r, err)
		}
		if _, ok := index[a.Node]; !ok {
			index[a.Node] = int32(len(index))
		}
		nodes[r] = index[a.Node]
		cores = min(cores, a.Cores)
		if a.GPU != (cfg.Device != CPU) {
			return nil, fmt.Errorf("%w: rank %d and rank %d: one has a GPU, one has none", ErrMismatch, c.who.Rank, r)
		}
	}
	place := algo.NewPlace(c.who.Rank, nodes, cores)
	c.x = executor.New(executor.Config{
		Member: c.who, Size: c.size, Place: place, Force: algo.Overrides{Algo: cfg.Algo, Proto: cfg.Proto},
		Process: proc, Log: log, Control: ctl, Faults: cfg.Faults,
	})
	host := cfg.Interface
	if host == "" {
		host = ctl.Host()
	}
	c.mesh, err = transport.NewMesh(ctx, transport.Config{
		ID: c.id, Name: cfg.Name, Rank: c.who.Rank, Size: c.size, Node: cfg.Node,
		Exchange: ctl.AllGather, Err: c.x.Lost, Key: ctl.Key("transport"),
		Host: host, Sockets: cfg.Sockets, Outage: cfg.OutageTimeout, Paths: cfg.Paths, RDMA: c.rdma(proc, &place),
		Recorder: cfg.Recorder, Comm: log.Live(), Log: cfg.logger(), Faults: cfg.Faults, Dir: runtimeDir(cfg.Secret, cfg.logger()),
	})
	if err != nil {
		return nil, err
	}
	if d := c.mesh.Patience(); d > 0 {
		ctl.Patience(d)
	}
	c.x.Connect(c.mesh)
	var end executor.GPU
	if cfg.Device != CPU {
		if c.gpu, err = newGPU(ctx, &cfg, c.x, c.mesh); err != nil {
			return nil, err
		}
		end = c.gpu
	}
	c.x.Start(end)
	c.watching.Add(1)
	go c.watch()
	if c.who.Rank == 0 {
		c.watching.Add(1)
		go c.compareCalls()
	}
	log.State(record.CommJoined)
	return c, nil
}

// rdma is what this rank brings of RDMA to the communicator.
func (c *Comm) rdma(proc *executor.Process, place *algo.Place) transport.RDMA {
	r := transport.RDMA{Net: c.cfg.Net, Options: c.cfg.RDMA.options()}
	if len(place.Local) == c.size {
		r.Net = NetTCP // nobody is on another node
	}
	if r.Net == NetTCP {
		return r
	}
	if r.Ports, r.Why = nics(&c.cfg.RDMA, c.cfg.Device, slices.Index(place.Local, c.who.Rank)); r.Net != NetRDMA {
		r.Note = func(why error) { // once in a process
			if proc.Once("tcp") {
				c.cfg.logger().Info("TCP between nodes: RDMA cannot be used", "communicator", c.who.Name, "reason", why)
			}
		}
	}
	return r
}

// Rank is this rank's number in the communicator, from 0.
func (c *Comm) Rank() int { return c.who.Rank }

// Size is how many ranks the communicator has.
func (c *Comm) Size() int { return c.size }

// Name is what the communicator was named.
func (c *Comm) Name() string { return c.who.Name }

// ID is the communicator's id in records, metrics and traces, the same on all ranks.
func (c *Comm) ID() uint64 { return c.id }

// NewStream makes a stream; it is not tied to c.
func (c *Comm) NewStream() *Stream { return NewStream() }

// Err is why the communicator is over, nil while it is not (it is
// ncclCommGetAsyncError).
func (c *Comm) Err() error { return c.x.Err() }

// Abort ends the communicator on all ranks: what is under way and what comes
// fails with ErrAborted. reason is for the error's text and may be nil. The
// communicator must still be closed.
func (c *Comm) Abort(reason error) {
	err := ErrAborted
	if reason != nil {
		err = fmt.Errorf("%w: %w", ErrAborted, reason)
	}
	c.x.Fail(&failure.Failure{Peer: -1, Err: err}, true)
}

// watch turns what the control plane learns into the communicator's state.
func (c *Comm) watch() {
	defer c.watching.Done()
	for e := range c.ctl.Events() {
		switch e.Kind {
		case bootstrap.Lost:
			if !c.finished.Load() { // else nobody needs it any more
				_, err := failure.Translate(e.Err)
				c.x.Fail(&failure.Failure{Peer: e.Rank, Err: err}, false)
			}
		case bootstrap.Aborted:
			peer, err := failure.Translate(e.Err)
			c.x.Fail(&failure.Failure{Peer: peer, Err: err}, false)
		case bootstrap.Left:
			c.x.Gone(e.Rank)
		}
	}
}

// compareCalls runs on rank 0: ranks that are stuck say in which call. When two of them
// disagree on a collective the communicator cannot go on.
func (c *Comm) compareCalls() {
	defer c.watching.Done()
	last := make([]engine.Signature, c.size)
	for s := range c.ctl.Told() {
		var sig engine.Signature
		if !sig.Decode(s.Blob) {
			continue
		}
		c.x.Compare(s.Rank, sig)
		for r := range last {
			if r != s.Rank && last[r].Seq == sig.Seq && last[r] != sig {
				c.x.Fail(failure.FromEngine(&engine.MismatchError{Peer: s.Rank, Mine: last[r], Theirs: &sig}), true)
			}
		}
		last[s.Rank] = sig
	}
}

// closePatience bounds how long Close waits for operations that do not move, and then for
// the other ranks' Close.
const closePatience = 5 * time.Second

// Close ends this rank's membership: it finishes what has been called, unless that stands
// still for a few seconds, waits as long for the others to close as well, and frees
// everything. It returns why the communicator failed, if it did. Calls after Close fail
// with ErrClosed.
func (c *Comm) Close() error {
	if c == nil || !c.x.BeginClose() {
		return nil
	}
	ctx, cancel := c.whileConnected(closePatience)
	defer cancel()
	err := c.x.Drive(ctx, c.x.Last())
	if gpuErr := c.gpu.finish(ctx); err == nil {
		err = gpuErr
	}
	c.finished.Store(err == nil)
	if c.x.Over() == nil && err == nil {
		// The barrier keeps transports up for slower ranks that still read from them. Once all
		// ranks have come to it every operation is done, so a rank that dies or leaves now
		// harms nobody.
		_ = c.ctl.Barrier(ctx)
	}
	failed := c.x.End()
	if failed == nil {
		// Rank 0 stays until the others have left, so that they hear of each other.
		if e := c.ctl.Leave(ctx); e != nil && err == nil && !errors.Is(e, context.DeadlineExceeded) {
			err = e
		}
	}
	c.ctl.Close()
	c.watching.Wait()
	c.x.Stop()
	gpuErr := c.gpu.close(ctx)
	err = errors.Join(err, gpuErr)
	log := c.x.Log
	log.Close()
	meshErr := c.mesh.Close()
	if failed == nil {
		log.State(record.CommLeft)
	}
	if gpuErr == nil { // else the GPU may still write there
		err = errors.Join(err, log.GPU().Close())
	}
	c.x.Process.Release()
	return errors.Join(failed, err, meshErr)
}

// whileConnected returns a context that lasts for d. Outages of the control plane do not count,
// nor does time in which operations that are still to be finished make progress.
func (c *Comm) whileConnected(d time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(context.Background())
	const step = 50 * time.Millisecond
	go func() {
		tick := time.NewTicker(step)
		defer tick.Stop()
		last, moves := time.Now(), c.x.Moves()
		for left := d; left > 0; {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			now := time.Now()
			if !c.ctl.Seeking() {
				left -= now.Sub(last)
			}
			last = now
			if m := c.x.Moves(); m != moves {
				moves, left = m, d
			}
		}
		cancel(context.DeadlineExceeded)
	}()
	return ctx, func() { cancel(nil) }
}

// device is the GPU side, for a call on device memory.
func (c *Comm) device(op string) (*gpuPart, error) {
	if c.gpu == nil {
		return nil, c.who.Wrap(op, fmt.Errorf("%w: the rank has no GPU (Config.Device)", ErrInvalid))
	}
	return c.gpu, nil
}

// GPUAlgo says with which algorithm the communicator's last operation on device memory
// ran, as it is recorded, and on how many multiprocessors.
func (c *Comm) GPUAlgo() (algo Algo, sms int) {
	if c.gpu == nil {
		return record.AlgoNone, 0
	}
	return c.gpu.last()
}
