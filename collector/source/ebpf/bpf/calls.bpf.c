/* Probes on NCCL's functions: who has called what on which communicator, and whether the call has
 * returned. What is decided by is in the map comms, which user space reads whenever it likes; the
 * ring carries single calls, which may be sampled and lost. */
#include "calls.h"

char license_of_this[] SEC("license") = "Dual BSD/GPL";

struct {
	UINT(type, MAP_HASH);
	UINT(max_entries, 16384);
	TYPE(key, struct comm_key);
	TYPE(value, struct comm);
} comms SEC(".maps");

struct {
	UINT(type, MAP_LRU_HASH);
	UINT(max_entries, 8192);
	TYPE(key, u64);
	TYPE(value, struct thread);
} threads SEC(".maps");

/* The processes whose end user space wants to hear of. */
struct {
	UINT(type, MAP_HASH);
	UINT(max_entries, 4096);
	TYPE(key, u32);
	TYPE(value, u32);
} processes SEC(".maps");

struct {
	UINT(type, MAP_RINGBUF);
	UINT(max_entries, 1 << 16);
} ends SEC(".maps");

struct {
	UINT(type, MAP_PERCPU_ARRAY);
	UINT(max_entries, NSTATS);
	TYPE(key, enum stat);
	TYPE(value, u64);
} stats SEC(".maps");

struct {
	UINT(type, MAP_PERCPU_ARRAY);
	UINT(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct thread);
} scratch SEC(".maps");

struct {
	UINT(type, MAP_RINGBUF);
	UINT(max_entries, 1 << 20);
} ring SEC(".maps");

/* Of a communicator's calls those go into the ring whose number has none of these bits. */
const volatile u64 sample_mask = 0;

/* For the types to be known to bpf2go. */
const struct call *unused_call __attribute__((unused));
const struct end *unused_end __attribute__((unused));

INLINE void count(enum stat which)
{
	u64 *n = map_lookup(&stats, &which);
	if (n)
		*n += 1;
}

INLINE struct thread *this_thread(u64 id)
{
	struct thread *t = map_lookup(&threads, &id);
	if (t)
		return t;
	u32 zero = 0;
	struct thread *empty = map_lookup(&scratch, &zero); /* is never written */
	if (!empty || map_update(&threads, &id, empty, BPF_ANY))
		return 0;
	return map_lookup(&threads, &id);
}

INLINE struct comm *find(u64 id, u64 comm)
{
	struct comm_key k = {.comm = comm, .tgid = id >> 32};
	return map_lookup(&comms, &k);
}

INLINE void put(u64 id, u64 comm, struct comm *c)
{
	struct comm_key k = {.comm = comm, .tgid = id >> 32};
	if (map_update(&comms, &k, c, BPF_ANY))
		count(STAT_TABLE_FULL);
}

/* came_back notes that calls on a communicator have returned. */
INLINE void came_back(u64 id, u64 comm, u64 now)
{
	struct comm *c = find(id, comm);
	if (c) {
		c->returned_at = now;
		c->returned = c->called;
	}
}

/* settle ends what a thread was in: its group has ended, or its return was not seen. */
INLINE void settle(u64 id, struct thread *t, u64 now)
{
	for (u32 i = 0; i < IN_GROUP; i++)
		if (i < t->ncomms)
			came_back(id, t->comms[i], now);
	t->ncomms = 0;
}

