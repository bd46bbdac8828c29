package rdma

import (
	"errors"
	"fmt"
	"log/slog"
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
	log  *slog.Logger
	ctx  *verbs.Context
	pd   *verbs.PD
	attr verbs.DeviceAttr

	use     *opening
	events  *os.File // the context's descriptor of events, in the runtime's poller
	done    chan struct{}
	queries calls     // of its ports, by anybody
	refused sync.Once // told: memory is copied; lacking: the device is not used
	lacking sync.Once

	mu       sync.Mutex
	watchers map[*Worker]int
	lost     error
	upSince  map[int]time.Time // active ports
	failed   failedQueries
}

// failedQueries are queries in a row that say that the device is gone.
type failedQueries struct {
	first time.Time
	count int
}

// A device is lost after lostAfter failed queries in a row, over at least lostFor: one query may
// fail for other reasons.
const (
	lostFor   = time.Second
	lostAfter = 3
)

// devices are the process's. The lock is not held over calls into the kernel.
var devices = struct {
	sync.Mutex
	open map[string]*opening
}{open: make(map[string]*opening)}

// opening is a device that is open, or about to be.
type opening struct {
	users int
	began time.Time
	done  chan struct{} // closed when what follows is known
	dev   *device
	err   error
}

// ready reports whether the attempt to open the device has ended.
func (o *opening) ready() bool {
	select {
	case <-o.done:
		return true
	default:
		return false
	}
}

// openDevice opens a device, or shares it. One that is being opened for longer than
// anybody waits is an error at once.
func openDevice(name string, log *slog.Logger) (*device, error) {
	devices.Lock()
	o := devices.open[name]
	if o == nil || o.ready() && o.dev.usable() != nil {
		o = &opening{began: time.Now(), done: make(chan struct{})}
		devices.open[name] = o // in place of one that is lost
		go o.open(name, log)
	}
	o.users++
	devices.Unlock()
	t := time.NewTimer(callFor - time.Since(o.began))
	defer t.Stop()
	select {
	case <-o.done:
	case <-t.C:
		devices.Lock()
		defer devices.Unlock()
		if !o.ready() {
			o.users--
			return nil, fmt.Errorf("open %s: %w for %v", name, errStalled, time.Since(o.began).Round(time.Millisecond))
		}
	}
	return o.dev, o.err
}

// open opens the device, and closes it again when nobody waits for it any more.
func (o *opening) open(name string, log *slog.Logger) {
	d, err := newDevice(name, log)
	devices.Lock()
	if o.dev, o.err = d, err; err == nil {
		d.use = o
	}
	wanted := o.users > 0
	if (err != nil || !wanted) && devices.open[name] == o {
		delete(devices.open, name)
	}
	close(o.done)
	devices.Unlock()
	if err == nil && !wanted {
		d.close()
	}
}

func newDevice(name string, log *slog.Logger) (*device, error) {
	lib, err := verbs.Load()
	if err != nil {
		return nil, err
	}
	d := &device{name: name, log: log, watchers: make(map[*Worker]int), upSince: make(map[int]time.Time), done: make(chan struct{})}
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
	go d.watch()
	return d, nil
}

// release gives the device back. The last one closes it, and waits for that as long as
// for any call.
func (d *device) release() {
	devices.Lock()
	d.use.users--
	last := d.use.users == 0
	if last && devices.open[d.name] == d.use {
		delete(devices.open, d.name)
	}
	devices.Unlock()
	if !last {
		return
	}
	closed := make(chan struct{})
	go func() {
		d.close()
		close(closed)
	}()
	t := time.NewTimer(callFor)
	defer t.Stop()
	select {
	case <-closed:
	case <-t.C:
		d.log.Warn("RDMA: a device is still being closed", "device", d.name, "after", callFor)
	}
}

func (d *device) close() {
	d.events.Close()
	<-d.done
	dropRegions(d)
	// A lost device refuses; its kernel side goes with the context.
	if err := errors.Join(d.pd.Close(), d.ctx.Close()); err != nil && d.usable() == nil {
		d.log.Warn("RDMA: a device stays open until the process ends", "device", d.name, "err", err)
	}
}

func (d *device) usable() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.lost
}

// port and gids ask the device about a port.
func (d *device) port(port int) (verbs.PortAttr, error) {
	return call(&d.queries, "query a port of "+d.name, func() (verbs.PortAttr, error) { return d.ctx.Port(port) }, nil)
}

func (d *device) gids(port int) ([]verbs.GIDEntry, error) {
	return call(&d.queries, "query the GIDs of "+d.name, func() ([]verbs.GIDEntry, error) { return d.ctx.GIDs(port) }, nil)
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
	d.tell(notice{what: verbs.EventDeviceFatal})
}

func (d *device) event(e verbs.Event) {
	switch e.Type {
	case verbs.EventDeviceFatal:
		d.lose(verbs.ErrDeviceLost)
	case verbs.EventPortError:
		d.mu.Lock()
		delete(d.upSince, e.Port)
		d.mu.Unlock()
		d.tell(notice{what: e.Type, id: uint32(e.Port)})
	case verbs.EventPortActive:
		d.mu.Lock()
		if d.upSince[e.Port].IsZero() {
			d.upSince[e.Port] = time.Now()
		}
		d.mu.Unlock()
	case verbs.EventQPFatal, verbs.EventQPRequestError, verbs.EventQPAccessError:
		d.tell(notice{what: e.Type, id: e.QP})
	case verbs.EventCQError:
		d.tell(notice{what: e.Type, id: e.CQ})
	}
}

// tell lets every worker that uses the device know, and waits for none: one whose
// executor does not return from the kernel holds its lock for as long.
func (d *device) tell(n notice) {
	n.dev = d
	d.mu.Lock()
	defer d.mu.Unlock()
	for w := range d.watchers {
		w.tell(n)
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
	a, err := d.port(port)
	d.mu.Lock()
	defer d.mu.Unlock()
	switch now := time.Now(); {
	case !errors.Is(err, verbs.ErrDeviceLost):
		d.failed = failedQueries{}
	case d.failed.count == 0:
		d.failed = failedQueries{now, 1}
	default:
		if d.failed.count++; d.failed.count >= lostAfter && now.Sub(d.failed.first) >= lostFor && d.lost == nil {
			d.lost = fmt.Errorf("%s: %w", d.name, err)
		}
	}
	if err != nil || a.State != verbs.PortActive {
		delete(d.upSince, port)
		return time.Time{}, false
	}
	if d.upSince[port].IsZero() {
		d.upSince[port] = time.Now()
	}
	return d.upSince[port], true
}
