//go:build cgo

package cudatest

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdlib.h>

// dlopen of a library that is open already gives the one that is there.
static int fault(const char *lib, const char *call, int code, int nth, int ms) {
	void *h = dlopen(lib, RTLD_NOW);
	if (!h) return -1;
	void (*f)(const char *, int, int, int) = (void (*)(const char *, int, int, int))dlsym(h, "fake_fault");
	if (f) f(*call ? call : 0, code, nth, ms);
	dlclose(h);
	return f ? 0 : -1;
}

static int deny(const char *lib, int attribute) {
	void *h = dlopen(lib, RTLD_NOW);
	if (!h) return -1;
	void (*f)(int) = (void (*)(int))dlsym(h, "fake_deny");
	if (f) f(attribute);
	dlclose(h);
	return f ? 0 : -1;
}

// pair calls a function about two GPUs.
static int pair(const char *lib, const char *name, int a, int b) {
	void *h = dlopen(lib, RTLD_NOW);
	if (!h) return -1;
	void (*f)(int, int) = (void (*)(int, int))dlsym(h, name);
	if (f) f(a, b);
	dlclose(h);
	return f ? 0 : -1;
}

static int slowLink(const char *lib, unsigned from, unsigned to, unsigned us) {
	void *h = dlopen(lib, RTLD_NOW);
	if (!h) return -1;
	void (*f)(unsigned, unsigned, unsigned) = (void (*)(unsigned, unsigned, unsigned))dlsym(h, "fake_slow_link");
	if (f) f(from, to, us);
	dlclose(h);
	return f ? 0 : -1;
}
*/
import "C"

import (
	"os"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
)

const cgo = true

func fault(call string, code, nth, ms int) {
	lib, name := C.CString(os.Getenv(cuda.LibraryEnv)), C.CString(call)
	defer C.free(unsafe.Pointer(lib))
	defer C.free(unsafe.Pointer(name))
	if C.fault(lib, name, C.int(code), C.int(nth), C.int(ms)) != 0 {
		panic("cudatest: the fake libcuda is not open; call Start first")
	}
}

func deny(attribute int) {
	lib := C.CString(os.Getenv(cuda.LibraryEnv))
	defer C.free(unsafe.Pointer(lib))
	if C.deny(lib, C.int(attribute)) != 0 {
		panic("cudatest: the fake libcuda is not open; call Start first")
	}
}

func separate(a, b int) { pair("fake_separate", a, b) }

func unlink(a, b int) { pair("fake_unlink", a, b) }

func pair(call string, a, b int) {
	lib, name := C.CString(os.Getenv(cuda.LibraryEnv)), C.CString(call)
	defer C.free(unsafe.Pointer(lib))
	defer C.free(unsafe.Pointer(name))
	if C.pair(lib, name, C.int(a), C.int(b)) != 0 {
		panic("cudatest: the fake libcuda is not open; call Start first")
	}
}

func slowLink(from, to, us int) {
	lib := C.CString(os.Getenv(cuda.LibraryEnv))
	defer C.free(unsafe.Pointer(lib))
	if C.slowLink(lib, C.uint(from), C.uint(to), C.uint(us)) != 0 {
		panic("cudatest: the fake libcuda is not open, or has none of the kernels; call Start first")
	}
}