SEC("uprobe")
int call_enter(struct pt_regs *ctx)
{
	u64 id = pid_tgid(), now = ktime_ns(), cookie = attach_cookie(ctx);
	u64 address = arg(ctx, COOKIE_COMM(cookie));
	struct thread *t = this_thread(id);
	if (!address || !t)
		return 0;
	if (t->inside == address && SP(ctx) < t->sp)
		return 0; /* one function calls another: that is one call */
	if (!t->depth && t->ncomms)
		settle(id, t, now);
	struct comm *c = find(id, address);
	if (!c) {
		struct comm fresh = {.created = now, .rank = -1, .size = -1, .peer = -1, .state = JOINED, .at = now};
		put(id, address, &fresh);
		if (!(c = find(id, address)))
			return 0;
	}
	t->sp = SP(ctx);
	t->inside = address;
	if (t->depth) {
		u32 n = t->ncomms;
		if (n == 0 || (n <= IN_GROUP && t->comms[(n - 1) & (IN_GROUP - 1)] != address)) {
			if (n < IN_GROUP)
				t->comms[n] = address;
			t->ncomms = n < IN_GROUP ? n + 1 : n;
		}
	}
	if (cookie & COOKIE_P2P) {
		__sync_fetch_and_add(&c->p2p, 1);
		c->p2p_at = now;
		count(STAT_P2P);
		return 0;
	}
	u32 peer = COOKIE_PEER(cookie), dtype = COOKIE_DTYPE(cookie), stream = COOKIE_STREAM(cookie), op = COOKIE_OP(cookie);
	c->count = arg(ctx, COOKIE_COUNT(cookie));
	c->dtype = dtype == NO_ARG ? 0 : arg(ctx, dtype);
	c->kind = COOKIE_KIND(cookie);
	c->peer = peer == NO_ARG ? -1 : (s32)arg(ctx, peer);
	c->called_at = now;
	u64 seq = __sync_fetch_and_add(&c->called, 1) + 1;
	count(STAT_CALLS);
	if (seq & sample_mask) {
		count(STAT_SAMPLED_OUT);
		return 0;
	}
	struct call *r = ringbuf_reserve(&ring, sizeof *r, 0);
	if (!r) {
		count(STAT_RING_FULL);
		return 0;
	}
	r->comm = address;
	r->created = c->created;
	r->seq = seq;
	r->at = now;
	r->count = c->count;
	r->stream = stream == NO_ARG ? 0 : arg(ctx, stream);
	r->tgid = id >> 32;
	r->tid = id;
	r->peer = c->peer;
	r->kind = c->kind;
	r->dtype = c->dtype;
	r->op = op == NO_ARG ? 0 : arg(ctx, op);
	r->in_place = arg(ctx, 0) == arg(ctx, 1);
	ringbuf_submit(r, 1 /* BPF_RB_NO_WAKEUP: it is polled */);
	count(STAT_RECORDED);
	return 0;
}

SEC("uprobe")
int call_return(struct pt_regs *ctx)
{
	u64 id = pid_tgid();
	struct thread *t = map_lookup(&threads, &id);
	if (!t || !t->inside || SP(ctx) < t->sp)
		return 0; /* an inner one's */
	u64 address = t->inside;
	t->inside = 0;
	if (!t->depth)
		came_back(id, address, ktime_ns());
	return 0;
}

SEC("uprobe")
int group_start(struct pt_regs *ctx)
{
	u64 id = pid_tgid();
	struct thread *t = this_thread(id);
	if (!t || (t->inside && SP(ctx) < t->sp))
		return 0;
	if (!t->depth && t->ncomms)
		settle(id, t, ktime_ns());
	t->inside = 0;
	t->depth++;
	return 0;
}

/* made notes a communicator that init has made. */
INLINE void made(u64 id, struct pending *p, u64 now)
{
	struct comm_key k = {.comm = p->out | JOINING_KEY, .tgid = id >> 32};
	u64 address = 0;
	map_delete(&comms, &k);
	if (read_user(&address, sizeof address, (void *)p->out) || !address)
		return;
	struct comm c = p->comm;
	c.state = JOINED;
	c.at = now;
	put(id, address, &c);
	struct comm *parent = p->from ? find(id, p->from) : 0;
	if (parent)
		__sync_fetch_and_add(&parent->settled, 1);
}

INLINE void all_made(u64 id, struct thread *t, u64 now)
{
	for (u32 i = 0; i < PENDING; i++)
		if (i < t->npending)
			made(id, &t->pending[i], now);
	t->npending = 0;
}

SEC("uprobe")
int group_end(struct pt_regs *ctx)
{
	u64 id = pid_tgid();
	struct thread *t = map_lookup(&threads, &id);
	if (t && t->depth && !(t->inside && SP(ctx) < t->sp)) {
		t->inside = 0;
		t->depth--;
	}
	return 0;
}

