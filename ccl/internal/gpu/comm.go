package gpu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/kernels"
	"github.com/lockstep-ccl/lockstep/ccl/internal/symm"
	"github.com/lockstep-ccl/lockstep/record"
)

// newStream makes *s unless it is there.
func (c *Comm) newStream(s **cuda.Stream) (err error) {
	if *s == nil {
		*s, err = c.dev.NewStream(0)
	}
	return err
}

// newEvent makes *e unless it is there.
func (c *Comm) newEvent(e **cuda.Event) (err error) {
	if *e == nil {
		*e, err = c.dev.NewEvent(false)
	}
	return err
}

// ErrClosed: the communicator was closed.
var ErrClosed = errors.New("the communicator is closed")

// MaxRanks is how many GPUs one communicator may have on a node.
const MaxRanks = kernels.MaxRanks

// Config is what New needs. All ranks call New together.
type Config struct {
	Device     int // CUDA ordinal
	Rank, Size int
	Name       string
	Exchange   func(context.Context, []byte) ([][]byte, error)
	Key        []byte // shared by the members, not by others
	Dir        string // for sockets, mode 0700

	Recording *Recording // nil: not recorded
	Live      *record.Comm
	// HostTells: operations are only parts of those that the caller records and numbers
	// (Between); Recording takes the stamps of these.
	HostTells bool

	// Stage is the size of the staging memory, a multiple of 2 MiB; 0 is DefaultStage.
	Stage uint64

	// Force is the algorithm of operations that have it, record.AlgoNone for the tuning
	// table's; Blocks the number of blocks, 0 likewise.
	// Threads is that of a block's threads, where a kernel takes any.
	Force  record.Algo
	Blocks int
	// Table is another tuning table, as tuned.json is; nil for that one.
	Table   []byte
	Threads int
	// Pace is how much the GPU sends to peers by bulk copies at most, in GB/s: 0 for
	// what its links carry, as far as known; negative: no limit.
	Pace int
	// Peers says of which operations kernels stamp each peer, where they are recorded.
	Peers Peers
}

// DefaultStage is the staging memory of a rank.
const DefaultStage = 128 << 20

// Comm is a rank's GPU side. Its methods may be called from several goroutines;
// the order of calls is the order of operations and the same on all ranks.
type Comm struct {
	cfg        Config
	rank, size int
	table      *Table
	dev        *device
	move       funcs
	group      *symm.Group
	heap       *symm.Memory
	stage      *symm.Memory
	// stageTheirs is where each rank has mapped this rank's staging memory.
	stageTheirs [MaxRanks]cuda.Ptr
	counts      cuda.Ptr
	abort       []byte   // pinned host word that kernels look at
	abortAt     cuda.Ptr // as the GPU sees it

	// copies: copy engines may be used. Streams that wait for words share a few
	// hardware queues, and one that waits holds up the others of its queue, maybe
	// those that it waits for.
	copies bool
	// shared: two ranks have one GPU. By copy engines they could wait for each other for good there.
	shared bool
	major  int // the least compute capability among the ranks
	// unlinked says which two GPUs NVLink does not join, "" where it joins all.
	unlinked string

	mu       sync.Mutex
	windows  atomic.Pointer[[]*Window] // replaced whole, under mu
	args     *kernels.Args             // constant parts filled in; memory of its own, for cgo
	last     Stream                    // of the last operation
	order    *cuda.Event
	stamps   stamps
	byPeer   peers
	names    [MaxRanks]string // of the ranks' GPUs
	between  between
	engine   copyEngine
	pipeline pipeline
	sends    sender
	closed   atomic.Bool // set under mu
	// lastAlgo is the algorithm of the last operation, for reports.
	lastAlgo atomic.Uint32

	copying sync.Mutex // guards host
	host    *cuda.Stream

	rescuing sync.Mutex // guards rescue and abort against Close
	rescue   *cuda.Stream
}

