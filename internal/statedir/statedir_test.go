package statedir_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/internal/statedir"
)

// stranger is another user of this machine.
const stranger = 54321

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func asRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can make another user's files")
	}
}

func TestOpen(t *testing.T) {
	base := t.TempDir()
	for _, tt := range []struct {
		name    string
		root    bool // needs root
		make    func(t *testing.T, dir string) string
		private bool
		want    string // in the error, "" for none
	}{
		{name: "missing", make: func(_ *testing.T, d string) string { return filepath.Join(d, "a", "b") }},
		{name: "own", make: func(t *testing.T, d string) string { return d }},
		{name: "readable", make: func(t *testing.T, d string) string { must(t, os.Chmod(d, 0o755)); return d }},
		{name: "readable-but-private", private: true, make: func(t *testing.T, d string) string { must(t, os.Chmod(d, 0o755)); return d }, want: "chmod 700"},
		{name: "group-writable", make: func(t *testing.T, d string) string { must(t, os.Chmod(d, 0o770)); return d }, want: "can be written by others (mode 0770)"},
		{name: "sticky", make: func(t *testing.T, d string) string { must(t, os.Chmod(d, 0o777|os.ModeSticky)); return d }, want: "can be written by others"},
		{name: "link", make: func(t *testing.T, d string) string {
			must(t, os.Mkdir(filepath.Join(d, "real"), 0o700))
			must(t, os.Symlink("real", filepath.Join(d, "link")))
			return filepath.Join(d, "link")
		}, want: "is a symbolic link"},
		{name: "own-link-above", make: func(t *testing.T, d string) string {
			must(t, os.Mkdir(filepath.Join(d, "real"), 0o700))
			must(t, os.Symlink("../own-link-above/real", filepath.Join(d, "link")))
			return filepath.Join(d, "link", "state")
		}},
		{name: "absolute-link-above", make: func(t *testing.T, d string) string {
			must(t, os.Mkdir(filepath.Join(d, "real"), 0o700))
			must(t, os.Symlink(filepath.Join(d, "real"), filepath.Join(d, "link")))
			return filepath.Join(d, "link", "state")
		}},
		{name: "endless-link", make: func(t *testing.T, d string) string {
			must(t, os.Symlink("link", filepath.Join(d, "link")))
			return filepath.Join(d, "link", "state")
		}, want: "too many levels of symbolic links"},
		{name: "file", make: func(t *testing.T, d string) string {
			must(t, os.WriteFile(filepath.Join(d, "f"), nil, 0o600))
			return filepath.Join(d, "f")
		}, want: "not a directory"},
		{name: "writable-above", make: func(t *testing.T, d string) string {
			must(t, os.Mkdir(filepath.Join(d, "open"), 0o700))
			must(t, os.Chmod(filepath.Join(d, "open"), 0o777))
			return filepath.Join(d, "open", "state")
		}, want: "above it, can be written by others"},
		{name: "sticky-above", make: func(t *testing.T, d string) string {
			must(t, os.Mkdir(filepath.Join(d, "open"), 0o700))
			must(t, os.Chmod(filepath.Join(d, "open"), 0o777|os.ModeSticky))
			return filepath.Join(d, "open", "state")
		}},
		{name: "strangers", root: true, make: func(t *testing.T, d string) string { must(t, os.Chown(d, stranger, 0)); return d }, want: "is user 54321's"},
		{name: "strangers-above", root: true, make: func(t *testing.T, d string) string {
			must(t, os.Mkdir(filepath.Join(d, "state"), 0o700))
			must(t, os.Chown(d, stranger, 0))
			return filepath.Join(d, "state")
		}, want: "above it, is user 54321's"},
		{name: "strangers-link-above", root: true, make: func(t *testing.T, d string) string {
			must(t, os.Mkdir(filepath.Join(d, "real"), 0o700))
			must(t, os.Symlink("real", filepath.Join(d, "link")))
			must(t, os.Lchown(filepath.Join(d, "link"), stranger, 0))
			return filepath.Join(d, "link", "state")
		}, want: "is a symbolic link of user 54321"},
		{name: "strangers-lock", root: true, make: func(t *testing.T, d string) string {
			must(t, os.WriteFile(filepath.Join(d, "lock"), nil, 0o600))
			must(t, os.Chown(filepath.Join(d, "lock"), stranger, 0))
			return d
		}, want: "lock is user 54321's"},
		{name: "linked-lock", make: func(t *testing.T, d string) string {
			must(t, os.Symlink("elsewhere", filepath.Join(d, "lock")))
			return d
		}, want: "lock file"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.root {
				asRoot(t)
			}
			d := filepath.Join(base, tt.name)
			must(t, os.Mkdir(d, 0o700))
			path := tt.make(t, d)
			open := statedir.Open
			if tt.private {
				open = statedir.OpenPrivate
			}
			s, err := open(path)
			if tt.want == "" {
				must(t, err)
				defer s.Close()
				if fi, err := os.Stat(path); err != nil || !fi.IsDir() || s.Path() != path {
					t.Fatalf("%s: %v, %v", s.Path(), fi, err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), path) {
				t.Fatalf("error %v, want one that names %s and says %q", err, path, tt.want)
			}
			if strings.Contains(tt.want, "others") && !errors.Is(err, statedir.ErrForeign) {
				t.Errorf("%v is no ErrForeign", err)
			}
		})
	}
}

