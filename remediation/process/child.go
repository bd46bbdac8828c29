package process

import (
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"sync"
	"syscall"

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
}

// startChild starts cmd, whose output must be files. exited is called once,
// from another goroutine, with the result of cmd.Wait.
func startChild(cmd *exec.Cmd, exited func(error)) (*child, error) {
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
func (c *child) await(cmd *exec.Cmd) error {
	for errors.Is(unix.Waitid(unix.P_PID, c.pid, nil, unix.WEXITED|unix.WNOWAIT, nil), unix.EINTR) {
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = syscall.Kill(-c.pid, syscall.SIGKILL)
	err := cmd.Wait()
	c.reaped = true
	return err
}

// signal sends sig to the child and its group, unless they are gone.
func (c *child) signal(sig syscall.Signal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.reaped {
		_ = syscall.Kill(-c.pid, sig)
	}
}
