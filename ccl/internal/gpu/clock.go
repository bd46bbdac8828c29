package gpu

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/kernels"
	"github.com/lockstep-ccl/lockstep/ccl/internal/gpuclock"
	"github.com/lockstep-ccl/lockstep/record"
)

// clock relates a GPU's clock to the host's, by handshakes with a kernel of one
// thread that runs for some microseconds once a second, at first more often, and
// tells the flight recorders of the process.
type clock struct {
	dev    *device
	stream *cuda.Stream
	page   []byte // pinned: see the offsets below
	at     cuda.Ptr
	word   uint32 // the last that was asked

	mu   sync.Mutex
	cal  *gpuclock.Clock
	tell map[*record.Device]struct{}
	told []record.DeviceAnchor // the last ones, as many as readers look at
	// base is an event whose time on the GPU's clock is known; spare the one before,
	// and events[1] of the handshake under way.
	base, spare clockEvent

	stop chan struct{}
	wg   sync.WaitGroup
}

type clockEvent struct {
	event *cuda.Event
	gpu   int64
}

const (
	clockWord, clockSlot, clockAbort = 0, 64, 128 // in the page

	clockEvery = time.Second
	// clockSoon is how long after the first handshake the second comes: readers know the
	// clocks' rates from two. The time between them doubles until it is clockEvery.
	clockSoon = 100 * time.Millisecond
	clockTold = 3
	// clockTick is the step of %globaltimer where it has not been measured. Hopper's is
	// gpuclock's default.
	clockTick   = 1024
	clockRounds = 8
	// clockTurns bounds how often the kernel looks for the host's answer, about once a
	// microsecond: the host may have lost its core.
	clockTurns = 20_000
	// clockPatience is how long the kernel may take to begin: the GPU may be full.
	clockPatience = 100 * time.Millisecond
	// clockFirst bounds how long the first mapping may take: no job ends because its GPU was full
	// for a moment, or its host was.
	clockFirst = 30 * time.Second
)

var errBusy = errors.New("the GPU did not run the clock's kernel in time")

func newClock(dev *device) (_ *clock, err error) {
	var o gpuclock.Options
	if dev.Major != 9 {
		o.Tick = clockTick
	}
	k := &clock{dev: dev, cal: gpuclock.New(o), tell: map[*record.Device]struct{}{}, stop: make(chan struct{})}
	defer func() {
		if err != nil {
			err = errors.Join(err, k.free())
		}
	}()
	if k.stream, err = dev.NewStream(-5); err != nil { // as urgent as can be
		return nil, err
	}
	if k.page, err = dev.AllocHost(4096); err != nil {
		return nil, err
	}
	clear(k.page)
	if k.at, err = dev.HostPtr(k.page); err != nil {
		return nil, err
	}
	for began := time.Now(); ; {
		if err = k.handshake(); err == nil {
			break
		}
		if time.Since(began) >= clockFirst || !errors.Is(err, errBusy) {
			return nil, fmt.Errorf("relate the clock of GPU %d to the host's: %w", dev.Ordinal, err)
		}
		time.Sleep(clockPatience / 5)
	}
	k.wg.Add(1)
	go k.run()
	return k, nil
}

func (k *clock) close() error {
	close(k.stop)
	k.wg.Wait()
	return k.free()
}

func (k *clock) free() error {
	var errs []error
	if k.stream != nil {
		errs = append(errs, k.stream.Synchronize(), k.stream.Close())
	}
	for _, e := range []*cuda.Event{k.base.event, k.spare.event} {
		if e != nil {
			errs = append(errs, e.Close())
		}
	}
	if k.page != nil {
		errs = append(errs, k.dev.FreeHost(k.page))
	}
	return errors.Join(errs...)
}

