package statedir

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// maxLinks bounds the links on the way, as the kernel does.
const maxLinks = 40

// walk opens the directory at path, name by name from the root, so that nothing is followed
// or made that has not been looked at. The last name must be a directory of this user's
// whose mode has none of the bits forbidden.
func walk(path string, forbidden uint32, create bool) (*os.File, error) {
	names := split(path)
	at, err := unix.Open("/", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	here, links := "/", 0
	defer func() { unix.Close(at) }()
	if len(names) == 0 {
		return nil, fmt.Errorf("%w: it is the root directory", ErrForeign)
	}
	for len(names) > 0 {
		name := names[0]
		next := filepath.Join(here, name)
		fd, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.EACCES) && len(names) > 1 {
			fd, err = unix.Openat(at, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0) // entered, not listed
		}
		switch {
		case errors.Is(err, unix.ENOENT) && create:
			if err := unix.Mkdirat(at, name, 0o700); err != nil && !errors.Is(err, unix.EEXIST) {
				return nil, &os.PathError{Op: "mkdir", Path: next, Err: err}
			}
			if links++; links > maxLinks { // whoever removes it again does so for ever
				return nil, &os.PathError{Op: "mkdir", Path: next, Err: err}
			}
			continue
		case errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOTDIR):
			if links++; links > maxLinks {
				return nil, &os.PathError{Op: "open", Path: next, Err: unix.ELOOP}
			}
			target, err := link(at, name, next, len(names) == 1)
			if err != nil {
				return nil, err
			}
			rest := names[1:]
			if names = append(split(target), rest...); filepath.IsAbs(target) {
				root, err := unix.Open("/", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
				if err != nil {
					return nil, err
				}
				unix.Close(at)
				at, here = root, "/"
			}
			continue
		case err != nil:
			return nil, &os.PathError{Op: "open", Path: next, Err: err}
		}
		unix.Close(at)
		at, here, names = fd, next, names[1:]
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return nil, &os.PathError{Op: "stat", Path: next, Err: err}
		}
		if len(names) > 0 {
			err = above(next, &st)
		} else {
			err = own(next, &st, forbidden)
		}
		if err != nil {
			return nil, err
		}
	}
	fd := at
	at = -1
	return os.NewFile(uintptr(fd), path), nil
}

// split keeps "..", which a link's target may hold.
func split(path string) []string {
	var names []string
	for name := range strings.SplitSeq(path, "/") {
		if name != "" && name != "." {
			names = append(names, name)
		}
	}
	return names
}

// link reads a link on the way. It must be root's or this user's, and not the last name.
func link(at int, name, path string, last bool) (target string, err error) {
	var st unix.Stat_t
	if err := unix.Fstatat(at, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return "", &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFLNK {
		return "", &os.PathError{Op: "open", Path: path, Err: unix.ENOTDIR}
	}
	if last {
		return "", fmt.Errorf("%s is a symbolic link: %w: give the directory that it leads to", path, ErrForeign)
	}
	if !trusted(st.Uid) {
		return "", fmt.Errorf("%s is a symbolic link of user %d: %w: give a directory that no other user can lead elsewhere", path, st.Uid, ErrForeign)
	}
	b := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(at, name, b)
	if err != nil {
		return "", &os.PathError{Op: "readlink", Path: path, Err: err}
	}
	return string(b[:n]), nil
}

// above refuses a directory on the way in which another user could put something else in
// the next one's place.
func above(path string, st *unix.Stat_t) error {
	mode := st.Mode & 0o7777
	// A group of the user's own, of the same number, has nobody else in it by custom.
	ownGroup := st.Gid == uint32(os.Getegid()) && os.Getegid() == os.Geteuid()
	switch {
	case !trusted(st.Uid):
		return fmt.Errorf("%s, above it, is user %d's, who can replace it: %w: give a directory below one of user %d or root", path, st.Uid, ErrForeign, os.Geteuid())
	case mode&unix.S_ISVTX != 0, mode&0o022 == 0, mode&0o002 == 0 && ownGroup:
		return nil
	}
	return fmt.Errorf("%s, above it, can be written by others (mode %04o), who can replace it: %w: chmod go-w it, or give a directory elsewhere", path, mode, ErrForeign)
}

// own refuses a directory that is not this user's alone.
func own(path string, st *unix.Stat_t, forbidden uint32) error {
	mode := st.Mode & 0o7777
	switch {
	case st.Uid != uint32(os.Geteuid()):
		return fmt.Errorf("%s is user %d's, and this process is user %d's: %w: give it a directory of its own", path, st.Uid, os.Geteuid(), ErrForeign)
	case mode&0o022 != 0:
		return fmt.Errorf("%s can be written by others (mode %04o), and what is in it is believed: %w: chmod 700 it", path, mode, ErrForeign)
	case mode&forbidden != 0:
		return fmt.Errorf("%s holds secrets, and others may enter it (mode %04o): %w: chmod 700 it", path, mode, ErrForeign)
	}
	return nil
}

// trusted reports whether a user may own what is on the way: root, this user, or, inside a
// user namespace, whoever has no number there (root outside, as a rule).
func trusted(uid uint32) bool {
	return uid == 0 || uid == uint32(os.Geteuid()) || uid == unmapped()
}

// unmapped is the number that stands for users without one, 0 where all have theirs.
var unmapped = sync.OnceValue(func() uint32 {
	b, err := os.ReadFile("/proc/self/uid_map")
	if f := strings.Fields(string(b)); err != nil || len(f) == 3 && f[0] == "0" && f[1] == "0" && f[2] == "4294967295" {
		return 0
	}
	b, err = os.ReadFile("/proc/sys/kernel/overflowuid")
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 32)
	return uint32(n)
})
