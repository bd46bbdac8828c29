package record

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"syscall"
)

// Users of one machine do not share a directory: who can write where recorders lie speaks
// for the jobs of all. Of the base B, which is $LOCKSTEP_RUNTIME_DIR or /dev/shm/lockstep,
// user U's directory is the first of these that is U's alone:
//
//	B          where the variable names it
//	B-U        beside it, where only root can rename what U makes: as in /dev/shm
//	B/U        in it, where root has made it for everybody (mode 1777)
//	B-U.KEY    when somebody else has taken the name
//
// Readers look in all of them, and believe each for its owner only.

// DefaultDir is $LOCKSTEP_RUNTIME_DIR, or else /dev/shm/lockstep: the base of users'
// runtime directories, for readers. Writers ask Dir.
func DefaultDir() string {
	if dir := os.Getenv("LOCKSTEP_RUNTIME_DIR"); dir != "" {
		return dir
	}
	return defaultBase
}

const defaultBase = "/dev/shm/lockstep"

// ErrForeign is an error about a directory or file that is another user's, or that others
// can write.
var ErrForeign = errors.New("another user's, or open to others")

// Dir makes and returns this user's runtime directory. key is what nobody else can guess
// and all processes that are to meet there know: it makes a name that cannot be taken in
// advance; "" for none. refused is why the first choices were not taken; when none is
// left, err wraps them.
func Dir(key string) (dir string, refused []error, err error) {
	return dirBelow(DefaultDir(), os.Getenv("LOCKSTEP_RUNTIME_DIR") != "", key)
}

// DirBelow is Dir for a base that is given.
func DirBelow(base, key string) (dir string, refused []error, err error) {
	return dirBelow(base, true, key)
}

func dirBelow(base string, explicit bool, key string) (dir string, refused []error, err error) {
	base = filepath.Clean(base)
	user := strconv.Itoa(os.Geteuid())
	var choices []string
	prefix := base + "-" + user
	switch {
	case forEverybody(base):
		prefix = filepath.Join(base, user)
	case explicit:
		// A link that this user or root has made is as good as the directory.
		if st, err := os.Lstat(base); err == nil && st.Mode()&os.ModeSymlink != 0 {
			if sys, ok := st.Sys().(*syscall.Stat_t); ok && trusted(sys.Uid) {
				if to, err := filepath.EvalSymlinks(base); err == nil {
					base = to
				}
			}
		}
		choices = []string{base}
	}
	choices = append(choices, prefix)
	if key != "" {
		choices = append(choices, prefix+"."+key)
	}
	for _, dir := range choices {
		err := error(nil)
		if dir != base {
			err = safeParent(filepath.Dir(dir))
		}
		if err == nil {
			err = UseDir(dir)
		}
		if err == nil {
			return dir, refused, nil
		}
		refused = append(refused, err)
	}
	return "", refused, fmt.Errorf("no runtime directory: %w", errors.Join(refused...))
}

// forEverybody reports whether a directory is root's or this user's, and everybody makes
// theirs in it, as in /tmp.
func forEverybody(dir string) bool {
	var st syscall.Stat_t
	return syscall.Stat(dir, &st) == nil && st.Mode&syscall.S_IFMT == syscall.S_IFDIR && st.Mode&0o002 != 0 && st.Mode&syscall.S_ISVTX != 0 && trusted(st.Uid)
}

// safeParent refuses a directory whose entries other users can rename.
func safeParent(dir string) error {
	var st syscall.Stat_t
	if err := syscall.Stat(dir, &st); err != nil {
		if errors.Is(err, syscall.ENOENT) {
			return nil // it will be ours
		}
		return &os.PathError{Op: "stat", Path: dir, Err: err}
	}
	if !trusted(st.Uid) || st.Mode&0o022 != 0 && st.Mode&syscall.S_ISVTX == 0 {
		return fmt.Errorf("directory %s: user %d, or others, can rename what is in it (mode %04o): %w: set LOCKSTEP_RUNTIME_DIR", dir, st.Uid, st.Mode&0o7777, ErrForeign)
	}
	return nil
}

// trusted is root, this user, and, in a user namespace, who has no number there.
func trusted(uid uint32) bool {
	const overflow = 65534
	return uid == 0 || uid == uint32(os.Geteuid()) || uid == overflow
}

// UseDir makes dir, mode 0700, when it is missing, and refuses one in which another user
// could put or swap files, and a symbolic link.
func UseDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) && !errors.Is(err, syscall.ENOTDIR) {
		return err
	}
	return checkDir(dir)
}

// ShareDir makes dir, when it is missing, and has every user make a directory of their own in
// it (mode 1777, as /tmp): for ranks that see it by a mount, and not what is beside it. It
// refuses a link, and what is neither root's nor this user's.
func ShareDir(dir string) error {
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	f, err := os.OpenFile(dir, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return fmt.Errorf("share directory %s: %w", dir, err)
	}
	defer f.Close()
	var st syscall.Stat_t
	if err := syscall.Fstat(int(f.Fd()), &st); err != nil {
		return &os.PathError{Op: "stat", Path: dir, Err: err}
	}
	if st.Uid != 0 && st.Uid != uint32(os.Geteuid()) {
		return fmt.Errorf("share directory %s: it is user %d's: %w: remove it, or choose another one", dir, st.Uid, ErrForeign)
	}
	if err := f.Chmod(0o777 | os.ModeSticky); err != nil {
		return fmt.Errorf("share directory %s: %w", dir, err)
	}
	return nil
}

