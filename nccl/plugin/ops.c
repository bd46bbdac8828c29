/*
 * Operations: from the API's call, or where a version has no API events from the
 * kernel plan, to the last channel of the kernel.
 *
 * Every call gets a number, in the order of calls, which all members agree on. Sends
 * and receives of one group are one operation, as their kernel is one. What a CUDA
 * graph replays is numbered when it is replayed.
 */
#include "plugin.h"

static struct op *op_at(struct comm *c, uint64_t seq) { return &c->ops[seq & c->mask]; }

/* The operation that a handle names, NULL when it is over. */
static struct op *op_of(uint64_t h, struct comm **at)
{
	struct comm *c = comm_of_handle(h);
	if (!c)
		return NULL;
	struct op *o = op_at(c, h & UINT32_MAX);
	uint64_t seq = LOAD(&o->seq);
	*at = c;
	return seq && !(seq & OP_BUSY) && (seq & UINT32_MAX) == (h & UINT32_MAX) ? o : NULL;
}

struct call {
	uint8_t coll, dtype;
	uint64_t bytes, group;
	int32_t root;
	uint32_t stream, flags, plan;
};

/* An operation that has its number, and is not kept. */
static void lose(struct comm *c, uint64_t n)
{
	struct op *o = op_at(c, n);
	uint64_t lost = PEEK(&o->lost);
	while (lost < n && !CAS(&o->lost, &lost, n))
		;
	ADD(&plugin.w.hdr->ops_lost, 1);
}

/* Numbers an operation and keeps it, or counts it as lost when there is no room. */
static struct op *new_op(struct comm *c, const struct call *a, int64_t now, uint64_t *seq)
{
	uint64_t n = *seq = ADD(&c->called, 1) + 1, empty = 0;
	struct op *o = op_at(c, n);
	if (!CAS(&o->seq, &empty, OP_BUSY | n)) {
		lose(c, n);
		lockstep_comm_enqueued(c->rec, n, now, (enum lockstep_coll)a->coll, a->bytes);
		return NULL;
	}
	o->called = now, o->launched = 0;
	if (!(a->flags & OP_QUIET))
		loud_call(c, n);
	SET(&o->group, a->group);
	SET(&o->bytes, a->bytes);
	SET(&o->stream, a->stream), SET(&o->plan, a->plan), SET(&o->flags, a->flags), SET(&o->root, a->root);
	SET(&o->channels, (uint16_t)0);
	SET(&o->coll, a->coll), SET(&o->dtype, a->dtype), SET(&o->algo, (uint8_t)LOCKSTEP_ALGO_NONE), SET(&o->proto, (uint8_t)LOCKSTEP_PROTO_NONE);
	SET(&o->count, COUNT_SEQ(n));
	SET(&o->gpu_start, UINT64_MAX), SET(&o->gpu_end, (uint64_t)0);
	SET(&o->seen_start, 0), SET(&o->seen_end, 0), SET(&o->stopped, (uint64_t)0), SET(&o->wait, (uint32_t)0), SET(&o->wait_peer, -1);
	STORE(&o->seq, n);
	lockstep_comm_enqueued(c->rec, n, now, (enum lockstep_coll)a->coll, a->bytes);
	return o;
}

/* Half of the room is in use: what nobody tells of is not waited for any longer. */
static void make_room(struct comm *c, uint32_t gen, int64_t now)
{
	if (PEEK(&c->called) - PEEK(&c->finished) > c->size / 2)
		settle(c, gen, now, 0);
}

static uint32_t stream_of(const void *stream)
{
	uint64_t x = (uint64_t)(uintptr_t)stream * UINT64_C(0x9E3779B97F4A7C15);
	return (uint32_t)(x >> 32);
}

/* What NCCL's tests call the size: everybody's data where each gives a part. */
static uint64_t bytes_of(const struct comm *c, uint8_t coll, uint64_t count, uint32_t size)
{
	return count * size * (lockstep_coll_is(coll, LOCKSTEP_COLLS_PARTED) ? (uint64_t)c->ranks : 1);
}

static struct call call_of(const struct comm *c, const char *func, const char *datatype, size_t count, int root)
{
	uint32_t size;
	struct call a = {.coll = coll_of(func), .dtype = dtype_of(datatype, &size)};
	a.bytes = bytes_of(c, a.coll, count, size);
	a.root = lockstep_coll_is(a.coll, LOCKSTEP_COLLS_ROOTED) ? root : -1;
	return a;
}