func (k *clock) run() {
	defer k.wg.Done()
	wait := clockSoon
	tick := time.NewTicker(wait)
	defer tick.Stop()
	for {
		select {
		case <-k.stop:
			return
		case <-tick.C:
		}
		if wait < clockEvery {
			wait = min(2*wait, clockEvery)
			tick.Reset(wait)
		}
		// A GPU that is full or lost does not answer. The error of the mapping grows meanwhile,
		// and readers see that.
		_ = k.handshake()
	}
}

func (k *clock) load(off int) *uint32 { return (*uint32)(unsafe.Pointer(&k.page[off])) }

// handshake asks the GPU for its time a few times.
func (k *clock) handshake() error {
	if done, err := k.stream.Query(); err != nil || !done {
		return errors.Join(err, errBusy)
	}
	var events [2]*cuda.Event
	for i := range events {
		e, err := k.dev.NewEvent(true)
		if err != nil {
			return err
		}
		events[i] = e
	}
	defer events[0].Close()
	keep := false
	defer func() {
		if !keep {
			_ = events[1].Close()
		}
	}()
	a := kernels.ClockArgs{
		Word: uint64(k.at) + clockWord, Slot: uint64(k.at) + clockSlot, Abort: uint64(k.at) + clockAbort,
		First: k.word, Rounds: clockRounds, Turns: clockTurns,
	}
	atomic.StoreUint32(k.load(clockWord), k.word)
	movers, err := k.dev.movers()
	if err != nil {
		return err
	}
	f := movers["ls_clock"]
	if err := k.stream.Record(events[0]); err != nil {
		return err
	}
	if err := k.stream.Launch(f.Func, 1, f.threads, f.shared, unsafe.Pointer(&a), unsafe.Sizeof(a)); err != nil {
		return err
	}
	if err := k.stream.Record(events[1]); err != nil {
		return err
	}
	first, last, err := k.rounds()
	if err != nil {
		return err
	}
	if err := await(events[1]); err != nil {
		return err
	}
	// The event was after the last stamp, and no later than the time between the two
	// events after the first.
	width, err := events[1].Elapsed(events[0])
	if err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.spare.event != nil {
		_ = k.spare.event.Close()
	}
	keep = true
	k.base, k.spare = clockEvent{events[1], (last + max(first+int64(width), last)) / 2}, k.base
	if gpu, mono, bound, ok := k.cal.Anchor(); ok {
		k.told = append(k.told[max(len(k.told)+1-clockTold, 0):], record.DeviceAnchor{GPU: gpu, Mono: mono, Err: bound})
		for d := range k.tell {
			d.Anchor(gpu, mono, bound)
		}
	}
	return nil
}

// rounds are the answers of the kernel that handshake has launched: the GPU's time in the
// first and in the last.
func (k *clock) rounds() (first, last int64, err error) {
	for range clockRounds {
		before := record.Now()
		k.word++
		atomic.StoreUint32(k.load(clockWord), k.word)
		for atomic.LoadUint32(k.load(clockSlot+8)) != k.word {
			if record.Now()-before > int64(clockPatience) {
				return 0, 0, errBusy
			}
		}
		after := record.Now()
		gpu := int64(atomic.LoadUint64((*uint64)(unsafe.Pointer(k.load(clockSlot)))))
		k.mu.Lock()
		k.cal.Handshake(before, gpu, after)
		k.mu.Unlock()
		if first == 0 {
			first = gpu
		}
		last = gpu
	}
	return first, last, nil
}

// await waits for an event of the clock's stream, within its patience.
func await(e *cuda.Event) error {
	for wait := record.Now(); ; {
		done, err := e.Query()
		if err != nil {
			return err
		}
		if done {
			return nil
		}
		if record.Now()-wait > int64(clockPatience) {
			return errBusy
		}
	}
}

// time is the GPU's clock at an event that has just happened. Where the driver
// does not tell, it is the time of the call.
func (k *clock) time(e *cuda.Event) (gpu int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if ns, err := e.Elapsed(k.base.event); err == nil {
		return k.base.gpu + int64(ns)
	}
	gpu, mono, _, _ := k.cal.Anchor()
	return gpu + record.Now() - mono
}
