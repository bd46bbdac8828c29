package accept

import (
	"container/list"
	"errors"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A pending connection is a bare descriptor in an epoll instance. It has no goroutine, no deadline and
// no place in the runtime's poller. Most connections of a flood get no further, so each costs three
// or four system calls. This decides how fast the backlog is drained, in which members wait, too.

// batch is how many connections are accepted before the pending ones are polled again.
const batch = 128

// In a flood the kernel's backlog is short, because a connection waits in it behind all earlier ones.
// If a member's SYN is dropped, Dial soon sends another. At other times the backlog is long, for the
// members of a large job that connect at the same moment.
const (
	shortBacklog = 256
	// The backlog is long again when there was room for longAfter.
	longAfter = time.Second
)

// pendingSet holds the pending connections.
type pendingSet struct {
	backlog int      // the listener's own length
	ep      *os.File // an epoll instance, in the runtime's poller
	raw     syscall.RawConn
	events  []unix.EpollEvent
	buf     []byte // for a first message; guarded by acceptor.mu

	// guarded by acceptor.mu
	timeout  time.Duration // Options.FirstTimeout
	gen      int32
	waiting  list.List // of *Conn, oldest first
	byFD     map[int32]*Conn
	lastFull time.Time // when there was last no room; zero while the backlog is long
}

// listenerFD stands for the listener in epoll events.
const listenerFD = -1

// open makes the epoll instance, which also reports ln's connections.
func (l *pendingSet) open(ln *net.TCPListener, peekSize int, timeout time.Duration) (err error) {
	if l.backlog, _, err = backlogOf(ln); err != nil {
		return err
	}
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return err
	}
	err = unix.SetNonblock(fd, true) // so that os.NewFile adds it to the runtime's poller
	l.ep = os.NewFile(uintptr(fd), "epoll")
	if err == nil {
		l.raw, err = l.ep.SyscallConn()
	}
	if err == nil {
		var raw syscall.RawConn
		if raw, err = ln.SyscallConn(); err == nil {
			e := raw.Control(func(s uintptr) {
				err = unix.EpollCtl(fd, unix.EPOLL_CTL_ADD, int(s), &unix.EpollEvent{Events: unix.EPOLLIN, Fd: listenerFD})
			})
			err = errors.Join(err, e)
		}
	}
	if err != nil {
		l.ep.Close()
		return err
	}
	l.timeout, l.events, l.buf, l.byFD = timeout, make([]unix.EpollEvent, batch), make([]byte, peekSize), make(map[int32]*Conn)
	return nil
}

// wait returns epoll events, none if there is none until then. It fails when ep is closed.
func (l *pendingSet) wait(until time.Time) (events []unix.EpollEvent, err error) {
	if err := l.ep.SetReadDeadline(until); err != nil {
		return nil, err
	}
	n := 0
	err = l.raw.Read(func(fd uintptr) bool {
		n, _ = unix.EpollWait(int(fd), l.events, 0) // a call that does not wait is not interrupted by signals
		return n > 0
	})
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil, nil
	}
	return l.events[:max(n, 0)], err
}

// add makes a connection pending. acceptor.mu is held.
func (l *pendingSet) add(c *Conn) error {
	l.gen++
	c.gen = l.gen
	err := l.control(unix.EPOLL_CTL_ADD, c.fd, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLET, Fd: int32(c.fd), Pad: c.gen})
	if err == nil {
		c.pending = l.waiting.PushBack(c)
		l.byFD[int32(c.fd)] = c
	}
	return err
}

// control is epoll_ctl(2).
func (l *pendingSet) control(op, fd int, ev *unix.EpollEvent) (err error) {
	e := l.raw.Control(func(ep uintptr) { err = unix.EpollCtl(int(ep), op, fd, ev) })
	return errors.Join(err, e)
}

// drop removes a connection. The epoll instance loses it when its descriptor is closed. acceptor.mu is
// held.
func (l *pendingSet) drop(c *Conn) {
	if c.pending != nil {
		l.waiting.Remove(c.pending)
		delete(l.byFD, int32(c.fd))
		c.pending = nil
	}
}

// reset closes a pending or queued connection with a RST. acceptor.mu is held.
func (l *pendingSet) reset(c *Conn) {
	l.drop(c)
	reset(c.fd)
}

