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
static unsigned apart[MAX_GPUS]; // GPUs that each cannot reach
static int denied; // an attribute that no GPU has

// A call takes ms longer and, when code is not 0, fails, at its nth time from
// now; nth 0 is every time. A null call forgets all faults and a lost context.
API void fake_fault(const char *call, int code, int nth, int ms) {
	pthread_mutex_lock(&mu);
	if (!call) nfaults = 0, lost = 0, denied = 0, memset(apart, 0, sizeof apart);
	else if (nfaults < 32) {
		struct fault *f = &faults[nfaults++];
		snprintf(f->call, sizeof f->call, "%s", call);
		f->code = code, f->nth = nth, f->ms = ms, f->once = nth > 0, f->spent = 0;
	}
	pthread_mutex_unlock(&mu);
}

// Two GPUs do not reach each other's memory from now on; forgotten with all faults.
API void fake_separate(int a, int b) {
	pthread_mutex_lock(&mu);
	if (a >= 0 && b >= 0 && a < MAX_GPUS && b < MAX_GPUS && a != b) apart[a] |= 1u << b, apart[b] |= 1u << a;
	pthread_mutex_unlock(&mu);
}

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
static int gpus, version = 12020;
static __thread ctx *current;

#define CONTEXT do { FAULT; if (!current) return INVALID_CONTEXT; if (current->users < 1) return 709; } while (0)

static int major = 9;
static void from_env(void) { // "gpus=4,version=12020,fail=CALL:CODE:NTH,hang=CALL:MS:NTH"
	gpus = 2;
	const char *e = getenv("LOCKSTEP_FAKE_CUDA");
	char *s = strdup(e ? e : ""), *save = 0;
	for (char *t = strtok_r(s, ",", &save); t; t = strtok_r(0, ",", &save)) {
		char call[64];
		int a = 0, b = 0;
		if (sscanf(t, "gpus=%d", &a) == 1) gpus = a > MAX_GPUS ? MAX_GPUS : a;
		else if (sscanf(t, "version=%d", &a) == 1) version = a;
		else if (sscanf(t, "major=%d", &a) == 1) major = a;
		else if (sscanf(t, "fail=%63[^:]:%d:%d", call, &a, &b) >= 2) fake_fault(call, a, b, 0);
		else if (sscanf(t, "hang=%63[^:]:%d:%d", call, &a, &b) >= 2) fake_fault(call, 0, b, a);
	}
	free(s);
}
static pthread_once_t once = PTHREAD_ONCE_INIT;
static void setup(void) { pthread_once(&once, from_env); }

API CUresult cuDriverGetVersion(int *v) { setup(); FAULT; *v = version; return 0; }
API CUresult cuInit(unsigned flags) { setup(); FAULT; return flags ? INVALID_VALUE : gpus ? 0 : 100; }
API CUresult cuDeviceGetCount(int *n) { FAULT; *n = gpus; return 0; }
API CUresult cuDeviceGet(int *d, int i) { FAULT; if (i < 0 || i >= gpus) return INVALID_DEVICE; *d = i; return 0; }
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
API CUresult cuThreadExchangeStreamCaptureMode(int *m) {
	static __thread int mode;
	FAULT;
	int was = mode;
	mode = *m, *m = was;
	return 0;
}
API CUresult cuCtxSetCurrent(ctx *c) { FAULT; current = c; return 0; }

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

// ---- memory ----

// A range is memory that a GPU may be asked to touch. access has a bit for each GPU.
struct range { ptr at; size_t n; enum { FREE, PLAIN, HOST, REGISTERED, RESERVED, MAPPED } kind; unsigned access; int dev; };
static struct range ranges[4096];

static struct range *find(ptr p, int reserved) {
	for (int i = 0; i < 4096; i++) {
		struct range *r = &ranges[i];
		if (r->kind != FREE && (r->kind == RESERVED) == reserved && p >= r->at && p - r->at < r->n) return r;
	}
	return 0;
}
static struct range *add(ptr at, size_t n, int kind, unsigned access, int dev) {
	for (int i = 0; i < 4096; i++)
		if (ranges[i].kind == FREE) {
			ranges[i] = (struct range){at, n, kind, access, dev};
			return &ranges[i];
		}
	abort();
}
// touchable: whole range known and open to the current GPU. Mappings side by side count as one.
static int touchable(ptr p, size_t n) {
	int ok = 1;
	pthread_mutex_lock(&mu);
	for (ptr at = p; ok && at < p + n;) {
		struct range *r = find(at, 0);
		if (!r || !(r->access >> current->dev & 1)) ok = 0;
		else at = r->at + r->n;
	}
	pthread_mutex_unlock(&mu);
	return ok;
}