// checkDir looks at the directory itself, which is opened first.
func checkDir(dir string) error {
	fd, err := syscall.Open(dir, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0)
	if errors.Is(err, syscall.ELOOP) || errors.Is(err, syscall.ENOTDIR) {
		return fmt.Errorf("%s is a symbolic link, or not a directory: %w: remove it, or set LOCKSTEP_RUNTIME_DIR", dir, ErrForeign)
	}
	if errors.Is(err, syscall.EACCES) {
		return fmt.Errorf("directory %s is not this user's: %w: set LOCKSTEP_RUNTIME_DIR", dir, ErrForeign)
	}
	if err != nil {
		return &os.PathError{Op: "open", Path: dir, Err: err}
	}
	defer syscall.Close(fd)
	var st syscall.Stat_t
	if err := syscall.Fstat(fd, &st); err != nil {
		return &os.PathError{Op: "stat", Path: dir, Err: err}
	}
	switch sticky := st.Mode&syscall.S_ISVTX != 0; {
	case sticky && trusted(st.Uid): // as /dev/shm itself
		return nil
	case st.Uid != uint32(os.Geteuid()):
		return fmt.Errorf("directory %s is user %d's, and this process is user %d's: %w: set LOCKSTEP_RUNTIME_DIR", dir, st.Uid, os.Geteuid(), ErrForeign)
	case st.Mode&0o022 != 0:
		return fmt.Errorf("directory %s is writable by others (mode %04o): %w: chmod go-w, or set LOCKSTEP_RUNTIME_DIR", dir, st.Mode&0o7777, ErrForeign)
	}
	return nil
}

// Place is a directory with recorders.
type Place struct {
	Path  string
	Owner uint32 // who alone can put files there; meaningless when Shared
	// Shared: everybody can, and each file speaks for its own owner.
	Shared bool
}

const (
	// maxEntries bounds how much of a directory is looked at: who fills theirs hides their
	// own files. tmpfs lists the latest first.
	maxEntries = 1 << 12
	// maxBeside is that of the directory that users' directories are in, with much else.
	maxBeside = 1 << 16
)

// Places are the runtime directories of all users below base, as far as this process may
// see. refused names those that are not what their names say: squatted by another user,
// writable by others, or links.
func Places(base string) (places []Place, refused []error) {
	base = filepath.Clean(base)
	var st syscall.Stat_t
	if syscall.Stat(base, &st) == nil && st.Mode&syscall.S_IFMT == syscall.S_IFDIR {
		shared := st.Mode&0o022 != 0
		places = append(places, Place{base, st.Uid, shared})
		if shared {
			places, refused = usersIn(base, "", places, refused)
		}
	}
	return usersIn(filepath.Dir(base), filepath.Base(base)+"-", places, refused)
}

// usersIn adds the directories in dir whose names are prefix and a user's number.
func usersIn(dir, prefix string, places []Place, refused []error) ([]Place, []error) {
	names, _ := entries(dir, maxBeside, func(e os.DirEntry) bool {
		_, ok := userOf(e.Name(), prefix)
		return ok
	}) // none, when it may not be listed
	for _, path := range names {
		uid, _ := userOf(filepath.Base(path), prefix)
		var st syscall.Stat_t
		switch err := syscall.Lstat(path, &st); {
		case err != nil: // gone
		case st.Mode&syscall.S_IFMT != syscall.S_IFDIR:
			refused = append(refused, fmt.Errorf("%s is no directory: %w: remove it, so that user %d has one", path, ErrForeign, uid))
		case st.Uid != uid:
			refused = append(refused, fmt.Errorf("directory %s is user %d's, and its name user %d's: %w: remove it", path, st.Uid, uid, ErrForeign))
		case st.Mode&0o022 != 0:
			refused = append(refused, fmt.Errorf("directory %s is writable by others (mode %04o): %w: chmod go-w it", path, st.Mode&0o7777, ErrForeign))
		default:
			places = append(places, Place{Path: path, Owner: uid})
		}
	}
	return places, refused
}

// userOf reads a name of the form PREFIX UID [. KEY].
func userOf(name, prefix string) (uid uint32, ok bool) {
	rest, ok := strings.CutPrefix(name, prefix)
	if !ok {
		return 0, false
	}
	rest, _, _ = strings.Cut(rest, ".")
	n, err := strconv.ParseUint(rest, 10, 32)
	return uint32(n), err == nil && strconv.FormatUint(n, 10) == rest
}

// entries lists a directory, bounded and sorted; nothing when it does not exist.
func entries(dir string, limit int, want func(os.DirEntry) bool) ([]string, error) {
	f, err := os.Open(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list recorders: %w", err)
	}
	defer f.Close()
	var paths []string
	for seen := 0; seen < limit; {
		some, err := f.ReadDir(1024)
		for _, e := range some {
			if want(e) {
				paths = append(paths, filepath.Join(dir, e.Name()))
			}
		}
		if seen += len(some); err != nil || len(some) == 0 {
			if err != nil && !errors.Is(err, io.EOF) && seen == 0 {
				return nil, fmt.Errorf("list recorders: %w", err)
			}
			break
		}
	}
	sort.Strings(paths)
	return paths, nil
}
