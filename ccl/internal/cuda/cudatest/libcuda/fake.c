// A model of libcuda in host memory: see doc.go. Prototypes follow NVIDIA's
// published driver API; what the tests do not need is not here.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include "fake.h"

#define API __attribute__((visibility("default")))
typedef int CUresult;
typedef uint64_t ptr;

enum { INVALID_VALUE = 1, NO_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, PEER_UNSUPPORTED = 217, INVALID_PTX = 218,
       INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713,
       CAPTURE_UNSUPPORTED = 900, CAPTURE_UNMATCHED = 903 };
enum { MAX_GPUS = 16, GRANULARITY = 2 << 20 };

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER; // everything but queues and memory

// ---- faults ----

static struct fault { char call[64]; int code, nth, ms, once, spent; } faults[32];
static int nfaults;
static CUresult lost; // a sticky error, as of a kernel that failed
static unsigned apart[MAX_GPUS], unlinked[MAX_GPUS]; // GPUs that each cannot reach, or by PCIe alone
static int denied; // an attribute that no GPU has

// A call takes ms longer and, when code is not 0, fails, at its nth time from
// now; nth 0 is every time. A null call forgets all faults and a lost context.
API void fake_fault(const char *call, int code, int nth, int ms) {
	pthread_mutex_lock(&mu);
	if (!call) nfaults = 0, lost = 0, denied = 0, memset(apart, 0, sizeof apart), memset(unlinked, 0, sizeof unlinked);
	else if (nfaults < 32) {
		struct fault *f = &faults[nfaults++];
		snprintf(f->call, sizeof f->call, "%s", call);
		f->code = code, f->nth = nth, f->ms = ms, f->once = nth > 0, f->spent = 0;
	}
	pthread_mutex_unlock(&mu);
}

static void pair(unsigned set[], int a, int b) {
	pthread_mutex_lock(&mu);
	if (a >= 0 && b >= 0 && a < MAX_GPUS && b < MAX_GPUS && a != b) set[a] |= 1u << b, set[b] |= 1u << a;
	pthread_mutex_unlock(&mu);
}

// Two GPUs do not reach each other's memory from now on, or NVLink joins them no more; forgotten
// with all faults.
API void fake_separate(int a, int b) { pair(apart, a, b); }
API void fake_unlink(int a, int b) { pair(unlinked, a, b); }

// GPUs have an attribute no more; forgotten with all faults.
API void fake_deny(int attribute) {
	pthread_mutex_lock(&mu);
	denied = attribute;
	pthread_mutex_unlock(&mu);
}

static int faulty(const char *call) {
	int code = 0, ms = 0;
	pthread_mutex_lock(&mu);
	for (int i = 0; i < nfaults; i++) {
		struct fault *f = &faults[i];
		size_t n = strlen(f->call); // without the version
		if (strncmp(call, f->call, n) || (call[n] && strcmp(call + n, "_v2"))) continue;
		if (f->nth > 0 && --f->nth > 0) continue;
		if (f->nth == 0 && f->spent) continue;
		code = f->code, ms = f->ms, f->spent = f->once;
	}
	pthread_mutex_unlock(&mu);
	if (ms) usleep(ms * 1000);
	return code;
}
#define FAULT do { int fault_ = faulty(__func__); if (fault_) return fault_; } while (0)

// ---- devices and contexts ----

struct queue;
typedef struct ctx { int dev, users; struct queue *legacy; } ctx;
static ctx contexts[MAX_GPUS];
static int gpus, version = 12020; // GPUs that the driver sees
static int first; // of them all
static __thread ctx *current;

#define CONTEXT do { FAULT; if (!current) return INVALID_CONTEXT; if (current->users < 1) return 709; } while (0)

static int major = 9;
static void from_env(void) { // "gpus=4,first=0,version=12020,fail=CALL:CODE:NTH,hang=CALL:MS:NTH"
	gpus = 2;
	const char *e = getenv("LOCKSTEP_FAKE_CUDA");
	char *s = strdup(e ? e : ""), *save = 0;
	for (char *t = strtok_r(s, ",", &save); t; t = strtok_r(0, ",", &save)) {
		char call[64];
		int a = 0, b = 0;
		if (sscanf(t, "gpus=%d", &a) == 1) gpus = a > MAX_GPUS ? MAX_GPUS : a;
		else if (sscanf(t, "first=%d", &a) == 1) first = a < 0 || a >= MAX_GPUS ? 0 : a;
		else if (sscanf(t, "version=%d", &a) == 1) version = a;
		else if (sscanf(t, "major=%d", &a) == 1) major = a;
		else if (sscanf(t, "fail=%63[^:]:%d:%d", call, &a, &b) >= 2) fake_fault(call, a, b, 0);
		else if (sscanf(t, "hang=%63[^:]:%d:%d", call, &a, &b) >= 2) fake_fault(call, 0, b, a);
	}
	free(s);
	if (gpus > MAX_GPUS - first) gpus = MAX_GPUS - first;
}
static pthread_once_t once = PTHREAD_ONCE_INIT;
static void setup(void) { pthread_once(&once, from_env); }

