package rdma

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
	"golang.org/x/sys/unix"
)

const (
	PathNew     State = iota // it has a new queue pair
	PathUp                   // a write over it has completed
	PathCarries              // it carries the lane from now on
	PathDown                 // broken
	PathLeft                 // sound, left for a better one; its queue pair is being replaced
)

// layout is where things are in a connection's memory. What the peer writes
// comes first: the ring, line slots, credit blocks of the lanes, where probes go.
type layout struct {
	lines, blocks, probe     uint64
	out, linesOut, blocksOut uint64
	size                     uint64
}

func layoutOf(ring uint64, lanes int) (l layout) {
	const page = 4096
	l.lines = ring
	l.blocks = l.lines + LineSlots*lineSize
	l.probe = l.blocks + uint64(lanes)*lineSize
	l.out = (l.probe + lineSize + page - 1) &^ (page - 1)
	l.linesOut = l.out + ring
	l.blocksOut = l.linesOut + LineSlots*lineSize
	l.size = (l.blocksOut + uint64(lanes)*lineSize + page - 1) &^ (page - 1)
	return l
}

// Config is what both ends of a connection know of it.
type Config struct {
	// Control is the TCP socket on which paths are agreed on, authenticated. The
	// connection sets its keepalive, and closes it.
	Control net.Conn
	// Paths are the port pairs, primary first, at most 2 of which are used.
	Paths []Path
	// Lower says whether this end's rank is the lower one; it decides when both could.
	Lower bool
	// Lanes and Window are the smaller of both ends'.
	Lanes, Window int
	// Moves has queue pairs that are to send from another port replaced while they carry
	// their lanes. Both ends must say the same.
	Moves bool
	// Ports are those of the primary path's queue pairs, as SetPorts has them.
	Ports []uint16
	Watch Watcher
}

// Conn is a connection between two ranks: an ordered stream of bytes and one of
// lines, each way. One goroutine uses it.
type Conn struct {
	w     *Worker
	m     *machine
	watch Watcher
	pairs []Path
	lower bool

	lay     layout
	mem     []byte
	regions map[*nicQueues]*verbs.MR
	qps     [][maxPlaces]*queuePair
	shown   [][MaxPaths]int    // of a path's places the one that the watcher hears of
	ports   [][MaxPaths]uint16 // UDP source ports that queue pairs are to have, 0: the device's choice
	tries   [][MaxPaths]attempts
	trouble []trouble // by lane
	began   []bool    // the lane has had a path
	worked  bool      // a write has completed

	ctl    net.Conn
	raw    syscall.RawConn
	frame  []byte
	reader chan struct{}
	life   life

	dirty bool
	why   error // what went wrong last
	gone  error // the control socket has ended; the peer needs nothing more, or is dead
	err   error
}

// attempts is how a path has fared.
type attempts struct {
	next     time.Time // no new queue pair before
	failures int       // in a row
	lost     time.Time // when it broke
	left     time.Time // when it was left for a better one, zero when its queue pair is replaced
	relapses int
}

// trouble is how long a lane has had no path over which this end's messages pass.
// What arrives says nothing of them: the peer judges that direction.
type trouble struct {
	since    time.Time
	failures int
	told     bool   // msgExpired
	counted  uint64 // of this end's messages, by the peer's word at the last switch
}

// Connect makes a connection over an authenticated control socket. It returns
// at once; bytes flow when both ends have agreed on paths.
func (w *Worker) Connect(cfg Config) (*Conn, error) {
	c := &Conn{
		w: w, watch: cfg.Watch, lower: cfg.Lower, ctl: cfg.Control, reader: make(chan struct{}),
		pairs: cfg.Paths[:min(len(cfg.Paths), MaxPaths)], regions: make(map[*nicQueues]*verbs.MR),
		qps: make([][maxPlaces]*queuePair, cfg.Lanes), shown: make([][MaxPaths]int, cfg.Lanes), ports: make([][MaxPaths]uint16, cfg.Lanes), tries: make([][MaxPaths]attempts, cfg.Lanes), trouble: make([]trouble, cfg.Lanes), began: make([]bool, cfg.Lanes),
	}
	s := shape{ring: uint64(cfg.Window), maxChunk: maxChunk, depth: depth, table: table, lanes: cfg.Lanes, spares: cfg.Moves}
	c.m = newMachine(s, c)
	c.lay = layoutOf(s.ring, s.lanes)
	c.wish(0, cfg.Ports)
	sc, ok := cfg.Control.(syscall.Conn)
	if !ok {
		return nil, errors.New("the control socket has no descriptor")
	}
	var err error
	if c.raw, err = sc.SyscallConn(); err != nil {
		return nil, err
	}
	if err := c.keep(); err != nil {
		return nil, err
	}
	if c.mem, err = unix.Mmap(-1, 0, int(c.lay.size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON); err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", c.lay.size, err)
	}
	// A child must not get the pages that the NIC writes.
	_ = unix.Madvise(c.mem, unix.MADV_DONTFORK)

	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		_ = unix.Munmap(c.mem)
		return nil, ErrClosed
	}
	w.conns = append(w.conns, c)
	now := time.Now()
	made := 0
	for i := range c.qps {
		c.trouble[i].since = now
		for p := range c.pairs {
			if c.shown[i][p] = c.first(p); c.offer(i, c.first(p), now) {
				made++
			}
		}
	}
	if made == 0 && c.why != nil && !errors.Is(c.why, errPortDown) {
		c.fail(c.lostPaths())
	}
	go c.read()
	w.work()
	w.schedule()
	return c, nil
}