// New makes the rank's GPU side of a communicator.
func New(ctx context.Context, cfg Config) (_ *Comm, err error) {
	if cfg.Size > MaxRanks {
		return nil, fmt.Errorf("%d GPUs in one communicator of a node, at most %d", cfg.Size, MaxRanks)
	}
	if cfg.Stage == 0 {
		cfg.Stage = DefaultStage
	}
	table, err := ParseTable(cfg.Table)
	if err != nil {
		return nil, err
	}
	c := &Comm{cfg: cfg, rank: cfg.Rank, size: cfg.Size, table: table}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.free())
		}
	}()
	if c.dev, err = open(cfg.Device); err != nil {
		return nil, err
	}
	if c.move, err = c.dev.movers(); err != nil {
		return nil, err
	}
	if err = c.agree(ctx); err != nil {
		return nil, err
	}
	c.group, err = symm.Join(ctx, symm.Config{
		Device: c.dev.Device, Rank: cfg.Rank, Size: cfg.Size, Exchange: cfg.Exchange, Key: cfg.Key, Dir: cfg.Dir,
	})
	if err != nil {
		return nil, err
	}
	if c.heap, err = c.group.Alloc(ctx, uint64(kernels.HeapSize)); err != nil {
		return nil, fmt.Errorf("heap: %w", err)
	}
	if c.stage, err = c.group.Scratch(ctx, cfg.Stage); err != nil {
		return nil, fmt.Errorf("staging memory: %w", err)
	}
	if c.stageTheirs, err = c.theirs(ctx, c.stage); err != nil {
		return nil, fmt.Errorf("staging memory: %w", err)
	}
	if c.abort, err = c.dev.AllocHost(4096); err != nil {
		return nil, err
	}
	clear(c.abort) // pinned memory comes as its last owner left it
	if c.abortAt, err = c.dev.HostPtr(c.abort); err != nil {
		return nil, err
	}
	if c.order, err = c.dev.NewEvent(false); err != nil {
		return nil, err
	}
	if c.rescue, err = c.dev.NewStream(0); err != nil {
		return nil, err
	}
	if c.counts, err = c.dev.counts(c.rescue); err != nil {
		return nil, err
	}
	c.between.init(c)
	if err = c.stamps.init(c); err != nil {
		return nil, err
	}
	c.byPeer.init(c)
	c.sends.init(c)
	c.args = &kernels.Args{}
	a := c.args
	a.Rank, a.Ranks, a.Abort = uint32(c.rank), uint32(c.size), uint64(c.abortAt)
	a.Slots, a.SlotMask = c.stamps.kernelSlots()
	a.Ring, a.Stride = uint64(c.stage.Base), c.stage.Stride
	for r := range c.size {
		a.Heap[r] = uint64(c.heap.At(r))
	}
	// Nobody writes to a heap before it is zeroed, which Alloc has waited for.
	return c, nil
}

// setup is what the choice of algorithms depends on besides the operations.
type setup struct {
	Force           record.Algo
	Blocks, Threads int
	Stage           uint64
	Table           string // its id
	Copies          bool
	Major           int
	Peers           uint64 // peers.loads
	GPU, Bus        string
}

// SetupError names a rank that was set up unlike this one. The two would choose different
// algorithms, and wait for each other for good.
type SetupError struct {
	Rank         int // as Config counts
	Mine, Theirs string
}

func (e *SetupError) Error() string {
	return fmt.Sprintf("GPU rank %d has %s, this rank %s: all must have the same", e.Rank, e.Theirs, e.Mine)
}

func (s *setup) String() string {
	return fmt.Sprintf("algorithm %v, %d blocks, %d threads, %d bytes of staging memory, table %s", s.Force, s.Blocks, s.Threads, s.Stage, s.Table)
}

// agree makes all ranks choose alike. What the program has set must be equal; of what ranks
// find, all take the least.
func (c *Comm) agree(ctx context.Context) error {
	cfg := &c.cfg
	c.byPeer.choose(c)
	mine := setup{
		Force: cfg.Force, Blocks: cfg.Blocks, Threads: cfg.Threads, Stage: cfg.Stage, Table: c.table.id,
		Copies: cuda.Connections() >= cuda.LeastConnections, Major: c.dev.Major, Peers: c.byPeer.loads,
		GPU: gpuName(c.dev.Device), Bus: c.dev.PCIBus,
	}
	blob, err := json.Marshal(mine)
	if err != nil {
		return err
	}
	blobs, err := cfg.Exchange(ctx, blob)
	if err != nil {
		return err
	}
	c.copies, c.major = mine.Copies, mine.Major
	buses := make([]string, len(blobs))
	for r, b := range blobs {
		var s setup
		if err := json.Unmarshal(b, &s); err != nil {
			return fmt.Errorf("setup of GPU rank %d: %w", r, err)
		}
		c.copies, c.major = c.copies && s.Copies, min(c.major, s.Major)
		c.byPeer.loads = min(c.byPeer.loads, s.Peers)
		if r < MaxRanks {
			c.names[r] = s.GPU
		}
		c.shared = c.shared || slices.Contains(buses[:r], s.Bus)
		buses[r] = s.Bus
		if s.Copies, s.Major, s.Peers, s.GPU, s.Bus = mine.Copies, mine.Major, mine.Peers, mine.GPU, mine.Bus; s != mine {
			return &SetupError{r, mine.String(), s.String()}
		}
	}
	return c.links(ctx, buses)
}

// Device is the rank's GPU.
func (c *Comm) Device() *cuda.Device { return c.dev.Device }

// Abort makes kernels and copies under way return early, without a result. It may be called at
// any time from any goroutine, several times, also after Close.
func (c *Comm) Abort() {
	if c == nil {
		return
	}
	c.rescuing.Lock()
	defer c.rescuing.Unlock()
	if c.abort == nil {
		return // closed meanwhile
	}
	atomic.StoreUint32((*uint32)(unsafe.Pointer(unsafe.SliceData(c.abort))), 1)
	// End the wait of streams for a peer's word. An error means a broken context, in which
	// nothing waits.
	_ = c.rescue.Batch(c.engine.release(c, nil))
}

