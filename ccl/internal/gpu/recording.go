package gpu

import (
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/record"
)

// Recording is a flight recorder that a GPU writes to.
type Recording struct {
	dev    *device
	writer *record.Writer
	device *record.Device
	mem    []byte   // the recorder's, or memory of the process's own (record.Writer.PrivateStamps)
	base   cuda.Ptr // of mem, as the GPU sees it
	users  int      // guarded by recordings.mu
	stop   func()   // ends the collecting of stamps, nil where the GPU writes to the file
}

var recordings = struct {
	mu sync.Mutex
	m  map[recordingKey]*Recording
}{m: map[recordingKey]*Recording{}}

type recordingKey struct {
	ordinal int
	writer  *record.Writer
}

// ErrNoAccess: the GPU can be given no memory for a recorder's stamps.
var ErrNoAccess = errors.New("no memory for stamps")

// Record gives a GPU access to a flight recorder, and the recorder the GPU's
// clock; Close must follow. The communicators of a process share it. Where the driver
// takes no memory of the recorder's file, which is on a disk, the GPU stamps operations in
// other memory, and note is told why.
func Record(ordinal int, w *record.Writer, note func(why error)) (*Recording, error) {
	recordings.mu.Lock()
	defer recordings.mu.Unlock()
	key := recordingKey{ordinal, w}
	if r := recordings.m[key]; r != nil {
		r.users++
		return r, nil
	}
	dev, err := open(ordinal)
	if err != nil {
		return nil, err
	}
	r := &Recording{dev: dev, writer: w, users: 1}
	if err := r.begin(note); err != nil {
		return nil, errors.Join(err, dev.release())
	}
	recordings.m[key] = r
	return r, nil
}

func (r *Recording) begin(note func(why error)) (err error) {
	k, err := r.dev.clockOf()
	if err != nil {
		return err
	}
	r.mem = r.writer.Memory()
	if r.base, err = r.dev.RegisterHost(r.mem); err != nil {
		why := fmt.Errorf("give GPU %d access to the flight recorder %s: %w", r.dev.Ordinal, r.writer.Path(), err)
		if r.mem, err = r.writer.PrivateStamps(); err == nil {
			r.base, err = r.dev.RegisterHost(r.mem)
		}
		if err != nil {
			return fmt.Errorf("%w: %w; %w", ErrNoAccess, why, err)
		}
		note(why)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	var ok bool
	r.device, ok = r.writer.AddDevice(
		record.DeviceEntry{UUID: uuid(r.dev.UUID), Ordinal: int32(r.dev.Ordinal), Name: r.dev.Name},
		k.told[0], // a clock has had its first handshake
	)
	if !ok {
		return errors.Join(errors.New("the flight recorder has no room for GPUs: create it with StampSlots"), r.dev.UnregisterHost(r.mem))
	}
	for _, a := range k.told[1:] {
		r.device.Anchor(a.GPU, a.Mono, a.Err)
	}
	k.tell[r.device] = struct{}{}
	if &r.mem[0] != &r.writer.Memory()[0] {
		r.collect()
	}
	return nil
}

// collectEvery is how often stamps are copied to the file where the GPU cannot write to it.
const collectEvery = 5 * time.Millisecond

// collect copies stamps to the recorder's file until Close.
func (r *Recording) collect() {
	stop, done := make(chan struct{}), make(chan struct{})
	r.stop = func() { close(stop); <-done }
	go func() {
		defer close(done)
		tick := time.NewTicker(collectEvery)
		defer tick.Stop()
		for {
			r.writer.CollectStamps()
			select {
			case <-stop:
				return
			case <-tick.C:
			}
		}
	}()
}

// uuid is the bytes of a name such as GPU-01234567-89ab-…; zero when it is none.
func uuid(name string) (b [16]byte) {
	text := strings.ReplaceAll(strings.TrimPrefix(name, "GPU-"), "-", "")
	if raw, err := hex.DecodeString(text); err == nil && len(raw) == len(b) {
		copy(b[:], raw)
	}
	return b
}

// Device is the GPU's index in the recorder, for record.CommEntry.
func (r *Recording) Device() uint16 { return r.device.Index() }

// Mono maps a time of the GPU's clock to the host's CLOCK_MONOTONIC ns.
func (r *Recording) Mono(gpu int64) int64 {
	mono, _ := r.device.Mono(gpu)
	return mono
}

// Close ends the GPU's access.
func (r *Recording) Close() error {
	if r == nil {
		return nil
	}
	recordings.mu.Lock()
	defer recordings.mu.Unlock()
	if r.users--; r.users > 0 {
		return nil
	}
	delete(recordings.m, recordingKey{r.dev.Ordinal, r.writer})
	k := r.dev.clock
	k.mu.Lock()
	delete(k.tell, r.device)
	k.mu.Unlock()
	if r.stop != nil {
		r.stop()
		r.writer.CollectStamps() // what has been stamped since
	}
	return errors.Join(r.dev.UnregisterHost(r.mem), r.dev.release())
}
