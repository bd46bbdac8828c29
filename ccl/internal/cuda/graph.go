package cuda

import "unsafe"

// Graph is captured work.
type Graph struct {
	dev *Device
	h   uintptr
}

// Exec is a graph that can be launched any number of times, one launch at a time.
type Exec struct {
	dev *Device
	h   uintptr
}

// Capturing tells whether what is enqueued goes into a graph instead of running.
// ErrCapture: a capture is under way and already spoiled, or s is the legacy
// stream while another one is being captured.
func (s *Stream) Capturing() (bool, error) {
	const ( // CUstreamCaptureStatus
		active      = 1
		invalidated = 2
	)
	var status int32
	if rc := s.dev.call(cuStreamIsCapturing, s.h, uintptr(unsafe.Pointer(&status))); rc != 0 {
		return false, s.dev.fail(cuStreamIsCapturing, "", rc)
	}
	if status == invalidated {
		return false, s.dev.fail(cuStreamIsCapturing, "", codeCaptureInvalidated)
	}
	return status == active, nil
}

const codeCaptureInvalidated = 901

// BeginCapture starts a capture, in relaxed mode: the other modes tie it to an
// OS thread.
func (s *Stream) BeginCapture() error {
	const relaxed = 2
	if rc := s.dev.call(cuStreamBeginCapture, s.h, relaxed); rc != 0 {
		return s.dev.fail(cuStreamBeginCapture, "", rc)
	}
	return nil
}

// EndCapture ends the capture and gives what it caught.
func (s *Stream) EndCapture() (*Graph, error) {
	g := &Graph{dev: s.dev}
	if rc := s.dev.call(cuStreamEndCapture, s.h, uintptr(unsafe.Pointer(&g.h))); rc != 0 {
		return nil, s.dev.fail(cuStreamEndCapture, "", rc)
	}
	return g, nil
}

// Instantiate makes the graph launchable; the Exec outlives the Graph.
func (g *Graph) Instantiate() (*Exec, error) {
	x := &Exec{dev: g.dev}
	if rc := g.dev.call(cuGraphInstantiateWithFlags, uintptr(unsafe.Pointer(&x.h)), g.h, 0); rc != 0 {
		return nil, g.dev.fail(cuGraphInstantiateWithFlags, "", rc)
	}
	return x, nil
}

// Close destroys the graph; a second Close does nothing.
func (g *Graph) Close() error { return destroy(g.dev, cuGraphDestroy, &g.h) }

// Launch enqueues the graph's work.
func (x *Exec) Launch(s *Stream) error {
	if rc := x.dev.enqueue(cuGraphLaunch, x.h, s.h, 0, 0); rc != 0 {
		return x.dev.fail(cuGraphLaunch, "", rc)
	}
	return nil
}

// Close destroys the graph once it no longer runs; a second Close does nothing.
func (x *Exec) Close() error { return destroy(x.dev, cuGraphExecDestroy, &x.h) }

// destroy calls p on a handle that is not 0, and makes it 0.
func destroy(d *Device, p proc, h *uintptr) error {
	was := *h
	*h = 0
	if was == 0 {
		return nil
	}
	if rc := d.call(p, was); rc != 0 {
		return d.fail(p, "", rc)
	}
	return nil
}
