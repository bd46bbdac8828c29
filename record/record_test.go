package record_test

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/record"
)

func TestRoundTrip(t *testing.T) {
	w, err := record.Create(record.Options{Dir: t.TempDir(), RingSlots: 16, Identity: record.Identity{Job: "j", Node: "n", Rank: 3}})
	if err != nil {
		t.Fatal(err)
	}
	in := record.Record{Mono: record.Now(), Kind: record.KindEnqueue, Comm: 1, Seq: 9, Coll: record.AllReduce, Bytes: 77, Root: -1}
	w.Append(&in)
	r, err := record.Open(w.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	dst := make([]record.Record, 8)
	if n := r.Next(dst); n != 1 || dst[0] != in {
		t.Fatalf("got %d %+v, want %+v", n, dst[0], in)
	}
	if !r.Alive() {
		t.Error("not alive")
	}
}

func BenchmarkAppend(b *testing.B) {
	w, err := record.Create(record.Options{Dir: b.TempDir()})
	if err != nil {
		b.Fatal(err)
	}
	r := record.Record{Kind: record.KindStart, Seq: 1, Coll: record.AllReduce}
	b.ReportAllocs()
	for b.Loop() {
		r.Mono++
		w.Append(&r)
	}
}

func BenchmarkNow(b *testing.B) {
	for b.Loop() {
		record.Now()
	}
}