// region is the connection's memory as registered with a device.
func (c *Conn) region(n *nicQueues) (*verbs.MR, error) {
	if r := c.regions[n]; r != nil {
		return r, nil
	}
	r, err := n.register(c.mem)
	if err == nil {
		c.regions[n] = r
	}
	return r, err
}

func (c *Conn) local(at uint64) uint64 { return uint64(uintptr(unsafe.Pointer(&c.mem[0]))) + at }

// ---- actor ----

func (c *Conn) post(lane, path int, s uint64, e *entry) { c.qps[lane][path].message(s, e) }

func (c *Conn) credit(lane, path int, _ block) { c.qps[lane][path].silently() }

func (c *Conn) stop(lane, place int, willing bool) {
	q := c.qps[lane][place]
	q.halt()
	c.mark()
	if !willing && c.ports[lane][q.path] == q.source {
		c.ports[lane][q.path] = 0 // the next one hashes, unless the plan says another
	}
	if c.shown[lane][q.path] != place {
		return
	}
	t := &c.tries[lane][q.path]
	switch {
	case willing:
		t.left = q.since
		c.announce(lane, q.path, PathLeft)
	default:
		if q.why == nil {
			c.trouble[lane].failures++ // the peer's, whose word this is
		}
		if q.since.Sub(q.live) > 10*c.patience(t) {
			t.relapses = 0
		} else if !t.lost.IsZero() {
			t.relapses++
		}
		t.lost = q.since
		c.announce(lane, q.path, PathDown)
	}
	if s := c.m.sibling(place); c.carries(lane, s) {
		c.show(lane, s)
	}
}

func (c *Conn) drop(lane, place int) {
	c.qps[lane][place].retire()
	c.qps[lane][place] = nil
	c.failed(lane, c.m.pathOf(place))
}

func (c *Conn) connect(lane, place int, to endpoint) bool {
	q := c.qps[lane][place]
	if err := q.connect(to); err != nil {
		q.why, c.why = err, err
		return false
	}
	q.live = time.Now()
	c.tries[lane][q.path].failures = 0
	if s := c.shown[lane][q.path]; s == place || !c.carries(lane, s) {
		c.show(lane, place)
	}
	return true
}

func (c *Conn) chosen(lane, place int) {
	if p := c.m.pathOf(place); c.shown[lane][p] != place {
		c.show(lane, place)
	}
}

