package train

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl"
)

// memory is where the vectors lie that a rank communicates: in host memory, where
// the model computes. On a GPU rank all of it has a twin in device memory, at the
// same offsets, on which the operations run.
type memory struct {
	host []float32
	used int

	comm    *ccl.Comm // nil on a CPU rank
	device  *ccl.Memory
	twin    ccl.Buffer
	windows []*ccl.Window
}

// align is where vectors begin, in elements: what a GPU copies best.
const align = 64

// room is how much of the memory a vector of n elements takes.
func room(n int) int { return (n + align - 1) / align * align }

// newMemory makes memory for n elements, a window of each of comms (nil ones left
// out) when device is a GPU; all members call it with the same n.
func newMemory(ctx context.Context, device ccl.Device, n int, comms ...*ccl.Comm) (*memory, error) {
	m := &memory{host: make([]float32, n)}
	if device == ccl.CPU {
		return m, nil
	}
	var err error
	if m.device, err = comms[0].MemAlloc(4 * n); err != nil {
		return nil, err
	}
	m.comm, m.twin = comms[0], m.device.Buffer(ccl.Float32, n)
	for _, c := range comms {
		w, err := c.WindowRegister(ctx, m.device)
		if err != nil {
			return nil, errors.Join(err, m.device.Free())
		}
		m.windows = append(m.windows, w)
	}
	return m, nil
}

// take hands out a zeroed vector of n elements.
func (m *memory) take(n int) []float32 {
	if m.used+n > len(m.host) {
		panic(fmt.Sprintf("train: %d of %d elements of memory used, and %d more wanted", m.used, len(m.host), n))
	}
	v := m.host[m.used:][:n:n]
	m.used += room(n)
	return v
}

// buffer is what operations get for v, which lies in the memory.
func (m *memory) buffer(v []float32) ccl.Buffer {
	if m.device == nil {
		return ccl.Of(v)
	}
	from := int(uintptr(unsafe.Pointer(unsafe.SliceData(v)))-uintptr(unsafe.Pointer(unsafe.SliceData(m.host)))) / 4
	return m.twin.Slice(from, from+len(v))
}

// load brings v to the GPU, store brings it back.
func (m *memory) load(v []float32) error {
	if m.device == nil {
		return nil
	}
	return m.comm.CopyIn(m.buffer(v), ccl.Of(v).Raw())
}

func (m *memory) store(v []float32) error {
	if m.device == nil {
		return nil
	}
	return m.comm.CopyOut(ccl.Of(v).Raw(), m.buffer(v))
}

// deregister ends the windows on all ranks; communicators that have failed end
// theirs when they are closed.
func (m *memory) deregister(ctx context.Context) error {
	var errs []error
	for _, w := range m.windows {
		errs = append(errs, w.Deregister(ctx))
	}
	m.windows = nil
	return errors.Join(errs...)
}

// free ends the device memory, after the windows and the communicators.
func (m *memory) free() error {
	if m == nil || m.device == nil {
		return nil
	}
	return m.device.Free()
}