// Aborted reports whether Abort was called.
func (c *Comm) Aborted() bool {
	return atomic.LoadUint32((*uint32)(unsafe.Pointer(unsafe.SliceData(c.abort)))) != 0
}

// Finish waits for what was called to end on the GPU.
func (c *Comm) Finish(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.last.Stream == nil || c.closed.Load() {
		return nil
	}
	if c.last.Owner != nil {
		if captured, err := c.last.Capturing(); captured || err != nil {
			return err
		}
		if err := c.last.Record(c.order); err != nil {
			return err
		}
	}
	for wait := 10 * time.Microsecond; ; wait = min(2*wait, 5*time.Millisecond) {
		if done, err := c.order.Query(); done || err != nil {
			return err
		}
		if ctx.Err() != nil {
			return fmt.Errorf("wait for the GPU's operations to end: %w", context.Cause(ctx))
		}
		time.Sleep(wait)
	}
}

// Close frees everything. When something is still under way once ctx ends, it is
// aborted; if even that does not end it, its memory stays.
func (c *Comm) Close(ctx context.Context) error {
	if c == nil {
		return nil
	}
	if err := c.Finish(ctx); err != nil {
		c.Abort()
		again, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortPatience)
		defer cancel()
		if err := c.Finish(again); err != nil {
			return fmt.Errorf("close: %w; its memory is not freed", err)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed.Swap(true) {
		return nil
	}
	return c.free()
}

// abortPatience is how long kernels have to notice an abort.
const abortPatience = 2 * time.Second

func (c *Comm) free() error {
	var errs []error
	errs = append(errs, c.engine.close(), c.pipeline.close())
	for _, w := range c.registered() {
		errs = append(errs, w.mem.Close())
	}
	c.windows.Store(nil)
	c.copying.Lock()
	if c.host != nil {
		errs = append(errs, c.host.Close())
	}
	c.copying.Unlock()
	c.rescuing.Lock()
	if c.rescue != nil {
		errs = append(errs, c.rescue.Synchronize(), c.rescue.Close()) // it writes to the heap
		c.rescue = nil
	}
	abort := c.abort
	c.abort = nil
	c.rescuing.Unlock()
	errs = append(errs, c.stamps.close())
	if c.order != nil {
		errs = append(errs, c.order.Close())
	}
	if c.stage != nil {
		errs = append(errs, c.stage.Close())
	}
	if c.heap != nil {
		errs = append(errs, c.heap.Close())
	}
	if c.group != nil {
		errs = append(errs, c.group.Close())
	}
	if abort != nil {
		errs = append(errs, c.dev.FreeHost(abort))
	}
	if c.dev != nil {
		errs = append(errs, c.dev.release())
	}
	return errors.Join(errs...)
}

// Stream is a CUDA stream that operations are put on.
type Stream struct {
	*cuda.Stream
	// Owner keeps a Stream of this library open while a communicator refers to it. A CUDA
	// stream of the program's has no Owner, and may be gone after any call.
	Owner any
}

// follow makes s come after the stream of the communicator's last operation.
// The caller has the lock.
func (c *Comm) follow(s Stream, captured bool) error {
	if captured {
		// Nothing runs during a capture, and a captured stream must not wait for work outside
		// of it. The next operation comes after the last one that does run. Launch does not
		// tell the package of replays: their order is the program's.
		return nil
	}
	last := c.last
	c.last = s
	if last.Stream == nil || last.Handle() == s.Handle() {
		return nil
	}
	if last.Owner != nil {
		if was, err := last.Capturing(); was || err != nil {
			return err
		}
		if err := last.Record(c.order); err != nil {
			return err
		}
	}
	return s.WaitEvent(c.order)
}

// leave ends a call on s.
func (c *Comm) leave(s Stream, captured bool) error {
	if s.Owner != nil || captured {
		return nil
	}
	return s.Record(c.order)
}

// CopyIn copies host memory to the GPU and returns when it is there; CopyOut back.
func (c *Comm) CopyIn(dst cuda.Ptr, src []byte) error {
	if len(src) == 0 {
		return nil
	}
	c.copying.Lock()
	defer c.copying.Unlock()
	if c.closed.Load() {
		return ErrClosed
	}
	if err := c.newStream(&c.host); err != nil {
		return err
	}
	if err := c.host.CopyIn(dst, unsafe.Pointer(unsafe.SliceData(src)), uint64(len(src))); err != nil {
		return err
	}
	return c.host.Synchronize()
}

func (c *Comm) CopyOut(dst []byte, src cuda.Ptr) error {
	if len(dst) == 0 {
		return nil
	}
	c.copying.Lock()
	defer c.copying.Unlock()
	if c.closed.Load() {
		return ErrClosed
	}
	if err := c.newStream(&c.host); err != nil {
		return err
	}
	if err := c.host.CopyOut(unsafe.Pointer(unsafe.SliceData(dst)), src, uint64(len(dst))); err != nil {
		return err
	}
	return c.host.Synchronize()
}
