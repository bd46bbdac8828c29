// Package stranger runs parts of a test as another user of the machine: an attacker with a
// real process and real files of its own. Only root can; other tests are skipped.
package stranger

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// UID and Other are two users that are nobody's.
const (
	UID   = 54321
	Other = 54322
)

// roleVar tells a child what it is.
const roleVar = "LOCKSTEP_TEST_STRANGER"

// Role is what this process is to play, "" in the test itself. TestMain asks first.
func Role() string { return os.Getenv(roleVar) }

// Open makes a directory in memory in which everybody may make theirs, as /dev/shm is.
func Open(t testing.TB) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can play another user")
	}
	dir, err := os.MkdirTemp("/dev/shm", "lockstep-test-")
	if err != nil {
		t.Skip("no /dev/shm:", err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o777|os.ModeSticky); err != nil {
		t.Fatal(err)
	}
	return dir
}

// Process is a child that plays a role.
type Process struct {
	*exec.Cmd
	In  io.WriteCloser
	out bytes.Buffer
}

// program is this test's binary where other users may go: its own place is private.
func program(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "lockstep-test-")
	if err != nil {
		t.Skip("no place for a program that other users can run:", err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, "program")
	self, err := os.ReadFile("/proc/self/exe")
	for _, f := range []func() error{
		func() error { return os.WriteFile(path, self, 0o755) },
		func() error { return os.Chmod(path, 0o755) },
		func() error { return os.Chmod(dir, 0o755) },
	} {
		if err == nil {
			err = f()
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// Start runs this test's binary as a user, in a role, with more environment. Its first line
// of output says that it is ready: Start waits for it. It ends with the test, or when In is closed.
func Start(t testing.TB, uid uint32, role string, env ...string) *Process {
	t.Helper()
	p := &Process{Cmd: exec.Command(program(t), "-test.run=^$")}
	p.Dir = "/"
	p.Env = append(append(os.Environ(), env...), roleVar+"="+role, "HOME=/", "GOCOVERDIR=")
	p.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	p.Stderr = &p.out
	in, err := p.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.In = in
	out, err := p.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		_ = p.Process.Kill() // it may have ended
		_ = p.Cmd.Wait()
	})
	var b [1]byte
	if _, err := io.ReadFull(out, b[:]); err != nil {
		_ = p.Process.Kill() // it may have ended
		_ = p.Cmd.Wait()
		t.Fatalf("user %d as %s: %s", uid, role, p.out.String())
	}
	return p
}

// Play runs a role to the end: f makes what it makes, and it stays until the test lets go.
func Play(f func() error) {
	if err := f(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("ready")
	_, _ = io.Copy(io.Discard, os.Stdin)
	os.Exit(0)
}
