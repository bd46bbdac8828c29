/*
 * The conformance driver: it loads the plugin as NCCL does and makes the calls that
 * NCCL makes, per version of the interface, with a GPU's clock of its own. What it
 * plays it prints, for a test to find it in the recorder.
 */
#ifndef LOCKSTEP_NCCL_DRIVER_H
#define LOCKSTEP_NCCL_DRIVER_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../plugin/abi.h"

#define GPU_OFFSET INT64_C(1700000000123456789) /* the GPU's clock shows CLOCK_MONOTONIC and this */

struct tables { /* of the version that is played */
	int version;
	int mask; /* NCCL has one of a process */
	int64_t waking; /* ns that it takes the caller of a timed call to wake its proxy */
	void *lib;
	const struct nccl_profiler_v4 *v4;
	const struct nccl_profiler_v5 *v5;
	int (*start)(void *, void **, struct nccl_event *);
	int (*stop)(void *);
	int (*state)(void *, int, union nccl_state_args *);
	int (*finalize)(void *);
};
extern struct tables nccl;

struct comm {
	void *ctx;
	uint64_t id;
	char name[64];
	int ranks, rank;
	uint64_t numbered; /* operations that it is to have numbered */
	uint64_t seq;      /* as NCCL counts collectives */
};

/* An operation between its call and its end. */
struct played {
	struct comm *c;
	void *group_api, *api, *group, *task[64];
	int tasks, channels, captured, peer;
	int mask; /* NCCL's when the group began */
	const char *func;
	size_t count;
	void *kernel[64];
	uint64_t dur;
};

int64_t mono(void);
void until(int64_t at);
void load(const char *path, int version);
int asks(const struct played *p, int bits);
void comm_init(struct comm *c, uint64_t id, const char *name, int ranks, int rank);
void comm_finalize(struct comm *c);
void told(const struct comm *c, const char *what);

/* The parts of an operation's life, in NCCL's order. */
void api_begin(struct played *p, struct comm *c, int captured);
void api_coll(struct played *p, const char *func, size_t count);
void api_p2p(struct played *p, const char *func, size_t count, int peer, void **api);
void api_end(struct played *p);
void plan_begin(struct played *p);
void plan_coll(struct played *p, const char *func, size_t count, int channels);
void plan_p2p(struct played *p, const char *func, size_t count, int peer, int channels, void *api);
void plan_end(struct played *p);
void kernel_begin(struct played *p, int channels, int64_t gpu);
void kernel_end(struct played *p, int channels, int64_t gpu);
/* One that is complete in itself: the call, one kernel of dur ns, its end. */
void collective(struct comm *c, const char *func, size_t count, int channels, uint64_t dur);
/* One network transfer of a channel: a step sent, by a queue pair of a device, and one received, by each of steps. */
void transfers(struct played *p, int peer, int steps, size_t size, int device, int qp);
/* The same apart, by a socket: one transfer to the next rank and one from the one before. */
struct flow { struct played *p; void *send, *recv, *s, *r, *request; size_t size; };
void flow_begin(struct flow *f, struct played *p, int next, int prev, size_t size);
void flow_post(struct flow *f);
void flow_sent(struct flow *f);
void flow_received(struct flow *f);

int scene(const char *name);
void net(void);
void peers(void);
void churn(void);
void copies(void);
void twice(void);
void stale(void);
void tight(void);
void waking(void);
void stuck(void);
void blind(void);
void selves(void);
void selfish(void);
int play_rank(int argc, char **argv);
struct orders { int busy, skip, swap; };
long train_begin(int rank);
struct orders train_orders(void);
void train_done(long step);
int soak(uint64_t events, int threads);
int bench(void);
int fuzz(void);

#endif
