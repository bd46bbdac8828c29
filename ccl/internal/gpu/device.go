package gpu

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/kernels"
	"github.com/lockstep-ccl/lockstep/record"
)

// device is a GPU of this process with its kernels, shared by the communicators
// that use it.
type device struct {
	*cuda.Device
	users int // guarded by devices.mu

	move, movePeers     module // the latter's kernels stamp by peer
	reduce, reducePeers [record.Float8E5M2 + 1]module
	binary              atomic.Bool // the driver takes kernels as they come compiled

	mu     sync.Mutex
	loaded []*cuda.Module
	clock  *clock   // nil until something is recorded
	table  cuda.Ptr // see counts
}

// module is kernels that are loaded when they are first wanted.
//
// Each has a lock of its own: the driver may load only when the device is idle, so who loads may wait
// for a kernel that waits for another rank, and that rank, of this process and on this device, may want
// a module that is there already.
type module struct {
	mu    sync.Mutex
	funcs atomic.Pointer[funcs]
}

// of returns the module's kernels. It costs one load of a word when they are there.
func (m *module) of(load func() (funcs, error)) (funcs, error) {
	if p := m.funcs.Load(); p != nil {
		return *p, nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if p := m.funcs.Load(); p != nil {
		return *p, nil
	}
	fs, err := load()
	if err == nil {
		m.funcs.Store(&fs)
	}
	return fs, err
}

// funcs is the kernels of one module by name.
type funcs map[string]kernel

// kernel is a function and how it is launched.
type kernel struct {
	cuda.Func
	threads, shared uint32
}

var devices = struct {
	mu sync.Mutex
	m  map[int]*device
}{m: map[int]*device{}}

// open is the device of an ordinal; release must follow.
func open(ordinal int) (*device, error) {
	devices.mu.Lock()
	defer devices.mu.Unlock()
	d := devices.m[ordinal]
	if d == nil {
		drv, err := cuda.Open()
		if err != nil {
			return nil, err
		}
		dev, err := drv.Device(ordinal)
		if err != nil {
			return nil, err
		}
		d = &device{Device: dev}
		devices.m[ordinal] = d
	}
	d.users++
	return d, nil
}

func (d *device) release() error {
	devices.mu.Lock()
	defer devices.mu.Unlock()
	if d.users--; d.users > 0 {
		return nil
	}
	delete(devices.m, d.Ordinal)
	var errs []error
	if d.clock != nil {
		errs = append(errs, d.clock.close())
	}
	for _, m := range d.loaded {
		errs = append(errs, m.Unload())
	}
	if d.table != 0 {
		errs = append(errs, d.Free(d.table))
	}
	return errors.Join(append(errs, d.Close())...)
}

// clockOf is the device's clock.
func (d *device) clockOf() (*clock, error) {
	if _, err := d.movers(); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.clock == nil {
		k, err := newClock(d)
		if err != nil {
			return nil, err
		}
		d.clock = k
	}
	return d.clock, nil
}

// movers are the kernels that know no types. They are loaded first, with those
// that keep the clock.
func (d *device) movers() (funcs, error) {
	return d.move.of(func() (funcs, error) { return d.load("move") })
}

// reducers are the kernels of a type, loaded when a type is first used. The driver may wait for
// the device to be idle meanwhile. That is safe before anything of the operation waits for peers, if
// ranks that share the device load alike: what runs there then waits only for operations that every
// rank called before this one.
func (d *device) reducers(dt record.DType) (funcs, error) {
	if int(dt) >= len(d.reduce) {
		return nil, fmt.Errorf("no kernels for type %v", dt)
	}
	return d.reduce[dt].of(func() (funcs, error) { return d.load(reduceModule(dt)) })
}

func reduceModule(dt record.DType) string { return "reduce_" + dt.String() }

// launches is how kernels are launched: threads of a block, and dynamic shared
// memory, of which bulk kernels want all there is.
var launches = map[string][]struct {
	name            string
	threads, shared uint32
}{
	"move": {
		{"ls_barrier", 32, 0}, {"ls_clock", 32, 0}, {"ls_delay", 32, 0}, {"ls_mark", 32, 0},
		{"ls_allgather_ll", 512, 0}, {"ls_alltoall_ll", 512, 0}, {"ls_broadcast_ll", 512, 0}, {"ls_broadcast_ll2", 512, 0},
		{"ls_allgather_ll12", 512, 0}, {"ls_alltoall_ll12", 512, 0}, {"ls_broadcast_ll12", 512, 0}, {"ls_broadcast_chain", 512, 0}, {"ls_p2p_ll", 512, 0}, {"ls_p2p_direct", 512, 0},
		{"ls_p2p_list", 512, 0}, {"ls_p2p_items", 128, 0},
		{"ls_allgather_push", 512, 0}, {"ls_alltoall_push", 512, 0}, {"ls_broadcast_push", 512, 0}, {"ls_broadcast_ring", kernels.RingThreads, kernels.RingShared}, {"ls_allgather_ring", kernels.RingThreads, kernels.RingShared}, {"ls_copy", 512, 0}, {"ls_staged", 512, 0},
		{"ls_allgather_bulk", kernels.BulkPushThreads, kernels.BulkPushShared}, {"ls_alltoall_bulk", kernels.BulkPushThreads, kernels.BulkPushShared},
		{"ls_broadcast_bulk", kernels.BulkPushThreads, kernels.BulkPushShared},
		{"ls_p2p_bulk", kernels.BulkPushThreads, kernels.BulkPushShared}, {"ls_p2p_list_bulk", kernels.BulkPushThreads, kernels.BulkPushShared},
	},
	"reduce": {
		{"ls_allreduce_ll", 512, 0}, {"ls_allreduce_ll2", 512, 0}, {"ls_reducescatter_ll", 512, 0}, {"ls_reduce_ll", 512, 0},
		{"ls_allreduce_ll12", 512, 0}, {"ls_reducescatter_ll12", 512, 0}, {"ls_reduce_ll12", 512, 0}, {"ls_reduce_chain", 512, 0},
		{"ls_allreduce_sym", 512, 0}, {"ls_reducescatter_sym", 512, 0}, {"ls_reduce_sym", 512, 0}, {"ls_fold", 512, 0},
		{"ls_allreduce_bulk", kernels.BulkThreads, kernels.BulkShared}, {"ls_reducescatter_bulk", kernels.BulkThreads, kernels.BulkShared}, {"ls_reduce_bulk", kernels.BulkThreads, kernels.BulkShared},
		{"ls_fold_bulk", kernels.BulkThreads, kernels.BulkShared},
		{"ls_allreduce_ring", kernels.RingReduceThreads, kernels.RingShared}, {"ls_reducescatter_ring", kernels.RingReduceThreads, kernels.RingShared}, {"ls_reduce_ring", kernels.RingReduceThreads, kernels.RingShared},
		{"ls_allreduce_pushbulk", kernels.PushReduceThreads, kernels.BulkShared},
	},
}

// code loads a module: the binary that was compiled for devices like this one, or else PTX,
// which the driver compiles unless its cache has the result.
func (d *device) code(name string) (*cuda.Module, error) {
	if cubin := kernels.Cubin(name, d.Major, d.Minor); cubin != nil {
		if m, err := d.Load(cubin); err == nil {
			d.binary.Store(true)
			return m, nil
		}
	}
	ptx := kernels.Module(name, d.Major, d.Minor)
	if ptx == nil {
		return nil, fmt.Errorf("there are none for compute capability %d.%d (8.0 and up)", d.Major, d.Minor)
	}
	return d.Load(ptx)
}

// load makes a module's kernels ready.
func (d *device) load(name string) (funcs, error) {
	m, err := d.code(name)
	if err != nil {
		return nil, fmt.Errorf("load kernels %s: %w", name, err)
	}
	d.mu.Lock()
	d.loaded = append(d.loaded, m)
	d.mu.Unlock()
	kind, _, _ := strings.Cut(name, "_")
	fs := funcs{}
	for _, l := range launches[kind] {
		f, err := m.Func(l.name)
		if errors.Is(err, cuda.ErrNotFound) {
			continue // bulk kernels are for 9.0 and up, rings for some types
		}
		if err == nil && l.shared > 0 {
			err = d.SetFuncShared(f, int(l.shared))
		}
		// Asking for a function's attribute loads it now rather than at its first launch.
		if err == nil {
			_, err = d.FuncInfo(f)
		}
		if err != nil {
			return nil, fmt.Errorf("kernel %s of %s: %w", l.name, name, err)
		}
		fs[l.name] = kernel{f, l.threads, l.shared}
	}
	return fs, nil
}
