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

// A connection waits in the lobby until its first message is there: a bare descriptor in an epoll
// instance, without a goroutine, a deadline or room in the runtime's poller. Most of a flood gets no
// further, so what the door spends on one of it is three or four system calls. That decides
// how fast the kernel's queue is worked off, in which members stand, too.

// batch is how many connections are accepted between two looks at those that wait.
const batch = 128

// In a flood the kernel's queue is kept short, since who waits in it waits for all before: a member
// whose SYN finds it full sends another soon (Dial), and a flood has no more of it than that. At
// other times it is long, for the members of a large job that come at the same moment.
const (
	shortQueue = 256
	calm       = time.Second
)

type lobby struct {
	long   int      // the listener's own queue
	ep     *os.File // an epoll instance, in the runtime's poller
	raw    syscall.RawConn
	events []unix.EpollEvent
	hello  []byte // room to look at a message; door.mu

	// door.mu
	first   time.Duration
	gen     int32
	waiting list.List // of *Conn, oldest first
	at      map[int32]*Conn
	crowded time.Time // when there was last no room; zero while the queue is long
}

// The listener's place among the descriptors of the lobby.
const listening = -1

func (l *lobby) open(ln *net.TCPListener, hello int, first time.Duration) (err error) {
	if l.long, _, err = queueOf(ln); err != nil {
		return err
	}
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return err
	}
	err = unix.SetNonblock(fd, true) // which has the runtime wait for it
	l.ep = os.NewFile(uintptr(fd), "epoll")
	if err == nil {
		l.raw, err = l.ep.SyscallConn()
	}
	if err == nil {
		var raw syscall.RawConn
		if raw, err = ln.SyscallConn(); err == nil {
			e := raw.Control(func(s uintptr) {
				err = unix.EpollCtl(fd, unix.EPOLL_CTL_ADD, int(s), &unix.EpollEvent{Events: unix.EPOLLIN, Fd: listening})
			})
			err = errors.Join(err, e)
		}
	}
	if err != nil {
		l.ep.Close()
		return err
	}
	l.first, l.events, l.hello, l.at = first, make([]unix.EpollEvent, batch), make([]byte, hello), make(map[int32]*Conn)
	return nil
}

// wait returns what has happened, nothing when it is until; an error when the lobby is closed.
func (l *lobby) wait(until time.Time) (happened []unix.EpollEvent, err error) {
	if err := l.ep.SetReadDeadline(until); err != nil {
		return nil, err
	}
	n := 0
	err = l.raw.Read(func(fd uintptr) bool {
		n, _ = unix.EpollWait(int(fd), l.events, 0) // a signal ends no call that does not wait
		return n > 0
	})
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil, nil
	}
	return l.events[:max(n, 0)], err
}

// add has a connection wait. door.mu is held.
func (l *lobby) add(c *Conn) error {
	l.gen++
	c.gen = l.gen
	err := l.control(unix.EPOLL_CTL_ADD, c.fd, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLET, Fd: int32(c.fd), Pad: c.gen})
	if err == nil {
		c.waits = l.waiting.PushBack(c)
		l.at[int32(c.fd)] = c
	}
	return err
}

func (l *lobby) control(op, fd int, ev *unix.EpollEvent) (err error) {
	e := l.raw.Control(func(ep uintptr) { err = unix.EpollCtl(int(ep), op, fd, ev) })
	return errors.Join(err, e)
}

// drop takes a connection off the list; closing its descriptor does the rest. door.mu is held.
func (l *lobby) drop(c *Conn) {
	if c.waits != nil {
		l.waiting.Remove(c.waits)
		delete(l.at, int32(c.fd))
		c.waits = nil
	}
}

// reset ends a connection of which nothing shall be left. door.mu is held.
func (l *lobby) reset(c *Conn) {
	l.drop(c)
	reset(c.fd)
}

func reset(fd int) {
	linger(fd)
	unix.Close(fd)
}

// linger has the connection reset when it is closed.
func linger(fd int) {
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
}

// run accepts, and lets those in whose first message has come.
func (d *Door) run() {
	defer d.empty()
	for {
		happened, err := d.lobby.wait(d.tidy())
		if err != nil {
			return
		}
		for _, e := range happened {
			if e.Fd != listening {
				d.heard(e)
			} else if !d.accept() {
				return
			}
		}
	}
}

// tidy ends what has waited long enough, and returns when to do so again, zero for never.
func (d *Door) tidy() (next time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now, l := time.Now(), &d.lobby
	for e := l.waiting.Front(); e != nil; e = l.waiting.Front() {
		c := e.Value.(*Conn)
		if next = c.since.Add(l.first); now.Before(next) {
			break
		}
		next = time.Time{}
		d.forget(c, true)
	}
	if !l.crowded.IsZero() {
		long := l.crowded.Add(calm)
		if !now.Before(long) {
			l.crowded = time.Time{}
			_ = setQueue(d.ln, l.long) // it is closed, or the same as before
		} else {
			next = earlier(next, long)
		}
	}
	if d.siege.was.Load() {
		next = earlier(next, d.siege.look(d.ln, now, l.long))
	}
	return next
}