func TestOneProcessAtATime(t *testing.T) {
	dir := t.TempDir()
	s, err := statedir.Open(dir)
	must(t, err)
	if _, err := statedir.Open(dir); !errors.Is(err, statedir.ErrLocked) || !strings.Contains(err.Error(), "process") {
		t.Errorf("second: %v", err)
	}
	must(t, s.Close())
	s, err = statedir.Open(dir)
	must(t, err)
	must(t, s.Close())
}

// TestLeftToAChild: what a process was forking when it closed its directory, or was killed, has the lock
// until it executes its program.
func TestLeftToAChild(t *testing.T) {
	dead := exec.Command("true")
	must(t, dead.Run())
	for name, pid := range map[string]int{"closed": 0, "killed": dead.Process.Pid} {
		dir := t.TempDir()
		s, err := statedir.Open(dir)
		must(t, err)
		child := held(t, s.Join("lock"))
		must(t, s.Close())
		if pid != 0 {
			must(t, os.WriteFile(s.Join("lock"), fmt.Appendln(nil, pid), 0o600))
		}
		opened := make(chan error, 1)
		go func() {
			s, err := statedir.Open(dir)
			if err == nil {
				err = s.Close()
			}
			opened <- err
		}()
		select {
		case err := <-opened:
			t.Errorf("%s: opened while the child has the lock: %v", name, err)
		case <-time.After(50 * time.Millisecond):
		}
		must(t, child.Close())
		if err := <-opened; err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// held is this process's open file of a path once more, as a child that was forked has it.
func held(t *testing.T, path string) *os.File {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	for _, e := range fds {
		if at, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && at == path {
			fd, err := strconv.Atoi(e.Name())
			must(t, err)
			again, err := syscall.Dup(fd)
			must(t, err)
			syscall.CloseOnExec(again)
			return os.NewFile(uintptr(again), path)
		}
	}
	t.Fatalf("%s is not open", path)
	return nil
}

func TestFiles(t *testing.T) {
	dir := t.TempDir()
	s, err := statedir.Open(dir)
	must(t, err)
	defer s.Close()
	if _, err := s.ReadFile("f", 10); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing: %v", err)
	}
	must(t, os.Symlink("/etc/passwd", s.Join("f.new"))) // of a crash, or worse
	must(t, s.Replace("f", []byte("text")))
	if b, err := s.ReadFile("f", 10); err != nil || string(b) != "text" {
		t.Errorf("%q, %v", b, err)
	}
	if _, err := s.ReadFile("f", 3); err == nil {
		t.Error("a file over the limit was read")
	}
	must(t, os.Chmod(s.Join("f"), 0o666))
	if _, err := s.ReadFile("f", 10); !errors.Is(err, statedir.ErrForeign) {
		t.Errorf("writable by others: %v", err)
	}
	must(t, os.Symlink("f", s.Join("l")))
	if _, err := s.ReadFile("l", 10); err == nil {
		t.Error("a link was followed")
	}
}

func TestSecrets(t *testing.T) {
	for _, tt := range []struct {
		mode os.FileMode
		uid  int // stranger, or 0 for the own
		want string
	}{
		{mode: 0o600}, {mode: 0o400},
		{mode: 0o640, want: "chmod 600"}, {mode: 0o604, want: "chmod 600"}, {mode: 0o620, want: "chmod 600"},
		{mode: 0o600, uid: stranger, want: "is user 54321's"},
	} {
		path := filepath.Join(t.TempDir(), "token")
		must(t, os.WriteFile(path, []byte(" secret\n"), 0o600))
		must(t, os.Chmod(path, tt.mode))
		if tt.uid != 0 {
			if os.Geteuid() != 0 {
				continue // only root can
			}
			must(t, os.Chown(path, tt.uid, 0))
		}
		b, err := statedir.ReadSecret(path)
		if check := statedir.CheckSecret(path); (check == nil) != (err == nil) {
			t.Errorf("%04o: %v, and %v", tt.mode, err, check)
		}
		if tt.want == "" && (err != nil || string(b) != "secret") || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), path)) {
			t.Errorf("%04o of %d: %q, %v; want %q", tt.mode, tt.uid, b, err, tt.want)
		}
	}
	if _, err := statedir.ReadSecret(t.TempDir()); err == nil {
		t.Error("a directory is no secret")
	}
}
