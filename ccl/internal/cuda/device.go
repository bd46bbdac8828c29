package cuda

import (
	"bytes"
	"fmt"
	"unsafe"
)

// Device is a GPU and its primary context, which the process's other users of
// CUDA share. Safe for concurrent use, except Close. What belongs to a Device
// is closed before it.
type Device struct {
	Ordinal      int    // in this process
	Name         string // "NVIDIA H200"
	UUID         string // GPU-…, as NVML and nvidia-smi write it
	PCIBus       string // domain:bus:device.function
	Major, Minor int    // compute capability
	SMs          int
	CopyEngines  int
	HandlePOSIX  bool // memory can be exported as a file descriptor
	StreamMemOps bool // streams can write and wait for words of memory
	RDMA         bool // NICs can be let into memory of Create
	GPUDirect    bool // and into the GPU's at all
	DMABuf       bool // memory can be exported as a DMA buffer

	driver *Driver
	device uintptr // CUdevice
	ctx    uintptr // 0: closed
}

const ( // CUdevice_attribute
	attrMultiprocessors = 16
	attrCopyEngines     = 40
	attrMajor           = 75
	attrMinor           = 76
	attrVMM             = 102
	attrHandlePOSIX     = 103
	attrRDMAWithVMM     = 110
	attrGPUDirectRDMA   = 116
	attrDMABuf          = 124
	// 64-bit memory operations of the second version of the API. It has no
	// attribute for 32-bit ones; the first version's asks whether a module
	// parameter of old drivers is set.
	attrStreamMemOps = 122
)

// attrP2PAtomics is a CUdevice_P2PAttribute: whether a link carries all atomic operations.
const attrP2PAtomics = 3

