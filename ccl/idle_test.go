package ccl_test

import (
	"bytes"
	"context"
	"os"
	"strconv"
	"testing"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl"
	"golang.org/x/sys/unix"
)

// resetData ends this process's data connections as a middlebox does that forgets them,
// and returns how many sockets that were. Control connections have a TCP_USER_TIMEOUT.
func resetData(t *testing.T) (n int) {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range fds {
		fd, _ := strconv.Atoi(e.Name())
		if _, err := unix.Getpeername(fd); err != nil {
			continue
		}
		if d, err := unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT); err != nil || d != 0 {
			continue
		}
		none := unix.RawSockaddr{Family: unix.AF_UNSPEC}
		if _, _, errno := unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&none)), unsafe.Sizeof(none)); errno == 0 {
			n++
		}
	}
	return n
}

// TestIdleSenderGoesOn: bytes that a Send left to the network arrive also where that
// resets the connection while the sender computes, without a Recorder.
func TestIdleSenderGoesOn(t *testing.T) {
	sent, got := make(chan struct{}), make(chan struct{})
	ranks(t, 2, nodes(1), func(ctx context.Context, c *ccl.Comm) error {
		const n = 512 << 10
		s := c.NewStream()
		b := bytes.Repeat([]byte{7}, n)
		if err := do(ctx, s, c.AllReduce(s, ccl.Of(b[:64]), ccl.Of(b[:64]), ccl.Max)); err != nil {
			return err
		}
		if c.Rank() == 0 {
			err := do(ctx, s, c.Send(s, ccl.Of(b), 1))
			close(sent)
			if err == nil {
				select {
				case <-got:
				case <-ctx.Done():
					err = ctx.Err()
				}
			}
			return err
		}
		<-sent
		if resetData(t) == 0 {
			t.Error("no data connection")
		}
		in := make([]byte, n)
		if err := do(ctx, s, c.Recv(s, ccl.Of(in), 0)); err != nil {
			return err
		}
		close(got)
		if !bytes.Equal(in, b) {
			t.Error("other bytes have come")
		}
		return nil
	})
}