static CUresult take(ptr *p, size_t n, int kind, unsigned access) {
	if (!n) return INVALID_VALUE;
	if (n > (size_t)64 << 30) return NO_MEMORY;
	void *m = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (m == MAP_FAILED) return NO_MEMORY;
	if (kind == PLAIN && n < (1 << 24)) memset(m, 0xdb, n); // undefined content
	*p = (ptr)m;
	pthread_mutex_lock(&mu);
	add(*p, n, kind, access, current->dev);
	pthread_mutex_unlock(&mu);
	return 0;
}
static CUresult give(ptr p, int kind) {
	pthread_mutex_lock(&mu);
	struct range *r = find(p, 0);
	CUresult rc = r && (int)r->kind == kind && r->at == p ? 0 : INVALID_VALUE;
	if (!rc) munmap((void *)p, r->n), r->kind = FREE;
	pthread_mutex_unlock(&mu);
	return rc;
}
API CUresult cuMemAlloc_v2(ptr *p, size_t n) { CONTEXT; return take(p, n, PLAIN, 1u << current->dev); }
static void drain(ctx *c);
API CUresult cuMemFree_v2(ptr p) { CONTEXT; drain(current); return give(p, PLAIN); }
API CUresult cuMemHostAlloc(void **p, size_t n, unsigned flags) { CONTEXT; (void)flags; return take((ptr *)p, n, HOST, ~0u); }
API CUresult cuMemFreeHost(void *p) { CONTEXT; return give((ptr)p, HOST); }
// of_file reports whether memory is a mapping of a file.
static int of_file(const void *p) {
	FILE *f = fopen("/proc/self/maps", "r");
	char line[4096];
	int found = 0;
	while (f && !found && fgets(line, sizeof line, f)) {
		unsigned long from, to, inode = 0;
		if (sscanf(line, "%lx-%lx %*s %*s %*s %lu", &from, &to, &inode) >= 2) found = from <= (unsigned long)p && (unsigned long)p < to && inode;
	}
	if (f) fclose(f);
	return found;
}
API CUresult cuMemHostRegister_v2(void *p, size_t n, unsigned flags) {
	CONTEXT;
	if (!p || !n || flags & ~7u) return INVALID_VALUE;
	int refused = faulty("cuMemHostRegister_file"); // as drivers refuse memory of files on disks
	if (refused && of_file(p)) return refused;
	pthread_mutex_lock(&mu);
	CUresult rc = find((ptr)p, 0) ? ALREADY_REGISTERED : 0;
	if (!rc) add((ptr)p, n, REGISTERED, ~0u, current->dev);
	pthread_mutex_unlock(&mu);
	return rc;
}
API CUresult cuMemHostUnregister(void *p) {
	CONTEXT;
	pthread_mutex_lock(&mu);
	struct range *r = find((ptr)p, 0);
	CUresult rc = r && r->kind == REGISTERED && r->at == (ptr)p ? 0 : NOT_REGISTERED;
	if (!rc) r->kind = FREE;
	pthread_mutex_unlock(&mu);
	return rc;
}
API CUresult cuMemHostGetDevicePointer_v2(ptr *d, void *p, unsigned flags) {
	CONTEXT;
	(void)flags;
	pthread_mutex_lock(&mu);
	struct range *r = find((ptr)p, 0);
	CUresult rc = r && (r->kind == HOST || r->kind == REGISTERED) ? 0 : INVALID_VALUE;
	pthread_mutex_unlock(&mu);
	*d = (ptr)p;
	return rc;
}
API CUresult cuMemGetAddressRange_v2(ptr *base, size_t *n, ptr p) {
	CONTEXT;
	pthread_mutex_lock(&mu);
	struct range *r = find(p, 0);
	CUresult rc = r && r->kind != REGISTERED ? 0 : NOT_FOUND;
	if (!rc) *base = r->at, *n = r->n;
	pthread_mutex_unlock(&mu);
	return rc;
}
API CUresult cuPointerGetAttribute(void *out, int a, ptr p) {
	CONTEXT;
	pthread_mutex_lock(&mu);
	struct range *r = find(p, 0);
	CUresult rc = r ? 0 : INVALID_VALUE;
	if (!rc) switch (a) {
		case 2: *(unsigned *)out = r->kind == HOST || r->kind == REGISTERED ? 1 : 2; break;
		case 9: *(int *)out = r->dev; break;
		default: rc = INVALID_VALUE;
		}
	pthread_mutex_unlock(&mu);
	return rc;
}

