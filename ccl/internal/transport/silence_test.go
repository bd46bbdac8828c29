package transport

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
	"golang.org/x/sys/unix"
)

// onListener does something to a listener's descriptor.
func onListener(t *testing.T, ln net.Listener, f func(fd int)) {
	t.Helper()
	raw, err := ln.(*net.TCPListener).SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { f(int(fd)) })
	}
	if err != nil {
		t.Fatal(err)
	}
}

// silentAddr is where a host takes no word: nothing answers there.
func silentAddr(t *testing.T) string {
	t.Helper()
	lc := net.ListenConfig{}
	lc.SetMultipathTCP(false)
	ln, err := lc.Listen(t.Context(), "tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	onListener(t, ln, func(fd int) { deafen(t, fd) })
	return ln.Addr().String()
}

// TestFirstConnectionToSilence: a link that never came about ends at the bound, too, and
// says where nobody answered.
func TestFirstConnectionToSilence(t *testing.T) {
	done := make(chan struct{})
	goroutines(t, apart, 2, func(c *Config) { c.Outage = 2 * time.Second }, func(m *Mesh, rank, _ int) error {
		if rank == 1 {
			<-done
			return nil
		}
		defer close(done)
		addr := silentAddr(t)
		m.infos[1].Addr = addr
		l, err := m.Link(1)
		if err != nil {
			return err
		}
		var b [1]byte
		if err := recvAll(m, l, b[:]); err == nil || errors.Is(err, errPatience) || !strings.Contains(err.Error(), "nothing came from its host for") || !strings.Contains(err.Error(), addr) {
			return fmt.Errorf("want an end at the bound, with %s named, got %w", addr, err)
		}
		return nil
	})
}

// A rank that waits for a byte, with a bound that is soon over.
func init() {
	roles["patient"] = func(m *Mesh, _, _ int) error {
		m.cfg.Outage = 4 * time.Second
		l, err := m.Link(0)
		if err != nil {
			return err
		}
		var b [1]byte
		for range 2 {
			l.WantRecv(record.Now())
			if err := recvAll(m, l, b[:]); err != nil {
				return err
			}
			if err := sendAll(m, l, b[:]); err != nil {
				return err
			}
		}
		return nil
	}
}

// TestStoppedInAnOutage: the time in which a rank is stopped itself, or its machine is
// frozen, is not its peer's silence.
func TestStoppedInAnOutage(t *testing.T) {
	m, cmds := processes(t, apart, 2, "patient")
	l, err := m.Link(1)
	if err != nil {
		t.Fatal(err)
	}
	round := func() {
		t.Helper()
		b := []byte{1}
		if err := errors.Join(sendAll(m, l, b), recvAll(m, l, b)); err != nil {
			t.Fatal(err)
		}
	}
	round()
	// From here on this rank does not look, so only the other one connects again.
	onListener(t, m.net.ln, func(fd int) { deafen(t, fd) })
	l.(*tcpLink).reset(t)
	time.Sleep(500 * time.Millisecond)
	pid := cmds[1].Process.Pid
	if err := cmds[1].Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for !stopped(t, pid) {
		time.Sleep(time.Millisecond)
	}
	time.Sleep(6 * time.Second)
	onListener(t, m.net.ln, func(fd int) {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0); err != nil {
			t.Error(err)
		}
	})
	if err := cmds[1].Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	round()
	if err := cmds[1].Wait(); err != nil {
		t.Error(err)
	}
}
