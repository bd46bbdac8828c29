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

// Mesh is what a Proxy asks of the communicator's links.
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
	// Wake has it look at the queue.
	Wake()
	// Busy reports whether there are operations that have not ended; Last is the number
	// of the last one, and Drive returns when an operation has ended.
	Busy() bool
	Last() uint64
	Drive(seq uint64) error
	// Failed reports whether the communicator is over, Broke ends it.
	Failed() bool
	Broke(err error)
}

// Config is what New needs.
type Config struct {
	Rank, Size int
	Device     int        // CUDA ordinal
	Place      algo.Place // see Place
	GPU        *gpu.Comm  // of the node's ranks
	Mesh       Mesh
	Executor   Executor
	// Choose picks how the network's part of an operation runs.
	Choose func(call algo.Call, place *algo.Place) algo.Choice
	Direct Direct
	// Reads says that the CPU has to read all that is sent: injected faults hold bytes back.
	Reads bool
	// Note is told whether NICs read the GPU's memory, where that was asked for: why not, or nil.
	Note func(why error)
}

// Call is one operation, already checked, as it is recorded. Count follows algo.Call.
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

// ErrCaptured: what crosses nodes cannot be captured.
var ErrCaptured = errors.New("under capture: ranks are on several nodes, and the CPU's part between nodes cannot be in a CUDA graph")

// CallerError is an error of the Executor or of put: nothing is on the stream.
type CallerError struct{ Err error }

func (e *CallerError) Error() string { return e.Err.Error() }
func (e *CallerError) Unwrap() error { return e.Err }

// Proxy is the part of a GPU communicator that spans nodes: bounce buffers in pinned memory,
// through which chunks of an operation pass between the GPU and the network, and two words by
// which the caller's stream and the communicator's executor hand them over.
//
// An operation on device memory is put on the caller's stream at once, and in the
// communicator's queue. The stream counts in the word reached: once when it gets to the
// operation, once for each chunk that lies in pinned memory, and once when the last result has
// left it. Meanwhile the executor runs the operation's schedule on the network. It counts
// finished chunks in the word passed, on which the stream waits.
type Proxy struct {
	cfg   Config
	place algo.Place
	mesh  Mesh
	run   Executor
	gpu   *gpu.Comm    // of the node's ranks
	dev   *cuda.Device // a hold of its own
	idle  *cuda.Stream // carries nothing: its state is the context's

	beside       *cuda.Stream // what must not wait for what a caller's stream does meanwhile
	forks, joins *cuda.Event

	rail route // the members of this rank's index on every node; of everyone where nodes differ
	all  route // everyone
	// local ranks there are on every node, this rank's index among them. 1 and 0 where
	// nodes differ: then the node's ranks are not treated as such.
	local, index int
	major        bool // ranks of a node are numbered side by side, and nodes alike

	host                []byte // pinned: words, control, bounce buffers
	reachedAt, passedAt cuda.Ptr
	control             control
	bounceAt            [bounces]cuda.Ptr
	bounceSize          int
	parts               []engine.Part // see partBounce
	region              *rdma.Region  // the bounce buffers: NICs send from them
	direct              direct
	inFlight            []zeroCopy // the executor's, of the current operation's chunks, in their order
	scratch             cuda.Ptr   // device memory of a bounce buffer's size, between two steps of a stream

	calling   sync.Mutex
	reached   uint32        // given to operations so far, under calling
	passed    atomic.Uint32 // likewise
	schedules map[algo.Call]plan
	lastAlgo  atomic.Uint32 // of the last operation, for reports

	releasing sync.Mutex // also guards host against free
	released  bool       // an abort has let go of streams
	watch     sync.WaitGroup
	stop      chan struct{}
}

// route is who takes part in the network's part of an operation, and this rank's
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
	// lead is how many chunks a stream prepares before it takes the first one back.
	lead = bounces - 1
	// A chunk fills a bounce buffer, or is an eighth of the operation where that is less, so
	// that chunks overlap; it has at least chunkLeast.
	bounceLeast = 4 << 20
	chunkLeast  = 256 << 10
	// wholeMost is the size up to which each rank of a node sends everything, which saves the
	// node a step.
	wholeMost = 32 << 10
)

// New prepares the bounce buffers. All ranks call it; Halt and Free must follow.
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

// Halt ends the watch over the GPU.
func (n *Proxy) Halt() {
	if n != nil {
		close(n.stop)
		n.watch.Wait()
	}
}

// Free ends the memory; neither the GPU nor the executor may be using it.
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
			errs, host = append(errs, err), nil // a NIC may still read the bounce buffers: they stay
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

func (n *Proxy) word(off int) *uint32 { return (*uint32)(unsafe.Pointer(&n.host[off])) }

// has reports whether the stream has reached a count.
func (n *Proxy) has(count uint32) bool { return int32(atomic.LoadUint32(n.word(0))-count) >= 0 }

// pass tells the stream how many chunks are through.
func (n *Proxy) pass(count uint32) {
	n.releasing.Lock()
	defer n.releasing.Unlock()
	if !n.released {
		atomic.StoreUint32(n.word(64), count)
	}
}

// Release ends the wait of streams for chunks, for good. They may overwrite bounce buffers
// then, so nothing may be sent from these any more.
func (n *Proxy) Release() {
	if n == nil {
		return
	}
	n.releasing.Lock()
	defer n.releasing.Unlock()
	n.released = true
	if n.host == nil {
		return // freed meanwhile
	}
	atomic.StoreUint32(n.word(64), n.passed.Load()+1<<30) // what no count reaches: they are compared cyclically
}

// start puts an operation on a stream and, by put, in the executor's queue. prepare makes the
// network's part. launch puts the stream's part on the stream, after the wait for the
// operation's turn, and counts chunks in reached and passed. first is the operation of the
// node's ranks with which launch begins, nil for none.
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
			return &CallerError{err} // what prepare waited for has failed
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

// Algo is the algorithm of the last operation.
func (n *Proxy) Algo() record.Algo { return record.Algo(n.lastAlgo.Load()) }

// parallel puts two things on a stream that may need each other to end. The first runs on a
// stream of its own.
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
	// Also after a failure: whoever waits for s waits for both.
	return errors.Join(err, n.beside.Record(n.joins), s.WaitEvent(n.joins))
}

// lookEvery is how often look asks whether the GPU still works.
const lookEvery = 50 * time.Millisecond

// look ends the communicator when the GPU fails. Nothing else would tell those who wait for its
// words. The executor itself never calls the driver: a thread that waits for the GPU, and so
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
