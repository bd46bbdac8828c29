package rdma

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
)

// Region is memory that connections send from where it lies. It is registered
// with a device when a connection first sends from it there, and stays so until
// Close. It must not be of Go's heap, whose pages may be given back.
type Region struct {
	addr, end uint64

	mu   sync.Mutex
	mrs  map[*device]*verbs.MR
	over bool
}

// regions are those of the process, by address.
var regions struct {
	sync.RWMutex
	list  []*Region
	count atomic.Int32
}

// Register makes b a region, until Close. It is an error when a part of b is in one.
func Register(b []byte) (*Region, error) {
	if len(b) == 0 {
		return nil, errors.New("register no memory")
	}
	addr := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
	r := &Region{addr: addr, end: addr + uint64(len(b)), mrs: make(map[*device]*verbs.MR)}
	regions.Lock()
	defer regions.Unlock()
	i, _ := slices.BinarySearchFunc(regions.list, r.end, func(o *Region, end uint64) int {
		if o.addr < end {
			return -1
		}
		return 1
	})
	if i > 0 && regions.list[i-1].end > r.addr {
		return nil, fmt.Errorf("register %d bytes at %#x: a part is registered already", len(b), addr)
	}
	regions.list = slices.Insert(regions.list, i, r)
	regions.count.Add(1)
	return r, nil
}

// Close ends the region and its registrations. No operation may be using it; one
// that does all the same loses its path rather than other memory's content.
func (r *Region) Close() error {
	// In the list until its registrations are gone: a device that is given back
	// meanwhile finds them there, or it could not be closed.
	r.mu.Lock()
	r.over = true
	var errs []error
	for d, m := range r.mrs {
		errs = append(errs, m.Close())
		delete(r.mrs, d)
	}
	r.mu.Unlock()
	regions.Lock()
	defer regions.Unlock()
	if i := slices.Index(regions.list, r); i >= 0 {
		regions.list = slices.Delete(regions.list, i, i+1)
		regions.count.Add(-1)
	}
	return errors.Join(errs...)
}

// regionOf is the region that all of b lies in, nil when there is none.
func regionOf(b []byte) *Region {
	if regions.count.Load() == 0 || len(b) == 0 {
		return nil
	}
	addr := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
	regions.RLock()
	defer regions.RUnlock()
	i, found := slices.BinarySearchFunc(regions.list, addr, func(o *Region, a uint64) int {
		switch {
		case o.end <= a:
			return -1
		case o.addr > a:
			return 1
		}
		return 0
	})
	if !found || regions.list[i].end < addr+uint64(len(b)) {
		return nil
	}
	return regions.list[i]
}

// key is what work requests of a device name the region by.
func (r *Region) key(d *device) (uint32, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if m := r.mrs[d]; m != nil {
		return m.LKey, nil
	}
	if r.over {
		return 0, errors.New("the memory was freed while it was sent")
	}
	m, err := d.pd.Register(uintptr(r.addr), int(r.end-r.addr), verbs.LocalWrite)
	if err != nil {
		return 0, err
	}
	r.mrs[d] = m
	return m.LKey, nil
}

// dropRegions ends all registrations with a device that is given back.
func dropRegions(d *device) {
	regions.RLock()
	defer regions.RUnlock()
	for _, r := range regions.list {
		r.mu.Lock()
		if m := r.mrs[d]; m != nil {
			m.Close() // of a lost device: it is gone already
			delete(r.mrs, d)
		}
		r.mu.Unlock()
	}
}
