package rdma

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
)

// The id of a work request: which queue pair, what, and for a write the position
// in its lane that follows.
const (
	slotShift = 42
	idReceive = 1 << 41
	idSilent  = 1 << 40
	idMask    = 1<<40 - 1
)

const (
	depth    = 256 // messages of a lane that may be unacknowledged
	table    = 1024
	maxChunk = 256 << 10
	// repost is how many receives are posted at once; as many are posted beyond depth.
	repost = 64
	// Writes that need no copy of the device's are gathered up to this.
	batchBytes  = 64 << 10
	batchWrites = 16
	// keptFrom is the smallest chunk that is not copied to be sent: for a smaller
	// one it costs more to hear of its arrival.
	keptFrom = 64 << 10
	// signalFrom and signalEvery say which writes complete.
	signalFrom  = 4 << 10
	signalEvery = 8
	// maxInline is what is asked for; all that posts less than a bus transaction.
	maxInline = 220
	// entries is what a queue pair may have in a completion queue.
	entries = 2*depth + repost + 2
	// drainFor bounds the wait for a queue pair in error to flush.
	drainFor = time.Second
)

// queuePair is one end of one path of a lane.
type queuePair struct {
	c          *Conn
	lane, path int
	place      int // in the lane
	nic        *nicQueues
	cq         *cq
	port       int
	qp         *verbs.QP
	region     *verbs.MR
	slot       int
	inline     int
	psn        uint32
	gidIndex   int
	gid        verbs.GID
	mtu        verbs.MTU
	remote     endpoint
	source     uint16    // UDP source port, 0: the device's choice
	live       time.Time // since when it is connected

	batch       []verbs.Write
	batched     int // bytes
	unsignalled int
	signalled   uint64 // writes that complete, posted
	completed   uint64 // and completed
	receives    int    // posted
	owed        int    // to be posted again
	silent      bool   // a silent credit, or a probe, is out
	proved      bool   // a write has completed

	posted, done uint64        // bytes
	total        [depth]uint64 // posted after each message, by position

	seen   uint64 // completed, when the watchdog looked
	seenAt time.Time
	why    error // broken
	active bool  // it carries its lane
	halted bool  // stopped by the machine: in error, being drained
	since  time.Time
}

// newQueuePair makes a queue pair that waits for the peer's, receives posted.
func (c *Conn) newQueuePair(lane, place int) (*queuePair, error) {
	path := c.m.pathOf(place)
	w, port := c.w, &c.pairs[path].Own
	n, err := w.nic(port.Device)
	if err != nil {
		return nil, err
	}
	region, err := c.region(n)
	if err != nil {
		return nil, err
	}
	q := &queuePair{c: c, lane: lane, path: path, place: place, nic: n, port: port.Num, region: region, psn: rand.Uint32() & 0xffffff}
	a, err := n.dev.port(port.Num)
	if err != nil {
		return nil, err
	}
	q.mtu = a.ActiveMTU
	if err := q.findGID(port.GID, a.LinkLayer); err != nil {
		return nil, err
	}
	if q.cq, err = n.queue(entries); err != nil {
		return nil, err
	}
	for _, q.inline = range []int{maxInline, lineSize, 0} {
		cfg := verbs.QPConfig{Send: q.cq.CQ, Recv: q.cq.CQ, MaxSend: depth + 2, MaxRecv: depth + repost, MaxInline: q.inline}
		q.qp, err = call(&n.calls, "make a queue pair", func() (*verbs.QP, error) { return n.dev.pd.NewQP(cfg) }, func(qp *verbs.QP, err error) {
			if err == nil {
				_ = qp.Close() // its entries of the completion queue stay taken
			}
		})
		if err == nil || errors.Is(err, errStalled) {
			break
		}
	}
	if err != nil {
		if !errors.Is(err, errStalled) {
			q.cq.free += entries
		}
		return nil, err
	}
	q.slot = w.slotFor(q)
	err = n.calls.do("initialize a queue pair", func() error { return q.qp.Init(port.Num, verbs.RemoteWrite|verbs.LocalWrite) })
	if err == nil {
		err = q.postReceives(depth + repost)
	}
	if err != nil {
		q.retire()
		return nil, err
	}
	return q, nil
}

// slotFor finds a number for a queue pair.
func (w *Worker) slotFor(q *queuePair) int {
	for i := range w.slots {
		if w.slots[i] == nil {
			w.slots[i] = q
			return i
		}
	}
	w.slots = append(w.slots, q)
	return len(w.slots) - 1
}

// findGID looks up where an address is in the port's table now: entries move.
func (q *queuePair) findGID(gid [16]byte, layer verbs.LinkLayer) error {
	q.gid = gid
	table, err := q.nic.dev.gids(q.port)
	if err != nil {
		return err
	}
	for _, e := range table {
		if e.GID == q.gid && (layer != verbs.LinkEthernet || e.Type == verbs.GIDRoCEv2) {
			q.gidIndex = e.Index
			return nil
		}
	}
	return fmt.Errorf("port %s/%d has GID %v no more", q.nic.dev.name, q.port, q.gid)
}

