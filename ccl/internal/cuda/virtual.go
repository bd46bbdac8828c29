package cuda

import (
	"fmt"
	"unsafe"
)

// Handle is physical memory of a GPU, not yet at any address. Create and Import
// give one reference; mappings hold their own.
type Handle struct {
	dev *Device
	h   uintptr
}

type location struct{ kind, id int32 } // CUmemLocation

const (
	locationDevice   = 1 // CU_MEM_LOCATION_TYPE_DEVICE
	allocationPinned = 1 // CU_MEM_ALLOCATION_TYPE_PINNED
	handlePOSIX      = 1 // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
	accessReadWrite  = 3 // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
)

type allocationProp struct { // CUmemAllocationProp
	kind, handles int32
	location      location
	win32         uintptr
	compression   uint8
	rdma          uint8
	usage         uint16
	_             [4]uint8
}

type accessDesc struct { // CUmemAccessDesc
	location location
	flags    int32
}

func (d *Device) prop() *allocationProp {
	p := &allocationProp{kind: allocationPinned, handles: handlePOSIX, location: location{locationDevice, int32(d.device)}}
	if d.RDMA {
		p.rdma = 1
	}
	return p
}

// Granularity is what sizes and addresses of Create, Reserve and Map are
// multiples of, in bytes.
func (d *Device) Granularity() (uint64, error) {
	const recommended = 1 // CU_MEM_ALLOC_GRANULARITY_RECOMMENDED: the fewest TLB entries
	var n uintptr
	if rc := d.call(cuMemGetAllocationGranularity, uintptr(unsafe.Pointer(&n)), uintptr(unsafe.Pointer(d.prop())), recommended); rc != 0 {
		return 0, d.fail(cuMemGetAllocationGranularity, "", rc)
	}
	return uint64(n), nil
}

// Create takes physical memory that can be exported, bytes a multiple of
// Granularity. NICs are let in where the GPU supports it.
func (d *Device) Create(bytes uint64) (Handle, error) {
	h := Handle{dev: d}
	if rc := d.call(cuMemCreate, uintptr(unsafe.Pointer(&h.h)), uintptr(bytes), uintptr(unsafe.Pointer(d.prop())), 0); rc != 0 {
		return Handle{}, d.fail(cuMemCreate, fmt.Sprintf("(%d bytes)", bytes), rc)
	}
	return h, nil
}

// Export makes a file descriptor that stands for the memory, in this process
// and in those it is sent to. The caller closes it.
func (h Handle) Export() (fd int, err error) {
	var out int32
	if rc := h.dev.call(cuMemExportToShareableHandle, uintptr(unsafe.Pointer(&out)), h.h, handlePOSIX, 0); rc != 0 {
		return -1, h.dev.fail(cuMemExportToShareableHandle, "", rc)
	}
	return int(out), nil
}

// Import takes a reference to the memory that fd, of an Export anywhere on this
// node, stands for. fd stays the caller's.
func (d *Device) Import(fd int) (Handle, error) {
	h := Handle{dev: d}
	// The descriptor itself is passed in the pointer's place.
	if rc := d.call(cuMemImportFromShareableHandle, uintptr(unsafe.Pointer(&h.h)), uintptr(fd), handlePOSIX); rc != 0 {
		return Handle{}, d.fail(cuMemImportFromShareableHandle, "", rc)
	}
	return h, nil
}

// Release ends the reference. The memory lives on while it is mapped or another
// process refers to it.
func (h Handle) Release() error {
	if rc := h.dev.call(cuMemRelease, h.h); rc != 0 {
		return h.dev.fail(cuMemRelease, "", rc)
	}
	return nil
}

// Reserve takes a range of addresses with nothing behind it, of a multiple of
// Granularity; align 0 is the driver's choice.
func (d *Device) Reserve(bytes, align uint64) (Ptr, error) {
	var p Ptr
	if rc := d.call(cuMemAddressReserve, uintptr(unsafe.Pointer(&p)), uintptr(bytes), uintptr(align), 0, 0); rc != 0 {
		return 0, d.fail(cuMemAddressReserve, fmt.Sprintf("(%d bytes)", bytes), rc)
	}
	return p, nil
}

// FreeReserved gives addresses back, all of a Reserve at once, unmapped.
func (d *Device) FreeReserved(p Ptr, bytes uint64) error {
	if rc := d.call(cuMemAddressFree, uintptr(p), uintptr(bytes)); rc != 0 {
		return d.fail(cuMemAddressFree, fmt.Sprintf("(%#x, %d bytes)", p, bytes), rc)
	}
	return nil
}

// Map puts the first bytes of h, whichever GPU it is of, at a reserved address
// and lets this GPU read and write there. Only the whole of h can be mapped on
// today's drivers.
func (d *Device) Map(p Ptr, bytes uint64, h Handle) error {
	if rc := d.call(cuMemMap, uintptr(p), uintptr(bytes), 0, h.h, 0); rc != 0 {
		return d.fail(cuMemMap, fmt.Sprintf("(%#x, %d bytes)", p, bytes), rc)
	}
	access := &accessDesc{location{locationDevice, int32(d.device)}, accessReadWrite}
	if rc := d.call(cuMemSetAccess, uintptr(p), uintptr(bytes), uintptr(unsafe.Pointer(access)), 1); rc != 0 {
		err := d.fail(cuMemSetAccess, fmt.Sprintf("(%#x, %d bytes)", p, bytes), rc)
		d.call(cuMemUnmap, uintptr(p), uintptr(bytes)) // nothing is left behind; the first error is the one to tell
		return err
	}
	return nil
}

// Unmap ends a Map. The GPU must have finished with the memory: unlike Free,
// this does not wait for it.
func (d *Device) Unmap(p Ptr, bytes uint64) error {
	if rc := d.call(cuMemUnmap, uintptr(p), uintptr(bytes)); rc != 0 {
		return d.fail(cuMemUnmap, fmt.Sprintf("(%#x, %d bytes)", p, bytes), rc)
	}
	return nil
}
