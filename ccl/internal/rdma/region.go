package rdma

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
)

// Region is memory that connections send from where it lies. It is registered
// with a device when a connection first sends from it there, and stays so until
// Close. It must not be of Go's heap, whose pages may be given back.
type Region struct {
	addr, end uint64
	buffer    *dmaBuffer // nil: host memory

	mu   sync.Mutex
	mrs  map[*device]*registration
	over bool
}

// registration of a region with a device. One that has failed is not tried again: what
// it lacked, locked memory as a rule, does not come back by itself.
type registration struct {
	began time.Time
	done  chan struct{} // closed when what follows is known
	mr    *verbs.MR
	err   error
}

// KeptFrom is how many bytes at least are sent from where they lie: what is shorter
// is copied.
const KeptFrom = keptFrom

// regions are those of the process, by address.
var regions struct {
	sync.RWMutex
	list  []*Region
	count atomic.Int32
}

// inPlace counts bytes that were sent from where they lie, buffered those of DMA buffers.
var inPlace, buffered atomic.Uint64

// SentInPlace is how many bytes connections of this process have sent from where they
// lay, SentDMABuf how many of them from DMA buffers. What had to be sent again does not
// count twice.
func SentInPlace() uint64 { return inPlace.Load() }

// SentDMABuf is explained with SentInPlace.
func SentDMABuf() uint64 { return buffered.Load() }

// Register makes b a region, until Close. It is an error when a part of b is in one.
func Register(b []byte) (*Region, error) {
	if len(b) == 0 {
		return nil, errors.New("register no memory")
	}
	return enlist(b, nil)
}

func enlist(b []byte, buffer *dmaBuffer) (*Region, error) {
	addr := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
	r := &Region{addr: addr, end: addr + uint64(len(b)), buffer: buffer, mrs: make(map[*device]*registration)}
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
// that does all the same loses its path rather than other memory's content. With an
// error the memory is registered still and must stay mapped; Close may be tried again.
func (r *Region) Close() error {
	// In the list until its registrations are gone: a device that is given back
	// meanwhile finds them there, or it could not be closed.
	r.mu.Lock()
	r.over = true
	devs := slices.Collect(maps.Keys(r.mrs))
	r.mu.Unlock()
	var errs []error
	for _, d := range devs {
		errs = append(errs, r.drop(d))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	regions.Lock()
	defer regions.Unlock()
	if i := slices.Index(regions.list, r); i >= 0 {
		regions.list = slices.Delete(regions.list, i, i+1)
		regions.count.Add(-1)
		return r.buffer.close()
	}
	return nil
}

// drop ends the registration with a device.
func (r *Region) drop(d *device) error {
	r.mu.Lock()
	g := r.mrs[d]
	r.mu.Unlock()
	if g == nil {
		return nil
	}
	mr, err := g.wait(d)
	if errors.Is(err, errStalled) {
		return err
	}
	if err == nil {
		var k calls
		err := k.do("deregister memory from "+d.name, mr.Close)
		if err != nil && d.usable() == nil && !errors.Is(err, verbs.ErrClosed) { // of a lost device: it is gone already
			return err
		}
	}
	r.mu.Lock()
	delete(r.mrs, d)
	r.mu.Unlock()
	return nil
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

// key is what work requests of a device name the region by. The first time it registers
// the memory, which takes long where there is much of it: it waits for that as for any call.
func (r *Region) key(d *device) (uint32, error) {
	r.mu.Lock()
	g := r.mrs[d]
	if g == nil {
		if r.over {
			r.mu.Unlock()
			return 0, errors.New("the memory was freed while it was sent")
		}
		g = &registration{began: time.Now(), done: make(chan struct{})}
		r.mrs[d] = g
		go g.make(r, d)
	}
	r.mu.Unlock()
	mr, err := g.wait(d)
	if err != nil {
		return 0, err
	}
	return mr.LKey, nil
}

// known reports whether the region is registered with a device, or cannot be; asked
// is false when that has yet to be found out.
func (r *Region) known(d *device) (registered, asked bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	g := r.mrs[d]
	if g == nil {
		return false, false
	}
	select {
	case <-g.done:
		return g.err == nil, true
	default:
		return false, true // it is under way: what is sent meanwhile is copied
	}
}

func (g *registration) make(r *Region, d *device) {
	if r.buffer != nil {
		g.mr, g.err = d.pd.RegisterDMABuf(r.buffer.fd, 0, int(r.end-r.addr), r.addr, verbs.LocalWrite)
	} else if g.mr, g.err = d.pd.Register(uintptr(r.addr), int(r.end-r.addr), verbs.LocalWrite); g.err != nil {
		d.refused.Do(func() {
			d.log.Warn("RDMA: memory cannot be registered; what is sent from such memory is copied", "device", d.name, "bytes", r.end-r.addr, "err", g.err)
		})
	}
	close(g.done)
}

// wait is the result, or errStalled when it takes too long.
func (g *registration) wait(d *device) (*verbs.MR, error) {
	select {
	case <-g.done:
		return g.mr, g.err
	default:
	}
	t := time.NewTimer(callFor - time.Since(g.began))
	defer t.Stop()
	select {
	case <-g.done:
		return g.mr, g.err
	case <-t.C:
		return nil, fmt.Errorf("register memory with %s: %w for %v", d.name, errStalled, time.Since(g.began).Round(time.Millisecond))
	}
}

// dropRegions ends all registrations with a device that is given back.
func dropRegions(d *device) {
	regions.RLock()
	list := slices.Clone(regions.list)
	regions.RUnlock()
	for _, r := range list {
		if err := r.drop(d); err != nil {
			d.log.Warn("RDMA: memory stays registered", "device", d.name, "err", err)
		}
	}
}
