package record_test

import (
	"os"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/record"
	"pgregory.net/rapid"
)

// gpu writes stamps as kernels do, word by word: a reader must make do with
// halves that are not written at once.
type gpu struct {
	mem  []byte
	comm *record.Comm
}

func (g gpu) slot(seq uint64) *[4]uint64 {
	off, n := g.comm.StampRange()
	return (*[4]uint64)(unsafe.Pointer(&g.mem[off+int(seq&uint64(n-1))*record.StampEntrySize]))
}

func (g gpu) begin(seq uint64, desc uint16, start uint64) {
	s := g.slot(seq)
	atomic.StoreUint64(&s[0], seq<<16|uint64(desc))
	atomic.StoreUint64(&s[1], start)
}

func (g gpu) end(seq, wait uint64, peer uint8, end uint64) {
	s := g.slot(seq)
	atomic.StoreUint64(&s[2], wait<<8|uint64(peer))
	atomic.StoreUint64(&s[3], end)
}

// begun is a stream's memory operation.
func (g gpu) begun(off int, id uint64) {
	atomic.StoreUint64((*uint64)(unsafe.Pointer(&g.mem[off])), id)
}

// These tests are set in the year 36 of an uptime, and their GPU's clock is
// ahead of the host's.
const (
	era   = 1 << 60
	ahead = 1 << 40
)

// withGPU makes a recorder with one device and one communicator.
func withGPU(tb testing.TB, stamps, copies int) (*record.Writer, gpu, *record.Reader) {
	tb.Helper()
	w := create(tb, record.Options{RingSlots: 4, ConnSlots: 1, StampSlots: 4096})
	dev, ok := w.AddDevice(record.DeviceEntry{UUID: [16]byte{1, 2}, Ordinal: 3, Name: "NVIDIA H200"}, record.DeviceAnchor{GPU: era + ahead, Mono: era, Err: 1000})
	if !ok {
		tb.Fatal("no device")
	}
	c, _ := w.AddComm(record.CommEntry{ID: 7, Name: "tp", Size: 2, Stamps: stamps, Copies: copies, Device: dev.Index()})
	return w, gpu{w.Memory(), c}, open(tb, w.Path())
}

