package statedir

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// What callers branch on. Every error wraps one of these, or the system's.
var (
	ErrForeign = errors.New("another user's, or open to others")
	ErrLocked  = errors.New("in use by another process")
)

// lockName is the file in a state directory that is locked. It stays there.
const lockName = "lock"

// Dir is a state directory in use. Safe for concurrent use.
type Dir struct {
	path string
	fd   *os.File // the directory: names are looked up in it and nowhere else
	lock *os.File
}

// Open makes, checks and locks the directory at path: mode 0700 when it is new, else of
// this user and written by nobody else. The error wraps ErrForeign or ErrLocked, and
// says what to do.
func Open(path string) (*Dir, error) { return open(path, 0o022) }

// OpenPrivate is Open for a directory that nobody else may look into either.
func OpenPrivate(path string) (*Dir, error) { return open(path, 0o077) }

func open(path string, forbidden uint32) (*Dir, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("state directory %s: %w", path, err)
	}
	fd, err := walk(path, forbidden, true)
	if err != nil {
		return nil, fmt.Errorf("state directory %s: %w", path, err)
	}
	d := &Dir{path: path, fd: fd}
	if err := d.take(); err != nil {
		fd.Close()
		return nil, fmt.Errorf("state directory %s: %w", path, err)
	}
	return d, nil
}

// Check is what Open refuses a directory for, save the lock. One that is missing is an
// os.ErrNotExist.
func Check(path string) error {
	path, err := filepath.Abs(path)
	if err == nil {
		var fd *os.File
		if fd, err = walk(path, 0o022, false); err == nil {
			fd.Close()
		}
	}
	if err != nil {
		return fmt.Errorf("state directory %s: %w", path, err)
	}
	return nil
}

// take locks the directory, and leaves this process's pid for whoever finds it locked.
func (d *Dir) take() error {
	fd, err := unix.Openat(int(d.fd.Fd()), lockName, unix.O_RDWR|unix.O_CREAT|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return fmt.Errorf("lock file: %w", err)
	}
	f := os.NewFile(uintptr(fd), filepath.Join(d.path, lockName))
	if _, err := checkFile(f); err != nil {
		f.Close()
		return err
	}
	err = lock(f)
	if errors.Is(err, unix.EWOULDBLOCK) {
		who := ""
		if pid := holder(f); pid > 0 {
			who = fmt.Sprintf(" (process %d, unless that was another node's or container's)", pid)
		}
		f.Close()
		return fmt.Errorf("%w%s: end that one first, or give this one a directory of its own", ErrLocked, who)
	}
	if err != nil {
		f.Close()
		return fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	_ = f.Truncate(0) // who has it is told to people only
	_, _ = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	d.lock = f
	return nil
}

// lock takes the lock, unless a living process has it. What a process has forked holds its locks, too,
// until it executes its program: a moment longer than a process that is killed, or closes the Dir.
func lock(f *os.File) error {
	for until := time.Now().Add(patience); ; {
		switch err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EWOULDBLOCK) && time.Now().Before(until) && !lives(holder(f)):
			time.Sleep(5 * time.Millisecond)
		default:
			return err
		}
	}
}

// patience is for a child that gets no CPU between its fork and its exec.
const patience = 5 * time.Second

// holder is the pid that a lock file names, 0 when it names none.
func holder(f *os.File) int {
	var b [20]byte
	n, _ := f.ReadAt(b[:], 0)
	pid, err := strconv.Atoi(strings.TrimSpace(string(b[:n])))
	if err != nil || pid < 0 {
		return 0
	}
	return pid
}

// lives reports whether there is a process of that pid that has not ended.
func lives(pid int) bool {
	if pid == 0 || errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
		return false
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return !errors.Is(err, os.ErrNotExist)
	}
	_, state, _ := bytes.Cut(stat, []byte(") ")) // a name with ") " in it passes for a living one's
	return !bytes.HasPrefix(state, []byte("Z")) && !bytes.HasPrefix(state, []byte("X"))
}

// Path is the directory's, absolute.
func (d *Dir) Path() string { return d.path }

// Join is the path of a file in the directory.
func (d *Dir) Join(name string) string { return filepath.Join(d.path, name) }

// Close gives the directory back.
func (d *Dir) Close() error {
	_ = d.lock.Truncate(0) // nobody has it, though what this process forks just now may for a moment
	return errors.Join(d.lock.Close(), d.fd.Close())
}

// ReadFile reads a file of at most limit bytes that this user, or root, wrote. One that is
// missing is an os.ErrNotExist.
func (d *Dir) ReadFile(name string, limit int64) ([]byte, error) {
	fd, err := unix.Openat(int(d.fd.Fd()), name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: d.Join(name), Err: err}
	}
	f := os.NewFile(uintptr(fd), d.Join(name))
	defer f.Close()
	st, err := checkFile(f)
	if err != nil {
		return nil, err
	}
	return readAll(f, st, limit)
}

func readAll(f *os.File, st *unix.Stat_t, limit int64) ([]byte, error) {
	if st.Size > limit {
		return nil, fmt.Errorf("%s has %d bytes, and more than %d cannot be meant", f.Name(), st.Size, limit)
	}
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("%s has more than %d bytes", f.Name(), limit)
	}
	return b, err
}

// checkFile refuses what is no regular file, or what others could have written.
func checkFile(f *os.File) (*unix.Stat_t, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, fmt.Errorf("%s: %w", f.Name(), err)
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return nil, fmt.Errorf("%s is no regular file: %w: remove it", f.Name(), ErrForeign)
	case st.Uid != uint32(os.Geteuid()) && st.Uid != 0:
		return nil, fmt.Errorf("%s is user %d's, not user %d's: %w: remove it, or chown it", f.Name(), st.Uid, os.Geteuid(), ErrForeign)
	case st.Mode&0o022 != 0:
		return nil, fmt.Errorf("%s can be written by others (mode %04o): %w: chmod go-w it", f.Name(), st.Mode&0o7777, ErrForeign)
	}
	return &st, nil
}

// Replace replaces a file as a whole, mode 0600; a crash leaves the old one or the new one.
func (d *Dir) Replace(name string, content []byte) error { return d.replace(name, content, true) }

// ReplaceUntilBoot is Replace for what means nothing after the next boot: a crash of this process
// leaves the old one or the new one, and the disk is not waited for.
func (d *Dir) ReplaceUntilBoot(name string, content []byte) error {
	return d.replace(name, content, false)
}

func (d *Dir) replace(name string, content []byte, sync bool) error {
	at := int(d.fd.Fd())
	next := name + ".new" // this process alone uses the directory
	_ = unix.Unlinkat(at, next, 0)
	fd, err := unix.Openat(at, next, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return &os.PathError{Op: "create", Path: d.Join(next), Err: err}
	}
	f := os.NewFile(uintptr(fd), d.Join(next))
	_, err = f.Write(content)
	if err == nil && sync {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		if err = unix.Renameat(at, next, at, name); err != nil {
			err = &os.PathError{Op: "rename", Path: d.Join(next), Err: err}
		}
	}
	if err != nil {
		_ = unix.Unlinkat(at, next, 0)
		return err
	}
	if !sync {
		return nil
	}
	return d.fd.Sync()
}
