package rdma

import (
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Whether the peer's host is there. The control socket alone does not tell: the
// management network may be away for longer than a job can wait for it, while the
// rails work. So the socket lasts for long, and who waits looks for a sign of life
// on any path, then on the socket, and asks the paths when it finds none.

const (
	// keepEvery is how often the kernel asks the peer's whether it is there, over a
	// control socket on which nothing is under way: the shortest time it knows.
	keepEvery = time.Second
	// resendMost is the kernel's longest pause between two attempts to send again.
	// Without it they double, and a socket is late by as much again as it was cut off.
	resendMost = time.Second
	// lookEvery is how often who waits looks for a sign of life.
	lookEvery = time.Second
	// silentAfter is how long the peer gives no sign until it is asked for one: two of
	// the kernel's questions were not answered by then.
	silentAfter = 3 * time.Second
)

// life is what this end knows of the peer's, as far as anybody has looked.
type life struct {
	looked time.Time // last
	sign   time.Time // of the peer's life, the last
	moved  uint64    // Conn.moved, when it was looked
}

// keep sets how the control socket asks for the peer's host, and for how long it
// lasts without an answer. It never carries so much that a stopped process's kernel
// could not take it.
func (c *Conn) keep() error {
	var err error
	ctlErr := c.raw.Control(func(fd uintptr) {
		for _, o := range []struct{ level, name, value int }{
			{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
			{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, int(keepEvery / time.Second)},
			{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, int(keepEvery / time.Second)},
			{unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(c.w.opt.ControlTimeout.Milliseconds())},
		} {
			err = errors.Join(err, unix.SetsockoptInt(int(fd), o.level, o.name, o.value))
		}
		// Linux 6.15; what is older sends again later.
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_RTO_MAX_MS, int(resendMost.Milliseconds()))
	})
	if err = errors.Join(ctlErr, err); err != nil {
		return fmt.Errorf("set the keepalive of a control socket: %w", err)
	}
	return nil
}

// ended is why the control socket's reader has nothing more to read.
func (c *Conn) ended(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) {
		return fmt.Errorf("closed by the peer: %w", err)
	}
	return fmt.Errorf("the control socket over the management network has failed (it may carry nothing for %v): %w", c.w.opt.ControlTimeout, err)
}

// silence is for how long nothing has come from the peer's kernel over the control socket.
func (c *Conn) silence() time.Duration {
	ms := uint32(0)
	_ = c.raw.Control(func(fd uintptr) {
		// One that is closed is its reader's to tell.
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			ms = min(info.Last_ack_recv, info.Last_data_recv)
		}
	})
	return time.Duration(ms) * time.Millisecond
}

// moved is how much the queue pairs there are have completed; it shrinks with each
// that is given up.
func (c *Conn) moved() (n uint64) {
	for i := range c.qps {
		n += c.m.lanes[i].received
		for _, q := range c.qps[i] {
			if q != nil {
				n += q.completed
			}
		}
	}
	return n
}

// look finds out, at most once in lookEvery, whether the peer's host is there. While
// it gives no sign, each path that could carry something is tried: one that does not work
// is a fault like any other. A switch needs the socket; when no path answers, either,
// nothing is left to wait for.
func (c *Conn) look(now time.Time) {
	v := &c.life
	idle := now.Sub(v.looked)
	if c.err != nil || c.gone != nil || idle < lookEvery {
		return
	}
	moved := c.moved()
	if moved > v.moved || idle > 2*lookEvery { // what was to be seen meanwhile, nobody has looked for
		v.sign = now
	}
	v.looked, v.moved = now, moved
	if now.Sub(v.sign) < silentAfter {
		return
	}
	silence := c.silence()
	if silence < silentAfter {
		v.sign = now.Add(-silence)
		return
	}
	lost, asked := false, false
	for i := range c.m.lanes {
		l := &c.m.lanes[i]
		lost = lost || l.phase != running
		for p := range l.paths {
			if q := c.qps[i][p]; l.paths[p].state == pathLive && q.why == nil && !q.halted {
				if asked = true; q.idles() { // else it has been asked, and answers or fails in its time
					q.probe()
				}
			}
		}
	}
	if c.mark(); lost && !asked && now.Sub(v.sign) >= c.w.opt.GiveUpAfter {
		if c.why == nil {
			c.why = errNoOffer
		}
		c.why = fmt.Errorf("%w; and over the management network nothing has come from the peer's host for %v", c.why, silence.Round(100*time.Millisecond))
		c.fail(c.lostPaths())
	}
}