// halt begins to stop the queue pair: in error, it completes what is posted as flushed.
func (q *queuePair) halt() {
	q.halted, q.since = true, time.Now()
	q.batch, q.batched = q.batch[:0], 0
	// Of a lost device, or one that does not answer: drained finds out.
	_ = q.nic.calls.do("move a queue pair to ERR", q.qp.SetError)
	q.idle()
}

// close destroys the queue pair: nothing of it completes or writes any more. With an
// error it exists still, and may be closed again.
func (q *queuePair) close() error {
	q.idle()
	if err := q.nic.calls.do("destroy a queue pair", q.qp.Close); err != nil && !q.gone(err) {
		return err
	}
	q.c.w.slots[q.slot] = nil
	q.cq.free += entries
	return nil
}

// gone reports whether a queue pair that could not be destroyed is no more, since its
// device is: that one only refuses.
func (q *queuePair) gone(err error) bool {
	return !errors.Is(err, errStalled) && (errors.Is(err, verbs.ErrDeviceLost) || q.nic.dev.usable() != nil)
}

// quiet reports whether the queue pair, while it exists, writes nothing any more.
func (q *queuePair) quiet() bool { return q.remote == (endpoint{}) || q.halted && q.receives == 0 }

// retire closes the queue pair now or, when it cannot be destroyed, at the end.
func (q *queuePair) retire() {
	if err := q.close(); err != nil {
		w := q.c.w
		w.retired = append(w.retired, q)
		w.leaks("queue pair kept: it cannot be destroyed", q.nic.dev.name, err)
	}
}

// drained reports whether the queue pair, which was stopped, has ended. One that was
// flushed is at rest, whatever becomes of it; any other may write until it is destroyed.
func (q *queuePair) drained() (bool, error) {
	if q.quiet() {
		q.retire()
		return true, nil
	}
	err := q.close()
	return err == nil, err
}

// idle notes that the queue pair carries nothing any more.
func (q *queuePair) idle() {
	if q.active {
		q.active = false
		q.nic.active--
	}
}

// endpoint is what the peer needs to know.
func (q *queuePair) endpoint(lid uint16) endpoint {
	return endpoint{qp: q.qp.Num(), psn: q.psn, gid: q.gid, lid: lid, mtu: uint8(q.mtu), inbox: q.region.Addr, rkey: q.region.RKey}
}

// connect joins the queue pair to the peer's.
func (q *queuePair) connect(to endpoint) error {
	o := &q.c.w.opt
	q.remote, q.source = to, q.c.ports[q.lane][q.path]
	path := verbs.Path{
		QP: to.qp, PSN: to.psn, GID: to.gid, LID: to.lid, SGIDIndex: q.gidIndex, MTU: min(q.mtu, verbs.MTU(to.mtu)),
		TrafficClass: uint8(o.TrafficClass), FlowLabel: verbs.FlowLabel(q.source), ServiceLevel: uint8(o.ServiceLevel),
	}
	// A correct peer always finds a receive.
	send := verbs.SendAttr{PSN: q.psn, Timeout: uint8(o.Timeout), Retries: uint8(o.Retries), RNRRetries: 7}
	return q.nic.calls.do("connect a queue pair", func() error {
		if err := q.qp.ReadyToReceive(path); err != nil {
			return err
		}
		return q.qp.ReadyToSend(send)
	})
}

// fail notes that the queue pair does not work. The machine hears of it in work.
func (q *queuePair) fail(why error) {
	if q.why == nil && !q.halted {
		q.why = why
		q.c.mark()
	}
}

func (q *queuePair) postReceives(n int) error {
	k, err := q.qp.PostReceives(uint64(q.slot)<<slotShift|idReceive, n)
	q.receives += k
	return err
}

// write adds a write to the batch.
func (q *queuePair) write(w verbs.Write) {
	if q.why != nil || q.halted {
		return // what is lost is in the lane's log
	}
	if w.RKey = q.remote.rkey; w.LKey == 0 {
		w.LKey, w.Inline = q.region.LKey, int(w.Len) <= q.inline // what lies elsewhere is the NIC's to read
	}
	if q.unsignalled++; w.Len >= signalFrom || q.unsignalled >= signalEvery {
		w.Signalled = true
	}
	if w.Signalled {
		q.signalled++
		q.unsignalled = 0
	}
	q.batch = append(q.batch, w)
	if q.batched += int(w.Len); q.batched >= batchBytes || len(q.batch) >= batchWrites {
		q.flush()
	}
}