/* One more send or receive of an operation that is there already; 0 when it is over. */
static int join_p2p(struct comm *c, uint64_t seq, const struct call *a)
{
	struct op *o = op_at(c, seq);
	if (LOAD(&o->seq) != seq)
		return 0;
	uint64_t bytes = ADD(&o->bytes, a->bytes) + a->bytes;
	if (PEEK(&o->coll) != LOCKSTEP_COLL_GROUP) {
		SET(&o->coll, (uint8_t)LOCKSTEP_COLL_GROUP);
		SET(&o->root, -1);
	}
	if (PEEK(&c->called) == seq)
		lockstep_comm_enqueued(c->rec, seq, o->called, LOCKSTEP_COLL_GROUP, bytes);
	return 1;
}

/* Groups of a communicator come one after the other. */
static void note_group(struct comm *c, uint64_t group, uint64_t seq)
{
	if (PEEK(&c->last_group) != group) {
		SET(&c->last_group, group);
		STORE(&c->first_of_group, seq);
	}
}

/* A call goes into a graph. In a group NCCL is asked again for each, and the first may be the one that is not to be told of. */
static uint64_t captured_call(struct comm *c, uint32_t gen, enum handle_kind kind, uint64_t group)
{
	struct slot *g = handle_kind(group) == H_GROUP_API ? slot_of(&plugin.groups, group) : NULL;
	uint64_t h = make_handle(kind, c, gen, 0) | H_CAPTURED;
	int how = g ? g->captured : SURE, joins = kind == H_P2P_API && group && PEEK(&c->maybe_group) == group;
	if (g)
		g->captured = SURE;
	int64_t now = PEEK(&plugin.sampling.captured);
	if (now - PEEK(&c->maybe_at) > CAPTURE_NS) /* what was captured then is another graph's */
		SET(&c->maybe, (uint32_t)0);
	if (how == SURE) {
		if (joins && PEEK(&c->maybe)) /* it tells of the sends and receives before it in its group */
			SET(&c->maybe, PEEK(&c->maybe) - 1);
		uint32_t before = PEEK(&c->maybe);
		SET(&c->maybe, (uint32_t)0), SET(&c->maybe_group, (uint64_t)0);
		return h | (before < CAPTURED_BEFORE ? before : CAPTURED_BEFORE);
	}
	int told = PEEK(&plugin.sampling.network);
	if (how == QUIET && !told)
		ADD(&plugin.w.hdr->ops_lost, 1); /* where nothing else of its graph is told of, its replays are not seen */
	SET(&c->maybe, PEEK(&c->maybe) + 1), SET(&c->maybe_at, now);
	SET(&c->maybe_group, kind == H_P2P_API ? group : 0);
	return h | CAPTURED_MAYBE | (told ? CAPTURED_TOLD : 0);
}

/* A graph is replayed: flags of the operation. Calls before it in the graph that NCCL did not tell of have been, too. */
static uint32_t replayed(struct comm *c, uint64_t captured)
{
	if (captured & CAPTURED_MAYBE) {
		ADD(&c->maybe_told, 1);
		return OP_REPLAY | (captured & CAPTURED_TOLD ? OP_QUIET : 0);
	}
	uint64_t told = __atomic_exchange_n(&c->maybe_told, 0, __ATOMIC_RELAXED), before = captured & CAPTURED_BEFORE;
	for (uint64_t i = told; i < before; i++)
		lose(c, ADD(&c->called, 1) + 1);
	return OP_REPLAY;
}

static uint64_t coll_api(struct comm *c, uint32_t gen, const struct nccl_event *e)
{
	if (e->u.coll_api.captured)
		return captured_call(c, gen, H_COLL_API, (uint64_t)(uintptr_t)e->parent);
	struct call a = call_of(c, e->u.coll_api.func, e->u.coll_api.datatype, e->u.coll_api.count, e->u.coll_api.root);
	a.stream = stream_of(e->u.coll_api.stream);
	a.group = (uint64_t)(uintptr_t)e->parent;
	int64_t now = lockstep_now();
	a.flags = sample_call(now);
	uint64_t seq;
	make_room(c, gen, now);
	new_op(c, &a, now, &seq);
	note_group(c, a.group, seq);
	return make_handle(H_COLL_API, c, gen, seq);
}

