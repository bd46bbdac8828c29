/*
 * A rank of a job: its calls are told to the plugin as NCCL would, and a thread plays its
 * GPU, on which a collective ends when that of all ranks has begun. The ranks meet in a
 * file that they map. What a fault needs is to be had from outside, by signals; or here:
 *
 *   driver PLUGIN VERSION rank FILE RANK RANKS STEPS STEP_US [stop-after=N | slow=US@N | stall=N | late=US@N]
 *
 * WAKING=NS in the environment: no network, and a call that is timed takes so much longer.
 * stall: from step N on what it sends in "dp" does not arrive; late: it arrives US later.
 * PROGRESS and FAULTS: it keeps losses, begins again where it was, and obeys orders (train.c).
 */
#include "driver.h"

#include <fcntl.h>
#include <sys/mman.h>

#define MAX_RANKS 64
#define QUEUE 64

struct meeting {
	uint64_t begun[2][MAX_RANKS]; /* operations begun, per communicator and rank */
	uint64_t sent[MAX_RANKS];     /* transfers of "dp" that have arrived */
};

static struct meeting *meeting;
static struct comm comms[2];
static struct { struct played p; int comm; uint64_t dur; } queue[QUEUE];
static uint64_t queued, ran; /* by the caller, by the GPU */
static uint64_t stall_at, late_at, late_us; /* operations of "dp" */
static int busy; /* the GPU has other work */

/* A ring: each sends to the next one and goes on when the one before has sent. */
static void ring(struct played *p, uint64_t n)
{
	struct comm *c = &comms[0];
	struct flow f;
	int next = (c->rank + 1) % c->ranks, prev = (c->rank + c->ranks - 1) % c->ranks;
	flow_begin(&f, p, next, prev, 1 << 16);
	flow_post(&f);
	int stalls = stall_at && n >= stall_at;
	if (late_us && n >= late_at)
		usleep((useconds_t)late_us);
	if (!stalls) {
		__atomic_store_n(&meeting->sent[c->rank], n, __ATOMIC_RELEASE);
		flow_sent(&f);
	}
	while (__atomic_load_n(&meeting->sent[prev], __ATOMIC_ACQUIRE) < n)
		usleep(100);
	flow_received(&f);
	while (stalls)
		pause();
}

static void *gpu(void *arg)
{
	uint64_t n[2] = {0, 0};
	int ranks = comms[0].ranks;
	(void)arg;
	for (uint64_t i = 0;; i++) {
		for (int looks = 0; __atomic_load_n(&queued, __ATOMIC_ACQUIRE) == i; looks++)
			usleep(looks < 1000 ? 100 : 5000); /* one that has nothing to do for long uses no CPU */
		struct played *p = &queue[i % QUEUE].p;
		int k = queue[i % QUEUE].comm;
		if (__atomic_load_n(&busy, __ATOMIC_RELAXED))
			usleep(20000);
		int64_t at = mono();
		kernel_begin(p, 2, at + GPU_OFFSET);
		__atomic_store_n(&meeting->begun[k][comms[k].rank], ++n[k], __ATOMIC_RELEASE);
		for (int r = 0; r < ranks; r++)
			while (__atomic_load_n(&meeting->begun[k][r], __ATOMIC_ACQUIRE) < n[k])
				usleep(100);
		usleep((useconds_t)queue[i % QUEUE].dur);
		if (k == 0 && !nccl.waking)
			ring(p, n[0]);
		kernel_end(p, 2, mono() + GPU_OFFSET);
		__atomic_store_n(&ran, i + 1, __ATOMIC_RELEASE);
	}
	return NULL;
}

static void call(int k, const char *func, size_t count, uint64_t dur_us)
{
	while (queued - __atomic_load_n(&ran, __ATOMIC_ACQUIRE) >= QUEUE)
		usleep(100);
	struct played *p = &queue[queued % QUEUE].p;
	api_begin(p, &comms[k], 0);
	api_coll(p, func, count);
	plan_begin(p);
	plan_coll(p, func, count, 2);
	plan_end(p);
	api_end(p);
	comms[k].numbered++;
	queue[queued % QUEUE].comm = k, queue[queued % QUEUE].dur = dur_us;
	__atomic_store_n(&queued, queued + 1, __ATOMIC_RELEASE);
}

static void synchronize(void)
{
	while (__atomic_load_n(&ran, __ATOMIC_ACQUIRE) < queued)
		usleep(50);
}

int play_rank(int argc, char **argv)
{
	if (argc < 5)
		return 2;
	int rank = atoi(argv[1]), ranks = atoi(argv[2]);
	long steps = atol(argv[3]), step_us = atol(argv[4]), stop_after = -1, slow_us = 0, slow_at = -1, stall = -1, late = 0, late_from = 0;
	if (argc > 5 && sscanf(argv[5], "stop-after=%ld", &stop_after) != 1 && sscanf(argv[5], "slow=%ld@%ld", &slow_us, &slow_at) != 2 &&
		sscanf(argv[5], "stall=%ld", &stall) != 1 && sscanf(argv[5], "late=%ld@%ld", &late, &late_from) != 2)
		return 2;
	nccl.waking = getenv("WAKING") ? atol(getenv("WAKING")) : 0;
	stall_at = stall < 0 ? 0 : (uint64_t)stall * 3 + 1;
	late_us = (uint64_t)late, late_at = (uint64_t)late_from * 3;
	int fd = open(argv[0], O_RDWR | O_CREAT, 0600);
	if (fd < 0 || ftruncate(fd, sizeof *meeting) || ranks < 1 || ranks > MAX_RANKS || rank < 0 || rank >= ranks)
		return 2;
	meeting = mmap(NULL, sizeof *meeting, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (meeting == MAP_FAILED)
		return 2;
	comm_init(&comms[0], 0xd9, "dp", ranks, rank);
	comm_init(&comms[1], 0x79, "tp", ranks, rank);
	pthread_t t;
	pthread_create(&t, NULL, gpu, NULL);
	for (long i = train_begin(rank); i < steps; i++) {
		struct orders o = train_orders();
		__atomic_store_n(&busy, o.busy, __ATOMIC_RELAXED);
		if (i == stop_after)
			for (;;)
				pause(); /* it never calls again */
		usleep((useconds_t)(step_us + (slow_at >= 0 && i >= slow_at ? slow_us : 0)));
		if (o.swap)
			call(0, "AllReduce", 1 << 16, 300);
		call(1, "AllGather", 1 << 12, 200);
		call(1, "ReduceScatter", 1 << 12, 200);
		for (int k = o.skip + o.swap; k < 3; k++)
			call(0, "AllReduce", 1 << 16, 300);
		synchronize();
		train_done(i + 1);
	}
	told(&comms[0], "exact");
	told(&comms[1], "exact");
	comm_finalize(&comms[0]);
	comm_finalize(&comms[1]);
	return 0;
}