func reset(fd int) {
	linger(fd)
	unix.Close(fd)
}

// linger makes the kernel send a RST when the socket is closed.
func linger(fd int) {
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
}

// run accepts connections, and starts those whose first message has arrived.
func (a *Acceptor) run() {
	defer a.closePending()
	for {
		events, err := a.pending.wait(a.expire())
		if err != nil {
			return
		}
		for _, e := range events {
			if e.Fd != listenerFD {
				a.readable(e)
			} else if !a.accept() {
				return
			}
		}
	}
}

// expire ends the connections whose first message is overdue. It also makes the backlog long again and
// adjusts the SYN filter. It returns when to call it again, zero for never.
func (a *Acceptor) expire() (next time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now, l := time.Now(), &a.pending
	for e := l.waiting.Front(); e != nil; e = l.waiting.Front() {
		c := e.Value.(*Conn)
		if next = c.since.Add(l.timeout); now.Before(next) {
			break
		}
		next = time.Time{}
		a.end(c, true)
	}
	if !l.lastFull.IsZero() {
		long := l.lastFull.Add(longAfter)
		if !now.Before(long) {
			l.lastFull = time.Time{}
			_ = setBacklog(a.ln, l.backlog) // it fails only if the listener is closed
		} else {
			next = earlier(next, long)
		}
	}
	if a.filter.used.Load() {
		next = earlier(next, a.filter.adjust(a.ln, now, l.backlog))
	}
	return next
}

// earlier returns the earlier of two times. Zero is never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// full notes that there is no room, and makes the backlog short. a.mu is held.
func (a *Acceptor) full() {
	if a.filterSYNs {
		return
	}
	if a.pending.lastFull.IsZero() {
		_ = setBacklog(a.ln, min(shortBacklog, a.pending.backlog))
	}
	a.pending.lastFull = time.Now()
}

// setBacklog sets the length of the listener's backlog. Connections that wait in it stay.
func setBacklog(ln *net.TCPListener, length int) error {
	raw, err := ln.SyscallConn()
	if err != nil {
		return err
	}
	e := raw.Control(func(s uintptr) { err = unix.Listen(int(s), length) })
	return errors.Join(err, e)
}

// backlogOf returns the length of the listener's backlog, and how many connections wait in it. The
// kernel reports them in fields that have another meaning for connections.
func backlogOf(ln *net.TCPListener) (length, wait int, err error) {
	raw, err := ln.SyscallConn()
	if err != nil {
		return 0, 0, err
	}
	e := raw.Control(func(s uintptr) {
		var i *unix.TCPInfo
		if i, err = unix.GetsockoptTCPInfo(int(s), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			length, wait = int(i.Sacked), int(i.Unacked)
		}
	})
	return length, wait, errors.Join(err, e)
}

// closePending closes the pending and queued connections.
func (a *Acceptor) closePending() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for e := a.pending.waiting.Front(); e != nil; e = a.pending.waiting.Front() {
		a.end(e.Value.(*Conn), false)
	}
	for e := a.queued.order.Front(); e != nil; e = a.queued.order.Front() {
		c := e.Value.(*Conn)
		c.in.remove(c)
		unix.Close(c.fd)
	}
}

// end ends a pending connection. If it is refused, it counts as Silent. a.mu is held.
func (a *Acceptor) end(c *Conn, refused bool) {
	c.in.remove(c)
	if refused {
		a.refuse(c, Silent)
		a.pending.reset(c)
		return
	}
	a.pending.drop(c)
	unix.Close(c.fd)
}

// accept accepts a batch of connections. It returns false when the listener is closed.
func (a *Acceptor) accept() bool {
	raw, err := a.ln.SyscallConn()
	if err != nil {
		return false
	}
	for range batch {
		fd, from, err := -1, unix.Sockaddr(nil), error(nil)
		if raw.Control(func(s uintptr) { fd, from, err = unix.Accept4(int(s), unix.SOCK_CLOEXEC) }) != nil {
			return false
		}
		switch {
		case err == nil:
			c := &Conn{acceptor: a, fd: fd, addr: source(from), since: time.Now()}
			if a.filterSYNs {
				a.filter.count(c.addr)
			}
			a.accepted(c)
		case errors.Is(err, unix.EAGAIN):
			return true
		case errors.Is(err, unix.ECONNABORTED), errors.Is(err, unix.EINTR):
		default: // usually there are no descriptors
			a.freeDescriptors()
			time.Sleep(retry)
			return true
		}
	}
	if a.filterSYNs { // more may wait
		a.filter.adjust(a.ln, time.Now(), a.pending.backlog)
	}
	return true
}

