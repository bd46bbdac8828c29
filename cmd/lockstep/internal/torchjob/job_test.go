package torchjob

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestCommand(t *testing.T) {
	j := Job{Machine: Machine{python: "/opt/python3"}, Ranks: 4, Dir: t.TempDir(), Rendezvous: "127.0.0.1:4711", Restarts: 3, Faults: "/f", Pace: 50 * time.Millisecond, Steps: 10, Checkpoint: 5, Sockets: true}
	for range 2 { // a second job in the same folder
		command, err := j.Command()
		if err != nil {
			t.Fatal(err)
		}
		text := strings.Join(command, " ")
		for _, want := range []string{"/opt/python3 -B -m torch.distributed.run", "--nproc_per_node 4", "--max_restarts 3", "--rdzv_endpoint 127.0.0.1:4711"} {
			if !strings.Contains(text, want) {
				t.Errorf("%s: no %q", text, want)
			}
		}
		if _, err := os.Stat(command[len(command)-1]); err != nil {
			t.Error(err)
		}
	}
	env := j.Environ()
	for _, want := range []string{"FAULTS=/f", "PROGRESS=" + filepath.Join(j.Dir, "progress"), "PACE=0.05", "LAST_STEP=9", "CHECKPOINT=5", "NCCL_NET=Socket"} {
		if !slices.Contains(env, want) {
			t.Errorf("%q has no %q", env, want)
		}
	}
	j.Steps, j.Sockets = 0, false
	if env := strings.Join(j.Environ(), " "); strings.Contains(env, "LAST_STEP") || strings.Contains(env, "NCCL_NET=") {
		t.Error(env)
	}
}

// TestThrottle: connections of a process are paced, listeners and files are not.
func TestThrottle(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	n, err := Throttle(os.Getpid(), 1<<20)
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSYS) {
		t.Skip(err) // a sandbox without pidfd_getfd
	}
	if err != nil {
		t.Fatal(err)
	}
	if n < 1 {
		t.Errorf("%d connections", n)
	}
	rate := func(c any) (rate int) {
		raw, err := c.(interface {
			SyscallConn() (syscall.RawConn, error)
		}).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		_ = raw.Control(func(fd uintptr) { rate, _ = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE) })
		return rate
	}
	if got := rate(c); got != 1<<20 {
		t.Errorf("the connection's pace is %d", got)
	}
	if got := rate(l); got == 1<<20 {
		t.Errorf("the listener's pace is %d", got)
	}
}
