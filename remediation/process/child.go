package process

import (
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// child is a process of the job and the process group that it leads, which is
// what it has forked and not moved elsewhere. The group ends with the child;
// the child ends with this process.
type child struct {
	pid  int
	gone chan struct{} // closed when the child is reaped and its group killed

	mu     sync.Mutex
	reaped bool // from now on pid may be somebody else's
	asked  bool // it was sent SIGTERM or SIGKILL while it lived
}

// ended is how a child ended.
type ended struct {
	pid    int
	err    error // of cmd.Wait
	status syscall.WaitStatus
	asked  bool // it had been told to
	at     time.Time
}

// startChild starts cmd, whose output must be files. exited is called once,
// from another goroutine, when it has been reaped.
func startChild(cmd *exec.Cmd, exited func(ended)) (*child, error) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	c := &child{gone: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		// Pdeathsig is sent when the starting thread ends, so that thread must
		// live as long as the child; it ends with this goroutine.
		runtime.LockOSThread()
		if err := cmd.Start(); err != nil {
			started <- err
			return
		}
		c.pid = cmd.Process.Pid
		started <- nil
		exited(c.await(cmd))
		close(c.gone)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	return c, nil
}

// await waits for the child to end, kills what it has left behind, and reaps
// it: in this order, because once it is reaped its pid, the name of the group,
// can be given to a process that is none of ours.
func (c *child) await(cmd *exec.Cmd) ended {
	for errors.Is(unix.Waitid(unix.P_PID, c.pid, nil, unix.WEXITED|unix.WNOWAIT, nil), unix.EINTR) {
	}
	at := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = syscall.Kill(-c.pid, syscall.SIGKILL)
	err := cmd.Wait()
	c.reaped = true
	status, _ := cmd.ProcessState.Sys().(syscall.WaitStatus)
	return ended{c.pid, err, status, c.asked, at}
}

// signal sends sig to the child and its group, unless they are gone.
func (c *child) signal(sig syscall.Signal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reaped {
		return
	}
	// One that has ended by itself was not asked to, though it is not reaped yet.
	if sig == syscall.SIGTERM || sig == syscall.SIGKILL {
		c.asked = c.asked || !c.dead()
	}
	_ = syscall.Kill(-c.pid, sig)
}

// dead reports whether a child that is not reaped has ended.
func (c *child) dead() bool {
	var info unix.Siginfo
	err := unix.Waitid(unix.P_PID, c.pid, &info, unix.WEXITED|unix.WNOWAIT|unix.WNOHANG, nil)
	return err == nil && info.Signo != 0
}