// source is Conn.Source of a connection from that address.
func source(from unix.Sockaddr) netip.Addr {
	switch at := from.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrFrom4(at.Addr)
	case *unix.SockaddrInet6:
		addr := netip.AddrFrom16(at.Addr).Unmap()
		if p, err := addr.Prefix(64); addr.Is6() && err == nil {
			return p.Addr()
		}
		return addr
	}
	return netip.Addr{}
}

// accepted handles a connection that was just accepted.
func (a *Acceptor) accepted(c *Conn) {
	if !a.uncounted {
		total.accepted.Add(1)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	is := Incomplete
	if a.inspectFirst != nil {
		is = a.inspect(c)
	}
	switch {
	case !a.admit(c, is):
		reset(c.fd)
	case is != Incomplete || a.inspectFirst == nil:
		a.dispatch(c)
	case a.pending.add(c) != nil:
		c.in.remove(c)
		reset(c.fd)
	}
}

// inspect returns what the first message of a pending connection shows so far. a.mu is held.
func (a *Acceptor) inspect(c *Conn) Inspection {
	n, _, err := unix.Recvfrom(c.fd, a.pending.buf, unix.MSG_PEEK|unix.MSG_DONTWAIT)
	if err != nil || n <= 0 {
		return Incomplete
	}
	return a.inspectFirst(a.pending.buf[:n])
}

// readable handles an epoll event of a pending connection.
func (a *Acceptor) readable(e unix.EpollEvent) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.pending.byFD[e.Fd]
	if c == nil || c.gen != e.Pad || a.closed {
		return // it has ended since, and another one may have its descriptor
	}
	n, _, err := unix.Recvfrom(c.fd, a.pending.buf, unix.MSG_PEEK|unix.MSG_DONTWAIT)
	is := Incomplete
	if err == nil && n > 0 {
		is = a.inspectFirst(a.pending.buf[:n])
	}
	switch {
	case is == Invalid && a.unauthenticated.victim(c.addr) != nil:
		a.evict(c) // there is no room to serve it
	case is != Incomplete:
		a.startPending(c, is)
	case e.Events&(unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0:
		a.end(c, n > 0) // a port check, which sends nothing, is not refused
	}
}

// startPending starts a connection that was pending. a.mu is held.
func (a *Acceptor) startPending(c *Conn, is Inspection) {
	// start duplicates the descriptor, so closing this one would not remove the socket from epoll.
	_ = a.pending.control(unix.EPOLL_CTL_DEL, c.fd, nil)
	a.pending.drop(c)
	if is == Plausible {
		c.in.remove(c)
		a.addEvicting(a.readyClass(), c)
	}
	a.dispatch(c)
}

// dispatch starts a connection, or starts queued ones if it is queued. a.mu is held.
func (a *Acceptor) dispatch(c *Conn) {
	if c.in == &a.queued {
		a.startQueued()
	} else {
		a.start(c)
	}
}

// startQueued starts queued connections, up to MaxServed. a.mu is held.
func (a *Acceptor) startQueued() {
	for a.serving < a.maxServed && !a.closed {
		c := a.queued.next()
		if c == nil {
			return
		}
		c.in.remove(c)
		a.plausible.add(c)
		a.start(c)
	}
}

// start serves a connection in a goroutine. a.mu is held.
func (a *Acceptor) start(c *Conn) {
	if a.filter.used.Load() {
		_ = unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0) // it may have inherited the listener's
	}
	f := os.NewFile(uintptr(c.fd), "connection")
	conn, err := net.FileConn(f)
	if err != nil { // usually there are no descriptors
		c.in.remove(c)
		a.refuse(c, Crowded)
		linger(c.fd)
		f.Close()
		return
	}
	f.Close()
	c.Conn = conn
	a.serving++
	a.wg.Go(func() {
		a.serve(c)
		a.finish(c)
	})
}