// ---- virtual memory: physical memory is a memfd, its name says whose ----

struct prop { int type, handles, kind, id; void *win32; unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; };
typedef struct memory { int fd, dev, users; size_t n; int rdma; } memory;
struct mapping { ptr at; memory *m; struct mapping *next; };
static struct mapping *mappings;

static int valid(const struct prop *p) { return p->type == 1 && p->handles == 1 && p->kind == 1 && p->id >= 0 && p->id < gpus && !p->win32; }
static void drop(memory *m) { if (--m->users == 0) close(m->fd), free(m); }

API CUresult cuMemGetAllocationGranularity(size_t *n, const struct prop *p, int option) {
	CONTEXT;
	if (!valid(p) || option < 0 || option > 1) return INVALID_VALUE;
	*n = GRANULARITY;
	return 0;
}
API CUresult cuMemCreate(memory **h, size_t n, const struct prop *p, uint64_t flags) {
	CONTEXT;
	if (!valid(p) || flags || !n || n % GRANULARITY) return INVALID_VALUE;
	if (n > (size_t)64 << 30) return NO_MEMORY;
	char name[32];
	snprintf(name, sizeof name, "fakegpu%d", p->id);
	int fd = memfd_create(name, MFD_CLOEXEC);
	if (fd < 0 || ftruncate(fd, n)) { if (fd >= 0) close(fd); return NO_MEMORY; }
	*h = malloc(sizeof **h);
	**h = (memory){fd, p->id, 1, n, p->rdma};
	return 0;
}
API CUresult cuMemRelease(memory *m) {
	CONTEXT;
	pthread_mutex_lock(&mu);
	drop(m);
	pthread_mutex_unlock(&mu);
	return 0;
}
API CUresult cuMemExportToShareableHandle(int *fd, memory *m, int type, uint64_t flags) {
	CONTEXT;
	if (type != 1 || flags) return INVALID_VALUE;
	*fd = dup(m->fd);
	return *fd < 0 ? NO_MEMORY : 0;
}
API CUresult cuMemImportFromShareableHandle(memory **h, void *os, int type) {
	CONTEXT;
	char path[64], name[64] = "";
	int fd = (int)(intptr_t)os, dev;
	struct stat st;
	snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
	if (type != 1 || readlink(path, name, sizeof name - 1) < 0 || sscanf(name, "/memfd:fakegpu%d", &dev) != 1 || fstat(fd, &st)) return INVALID_VALUE;
	*h = malloc(sizeof **h);
	**h = (memory){dup(fd), dev, 1, st.st_size, 0};
	return 0;
}
API CUresult cuMemAddressReserve(ptr *p, size_t n, size_t align, ptr want, uint64_t flags) {
	CONTEXT;
	(void)want;
	if (!n || n % GRANULARITY || align & (align - 1) || flags) return INVALID_VALUE;
	if (align < GRANULARITY) align = GRANULARITY;
	char *m = mmap(0, n + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (m == MAP_FAILED) return NO_MEMORY;
	char *a = (char *)(((uintptr_t)m + align - 1) & ~(uintptr_t)(align - 1));
	if (a > m) munmap(m, a - m);
	munmap(a + n, align - (a - m));
	*p = (ptr)a;
	pthread_mutex_lock(&mu);
	add(*p, n, RESERVED, 0, current->dev);
	pthread_mutex_unlock(&mu);
	return 0;
}
API CUresult cuMemAddressFree(ptr p, size_t n) {
	CONTEXT;
	CUresult rc = INVALID_VALUE;
	pthread_mutex_lock(&mu);
	struct range *r = find(p, 1);
	int busy = 0;
	for (struct mapping *m = mappings; m; m = m->next) busy |= m->at >= p && m->at - p < n;
	if (r && r->at == p && r->n == n && !busy) r->kind = FREE, munmap((void *)p, n), rc = 0;
	pthread_mutex_unlock(&mu);
	return rc;
}
API CUresult cuMemMap(ptr p, size_t n, size_t offset, memory *m, uint64_t flags) {
	CONTEXT;
	CUresult rc = INVALID_VALUE;
	pthread_mutex_lock(&mu);
	struct range *r = find(p, 1);
	if (r && p - r->at + n <= r->n && !(p % GRANULARITY) && !offset && !flags && n == m->n && !find(p, 0) &&
	    mmap((void *)p, n, PROT_NONE, MAP_SHARED | MAP_FIXED, m->fd, 0) != MAP_FAILED) {
		add(p, n, MAPPED, 0, m->dev);
		struct mapping *e = malloc(sizeof *e);
		*e = (struct mapping){p, m, mappings};
		mappings = e, m->users++, rc = 0;
	}
	pthread_mutex_unlock(&mu);
	return rc;
}
API CUresult cuMemUnmap(ptr p, size_t n) {
	CONTEXT;
	CUresult rc = INVALID_VALUE;
	pthread_mutex_lock(&mu);
	struct range *r = find(p, 0);
	if (r && r->kind == MAPPED && r->at == p && r->n == n) {
		mmap((void *)p, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
		r->kind = FREE, rc = 0;
		for (struct mapping **e = &mappings; *e; e = &(*e)->next)
			if ((*e)->at == p) {
				struct mapping *gone = *e;
				*e = gone->next;
				drop(gone->m), free(gone);
				break;
			}
	}
	pthread_mutex_unlock(&mu);
	return rc;
}
struct access { int kind, id, flags; };
API CUresult cuMemSetAccess(ptr p, size_t n, const struct access *d, size_t count) {
	CONTEXT;
	CUresult rc = INVALID_VALUE;
	pthread_mutex_lock(&mu);
	struct range *r = find(p, 0);
	if (r && r->kind == MAPPED && r->at == p && r->n == n && count == 1 && d->kind == 1 && d->flags == 3 && d->id >= 0 && d->id < gpus) {
		rc = apart[d->id] >> r->dev & 1 ? PEER_UNSUPPORTED : 0;
		if (!rc) mprotect((void *)p, n, PROT_READ | PROT_WRITE), r->access |= 1u << d->id;
	}
	pthread_mutex_unlock(&mu);
	return rc;
}

// A DMA buffer is the memfd itself, so a range has to begin where a mapping does.
API CUresult cuMemGetHandleForAddressRange(void *handle, ptr p, size_t n, int type, uint64_t flags) {
	CONTEXT;
	CUresult rc = INVALID_VALUE;
	pthread_mutex_lock(&mu);
	for (struct mapping *e = mappings; e && type == 1 && !flags; e = e->next)
		if (e->at == p && n && !(n % 4096) && n <= e->m->n && e->m->rdma) {
			*(int *)handle = fcntl(e->m->fd, F_DUPFD_CLOEXEC, 0);
			rc = 0;
			break;
		}
	pthread_mutex_unlock(&mu);
	return rc;
}

// ---- code ----

typedef struct module { char *image; } module;
typedef struct func { char name[128]; fake_kernel run; int shared; } func;

struct event;
API CUresult cuModuleLoadDataEx(module **m, const char *image, unsigned n, const int *options, void **values) {
	CONTEXT;
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

// ---- streams: a thread each, that runs operations in order ----

typedef struct op {
	enum { COPY, SET8, SET32, WRITE, WRITE64, WAIT, KERNEL, RECORD, AWAIT } kind;
	ptr dst, src;
	size_t n;
	unsigned value;
	uint64_t wide;
	struct event *event;
	uint64_t turn;
	func *f;
	struct fake_launch launch;
	char params[4096];
	size_t size;
	struct op *next;
} op;
typedef struct graph { op *first, **last; int ended; } graph;
typedef struct event { pthread_mutex_t mu; pthread_cond_t cv; uint64_t recorded, happened; struct timespec at; graph *capture; int timing; } event;
typedef struct queue {
	pthread_mutex_t mu;
	pthread_cond_t cv;
	op *first, **last;
	int dead;
	ctx *c;
	graph *capture;
	pthread_t thread;
	struct queue *sibling;
} queue;
static queue *queues;

static void perform(op *o) {
	switch (o->kind) {
	case COPY: memmove((void *)o->dst, (void *)o->src, o->n); break;
	case SET8: memset((void *)o->dst, o->value, o->n); break;
	case SET32: for (size_t i = 0; i < o->n; i++) ((uint32_t *)o->dst)[i] = o->value; break;
	case WRITE: __atomic_store_n((uint32_t *)o->dst, o->value, __ATOMIC_SEQ_CST); break;
	case WRITE64: __atomic_store_n((uint64_t *)o->dst, o->wide, __ATOMIC_SEQ_CST); break;
	case WAIT: while ((int32_t)(__atomic_load_n((uint32_t *)o->dst, __ATOMIC_SEQ_CST) - o->value) < 0) usleep(20); break;
	case KERNEL: if (o->f->run) { int rc = o->f->run(&o->launch, o->params, o->size); if (rc) __atomic_store_n(&lost, rc, __ATOMIC_SEQ_CST); } break;
	case RECORD:
		pthread_mutex_lock(&o->event->mu);
		if (o->turn > o->event->happened) o->event->happened = o->turn;
		clock_gettime(CLOCK_MONOTONIC, &o->event->at);
		pthread_cond_broadcast(&o->event->cv);
		pthread_mutex_unlock(&o->event->mu);
		break;
	case AWAIT:
		pthread_mutex_lock(&o->event->mu);
		while (o->event->happened < o->turn) pthread_cond_wait(&o->event->cv, &o->event->mu);
		pthread_mutex_unlock(&o->event->mu);
	}
}

static void *serve(void *p) {
	queue *q = p;
	pthread_mutex_lock(&q->mu);
	for (;;) {
		while (!q->first && !q->dead) pthread_cond_wait(&q->cv, &q->mu);
		op *o = q->first;
		if (!o) break;
		pthread_mutex_unlock(&q->mu);
		perform(o);
		pthread_mutex_lock(&q->mu);
		q->first = o->next;
		if (!q->first) q->last = &q->first;
		free(o);
		pthread_cond_broadcast(&q->cv);
	}
	pthread_mutex_unlock(&q->mu);
	pthread_mutex_lock(&mu);
	queue **e = &queues;
	while (*e != q) e = &(*e)->sibling;
	*e = q->sibling;
	pthread_mutex_unlock(&mu);
	free(q);
	return 0;
}

// drain waits until nothing that was enqueued on a context's streams is left.
static void drain(ctx *c) {
	for (int left = 1; left; left ? usleep(20) : 0) {
		left = 0;
		pthread_mutex_lock(&mu);
		for (queue *q = queues; q; q = q->sibling) {
			pthread_mutex_lock(&q->mu);
			left |= q->c == c && q->first;
			pthread_mutex_unlock(&q->mu);
		}
		pthread_mutex_unlock(&mu);
	}
}

static queue *new_queue(ctx *c) { // under mu
	queue *q = calloc(1, sizeof *q);
	pthread_mutex_init(&q->mu, 0), pthread_cond_init(&q->cv, 0);
	q->last = &q->first, q->c = c, q->sibling = queues, queues = q;
	pthread_create(&q->thread, 0, serve, q);
	pthread_detach(q->thread);
	return q;
}

// The stream that a handle means in the current context.
static queue *stream(queue *q) {
	if (q) return q->c == current ? q : 0;
	pthread_mutex_lock(&mu);
	if (!current->legacy) current->legacy = new_queue(current);
	pthread_mutex_unlock(&mu);
	return current->legacy;
}

static void append(queue *q, op o) {
	op *e = malloc(sizeof *e);
	*e = o, e->next = 0;
	if (q->capture) {
		*q->capture->last = e, q->capture->last = &e->next;
		return;
	}
	pthread_mutex_lock(&q->mu);
	*q->last = e, q->last = &e->next;
	pthread_cond_broadcast(&q->cv);
	pthread_mutex_unlock(&q->mu);
}
#define STREAM(s) CONTEXT; if (__atomic_load_n(&lost, __ATOMIC_SEQ_CST)) return lost; queue *q = stream(s); if (!q) return INVALID_HANDLE; \
	if (q->capture && q->capture->ended) q->capture = 0

API CUresult cuStreamCreateWithPriority(queue **s, unsigned flags, int priority) {
	CONTEXT;
	(void)priority;
	if (flags > 1) return INVALID_VALUE;
	pthread_mutex_lock(&mu);
	*s = new_queue(current);
	pthread_mutex_unlock(&mu);
	return 0;
}
API CUresult cuStreamDestroy_v2(queue *s) {
	CONTEXT;
	if (!s || s->c != current) return INVALID_HANDLE;
	pthread_mutex_lock(&s->mu);
	s->dead = 1;
	pthread_cond_broadcast(&s->cv);
	pthread_mutex_unlock(&s->mu);
	return 0;
}
API CUresult cuStreamQuery(queue *s) {
	STREAM(s);
	if (q->capture) return CAPTURE_UNSUPPORTED;
	pthread_mutex_lock(&q->mu);
	CUresult rc = q->first ? NOT_READY : 0;
	pthread_mutex_unlock(&q->mu);
	return rc ? rc : lost;
}
API CUresult cuStreamSynchronize(queue *s) {
	STREAM(s);
	if (q->capture) return CAPTURE_UNSUPPORTED;
	pthread_mutex_lock(&q->mu);
	while (q->first) pthread_cond_wait(&q->cv, &q->mu);
	pthread_mutex_unlock(&q->mu);
	return lost;
}
API CUresult cuCtxSynchronize(void) { CONTEXT; drain(current); return lost; }
API CUresult cuMemcpyAsync(ptr dst, ptr src, size_t n, queue *s) {
	STREAM(s);
	if (!touchable(dst, n) || !touchable(src, n)) return INVALID_VALUE;
	append(q, (op){.kind = COPY, .dst = dst, .src = src, .n = n});
	return 0;
}
// Pageable memory: staged at once on the way in, waited for on the way out.
API CUresult cuMemcpyHtoDAsync_v2(ptr dst, const void *src, size_t n, queue *s) {
	STREAM(s);
	if (!touchable(dst, n)) return INVALID_VALUE;
	if (q->capture) return CAPTURE_UNSUPPORTED;
	append(q, (op){.kind = COPY, .dst = dst, .src = (ptr)src, .n = n});
	return touchable((ptr)src, n) ? 0 : cuStreamSynchronize(s);
}
API CUresult cuMemcpyDtoHAsync_v2(void *dst, ptr src, size_t n, queue *s) {
	STREAM(s);
	if (!touchable(src, n)) return INVALID_VALUE;
	if (q->capture) return CAPTURE_UNSUPPORTED;
	append(q, (op){.kind = COPY, .dst = (ptr)dst, .src = src, .n = n});
	return touchable((ptr)dst, n) ? 0 : cuStreamSynchronize(s);
}
API CUresult cuMemsetD8Async(ptr p, unsigned char v, size_t n, queue *s) {
	STREAM(s);
	if (!touchable(p, n)) return INVALID_VALUE;
	append(q, (op){.kind = SET8, .dst = p, .value = v, .n = n});
	return 0;
}
API CUresult cuMemsetD32Async(ptr p, unsigned v, size_t n, queue *s) {
	STREAM(s);
	if (p % 4 || !touchable(p, 4 * n)) return INVALID_VALUE;
	append(q, (op){.kind = SET32, .dst = p, .value = v, .n = n});
	return 0;
}
API CUresult cuStreamWriteValue32_v2(queue *s, ptr p, uint32_t v, unsigned flags) {
	STREAM(s);
	if (p % 4 || flags > 1 || !touchable(p, 4)) return INVALID_VALUE;
	append(q, (op){.kind = WRITE, .dst = p, .value = v});
	return 0;
}
API CUresult cuStreamWaitValue32_v2(queue *s, ptr p, uint32_t v, unsigned flags) {
	STREAM(s);
	if (p % 4 || flags || !touchable(p, 4)) return INVALID_VALUE;
	append(q, (op){.kind = WAIT, .dst = p, .value = v});
	return 0;
}
static CUresult write64(queue *s, ptr p, uint64_t v) {
	STREAM(s);
	if (p % 8 || !touchable(p, 8)) return INVALID_VALUE;
	append(q, (op){.kind = WRITE64, .dst = p, .wide = v});
	return 0;
}
struct memop { int op; ptr at; union { uint32_t v; uint64_t v64; }; unsigned flags; ptr alias; uint64_t pad; };
_Static_assert(sizeof(struct memop) == 48, "CUstreamBatchMemOpParams");
API CUresult cuStreamBatchMemOp_v2(queue *s, unsigned n, const struct memop *ops, unsigned flags) {
	CONTEXT;
	if (n > 256 || flags) return INVALID_VALUE;
	for (unsigned i = 0; i < n; i++) {
		CUresult rc = ops[i].op == 1 ? cuStreamWaitValue32_v2(s, ops[i].at, ops[i].v, ops[i].flags)
		            : ops[i].op == 2 ? cuStreamWriteValue32_v2(s, ops[i].at, ops[i].v, ops[i].flags)
		            : ops[i].op == 5 ? write64(s, ops[i].at, ops[i].v64) : INVALID_VALUE;
		if (rc) return rc;
	}
	return 0;
}
API CUresult cuLaunchKernel(func *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, queue *s, void **params, void **extra) {
	STREAM(s);
	if (!gx || !bx || bx * by * bz > 1024 || gy != 1 || gz != 1 || params || (shared > 48 << 10 && (int)shared > f->shared)) return INVALID_VALUE;
	op o = {.kind = KERNEL, .f = f, .launch = {gx, bx, shared, current->dev}};
	if (!extra || extra[0] != (void *)1 || extra[2] != (void *)2 || extra[4]) return INVALID_VALUE;
	o.size = *(size_t *)extra[3];
	if (o.size > sizeof o.params) return INVALID_VALUE;
	memcpy(o.params, extra[1], o.size);
	append(q, o);
	return 0;
}

// ---- events ----

API CUresult cuEventCreate(event **e, unsigned flags) {
	CONTEXT;
	*e = calloc(1, sizeof **e);
	pthread_mutex_init(&(*e)->mu, 0), pthread_cond_init(&(*e)->cv, 0);
	(*e)->timing = !(flags & 2);
	return 0;
}
API CUresult cuEventDestroy_v2(event *e) { CONTEXT; return e ? 0 : INVALID_HANDLE; } // kept: an operation may still refer to it
API CUresult cuEventRecord(event *e, queue *s) {
	STREAM(s);
	if (!e) return INVALID_HANDLE;
	pthread_mutex_lock(&e->mu);
	uint64_t turn = q->capture ? 0 : ++e->recorded;
	e->capture = q->capture;
	pthread_mutex_unlock(&e->mu);
	append(q, (op){.kind = RECORD, .event = e, .turn = turn});
	return 0;
}
// Waiting for an event of a capture draws the stream into it. Operations of a
// graph run in the order of their capture, which satisfies every dependency.
API CUresult cuStreamWaitEvent(queue *s, event *e, unsigned flags) {
	STREAM(s);
	if (!e || flags) return INVALID_VALUE;
	pthread_mutex_lock(&e->mu);
	uint64_t turn = e->recorded;
	graph *capture = e->capture && !e->capture->ended ? e->capture : 0;
	pthread_mutex_unlock(&e->mu);
	if (capture) { q->capture = capture; return 0; }
	if (q->capture) return 905; // isolation
	append(q, (op){.kind = AWAIT, .event = e, .turn = turn});
	return 0;
}
API CUresult cuEventQuery(event *e) {
	CONTEXT;
	if (!e) return INVALID_HANDLE;
	pthread_mutex_lock(&e->mu);
	CUresult rc = e->capture && !e->capture->ended ? 907 : e->happened < e->recorded ? NOT_READY : 0;
	pthread_mutex_unlock(&e->mu);
	return rc ? rc : lost;
}
API CUresult cuEventSynchronize(event *e) {
	CONTEXT;
	if (!e) return INVALID_HANDLE;
	pthread_mutex_lock(&e->mu);
	while (e->happened < e->recorded) pthread_cond_wait(&e->cv, &e->mu);
	pthread_mutex_unlock(&e->mu);
	return lost;
}
API CUresult cuEventElapsedTime(float *ms, event *a, event *b) {
	CONTEXT;
	if (!a || !b || !a->timing || !b->timing || !a->recorded || !b->recorded) return INVALID_HANDLE;
	pthread_mutex_lock(&a->mu);
	struct timespec from = a->at;
	int done = a->happened == a->recorded;
	pthread_mutex_unlock(&a->mu);
	pthread_mutex_lock(&b->mu);
	struct timespec to = b->at;
	done &= b->happened == b->recorded;
	pthread_mutex_unlock(&b->mu);
	*ms = (to.tv_sec - from.tv_sec) * 1e3f + (to.tv_nsec - from.tv_nsec) / 1e6f;
	return done ? 0 : NOT_READY;
}

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
