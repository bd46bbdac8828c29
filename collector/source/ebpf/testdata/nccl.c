/* A stand-in for libnccl.so.2: its functions with their real arguments, and nothing behind them.
 * Some call one another, as NCCL's do, and each has a second name. */
#include <stdlib.h>
#include <string.h>

typedef struct { char internal[128]; } ncclUniqueId;
typedef struct ncclComm {
	unsigned long long magic[40]; /* what else there is */
	unsigned long long hash;
	int rank, size, device, nvml;
	volatile unsigned long long calls;
} *ncclComm_t;
typedef struct { int size; } ncclConfig_t;
/* Functions of their size save registers first. */
#if defined(__x86_64__)
#define LONG __asm__ volatile("" ::: "rbx", "r12", "r13", "r14", "r15")
#else
#define LONG __asm__ volatile("")
#endif
#define API __attribute__((visibility("default"), noinline))

/* With OPAQUE in the environment its structure tells nobody what rank it is. */
static int hidden(void) { return getenv("OPAQUE") ? -1 : 0; }

static int make(ncclComm_t *out, int size, int rank, unsigned long long hash)
{
	if (size < 1 || rank < 0 || rank >= size)
		return 4; /* ncclInvalidArgument */
	ncclComm_t c = calloc(1, sizeof *c);
	c->hash = hash;
	c->rank = rank ^ hidden();
	c->size = size ^ hidden();
	*out = c;
	return 0;
}

static unsigned long long hash(const char *s, int n)
{
	unsigned long long h = 5381;
	for (int i = 0; i < n; i++)
		h = h * 33 ^ (unsigned char)s[i];
	return h;
}

API int ncclCommInitRankConfig(ncclComm_t *c, int n, ncclUniqueId id, int rank, ncclConfig_t *config) { (void)config; return make(c, n, rank, hash(id.internal, 128)); }
API int ncclCommInitRank(ncclComm_t *c, int n, ncclUniqueId id, int rank) { return ncclCommInitRankConfig(c, n, id, rank, 0); }
API int ncclCommInitRankScalable(ncclComm_t *c, int n, int rank, int ids, ncclUniqueId *id, ncclConfig_t *config) { (void)ids; (void)config; return make(c, n, rank, hash(id->internal, 128)); }
/* All members of this stand-in's splits have the colors of their ranks' parities. */
API int ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t *out, ncclConfig_t *config)
{
	(void)key; (void)config;
	*out = 0;
	return color < 0 ? 0 : make(out, ((c->size ^ hidden()) + 1 - color) / 2, (c->rank ^ hidden()) / 2, c->hash * 31 + color);
}
API int ncclCommShrink(ncclComm_t c, int *exclude, int n, ncclComm_t *out, ncclConfig_t *config, int flags)
{
	(void)config; (void)flags;
	int rank = c->rank ^ hidden(), before = 0;
	for (int i = 0; i < n; i++)
		before += exclude[i] < rank;
	return make(out, (c->size ^ hidden()) - n, rank - before, c->hash * 37);
}
API int ncclCommInitAll(ncclComm_t *c, int n, const int *devices)
{
	(void)devices;
	for (int i = 0; i < n; i++)
		make(&c[i], n, i, 4711);
	return 0;
}
API int ncclCommDestroy(ncclComm_t c) { free(c); return 0; }
API int ncclCommAbort(ncclComm_t c) { free(c); return 0; }
API int ncclGroupStart(void) { __asm__ volatile(""); return 0; }
API int ncclGroupEnd(void) { __asm__ volatile(""); return 0; }
API int pncclAllReduce(const void *s, void *r, size_t n, int type, int op, ncclComm_t c, void *stream) { (void)s; (void)r; (void)n; (void)type; (void)op; (void)stream; LONG; c->calls++; return 0; }
API int ncclReduce(const void *s, void *r, size_t n, int type, int op, int root, ncclComm_t c, void *stream) { (void)s; (void)r; (void)n; (void)type; (void)op; (void)root; (void)stream; c->calls++; return 0; }
API int ncclBroadcast(const void *s, void *r, size_t n, int type, int root, ncclComm_t c, void *stream) { (void)s; (void)r; (void)n; (void)type; (void)root; (void)stream; c->calls++; return 0; }
API int ncclBcast(void *b, size_t n, int type, int root, ncclComm_t c, void *stream) { int e = ncclBroadcast(b, b, n, type, root, c, stream); c->calls++; return e; }
API int ncclAllGather(const void *s, void *r, size_t n, int type, ncclComm_t c, void *stream) { (void)s; (void)r; (void)n; (void)type; (void)stream; c->calls++; return 0; }
API int ncclReduceScatter(const void *s, void *r, size_t n, int type, int op, ncclComm_t c, void *stream) { (void)s; (void)r; (void)n; (void)type; (void)op; (void)stream; LONG; c->calls++; return 0; }
API int ncclSend(const void *b, size_t n, int type, int peer, ncclComm_t c, void *stream) { (void)b; (void)n; (void)type; (void)peer; (void)stream; c->calls++; return 0; }
API int ncclRecv(void *b, size_t n, int type, int peer, ncclComm_t c, void *stream) { (void)b; (void)n; (void)type; (void)peer; (void)stream; c->calls++; return 0; }
/* The public name is a weak alias, as NCCL's are. */
int ncclAllReduce(const void *, void *, size_t, int, int, ncclComm_t, void *) __attribute__((weak, alias("pncclAllReduce"), visibility("default")));
