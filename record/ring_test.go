package record

import (
	"sync/atomic"
	"testing"
	"unsafe"
)

// A producer that stalls in the middle of an Append costs its slot a drop a
// lap, and nothing else: nobody waits, and every record is accounted for.
func TestStalledProducer(t *testing.T) {
	w, err := Create(Options{Dir: t.TempDir(), RingSlots: 4})
	if err != nil {
		t.Fatal(err)
	}
	r, err := Open(w.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	slot := func(ticket uint64) *uint64 {
		return &ptr(w, ticket).seq
	}
	appendMarks := func(n int) {
		for range n {
			w.Append(&Record{Kind: KindMark})
		}
	}
	buf := make([]Record, 16)
	check := func(when string, records int, lost uint64, pending int, dropped uint64) {
		t.Helper()
		n := r.Next(buf)
		h := r.Header()
		if n != records || r.Lost() != lost || r.Pending() != pending || h.DroppedByWriter != dropped {
			t.Errorf("%s: read %d, lost %d, pending %d, dropped %d; want %d, %d, %d, %d", when, n, r.Lost(), r.Pending(), h.DroppedByWriter, records, lost, pending, dropped)
		}
		if sum := r.Read() + r.Lost() + uint64(r.Pending()); sum != h.Appended {
			t.Errorf("%s: read %d + lost %d + pending %d of %d", when, r.Read(), r.Lost(), r.Pending(), h.Appended)
		}
	}

	appendMarks(1)
	check("at first", 1, 0, 0, 0)
	// Ticket 1 is taken and its slot claimed, then its producer stalls.
	stalled := atomic.AddUint64(&w.hdr.head, 1) - 1
	atomic.StoreUint64(slot(stalled), busy|(stalled+1))
	check("stalled", 0, 0, 1, 0)
	appendMarks(2) // 2, 3
	check("others go on", 2, 0, 1, 0)
	appendMarks(3) // 4, then 5 finds the slot held, 6
	check("a lap later", 2, 1, 1, 1)
	atomic.StoreUint64(slot(stalled), stalled+1)
	check("the late record is past saving", 0, 1, 1, 1)
	appendMarks(4) // 7, 8, 9 takes the slot again, 10
	check("after it", 4, 2, 0, 1)

	// Ticket 11 is published late but within its lap: it comes, out of order.
	late := atomic.AddUint64(&w.hdr.head, 1) - 1
	appendMarks(2)
	check("before the late one", 2, 2, 1, 1)
	ptr(w, late).kind = uint8(KindLink)
	atomic.StoreUint64(slot(late), late+1)
	check("the late one", 1, 2, 0, 1)
	if buf[0].Ticket != late || buf[0].Kind != KindLink {
		t.Errorf("late record %+v", buf[0])
	}

	// A producer that took a ticket and slept through a whole lap finds a younger
	// record in its slot: its own is dropped.
	old := atomic.AddUint64(&w.hdr.head, 1) - 1
	appendMarks(4)
	atomic.StoreUint64(&w.hdr.head, old)
	appendMarks(1)
	atomic.StoreUint64(&w.hdr.head, old+5)
	check("overtaken", 4, 3, 0, 2)
}

// Tickets that never complete cannot grow a reader without bound.
func TestPendingIsBounded(t *testing.T) {
	w, err := Create(Options{Dir: t.TempDir(), RingSlots: 4 * maxPending})
	if err != nil {
		t.Fatal(err)
	}
	r, err := Open(w.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	atomic.AddUint64(&w.hdr.head, 3*maxPending)
	if n := r.Next(make([]Record, 1)); n != 0 || r.Pending() != maxPending || r.Lost() != 2*maxPending {
		t.Errorf("read %d, pending %d, lost %d", n, r.Pending(), r.Lost())
	}
}

func ptr(w *Writer, ticket uint64) *diskRecord {
	return (*diskRecord)(unsafe.Add(w.ring, (ticket&w.mask)*RecordSize))
}

// A process that makes and leaves communicators for ever is recorded for ever,
// with their connections and stamps, once those closed have been left in peace.
func TestSlotsUsedAgain(t *testing.T) {
	w, err := Create(Options{Dir: t.TempDir(), RingSlots: 4, CommSlots: 3, ConnSlots: 4, StampSlots: 96})
	if err != nil {
		t.Fatal(err)
	}
	r, err := Open(w.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	w.AddDevice(DeviceEntry{}, DeviceAnchor{})
	world, _ := w.AddComm(CommEntry{ID: 1, Name: "world", State: CommJoined})
	make3 := func(i uint64) (*Comm, *Conn) {
		t.Helper()
		c, ok := w.AddComm(CommEntry{ID: i, Name: "split", State: CommJoined, Stamps: 16, Copies: 16})
		k, ok2 := w.AddConn(ConnEntry{Comm: c.Index(), Peer: int32(i), Name: "shm"})
		w.AddConn(ConnEntry{Comm: c.Index()})
		if !ok || !ok2 {
			t.Fatalf("communicator %d: %v, %v", i, ok, ok2)
		}
		return c, k
	}
	first, conn := make3(2)
	make3(3)
	first.SetState(CommAborted)
	if c, ok := w.AddComm(CommEntry{}); ok || c != nil {
		t.Fatal("a slot was taken that is too fresh")
	}
	w.grace = 0
	stamps := make([]Stamp, 4)
	for i := uint64(4); i < 1000; i++ {
		off, n := first.StampRange()
		if n != 16 {
			t.Fatalf("communicator %d has %d slots", i-1, n)
		}
		slot := (*diskStamp)(unsafe.Pointer(&w.mem[off+StampEntrySize]))
		atomic.StoreUint64(&slot.id, 1<<16)
		slot.start, slot.end = i, i+1
		if i%2 == 0 {
			r.Stamps(stamps)
			r.Comms(nil)
		}
		first.SetState(CommLeft)
		w.Append(&Record{Kind: KindMark})
		c, k := make3(i)
		first.Started(99, 1) // its word is of no account any more
		conn.Posted(99, 1)
		comms, conns := r.Comms(nil), r.Conns(nil)
		if len(comms) != 3 || len(conns) != 4 {
			t.Fatalf("%d communicators, %d connections", len(comms), len(conns))
		}
		if s := comms[c.Index()]; s.ID != i || s.Started != 0 || s.Gen != i-3 || s.Since != i-3 || s.State != CommJoined {
			t.Fatalf("communicator %d: %+v", i, s)
		}
		if s := conns[k.Index()]; s.Peer != int32(i) || s.Posted != 0 || s.Comm != c.Index() || s.Gen != i-3 {
			t.Fatalf("connection of %d: %+v", i, s)
		}
		first, conn = c, k
	}
	_, lost, _ := r.StampCount()
	if s := r.Comms(nil)[world.Index()]; s.Name != "world" || s.Gen != 0 {
		t.Errorf("world %+v", s)
	}
	if h := r.Header(); h.CommOverflow != 1 || h.ConnOverflow != 0 || h.StampOverflow != 0 || lost != 0 {
		t.Errorf("overflow %d, %d, %d; lost %d", h.CommOverflow, h.ConnOverflow, h.StampOverflow, lost)
	}
}

// TestHostTellsRoom: the slots of a communicator whose process tells of operations go to
// another one after it.
func TestHostTellsRoom(t *testing.T) {
	w, err := Create(Options{Dir: t.TempDir(), RingSlots: 4, CommSlots: 1, StampSlots: 64})
	if err != nil {
		t.Fatal(err)
	}
	w.grace = 0
	dev, _ := w.AddDevice(DeviceEntry{}, DeviceAnchor{})
	e := CommEntry{Stamps: 32, Copies: 32, Device: dev.Index()}
	c, _ := w.AddComm(e)
	off, _ := c.StampRange()
	c.HostTells()
	c.SetState(CommLeft)
	next, ok := w.AddComm(e)
	if again, n := next.StampRange(); !ok || n != 32 || again != off {
		t.Errorf("the next communicator has %d slots at %d, want 32 at %d", n, again, off)
	}
	if _, _, ok := next.StampSlot(1, 0); ok {
		t.Error("the next communicator's GPU would have slots numbered by the process")
	}
	r, err := Open(w.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if s := r.Comms(nil)[0]; s.Stamps != 32 || s.HostStamps != 0 {
		t.Errorf("%+v", s)
	}
}
