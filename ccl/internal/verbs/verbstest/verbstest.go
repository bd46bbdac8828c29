// Package verbstest puts a fake libibverbs behind package verbs, for tests on
// machines without RDMA devices. The fake (libibverbs/*.c, compiled by gcc on
// first use) is a model within one process: devices with ports, GID tables and
// memory keys; ports of one rail reach each other; descriptors are real and
// epoll. It checks what a device checks: states, masks, keys, ranges, queue
// sizes, sequence numbers.
//
// It is a reliable connection at the grain of messages: in order, acknowledged,
// retried, refused while no receive is posted, flushed on error. A requester
// that hears nothing sends again until Options.Retry has passed. A message that
// arrives ahead of a lost one is dropped without a word, so only the timer
// recovers a loss. A queue slot is free when the completion that covers it has
// been polled, not before.
//
// As long as nothing is wrong with a link, a write is done, acknowledged and
// completed when PostWrites returns; a thread appears with the first delay or
// loss and sleeps when there is none. All is under one lock. So a test may count
// on order, and a benchmark measures the caller.
//
// The fake's ports are also a sysfs tree, see Fabric.Sysfs.
package verbstest

import (
	"embed"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
)

//go:embed libibverbs
var source embed.FS

// ErrUnavailable: there is no C compiler, or cgo is off.
var ErrUnavailable = errors.New("the fake libibverbs needs cgo and gcc")

// Options say what the fake has.
type Options struct {
	// Devices are mlx5_0 to mlx5_3 with a port each, on rails 0, 1, 0, 1, when nil.
	Devices []Device
	// Retry is how long a sender retries, whatever its queue pair's timeout and
	// retries say; 50 ms when 0. A timeout of 0 stays endless.
	Retry time.Duration
	// Old leaves out what was added to libibverbs after 2009. All of a process's
	// fakes are old, or none.
	Old bool
}

// Device is an RDMA device.
type Device struct {
	Name      string
	Ports     []Port // one on rail 0 when nil, at most 4
	MaxInline int    // bytes; 256 when 0, none when negative
	NUMA      int
	BusID     string // of PCIe; one below a root port of its own when empty
	GPU       string // bus id of a GPU beside it, below the same root port; none when empty
}

// Port is a port of a device.
type Port struct {
	Rail       int // ports of one rail reach each other
	InfiniBand bool
	MTU        verbs.MTU // 4096 when 0
	Netdev     string    // "fake0", … when empty
	// GIDs is the port's table, at most 16 entries. When nil: on Ethernet a
	// link-local and an IPv4 address, 10.<rail>.0.<1 + 4 × device + port>, each
	// as RoCE v1 and v2; on InfiniBand one of the GUID.
	GIDs []verbs.GIDEntry
}

// load makes the library, once for the process; it is not needed as a file
// after that.
var load = sync.OnceValues(func() (old bool, err error) {
	old = wantOld
	gcc, err := exec.LookPath("gcc")
	if err != nil || !cgo {
		return old, ErrUnavailable
	}
	dir, err := os.MkdirTemp("", "verbstest")
	if err != nil {
		return old, err
	}
	defer os.RemoveAll(dir)
	src, lib := filepath.Join(dir, "libibverbs"), filepath.Join(dir, "libibverbs.so.1")
	if err := errors.Join(os.CopyFS(dir, source), os.WriteFile(filepath.Join(src, "abi.h"), []byte(verbs.ABI), 0o600)); err != nil {
		return old, err
	}
	files, err := filepath.Glob(filepath.Join(src, "*.c"))
	if err != nil {
		return old, err
	}
	args := append([]string{"-O2", "-g", "-shared", "-fPIC", "-pthread", "-o", lib}, files...)
	if old {
		args = append(args, "-DFAKE_OLD")
	}
	if out, err := exec.Command(gcc, args...).CombinedOutput(); err != nil {
		return old, fmt.Errorf("compile the fake libibverbs: %w\n%s", err, out)
	}
	if err := bind(lib); err != nil {
		return old, err
	}
	defer restoreEnv(verbs.LibraryEnv)()
	if err := os.Setenv(verbs.LibraryEnv, lib); err != nil {
		return old, err
	}
	l, err := verbs.Load()
	if err == nil && l.Path() != lib {
		err = fmt.Errorf("this process has opened %s already", l.Path())
	}
	return old, err
})

