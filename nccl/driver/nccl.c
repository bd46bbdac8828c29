/* NCCL's side of the interface: what it calls for an operation, in which order, under which mask. */
#include "driver.h"

#include <dlfcn.h>
#include <stdarg.h>

struct tables nccl;

int64_t mono(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void until(int64_t at)
{
	while (mono() < at)
		;
}

static void log_line(int level, unsigned long flags, const char *file, int line, const char *fmt, ...)
{
	va_list args;
	(void)flags, (void)file, (void)line;
	va_start(args, fmt);
	printf("log %d ", level);
	vprintf(fmt, args);
	printf("\n");
	va_end(args);
}

void load(const char *path, int version)
{
	char name[32];
	snprintf(name, sizeof name, "ncclProfiler_v%d", version);
	nccl.lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	const void *table = nccl.lib ? dlsym(nccl.lib, name) : NULL;
	if (!table) {
		fprintf(stderr, "%s: %s\n", path, dlerror());
		exit(2);
	}
	nccl.version = version;
	nccl.v4 = table, nccl.v5 = table;
	nccl.start = nccl.v4->start, nccl.stop = nccl.v4->stop, nccl.state = nccl.v4->state, nccl.finalize = nccl.v4->finalize;
}

/* NCCL reads its mask when a group begins, and what the group starts later goes by that. */
int asks(const struct played *p, int bits) { return (p->mask & bits) != 0; }

#define UNDER_COLL (NCCL_COLL | NCCL_PROXY_OP | NCCL_PROXY_STEP | NCCL_KERNEL_CH | NCCL_NET_PLUGIN)
#define UNDER_P2P (NCCL_P2P | NCCL_PROXY_OP | NCCL_PROXY_STEP | NCCL_KERNEL_CH | NCCL_NET_PLUGIN)
#define UNDER_API (UNDER_COLL | UNDER_P2P | NCCL_GROUP_API | NCCL_COLL_API | NCCL_P2P_API | NCCL_GROUP | NCCL_KERNEL_LAUNCH)

void comm_init(struct comm *c, uint64_t id, const char *name, int ranks, int rank)
{
	memset(c, 0, sizeof *c);
	c->id = id, c->ranks = ranks, c->rank = rank;
	snprintf(c->name, sizeof c->name, "%s", name);
	char copy[64]; /* what NCCL passes need not last */
	snprintf(copy, sizeof copy, "%s", name);
	int err = nccl.version == 4 ? nccl.v4->init(&c->ctx, &nccl.mask, copy, id, 1, ranks, rank, log_line)
				    : nccl.v5->init(&c->ctx, id, &nccl.mask, *name ? copy : NULL, 1, ranks, rank, log_line);
	memset(copy, 'x', sizeof copy);
	if (err)
		printf("init failed: %d\n", err);
}

void comm_finalize(struct comm *c)
{
	if (c->ctx)
		nccl.finalize(c->ctx);
}

/* What a test is to find of a communicator. */
void told(const struct comm *c, const char *what)
{
	printf("comm %" PRIx64 " %s numbered=%" PRIu64 " %s\n", c->id, c->name, c->numbered, what);
	fflush(stdout);
}

/* A descriptor as long as the version's, with garbage behind it: nobody may look there. */
static struct nccl_event *event(struct nccl_event *e, int type, void *parent, int rank)
{
	size_t size = nccl.version == 4 ? NCCL_SIZE_V4 : nccl.version < 7 ? NCCL_SIZE_V5 : NCCL_SIZE_V7;
	memset(e, 0xa5, sizeof *e);
	memset(e, 0, size);
	if (nccl.version == 4) {
		memset(&e->type, 0xa5, sizeof e->type);
		*(uint8_t *)&e->type = (uint8_t)type;
	} else {
		e->type = (uint64_t)type;
	}
	e->parent = parent, e->rank = rank;
	return e;
}

void api_begin(struct played *p, struct comm *c, int captured)
{
	struct nccl_event e;
	memset(p, 0, sizeof *p);
	p->c = c, p->captured = captured;
	p->mask = __atomic_load_n(&nccl.mask, __ATOMIC_RELAXED);
	if (nccl.version < 5 || !asks(p, UNDER_API))
		return;
	event(&e, NCCL_GROUP_API, NULL, 0);
	e.u.group_api.captured = captured, e.u.group_api.depth = 1;
	nccl.start(c->ctx, &p->group_api, &e);
	if (p->group_api)
		nccl.state(p->group_api, NCCL_GROUP_START_API_STOP, NULL);
}

void api_coll(struct played *p, const char *func, size_t count)
{
	struct nccl_event e;
	if (nccl.version < 5 || !asks(p, UNDER_COLL | NCCL_COLL_API))
		return;
	event(&e, NCCL_COLL_API, p->group_api, 0); /* rank 0 whoever calls: NCCL before 2.32.3 */
	e.u.coll_api.func = func, e.u.coll_api.count = count, e.u.coll_api.datatype = "ncclFloat32";
	e.u.coll_api.root = 0, e.u.coll_api.stream = (void *)0x1234, e.u.coll_api.captured = p->captured;
	nccl.start(p->c->ctx, &p->api, &e);
	if (p->api)
		nccl.stop(p->api);
}

void api_p2p(struct played *p, const char *func, size_t count, int peer, void **api)
{
	struct nccl_event e;
	(void)peer;
	*api = NULL;
	if (nccl.version < 5 || !asks(p, UNDER_P2P | NCCL_P2P_API))
		return;
	event(&e, NCCL_P2P_API, p->group_api, 0);
	e.u.p2p_api.func = func, e.u.p2p_api.count = count, e.u.p2p_api.datatype = "ncclInt8";
	e.u.p2p_api.stream = (void *)0x1234, e.u.p2p_api.captured = p->captured;
	nccl.start(p->c->ctx, api, &e);
	if (*api)
		nccl.stop(*api);
}

void api_end(struct played *p)
{
	if (p->group_api)
		nccl.stop(p->group_api);
}

void plan_begin(struct played *p)
{
	struct nccl_event e;
	void *launch = NULL;
	p->tasks = 0;
	if (p->group_api && p->tasks == 0)
		nccl.state(p->group_api, NCCL_GROUP_END_API_START, NULL);
	if (nccl.version >= 5 && asks(p, NCCL_KERNEL_LAUNCH)) {
		event(&e, NCCL_KERNEL_LAUNCH, p->group_api, 0);
		nccl.start(p->c->ctx, &launch, &e);
		if (launch)
			nccl.stop(launch);
	}
	p->group = NULL;
	if (!asks(p, UNDER_COLL | UNDER_P2P | NCCL_GROUP))
		return;
	event(&e, NCCL_GROUP, NULL, p->c->rank);
	nccl.start(p->c->ctx, &p->group, &e);
}

void plan_coll(struct played *p, const char *func, size_t count, int channels)
{
	struct nccl_event e;
	void **task = &p->task[p->tasks++];
	*task = NULL;
	p->channels = channels;
	p->c->seq++;
	if (!asks(p, UNDER_COLL))
		return;
	event(&e, NCCL_COLL, nccl.version == 4 ? p->group : p->api, p->c->rank);
	e.u.coll.seq = p->c->seq, e.u.coll.func = func, e.u.coll.count = count, e.u.coll.root = 0, e.u.coll.datatype = "ncclFloat32";
	e.u.coll.channels = (uint8_t)channels, e.u.coll.warps = 16, e.u.coll.algo = "RING", e.u.coll.proto = "SIMPLE";
	if (nccl.version >= 5)
		e.u.coll.group = p->group;
	if (nccl.version >= 7)
		e.u.coll.variant = "ring_simple";
	nccl.start(p->c->ctx, task, &e);
}

void plan_p2p(struct played *p, const char *func, size_t count, int peer, int channels, void *api)
{
	struct nccl_event e;
	void **task = &p->task[p->tasks++];
	*task = NULL;
	p->channels = channels;
	if (!asks(p, UNDER_P2P))
		return;
	event(&e, NCCL_P2P, nccl.version == 4 ? p->group : api, p->c->rank);
	e.u.p2p.func = func, e.u.p2p.count = count, e.u.p2p.datatype = "ncclInt8", e.u.p2p.peer = peer;
	if (nccl.version >= 5)
		e.u.p2p.group = p->group, e.u.p2p.channels = (uint8_t)channels;
	nccl.start(p->c->ctx, task, &e);
}

void plan_end(struct played *p)
{
	for (int i = 0; i < p->tasks; i++)
		if (p->task[i])
			nccl.stop(p->task[i]); /* queued, not finished */
	if (nccl.waking && asks(p, NCCL_KERNEL_CH))
		until(mono() + nccl.waking);
	if (p->group)
		nccl.stop(p->group);
}

void kernel_begin(struct played *p, int channels, int64_t gpu)
{
	struct nccl_event e;
	for (int i = 0; i < channels && asks(p, NCCL_KERNEL_CH); i++) {
		event(&e, NCCL_KERNEL_CH, p->task[0], 0);
		e.u.kernel_ch.channel = (uint8_t)i, e.u.kernel_ch.timer = (uint64_t)(gpu + i);
		nccl.start(p->c->ctx, &p->kernel[i], &e);
	}
}

void kernel_end(struct played *p, int channels, int64_t gpu)
{
	for (int i = 0; i < channels; i++) {
		union nccl_state_args a = {.timer = (uint64_t)(gpu - (channels - 1 - i))};
		if (!p->kernel[i])
			continue;
		nccl.state(p->kernel[i], NCCL_KERNEL_CH_STOP, &a);
		nccl.stop(p->kernel[i]);
	}
}

void collective(struct comm *c, const char *func, size_t count, int channels, uint64_t dur)
{
	struct played p;
	api_begin(&p, c, 0);
	api_coll(&p, func, count);
	plan_begin(&p);
	plan_coll(&p, func, count, channels);
	plan_end(&p);
	api_end(&p);
	int64_t at = mono();
	kernel_begin(&p, channels, at + GPU_OFFSET);
	until(at + (int64_t)dur);
	kernel_end(&p, channels, at + (int64_t)dur + GPU_OFFSET);
	c->numbered++;
}

static void *proxy_op(struct played *p, int peer, int steps, size_t size, int send, int pid, void *ctx)
{
	struct nccl_event e;
	void *h = NULL;
	if (!asks(p, NCCL_PROXY_OP | NCCL_PROXY_STEP | NCCL_NET_PLUGIN))
		return NULL;
	event(&e, NCCL_PROXY_OP, p->task[0], p->c->rank);
	e.u.proxy_op.pid = pid, e.u.proxy_op.peer = peer, e.u.proxy_op.steps = steps, e.u.proxy_op.chunk = (int)size, e.u.proxy_op.is_send = send;
	nccl.start(ctx, &h, &e);
	if (h)
		nccl.state(h, NCCL_PROXY_OP_IN_PROGRESS, NULL);
	return h;
}

static void *step_begin(struct played *p, void *op, int step)
{
	struct nccl_event e;
	void *h = NULL;
	if (!asks(p, NCCL_PROXY_STEP | NCCL_NET_PLUGIN))
		return NULL;
	event(&e, NCCL_PROXY_STEP, op, p->c->rank);
	e.u.proxy_step.step = step;
	nccl.start(p->c->ctx, &h, &e);
	return h;
}

static void step_state(void *h, int state, size_t size)
{
	union nccl_state_args a = {.trans_size = size};
	if (h)
		nccl.state(h, state, &a);
}

/* A work request: of a queue pair of a device, or, where there is no device (-1), of a socket. */
static void *request(struct played *p, void *step, int device, int number, size_t size)
{
	struct nccl_event e;
	struct nccl_qp q = {.type = 1};
	struct nccl_socket k = {.type = 1};
	void *h = NULL;
	if (!asks(p, NCCL_NET_PLUGIN))
		return NULL;
	q.qp.device = device, q.qp.wr_id = 7, q.qp.qp = number, q.qp.length = size;
	k.sock.fd = number, k.sock.length = size;
	event(&e, NCCL_NET_PLUGIN, step, p->c->rank);
	e.u.net.id = (device < 0 ? NCCL_NET_SOCKET : NCCL_NET_IB) << 16 | 1, e.u.net.data = device < 0 ? (void *)&k : &q;
	nccl.start(p->c->ctx, &h, &e);
	return h;
}

void flow_begin(struct flow *f, struct played *p, int next, int prev, size_t size)
{
	f->p = p, f->size = size;
	f->send = proxy_op(p, next, 1, size, 1, getpid(), p->c->ctx);
	f->recv = proxy_op(p, prev, 1, size, 0, getpid(), p->c->ctx);
	f->s = step_begin(p, f->send, 0), f->r = step_begin(p, f->recv, 0);
	step_state(f->r, NCCL_STEP_RECV_WAIT, 0);
	step_state(f->s, NCCL_STEP_SEND_GPU_WAIT, 0);
}

void flow_post(struct flow *f)
{
	step_state(f->s, NCCL_STEP_SEND_PEER_WAIT, 0);
	f->request = request(f->p, f->s, -1, 40, f->size);
	step_state(f->s, NCCL_STEP_SEND_WAIT, f->size);
}

void flow_received(struct flow *f)
{
	step_state(f->r, NCCL_STEP_RECV_FLUSH_WAIT, f->size);
	step_state(f->r, NCCL_STEP_RECV_GPU_WAIT, f->size);
	if (f->r)
		nccl.stop(f->r);
	if (f->recv)
		nccl.stop(f->recv);
}

void flow_sent(struct flow *f)
{
	if (f->request)
		nccl.stop(f->request);
	if (f->s)
		nccl.stop(f->s);
	if (f->send)
		nccl.stop(f->send);
}

void transfers(struct played *p, int peer, int steps, size_t size, int device, int qp)
{
	void *send = proxy_op(p, peer, steps, size, 1, getpid(), p->c->ctx);
	void *recv = proxy_op(p, peer, steps, size, 0, getpid(), p->c->ctx);
	for (int i = 0; i < steps; i++) {
		void *s = step_begin(p, send, i), *r = step_begin(p, recv, i);
		step_state(r, NCCL_STEP_RECV_WAIT, 0);
		step_state(s, NCCL_STEP_SEND_GPU_WAIT, 0);
		for (int k = 0; k < 3; k++) /* the proxy asks again until there is a credit */
			step_state(s, NCCL_STEP_SEND_PEER_WAIT, 0);
		void *q = request(p, s, device, qp, size);
		step_state(s, NCCL_STEP_SEND_WAIT, size);
		until(mono() + 2000);
		if (q)
			nccl.stop(q);
		if (s)
			nccl.stop(s);
		step_state(r, NCCL_STEP_RECV_FLUSH_WAIT, size);
		step_state(r, NCCL_STEP_RECV_GPU_WAIT, size);
		if (r)
			nccl.stop(r);
	}
	if (send)
		nccl.stop(send);
	if (recv)
		nccl.stop(recv);
	/* PXN: another process's operation, whose context and parent mean nothing here. */
	struct nccl_event e;
	void *foreign = NULL;
	event(&e, NCCL_PROXY_OP, (void *)0x7fff12345678, p->c->rank + 1);
	e.u.proxy_op.pid = getpid() + 1, e.u.proxy_op.peer = peer, e.u.proxy_op.steps = 1, e.u.proxy_op.is_send = 1;
	if (asks(p, NCCL_PROXY_OP)) {
		nccl.start((void *)0x7fee87654320, &foreign, &e);
		void *s = step_begin(p, foreign, 0);
		step_state(s, NCCL_STEP_SEND_WAIT, size);
		if (s)
			nccl.stop(s);
		if (foreign)
			nccl.stop(foreign);
	}
}
