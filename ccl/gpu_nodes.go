package ccl

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/bootstrap"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/engine"
	"github.com/lockstep-ccl/lockstep/ccl/internal/gpu"
	"github.com/lockstep-ccl/lockstep/ccl/internal/rdma"
	"github.com/lockstep-ccl/lockstep/record"
)

// gpuNodes is what a GPU communicator of several nodes has besides: pinned memory
// that chunks of an operation pass through on their way between the GPU and the
// network, and two words by which the caller's stream and the communicator's
// executor hand them to each other.
//
// An operation on device memory is put on the caller's stream whole, and in the
// communicator's queue. The stream counts in the word reached: once when it gets to
// the operation, once for each chunk that lies in pinned memory, and once when the
// last result has left it. The executor, which runs the operation's schedule on the
// network meanwhile, counts the chunks that are through in the word passed, where
// the stream waits.
type gpuNodes struct {
	c     *Comm
	place algo.Place   // as gpuPlace finds it
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

	host                []byte // pinned: words, mail, slots
	reachedAt, passedAt cuda.Ptr
	mail                mail
	slotAt              [slots]cuda.Ptr
	slotSize            int
	parts               []engine.Part // see partSlots
	region              *rdma.Region  // the slots: NICs send from them
	direct              gpuDirect
	lent                []loan   // the executor's, of the current operation's chunks, in their order
	scratch             cuda.Ptr // device memory of a slot's size, between two steps of a stream

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
	slots = 4
	// lead is how many chunks a stream prepares before it takes the first one back.
	lead = slots - 1
	// A slot takes a chunk; a chunk is an eighth of the operation where that is less, so
	// that there is something to overlap, but no less than chunkLeast.
	slotLeast  = 4 << 20
	chunkLeast = 256 << 10
	// wholeMost is up to how many bytes the ranks of a node all send everything: that
	// spares the node a step.
	wholeMost = 32 << 10
)

