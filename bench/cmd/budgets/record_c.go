package main

/*
#cgo CFLAGS: -O2 -std=gnu11 -I${SRCDIR}/../../../record/c
#include "lockstep_record.h"

// append_many returns the nanoseconds that n appends took, or -1 and errno.
static int64_t append_many(const char *dir, uint64_t n)
{
	struct lockstep_writer w;
	struct lockstep_options o = { .dir = dir, .job = "budgets", .node = "local" };
	struct lockstep_record r = { .kind = LOCKSTEP_KIND_START };
	if (lockstep_create(&w, &o))
		return -1;
	int64_t start = lockstep_now();
	for (uint64_t i = 0; i < n; i++) {
		r.op_seq = i;
		r.mono = lockstep_now();
		lockstep_append(&w, &r);
	}
	int64_t took = lockstep_now() - start;
	lockstep_close(&w);
	return took;
}
*/
import "C"

import (
	"fmt"
	"os"
	"unsafe"
)

// recordAppendC is recordAppend for the generated C header.
func recordAppendC() ([]row, error) {
	dir, err := os.MkdirTemp(sharedMemory(), "budgets-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	path := C.CString(dir)
	defer C.free(unsafe.Pointer(path))
	const n = 2_000_000
	best := int64(0)
	for i := range rounds {
		took, err := C.append_many(path, n)
		if took < 0 {
			return nil, fmt.Errorf("lockstep_create in %s: %w", dir, err)
		}
		if i == 0 || int64(took) < best {
			best = int64(took)
		}
	}
	return []row{{"record_append_c", float64(best) / n, "ns", 60}}, nil
}