var (
	wantOld bool // by the first New
	active  atomic.Bool
)

func restoreEnv(name string) func() {
	v, ok := os.LookupEnv(name)
	return func() {
		if ok {
			_ = os.Setenv(name, v)
		} else {
			_ = os.Unsetenv(name)
		}
	}
}

// Fabric is the devices of a test and what is between them. A process has one
// at a time. Its methods are safe for concurrent use and may be called at any
// moment; what they do has happened when they return.
type Fabric struct {
	tb      testing.TB
	lib     *verbs.Library
	devices []Device
	names   map[string]int
	dir     string

	mu     sync.Mutex // of what follows, and of the tree below dir
	down   map[int]bool
	tables map[int][]verbs.GIDEntry // by port
}

// New makes a fabric until the test ends; it fails a test that then leaves
// contexts open. It skips the test where there is no fake. SYSFS_PATH is set
// meanwhile, so the test cannot run in parallel with others.
func New(tb testing.TB, o Options) *Fabric {
	tb.Helper()
	wantOld = wantOld || o.Old
	old, err := load()
	if errors.Is(err, ErrUnavailable) {
		tb.Skip(err)
	}
	if err == nil && old != o.Old {
		err = fmt.Errorf("this process's fake libibverbs was made with Old: %v", old)
	}
	if err != nil {
		tb.Fatal(err)
	}
	lib, err := verbs.Load()
	if err != nil {
		tb.Fatal(err)
	}
	if o.Devices == nil {
		for i := range 4 {
			o.Devices = append(o.Devices, Device{Name: fmt.Sprint("mlx5_", i), Ports: []Port{{Rail: i % 2}}})
		}
	}
	if o.Retry == 0 {
		o.Retry = 50 * time.Millisecond
	}
	if !active.CompareAndSwap(false, true) {
		tb.Fatal("verbstest: the process has a fabric already")
	}
	f := &Fabric{tb: tb, lib: lib, devices: o.Devices, names: map[string]int{}, dir: tb.TempDir(), down: map[int]bool{}, tables: map[int][]verbs.GIDEntry{}}
	tb.Setenv(verbs.SysfsEnv, f.dir)
	control("fake_reset", uintptr(o.Retry))
	tb.Cleanup(f.close)
	for i := range f.devices {
		f.add(i)
	}
	if err := f.writeSysfs(); err != nil {
		tb.Fatal(err)
	}
	return f
}

const portsPerDevice = 4 // as in fake.h

func (f *Fabric) add(i int) {
	d := &f.devices[i]
	inline := max(d.MaxInline, 0)
	if d.MaxInline == 0 {
		inline = 256
	}
	if d.BusID == "" {
		d.BusID = fmt.Sprintf("0000:%02x:00.0", 0x11+0x10*i)
	}
	if d.Ports == nil {
		d.Ports = []Port{{}}
	}
	f.names[d.Name] = i
	if withString("fake_add_device", d.Name, uintptr(guid(i)), uintptr(inline)) != i {
		f.tb.Fatal("verbstest: too many devices")
	}
	for n := range d.Ports {
		p := &d.Ports[n]
		index := i*portsPerDevice + n
		if p.MTU == 0 {
			p.MTU = verbs.MTU4096
		}
		if p.Netdev == "" && !p.InfiniBand {
			p.Netdev = fmt.Sprint("fake", index)
		}
		if p.GIDs == nil {
			p.GIDs = p.defaultGIDs(i, index)
		}
		infiniband, lid := uintptr(0), uintptr(0)
		if p.InfiniBand {
			infiniband, lid = 1, uintptr(lidOf(index))
		}
		if control("fake_add_port", uintptr(i), uintptr(p.Rail), infiniband, lid, uintptr(p.MTU)) != index {
			f.tb.Fatal("verbstest: too many ports")
		}
		f.setGIDs(index, p.GIDs)
	}
}

