package ccl

import (
	"fmt"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/rdma"
	"golang.org/x/sys/unix"
)

// hostMemory is a CPU rank's Memory. It is not Go's: a NIC that reads it must find
// the same pages for as long as it is registered.
type hostMemory struct {
	b      []byte
	region *rdma.Region
}

func allocHost(n int) (*hostMemory, error) {
	page := unix.Getpagesize()
	b, err := unix.Mmap(-1, 0, (n+page-1)&^(page-1), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", n, err)
	}
	// A forked child must not share the pages that the NIC reads. Huge pages, where the host
	// has some, are fewer to register.
	_ = unix.Madvise(b, unix.MADV_DONTFORK)
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
	r, err := rdma.Register(b)
	if err != nil {
		_ = unix.Munmap(b)
		return nil, err
	}
	return &hostMemory{b, r}, nil
}

func (h *hostMemory) address() uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(h.b))) }

func (h *hostMemory) free() error {
	if err := h.region.Close(); err != nil {
		return err // the NIC may still read it: it stays mapped
	}
	return unix.Munmap(h.b)
}