// Device opens GPU ordinal, from 0, and retains its primary context until Close.
// Each call gives a Device of its own.
func (d *Driver) Device(ordinal int) (*Device, error) {
	if ordinal < 0 || ordinal >= d.count {
		return nil, fmt.Errorf("GPU %d: this process sees %d GPUs, numbered from 0", ordinal, d.count)
	}
	v := &Device{Ordinal: ordinal, driver: d}
	var dev int32
	if rc := d.call(cuDeviceGet, uintptr(unsafe.Pointer(&dev)), uintptr(ordinal)); rc != 0 {
		return nil, v.fail(cuDeviceGet, "", rc)
	}
	v.device = uintptr(dev)
	var name [256]byte
	if rc := d.call(cuDeviceGetName, uintptr(unsafe.Pointer(&name)), uintptr(len(name)), v.device); rc != 0 {
		return nil, v.fail(cuDeviceGetName, "", rc)
	}
	v.Name = text(name[:])
	var err error
	if v.PCIBus, err = d.busID(v.device, ordinal); err != nil {
		return nil, err
	}
	var id [16]byte
	if rc := d.call(cuDeviceGetUUID, uintptr(unsafe.Pointer(&id)), v.device); rc != 0 {
		return nil, v.fail(cuDeviceGetUUID, "", rc)
	}
	v.UUID = fmt.Sprintf("GPU-%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
	var vmm, posix, memOps, rdma, direct, dmaBuf int
	for _, a := range []struct {
		attribute uintptr
		to        *int
	}{
		{attrMajor, &v.Major}, {attrMinor, &v.Minor}, {attrMultiprocessors, &v.SMs}, {attrCopyEngines, &v.CopyEngines},
		{attrVMM, &vmm}, {attrHandlePOSIX, &posix}, {attrStreamMemOps, &memOps}, {attrRDMAWithVMM, &rdma},
		{attrGPUDirectRDMA, &direct}, {attrDMABuf, &dmaBuf},
	} {
		var value int32
		if rc := d.call(cuDeviceGetAttribute, uintptr(unsafe.Pointer(&value)), a.attribute, v.device); rc != 0 {
			return nil, v.fail(cuDeviceGetAttribute, fmt.Sprintf("(%d)", a.attribute), rc)
		}
		*a.to = int(value)
	}
	v.HandlePOSIX = vmm != 0 && posix != 0
	v.StreamMemOps = memOps != 0
	v.RDMA = rdma != 0
	v.GPUDirect, v.DMABuf = direct != 0, dmaBuf != 0
	if rc := d.call(cuDevicePrimaryCtxRetain, uintptr(unsafe.Pointer(&v.ctx)), v.device); rc != 0 {
		return nil, v.fail(cuDevicePrimaryCtxRetain, "", rc)
	}
	return v, nil
}

// Close releases the primary context; the last release in the process destroys
// it with all that it holds. A second Close does nothing.
func (d *Device) Close() error {
	if d.ctx == 0 {
		return nil
	}
	d.ctx = 0
	if rc := d.driver.call(cuDevicePrimaryCtxRelease, d.device); rc != 0 {
		return d.fail(cuDevicePrimaryCtxRelease, "", rc)
	}
	return nil
}

// Driver is what the device was opened from.
func (d *Device) Driver() *Driver { return d.driver }

// Synchronize waits for everything enqueued on the GPU by this process. Nothing
// bounds it; Stream.Wait takes a context.
func (d *Device) Synchronize() error {
	if rc := d.call(cuCtxSynchronize); rc != 0 {
		return d.fail(cuCtxSynchronize, "", rc)
	}
	return nil
}

// CanAccess tells whether kernels of d can load from and store to the memory of the
// GPU at a PCI bus id. known is false where this process does not see that GPU.
func (d *Device) CanAccess(bus string) (can, known bool, err error) {
	if bus == d.PCIBus {
		return true, true, nil
	}
	dev, ordinal, err := d.find(bus)
	if err != nil || ordinal < 0 {
		return false, false, err
	}
	var answer int32
	if rc := d.driver.call(cuDeviceCanAccessPeer, uintptr(unsafe.Pointer(&answer)), d.device, dev); rc != 0 {
		return false, false, d.fail(cuDeviceCanAccessPeer, fmt.Sprintf("(GPU %d)", ordinal), rc)
	}
	return answer != 0, true, nil
}

// Linked tells whether NVLink joins d to the GPU at a PCI bus id, which is another one. The driver
// answers another question, whether the link carries all atomic operations: NVLink does, and PCIe
// carries some of them at most. Of a GPU that this process does not see NVML is asked.
func (d *Device) Linked(bus string) (bool, error) {
	dev, ordinal, err := d.find(bus)
	if err != nil {
		return false, err
	}
	if ordinal < 0 {
		n, err := openNVML()
		var linked bool
		if err == nil {
			linked, err = n.linked(d.PCIBus, bus)
		}
		if err != nil {
			return false, fmt.Errorf("the process of one does not see the other (CUDA_VISIBLE_DEVICES), and NVML cannot tell: %w", err)
		}
		return linked, nil
	}
	var answer int32
	if rc := d.driver.call(cuDeviceGetP2PAttribute, uintptr(unsafe.Pointer(&answer)), attrP2PAtomics, d.device, dev); rc != 0 {
		return false, d.fail(cuDeviceGetP2PAttribute, fmt.Sprintf("(%d, GPU %d)", attrP2PAtomics, ordinal), rc)
	}
	return answer != 0, nil
}

// find looks for the GPU at a PCI bus id among those that this process sees; ordinal is -1 where
// it is none of them.
func (d *Device) find(bus string) (dev uintptr, ordinal int, err error) {
	for ordinal := range d.driver.count {
		var dev int32
		if rc := d.driver.call(cuDeviceGet, uintptr(unsafe.Pointer(&dev)), uintptr(ordinal)); rc != 0 {
			return 0, -1, d.fail(cuDeviceGet, fmt.Sprintf("(%d)", ordinal), rc)
		}
		at, err := d.driver.busID(uintptr(dev), ordinal)
		if err != nil {
			return 0, -1, err
		}
		if at == bus {
			return uintptr(dev), ordinal, nil
		}
	}
	return 0, -1, nil
}

// busID is where on PCIe a GPU is; ordinal is for the error.
func (d *Driver) busID(device uintptr, ordinal int) (string, error) {
	var bus [32]byte
	if rc := d.call(cuDeviceGetPCIBusID, uintptr(unsafe.Pointer(&bus)), uintptr(len(bus)), device); rc != 0 {
		return "", d.fail(cuDeviceGetPCIBusID, "", rc, ordinal)
	}
	return text(bus[:]), nil
}

// call calls p in the device's context.
//
//go:uintptrescapes
func (d *Device) call(p proc, args ...uintptr) int {
	if d.ctx == 0 {
		return codeClosed
	}
	return call(d.driver.fn[p], d.ctx, args...)
}

// enqueue is call for up to four numbers and addresses that are not Go's.
func (d *Device) enqueue(p proc, a, b, c, e uintptr) int {
	if d.ctx == 0 {
		return codeClosed
	}
	return enqueue(d.driver.fn[p], d.ctx, a, b, c, e)
}

func (d *Device) fail(p proc, args string, code int) error {
	if code == codeClosed {
		return fmt.Errorf("%s%s on GPU %d: the device is %w", symbols[p], args, d.Ordinal, ErrClosed)
	}
	return d.driver.fail(p, args, code, d.Ordinal)
}

// codeClosed is no CUresult: the call was not made.
const codeClosed = -1

func text(b []byte) string {
	b, _, _ = bytes.Cut(b, []byte{0})
	return string(b)
}