func TestStamps(t *testing.T) {
	w, g, r := withGPU(t, 1000, 4)
	small := record.Desc{Coll: record.AllReduce, DType: record.Float8E4M3, Op: record.Sum, Algo: record.AlgoDirect, Proto: record.ProtoLL, SMs: 8, Root: -1, Bytes: 512, Stream: 1}
	large := record.Desc{Coll: record.AllGather, DType: record.Float32, Algo: record.AlgoCopyEngine, Root: -1, Bytes: 1 << 30, Flags: record.DescInPlace}
	a, _ := w.AddDesc(small)
	b, _ := w.AddDesc(large)
	if again, ok := w.AddDesc(small); a == 0 || a == b || again != a || !ok {
		t.Fatalf("descriptors %d, %d, %d", a, b, again)
	}
	if _, n := g.comm.StampRange(); n != 1024 {
		t.Fatalf("%d slots", n)
	}

	buf := make([]record.Stamp, 8)
	check := func(when string, started, finished uint64, want ...record.Stamp) record.CommStatus {
		t.Helper()
		got := buf[:r.Stamps(buf)]
		if len(got) != len(want) {
			t.Fatalf("%s: got %+v", when, got)
		}
		for i := range want {
			want[i].Err = got[i].Err
			if got[i] != want[i] {
				t.Errorf("%s:\ngot  %+v\nwant %+v", when, got[i], want[i])
			}
		}
		s := r.Comms(nil)[0]
		if s.Started != started || s.Finished != finished || s.Enqueued != started || s.Stamps != 1024 || s.Copies != 4 {
			t.Errorf("%s: started %d, finished %d, want %d, %d: %+v", when, s.Started, s.Finished, started, finished, s)
		}
		return s
	}
	s := check("at first", 0, 0)
	if s.Open() || s.StartedAt != 0 || s.FinishedAt != 0 {
		t.Errorf("at first: %+v", s)
	}

	g.begin(1, a, era+ahead+1000)
	s = check("running", 1, 0, record.Stamp{Desc: small, Seq: 1, Start: era + 1000, Peer: -1})
	if s.StartedAt != era+1000 || s.Coll != record.AllReduce || s.Bytes != 512 {
		t.Errorf("running: %+v", s)
	}
	check("still running", 1, 0)
	g.end(1, 300, 1, era+ahead+1500)
	s = check("ended", 1, 1, record.Stamp{Desc: small, Seq: 1, Start: era + 1000, End: era + 1500, Wait: 300, Peer: 1})
	if s.FinishedAt != era+1500 {
		t.Errorf("ended: %+v", s)
	}

	off, id, ok := g.comm.CopyQueued(1, b, era+1600)
	if !ok {
		t.Fatal("no slot for a copy")
	}
	check("queued", 1, 1)
	g.begun(off, id)
	s = check("a copy has begun", 2, 1, record.Stamp{Desc: large, Seq: 2, Start: era + 1600, Peer: -1})
	if s.Coll != record.AllGather || s.FinishedAt != era+1500 {
		t.Errorf("a copy has begun: %+v", s)
	}
	g.begin(2, 0, era+ahead+3000)
	g.end(2, 0, 0xff, era+ahead+3100)
	check("the copy is over, though the host has not told", 3, 3)
	g.comm.CopyDone(1, era+ahead+2000, 10, 0, era+ahead+2900)
	s = check("told", 3, 3,
		record.Stamp{Desc: large, Seq: 2, Start: era + 2000, End: era + 2900, Wait: 10, Peer: 0},
		record.Stamp{Desc: record.Desc{Root: -1}, Seq: 3, Start: era + 3000, End: era + 3100, Peer: -1})
	if s.Ops != 3 || s.TotalBytes != 512+1<<30 || s.WaitNs != 310 || s.TransferNs != 200+890+100 || s.OwnNs != 500+100 || s.MaxOwnNs != 500 {
		t.Errorf("sums %+v", s)
	}
	if read, lost, pending := r.StampCount(); read != 3 || lost != 0 || pending != 0 {
		t.Errorf("read %d, lost %d, pending %d", read, lost, pending)
	}

	// Operations on the host count along.
	g.comm.Enqueued(2, era+4000, record.Barrier, 9)
	g.comm.Started(2, era+4000)
	g.comm.Finished(1, era+3500)
	if s = r.Comms(nil)[0]; s.Enqueued != 5 || s.Started != 5 || s.Finished != 4 || s.Coll != record.Barrier || s.StartedAt != era+4000 || s.FinishedAt != era+3500 {
		t.Errorf("a barrier on the host: %+v", s)
	}
	g.comm.Finished(2, era+4500)
	g.begin(3, a, era+ahead+3900)
	if s = r.Comms(nil)[0]; s.Started != 6 || s.Finished != 5 || s.Coll != record.AllReduce || s.StartedAt != era+3900 {
		t.Errorf("beside a barrier: %+v", s)
	}

	devices := r.Devices(nil)
	if len(devices) != 1 || devices[0].Ordinal != 3 || devices[0].Name != "NVIDIA H200" || devices[0].UUID != [16]byte{1, 2} || devices[0].Err < 1000 {
		t.Errorf("devices %+v", devices)
	}
}

// What finds no room is counted, and harmless.
func TestStampTablesFull(t *testing.T) {
	w := create(t, record.Options{StampSlots: 64})
	r := open(t, w.Path())
	early, _ := w.AddComm(record.CommEntry{Name: "no clock", Stamps: 8})
	if _, n := early.StampRange(); n != 0 {
		t.Errorf("%d slots without a device", n)
	}
	w.AddDevice(record.DeviceEntry{}, record.DeviceAnchor{})
	first, _ := w.AddComm(record.CommEntry{Name: "a", Stamps: 32, Copies: 32})
	second, ok := w.AddComm(record.CommEntry{Name: "b", Stamps: 32})
	if _, n := first.StampRange(); n != 32 {
		t.Errorf("%d slots", n)
	}
	if _, n := second.StampRange(); !ok || n != 0 {
		t.Errorf("%d slots in a full table, %v", n, ok)
	}
	if _, _, ok := second.CopyQueued(1, 0, 0); ok {
		t.Error("a copy found a slot")
	}
	second.CopyDone(1, 1, 1, 1, 1)
	for i := range uint64(record.DefaultDescSlots + 9) {
		w.AddDesc(record.Desc{Bytes: i})
	}
	for range record.DefaultDeviceSlots {
		_, ok = w.AddDevice(record.DeviceEntry{}, record.DeviceAnchor{})
	}
	if h := r.Header(); ok || h.DescOverflow != 10 || h.StampOverflow != 2 {
		t.Errorf("a device too many: %v; overflow of %d descriptors, %d rings", ok, h.DescOverflow, h.StampOverflow)
	}

	none := create(t, record.Options{})
	if _, ok := none.AddDesc(record.Desc{}); ok {
		t.Error("a descriptor without a table")
	}
	if _, ok := none.AddDevice(record.DeviceEntry{}, record.DeviceAnchor{}); ok {
		t.Error("a device without a table")
	}
	var off *record.Writer
	dev, _ := off.AddDevice(record.DeviceEntry{}, record.DeviceAnchor{})
	dev.Anchor(1, 2, 3)
	off.AddDesc(record.Desc{})
	comm, _ := off.AddComm(record.CommEntry{Stamps: 8})
	if _, n := comm.StampRange(); n != 0 || off.Memory() != nil || dev.Index() != 0 {
		t.Error("a nil writer has memory")
	}
}

