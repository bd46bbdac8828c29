//go:build cgo

package verbstest

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

// All that the fake's control functions take are integers and pointers, which
// travel alike on Linux's amd64 and arm64.
typedef int (*control_fn)(uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t);

static int control(uintptr_t fn, uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t e) { return ((control_fn)fn)(a, b, c, d, e); }
*/
import "C"

import (
	"errors"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
)

const cgo = true

var library unsafe.Pointer

// bind opens the library as verbs will: the loader knows it by its path then,
// and gives the same one.
func bind(path string) error {
	p := C.CString(path)
	defer C.free(unsafe.Pointer(p))
	if library = C.dlopen(p, C.RTLD_NOW|C.RTLD_LOCAL); library == nil {
		return errors.New(C.GoString(C.dlerror()))
	}
	return nil
}

func control(name string, args ...uintptr) int {
	s := C.CString(name)
	defer C.free(unsafe.Pointer(s))
	fn := C.dlsym(library, s)
	if fn == nil {
		panic("verbstest: the fake libibverbs lacks " + name)
	}
	var a [5]C.uintptr_t
	for i, v := range args {
		a[i] = C.uintptr_t(v)
	}
	return int(C.control(C.uintptr_t(uintptr(fn)), a[0], a[1], a[2], a[3], a[4]))
}

// withString passes a string before the numbers.
func withString(name, s string, args ...uintptr) int {
	p := C.CString(s)
	defer C.free(unsafe.Pointer(p))
	return control(name, append([]uintptr{uintptr(unsafe.Pointer(p))}, args...)...)
}

func setGID(port, index int, e verbs.GIDEntry) {
	p := C.CBytes(e.GID[:])
	defer C.free(p)
	control("fake_set_gid", uintptr(port), uintptr(index), uintptr(p), uintptr(e.Type), 0)
}
