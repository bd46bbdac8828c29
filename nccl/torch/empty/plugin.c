/*
 * A profiler plugin that does nothing: what NCCL itself does for the events of EMPTY_EVENTS, a mask, or of the
 * file EMPTY_SWITCH, which holds another one whenever it is written. measure.py builds it and lets it take turns
 * with Lockstep's.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "abi.h"

static int *volatile switched;

static void *look(void *path)
{
	for (;; usleep(50000)) {
		int mask;
		FILE *f = fopen(path, "r");
		if (f && fscanf(f, "%d", &mask) == 1)
			__atomic_store_n(switched, mask, __ATOMIC_RELAXED);
		if (f)
			fclose(f);
	}
	return NULL;
}

static int on(int *mask)
{
	const char *v = getenv("EMPTY_EVENTS");
	char *path = getenv("EMPTY_SWITCH");
	pthread_t t;
	*mask = v ? (int)strtol(v, NULL, 0) : 0;
	if (path && !switched) {
		switched = mask;
		pthread_create(&t, NULL, look, path);
	}
	return 0;
}
static int init_v4(void **c, int *mask, const char *name, uint64_t id, int nodes, int ranks, int rank, nccl_logger log)
{
	(void)name, (void)id, (void)nodes, (void)ranks, (void)rank, (void)log;
	*c = (void *)1;
	return on(mask);
}
static int init_v5(void **c, uint64_t id, int *mask, const char *name, int nodes, int ranks, int rank, nccl_logger log)
{
	return init_v4(c, mask, name, id, nodes, ranks, rank, log);
}
static int start(void *c, void **h, struct nccl_event *e) { (void)c, (void)e; *h = (void *)1; return 0; }
static int stop(void *h) { (void)h; return 0; }
static int state(void *h, int s, union nccl_state_args *a) { (void)h, (void)s, (void)a; return 0; }
static int finalize(void *c) { (void)c; return 0; }

#define EXPORTED __attribute__((visibility("default")))
EXPORTED const struct nccl_profiler_v4 ncclProfiler_v4 = {"empty", init_v4, start, stop, state, finalize};
EXPORTED const struct nccl_profiler_v5 ncclProfiler_v5 = {"empty", init_v5, start, stop, state, finalize};
EXPORTED const struct nccl_profiler_v5 ncclProfiler_v6 = {"empty", init_v5, start, stop, state, finalize};
EXPORTED const struct nccl_profiler_v5 ncclProfiler_v7 = {"empty", init_v5, start, stop, state, finalize};
