/*
 * Where communicators are kept, and what NCCL calls them. Whoever gives or takes a
 * place holds the plugin's lock; contexts and handles are looked up without it.
 */
#include "plugin.h"

/* A context is salt << 32 | generation << 16 | index + 1. */
HIDDEN void *make_context(const struct comm *c)
{
	return (void *)(uintptr_t)((uint64_t)plugin.salt << 32 | (uint64_t)(c->gen & 0xffff) << 16 | (uint64_t)(c - plugin.comms + 1));
}

HIDDEN struct comm *comm_of_context(void *context, uint32_t *gen)
{
	uint64_t v = (uint64_t)(uintptr_t)context, i = (v & 0xffff) - 1;
	if (v >> 32 != plugin.salt || i >= PEEK(&plugin.used))
		return NULL;
	struct comm *c = &plugin.comms[i];
	*gen = LOAD(&c->gen);
	return *gen & 1 && (*gen & 0xffff) == (v >> 16 & 0xffff) ? c : NULL;
}

HIDDEN struct comm *comm_of_handle(uint64_t h)
{
	uint64_t i = h >> 41 & (MAX_COMMS - 1);
	if (i >= PEEK(&plugin.used))
		return NULL;
	struct comm *c = &plugin.comms[i];
	uint32_t gen = LOAD(&c->gen);
	return gen & 1 && (gen & 511) == (h >> 32 & 511) ? c : NULL;
}

/* More operations are kept of the first communicators: a job has few that it uses all the time. There, a full queue of
 * CUDA's (1,024 kernels) behind one that hangs fits, with those not timed before it: none of them is taken for over. */
static uint32_t ops_for(uint32_t index) { return index < 16 ? 2048 : index < 256 ? 256 : 64; }

static int reset_comm(struct comm *c, uint32_t size)
{
	if (c->size < size) {
		struct op *ops = mmap(NULL, size * sizeof *ops, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (ops == MAP_FAILED)
			return -1;
		if (c->ops)
			munmap(c->ops, c->size * sizeof *ops);
		c->ops = ops, c->size = size;
	} else {
		for (uint32_t i = 0; i < c->size; i++) {
			SET(&c->ops[i].lost, (uint64_t)0);
			SET(&c->ops[i].seq, (uint64_t)0);
		}
	}
	c->mask = c->size - 1;
	c->called = c->started = c->finished = c->told_started = 0;
	c->plans = c->stopped_plan = 0;
	c->loud = c->loud_before = c->deaf = c->quiet = 0;
	c->group = c->group_seq = c->plan = c->plan_seq = 0;
	c->last_group = c->first_of_group = 0;
	c->maybe = c->maybe_told = 0, c->maybe_group = 0, c->maybe_at = 0;
	c->launched = c->started_at = c->stopped_at = 0;
	c->p2p = 0;
	c->dirty = c->busy = 0;
	return 0;
}

/* Takes a word that callers hold for microseconds. Returns -1 when it was never free: who holds it has lost its core for long. */
HIDDEN int take_turn(uint32_t *word)
{
	for (int i = 0; __atomic_exchange_n(word, 1, __ATOMIC_ACQUIRE); i++) {
		if (i == 10000)
			return -1;
		struct timespec t = {.tv_nsec = 100000}; /* no yield: who is there may have a lower priority */
		nanosleep(&t, NULL);
	}
	return 0;
}

/* Readers would take a former communicator's connections for those of its entry's next one. */
static int forget_conns(uint16_t comm)
{
	if (take_turn(&plugin.conns_busy))
		return -1;
	for (uint32_t i = 0; i < MAX_CONNS; i++)
		if (plugin.conns[i].rec && plugin.conns[i].comm == comm)
			lockstep_drop_conn(plugin.conns[i].rec);
	STORE(&plugin.conns_busy, 0);
	return 0;
}

HIDDEN void leave_comm(struct comm *c)
{
	c->next_left = NULL;
	if (plugin.first_left)
		plugin.last_left->next_left = c;
	else
		plugin.first_left = c;
	plugin.last_left = c;
}

/* A communicator's place: a new one, or one that has long been left. */
HIDDEN struct comm *place_comm(int version, uint64_t id, const char *name, int32_t rank, int32_t ranks)
{
	struct comm *c = NULL;
	int64_t now = lockstep_now();
	if (plugin.first_left && now - plugin.first_left->left > GRACE_NS) {
		c = plugin.first_left;
		plugin.first_left = c->next_left;
	}
	if (!c && plugin.used >= MAX_COMMS) {
		ADD(&plugin.w.hdr->comm_overflow, 1);
		return NULL;
	}
	uint32_t index = c ? (uint32_t)(c - plugin.comms) : plugin.used;
	int again = c != NULL;
	c = &plugin.comms[index];
	if ((again && forget_conns((uint16_t)index)) || reset_comm(c, ops_for(index))) {
		if (again)
			leave_comm(c);
		ADD(&plugin.w.hdr->comm_overflow, 1);
		return NULL;
	}
	c->ranks = ranks, c->version = version;
	if (again) {
		lockstep_renew_comm(&plugin.w, c->rec, id, name, rank, ranks, LOCKSTEP_COMM_JOINED);
	} else {
		uint16_t at;
		c->rec = lockstep_add_comm(&plugin.w, id, name, rank, ranks, 0, LOCKSTEP_COMM_JOINED, &at);
		if (!c->rec || at != index)
			return NULL;
		STORE(&plugin.used, index + 1);
	}
	STORE(&c->gen, c->gen + 1);
	return c;
}