API CUresult cuDriverGetVersion(int *v) { setup(); FAULT; *v = version; return 0; }
API CUresult cuInit(unsigned flags) { setup(); FAULT; return flags ? INVALID_VALUE : gpus ? 0 : 100; }
API CUresult cuDeviceGetCount(int *n) { FAULT; *n = gpus; return 0; }
API CUresult cuDeviceGet(int *d, int i) { FAULT; if (i < 0 || i >= gpus) return INVALID_DEVICE; *d = first + i; return 0; }
API CUresult cuDeviceGetName(char *s, int n, int d) { FAULT; snprintf(s, n, "Fake GPU %d", d); return 0; }
API CUresult cuDeviceGetUuid_v2(unsigned char *u, int d) { FAULT; memset(u, 0xfa, 16); u[15] = d; return 0; }
API CUresult cuDeviceGetPCIBusId(char *s, int n, int d) { FAULT; snprintf(s, n, "0000:%02x:00.0", d + 1); return 0; }
API CUresult cuDeviceGetAttribute(int *v, int a, int d) {
	FAULT;
	(void)d;
	switch (a) {
	case 16: *v = 132; break;
	case 40: *v = 3; break;
	case 75: *v = major; break;
	case 76: *v = 0; break;
	case 102: case 103: case 110: case 116: case 122: case 124: *v = a != denied; break;
	default: return INVALID_VALUE;
	}
	return 0;
}
API CUresult cuDeviceCanAccessPeer(int *v, int a, int b) { FAULT; *v = a != b && !(apart[a] >> b & 1); return 0; }
API CUresult cuDeviceGetP2PAttribute(int *v, int attribute, int a, int b) {
	FAULT;
	if (a < first || b < first || a >= first + gpus || b >= first + gpus || a == b) return INVALID_DEVICE;
	if (attribute != 3) return INVALID_VALUE;
	*v = !((apart[a] | unlinked[a]) >> b & 1);
	return 0;
}
API CUresult cuThreadExchangeStreamCaptureMode(int *m) {
	static __thread int mode;
	FAULT;
	int was = mode;
	mode = *m, *m = was;
	return 0;
}
API CUresult cuCtxSetCurrent(ctx *c) { FAULT; current = c; return 0; }

#include "nvml.h"

