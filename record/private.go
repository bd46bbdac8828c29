package record

import (
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"syscall"
	"unsafe"
)

// PrivateStamps gives stamps memory of the process's own, instead of the file's stamp
// table: a GPU can be given access to any such memory, but to a file's only where the
// file system is one in memory. The result takes the place of Memory for GPUs, and
// StampRange and its like count from its beginning, as they do from Memory's. Call it
// before the communicators whose operations are stamped there; more calls return the
// same. Somebody then calls CollectStamps, often: what a process has not collected when
// it dies is lost.
func (w *Writer) PrivateStamps() ([]byte, error) {
	w.tables.Lock()
	defer w.tables.Unlock()
	if at := w.private.Load(); at != nil {
		return *at, nil
	}
	size := (int(w.geo.stampAt()+uint64(w.geo.stamps)*StampEntrySize) + os.Getpagesize() - 1) &^ (os.Getpagesize() - 1)
	mem, err := syscall.Mmap(-1, 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes for stamps: %w", size, err)
	}
	w.private.Store(&mem)
	runtime.AddCleanup(w, func(mem []byte) { _ = syscall.Munmap(mem) }, mem)
	return mem, nil
}

// stamp is slot i of the stamp table, where GPUs find it.
func (w *Writer) stamp(i uint64) *diskStamp {
	mem := w.mem
	if at := w.private.Load(); at != nil {
		mem = *at
	}
	return (*diskStamp)(unsafe.Pointer(&mem[w.stampOffset(i)]))
}

func (w *Writer) stampOffset(i uint64) uint64 { return w.geo.stampAt() + i*StampEntrySize }

// CollectStamps copies to the file what GPUs have stamped in PrivateStamps since. There
// is nothing to do without such memory.
func (w *Writer) CollectStamps() {
	if w == nil || w.private.Load() == nil {
		return
	}
	w.tables.Lock()
	defer w.tables.Unlock()
	for i := range atomic.LoadUint64(&w.hdr.stampUsed) {
		collect((*diskStamp)(unsafe.Pointer(&w.mem[w.stampOffset(i)])), w.stamp(i))
	}
}

// collect brings dst up to date with src, so that a reader never sees words of two
// operations as one: a slot goes to a younger operation without times, and its start
// comes last.
func collect(dst, src *diskStamp) {
	now := func() diskStamp {
		return diskStamp{id: atomic.LoadUint64(&src.id), start: atomic.LoadUint64(&src.start), arrived: atomic.LoadUint64(&src.arrived), end: atomic.LoadUint64(&src.end)}
	}
	s := now()
	if s == *dst {
		return // who has the lock alone writes to dst
	}
	if now() != s {
		return // it is being stamped: the next pass will see
	}
	if s.end < s.start {
		s.end, s.arrived = 0, 0 // of the slot's former operation
	}
	if dst.id != s.id {
		atomic.StoreUint64(&dst.start, 0)
		atomic.StoreUint64(&dst.end, 0)
		atomic.StoreUint64(&dst.id, s.id)
	}
	atomic.StoreUint64(&dst.arrived, s.arrived)
	atomic.StoreUint64(&dst.end, s.end)
	atomic.StoreUint64(&dst.start, s.start)
}