func (c *Conn) tell(g *message) {
	if c.gone != nil || c.err != nil {
		return
	}
	c.frame = g.append(c.frame[:0])
	sent, failed := 0, error(nil)
	err := c.raw.Write(func(fd uintptr) bool {
		sent, failed = unix.SendmsgN(int(fd), c.frame, nil, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
		return true
	})
	switch {
	case err == nil && failed == nil && sent == len(c.frame):
	case errors.Is(failed, unix.EPIPE), errors.Is(failed, unix.ECONNRESET):
		// The peer has closed it, and may have said why: that is still to be read.
	default: // the few messages that can be on their way always fit
		c.hear(fmt.Errorf("the control socket takes nothing (%d of %d bytes): %w", sent, len(c.frame), cmp.Or(err, failed, io.ErrShortWrite)))
	}
}

func (c *Conn) switched(lane, _, to int, messages, bytes uint64) {
	q := c.qps[lane][to]
	q.active = true
	q.nic.active++
	c.trouble[lane].counted = c.m.lanes[lane].acked
	c.announce(lane, q.path, PathCarries)
	if c.began[lane] {
		c.watch.Switched(lane, q.path, messages, bytes)
	}
	c.began[lane] = true
}

// announce tells a path's state, unless the peer has gone: what breaks then is no fault.
func (c *Conn) announce(lane, path int, s State) {
	if c.gone != nil || c.err != nil {
		return
	}
	var num, peer uint32 // one that was left may have none
	if q := c.qps[lane][c.shown[lane][path]]; q != nil {
		num, peer = q.qp.Num(), q.remote.qp
	}
	c.watch.Path(lane, path, s, num, peer)
}

// ---- what happens ----

// arrive takes in a message.
func (c *Conn) arrive(q *queuePair, wc *verbs.Completion) {
	if err := c.m.arrive(q.lane, q.place, wc.Imm, wc.Bytes); err != nil {
		c.mark()
		return
	}
	if kind(wc.Imm>>30) == kindNote {
		c.readCredit()
	} else {
		c.watch.Received(q.lane, q.path, int(wc.Bytes))
	}
}

// readCredit takes in what the peer has consumed.
func (c *Conn) readCredit() {
	for i := range c.m.lanes {
		at := c.lay.blocks + uint64(i)*lineSize
		var v [blockWords]uint64
		for k := range v {
			v[k] = atomic.LoadUint64((*uint64)(unsafe.Pointer(&c.mem[at+uint64(k)*8])))
		}
		if err := c.m.credited(i, block{bytes: v[0], chunks: v[1], lines: v[2], received: v[3]}); err != nil {
			c.mark()
		}
	}
}

// work does what followed from what happened.
func (c *Conn) work() {
	for c.dirty && c.err == nil {
		c.dirty = false
		for i := range c.qps {
			for p := range c.qps[i] {
				switch q := c.qps[i][p]; {
				case q == nil:
				case q.halted && q.receives == 0:
					c.drained(q)
				case q.why != nil && !q.halted:
					c.why = fmt.Errorf("%s: %w", c.pairs[q.path].String(), q.why)
					c.trouble[i].failures++
					c.m.fault(i, p)
				}
			}
		}
		c.flush()
		var peer *gaveUp
		switch {
		case errors.As(c.m.err, &peer) && peer.noPath:
			c.why = peer
			c.fail(c.lostPaths())
		case c.m.err != nil:
			c.fail(c.m.err)
		}
	}
	c.w.schedule()
}

// mark has work look at the connection.
func (c *Conn) mark() { c.dirty, c.w.dirty = true, true }

// drained ends a stopped queue pair; the machine hears that its count is final. While
// one can be neither flushed nor destroyed, that is not known.
func (c *Conn) drained(q *queuePair) {
	if over, err := q.drained(); !over {
		if time.Since(q.since) > c.w.opt.GiveUpAfter {
			c.fail(fmt.Errorf("queue pair %d of %s cannot be stopped: %w", q.qp.Num(), q.nic.dev.name, err))
		}
		return
	}
	c.qps[q.lane][q.place] = nil
	c.dirty = true
	c.m.stopped(q.lane, q.place)
}

// flush posts what is gathered.
func (c *Conn) flush() {
	for i := range c.qps {
		for _, q := range c.qps[i] {
			if q != nil {
				q.flush()
			}
		}
	}
}

// fail ends the connection. What had arrived can still be received.
func (c *Conn) fail(err error) {
	if c.err != nil {
		return
	}
	for i := range c.qps {
		for p := range c.pairs {
			if c.qps[i][c.shown[i][p]] != nil || !c.tries[i][p].left.IsZero() {
				c.announce(i, p, PathDown)
			}
		}
	}
	if !errors.Is(err, io.EOF) {
		g := message{kind: msgFail, text: err.Error()}
		if errors.Is(err, ErrNoPath) {
			g.path, g.text = 1, c.why.Error()
		}
		c.tell(&g)
	}
	c.err = err
	for i := range c.qps {
		c.m.lanes[i].phase = seeking // it takes nothing any more
		for p, q := range c.qps[i] {
			if q != nil {
				q.retire()
				c.qps[i][p] = nil
			}
		}
	}
	c.ctl.Close()
}

// lostPaths is the error of a connection without paths.
func (c *Conn) lostPaths() error {
	if c.why == nil {
		c.why = errNoOffer
	}
	if !c.worked {
		c.why = fmt.Errorf("%w (none ever worked: are the ports of each path on one network? LOCKSTEP_RDMA_HCA chooses others, LOCKSTEP_NET=tcp does without)", c.why)
	}
	return &PathError{Paths: c.pairs, Err: c.why}
}

// hear notes that the control socket has ended.
func (c *Conn) hear(err error) {
	if c.gone == nil {
		c.gone = err
	}
}

// read takes in control messages until the socket ends.
func (c *Conn) read() {
	defer close(c.reader)
	var h [frameHeader]byte
	var b [maxMessage]byte
	for {
		g, err := readMessage(c.ctl, h[:], b[:])
		c.w.mu.Lock()
		c.w.poll(true) // what was sent before comes before
		switch {
		case c.err != nil: // it failed, and gave its queue pairs back, while this read
		case err != nil:
			if errors.Is(err, ErrCorrupt) {
				c.fail(err)
			}
			c.hear(c.ended(err))
		default:
			if e := c.m.handle(&g); e != nil {
				c.why = e
			}
		}
		c.dirty = true
		c.work()
		over := c.err != nil || c.gone != nil
		c.w.mu.Unlock()
		c.w.wake()
		if over {
			return
		}
	}
}

// hangUp ends the control socket and its goroutine.
func (c *Conn) hangUp() {
	c.ctl.Close()
	<-c.reader
}

// free gives all memory back; the worker's lock is held. What a NIC may still write
// to stays mapped.
func (c *Conn) free() {
	for i := range c.qps {
		for p, q := range c.qps[i] {
			if q != nil {
				q.retire()
				c.qps[i][p] = nil
			}
		}
	}
	if !c.w.ended(c) {
		return
	}
	for n, r := range c.regions {
		if !n.deregister(c.w, r) {
			return
		}
	}
	_ = unix.Munmap(c.mem)
	c.mem = nil
}
