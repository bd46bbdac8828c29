package cuda

import (
	"errors"
	"fmt"
	"unsafe"
)

// Ptr is an address as a GPU sees it.
type Ptr uint64

// Alloc takes plain device memory, aligned to 256 bytes at least. Its content
// is undefined. Peers cannot map it: see Create.
func (d *Device) Alloc(bytes uint64) (Ptr, error) {
	var p Ptr
	if rc := d.call(cuMemAlloc, uintptr(unsafe.Pointer(&p)), uintptr(bytes)); rc != 0 {
		return 0, d.fail(cuMemAlloc, fmt.Sprintf("(%d bytes)", bytes), rc)
	}
	return p, nil
}

// Free gives memory of Alloc back, after all work of the GPU that is enqueued.
func (d *Device) Free(p Ptr) error {
	if rc := d.call(cuMemFree, uintptr(p)); rc != 0 {
		return d.fail(cuMemFree, fmt.Sprintf("(%#x)", p), rc)
	}
	return nil
}

// Kind is where memory lies.
type Kind int

// Kinds of memory.
const (
	Unregistered Kind = iota // CUDA does not know it
	Host                     // pinned or registered
	DeviceMemory
)

// PointerInfo is what CUDA knows of an address.
type PointerInfo struct {
	Base   Ptr    // of the allocation or mapping around it
	Size   uint64 // bytes from Base; 0: not known, as of registered host memory
	Kind   Kind
	Device int // ordinal
}

const ( // CUpointer_attribute
	pointerMemoryType    = 2
	pointerDeviceOrdinal = 9
)

// Pointer answers what p points to. An address that CUDA does not know is
// Unregistered, not an error.
func (d *Device) Pointer(p Ptr) (PointerInfo, error) {
	info := PointerInfo{Base: p}
	var kind, ordinal int32
	switch rc := d.call(cuPointerGetAttribute, uintptr(unsafe.Pointer(&kind)), pointerMemoryType, uintptr(p)); rc {
	case 0:
	case codeInvalidValue:
		return info, nil
	default:
		return info, d.fail(cuPointerGetAttribute, fmt.Sprintf("(memory type, %#x)", p), rc)
	}
	info.Kind = DeviceMemory
	if kind == 1 { // CU_MEMORYTYPE_HOST
		info.Kind = Host
	}
	if rc := d.call(cuPointerGetAttribute, uintptr(unsafe.Pointer(&ordinal)), pointerDeviceOrdinal, uintptr(p)); rc != 0 {
		return info, d.fail(cuPointerGetAttribute, fmt.Sprintf("(device, %#x)", p), rc)
	}
	info.Device = int(ordinal)
	var base Ptr
	var size uintptr
	rc := d.call(cuMemGetAddressRange, uintptr(unsafe.Pointer(&base)), uintptr(unsafe.Pointer(&size)), uintptr(p))
	switch {
	case rc == 0:
		info.Base, info.Size = base, uint64(size)
	case info.Kind == DeviceMemory:
		return info, d.fail(cuMemGetAddressRange, fmt.Sprintf("(%#x)", p), rc)
	}
	return info, nil
}

const hostPortableMapped = 3 // PORTABLE | DEVICEMAP, of cuMemHostAlloc and cuMemHostRegister alike

// AllocHost takes pinned memory that all GPUs of the process can reach, at the
// address of its first byte (HostPtr). It is zero, and not Go's to collect.
func (d *Device) AllocHost(bytes int) ([]byte, error) {
	var p unsafe.Pointer
	if rc := d.call(cuMemHostAlloc, uintptr(unsafe.Pointer(&p)), uintptr(bytes), hostPortableMapped); rc != 0 {
		return nil, d.fail(cuMemHostAlloc, fmt.Sprintf("(%d bytes)", bytes), rc)
	}
	mem := unsafe.Slice((*byte)(p), bytes)
	clear(mem)
	return mem, nil
}

// FreeHost gives memory of AllocHost back.
func (d *Device) FreeHost(mem []byte) error {
	if rc := d.call(cuMemFreeHost, uintptr(unsafe.Pointer(unsafe.SliceData(mem)))); rc != 0 {
		return d.fail(cuMemFreeHost, "", rc)
	}
	return nil
}

// HostPtr is where the GPU sees pinned or registered host memory.
func (d *Device) HostPtr(mem []byte) (Ptr, error) {
	var p Ptr
	if rc := d.call(cuMemHostGetDevicePointer, uintptr(unsafe.Pointer(&p)), uintptr(unsafe.Pointer(unsafe.SliceData(mem))), 0); rc != 0 {
		return 0, d.fail(cuMemHostGetDevicePointer, fmt.Sprintf("(%d bytes)", len(mem)), rc)
	}
	return p, nil
}

// RegisterHost pins mem, memory that is not Go's (a mapping of a file in
// /dev/shm, say), and gives the address where this GPU sees it. Several devices
// of the process may register the same mem; it stays pinned until as many have
// called UnregisterHost.
func (d *Device) RegisterHost(mem []byte) (Ptr, error) {
	if len(mem) == 0 {
		return 0, errors.New("cuMemHostRegister: no memory")
	}
	at := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
	bytes := uintptr(len(mem))
	dr := d.driver
	dr.mu.Lock()
	defer dr.mu.Unlock()
	r := dr.registered[at]
	if r == nil {
		owner, err := dr.Device(d.Ordinal)
		if err != nil {
			return 0, err
		}
		if rc := owner.call(cuMemHostRegister, at, bytes, hostPortableMapped); rc != 0 {
			return 0, errors.Join(d.fail(cuMemHostRegister, fmt.Sprintf("(%d bytes)", len(mem)), rc), owner.Close())
		}
		r = &registration{bytes: bytes, owner: owner}
		dr.registered[at] = r
	} else if r.bytes < bytes {
		return 0, fmt.Errorf("cuMemHostRegister(%d bytes) on GPU %d: the first %d bytes are registered by themselves", bytes, d.Ordinal, r.bytes)
	}
	r.users++
	p, err := d.HostPtr(mem)
	if err != nil {
		return 0, errors.Join(err, d.unregister(at, r))
	}
	return p, nil
}

// UnregisterHost ends one RegisterHost of the same mem. The GPU must have
// finished with it.
func (d *Device) UnregisterHost(mem []byte) error {
	at := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
	dr := d.driver
	dr.mu.Lock()
	defer dr.mu.Unlock()
	r := dr.registered[at]
	if r == nil {
		return fmt.Errorf("cuMemHostUnregister(%d bytes) on GPU %d: the memory is not registered", len(mem), d.Ordinal)
	}
	return d.unregister(at, r)
}

func (d *Device) unregister(at uintptr, r *registration) error {
	if r.users--; r.users > 0 {
		return nil
	}
	delete(d.driver.registered, at)
	var err error
	if rc := r.owner.call(cuMemHostUnregister, at); rc != 0 {
		err = d.fail(cuMemHostUnregister, fmt.Sprintf("(%d bytes)", r.bytes), rc)
	}
	return errors.Join(err, r.owner.Close())
}
