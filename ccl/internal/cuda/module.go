package cuda

import (
	"fmt"
	"strings"
	"unsafe"
)

// Module is compiled code on a device.
type Module struct {
	dev *Device
	h   uintptr
}

// Func is a kernel, valid until its module is unloaded.
type Func struct {
	Name string
	h    uintptr
}

const ( // CUjit_option
	jitErrorLogBuffer     = 5
	jitErrorLogBufferSize = 6
)

// Load compiles PTX (or takes a cubin) for the device. When the compiler
// refuses it, the error ends with the tail of its log.
func (d *Device) Load(ptx []byte) (*Module, error) {
	image := append(append(make([]byte, 0, len(ptx)+1), ptx...), 0) // PTX ends with NUL
	log := make([]byte, 8192)
	options := [2]int32{jitErrorLogBuffer, jitErrorLogBufferSize}
	// A value that is an integer is passed in the pointer's place.
	values := [2]uintptr{uintptr(unsafe.Pointer(unsafe.SliceData(log))), uintptr(len(log))}
	m := &Module{dev: d}
	rc := d.call(cuModuleLoadDataEx, uintptr(unsafe.Pointer(&m.h)), uintptr(unsafe.Pointer(unsafe.SliceData(image))),
		uintptr(len(options)), uintptr(unsafe.Pointer(&options)), uintptr(unsafe.Pointer(&values)),
		uintptr(unsafe.Pointer(unsafe.SliceData(log)))) // the last is no argument: it keeps log where values points
	if rc != 0 {
		err := d.fail(cuModuleLoadDataEx, fmt.Sprintf("(%d bytes)", len(ptx)), rc)
		if said := strings.TrimSpace(text(log)); said != "" {
			err = fmt.Errorf("%w: %s", err, said[max(0, len(said)-1000):])
		}
		return nil, err
	}
	return m, nil
}

// Func finds a kernel by its name; ErrNotFound when there is none.
func (m *Module) Func(name string) (Func, error) {
	f := Func{Name: name}
	z := append([]byte(name), 0)
	if rc := m.dev.call(cuModuleGetFunction, uintptr(unsafe.Pointer(&f.h)), m.h, uintptr(unsafe.Pointer(unsafe.SliceData(z)))); rc != 0 {
		return Func{}, m.dev.fail(cuModuleGetFunction, "("+name+")", rc)
	}
	return f, nil
}

// Unload frees the code. No kernel of the module may be running.
func (m *Module) Unload() error {
	if rc := m.dev.call(cuModuleUnload, m.h); rc != 0 {
		return m.dev.fail(cuModuleUnload, "", rc)
	}
	return nil
}

const funcMaxDynamicShared = 8 // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

// SetFuncShared lets a kernel use up to so many bytes of dynamic shared memory;
// without it the limit is 48 KiB.
func (d *Device) SetFuncShared(f Func, bytes int) error {
	if rc := d.call(cuFuncSetAttribute, f.h, funcMaxDynamicShared, uintptr(bytes)); rc != 0 {
		return d.fail(cuFuncSetAttribute, fmt.Sprintf("(%s, dynamic shared memory %d bytes)", f.Name, bytes), rc)
	}
	return nil
}

// FuncInfo is what the compiler made of a kernel.
type FuncInfo struct {
	MaxThreads int // of a block
	Shared     int // bytes of static shared memory of a block
	Local      int // bytes of spilled registers and arrays of a thread
	Registers  int // of a thread
}

// FuncInfo answers what a kernel takes.
func (d *Device) FuncInfo(f Func) (FuncInfo, error) {
	var info FuncInfo
	for attribute, to := range map[uintptr]*int{0: &info.MaxThreads, 1: &info.Shared, 3: &info.Local, 4: &info.Registers} {
		var v int32
		if rc := d.call(cuFuncGetAttribute, uintptr(unsafe.Pointer(&v)), attribute, f.h); rc != 0 {
			return info, d.fail(cuFuncGetAttribute, fmt.Sprintf("(%d, %s)", attribute, f.Name), rc)
		}
		*to = int(v)
	}
	return info, nil
}

// Occupancy is how many blocks of so many threads, with so many bytes of dynamic
// shared memory, run on one SM at a time.
func (d *Device) Occupancy(f Func, threads, shared int) (blocks int, err error) {
	var n int32
	if rc := d.call(cuOccupancyMaxActiveBlocksPerMultiprocessor, uintptr(unsafe.Pointer(&n)), f.h, uintptr(threads), uintptr(shared)); rc != 0 {
		return 0, d.fail(cuOccupancyMaxActiveBlocksPerMultiprocessor, fmt.Sprintf("(%s, %d threads, %d bytes)", f.Name, threads, shared), rc)
	}
	return int(n), nil
}
