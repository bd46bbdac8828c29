package cuda

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"
)

// LibraryEnv names the variable that overrides where the driver is looked for.
const LibraryEnv = "LOCKSTEP_CUDA_LIBRARY"

// MinVersion is the oldest driver API that will do: CUDA 12.2, driver 535.
const MinVersion = 12020

// Driver is the process's CUDA driver. Safe for concurrent use.
type Driver struct {
	fn      [procs]uintptr
	path    string
	version int
	count   int

	streams []atomic.Int32 // of NewStream, by GPU
	crowd   atomic.Pointer[func(gpu, streams, queues int)]

	mu         sync.Mutex
	registered map[uintptr]*registration // host memory, by its first byte
}

type registration struct {
	bytes uintptr
	users int
	owner *Device // a hold of its own: the memory is pinned as long as its context lives
}

// Open loads and initializes the driver, once for the process: later calls
// answer what the first did. The error wraps ErrNoDriver.
func Open() (*Driver, error) { return openOnce() }

var openOnce = sync.OnceValues(func() (*Driver, error) {
	// The second is where container runtimes of some clouds mount it, outside of the loader's path.
	paths := []string{"libcuda.so.1", "/usr/local/nvidia/lib64/libcuda.so.1"}
	hint := LibraryEnv + " overrides the path"
	if p := os.Getenv(LibraryEnv); p != "" {
		paths, hint = []string{p}, "the path is from "+LibraryEnv
	}
	var tried []string
	for _, p := range paths {
		lookup, err := open(p)
		if err == nil {
			return start(p, lookup)
		}
		tried = append(tried, fmt.Sprintf("%s: %v", p, err))
	}
	return nil, fmt.Errorf("%w: cannot load %s (%s)", ErrNoDriver, strings.Join(tried, "; "), hint)
})

func start(path string, lookup func(string) uintptr) (*Driver, error) {
	d := &Driver{path: path, registered: map[uintptr]*registration{}}
	var missing []string
	for p, s := range symbols {
		if d.fn[p] = lookup(s); d.fn[p] == 0 && !optional[p] {
			missing = append(missing, s)
		}
	}
	// The version first: it explains the symbols that an old driver lacks.
	if d.fn[cuDriverGetVersion] != 0 {
		var v int32
		if d.call(cuDriverGetVersion, uintptr(unsafe.Pointer(&v))) == 0 && v < MinVersion {
			return nil, fmt.Errorf("%w: %s speaks CUDA %d.%d; 12.2 (driver 535) or newer is needed", ErrNoDriver, path, v/1000, v%1000/10)
		}
		d.version = int(v)
	}
	if len(missing) > 0 {
		return nil, fmt.Errorf("%w: %s lacks %s; driver 535 or newer is needed", ErrNoDriver, path, strings.Join(missing, ", "))
	}
	bind(d.fn[cuCtxSetCurrent], d.fn[cuThreadExchangeStreamCaptureMode])
	if os.Getenv(connectionsEnv) == "" {
		_ = os.Setenv(connectionsEnv, strconv.Itoa(askedConnections)) // the driver reads it in cuInit
	}
	if rc := d.call(cuInit, 0); rc != 0 {
		return nil, fmt.Errorf("%w: %s: %w", ErrNoDriver, path, d.fail(cuInit, "", rc, -1))
	}
	var n int32
	if rc := d.call(cuDeviceGetCount, uintptr(unsafe.Pointer(&n))); rc != 0 {
		return nil, fmt.Errorf("%w: %s: %w", ErrNoDriver, path, d.fail(cuDeviceGetCount, "", rc, -1))
	}
	d.count, d.streams = int(n), make([]atomic.Int32, n)
	return d, nil
}

// call calls p without a context.
//
//go:uintptrescapes
func (d *Driver) call(p proc, args ...uintptr) int { return call(d.fn[p], 0, args...) }

// Version is the driver's API version, 1000 × major + 10 × minor.
func (d *Driver) Version() int { return d.version }

// Count is the number of GPUs that CUDA_VISIBLE_DEVICES lets this process see.
func (d *Driver) Count() int { return d.count }

const (
	connectionsEnv = "CUDA_DEVICE_MAX_CONNECTIONS"
	// MaxConnections is the driver's limit.
	MaxConnections = 32
)

// LeastConnections is how many hardware queues copy engines want: four for streams that wait for
// peers' words, and CUDA's own default of eight. askedConnections leaves a program some more. Each
// costs 16 ms of a context's making, which the processes of a machine take in turn.
const (
	LeastConnections = 12
	askedConnections = 16
)

// Connections is how many hardware queues the streams of a device share: what
// CUDA_DEVICE_MAX_CONNECTIONS says, which Open sets to askedConnections where nobody else has. A stream
// that waits holds up the others of its queue.
func Connections() int {
	n, err := strconv.Atoi(os.Getenv(connectionsEnv))
	if err != nil {
		return 8 // the driver's default
	}
	return min(max(n, 1), MaxConnections)
}

// Crowded has note called, in the place of who called it before, for each stream of NewStream that is
// made where a GPU has as many as hardware queues already, so that some share one. note gets the GPU's
// ordinal and how many there are of both. It may run under locks, so it calls nothing of this package.
func (d *Driver) Crowded(note func(gpu, streams, queues int)) { d.crowd.Store(&note) }

// opened counts a stream of a GPU.
func (d *Driver) opened(gpu int) {
	streams, queues := int(d.streams[gpu].Add(1)), Connections()
	if note := d.crowd.Load(); note != nil && streams > queues {
		(*note)(gpu, streams, queues)
	}
}
