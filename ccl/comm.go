package ccl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/bootstrap"
	"github.com/lockstep-ccl/lockstep/ccl/internal/engine"
	"github.com/lockstep-ccl/lockstep/ccl/internal/transport"
	"github.com/lockstep-ccl/lockstep/record"
)

// Comm is one rank's membership in a communicator. Its methods may be called
// from several goroutines; the order of calls is then the order of operations,
// and must be the same on all ranks.
type Comm struct {
	cfg        Config // without ID, Rank, Size
	name       string
	id         uint64
	rank, size int
	proc       *process
	ctl        *bootstrap.Control
	mesh       *transport.Mesh
	place      algo.Place
	model      algo.Model
	eng        *engine.Engine
	log        log

	gpu      *gpuPart // nil on a CPU rank
	queue    queue
	executor executor
	swept    uint64 // the queue's tail at the last sweep; the sweeper's own
	groups   groupPool

	failed  atomic.Pointer[failure]
	telling sync.Mutex            // held while failed is set and the others are told
	left    atomic.Pointer[[]int] // members that have closed

	// deriving serialises Split, Shrink and Grow, which all ranks call alike. It guards
	// how often there has been a Split, and a Shrink to each list of ranks: these
	// numbers must be equal on the ranks that take part.
	deriving sync.Mutex
	splits   int
	shrinks  map[string]int

	closing  atomic.Bool
	closed   chan struct{}
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
		peer, err := sentinelOf(err)
		return &Error{Op: "Init", Comm: cfg.Name, Rank: cfg.Rank, Peer: peer, Err: err}
	}
	if err := cfg.checkNet(); err != nil {
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
	proc := processOf(cfg.Recorder)
	log, err := newLog(proc, &cfg, record.CommEntry{
		ID: cfg.ID.id.Uint64(), Name: cfg.Name, Rank: int32(cfg.Rank), Size: int32(cfg.Size), State: record.CommJoining,
	})
	if err != nil {
		proc.release()
		return nil, fail(err)
	}
	ctl, err := bootstrap.Join(ctx, bootstrap.Config{
		ID: cfg.ID.id, Rank: cfg.Rank, Size: cfg.Size, Secret: cfg.Secret, Host: cfg.Interface, Info: info, Outage: cfg.OutageTimeout,
	})
	if err != nil {
		log.aborted(failureOf(err))
		_ = log.gpu.Close()
		proc.release()
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
func newComm(ctx context.Context, cfg Config, ctl *bootstrap.Control, proc *process, log log) (_ *Comm, err error) {
	c := &Comm{
		cfg: cfg, name: cfg.Name, id: ctl.ID().Uint64(), rank: ctl.Rank(), size: ctl.Size(),
		proc: proc, ctl: ctl, log: log, closed: make(chan struct{}),
	}
	defer func() {
		if err != nil {
			log.aborted(failureOf(err))
			_ = c.gpu.close(context.Background())
			if c.mesh != nil {
				c.mesh.Close()
			}
			ctl.Close()
			_ = log.gpu.Close()
			proc.release()
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
			return nil, fmt.Errorf("%w: rank %d and rank %d: one has a GPU, one has none", ErrMismatch, c.rank, r)
		}
	}
	c.place = algo.NewPlace(c.rank, nodes, cores)
	c.model = algo.DefaultModel()
	host := cfg.Interface
	if host == "" {
		host = ctl.Host()
	}
	c.mesh, err = transport.NewMesh(ctx, transport.Config{
		ID: c.id, Name: c.name, Rank: c.rank, Size: c.size, Node: cfg.Node,
		Exchange: ctl.AllGather, Err: c.lost, Key: ctl.Key("transport"),
		Host: host, Sockets: cfg.Sockets, Outage: cfg.OutageTimeout, Paths: cfg.Paths, RDMA: c.rdma(),
		Recorder: cfg.Recorder, Comm: log.live, Faults: cfg.Faults, Dir: runtimeDir(cfg.Secret, cfg.logger()),
	})
	if err != nil {
		return nil, err
	}
	if d := c.mesh.Patience(); d > 0 {
		ctl.Patience(d)
	}
	if cfg.Device != CPU {
		if c.gpu, err = c.newGPU(ctx); err != nil {
			return nil, err
		}
	}
	c.eng = engine.New(c.mesh, c.size)
	c.log.board, c.log.remote = c.mesh.Board(), len(c.place.Local) < c.size
	c.queue.init()
	c.executor.init(c)
	c.watching.Add(2)
	go c.watch()
	if c.rank == 0 {
		c.watching.Add(1)
		go c.compareCalls()
	}
	go c.work()
	proc.add(c)
	log.state(record.CommJoined)
	return c, nil
}

// Rank is this rank's number in the communicator, from 0.
func (c *Comm) Rank() int { return c.rank }

// Size is how many ranks the communicator has.
func (c *Comm) Size() int { return c.size }

// Name is what the communicator was named.
func (c *Comm) Name() string { return c.name }

// ID is the communicator's id in records, metrics and traces, the same on all ranks.
func (c *Comm) ID() uint64 { return c.id }

// Err is why the communicator is over, nil while it is not (it is
// ncclCommGetAsyncError).
func (c *Comm) Err() error {
	f := c.failed.Load()
	if f == nil {
		return nil
	}
	return &Error{Op: "communicator", Comm: c.name, Rank: c.rank, Peer: f.peer, Err: f.err}
}

// lost is why nobody wants this rank's bytes any more: Err, unless it has merely closed.
func (c *Comm) lost() error {
	if c.failed.Load() == &failureClosed {
		return nil
	}
	return c.Err()
}

// Abort ends the communicator on all ranks: what is under way and what comes
// fails with ErrAborted. reason is for the error's text and may be nil. The
// communicator must still be closed.
func (c *Comm) Abort(reason error) {
	err := ErrAborted
	if reason != nil {
		err = fmt.Errorf("%w: %w", ErrAborted, reason)
	}
	c.fail(&failure{-1, err}, true)
}

// fail makes f the end of the communicator unless it has one already. tell
// says whether the others must hear of it.
func (c *Comm) fail(f *failure, tell bool) {
	c.telling.Lock()
	first := c.failed.Load() == nil
	if first {
		// The recorder first: a caller that sees the failure may end the process at once,
		// and that death must not look like the one that the failure is about.
		c.log.aborted(f)
		c.failed.Store(f)
		if tell {
			c.ctl.Abort(f.encode())
		}
	}
	c.telling.Unlock()
	if !first {
		return
	}
	c.mesh.Wake()
	c.executor.over()
	c.gpu.abort()
}

// watch turns what the control plane learns into the communicator's state.
func (c *Comm) watch() {
	defer c.watching.Done()
	for e := range c.ctl.Events() {
		switch e.Kind {
		case bootstrap.Lost:
			if !c.closing.Load() {
				_, err := sentinelOf(e.Err)
				c.fail(&failure{e.Rank, err}, false)
			}
		case bootstrap.Aborted:
			peer, err := sentinelOf(e.Err)
			c.fail(&failure{peer, err}, false)
		case bootstrap.Left:
			c.gone(e.Rank)
		}
	}
}

// compareCalls is rank 0's: ranks that are stuck say in what, and when two of them
// disagree on a collective nobody can help them.
func (c *Comm) compareCalls() {
	defer c.watching.Done()
	last := make([]engine.Signature, c.size)
	for s := range c.ctl.Told() {
		var sig engine.Signature
		if !sig.Decode(s.Blob) {
			continue
		}
		c.compare(s.Rank, sig)
		for r := range last {
			if r != s.Rank && last[r].Seq == sig.Seq && last[r] != sig {
				c.fail(engineFailure(&engine.MismatchError{Peer: s.Rank, Mine: last[r], Theirs: &sig}), true)
			}
		}
		last[s.Rank] = sig
	}
}

// gone notes that a member has closed the communicator in good order. What it
// has sent may still be on its way; who needs more of it finds out in idle.
func (c *Comm) gone(rank int) {
	var left []int
	if old := c.left.Load(); old != nil {
		left = append(left, *old...)
	}
	left = append(left, rank)
	c.left.Store(&left)
	c.mesh.Wake()
}

// closePatience bounds how long Close waits for the other ranks' Close.
const closePatience = 5 * time.Second

// Close ends this rank's membership: it finishes what has been called, waits a
// few seconds for the others to close as well, and frees everything. It returns
// why the communicator failed, if it did. Calls after Close fail with ErrClosed.
func (c *Comm) Close() error {
	if c == nil || c.closing.Swap(true) {
		return nil
	}
	ctx, cancel := c.whileConnected(closePatience)
	defer cancel()
	err := c.drive(ctx, c.queue.last())
	if gpuErr := c.gpu.finish(ctx); err == nil {
		err = gpuErr
	}
	if c.failed.Load() == nil && err == nil {
		// Nobody tears down transports that a slower rank still reads from. A rank
		// that dies or leaves now can harm nothing: all has been done.
		_ = c.ctl.Barrier(ctx)
	}
	c.telling.Lock() // who closes for a failure has it told first
	failure := c.Err()
	c.failed.CompareAndSwap(nil, &failureClosed)
	c.telling.Unlock()
	close(c.closed)
	c.mesh.Wake()
	c.executor.over()
	c.proc.remove(c)
	if failure == nil {
		// Rank 0 stays until the others have left, so that they hear of each other.
		if e := c.ctl.Leave(ctx); e != nil && err == nil && !errors.Is(e, context.DeadlineExceeded) {
			err = e
		}
	}
	c.ctl.Close()
	c.watching.Wait()
	c.executor.acquire() // for good: no one may use the mesh any more, nor pinned memory
	c.drain(c.failed.Load())
	gpuErr := c.gpu.close(ctx)
	err = errors.Join(err, gpuErr)
	c.log.addSums()
	meshErr := c.mesh.Close()
	if failure == nil {
		c.log.state(record.CommLeft)
	}
	if gpuErr == nil { // else the GPU may still write there
		err = errors.Join(err, c.log.gpu.Close())
	}
	c.proc.release()
	return errors.Join(failure, err, meshErr)
}

// whileConnected is a context that lasts for d, not counting outages of the control plane.
func (c *Comm) whileConnected(d time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(context.Background())
	const step = 50 * time.Millisecond
	go func() {
		tick := time.NewTicker(step)
		defer tick.Stop()
		last := time.Now()
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
		}
		cancel(context.DeadlineExceeded)
	}()
	return ctx, func() { cancel(nil) }
}

var failureClosed = failure{-1, ErrClosed}

func (c *Comm) leavers() []int {
	if l := c.left.Load(); l != nil {
		return *l
	}
	return nil
}
