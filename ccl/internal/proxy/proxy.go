package proxy

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/engine"
	"github.com/lockstep-ccl/lockstep/ccl/internal/gpu"
	"github.com/lockstep-ccl/lockstep/ccl/internal/nic"
	"github.com/lockstep-ccl/lockstep/ccl/internal/rdma"
	"github.com/lockstep-ccl/lockstep/record"
)

// Mesh is the part of transport.Mesh that a Proxy uses.
type Mesh interface {
	Mark(peer int) uint64
	Consumed(peer int, mark uint64) bool
	Acknowledge(peer int)
	Settled() bool
	Rails(peers []int) (primary, backup []nic.Port, err error)
	Need(r *rdma.Region, ports []nic.Port) error
}

// Executor runs the operations that are in the communicator's queue.
type Executor interface {
	// Wake makes the executor run what is in the queue.
	Wake()
	// Busy reports whether there are operations that have not ended.
	Busy() bool
	// Last returns the number of the last operation.
	Last() uint64
	// Drive returns when operation seq has ended.
	Drive(seq uint64) error
	// Failed reports whether the communicator has ended.
	Failed() bool
	// Broke ends the communicator because the GPU failed.
	Broke(err error)
}

// Config configures a Proxy.
type Config struct {
	Rank, Size int
	Device     int        // CUDA ordinal
	Place      algo.Place // see Place
	GPU        *gpu.Comm  // of the node's ranks
	Mesh       Mesh
	Executor   Executor
	// Choose returns how the network's part of an operation runs.
	Choose func(call algo.Call, place *algo.Place) algo.Choice
	Direct Direct
	// Reads says that the CPU must read everything that is sent, because injected faults hold bytes
	// back.
	Reads bool
	// Note is called if Direct asks for GPUDirect, with the reason why NICs do not read the GPU's
	// memory, or nil if they do.
	Note func(why error)
}

// Call describes one operation, which is already checked. Count is as in algo.Call.
type Call struct {
	Coll    record.CollKind
	DType   record.DType
	Op      record.RedOp
	InPlace bool
	Root    int32
	Count   int
	Bytes   uint64
	Stream  uint32
}

// ErrCaptured says that an operation between nodes was called under stream capture.
var ErrCaptured = errors.New("under capture: ranks are on several nodes, and the CPU's part between nodes cannot be in a CUDA graph")

// CallerError is an error of the Executor or of put. Nothing was put on the stream.
type CallerError struct{ Err error }

func (e *CallerError) Error() string { return e.Err.Error() }
func (e *CallerError) Unwrap() error { return e.Err }

// Proxy is the part of a GPU communicator that spans nodes. Chunks of an operation pass between the GPU
// and the network through bounce buffers in pinned memory. The caller's stream and the communicator's
// executor hand them over by two words.
//
// An operation on device memory is put on the caller's stream at once, and in the communicator's
// queue. The stream increments the word reached when it reaches the operation, when a chunk is in its
// bounce buffer, and when it has copied the last result. Meanwhile the executor runs the operation's
// schedule on the network. It counts finished chunks in the word passed, on which the stream waits.
type Proxy struct {
	cfg   Config
	place algo.Place
	mesh  Mesh
	run   Executor
	gpu   *gpu.Comm    // of the node's ranks
	dev   *cuda.Device // the Proxy's own reference
	idle  *cuda.Stream // always empty, so that a query shows the state of the CUDA context

	beside       *cuda.Stream // runs in parallel to a caller's stream, see parallel
	forks, joins *cuda.Event

	rail route // the ranks of this rank's index on every node; all ranks if nodes have different sizes
	all  route // all ranks
	// local is the number of ranks on each node, and index this rank's index on its node. They are 1
	// and 0 if nodes have different sizes; each rank then counts as a node.
	local, index int
	major        bool // the ranks of each node have adjacent numbers, in the order of nodes

	host                []byte // pinned: words, control, bounce buffers
	reachedAt, passedAt cuda.Ptr
	control             control
	bounceAt            [bounces]cuda.Ptr
	bounceSize          int
	parts               []engine.Part // see partBounce
	region              *rdma.Region  // registers the bounce buffers, from which NICs send
	direct              direct
	inFlight            []zeroCopy // of the current operation, in order of chunks; for the executor only
	scratch             cuda.Ptr   // device memory of a bounce buffer's size, for intermediate results

	calling   sync.Mutex
	reached   uint32        // value of the word reached after all operations so far; guarded by calling
	passed    atomic.Uint32 // value of the word passed after them; calling guards writes
	schedules map[algo.Call]plan
	lastAlgo  atomic.Uint32 // see Algo

	releasing sync.Mutex // guards released, and writes to host against Free
	released  bool       // see Release
	watch     sync.WaitGroup
	stop      chan struct{}
}

