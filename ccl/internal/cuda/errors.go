package cuda

import (
	"errors"
	"fmt"
	"strings"
	"unsafe"
)

// ErrNoDriver means that this process cannot use a GPU at all: no cgo, no
// library, one too old, or no GPU behind it. The error around it says which.
var ErrNoDriver = errors.New("no usable CUDA driver")

// What callers branch on; errors.Is finds them in an *Error by its code.
var (
	ErrOutOfMemory  = errors.New("GPU memory exhausted")
	ErrNotFound     = errors.New("no such symbol in the module")
	ErrPeerAccess   = errors.New("GPUs have no peer access")
	ErrNotPermitted = errors.New("not permitted")
	ErrNotSupported = errors.New("not supported by this GPU, driver or platform")
	// ErrCapture: the call cannot be captured, or spoiled a capture.
	ErrCapture = errors.New("stream capture violated")
	// ErrContextLost: a kernel or the hardware failed; every later call of the
	// process on this GPU fails too. Only a new process helps.
	ErrContextLost = errors.New("the GPU's context is lost")
	// ErrClosed: the device, stream, event or graph was closed before.
	ErrClosed = errors.New("closed")
)

// Error is what a call of the driver answered.
type Error struct {
	Call   string // with the arguments that matter
	Code   int    // CUresult
	Name   string // CUDA_ERROR_…
	Detail string // CUDA's sentence, and what else is known
	Device int    // ordinal, -1: of no device
}

func (e *Error) Error() string {
	on := ""
	if e.Device >= 0 {
		on = fmt.Sprintf(" on GPU %d", e.Device)
	}
	return fmt.Sprintf("%s%s: %s (%d): %s", e.Call, on, e.Name, e.Code, e.Detail)
}

// Is tells whether target is the sentinel for the error's code.
func (e *Error) Is(target error) bool {
	switch c := e.Code; target {
	case ErrOutOfMemory:
		return c == 2
	case ErrNotFound:
		return c == 500
	case ErrPeerAccess:
		return c == 217 || c == 704 || c == 705
	case ErrNotPermitted:
		return c == 800
	case ErrNotSupported:
		return c == 801
	case ErrCapture:
		return c >= 900 && c <= 908
	case ErrContextLost:
		// ECC, NVLink, illegal address, timeout, assert, and the hardware's exceptions.
		return c == 214 || c == 220 || c == 700 || c == 702 || c == 710 || c >= 714 && c <= 719
	}
	return false
}

const (
	codeInvalidValue      = 1
	codeNotReady          = 600
	codeAlreadyRegistered = 712
)

// fail makes the error of a call, with args in parentheses or empty, that answered code.
func (d *Driver) fail(p proc, args string, code, device int) error {
	return &Error{
		Call: strings.TrimSuffix(symbols[p], "_v2") + args, Code: code, Device: device,
		Name:   d.words(cuGetErrorName, code, "CUDA_ERROR"),
		Detail: d.words(cuGetErrorString, code, "unknown to this driver"),
	}
}

func (d *Driver) words(p proc, code int, unknown string) string {
	var s *byte // the driver's own memory
	if d.call(p, uintptr(code), uintptr(unsafe.Pointer(&s))) != 0 || s == nil {
		return unknown
	}
	n := 0
	for *(*byte)(unsafe.Add(unsafe.Pointer(s), n)) != 0 {
		n++
	}
	return string(unsafe.Slice(s, n))
}