SEC("uprobe")
int group_end_return(struct pt_regs *ctx)
{
	u64 id = pid_tgid();
	struct thread *t = map_lookup(&threads, &id);
	if (t && !t->depth) {
		u64 now = ktime_ns();
		settle(id, t, now);
		all_made(id, t, now);
	}
	return 0;
}

INLINE u64 mix(u64 h, u64 word)
{
	h = (h ^ word) * 0xd6e8feb86659fd93ull;
	return h ^ h >> 32;
}

/* hash_id hashes a unique id, 128 bytes; 0 when it cannot be read. */
INLINE u64 hash_id(u64 at)
{
	u64 words[16];
	if (read_user(words, sizeof words, (void *)at))
		return 0;
	u64 h = 0x9e3779b97f4a7c15ull;
	for (u32 i = 0; i < 16; i++)
		h = mix(h, words[i]);
	return h ? h : 1;
}

/* begin keeps what init was given until it has returned. more: of the same call. */
INLINE void begin(u64 id, u64 out, struct comm *c, u64 from, u32 more)
{
	struct thread *t = this_thread(id);
	if (!t)
		return;
	if (!t->depth && !more)
		t->npending = 0;
	u32 n = t->npending;
	if (n >= PENDING) {
		count(STAT_TABLE_FULL);
		return;
	}
	t->pending[n].out = out;
	t->pending[n].from = from;
	t->pending[n].comm = *c;
	t->npending = n + 1;
	if (c->id && c->rank >= 0) /* else its rank is not known while it is made: nothing to tell */
		put(id, out | JOINING_KEY, c);
}

SEC("uprobe")
int init_enter(struct pt_regs *ctx)
{
	u64 id = pid_tgid(), now = ktime_ns(), at, rank = arg(ctx, 2);
	u64 scalable = attach_cookie(ctx) == INIT_SCALABLE;
	/* ncclCommInitRank(comm *, int nranks, ncclUniqueId id by value, int rank, ...)
	 * ncclCommInitRankScalable(comm *, int nranks, int rank, int n, ncclUniqueId *ids, ...) */
	if (scalable)
		at = arg(ctx, 4);
#if defined(__TARGET_ARCH_x86)
	else
		at = ctx->rsp + 8; /* of its class: in memory */
#else
	else {
		at = arg(ctx, 2); /* as a pointer */
		rank = arg(ctx, 3);
	}
#endif
	struct comm c = {
		.created = now, .at = now, .id = hash_id(at), .size = arg(ctx, 1), .rank = rank, .peer = -1, .state = JOINING,
	};
	if (!c.id)
		count(STAT_UNREAD);
	begin(id, arg(ctx, 0), &c, 0, 0);
	return 0;
}

/* child names a communicator that is made of another one, by its parent, by which of its calls that was,
 * and by what the members of the new one have in common. */
INLINE void child(struct comm *c, struct comm *parent, u64 how, u64 common)
{
	c->nth = __sync_fetch_and_add(&parent->splits, 1) + 1;
	c->parent = parent->id;
	if (!c->parent)
		return;
	c->id = mix(mix(mix(how, c->parent), c->nth), common);
	c->id = c->id ? c->id : 1;
}

SEC("uprobe")
int split_enter(struct pt_regs *ctx)
{
	/* ncclCommSplit(comm, int color, int key, comm *, config) */
	u64 id = pid_tgid(), now = ktime_ns(), from = arg(ctx, 0);
	s32 color = arg(ctx, 1);
	struct comm *parent = find(id, from);
	struct comm c = {.created = now, .at = now, .size = -1, .rank = -1, .peer = -1, .key = arg(ctx, 2), .state = JOINING};
	if (parent) {
		child(&c, parent, 0x51, (u32)color);
		if (color < 0) {
			__sync_fetch_and_add(&parent->settled, 1);
			return 0; /* takes part, and gets none */
		}
	}
	begin(id, arg(ctx, 3), &c, from, 0);
	return 0;
}