// route lists the ranks that take part in the network's part of an operation. place is this rank's
// place among them.
type route struct {
	members []int
	place   algo.Place
	peers   []int // the others
}

func newRoute(members []int, place algo.Place) route {
	return route{members, place, slices.Delete(slices.Clone(members), place.Rank, place.Rank+1)}
}

const (
	bounces = 4
	// lead is how many chunks a stream stages before it lands the first one.
	lead = bounces - 1
	// A chunk fills a bounce buffer, or is an eighth of the operation if that is less, so that
	// chunks overlap. It has at least chunkLeast bytes. A bounce buffer has at least bounceLeast.
	bounceLeast = 4 << 20
	chunkLeast  = 256 << 10
	// Up to wholeMost bytes, each rank of a node sends everything, which saves the AllGather within
	// the node.
	wholeMost = 32 << 10
)

// New returns a Proxy. All ranks must call it. The caller must call Halt and then Free.
func New(cfg Config) (_ *Proxy, err error) {
	place := cfg.Place
	p := &place
	n := &Proxy{cfg: cfg, place: place, mesh: cfg.Mesh, run: cfg.Executor, gpu: cfg.GPU, schedules: map[algo.Call]plan{}, local: 1, stop: make(chan struct{})}
	everyone := make([]int, cfg.Size)
	for r := range everyone {
		everyone[r] = r
	}
	n.all = newRoute(everyone, place)
	n.rail = n.all
	if p.Across != nil && len(p.Local) > 1 {
		n.local, n.index = len(p.Local), slices.Index(p.Local, cfg.Rank)
		index := make([]int32, len(p.Across))
		for i := range index {
			index[i] = int32(i)
		}
		n.rail = newRoute(p.Across, algo.NewPlace(slices.Index(p.Across, cfg.Rank), index, p.Cores))
		n.major = true
		for r, nd := range p.Node {
			n.major = n.major && int(nd) == r/n.local
		}
	}
	n.bounceSize = max(bounceLeast, (cfg.Size*chunkLeast/16+4095)&^4095)
	defer func() {
		if err != nil {
			n.Halt()
			err = errors.Join(err, n.Free())
		}
	}()
	drv, err := cuda.Open()
	if err != nil {
		return nil, err
	}
	if n.dev, err = drv.Device(cfg.Device); err != nil {
		return nil, err
	}
	const words = 4096
	lists := (controlSize(cfg.Size) + 4095) &^ 4095
	if n.host, err = n.dev.AllocHost(words + lists + bounces*n.bounceSize); err != nil {
		return nil, err
	}
	clear(n.host[:words])
	at, err := n.dev.HostPtr(n.host)
	if err != nil {
		return nil, err
	}
	n.reachedAt, n.passedAt = at, at+64
	for i := range bounces {
		off := words + lists + i*n.bounceSize
		n.bounceAt[i] = at + cuda.Ptr(off)
		n.parts = append(n.parts, engine.Part{Buf: n.host[off : off+n.bounceSize], DType: record.Uint8})
	}
	n.parts = append(n.parts, engine.Part{Buf: n.host[words+lists:], DType: record.Uint8}) // all bounce buffers, for messages
	if n.region, err = rdma.Register(n.parts[partAll].Buf); err != nil {
		return nil, err
	}
	if err = n.openDirect(); err != nil {
		return nil, err
	}
	if n.scratch, err = n.dev.Alloc(uint64(n.bounceSize)); err != nil {
		return nil, err
	}
	for _, s := range []**cuda.Stream{&n.idle, &n.beside} {
		if *s, err = n.dev.NewStream(0); err != nil {
			return nil, err
		}
	}
	for _, e := range []**cuda.Event{&n.forks, &n.joins} {
		if *e, err = n.dev.NewEvent(false); err != nil {
			return nil, err
		}
	}
	n.control = newControl(cfg.Size, n.host[words:words+controlSize(cfg.Size)], at+words)
	n.watch.Go(n.look)
	return n, nil
}

// Halt ends the goroutine that watches the GPU.
func (n *Proxy) Halt() {
	if n != nil {
		close(n.stop)
		n.watch.Wait()
	}
}

