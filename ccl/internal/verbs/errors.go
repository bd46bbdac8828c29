package verbs

import (
	"errors"
	"fmt"
	"syscall"
)

// ErrNoLibrary means that this process cannot use RDMA at all: no cgo, no
// library, or one that lacks a function. The error around it says which.
var ErrNoLibrary = errors.New("no usable libibverbs")

// What callers branch on.
var (
	// ErrNoDevice: there is no RDMA device, or none of that name.
	ErrNoDevice = errors.New("no such RDMA device")
	// ErrClosed: the object was closed before.
	ErrClosed = errors.New("closed")
	// ErrBusy: the object still has children.
	ErrBusy = errors.New("in use")
	// ErrNotSupported: not by this library, kernel or device.
	ErrNotSupported = errors.New("not supported by this library, kernel or device")
	// ErrDeviceLost: the device was removed, or has failed for good.
	ErrDeviceLost = errors.New("the RDMA device is lost")
	// ErrNoMemory: a queue is full (posts), the limit of locked memory is
	// reached (registrations), or the device has no more of what was asked for.
	ErrNoMemory = errors.New("no memory or no room")
)

// Error is what a call answered. It unwraps to its Errno.
type Error struct {
	Call   string // with the object and the device: "modify queue pair 17 of mlx5_0/1 to RTR"
	Device string
	Errno  syscall.Errno
	Detail string // the arguments that matter, or what to do; may be empty
}

func (e *Error) Error() string {
	if e.Detail == "" {
		return fmt.Sprintf("verbs: %s: %v", e.Call, e.Errno)
	}
	return fmt.Sprintf("verbs: %s: %v (%s)", e.Call, e.Errno, e.Detail)
}

func (e *Error) Unwrap() error { return e.Errno }

// Is tells whether target is the sentinel for the error's number.
func (e *Error) Is(target error) bool {
	switch target {
	case ErrNotSupported:
		return e.Errno == syscall.EOPNOTSUPP || e.Errno == syscall.ENOSYS || e.Errno == syscall.EPROTONOSUPPORT
	case ErrDeviceLost:
		return e.Errno == syscall.EIO || e.Errno == syscall.ENODEV
	case ErrNoMemory:
		return e.Errno == syscall.ENOMEM
	case ErrBusy:
		return e.Errno == syscall.EBUSY
	}
	return false
}

func closedError(what string) error { return fmt.Errorf("verbs: %s: %w", what, ErrClosed) }
