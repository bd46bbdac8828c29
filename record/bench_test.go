package record_test

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/record"
)

func TestNoAllocations(t *testing.T) {
	w := create(t, record.Options{RingSlots: 64})
	comm, _ := w.AddComm(record.CommEntry{Name: "c"})
	conn, _ := w.AddConn(record.ConnEntry{Name: "c"})
	r := open(t, w.Path())
	rec := record.Record{Kind: record.KindWindow}
	buf := make([]record.Record, 8)
	comms, conns := make([]record.CommStatus, 0, 4), make([]record.ConnStatus, 0, 4)
	if n := testing.AllocsPerRun(100, func() {
		w.Append(&rec)
		comm.Enqueued(1, 1, record.AllReduce, 1)
		conn.Posted(1, 1)
		r.Next(buf)
		comms, conns = r.Comms(comms[:0]), r.Conns(conns[:0])
		r.Header()
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkAppend(b *testing.B) {
	for kind := record.KindEnqueue; kind <= record.KindWhole; kind++ {
		b.Run(kind.String(), func(b *testing.B) {
			w := create(b, record.Options{})
			r := record.Record{Kind: kind, Seq: 1, Coll: record.AllReduce}
			b.ReportAllocs()
			for b.Loop() {
				r.Mono++
				w.Append(&r)
			}
		})
	}
	b.Run("parallel", func(b *testing.B) {
		w := create(b, record.Options{})
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			r := record.Record{Kind: record.KindStart, Seq: 1}
			for pb.Next() {
				w.Append(&r)
			}
		})
	})
}

func BenchmarkNext(b *testing.B) {
	w := create(b, record.Options{})
	r := open(b, w.Path())
	rec := record.Record{Kind: record.KindStart, Seq: 1}
	buf := make([]record.Record, 256)
	b.ReportAllocs()
	left := 0
	for b.Loop() {
		if left == 0 {
			b.StopTimer()
			for range len(buf) {
				w.Append(&rec)
			}
			b.StartTimer()
			left = r.Next(buf)
		}
		left--
	}
}

func BenchmarkLiveWords(b *testing.B) {
	w := create(b, record.Options{})
	comm, _ := w.AddComm(record.CommEntry{})
	conn, _ := w.AddConn(record.ConnEntry{})
	b.Run("comm", func(b *testing.B) {
		for i := uint64(0); b.Loop(); i++ {
			comm.Enqueued(i, int64(i), record.AllReduce, 1)
			comm.Started(i, int64(i))
			comm.Finished(i, int64(i))
			comm.AddPhases(1, 1, 1, 1)
		}
	})
	b.Run("conn", func(b *testing.B) {
		for i := uint64(0); b.Loop(); i++ {
			conn.Posted(i, int64(i))
			conn.Completed(i, int64(i))
		}
	})
}

func BenchmarkNow(b *testing.B) {
	for b.Loop() {
		record.Now()
	}
}
