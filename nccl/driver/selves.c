/*
 * A job with sends to oneself, and how NCCL 2.27 to 2.30 finds stamps: kernel and host count the work of each channel,
 * and the host leaves out what a rank sends to itself. What is told from then on is an older piece of work's, or comes
 * late, or never.
 */
#include "driver.h"

#define CHANNELS 8
#define SLOTS 64 /* MAX_PROFILER_EVENTS_PER_CHANNEL */
#define PENDING 4096

struct stamp { uint64_t count, timer; };
struct channel {
	uint64_t host, kernel; /* pieces of work that either has counted */
	struct stamp started[SLOTS], completed[SLOTS];
	struct { uint64_t base; void *task, *event; int begun; } pending[PENDING]; /* of the proxy: one after the other */
	uint64_t posted, told;
};
static struct channel all[CHANNELS];

/* The host has a piece of work for a channel; task is NULL where nobody asks for its kernel. */
static void post(int n, void *task)
{
	struct channel *c = &all[n];
	c->host++;
	if (!task)
		return;
	c->pending[c->posted % PENDING].base = c->host;
	c->pending[c->posted % PENDING].task = task;
	c->pending[c->posted % PENDING].event = NULL;
	c->pending[c->posted % PENDING].begun = 0;
	c->posted++;
}

/* A kernel begins one, and ends it. */
static void begins(int n, int timed, int64_t at)
{
	struct channel *c = &all[n];
	c->kernel++;
	if (timed)
		c->started[c->kernel % SLOTS] = (struct stamp){c->kernel, (uint64_t)at};
}

static void ends(int n, int timed, int64_t at)
{
	struct channel *c = &all[n];
	if (timed)
		c->completed[c->kernel % SLOTS] = (struct stamp){c->kernel, (uint64_t)at};
}

/* NCCL's proxy looks. */
static void proxy(struct comm *comm)
{
	for (struct channel *c = all; c < all + CHANNELS; c++)
		for (; c->told < c->posted; c->told++) {
			uint64_t base = c->pending[c->told % PENDING].base;
			void **event = &c->pending[c->told % PENDING].event;
			int *begun = &c->pending[c->told % PENDING].begun;
			struct stamp *s = &c->started[base % SLOTS], *e = &c->completed[base % SLOTS];
			struct nccl_event k = {.parent = c->pending[c->told % PENDING].task, .rank = comm->rank};
			union nccl_state_args a = {.timer = e->timer};
			if (!*begun && base <= s->count) {
				*begun = 1;
				k.type = NCCL_KERNEL_CH;
				k.u.kernel_ch.channel = (uint8_t)(c - all), k.u.kernel_ch.timer = s->timer;
				nccl.start(comm->ctx, event, &k);
			}
			if (!*begun || base > e->count)
				break;
			if (*event) {
				nccl.state(*event, NCCL_KERNEL_CH_STOP, &a);
				nccl.stop(*event);
			}
		}
}

/* A collective of some channels; it runs unless it hangs. */
static void call(struct comm *c, struct played *p, int channels, int hangs)
{
	api_begin(p, c, 0);
	api_coll(p, "AllReduce", 64);
	plan_begin(p);
	plan_coll(p, "AllReduce", 64, channels);
	plan_end(p);
	api_end(p);
	c->numbered++;
	int timed = asks(p, NCCL_KERNEL_CH);
	for (int i = 0; i < channels; i++)
		post(i, timed ? p->task[0] : NULL);
	proxy(c);
	int64_t at = mono();
	for (int i = 0; i < channels; i++)
		begins(i, timed, at + i + GPU_OFFSET);
	proxy(c);
	if (hangs)
		return;
	until(at + 2000);
	for (int i = 0; i < channels; i++)
		ends(i, timed, at + 2000 + i + GPU_OFFSET);
	proxy(c);
}

/* An all-to-all: a piece of work for each peer, on a channel of its own; the one to oneself takes so many, the first ones. */
static void all_to_all(struct comm *c, int self)
{
	struct played p;
	void *api[8];
	api_begin(&p, c, 0);
	for (int k = 0; k < 8; k++)
		api_p2p(&p, k % 2 ? "Recv" : "Send", 512, k / 2, &api[k]);
	plan_begin(&p);
	for (int k = 0; k < 8; k++)
		plan_p2p(&p, k % 2 ? "Recv" : "Send", 512, k / 2, k / 2 == c->rank ? self : 1, api[k]);
	plan_end(&p);
	api_end(&p);
	c->numbered++;
	int timed = asks(&p, NCCL_KERNEL_CH);
	for (int peer = 0; peer < 4; peer++)
		if (peer != c->rank)
			post((peer - c->rank + 4) % 4, timed ? p.task[2 * peer] : NULL);
	int64_t at = mono();
	until(at + 2000);
	for (int peer = 0; peer < 4; peer++)
		for (int i = 0; i < (peer == c->rank ? self : 1); i++) {
			int n = peer == c->rank ? i : (peer - c->rank + 4) % 4;
			begins(n, timed, at + GPU_OFFSET), ends(n, timed, at + 2000 + GPU_OFFSET);
		}
	proxy(c);
}

/*
 * 100 all-to-alls, calls of one channel and of four in turn, so close that few are timed, and at last only such of one. WIDE=1: what
 * a rank sends to itself takes four channels.
 */
void selves(void)
{
	static struct played p;
	struct comm c;
	int self = getenv("WIDE") ? 4 : 1;
	comm_init(&c, 0x117, "selves", 4, 1);
	for (int i = 0; i < 100; i++)
		all_to_all(&c, self);
	for (int i = 0; i < 2000; i++)
		call(&c, &p, i % 5 < 3 ? 4 : 1, 0);
	for (int i = 0; i < 400; i++)
		call(&c, &p, 1, 0);
	usleep(1000000); /* nobody tells of what was not timed: it is taken for over */
	told(&c, "sampled");
}

/* After all-to-alls, calls that come seldom enough for each to be timed; the last one, of four channels, hangs. */
void selfish(void)
{
	static struct played p;
	struct comm c;
	comm_init(&c, 0x118, "selfish", 4, 1);
	for (int i = 0; i < 100; i++)
		all_to_all(&c, 1);
	usleep(100000);
	for (int i = 0; i < 200; i++) {
		call(&c, &p, i % 2 ? 4 : 1, 0);
		usleep(1000);
	}
	call(&c, &p, 4, 1);
	usleep(1500000);
	told(&c, "hang");
}