static uint64_t p2p_api(struct comm *c, uint32_t gen, const struct nccl_event *e)
{
	uint64_t group = (uint64_t)(uintptr_t)e->parent, seq;
	SET(&c->p2p, 1);
	if (e->u.p2p_api.captured)
		return captured_call(c, gen, H_P2P_API, group);
	struct call a = call_of(c, e->u.p2p_api.func, e->u.p2p_api.datatype, e->u.p2p_api.count, -1);
	a.stream = stream_of(e->u.p2p_api.stream), a.group = group;
	if (group && PEEK(&c->group) == group) {
		seq = PEEK(&c->group_seq);
		(void)join_p2p(c, seq, &a); /* of one that was lost nothing more is kept */
		return make_handle(H_P2P_API, c, gen, seq);
	}
	int64_t now = lockstep_now();
	a.flags = sample_call(now);
	make_room(c, gen, now);
	new_op(c, &a, now, &seq);
	note_group(c, group, seq);
	SET(&c->group, group), SET(&c->group_seq, seq);
	return make_handle(H_P2P_API, c, gen, seq);
}

/* An operation goes into a kernel: its channels come next. */
static void place(struct comm *c, struct op *o, uint64_t seq, uint32_t plan)
{
	int64_t launched = PEEK(&c->launched);
	SET(&o->plan, plan);
	if (launched >= o->called)
		SET(&o->launched, launched);
	__atomic_fetch_or(&o->flags, OP_PLACED, __ATOMIC_RELEASE);
	SET(&c->posted, PEEK(&c->posted) + 1);
	loud_placed(c, o, seq);
}

/* The number of the plan that a group handle names; one of its own when there is none. */
static uint32_t plan_of(struct comm *c, const void *group)
{
	uint64_t h = (uint64_t)(uintptr_t)group;
	return handle_kind(h) == H_GROUP ? (uint32_t)h : ADD(&c->plans, 1) + 1;
}

static uint64_t coll_start(struct comm *c, uint32_t gen, const struct nccl_event *e)
{
	uint64_t parent = (uint64_t)(uintptr_t)e->parent, seq = parent & UINT32_MAX;
	uint32_t plan = plan_of(c, c->version == 4 ? e->parent : e->u.coll.group);
	struct op *o;
	if (handle_kind(parent) == H_COLL_API && !(parent & H_CAPTURED)) {
		struct comm *owner;
		if (!(o = op_of(parent, &owner)) || owner != c)
			return 0; /* given up, or lost: that is counted */
	} else {
		struct call a = call_of(c, e->u.coll.func, e->u.coll.datatype, e->u.coll.count, e->u.coll.root);
		a.flags = parent & H_CAPTURED && handle_kind(parent) == H_COLL_API ? replayed(c, parent) : 0;
		a.plan = plan;
		int64_t now = lockstep_now();
		make_room(c, gen, now);
		if (!(o = new_op(c, &a, now, &seq)))
			return 0;
	}
	SET(&o->algo, algo_of(e->u.coll.algo)), SET(&o->proto, proto_of(e->u.coll.proto));
	if (c->version >= 7 && e->u.coll.symmetric)
		SET(&o->algo, (uint8_t)LOCKSTEP_ALGO_SYM);
	SET(&o->channels, (uint16_t)e->u.coll.channels);
	place(c, o, seq, plan);
	return make_handle(H_COLL, c, gen, seq);
}

static uint64_t p2p_start(struct comm *c, uint32_t gen, const struct nccl_event *e)
{
	uint64_t parent = (uint64_t)(uintptr_t)e->parent, seq = parent & UINT32_MAX;
	const void *group = c->version == 4 ? e->parent : e->u.p2p.group;
	struct op *o;
	SET(&c->p2p, 1);
	note_self(c, e);
	if (handle_kind(parent) == H_P2P_API && !(parent & H_CAPTURED)) {
		struct comm *owner;
		if (!(o = op_of(parent, &owner)) || owner != c)
			return 0;
		if (PEEK(&o->coll) != LOCKSTEP_COLL_GROUP)
			SET(&o->root, e->u.p2p.peer);
		if (!(PEEK(&o->flags) & OP_PLACED) || PEEK(&o->plan) != (uint32_t)(uint64_t)(uintptr_t)group)
			place(c, o, seq, plan_of(c, group));
		return make_handle(H_P2P, c, gen, seq);
	}
	struct call a = call_of(c, e->u.p2p.func, e->u.p2p.datatype, e->u.p2p.count, -1);
	a.root = e->u.p2p.peer;
	if (group && PEEK(&c->plan) == (uint64_t)(uintptr_t)group) {
		seq = PEEK(&c->plan_seq);
		return join_p2p(c, seq, &a) ? make_handle(H_P2P, c, gen, seq) : 0;
	}
	a.flags = parent & H_CAPTURED && handle_kind(parent) == H_P2P_API ? replayed(c, parent) : 0;
	int64_t now = lockstep_now();
	a.plan = plan_of(c, group);
	make_room(c, gen, now);
	o = new_op(c, &a, now, &seq);
	SET(&c->plan, (uint64_t)(uintptr_t)group), SET(&c->plan_seq, seq);
	if (!o)
		return 0;
	place(c, o, seq, a.plan);
	return make_handle(H_P2P, c, gen, seq);
}