#define E(c, n, s) case c: name = n, text = s; break
static CUresult words(int c, const char **n, const char **t) {
	const char *name, *text;
	switch (c) {
		E(1, "CUDA_ERROR_INVALID_VALUE", "invalid argument");
		E(2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory");
		E(100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected");
		E(201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context");
		E(217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices");
		E(218, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed");
		E(400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle");
		E(500, "CUDA_ERROR_NOT_FOUND", "named symbol not found");
		E(700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered");
		E(712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped");
		E(801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported");
		E(900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing");
	default: return INVALID_VALUE;
	}
	if (n) *n = name;
	if (t) *t = text;
	return 0;
}
API CUresult cuGetErrorName(int c, const char **s) { return words(c, s, 0); }
API CUresult cuGetErrorString(int c, const char **s) { return words(c, 0, s); }

#include "memory.h"

// ---- code ----

typedef struct module { char *image; } module;
typedef struct func { char name[128]; fake_kernel run; int shared; } func;

struct event;
// The driver may wait for the device to be idle before it loads a module; this one always does.
API CUresult cuModuleLoadDataEx(module **m, const char *image, unsigned n, const int *options, void **values) {
	CONTEXT;
	drain(current);
	if (strstr(image, ".bogus")) {
		for (unsigned i = 0; i + 1 < n; i++)
			if (options[i] == 5 && options[i + 1] == 6)
				snprintf(values[i], (size_t)values[i + 1], "ptxas fake, line 3; fatal   : unknown directive '.bogus'");
		return INVALID_PTX;
	}
	if (!strstr(image, ".version")) return 200; // invalid image
	*m = malloc(sizeof **m);
	(*m)->image = strdup(image);
	return 0;
}
API CUresult cuModuleUnload(module *m) { CONTEXT; free(m->image); free(m); return 0; }
API CUresult cuModuleGetFunction(func **f, module *m, const char *name) {
	CONTEXT;
	char entry[160];
	snprintf(entry, sizeof entry, ".entry %s(", name);
	if (!strstr(m->image, entry)) return NOT_FOUND;
	*f = calloc(1, sizeof **f); // as long-lived as the process
	snprintf((*f)->name, sizeof (*f)->name, "%s", name);
	Dl_info self;
	char symbol[160];
	snprintf(symbol, sizeof symbol, "kernel_%s", name);
	if (dladdr((void *)cuInit, &self)) {
		void *lib = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
		if (lib) (*f)->run = (fake_kernel)dlsym(lib, symbol), dlclose(lib);
	}
	return 0;
}
API CUresult cuFuncGetAttribute(int *v, int a, func *f) { CONTEXT; (void)f; *v = a == 0 ? 1024 : a == 4 ? 32 : 0; return 0; }
API CUresult cuFuncSetAttribute(func *f, int a, int v) {
	CONTEXT;
	if (a != 8 || v < 0 || v > 227 * 1024) return INVALID_VALUE;
	f->shared = v;
	return 0;
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, func *f, int threads, size_t shared) {
	CONTEXT;
	(void)f;
	*n = threads < 1 || threads > 1024 ? 0 : 2048 / threads;
	if (shared && *n > (int)(228 * 1024 / shared)) *n = 228 * 1024 / shared;
	return 0;
}

#include "streams.h"

// ---- graphs ----

API CUresult cuStreamIsCapturing(queue *s, int *status) { STREAM(s); *status = q->capture && !q->capture->ended; return 0; }
API CUresult cuStreamBeginCapture_v2(queue *s, int mode) {
	STREAM(s);
	if (!s || mode != 2 || q->capture) return CAPTURE_UNSUPPORTED;
	graph *g = calloc(1, sizeof *g);
	g->last = &g->first;
	q->capture = g;
	return 0;
}
API CUresult cuStreamEndCapture(queue *s, graph **g) {
	STREAM(s);
	if (!q->capture) return CAPTURE_UNMATCHED;
	*g = q->capture, q->capture = 0, (*g)->ended = 1;
	return 0;
}
API CUresult cuGraphInstantiateWithFlags(graph **x, graph *g, uint64_t flags) {
	CONTEXT;
	if (flags) return INVALID_VALUE;
	*x = calloc(1, sizeof **x);
	(*x)->last = &(*x)->first;
	for (op *o = g->first; o; o = o->next) {
		op *e = malloc(sizeof *e);
		*e = *o, e->next = 0;
		*(*x)->last = e, (*x)->last = &e->next;
	}
	return 0;
}
API CUresult cuGraphLaunch(graph *x, queue *s) {
	STREAM(s);
	for (op *o = x->first; o; o = o->next) append(q, *o);
	return 0;
}
static CUresult drop_ops(graph *g) { // the graph itself stays: events may refer to it
	for (op *o = g->first; o;) { op *next = o->next; free(o); o = next; }
	g->first = 0, g->last = &g->first;
	return 0;
}
API CUresult cuGraphDestroy(graph *g) { CONTEXT; return drop_ops(g); }
API CUresult cuGraphExecDestroy(graph *x) { CONTEXT; return drop_ops(x); }

API CUresult cuDevicePrimaryCtxRetain(ctx **c, int d) {
	FAULT;
	pthread_mutex_lock(&mu);
	*c = &contexts[d];
	contexts[d].dev = d, contexts[d].users++;
	pthread_mutex_unlock(&mu);
	return 0;
}
API CUresult cuDevicePrimaryCtxRelease_v2(int d) {
	FAULT;
	pthread_mutex_lock(&mu);
	int n = contexts[d].users--;
	for (int i = 0; n == 1 && i < 4096; i++) // with the context goes what it registered
		if (ranges[i].kind == REGISTERED && ranges[i].dev == d) ranges[i].kind = FREE;
	pthread_mutex_unlock(&mu);
	return n > 0 ? 0 : INVALID_CONTEXT;
}

// ---- the test kernels ----

// fake_add: dst[i] += src[i], n words
API int kernel_fake_add(const struct fake_launch *l, const void *params, size_t size) {
	const struct { uint32_t *dst, *src; uint32_t n; } *p = params;
	(void)l;
	if (size < 20) return 700;
	for (uint32_t i = 0; i < p->n; i++) p->dst[i] += p->src[i];
	return 0;
}
// fake_crash: an illegal address, after which the context is lost
API int kernel_fake_crash(const struct fake_launch *l, const void *params, size_t size) {
	(void)l, (void)params, (void)size;
	return 700;
}