// Free frees the memory. Neither the GPU nor the executor may use it any more.
func (n *Proxy) Free() error {
	var errs []error
	for _, s := range []*cuda.Stream{n.idle, n.beside} {
		if s != nil {
			errs = append(errs, s.Close())
		}
	}
	for _, e := range []*cuda.Event{n.forks, n.joins} {
		if e != nil {
			errs = append(errs, e.Close())
		}
	}
	if n.scratch != 0 {
		errs = append(errs, n.dev.Free(n.scratch))
	}
	n.releasing.Lock()
	host := n.host
	n.host = nil
	n.releasing.Unlock()
	if n.region != nil {
		if err := n.region.Close(); err != nil {
			errs, host = append(errs, err), nil // a NIC may still read the bounce buffers, so they are not freed
		}
	}
	if host != nil {
		errs = append(errs, n.dev.FreeHost(host))
	}
	errs = append(errs, n.direct.close())
	if n.dev != nil {
		errs = append(errs, n.dev.Close())
	}
	return errors.Join(errs...)
}

// word returns a word of the pinned memory.
func (n *Proxy) word(off int) *uint32 { return (*uint32)(unsafe.Pointer(&n.host[off])) }

// has reports whether the word reached has come to count.
func (n *Proxy) has(count uint32) bool { return int32(atomic.LoadUint32(n.word(0))-count) >= 0 }

// pass sets the word passed.
func (n *Proxy) pass(count uint32) {
	n.releasing.Lock()
	defer n.releasing.Unlock()
	if !n.released {
		atomic.StoreUint32(n.word(64), count)
	}
}

// Release makes all waits of streams for chunks return, now and later. Streams may then overwrite bounce
// buffers, so nothing may be sent from them any more.
func (n *Proxy) Release() {
	if n == nil {
		return
	}
	n.releasing.Lock()
	defer n.releasing.Unlock()
	n.released = true
	if n.host == nil {
		return // Free was first
	}
	atomic.StoreUint32(n.word(64), n.passed.Load()+1<<30) // ahead of all counts, which are compared cyclically
}

// start puts an operation on a stream, and calls put to put it in the executor's queue. prepare fills
// the Op. launch puts the stream's part on the stream, between the stamps of the operation's start and end.
// It counts chunks in the words reached and passed. first is the collective within the node with which
// launch begins, or nil.
func (n *Proxy) start(on gpu.Stream, o *Call, put func(*Op) error, chunks int, first *gpu.Op, prepare func(*Op) error, launch func(x *Op) error) error {
	n.calling.Lock()
	defer n.calling.Unlock()
	captured, err := n.gpu.Begin(on)
	if err != nil {
		return err
	}
	if captured {
		return ErrCaptured
	}
	x := &Op{n: n, reached: n.reached + 1, passed: n.passed.Load()}
	if err := prepare(x); err != nil {
		if n.run.Failed() {
			return &CallerError{err} // prepare waited for an operation that failed
		}
		return err
	}
	n.lastAlgo.Store(uint32(x.sched.Algo))
	if err := put(x); err != nil {
		return &CallerError{err}
	}
	n.reached += uint32(chunks) + 2
	n.passed.Add(uint32(chunks))
	n.run.Wake()
	met, err := n.gpu.Enter(on, x.seq, x.desc(o), first, n.reachedAt, x.reached)
	x.met.Store(met)
	if err == nil {
		err = launch(x)
	}
	if err == nil {
		err = n.gpu.Leave(on, n.reachedAt, n.reached)
	}
	return errors.Join(err, n.gpu.End(on))
}

// Algo returns the algorithm of the last operation.
func (n *Proxy) Algo() record.Algo { return record.Algo(n.lastAlgo.Load()) }

// parallel runs first and second on two streams, since each may need the other to end. s waits for both.
func (n *Proxy) parallel(s gpu.Stream, first func(*cuda.Stream) error, second func(gpu.Stream) error) error {
	if err := s.Record(n.forks); err != nil {
		return err
	}
	if err := n.beside.WaitEvent(n.forks); err != nil {
		return err
	}
	err := first(n.beside)
	if err == nil {
		err = second(s)
	}
	// Also after an error, s must wait for what first has put on its stream.
	return errors.Join(err, n.beside.Record(n.joins), s.WaitEvent(n.joins))
}

// lookEvery is the interval at which look queries the GPU.
const lookEvery = 50 * time.Millisecond

// look ends the communicator when the GPU fails. Otherwise the executor would wait for the GPU's words
// forever. The executor itself never calls the driver, because a thread that waits for the GPU, and so
// for the executor, may hold the driver's lock.
func (n *Proxy) look() {
	ticks := time.NewTicker(lookEvery)
	defer ticks.Stop()
	for {
		select {
		case <-n.stop:
			return
		case <-ticks.C:
		}
		if !n.run.Busy() {
			continue
		}
		if _, err := n.idle.Query(); err != nil {
			n.run.Broke(err)
			return
		}
	}
}