SEC("uprobe")
int shrink_enter(struct pt_regs *ctx)
{
	/* ncclCommShrink(comm, int *exclude, int n, comm *, config, flags): those that are excluded do not call it */
	u64 id = pid_tgid(), now = ktime_ns(), from = arg(ctx, 0), list = arg(ctx, 1), common = 0;
	u32 n = arg(ctx, 2);
	struct comm *parent = find(id, from);
	struct comm c = {.created = now, .at = now, .size = -1, .rank = -1, .peer = -1, .state = JOINING};
	if (parent) {
		s32 before = 0, rank = parent->rank, out = 0;
		for (u32 i = 0; i < EXCLUDED; i++) {
			if (i >= n || read_user(&out, sizeof out, (void *)(list + 4 * i)))
				break;
			before += out < rank;
			common += mix(0x9e3779b97f4a7c15ull, (u32)out); /* in any order */
		}
		child(&c, parent, 0x52, common);
		if (n <= EXCLUDED && rank >= 0 && parent->size > (s32)n) {
			c.rank = rank - before;
			c.size = parent->size - (s32)n;
		}
	}
	begin(id, arg(ctx, 3), &c, from, 0);
	return 0;
}

SEC("uprobe")
int init_all_enter(struct pt_regs *ctx)
{
	/* ncclCommInitAll(comm *, int n, const int *): all members are in this process. Each is told of as alone. */
	u64 id = pid_tgid(), now = ktime_ns(), out = arg(ctx, 0);
	u32 n = arg(ctx, 1);
	for (u32 i = 0; i < PENDING; i++) {
		if (i >= n)
			break;
		struct comm c = {.created = now, .at = now, .id = mix(mix(mix(0x53, id), now), i + 1), .size = 1, .peer = -1, .state = JOINING};
		begin(id, out + 8 * i, &c, 0, i);
	}
	if (n > PENDING)
		count(STAT_TABLE_FULL);
	return 0;
}

SEC("uprobe")
int init_return(struct pt_regs *ctx)
{
	u64 id = pid_tgid();
	struct thread *t = map_lookup(&threads, &id);
	u32 result = RESULT(ctx);
	if (!t || t->depth)
		return 0;
	if (result && result != 7 /* ncclInProgress */) {
		for (u32 i = 0; i < PENDING; i++)
			if (i < t->npending) {
				struct comm_key k = {.comm = t->pending[i].out | JOINING_KEY, .tgid = id >> 32};
				map_delete(&comms, &k);
			}
		t->npending = 0;
		return 0;
	}
	all_made(id, t, ktime_ns());
	return 0;
}

/* The cookie is the state that it goes to. */
SEC("uprobe")
int leave_enter(struct pt_regs *ctx)
{
	u64 id = pid_tgid();
	struct comm *c = find(id, arg(ctx, 0));
	if (c && c->state == JOINED) {
		c->at = ktime_ns();
		c->state = attach_cookie(ctx);
	}
	return 0;
}

struct signal_struct {
	s32 group_exit_code;
	struct {
		s32 counter;
	} live;
} KERNEL;

struct task_struct {
	s32 exit_code;
	s32 tgid;
	struct signal_struct *signal;
} KERNEL;

/* The last thread's end is the process's. */
SEC("raw_tp/sched_process_exit")
int process_exit(u64 *ctx)
{
	u32 tgid = pid_tgid() >> 32;
	if (!map_lookup(&processes, &tgid))
		return 0;
	struct task_struct *task = (void *)ctx[0];
	struct signal_struct *signal = 0;
	s32 live = 0, code = 0, group = 0;
	READ(signal, task->signal);
	READ(live, signal->live.counter);
	if (live > 0)
		return 0;
	READ(group, signal->group_exit_code);
	READ(code, task->exit_code);
	struct end *e = ringbuf_reserve(&ends, sizeof *e, 0);
	if (!e)
		return 0;
	e->at = ktime_ns();
	e->tgid = tgid;
	e->code = group ? group : code;
	ringbuf_submit(e, 0);
	return 0;
}