// newGPUNodes prepares the pinned memory. All ranks call it.
func (c *Comm) newGPUNodes(g *gpu.Comm, place algo.Place) (_ *gpuNodes, err error) {
	p := &place
	n := &gpuNodes{c: c, place: place, gpu: g, schedules: map[algo.Call]plan{}, local: 1, stop: make(chan struct{})}
	everyone := make([]int, c.size)
	for r := range everyone {
		everyone[r] = r
	}
	n.all = newRoute(everyone, place)
	n.rail = n.all
	if p.Across != nil && len(p.Local) > 1 {
		n.local, n.index = len(p.Local), slices.Index(p.Local, c.rank)
		index := make([]int32, len(p.Across))
		for i := range index {
			index[i] = int32(i)
		}
		n.rail = newRoute(p.Across, algo.NewPlace(slices.Index(p.Across, c.rank), index, p.Cores))
		n.major = true
		for r, nd := range p.Node {
			n.major = n.major && int(nd) == r/n.local
		}
	}
	n.slotSize = max(slotLeast, (c.size*chunkLeast/16+4095)&^4095)
	defer func() {
		if err != nil {
			n.halt()
			err = errors.Join(err, n.free())
		}
	}()
	drv, err := cuda.Open()
	if err != nil {
		return nil, err
	}
	if n.dev, err = drv.Device(c.cfg.Device.Ordinal()); err != nil {
		return nil, err
	}
	const words = 4096
	letters := (mailSize(c.size) + 4095) &^ 4095
	if n.host, err = n.dev.AllocHost(words + letters + slots*n.slotSize); err != nil {
		return nil, err
	}
	clear(n.host[:words])
	at, err := n.dev.HostPtr(n.host)
	if err != nil {
		return nil, err
	}
	n.reachedAt, n.passedAt = at, at+64
	for i := range slots {
		off := words + letters + i*n.slotSize
		n.slotAt[i] = at + cuda.Ptr(off)
		n.parts = append(n.parts, engine.Part{Buf: n.host[off : off+n.slotSize], DType: record.Uint8})
	}
	n.parts = append(n.parts, engine.Part{Buf: n.host[words+letters:], DType: record.Uint8}) // all slots, for messages
	if n.region, err = rdma.Register(n.parts[partAll].Buf); err != nil {
		return nil, err
	}
	if err = n.openDirect(); err != nil {
		return nil, err
	}
	if n.scratch, err = n.dev.Alloc(uint64(n.slotSize)); err != nil {
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
	n.mail = newMail(c.size, n.host[words:words+mailSize(c.size)], at+words)
	n.watch.Go(n.look)
	return n, nil
}

// halt ends the watch over the GPU.
func (n *gpuNodes) halt() {
	if n != nil {
		close(n.stop)
		n.watch.Wait()
	}
}

// free ends the memory; neither the GPU nor the executor may be using it.
func (n *gpuNodes) free() error {
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
			errs, host = append(errs, err), nil // a NIC may still read the slots: they stay
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

func (n *gpuNodes) word(off int) *uint32 { return (*uint32)(unsafe.Pointer(&n.host[off])) }

// has reports whether the stream has reached a count.
func (n *gpuNodes) has(count uint32) bool { return int32(atomic.LoadUint32(n.word(0))-count) >= 0 }

// pass tells the stream how many chunks are through.
func (n *gpuNodes) pass(count uint32) {
	n.releasing.Lock()
	defer n.releasing.Unlock()
	if !n.released {
		atomic.StoreUint32(n.word(64), count)
	}
}

// release lets go of streams that wait for chunks, for good. They may fill slots again
// then: nothing may be sent from them any more.
func (n *gpuNodes) release() {
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

// crossing is the network's part of one operation.
type crossing struct {
	n   *gpuNodes
	seq uint64
	met atomic.Bool // see gpu.Comm.Enter
	plan
	gate    func(number int) bool // engine.Op.Gate
	returns func() bool           // tells the stream what peers have consumed since; whether there was any
	reached uint32                // when the stream has come to the operation
	passed  uint32                // before its first chunk

	// Of a collective.
	peers   []int     // the others that take part, where chunks are so large that slots may be lent
	through [2]uint32 // chunks that each direction is done with
	ending  bool
}

// loan is that a chunk was sent from its slot, up to a mark in what went to a peer
// that has not consumed it.
type loan struct {
	piece uint32
	peer  int
	mark  uint64
}

// desc is what the GPU's stamps are of.
func (x *crossing) desc(o *operation, s *Stream) record.Desc {
	d := record.Desc{
		Coll: o.coll, DType: o.dtype, Op: o.redop, Algo: x.sched.Algo, Proto: x.sched.Proto,
		Root: o.root, Stream: s.id, Bytes: o.bytes,
	}
	if o.inPlace {
		d.Flags = record.DescInPlace
	}
	return d
}

// begun reports whether the stream has come to the operation.
func (x *crossing) begun() bool { return x.n.has(x.reached) }

// chunkGate is the gates of a chain of chunks.
func (x *crossing) chunkGate(number int) bool {
	piece, gate := algo.GateOf(number)
	mesh := x.n.c.mesh
	switch gate {
	case algo.Ready, algo.Left:
		x.ending = gate == algo.Left
		// Kernels that an abort has sent home leave anything in a slot.
		return x.n.has(x.reached+1+uint32(piece)) && x.n.c.failed.Load() == nil
	case algo.Sent:
		for _, p := range x.peers {
			if mark := mesh.Lent(p); !mesh.Returned(p, mark) {
				x.n.lent = append(x.n.lent, loan{uint32(piece), p, mark})
			}
		}
	case algo.Received:
		for _, p := range x.peers {
			mesh.Acknowledge(p)
		}
	}
	x.through[gate-algo.Sent] = uint32(piece) + 1
	x.pass()
	return true
}

// pass tells the stream which slots are free: those that both directions are done with,
// and nobody sends from.
func (x *crossing) pass() {
	free := min(x.through[0], x.through[1])
	if len(x.n.lent) > 0 {
		free = min(free, x.n.lent[0].piece)
	}
	x.n.pass(x.passed + free)
}

// returned takes back slots that were lent. What is missed in the end is waited for like
// what any operation has lent, so that the records say for whom.
func (x *crossing) returned() bool {
	n := x.n
	if len(n.lent) == 0 || x.ending && !n.c.mesh.Settled() {
		return false
	}
	back := 0
	for back < len(n.lent) && (x.ending || n.c.mesh.Returned(n.lent[back].peer, n.lent[back].mark)) {
		back++
	}
	if back == 0 {
		return false
	}
	n.lent = slices.Delete(n.lent, 0, back)
	x.pass()
	return true
}

// chunk is what a stream and the network do of an operation at a time. stage brings
// to a slot what the call takes, land takes from one what the call gives: another, if
// what was staged is in the GPU's memory.
type chunk struct {
	call       algo.Call
	send, recv int // where in the slot
	stage      func(s gpu.Stream, slot cuda.Ptr) error
	land       func(s gpu.Stream, slot, staged cuda.Ptr) error
}

func (k *chunk) bytes() int { return k.call.Count * k.call.DType.Size() }

// plan is how an operation goes over the network: with direct, those of its chunks that
// are large enough are staged in the GPU's memory.
type plan struct {
	sched  *algo.Schedule
	direct bool
}

// onGPU reports whether a chunk is staged in the GPU's memory. Small ones are not: they
// would have to be waited for, which costs more than their copy.
func (p *plan) onGPU(k *chunk) bool { return p.direct && k.bytes() >= rdma.KeptFrom }

// cross puts an operation on s and in the queue. prepare says what the network does;
// launch puts the stream's part on it, which has come to the operation by then, and
// counts chunks in reached and passed. first is what launch begins with, if that is an
// operation of the node's ranks.
func (n *gpuNodes) cross(s *Stream, cs *cuda.Stream, o *operation, chunks int, first *gpu.Op, prepare func(*crossing) error, launch func(on gpu.Stream, x *crossing) error) error {
	c, on := n.c, s.owned(cs)
	n.calling.Lock()
	defer n.calling.Unlock()
	captured, err := n.gpu.Begin(on)
	if err != nil {
		return c.launched(o.coll, err)
	}
	if captured {
		return c.invalid(o.coll, "under capture: ranks are on several nodes, and the CPU's part between nodes cannot be in a CUDA graph")
	}
	x := &crossing{n: n, reached: n.reached + 1, passed: n.passed.Load()}
	if err := prepare(x); err != nil {
		if c.failed.Load() != nil {
			return err // what prepare waited for has failed
		}
		return c.launched(o.coll, err)
	}
	n.lastAlgo.Store(uint32(x.sched.Algo))
	o.crossing = x
	if err := c.put(s, o); err != nil {
		return err
	}
	n.reached += uint32(chunks) + 2
	n.passed.Add(uint32(chunks))
	c.executor.wake()
	met, err := n.gpu.Enter(on, x.seq, x.desc(o, s), first, n.reachedAt, x.reached)
	x.met.Store(met)
	if err == nil {
		err = launch(on, x)
	}
	if err == nil {
		err = n.gpu.Leave(on, n.reachedAt, n.reached)
	}
	return c.launched(o.coll, errors.Join(err, n.gpu.End(on)))
}

// parallel puts two things on a stream that may need each other to end: first on a
// stream of its own.
func (n *gpuNodes) parallel(s gpu.Stream, first func(*cuda.Stream) error, second func(gpu.Stream) error) error {
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

// launch puts the stream's part of an operation of chunks on it.
func (n *gpuNodes) launch(s gpu.Stream, x *crossing, chunks []chunk) error {
	count := x.reached
	staged := func(i int) cuda.Ptr {
		if x.onGPU(&chunks[i]) {
			return n.directAt(i % slots)
		}
		return n.slotAt[i%slots]
	}
	for i := range len(chunks) + lead {
		if i < len(chunks) {
			if err := chunks[i].stage(s, staged(i)); err != nil {
				return err
			}
			count++
			if err := s.Write32(n.reachedAt, count); err != nil {
				return err
			}
		}
		if done := i - lead; done >= 0 {
			if err := s.Wait32(n.passedAt, x.passed+uint32(done)+1); err != nil {
				return err
			}
			if err := chunks[done].land(s, n.slotAt[done%slots], staged(done)); err != nil {
				return err
			}
		}
	}
	return nil
}

// lends reports whether chunks are so large that a NIC may send them from their slots.
func (n *gpuNodes) lends(chunks []chunk) bool {
	return slices.ContainsFunc(chunks, func(k chunk) bool { return k.bytes() >= rdma.KeptFrom })
}

// schedule is the network's part of an operation, kept by the operation's shape. What
// becomes of a chunk decides whether NICs are all that reads what is staged, and with that
// where it is: a schedule that has the CPU read it, or send it to a rank of this node through
// shared memory, is made again, for pinned memory.
func (n *gpuNodes) schedule(o *operation, r *route, chunks []chunk) (plan, error) {
	key := algo.Call{Coll: o.coll, DType: o.dtype, Op: o.redop, Root: o.root, Count: o.count}
	if p, ok := n.schedules[key]; ok {
		return p, nil
	}
	p := plan{direct: n.direct.has()}
	var err error
	if p.sched, err = n.chain(r, chunks, &p); err != nil {
		return plan{}, err
	}
	for i := 0; i < slots && p.direct; i++ {
		if !p.sched.OnlySends(engine.GroupSpace+partDirect+algo.Space(i), n.place.Local) {
			p.direct = false
			if p.sched, err = n.chain(r, chunks, &p); err != nil {
				return plan{}, err
			}
		}
	}
	if n.local > 1 && r == &n.rail {
		p.sched.Algo = record.AlgoHierarchical
	}
	if len(n.schedules) >= schedulesMost {
		clear(n.schedules)
	}
	n.schedules[key] = p
	return p, nil
}

// chain is the schedule of chunks, staged as p says.
func (n *gpuNodes) chain(r *route, chunks []chunk, p *plan) (*algo.Schedule, error) {
	c := n.c
	pieces := make([]algo.Piece, len(chunks))
	for i := range chunks {
		k := &chunks[i]
		call, recv := k.call, engine.GroupSpace+partSlots+algo.Space(i%slots)
		send := recv
		if p.onGPU(k) {
			call.InPlace, call.Apart = false, true
			send += partDirect - partSlots
		}
		pieces[i] = algo.Piece{
			Call: call, Place: &r.place, Members: r.members,
			Choice: c.model.Choose(call, &r.place, algo.Overrides{Algo: c.cfg.Algo, Proto: c.cfg.Proto}),
			Send:   algo.Ref{Space: send, Off: k.send}, Recv: algo.Ref{Space: recv, Off: k.recv},
		}
	}
	return algo.Chain(pieces)
}

// schedulesMost bounds how many schedules are kept.
const schedulesMost = 256

const (
	// A rank whose GPU has not come so far polls for a while, then sleeps for longer and
	// longer: the GPU may be busy for as long as it likes.
	attendBusy = 200 * time.Microsecond
	attendMost = 200 * time.Microsecond
	// lookEvery is how often somebody looks whether the GPU still works.
	lookEvery = 50 * time.Millisecond
)

// attend waits a little for the GPU, and for the network if something is under way.
func (c *Comm) attend(i *idleness) {
	now := record.Now()
	if i.since == 0 {
		i.since = now
	}
	waited := time.Duration(now - i.since)
	if c.executor.current != nil {
		c.mesh.Wait(0)
	}
	if waited < attendBusy {
		runtime.Gosched()
		return
	}
	time.Sleep(min(waited/8, attendMost))
}

// look ends the communicator when the GPU does not work any more, which nothing tells
// who waits for its words. The executor itself calls nothing of the driver: that may
// be held by somebody who waits for the GPU, which waits for the executor.
func (n *gpuNodes) look() {
	ticks := time.NewTicker(lookEvery)
	defer ticks.Stop()
	for {
		select {
		case <-n.stop:
			return
		case <-ticks.C:
		}
		if q := &n.c.queue; q.tail.Load() == q.finished.Load() {
			continue
		}
		if _, err := n.idle.Query(); err != nil {
			n.c.gpuBroke(err)
			return
		}
	}
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

// submit is submitGPU on several nodes.
func (n *gpuNodes) submit(s *Stream, kind record.CollKind, send, recv Buffer, op Op, root, count, shares int, dt DType) error {
	c := n.c
	cs, err := c.enter(kind, s)
	if err != nil || count == 0 && kind != record.Barrier {
		return err
	}
	o := operation{
		coll: kind, dtype: dt, redop: op, inPlace: send.dev == recv.dev, root: int32(root),
		count: count, bytes: uint64(count * dt.Size() * shares),
	}
	if kind == record.AlltoAll {
		return n.allToAll(s, cs, &o, cuda.Ptr(send.dev), cuda.Ptr(recv.dev))
	}
	m := motion{n: n, s: cs, o: &o, send: cuda.Ptr(send.dev), recv: cuda.Ptr(recv.dev), size: dt.Size()}
	switch kind {
	case record.AllReduce:
		m.allReduce()
	case record.ReduceScatter:
		m.reduceScatter()
	case record.AllGather:
		m.allGather()
	case record.Broadcast:
		m.broadcast()
	case record.Reduce:
		m.reduce()
	case record.Barrier:
		m.barrier()
	}
	prepare := func(x *crossing) (err error) {
		x.gate, x.returns = x.chunkGate, x.returned
		if n.lends(m.chunks) {
			x.peers = m.via.peers
		}
		x.plan, err = n.schedule(&o, m.via, m.chunks)
		return err
	}
	return n.cross(s, cs, &o, len(m.chunks), m.opening(), prepare, func(on gpu.Stream, x *crossing) error { return n.launch(on, x, m.chunks) })
}