// flush posts the batch. Its last write completes: nothing may follow for long.
func (q *queuePair) flush() {
	if len(q.batch) == 0 {
		return
	}
	if last := &q.batch[len(q.batch)-1]; !last.Signalled {
		last.Signalled = true
		q.signalled++
		q.unsignalled = 0
	}
	if _, err := q.qp.PostWrites(q.batch); err != nil {
		q.fail(err)
	}
	q.batch, q.batched = q.batch[:0], 0
}

// message posts message s of the lane.
func (q *queuePair) message(s uint64, e *entry) {
	c := q.c
	w := verbs.Write{ID: uint64(q.slot)<<slotShift | (s+1)&idMask, Len: e.n, Imm: immediate(e), WithImm: true}
	switch e.kind {
	case kindData:
		at := e.pos % c.m.ring
		w.Addr, w.RemoteAddr = c.local(c.lay.out+at), q.remote.inbox+at
		if e.from.addr != 0 {
			key, err := e.from.region.key(q.nic.dev)
			if err != nil {
				q.fail(err)
				return
			}
			w.Addr, w.LKey = e.from.addr, key
		}
	case kindLine:
		at := e.pos % LineSlots * lineSize
		w.Addr, w.RemoteAddr = c.local(c.lay.linesOut+at), q.remote.inbox+c.lay.lines+at
	case kindNote:
		w = q.block(w)
	}
	q.posted += uint64(e.n)
	q.total[s%depth] = q.posted
	q.write(w)
	c.watch.Posted(q.lane, q.path, int(e.n), q.posted)
}

// block makes w a write of the lane's credit.
func (q *queuePair) block(w verbs.Write) verbs.Write {
	c := q.c
	at := c.lay.blocksOut + uint64(q.lane)*lineSize
	b := c.m.block(q.lane)
	// An earlier write of these words may be on its way: each only grows, so it
	// may as well carry these.
	for i, v := range [blockWords]uint64{b.bytes, b.chunks, b.lines, b.received} {
		atomic.StoreUint64((*uint64)(unsafe.Pointer(&c.mem[at+uint64(i)*8])), v)
	}
	w.Addr, w.RemoteAddr, w.Len = c.local(at), q.remote.inbox+c.lay.blocks+uint64(q.lane)*lineSize, 8*blockWords
	return w
}

const blockWords = 4

// silently writes credit without a message; one at a time, as it has no place
// in the lane's log to be counted by.
func (q *queuePair) silently() {
	if !q.silent {
		q.silent = true
		q.write(q.block(verbs.Write{ID: uint64(q.slot)<<slotShift | idSilent, Signalled: true}))
	} else {
		q.c.m.lanes[q.lane].owes = true
	}
}

// idles reports whether the queue pair could carry something and does not.
func (q *queuePair) idles() bool {
	return q.why == nil && !q.halted && q.signalled == q.completed && len(q.batch) == 0
}

// probe writes to nowhere, to see whether the path works. Nothing may be gathered: the
// probe's completion would be that of it, too.
func (q *queuePair) probe() {
	if !q.silent {
		q.silent = true
		q.write(verbs.Write{ID: uint64(q.slot)<<slotShift | idSilent, Signalled: true, Addr: q.c.local(q.c.lay.probe), RemoteAddr: q.remote.inbox + q.c.lay.probe, Len: 8})
	}
}

// complete takes in one completion.
func (q *queuePair) complete(wc *verbs.Completion) {
	c := q.c
	switch {
	case wc.ID&idReceive != 0:
		q.receives--
		if wc.Status != verbs.Success {
			q.fail(fmt.Errorf("receive: %v", wc.Status))
		} else {
			c.arrive(q, wc)
		}
		if q.halted || q.why != nil {
			if q.receives == 0 {
				c.mark()
			}
			return
		}
		if q.owed++; q.owed >= repost {
			q.owed = 0
			if err := q.postReceives(repost); err != nil {
				q.fail(err)
			}
		}
	case wc.Status != verbs.Success:
		q.fail(fmt.Errorf("write: %v", wc.Status))
	case q.halted:
	default:
		q.completed++
		if !q.proved {
			q.proved, c.worked = true, true
			c.tellUp(q)
		}
		if wc.ID&idSilent != 0 {
			q.silent = false
			return
		}
		l := &c.m.lanes[q.lane]
		s := l.transmitted + (wc.ID-l.transmitted)&idMask
		if s > l.posted {
			return // acknowledged by the peer's word already
		}
		c.m.sent(q.lane, q.place, s)
		q.done = max(q.done, q.total[(s-1)%depth])
		c.watch.Completed(q.lane, q.path, q.done)
	}
}

// stuck reports whether a write has had no completion for too long.
func (q *queuePair) stuck(now time.Time, limit time.Duration) bool {
	if q.signalled == q.completed || q.completed != q.seen || q.seenAt.IsZero() {
		q.seen, q.seenAt = q.completed, now
		return false
	}
	return now.Sub(q.seenAt) > limit
}
