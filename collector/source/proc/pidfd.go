package proc

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// maxHeld bounds the processes that are held by a pidfd; the deaths of further ones are
// known to a pass.
const maxHeld = 1024

// deaths waits for processes to end by their pidfds (pidfd_open(2)): one becomes readable
// when the last thread has ended, and never means another process. One goroutine waits for
// all, and costs nothing while they live. The kernel lists those that ended in the order in
// which they did, so that order is right though the goroutine may run late.
type deaths struct {
	epoll *os.File
	over  sync.WaitGroup

	mu    sync.Mutex
	lives map[int]*lifeline // by file descriptor
	last  int64             // when the last one ended
}

// lifeline holds a process.
type lifeline struct {
	d     *deaths
	pid   int
	fd    int
	ended atomic.Pointer[end]
}

// end is a process's end by the kernel's word.
type end struct {
	at           int64 // CLOCK_MONOTONIC ns
	known        bool  // the two below are
	code, signal int32
}

func newDeaths() (*deaths, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err == nil {
		err = unix.SetNonblock(fd, true) // for the runtime's poller
	}
	if err != nil {
		return nil, fmt.Errorf("epoll: %w", err)
	}
	d := &deaths{epoll: os.NewFile(uintptr(fd), "epoll"), lives: map[int]*lifeline{}}
	conn, err := d.epoll.SyscallConn()
	if err != nil {
		d.epoll.Close()
		return nil, fmt.Errorf("epoll: %w", err)
	}
	d.over.Go(func() {
		// It ends when the file is closed, or is none that the poller takes: then passes tell.
		_ = conn.Read(func(fd uintptr) bool { d.look(int(fd)); return false })
	})
	return d, nil
}

func (d *deaths) close() {
	d.epoll.Close()
	d.over.Wait()
	for _, l := range d.lives {
		unix.Close(l.fd)
	}
	clear(d.lives)
}

// hold takes hold of a process. Whether it is the one that was meant must be looked up after that.
func (d *deaths) hold(pid int) (*lifeline, error) {
	fail := func(err error) (*lifeline, error) {
		return nil, fmt.Errorf("pidfd of process %d: %w", pid, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.lives) >= maxHeld {
		return fail(fmt.Errorf("%d are open, the limit", maxHeld))
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return fail(err)
	}
	l := &lifeline{d: d, pid: pid, fd: fd}
	err = d.control(func(epoll int) error {
		// An edge for the end, and one more when it has been reaped.
		return unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET, Fd: int32(fd)})
	})
	if err != nil {
		unix.Close(fd)
		return fail(err)
	}
	d.lives[fd] = l
	return l, nil
}

// let lets go of the process.
func (l *lifeline) let() {
	if l == nil {
		return
	}
	l.d.mu.Lock()
	defer l.d.mu.Unlock()
	if l.d.lives[l.fd] == l {
		delete(l.d.lives, l.fd)
		unix.Close(l.fd) // and epoll forgets it
	}
}

func (d *deaths) control(f func(epoll int) error) (err error) {
	conn, e := d.epoll.SyscallConn()
	if e != nil {
		return e
	}
	if e := conn.Control(func(fd uintptr) { err = f(int(fd)) }); e != nil {
		return e
	}
	return err
}

// now looks without waiting for the goroutine to.
func (d *deaths) now() {
	_ = d.control(func(epoll int) error { d.look(epoll); return nil }) // closed: nobody asks any more
}

// look notes the processes that have ended, in order.
func (d *deaths) look(epoll int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var events [16]unix.EpollEvent
	for {
		n, err := unix.EpollWait(epoll, events[:], 0)
		for _, e := range events[:max(n, 0)] {
			if l := d.lives[int(e.Fd)]; l != nil {
				d.note(l)
			}
		}
		if n < len(events) && !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

func (d *deaths) note(l *lifeline) {
	e := end{at: max(record.Now(), d.last+1)}
	if was := l.ended.Load(); was == nil {
		d.last = e.at
	} else {
		e = *was
	}
	status, ok := exitStatus(l.fd)
	if !ok {
		status, ok = zombieStatus(l.pid, l.fd)
	}
	if ok && !e.known {
		e.known = true
		switch w := unix.WaitStatus(status); {
		case w.Signaled():
			e.signal = int32(w.Signal())
		default:
			e.code = int32(w.ExitStatus())
		}
	}
	l.ended.Store(&e)
}

// pidfdInfo is struct pidfd_info of linux/pidfd.h, as of its first version.
type pidfdInfo struct {
	mask, cgroup uint64
	ids          [11]uint32
	exitCode     int32
}

const (
	pidfdGetInfo  = 3<<30 | unsafe.Sizeof(pidfdInfo{})<<16 | 0xff<<8 | 11 // _IOWR(PIDFS_IOCTL_MAGIC, 11, struct pidfd_info)
	pidfdInfoExit = 1 << 3
)

// exitStatus asks for the wait status, which a kernel since 6.15 tells of a process that has been reaped.
func exitStatus(fd int) (status int32, ok bool) {
	info := pidfdInfo{mask: pidfdInfoExit}
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), pidfdGetInfo, uintptr(unsafe.Pointer(&info)))
	return info.exitCode, errno == 0 && info.mask&pidfdInfoExit != 0
}