// Own time is what lies outside of operations of any communicator: who waits in
// one does not do something of its own before the next.
func TestStampOwnTime(t *testing.T) {
	w, tp, r := withGPU(t, 8, 0)
	c, _ := w.AddComm(record.CommEntry{ID: 8, Name: "dp", Stamps: 8})
	dp := gpu{w.Memory(), c}
	op := func(g gpu, seq, start, end uint64) {
		g.begin(seq, 0, ahead+era+start)
		g.end(seq, 0, 0xff, ahead+era+end)
	}
	own := func(want ...uint64) {
		t.Helper()
		for r.Stamps(make([]record.Stamp, 3)) == 3 {
		}
		var got []uint64
		for _, s := range r.Comms(nil) {
			got = append(got, s.OwnNs)
		}
		if !slices.Equal(got, want) {
			t.Errorf("own times %v, want %v", got, want)
		}
	}
	op(dp, 1, 100, 200)
	op(tp, 1, 250, 1000)
	op(dp, 2, 1003, 1100)
	op(tp, 2, 1120, 1200)
	own(50+20, 3)
	// The next one of tp runs for long, and dp's comes after.
	tp.begin(3, 0, ahead+era+1300)
	own(70, 3)
	tp.end(3, 0, 0xff, ahead+era+5000)
	op(dp, 3, 5005, 5100)
	own(70+100, 3+5)
}

// Operations of both kinds in any order, told early or late, read often or
// seldom: what is handed over is right and in order, and all are accounted for.
func TestStampAccounting(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		w, err := record.Create(record.Options{Dir: dir, RingSlots: 4, ConnSlots: 1, CommSlots: 1, StampSlots: 64})
		if err != nil {
			t.Fatal(err)
		}
		defer os.Remove(w.Path())
		w.AddDevice(record.DeviceEntry{}, record.DeviceAnchor{GPU: era + ahead, Mono: era})
		c, _ := w.AddComm(record.CommEntry{Stamps: rapid.IntRange(1, 16).Draw(t, "stamps"), Copies: rapid.IntRange(1, 16).Draw(t, "copies")})
		g := gpu{w.Memory(), c}
		r, err := record.Open(w.Path())
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()

		type op struct {
			start, end int64
			copied     uint64 // its number among the copies, 0 for a kernel
		}
		var ops []op
		var kernels, copies, told, now uint64
		now = era
		open := false
		next := uint64(1)
		lossless := true
		t.Repeat(map[string]func(*rapid.T){
			"kernels": func(t *rapid.T) {
				for range rapid.IntRange(1, 20).Draw(t, "n") {
					if open {
						break
					}
					now += 32
					kernels++
					g.begin(kernels, 0, ahead+now)
					now += 32
					ops = append(ops, op{int64(now - 32), int64(now), 0})
					if open = rapid.IntRange(0, 9).Draw(t, "open") == 0; open {
						break
					}
					g.end(kernels, 7, 0xff, ahead+now)
				}
			},
			"end": func(*rapid.T) {
				if open {
					g.end(kernels, 7, 0xff, ahead+now)
				}
				open = false
			},
			"copy": func(*rapid.T) {
				if open {
					return
				}
				copies++
				off, id, ok := c.CopyQueued(copies, 0, int64(now))
				if !ok {
					t.Fatal("no slot")
				}
				now += 32
				g.begun(off, id)
				now += 32
				ops = append(ops, op{int64(now - 32), int64(now), copies})
			},
			"tell": func(*rapid.T) {
				for _, o := range ops {
					if o.copied > told {
						c.CopyDone(o.copied, o.start+ahead, 7, -1, o.end+ahead)
					}
				}
				told = copies
			},
			"": func(t *rapid.T) {
				buf := make([]record.Stamp, rapid.IntRange(0, 40).Draw(t, "room"))
				n := r.Stamps(buf)
				_, lost, pending := r.StampCount()
				_, stamps := c.StampRange()
				if half := uint64(stamps / 2); told < copies && pending+uint64(n) >= half {
					lossless = false // kernels may have been handed over before a copy
				}
				lossless = lossless && lost == 0
				for _, s := range buf[:n] {
					if s.End == 0 {
						if s.Seq > uint64(len(ops)) {
							t.Fatalf("%+v runs, of %d", s, len(ops))
						}
						continue
					}
					if s.Seq < next {
						t.Fatalf("%+v after %d", s, next-1)
					}
					next = s.Seq + 1
					found := false
					for _, o := range ops {
						found = found || o.start == s.Start && o.end == s.End
					}
					if !found || s.Wait != 7 || s.Peer != -1 {
						t.Fatalf("no such operation: %+v", s)
					}
					if o := ops[s.Seq-1]; lossless && told == copies && o.start != s.Start {
						t.Fatalf("operation %d is %+v, got %+v", s.Seq, o, s)
					}
				}
				read, lost, pending := r.StampCount()
				if read+lost+pending != uint64(len(ops)) && len(buf) > 0 {
					t.Fatalf("read %d + lost %d + pending %d of %d", read, lost, pending, len(ops))
				}
				if told == copies && !open && n < len(buf) && pending != 0 {
					t.Fatalf("%d pending though all have ended: %d of room for %d", pending, n, len(buf))
				}
				if s := r.Comms(nil)[0]; s.Started != uint64(len(ops)) || s.Finished+1 < s.Started || open && s.Finished == s.Started {
					t.Fatalf("status %+v of %d, open %v", s, len(ops), open)
				}
			},
		})
	})
}