/* Copy engines tell that a collective is theirs; not when it ends. */
static uint64_t ce_coll(struct comm *c, uint32_t gen, const struct nccl_event *e)
{
	uint64_t parent = (uint64_t)(uintptr_t)e->parent, seq;
	struct comm *owner;
	struct op *o = handle_kind(parent) == H_COLL_API ? op_of(parent, &owner) : NULL;
	if (!o && (handle_kind(parent) != H_COLL_API || parent & H_CAPTURED)) {
		struct call a = call_of(c, e->u.ce_coll.func, e->u.ce_coll.datatype, e->u.ce_coll.count, e->u.ce_coll.root);
		a.stream = stream_of(e->u.ce_coll.stream);
		int64_t now = lockstep_now();
		make_room(c, gen, now);
		o = new_op(c, &a, now, &seq);
	}
	if (o) {
		SET(&o->algo, (uint8_t)LOCKSTEP_ALGO_COPY_ENGINE);
		__atomic_fetch_or(&o->flags, OP_COPY, __ATOMIC_RELAXED);
	}
	return make_handle(H_CE, c, gen, 0);
}

/* Whether a count is that of the handle's operation, which is not over and has room for one more. */
static int counts(uint64_t count, uint64_t h)
{
	return count >> 40 == (h & 0xffffff) && count_held(count) < 254 && count_started(count) < 0xffff && count_stopped(count) < 0xffff;
}

/* Holds an operation, which is still the one of the handle, and counts a channel; what its count was, ~0 when it is another one. */
static uint64_t hold(struct op *o, uint64_t h, uint64_t add)
{
	uint64_t was = LOAD(&o->count);
	do {
		if (!counts(was, h))
			return UINT64_MAX;
	} while (!CAS(&o->count, &was, was + add + COUNT_HELD));
	return was;
}

static void release(struct op *o) { __atomic_fetch_sub(&o->count, COUNT_HELD, __ATOMIC_RELEASE); }

static void at_least(uint64_t *word, uint64_t v)
{
	uint64_t was = PEEK(word);
	while (was < v && !CAS(word, &was, v))
		;
}

static uint64_t kernel_start(const struct nccl_event *e)
{
	uint64_t parent = (uint64_t)(uintptr_t)e->parent, timer = e->u.kernel_ch.timer, was, add;
	struct comm *c;
	if (handle_kind(parent) != H_COLL && handle_kind(parent) != H_P2P)
		return 0;
	struct op *o = op_of(parent, &c);
	if (!o || PEEK(&c->deaf) >> (e->u.kernel_ch.channel & 63) & 1)
		return 0;
	uint64_t seq = LOAD(&o->seq), first;
	was = LOAD(&o->count);
	do { /* it is held only if there is something to write: mostly of the first channel */
		first = PEEK(&o->gpu_start);
		add = !count_started(was) || (timer && timer < first) ? COUNT_STARTED + COUNT_HELD : COUNT_STARTED;
		if (!counts(was, parent))
			return 0;
	} while (!CAS(&o->count, &was, was + add));
	uint32_t nth = count_started(was) + 1;
	if (add != COUNT_STARTED) {
		int64_t now = nth == 1 ? lockstep_now() : 0;
		while (timer && timer < first && !CAS(&o->gpu_start, &first, timer))
			;
		if (nth == 1)
			SET(&o->seen_start, now);
		release(o);
		if (nth == 1) {
			SET(&c->started_at, now);
			at_least(&c->started, seq);
			settle(c, PEEK(&c->gen), now, 0);
		}
	}
	return (uint64_t)H_KERNEL << 60 | (uint64_t)(nth <= 64 ? nth : 0) << 53 | (parent & ~(UINT64_C(127) << 53 | UINT64_C(15) << 60));
}