// zombieStatus reads the wait status of one that has not been reaped yet from the last field of
// /proc/PID/stat. That the pidfd still answers says that
// the pid is still its own.
func zombieStatus(pid, fd int) (status int32, ok bool) {
	dir := fmt.Sprintf("/proc/%d", pid)
	// To whom may not know, the field is 0: the same right is needed for this file (PTRACE_MODE_READ).
	if _, err := os.ReadFile(dir + "/io"); err != nil {
		return 0, false
	}
	text, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return 0, false
	}
	_, rest, found := bytes.Cut(text[max(0, bytes.LastIndexByte(text, ')')):], []byte(") "))
	fields := bytes.Fields(rest)
	const last = 52 - 3 // exit_code; the first here is the state
	if !found || len(fields) <= last || fields[0][0] != 'Z' {
		return 0, false
	}
	code, err := strconv.ParseInt(string(fields[last]), 10, 32)
	if err != nil || unix.PidfdSendSignal(fd, 0, nil, 0) != nil {
		return 0, false
	}
	return int32(code), true
}

// hold takes hold of the target, and of no process that has taken over its pid since it was looked at.
func (s *Source) hold(t target) (*lifeline, error) {
	l, err := s.deaths.hold(t.pid)
	if err != nil {
		return nil, err
	}
	p, err := s.fs.Proc(t.pid)
	if err == nil {
		if st, e := p.Stat(); e == nil && st.Starttime == t.start {
			return l, nil
		}
	}
	l.let()
	return nil, nil // it has just ended
}

// keep keeps the lifeline that a look has brought.
func (s *Source) keep(w *watch, v *sight) {
	if v.unheld != nil {
		w.tried, s.unheld = true, fmt.Errorf("%w: deaths are known to a pass only: %w", source.ErrPartly, v.unheld)
	}
	switch {
	case v.life == nil:
	case w.life != nil:
		v.life.let()
	default:
		w.life, w.tried, s.unheld = v.life, true, nil
	}
}

func (s *Source) let(w *watch) {
	if w.life != nil {
		w.life.let()
		w.life = nil
	}
}

// result is a pass's error: trouble, or else what the node does not show.
func (s *Source) result(errs []error) error {
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return s.unheld
}

// letAll lets go of what nobody takes any more.
func letAll(seen []sight) {
	for i := range seen {
		seen[i].life.let()
	}
}

// endedAt is when the kernel has said that the process ended, 0 when it has not. A pass
// may notice that before the poller's goroutine has run.
func (w *watch) endedAt() int64 {
	if w.life == nil {
		return 0
	}
	if w.life.ended.Load() == nil {
		w.life.d.now()
	}
	if e := w.life.ended.Load(); e != nil {
		return e.at
	}
	return 0
}

// exits tells how the dead ended, where nobody has who knows better.
func (s *Source) exits(v *source.View) {
	for _, p := range v.Processes {
		w := s.watched[p]
		if w == nil || w.life == nil || !p.Dead() || p.Exit.By == diagnosis.ExitSupervisor {
			continue
		}
		if e := w.life.ended.Load(); e != nil && e.known {
			p.Exit = diagnosis.Exit{By: diagnosis.ExitKernel, Code: e.code, Signal: e.signal, At: e.at}
		}
	}
}

// Close lets go of all processes. The source must not be used after it.
func (s *Source) Close() error {
	if s.flight != nil {
		s.stuck = append(s.stuck, s.flight)
	}
	for _, f := range s.stuck {
		select {
		case seen := <-f.seen:
			letAll(seen)
		case <-time.After(within): // it hangs, and what it holds goes with this program
		}
	}
	for _, w := range s.watched {
		s.let(w)
	}
	s.watched = map[*source.Process]*watch{}
	if s.deaths != nil {
		s.deaths.close()
	}
	return nil
}

// open begins to wait for deaths, once there are processes.
func (s *Source) open() {
	if !s.local || s.deaths != nil || s.unheld != nil || len(s.watched) == 0 {
		return
	}
	d, err := newDeaths()
	if err != nil {
		s.unheld = fmt.Errorf("%w: deaths are known to a pass only: %w", source.ErrPartly, err)
		return
	}
	s.deaths = d
}
