//go:build cgo

package cuda

/*
#cgo LDFLAGS: -ldl
#cgo noescape ls_call
#cgo nocallback ls_call
#cgo noescape ls_enqueue
#cgo nocallback ls_enqueue
#cgo noescape ls_batch
#cgo nocallback ls_batch
#cgo noescape ls_launch
#cgo nocallback ls_launch

#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

typedef uint64_t u64;

// Integers and pointers take one register or one 8-byte stack slot each on
// Linux's amd64 and arm64, and callees ignore what they did not ask for: one
// function type calls the whole driver API, which passes nothing else.
typedef int (*ls_fn)(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64);

static int (*ls_set_current)(u64);
static int (*ls_exchange_mode)(int *);

static void ls_bind(u64 set_current, u64 exchange_mode) {
	ls_set_current = (int (*)(u64))set_current;
	ls_exchange_mode = (int (*)(int *))exchange_mode;
}

static int ls_enter(u64 ctx) {
	static __thread int relaxed;
	if (!ctx) return 0; // the few calls that need no context
	if (!relaxed) {
		int mode = 2; // CU_STREAM_CAPTURE_MODE_RELAXED
		int rc = ls_exchange_mode(&mode);
		if (rc) return rc;
		relaxed = 1;
	}
	return ls_set_current(ctx);
}

static int ls_call(u64 fn, u64 ctx, u64 a, u64 b, u64 c, u64 d, u64 e, u64 f, u64 g, u64 h) {
	int rc = ls_enter(ctx);
	return rc ? rc : ((ls_fn)fn)(a, b, c, d, e, f, g, h, 0, 0, 0);
}

static int ls_enqueue(u64 fn, u64 ctx, u64 a, u64 b, u64 c, u64 d) { return ls_call(fn, ctx, a, b, c, d, 0, 0, 0, 0); }

static int ls_batch(u64 fn, u64 ctx, u64 stream, unsigned n, void *ops) { return ls_call(fn, ctx, stream, n, (u64)ops, 0, 0, 0, 0, 0); }

static int ls_launch(u64 fn, u64 ctx, u64 func, unsigned blocks, unsigned threads, unsigned shared, u64 stream, void *params, size_t size) {
	// CU_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE, _END
	void *extra[] = {(void *)1, params, (void *)2, &size, (void *)0};
	int rc = ls_enter(ctx);
	return rc ? rc : ((ls_fn)fn)(func, blocks, 1, 1, threads, 1, 1, shared, stream, 0, (u64)extra);
}
*/
import "C"

import (
	"errors"
	"unsafe"
)

// open maps a shared library for good; its error is the loader's.
func open(path string) (lookup func(symbol string) uintptr, err error) {
	p := C.CString(path)
	defer C.free(unsafe.Pointer(p))
	h := C.dlopen(p, C.RTLD_NOW|C.RTLD_LOCAL)
	if h == nil {
		return nil, errors.New(C.GoString(C.dlerror()))
	}
	return func(symbol string) uintptr {
		s := C.CString(symbol)
		defer C.free(unsafe.Pointer(s))
		return uintptr(C.dlsym(h, s))
	}, nil
}

func bind(setCurrent, exchangeMode uintptr) { C.ls_bind(C.u64(setCurrent), C.u64(exchangeMode)) }

// call makes ctx current, unless it is 0, and calls fn. Go memory may be passed
// as uintptr(unsafe.Pointer(p)) within the argument list: p escapes and lives
// until the call returns. It allocates.
//
//go:uintptrescapes
func call(fn, ctx uintptr, args ...uintptr) int {
	var a [8]C.u64
	for i, v := range args {
		a[i] = C.u64(v)
	}
	return int(C.ls_call(C.u64(fn), C.u64(ctx), a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]))
}

// What follows allocates nothing: it is for what runs once an operation.

// enqueue is call for numbers and addresses that are not Go's.
func enqueue(fn, ctx, a, b, c, d uintptr) int {
	return int(C.ls_enqueue(C.u64(fn), C.u64(ctx), C.u64(a), C.u64(b), C.u64(c), C.u64(d)))
}

func batch(fn, ctx, stream uintptr, n int, ops unsafe.Pointer) int {
	return int(C.ls_batch(C.u64(fn), C.u64(ctx), C.u64(stream), C.uint(n), ops))
}

func launch(fn, ctx, f uintptr, blocks, threads, shared uint32, stream uintptr, params unsafe.Pointer, size uintptr) int {
	return int(C.ls_launch(C.u64(fn), C.u64(ctx), C.u64(f), C.uint(blocks), C.uint(threads), C.uint(shared), C.u64(stream), params, C.size_t(size)))
}
