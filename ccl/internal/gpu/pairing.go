package gpu

import (
	"errors"
	"runtime"
	"time"
)

// run sends what was pending once its receiver has called.
func (x *sender) run(stop <-chan struct{}) {
	defer x.wg.Done()
	c := x.c
	for turn := 0; ; turn++ {
		select {
		case <-stop:
			return
		default:
		}
		if c.Aborted() {
			return // whoever waits has been let go
		}
		x.mu.Lock()
		rest, blocked := x.queue[:0], uint64(0)
		for _, p := range x.queue {
			l, ok := descriptor{}, false
			if blocked&(1<<p.peer) == 0 && x.failure == nil {
				l, ok = c.mail.read(c.rank, p.peer, p.number)
			}
			if !ok {
				blocked |= 1 << p.peer
				rest = append(rest, p)
				continue
			}
			turn = 0
			if err := errors.Join(x.send(p, l), p.begun.Close()); err != nil {
				x.failure = err
				go c.cfg.Failed(err)
			}
		}
		x.queue = rest
		x.left.Store(blocked)
		if len(rest) == 0 {
			x.running = false
			x.mu.Unlock()
			return
		}
		x.mu.Unlock()
		// A receiver that is about to call does so within microseconds; one that is
		// not may take as long as it likes.
		switch {
		case turn < 2000:
			runtime.Gosched()
		case turn < 4000:
			time.Sleep(20 * time.Microsecond)
		default:
			time.Sleep(500 * time.Microsecond)
		}
	}
}

// window is the window of an id.
func (c *Comm) window(id uint32) *Window {
	for _, w := range c.registered() {
		if w.id == id {
			return w
		}
	}
	return nil
}
