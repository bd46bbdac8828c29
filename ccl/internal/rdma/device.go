package rdma

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
	"golang.org/x/sys/unix"
)

// device is an opened RDMA device. All communicators of the process share its
// context and protection domain; the last one closes it.
type device struct {
	name string
	ctx  *verbs.Context
	pd   *verbs.PD
	attr verbs.DeviceAttr

	events *os.File // the context's descriptor of events, in the runtime's poller
	done   chan struct{}

	mu       sync.Mutex
	users    int
	watchers map[*Worker]int
	lost     error
	upSince  map[int]time.Time // active ports
}

var devices = struct {
	sync.Mutex
	open map[string]*device
}{open: make(map[string]*device)}

// openDevice opens a device, or shares it.
func openDevice(name string) (*device, error) {
	devices.Lock()
	defer devices.Unlock()
	if d := devices.open[name]; d != nil && d.usable() == nil {
		d.users++
		return d, nil
	}
	lib, err := verbs.Load()
	if err != nil {
		return nil, err
	}
	d := &device{name: name, users: 1, watchers: make(map[*Worker]int), upSince: make(map[int]time.Time), done: make(chan struct{})}
	if d.ctx, err = lib.Open(name); err != nil {
		return nil, err
	}
	fail := func(err error) (*device, error) {
		if d.pd != nil {
			d.pd.Close()
		}
		d.ctx.Close()
		return nil, err
	}
	if d.attr, err = d.ctx.Attr(); err != nil {
		return fail(err)
	}
	if d.pd, err = d.ctx.NewPD(); err != nil {
		return fail(err)
	}
	// A descriptor of our own, so that closing it ends the wait and nothing else.
	fd, err := unix.FcntlInt(uintptr(d.ctx.AsyncFD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return fail(fmt.Errorf("events of %s: %w", name, err))
	}
	d.events = os.NewFile(uintptr(fd), name+" events")
	devices.open[name] = d // in place of one that is lost
	go d.watch()
	return d, nil
}

// release gives the device back.
func (d *device) release() {
	devices.Lock()
	defer devices.Unlock()
	if d.users--; d.users > 0 {
		return
	}
	if devices.open[d.name] == d {
		delete(devices.open, d.name)
	}
	d.events.Close()
	<-d.done
	dropRegions(d)
	// A lost device refuses; its kernel side goes with the context.
	d.pd.Close()
	d.ctx.Close()
}

func (d *device) usable() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.lost
}

// watch reads the device's events until it is given back.
func (d *device) watch() {
	defer close(d.done)
	raw, err := d.events.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Read(func(uintptr) bool {
		for {
			e, ok, err := d.ctx.NextEvent()
			if err != nil {
				d.lose(err)
				return true
			}
			if !ok {
				return false // wait for more
			}
			d.event(e)
		}
	})
}

// lose notes that the device is gone for good.
func (d *device) lose(err error) {
	d.mu.Lock()
	if d.lost == nil {
		d.lost = fmt.Errorf("%s: %w", d.name, err)
	}
	d.mu.Unlock()
	d.each(func(w *Worker) { w.deviceLost(d) })
}

func (d *device) event(e verbs.Event) {
	switch e.Type {
	case verbs.EventDeviceFatal:
		d.lose(verbs.ErrDeviceLost)
	case verbs.EventPortError:
		d.mu.Lock()
		delete(d.upSince, e.Port)
		d.mu.Unlock()
		d.each(func(w *Worker) { w.portDown(d, e.Port) })
	case verbs.EventPortActive:
		d.mu.Lock()
		if d.upSince[e.Port].IsZero() {
			d.upSince[e.Port] = time.Now()
		}
		d.mu.Unlock()
	case verbs.EventQPFatal, verbs.EventQPRequestError, verbs.EventQPAccessError:
		d.each(func(w *Worker) { w.queuePairBroken(d, e.QP) })
	case verbs.EventCQError:
		d.each(func(w *Worker) { w.queueOverrun(d, e.CQ) })
	}
}

// each calls f for every worker that uses the device, without the device's lock.
func (d *device) each(f func(*Worker)) {
	d.mu.Lock()
	ws := make([]*Worker, 0, len(d.watchers))
	for w := range d.watchers {
		ws = append(ws, w)
	}
	d.mu.Unlock()
	for _, w := range ws {
		f(w)
	}
}

func (d *device) subscribe(w *Worker, by int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.watchers[w] += by; d.watchers[w] == 0 {
		delete(d.watchers, w)
	}
}

// healthy is since when a port carries traffic, false while it does not. It asks
// the device: an event may be missed, or late.
func (d *device) healthy(port int) (since time.Time, ok bool) {
	if d.usable() != nil {
		return time.Time{}, false
	}
	a, err := d.ctx.Port(port)
	if errors.Is(err, verbs.ErrDeviceLost) {
		d.mu.Lock()
		d.lost = fmt.Errorf("%s: %w", d.name, err)
		d.mu.Unlock()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err != nil || a.State != verbs.PortActive {
		delete(d.upSince, port)
		return time.Time{}, false
	}
	if d.upSince[port].IsZero() {
		d.upSince[port] = time.Now()
	}
	return d.upSince[port], true
}
