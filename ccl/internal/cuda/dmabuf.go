package cuda

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Exported is memory of a GPU that NICs can be given, as a DMA buffer.
type Exported struct {
	Ptr   Ptr
	Bytes uint64
	FD    int // of the DMA buffer, which begins at Ptr

	dev    *Device
	mapped bool
}

const rangeDMABuf = 1 // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD

// AllocExported takes memory of at least so many bytes that is a DMA buffer from its first
// byte on. ErrNotSupported where the GPU, or its driver, has none.
func (d *Device) AllocExported(bytes uint64) (_ *Exported, err error) {
	for _, need := range []struct {
		has  bool
		what string
	}{
		{d.GPUDirect, "no NIC may read its memory (GPU_DIRECT_RDMA_SUPPORTED is 0)"},
		{d.RDMA, "no NIC may read mapped memory (GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED is 0)"},
		{d.DMABuf, "its driver exports no DMA buffers (DMA_BUF_SUPPORTED is 0): they need the open kernel modules"},
		{d.driver.fn[cuMemGetHandleForAddressRange] != 0, "its driver has no " + symbols[cuMemGetHandleForAddressRange]},
	} {
		if !need.has {
			return nil, fmt.Errorf("GPU %d: %w: %s", d.Ordinal, ErrNotSupported, need.what)
		}
	}
	unit, err := d.Granularity()
	if err != nil {
		return nil, err
	}
	e := &Exported{Bytes: (bytes + unit - 1) / unit * unit, FD: -1, dev: d}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.Close())
		}
	}()
	if e.Ptr, err = d.Reserve(e.Bytes, 0); err != nil {
		return nil, err
	}
	h, err := d.Create(e.Bytes)
	if err != nil {
		return nil, err
	}
	err = d.Map(e.Ptr, e.Bytes, h)
	e.mapped = err == nil
	if err = errors.Join(err, h.Release()); err != nil { // the mapping holds it
		return nil, err
	}
	fd := int32(-1)
	if rc := d.call(cuMemGetHandleForAddressRange, uintptr(unsafe.Pointer(&fd)), uintptr(e.Ptr), uintptr(e.Bytes), rangeDMABuf, 0); rc != 0 {
		return nil, d.fail(cuMemGetHandleForAddressRange, fmt.Sprintf("(%#x, %d bytes)", e.Ptr, e.Bytes), rc)
	}
	e.FD = int(fd)
	return e, nil
}

// Close gives the memory back; GPU and NICs must have finished with it.
func (e *Exported) Close() error {
	var errs []error
	if e.FD >= 0 {
		errs = append(errs, unix.Close(e.FD))
	}
	if e.mapped {
		errs = append(errs, e.dev.Unmap(e.Ptr, e.Bytes))
	}
	if e.Ptr != 0 {
		errs = append(errs, e.dev.FreeReserved(e.Ptr, e.Bytes))
	}
	return errors.Join(errs...)
}
