package cuda

import (
	"context"
	"unsafe"
)

// Event is a point in a stream's work. Safe for concurrent use, except Close.
type Event struct {
	dev *Device
	h   uintptr
}

// NewEvent makes an event; without timing it costs the GPU less.
func (d *Device) NewEvent(timing bool) (*Event, error) {
	flags := uintptr(2) // CU_EVENT_DISABLE_TIMING
	if timing {
		flags = 0
	}
	e := &Event{dev: d}
	if rc := d.call(cuEventCreate, uintptr(unsafe.Pointer(&e.h)), flags); rc != 0 {
		return nil, d.fail(cuEventCreate, "", rc)
	}
	return e, nil
}

// Query tells whether the event has happened since it was last recorded; one
// that was never recorded has.
func (e *Event) Query() (done bool, err error) {
	switch rc := e.dev.enqueue(cuEventQuery, e.h, 0, 0, 0); rc {
	case 0:
		return true, nil
	case codeNotReady:
		return false, nil
	default:
		return false, e.dev.fail(cuEventQuery, "", rc)
	}
}

// Synchronize waits for the event. Nothing bounds it.
func (e *Event) Synchronize() error {
	if rc := e.dev.call(cuEventSynchronize, e.h); rc != 0 {
		return e.dev.fail(cuEventSynchronize, "", rc)
	}
	return nil
}

// Wait is Synchronize with a bound; it polls as Stream.Wait does.
func (e *Event) Wait(ctx context.Context) error { return poll(ctx, e.Query, "event") }

// Elapsed is the time between two events with timing that have happened, in
// nanoseconds; the GPU resolves about 500.
func (e *Event) Elapsed(from *Event) (ns float64, err error) {
	var ms float32
	if rc := e.dev.call(cuEventElapsedTime, uintptr(unsafe.Pointer(&ms)), from.h, e.h); rc != 0 {
		return 0, e.dev.fail(cuEventElapsedTime, "", rc)
	}
	return float64(ms) * 1e6, nil
}

// Close destroys the event; a second Close does nothing.
func (e *Event) Close() error { return destroy(e.dev, cuEventDestroy, &e.h) }