func guid(device int) uint64 { return 0x0202_03ff_fe00_0000 | uint64(device+1) }

func lidOf(port int) int { return 0x10 + port }

func (p *Port) defaultGIDs(device, index int) []verbs.GIDEntry {
	local := verbs.GID{0: 0xfe, 1: 0x80, 14: byte(index >> 8), 15: byte(index + 1)}
	if p.InfiniBand {
		for i := range 8 {
			local[8+i] = byte(guid(device) >> (56 - 8*i))
		}
		return []verbs.GIDEntry{{GID: local}}
	}
	ip := verbs.GID(netip.AddrFrom4([4]byte{10, byte(p.Rail), 0, byte(index + 1)}).As16())
	var table []verbs.GIDEntry
	for _, g := range []verbs.GID{local, ip} {
		for _, t := range []verbs.GIDType{verbs.GIDRoCEv1, verbs.GIDRoCEv2} {
			table = append(table, verbs.GIDEntry{Index: len(table), GID: g, Type: t, Netdev: p.Netdev})
		}
	}
	return table
}

func (f *Fabric) close() {
	for i, d := range f.devices[:len(f.names)] {
		if n := control("fake_open", uintptr(i), 0); n != 0 {
			f.tb.Errorf("%s: %d contexts were left open, with %d queue pairs and %d memory regions", d.Name, n,
				control("fake_open", uintptr(i), 1), control("fake_open", uintptr(i), 2))
		}
	}
	control("fake_reset", uintptr(time.Hour))
	active.Store(false)
}

// Library is package verbs over the fake; verbs.Load answers it too.
func (f *Fabric) Library() *verbs.Library { return f.lib }

func (f *Fabric) device(name string) int {
	i, ok := f.names[name]
	if !ok {
		panic("verbstest: no device " + name)
	}
	return i
}

func (f *Fabric) port(device string, port int) (index int, p *Port) {
	d := f.device(device)
	if port < 1 || port > len(f.devices[d].Ports) {
		panic(fmt.Sprintf("verbstest: no port %s/%d", device, port))
	}
	return d*portsPerDevice + port - 1, &f.devices[d].Ports[port-1]
}

// Fail makes the nth call from now of a function of the library fail with
// errno; nth 0 is every call. Besides what libibverbs exports there are
// ibv_post_send, ibv_post_recv, ibv_poll_cq and ibv_req_notify_cq.
func (f *Fabric) Fail(call string, errno syscall.Errno, nth int) {
	if withString("fake_fail", call, uintptr(errno), uintptr(nth)) != 0 {
		panic("verbstest: too many faults")
	}
}

// FlowLabel is the label that a queue pair was connected with, of which Linux makes the source
// port of its packets: 0 when the device chooses. ok is false when there is no such queue pair.
func (f *Fabric) FlowLabel(device string, qp uint32) (label uint32, ok bool) {
	n := control("fake_flow_label", uintptr(f.device(device)), uintptr(qp))
	return uint32(max(n, 0)), n >= 0
}

// PollTime is how long the fake alone takes to poll a queue pair's empty queue
// n times, and PostTime to post n inline writes of no bytes and to poll each:
// what a benchmark of package verbs compares with. n is at most a million.
func (f *Fabric) PollTime(device string, qp uint32, n int) time.Duration {
	return f.time(device, qp, n, 0)
}

// PostTime is explained with PollTime.
func (f *Fabric) PostTime(device string, qp uint32, n int) time.Duration {
	return f.time(device, qp, n, 1)
}

func (f *Fabric) time(device string, qp uint32, n int, post uintptr) time.Duration {
	ns := control("fake_time", uintptr(f.device(device)), uintptr(qp), uintptr(n), post)
	if ns < 0 {
		f.tb.Fatalf("verbstest: queue pair %d of %s is not connected, or its queue not empty", qp, device)
	}
	return time.Duration(ns)
}
