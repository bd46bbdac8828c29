package record_test

import (
	"testing"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/record"
)

// BenchmarkHostTells is what the stamps of an operation cost the process where it tells of
// operations itself.
func BenchmarkHostTells(b *testing.B) {
	w, g, _ := withGPU(b, 1024, 256)
	dev, _ := w.AddDevice(record.DeviceEntry{}, record.DeviceAnchor{GPU: era + ahead, Mono: era, Err: 1000})
	dev.Anchor(era+ahead+1e9, era+1e9, 1000)
	g.comm.HostTells()
	b.ReportAllocs()
	for seq := uint64(1); b.Loop(); seq++ {
		g.comm.StampSlot(seq, 3)
		g.begin(seq, 3, era+ahead+seq*1000)
		s, _ := g.comm.HostStamp(seq)
		dev.Mono(s.Start)
		g.end(seq, 0, 0xff, era+ahead+seq*1000+10)
		s, _ = g.comm.HostStamp(seq)
		dev.Mono(s.End)
	}
}

// TestHostTells: where the process tells of operations, what a GPU has stamped of the next
// ones is in the communicator's words before the process says so, and never counts
// twice.
func TestHostTells(t *testing.T) {
	_, g, r := withGPU(t, 32, 32)
	if c := r.Comms(nil)[0]; c.Stamps != 32 || c.Copies != 32 || c.HostStamps != 0 {
		t.Fatalf("%+v", c)
	}
	g.comm.HostTells()
	g.comm.SetState(record.CommJoined)
	type words struct {
		started, finished     uint64
		startedAt, finishedAt int64
	}
	check := func(when string, want words) {
		t.Helper()
		c := r.Comms(nil)[0]
		if got := (words{c.Started, c.Finished, c.StartedAt, c.FinishedAt}); got != want {
			t.Errorf("%s: %+v, want %+v", when, got, want)
		}
		if c.Stamps+c.Copies != 0 || c.HostStamps != 32 || c.Name != "tp" {
			t.Errorf("%s: %+v", when, c)
		}
		if n := r.Stamps(make([]record.Stamp, 8)); n != 0 {
			t.Errorf("%s: %d operations besides those in records", when, n)
		}
	}
	call := func(seq uint64) {
		g.comm.Enqueued(seq, era+int64(seq), record.AllReduce, 8)
		if off, id, ok := g.comm.StampSlot(seq, 3); !ok || id != seq<<16|3 || off != int(uintptr(unsafe.Pointer(g.slot(seq)))-uintptr(unsafe.Pointer(&g.mem[0]))) {
			t.Fatalf("slot of operation %d at %d with %x, %v", seq, off, id, ok)
		}
	}
	for lap := uint64(0); lap < 100; lap += 50 { // every slot has had another owner the second time
		seq, at := lap+1, era+1000*int64(lap)
		before := words{lap, lap, at - 1000, at - 900}
		if lap == 0 {
			before = words{}
		}
		call(seq)
		call(seq + 1)
		check("called", before)
		if _, ok := g.comm.HostStamp(seq); ok {
			t.Errorf("operation %d has a stamp before it has begun", seq)
		}
		g.begin(seq, 3, uint64(at+ahead+100))
		check("begun on the GPU", words{seq, lap, at + 100, before.finishedAt})
		g.comm.Started(seq, at+150)
		check("and said so", words{seq, lap, at + 100, before.finishedAt})
		if s, ok := g.comm.HostStamp(seq); !ok || s != (record.HostStamp{Start: at + ahead + 100, Peer: -1}) {
			t.Errorf("a running operation has %+v, %v", s, ok)
		}
		g.end(seq, 40, 1, uint64(at+ahead+200))
		check("ended on the GPU", words{seq, seq, at + 100, at + 200})
		if s, ok := g.comm.HostStamp(seq); !ok || s != (record.HostStamp{Start: at + ahead + 100, End: at + ahead + 200, Wait: 40, Peer: 1}) {
			t.Errorf("an operation that has ended has %+v, %v", s, ok)
		}
		g.begin(seq+1, 3, uint64(at+ahead+300))
		check("the next one begun on the GPU", words{seq + 1, seq, at + 300, at + 200})
		g.comm.Finished(seq, at+200)
		check("the first one said to have ended", words{seq + 1, seq, at + 300, at + 200})

		// One of host memory, which no GPU stamps, and one behind it, which a GPU has come
		// to before its turn.
		g.end(seq+1, 0, 0xff, uint64(at+ahead+400))
		g.comm.Started(seq+1, at+300)
		g.comm.Finished(seq+1, at+400)
		g.comm.Enqueued(seq+2, at+401, record.AllReduce, 8)
		call(seq + 3)
		g.begin(seq+3, 3, uint64(at+ahead+500))
		check("begun behind one on the host", words{seq + 1, seq + 1, at + 300, at + 400})
		g.comm.Started(seq+2, at+600)
		check("behind a running one on the host", words{seq + 2, seq + 1, at + 600, at + 400})
		g.comm.Finished(seq+2, at+700)
		check("and it has ended", words{seq + 3, seq + 2, at + 500, at + 700})
		g.end(seq+3, 0, 0xff, uint64(at+ahead+800))

		// The rest of the lap, by the host alone.
		end := lap + 50
		at = era + 1000*int64(end)
		g.comm.Enqueued(end, 0, record.AllReduce, 8)
		g.comm.Started(end, at-1000)
		g.comm.Finished(end, at-900)
	}
	call(101)
	g.begin(101, 3, uint64(era+ahead+200_000))
	g.comm.SetState(record.CommAborted)
	check("aborted", words{100, 100, era + 99_000, era + 99_100})
}
