// What a kernel of the fake is: an exported function "kernel_NAME" in C, called
// once for a launch, in the stream's thread. Its result is 0 or the CUresult
// with which the context is lost.
#pragma once
#include <stddef.h>

struct fake_launch { unsigned blocks, threads, shared; int device; };
typedef int (*fake_kernel)(const struct fake_launch *, const void *params, size_t size);
