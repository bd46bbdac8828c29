package cuda

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"unsafe"
)

// NVML is asked what the driver cannot tell of GPUs that this process does not see: it sees all GPUs
// of the machine or container, whatever CUDA_VISIBLE_DEVICES says. It comes with the driver, and is
// called as that is: for two questions go-nvml would be a dependency of every program over ccl.
type nvml struct{ handle, status uintptr }

const nvmlName = "libnvidia-ml.so.1"

// openNVML loads and initializes NVML once for the process, and for good: only who asks pays for it.
var openNVML = sync.OnceValues(func() (*nvml, error) {
	paths := []string{nvmlName, "/usr/local/nvidia/lib64/" + nvmlName}
	if p := os.Getenv(LibraryEnv); p != "" {
		paths = []string{filepath.Join(filepath.Dir(p), nvmlName)} // of that driver
	}
	var failed error
	for _, p := range paths {
		lookup, err := open(p)
		if err != nil {
			failed = fmt.Errorf("cannot load %s: %w", p, err)
			continue
		}
		n := &nvml{lookup("nvmlDeviceGetHandleByPciBusId_v2"), lookup("nvmlDeviceGetP2PStatus")}
		start := lookup("nvmlInit_v2")
		if start == 0 || n.handle == 0 || n.status == 0 {
			return nil, fmt.Errorf("%s is too old", p)
		}
		if rc := call(start, 0); rc != 0 {
			return nil, fmt.Errorf("nvmlInit: error %d", rc)
		}
		return n, nil
	}
	return nil, failed
})

const nvmlP2PLink = 2 // NVML_P2P_CAPS_INDEX_NVLINK

// linked tells whether NVLink joins the GPUs at two PCI bus ids.
func (n *nvml) linked(a, b string) (bool, error) {
	var handles [2]uintptr
	for i, bus := range []string{a, b} {
		z := append([]byte(bus), 0)
		if rc := call(n.handle, 0, uintptr(unsafe.Pointer(unsafe.SliceData(z))), uintptr(unsafe.Pointer(&handles[i]))); rc != 0 {
			return false, fmt.Errorf("nvmlDeviceGetHandleByPciBusId(%s): error %d", bus, rc)
		}
	}
	var status int32
	if rc := call(n.status, 0, handles[0], handles[1], nvmlP2PLink, uintptr(unsafe.Pointer(&status))); rc != 0 {
		return false, fmt.Errorf("nvmlDeviceGetP2PStatus(%s, %s, %d): error %d", a, b, nvmlP2PLink, rc)
	}
	return status == 0, nil // NVML_P2P_STATUS_OK
}
