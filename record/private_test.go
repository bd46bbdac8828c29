package record_test

import (
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/record"
)

// TestPrivateStamps: what a GPU stamps in memory of the process's own is in the file
// once it is collected, also when slots are used again.
func TestPrivateStamps(t *testing.T) {
	w, err := record.Create(record.Options{Dir: t.TempDir(), StampSlots: 64})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	mem, err := w.PrivateStamps()
	if err != nil {
		t.Fatal(err)
	}
	if again, _ := w.PrivateStamps(); &again[0] != &mem[0] {
		t.Error("another piece of memory the second time")
	}
	dev, _ := w.AddDevice(record.DeviceEntry{Name: "GPU"}, record.DeviceAnchor{GPU: 1, Mono: 1})
	c, ok := w.AddComm(record.CommEntry{ID: 7, Name: "dp", Size: 2, State: record.CommJoined, Device: dev.Index(), Stamps: 8})
	if !ok {
		t.Fatal("no entry")
	}
	desc, _ := w.AddDesc(record.Desc{Coll: record.AllReduce, Bytes: 64, Root: -1})
	r, err := record.Open(w.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	off, n := c.StampRange()
	word := func(seq uint64, i int) *uint64 {
		return (*uint64)(unsafe.Pointer(&mem[off+int(seq)%n*record.StampEntrySize+8*i]))
	}
	stamps := make([]record.Stamp, 16)
	for seq := uint64(1); seq <= 40; seq++ {
		start := seq * 1000
		atomic.StoreUint64(word(seq, 0), seq<<16|uint64(desc))
		atomic.StoreUint64(word(seq, 1), start)
		w.CollectStamps() // the second half is the slot's former operation's
		if got := r.Stamps(stamps); got != 1 || stamps[0].Seq != seq || stamps[0].End != 0 {
			t.Fatalf("operation %d runs: %d stamps, %+v", seq, got, stamps[0])
		}
		atomic.StoreUint64(word(seq, 2), 5<<8|1)
		atomic.StoreUint64(word(seq, 3), start+10)
		w.CollectStamps()
		if got := r.Stamps(stamps); got != 1 || stamps[0].Seq != seq || stamps[0].End-stamps[0].Start != 10 {
			t.Fatalf("operation %d has ended: %d stamps, %+v", seq, got, stamps[0])
		}
	}
	if read, lost, _ := r.StampCount(); read != 40 || lost != 0 {
		t.Errorf("%d read, %d lost", read, lost)
	}
}