HIDDEN void kernel_stop(uint64_t h, uint64_t timer)
{
	struct comm *c;
	struct op *o = op_of(h, &c);
	uint64_t nth = h >> 53 & 127;
	if (!o || nth > 64)
		return;
	uint64_t bit = nth ? UINT64_C(1) << (nth - 1) : 0, stopped = PEEK(&o->stopped);
	if (stopped & bit) /* it is told twice */
		return;
	uint64_t was = hold(o, h, COUNT_STOPPED);
	if (was == UINT64_MAX)
		return;
	SET(&o->stopped, stopped | bit); /* of two at once one may be missing: then a second time counts */
	uint32_t plan = PEEK(&o->plan);
	at_least(&o->gpu_end, timer);
	int last = count_stopped(was) + 1 == count_started(was);
	int64_t now = last ? lockstep_now() : 0;
	if (last)
		SET(&o->seen_end, now);
	release(o);
	if (!last)
		return;
	SET(&c->stopped_at, now);
	if ((int32_t)(plan - PEEK(&c->stopped_plan)) > 0)
		STORE(&c->stopped_plan, plan);
	settle(c, PEEK(&c->gen), now, 0);
}

/* A proxy operation that received knows how long the peer's first bytes took. */
HIDDEN void op_waited(uint64_t h, int64_t ns, int32_t peer)
{
	struct comm *c;
	struct op *o = op_of(h, &c);
	if (!o || ns <= span_ns(PEEK(&o->wait)) || hold(o, h, 0) == UINT64_MAX)
		return;
	SET(&o->wait, lockstep_pack_span(0, ns));
	SET(&o->wait_peer, peer);
	release(o);
}

/* While its slot is taken, a group's calls have not returned. By its communicator, and by the time, which need not be exact, it is
 * known when nobody is going to tell of its end. */
static uint64_t group_api(const struct comm *c, uint32_t gen, int captured)
{
	uint64_t h;
	int how = captured ? sample_captured() : SURE;
	struct slot *g = take(&plugin.groups, H_GROUP_API, &h);
	if (!g)
		return 0;
	g->captured = (uint8_t)how;
	SET(&g->at, PEEK(&plugin.tick));
	SET(&g->ctx, (uint64_t)gen << 32 | (uint64_t)(c - plugin.comms));
	return h;
}

HIDDEN uint64_t op_event(void *context, const struct nccl_event *e, uint32_t type, int v4)
{
	uint32_t gen;
	struct comm *c;
	if (type == NCCL_KERNEL_CH)
		return kernel_start(e);
	if (!(c = comm_of_context(context, &gen))) {
		if (type == NCCL_COLL_API || type == NCCL_P2P_API || (v4 && (type == NCCL_COLL || type == NCCL_P2P)))
			ADD(&plugin.w.hdr->ops_lost, 1); /* a communicator that found no room */
		return 0;
	}
	switch (type) {
	case NCCL_GROUP_API:
		return group_api(c, gen, e->u.group_api.captured);
	case NCCL_COLL_API:
		return coll_api(c, gen, e);
	case NCCL_P2P_API:
		return p2p_api(c, gen, e);
	case NCCL_KERNEL_LAUNCH:
		SET(&c->launched, lockstep_now());
		return make_handle(H_LAUNCH, c, gen, 0);
	case NCCL_GROUP:
		SET(&c->posted, (uint32_t)0);
		SET(&c->posting, is_sampling() ? lockstep_now() : 0);
		return make_handle(H_GROUP, c, gen, ADD(&c->plans, 1) + 1);
	case NCCL_COLL:
		return coll_start(c, gen, e);
	case NCCL_P2P:
		return p2p_start(c, gen, e);
	case NCCL_CE_COLL:
		return ce_coll(c, gen, e);
	}
	return 0;
}

/* The group of a plan is over: the proxy has its entries, and is awake. */
static void plan_stop(uint64_t h)
{
	struct comm *c = comm_of_handle(h);
	int64_t posting = c ? PEEK(&c->posting) : 0;
	uint32_t ops = posting ? PEEK(&c->posted) : 0;
	if (ops)
		sample_cost((lockstep_now() - posting) / ops);
}

/* Only the ends of groups mean something: a collective's stop is that it is queued. */
HIDDEN void op_stop(uint64_t h)
{
	if (handle_kind(h) == H_GROUP)
		plan_stop(h);
	struct slot *g = handle_kind(h) == H_GROUP_API ? slot_of(&plugin.groups, h) : NULL;
	if (g)
		give(g, h);
	if (handle_kind(h) == H_GROUP_API)
		sample_group();
}
