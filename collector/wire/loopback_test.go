package wire_test

import (
	"context"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/wire"
)

// TestMain lets the test dial as another user.
func TestMain(m *testing.M) {
	if to := os.Getenv("LOCKSTEP_TEST_DIAL"); to != "" {
		c, err := net.Dial("tcp", to)
		if err != nil {
			os.Exit(1)
		}
		if os.Getenv("LOCKSTEP_TEST_LEAVE") != "" {
			_, _ = c.Write([]byte("hello and report"))
			c.Close()
			os.Exit(0)
		}
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		_, _ = io.ReadAll(c) // until it is hung up on
		os.Exit(0)
	}
	if os.Getenv("LOCKSTEP_TEST_LISTEN") != "" {
		l, err := net.FileListener(os.NewFile(4, "listener"))
		if err != nil {
			os.Exit(1)
		}
		c, err := l.Accept()
		if err != nil {
			os.Exit(1)
		}
		_, _ = c.Write([]byte{1})
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		_, _ = io.ReadAll(c)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestLoopbackLetsInItsOwnUser(t *testing.T) {
	for _, at := range []string{"127.0.0.1:0", "[::1]:0"} {
		l, err := net.Listen("tcp", at)
		if err != nil {
			t.Logf("no %s here: %v", at, err)
			continue
		}
		c, s := handshake(t, wire.Loopback(), wire.Loopback(), "")
		if c != nil || s != nil {
			t.Errorf("%s: %v, %v", at, c, s)
		}
		l.Close()
	}
}

// stranger runs this test as another user.
func stranger(t *testing.T, env ...string) *exec.Cmd {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("only root can be somebody else")
	}
	self, err := os.Open("/proc/self/exe") // the other user may not be able to reach the test's directory
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { self.Close() })
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, "/proc/self/fd/3")
	cmd.ExtraFiles = []*os.File{self}
	cmd.Env = env
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	return cmd
}

func TestLoopbackRefusesOtherUsers(t *testing.T) {
	for _, c := range []struct {
		name, leave, want string
	}{
		{"that stay", "", "of user 65534"},
		{"that close at once", "1", "no process holds"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			cmd := stranger(t, "LOCKSTEP_TEST_DIAL="+l.Addr().String(), "LOCKSTEP_TEST_LEAVE="+c.leave)
			if err := cmd.Start(); err != nil {
				t.Skipf("cannot run as another user: %v", err)
			}
			if c.leave == "" {
				defer func() { _ = cmd.Wait() }()
			} else if err := cmd.Wait(); err != nil {
				t.Fatal(err)
			}
			conn, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if _, _, err := wire.Loopback().ServerHandshake(conn); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
}

// Whoever takes the master's port while it is down is not believed.
func TestLoopbackBelievesNoOtherUsersServer(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	f, err := l.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cmd := stranger(t, "LOCKSTEP_TEST_LISTEN=1")
	cmd.ExtraFiles = append(cmd.ExtraFiles, f)
	if err := cmd.Start(); err != nil {
		t.Skipf("cannot run as another user: %v", err)
	}
	defer func() { _ = cmd.Wait() }()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	creds, err := (*wire.TLS)(nil).MasterOf("job")
	if err != nil {
		t.Fatal(err)
	}
	conn, _, err := creds.ClientHandshake(context.Background(), "", c)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := conn.Read(make([]byte, 1)); n != 0 || err == nil || !strings.Contains(err.Error(), "of user 65534") {
		t.Errorf("read %d bytes, %v", n, err)
	}
}