// A GPU that is quicker than its reader laps it again and again. No stamp is
// ever torn, and those overwritten are counted.
func TestStampsLapped(t *testing.T) {
	const ops = 300_000
	_, g, r := withGPU(t, 16, 0)
	var done atomic.Bool
	go func() {
		for seq := uint64(1); seq <= ops; seq++ {
			g.begin(seq, 0, era+ahead+seq*1000)
			g.end(seq, seq%500, 0xff, era+ahead+seq*1000+seq%500+100)
			if seq%64 == 0 {
				runtime.Gosched()
			}
		}
		done.Store(true)
	}()
	buf := make([]record.Stamp, 8)
	var last uint64
	deadline := time.Now().Add(time.Minute)
	for {
		over := done.Load()
		n := r.Stamps(buf)
		for _, s := range buf[:n] {
			if s.End == 0 {
				if (s.Start-era)%1000 != 0 {
					t.Fatalf("torn: %+v", s)
				}
				continue
			}
			seq := uint64((s.Start - era) / 1000)
			if s.Seq != seq || seq <= last || s.Wait != int64(seq%500) || s.End != s.Start+s.Wait+100 {
				t.Fatalf("torn: %+v after %d", s, last)
			}
			last = seq
		}
		if over && n < len(buf) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the writer does not end")
		}
	}
	read, lost, pending := r.StampCount()
	if read+lost != ops || pending != 0 || last != ops {
		t.Errorf("read %d + lost %d + pending %d of %d; last %d", read, lost, pending, ops, last)
	}
	if lost == 0 {
		t.Log("never lapped")
	}
}

// A late reader that seeks counts what it never could have read as skipped, not lost.
func TestStampsSeek(t *testing.T) {
	_, g, r := withGPU(t, 16, 0)
	for seq := uint64(1); seq <= 100; seq++ {
		g.begin(seq, 0, era+ahead+seq*1000)
		g.end(seq, 0, 0xff, era+ahead+seq*1000+10)
	}
	r.SeekTail(1)
	buf := make([]record.Stamp, 100)
	n := r.Stamps(buf)
	if _, lost, pending := r.StampCount(); n != 16 || buf[0].Seq != 85 || lost != 0 || pending != 0 {
		t.Errorf("%d stamps from %d, lost %d, pending %d", n, buf[0].Seq, lost, pending)
	}
}

func BenchmarkStamps(b *testing.B) {
	_, g, r := withGPU(b, 1024, 256)
	buf := make([]record.Stamp, 256)
	b.ReportAllocs()
	left, seq := 0, uint64(0)
	for b.Loop() {
		if left == 0 {
			b.StopTimer()
			for range len(buf) {
				seq++
				g.begin(seq, 0, era+ahead+seq*1000)
				g.end(seq, 0, 0xff, era+ahead+seq*1000+10)
			}
			b.StartTimer()
			left = r.Stamps(buf)
		}
		left--
	}
}
