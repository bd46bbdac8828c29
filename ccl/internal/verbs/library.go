package verbs

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
)

// LibraryEnv names the variable that overrides where the library is looked for.
const LibraryEnv = "LOCKSTEP_LIBIBVERBS"

// SysfsEnv names the variable, libibverbs' own, that overrides where sysfs is.
const SysfsEnv = "SYSFS_PATH"

// Library is the process's libibverbs.
type Library struct {
	path string
}

// Load opens the library, once for the process: later calls answer what the
// first did. The error wraps ErrNoLibrary and says what was looked for and what
// the machine has of RDMA.
func Load() (*Library, error) { return loadOnce() }

var loadOnce = sync.OnceValues(func() (*Library, error) {
	path, hint := os.Getenv(LibraryEnv), "the path is from "+LibraryEnv
	if path == "" {
		path, hint = "libibverbs.so.1", LibraryEnv+" overrides the path"
	}
	if err := load(path); err != nil {
		return nil, fmt.Errorf("%w: %w (%s; %s)", ErrNoLibrary, err, hint, machine())
	}
	return &Library{path: path}, nil
})

// machine says what of RDMA the kernel shows.
func machine() string {
	var say []string
	for _, dir := range []string{"/dev/infiniband", filepath.Join(sysfs(), "class/infiniband")} {
		entries, err := os.ReadDir(dir)
		var names []string
		for _, e := range entries {
			names = append(names, e.Name())
		}
		switch {
		case os.IsNotExist(err):
			say = append(say, "no "+dir)
		case err != nil:
			say = append(say, err.Error())
		case len(names) == 0:
			say = append(say, dir+" is empty")
		default:
			say = append(say, dir+" has "+strings.Join(names, ", "))
		}
	}
	return strings.Join(say, ", ")
}

func sysfs() string {
	if p := os.Getenv(SysfsEnv); p != "" {
		return p
	}
	return "/sys"
}

// Path is what was opened.
func (l *Library) Path() string { return l.path }

// Device is what is known of a device without opening it.
type Device struct {
	Name string // as the kernel names it: "mlx5_0"
	GUID uint64 // of the node; 0 when unknown
}

// Devices lists the machine's RDMA devices; none is no error.
func (l *Library) Devices() ([]Device, error) {
	devices, errno := listDevices()
	if errno != 0 {
		return nil, &Error{Call: "list devices", Errno: errno, Detail: machine()}
	}
	return devices, nil
}

// Open opens a device by its kernel name. The error is ErrNoDevice where there
// is none.
func (l *Library) Open(name string) (*Context, error) {
	h, found, errno := openDevice(name)
	switch {
	case errno != 0:
		return nil, &Error{Call: "open " + name, Device: name, Errno: errno, Detail: openHint(errno)}
	case !found:
		return nil, fmt.Errorf("verbs: open %s: %w (%s)", name, ErrNoDevice, machine())
	}
	return &Context{h: h, name: name}, nil
}

func openHint(errno syscall.Errno) string {
	if errno == syscall.EACCES || errno == syscall.EPERM {
		return "is /dev/infiniband/uverbs* readable and writable for this user and, in a container, mapped?"
	}
	return machine()
}