// earlier is which of two times comes first; zero is never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// crowd takes note that there is no room. d.mu is held.
func (d *Door) crowd() {
	if d.others {
		return
	}
	if d.lobby.crowded.IsZero() {
		_ = setQueue(d.ln, min(shortQueue, d.lobby.long))
	}
	d.lobby.crowded = time.Now()
}

// setQueue says how many connections may wait in the kernel to be accepted; those that do stay.
func setQueue(ln *net.TCPListener, length int) error {
	raw, err := ln.SyscallConn()
	if err != nil {
		return err
	}
	e := raw.Control(func(s uintptr) { err = unix.Listen(int(s), length) })
	return errors.Join(err, e)
}

// queueOf is how many may, and how many do. The kernel tells it in fields that have another meaning for connections.
func queueOf(ln *net.TCPListener) (length, wait int, err error) {
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

// empty closes what still waits.
func (d *Door) empty() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for e := d.lobby.waiting.Front(); e != nil; e = d.lobby.waiting.Front() {
		d.forget(e.Value.(*Conn), false)
	}
	for e := d.due.order.Front(); e != nil; e = d.due.order.Front() {
		c := e.Value.(*Conn)
		c.in.remove(c)
		unix.Close(c.fd)
	}
}

// forget closes a connection that has waited long enough, or has ended. d.mu is held.
func (d *Door) forget(c *Conn, refused bool) {
	c.in.remove(c)
	if refused {
		d.refuse(c, Silent)
		d.lobby.reset(c)
		return
	}
	d.lobby.drop(c)
	unix.Close(c.fd)
}

// accept takes a batch from the kernel's queue; false when the listener is closed.
func (d *Door) accept() bool {
	raw, err := d.ln.SyscallConn()
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
			c := &Conn{door: d, fd: fd, addr: source(from), since: time.Now()}
			if d.others {
				d.siege.count(c.addr)
			}
			d.came(c)
		case errors.Is(err, unix.EAGAIN):
			return true
		case errors.Is(err, unix.ECONNABORTED), errors.Is(err, unix.EINTR):
		default: // out of descriptors, as a rule
			d.relieve()
			time.Sleep(retry)
			return true
		}
	}
	if d.others { // and more wait, it seems
		d.siege.look(d.ln, time.Now(), d.lobby.long)
	}
	return true
}

// source is whose connections count together.
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

// came is for a connection that has just been accepted.
func (d *Door) came(c *Conn) {
	if !d.apart {
		total.accepted.Add(1)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	is := More
	if d.look != nil {
		is = d.judge(c)
	}
	switch {
	case !d.enter(c, is):
		reset(c.fd)
	case is != More || d.look == nil:
		d.let(c)
	case d.lobby.add(c) != nil:
		c.in.remove(c)
		reset(c.fd)
	}
}

// judge looks at what a connection of the lobby has said. d.mu is held.
func (d *Door) judge(c *Conn) Verdict {
	n, _, err := unix.Recvfrom(c.fd, d.lobby.hello, unix.MSG_PEEK|unix.MSG_DONTWAIT)
	if err != nil || n <= 0 {
		return More
	}
	return d.look(d.lobby.hello[:n])
}

// heard is for a connection of the lobby on which something has happened.
func (d *Door) heard(e unix.EpollEvent) {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := d.lobby.at[e.Fd]
	if c == nil || c.gen != e.Pad || d.closed {
		return // it has gone since, and another may have its descriptor
	}
	n, _, err := unix.Recvfrom(c.fd, d.lobby.hello, unix.MSG_PEEK|unix.MSG_DONTWAIT)
	is := More
	if err == nil && n > 0 {
		is = d.look(d.lobby.hello[:n])
	}
	switch {
	case is == Stranger && d.strangers.excess(c.addr) != nil:
		d.push(c) // there is no time for it
	case is != More:
		d.begin(c, is)
	case e.Events&(unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0:
		d.forget(c, n > 0) // who looks whether somebody listens is welcome to
	}
}

// begin has a connection of the lobby served. d.mu is held.
func (d *Door) begin(c *Conn, is Verdict) {
	_ = d.lobby.control(unix.EPOLL_CTL_DEL, c.fd, nil) // the socket lives on under another descriptor
	d.lobby.drop(c)
	if is == Member {
		c.in.remove(c)
		d.admit(d.heardOut(), c)
	}
	d.let(c)
}

// let has a connection served, or wait for its turn. d.mu is held.
func (d *Door) let(c *Conn) {
	if c.in == &d.due {
		d.turn()
	} else {
		d.start(c)
	}
}

// turn serves those that are due while there are slots. d.mu is held.
func (d *Door) turn() {
	for d.serving < d.slots && !d.closed {
		c := d.due.next()
		if c == nil {
			return
		}
		c.in.remove(c)
		d.expected.add(c)
		d.start(c)
	}
}

// start serves a connection. d.mu is held.
func (d *Door) start(c *Conn) {
	if d.siege.was.Load() {
		_ = unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0) // its listener's, if it has one
	}
	f := os.NewFile(uintptr(c.fd), "connection")
	conn, err := net.FileConn(f)
	if err != nil { // out of descriptors, as a rule
		c.in.remove(c)
		d.refuse(c, Crowded)
		linger(c.fd)
		f.Close()
		return
	}
	f.Close()
	c.Conn = conn
	d.serving++
	d.wg.Go(func() {
		d.serve(c)
		d.leave(c)
	})
}
