/* ---- the writer: everything below is functions.h and file.h of record/internal/genheader ---- */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/*
 * Live words are stored with the compiler's __atomic builtins, which are
 * C11's memory model without C11's types: the same header serves C and C++.
 */
#define LOCKSTEP_STORE(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define LOCKSTEP_SET(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
#define LOCKSTEP_ADD(p, v) __atomic_fetch_add((p), (v), __ATOMIC_RELAXED)

struct lockstep_writer {
	struct lockstep_header *hdr; /* NULL: recorder off, every call is a no-op */
	struct lockstep_comm *comms;
	struct lockstep_conn *conns;
	struct lockstep_record *ring;
	uint64_t mask;
	char path[512];
};

/* What a process says of itself. Zero slots mean the defaults, dir NULL means the
 * user's runtime directory: $LOCKSTEP_RUNTIME_DIR, or else /dev/shm/lockstep-UID. */
struct lockstep_options {
	const char *dir, *job, *node;
	int32_t rank, world_size, local_rank;
	uint32_t attempt;
	uint32_t comm_slots, conn_slots, ring_slots;
	uint32_t source, source_version; /* enum lockstep_source */
	int marks_only; /* a file of marks, with a small ring and no tables: see record.Options.MarksOnly */
};

/* Whether a kind of collective, known or not, is among those of a mask (LOCKSTEP_COLLS_). */
static inline int lockstep_coll_is(uint8_t coll, uint64_t mask) { return coll < 64 && (mask >> coll & 1); }

/* CLOCK_MONOTONIC in ns, the clock of every time in a recorder. */
static inline int64_t lockstep_now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/*
 * Adds one record; r->seq is ignored. Wait-free, from any thread: the slot is
 * claimed with one compare-and-swap, and where a producer that stalled a whole
 * lap ago still holds it, or it already has a younger record, this one is
 * dropped and counted.
 */
static inline void lockstep_append(struct lockstep_writer *w, const struct lockstep_record *r)
{
	if (!w->hdr)
		return;
	uint64_t ticket = LOCKSTEP_ADD(&w->hdr->head, 1);
	struct lockstep_record *d = &w->ring[ticket & w->mask];
	uint64_t seq = __atomic_load_n(&d->seq, __ATOMIC_RELAXED); /* busy counts as youngest */
	if (seq > ticket ||
	    !__atomic_compare_exchange_n(&d->seq, &seq, LOCKSTEP_BUSY | (ticket + 1), 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
		LOCKSTEP_ADD(&w->hdr->dropped, 1);
		return;
	}
	__atomic_thread_fence(__ATOMIC_RELEASE); /* the claim is seen before any word that it covers */
	const uint64_t *from = (const uint64_t *)(const void *)r;
	uint64_t *to = (uint64_t *)(void *)d;
	for (int i = 1; i < LOCKSTEP_RECORD_SIZE / 8; i++)
		LOCKSTEP_SET(&to[i], from[i]);
	LOCKSTEP_STORE(&d->seq, ticket + 1);
}

/* A length of time in a body: ns up to 2.1 s, else microseconds. */
static inline uint32_t lockstep_pack_span(int64_t first, int64_t last)
{
	int64_t d = last - first, max = (int64_t)LOCKSTEP_SPAN_MICRO - 1;
	if (d < 0)
		return 0;
	if (d <= max)
		return (uint32_t)d;
	d /= 1000;
	return (uint32_t)(LOCKSTEP_SPAN_MICRO | (uint64_t)(d < max ? d : max));
}

static inline void lockstep_put_name(uint8_t dst[LOCKSTEP_NAME_SIZE], const char *s)
{
	if (s)
		memcpy(dst, s, strnlen(s, LOCKSTEP_NAME_SIZE - 1));
}

/* ---- communicators: the calls of record.Comm, by the same threads ---- */

/* Takes a slot of the comm table: NULL, and counted, when it is full. *index is
 * what records name it by. The slot's functions do nothing with NULL. */
static inline struct lockstep_comm *lockstep_add_comm(struct lockstep_writer *w, uint64_t id, const char *name,
	int32_t rank, int32_t size, uint64_t parent, enum lockstep_comm_state state, uint16_t *index)
{
	*index = LOCKSTEP_NO_COMM;
	if (!w->hdr)
		return NULL;
	uint64_t i = LOCKSTEP_ADD(&w->hdr->comm_used, 1);
	if (i >= w->hdr->comm_slots) {
		LOCKSTEP_ADD(&w->hdr->comm_overflow, 1);
		return NULL;
	}
	struct lockstep_comm *c = &w->comms[i];
	c->id = id, c->rank = rank, c->size = size, c->parent = parent;
	lockstep_put_name(c->name, name);
	LOCKSTEP_SET(&c->state_at, lockstep_now());
	LOCKSTEP_STORE(&c->state, LOCKSTEP_PUBLISHED | (uint64_t)state);
	*index = (uint16_t)i;
	return c;
}

/*
 * Gives a slot whose communicator was left some time ago (10 s is a good time: for
 * readers to have read it) to another one. One thread at a time adds and renews.
 */
static inline void lockstep_renew_comm(struct lockstep_writer *w, struct lockstep_comm *c, uint64_t id, const char *name,
	int32_t rank, int32_t size, enum lockstep_comm_state state)
{
	uint64_t gen = (__atomic_load_n(&c->state, __ATOMIC_RELAXED) >> LOCKSTEP_GEN_SHIFT) + 1;
	LOCKSTEP_STORE(&c->state, (uint64_t)0);
	__atomic_thread_fence(__ATOMIC_SEQ_CST); /* nobody sees the new words with the old state */
	uint64_t *words = (uint64_t *)(void *)c;
	for (size_t i = 1; i < sizeof *c / 8; i++)
		LOCKSTEP_SET(&words[i], (uint64_t)0);
	c->id = id, c->rank = rank, c->size = size;
	lockstep_put_name(c->name, name);
	c->since = __atomic_load_n(&w->hdr->head, __ATOMIC_RELAXED);
	LOCKSTEP_SET(&c->state_at, lockstep_now());
	LOCKSTEP_STORE(&c->state, gen << LOCKSTEP_GEN_SHIFT | LOCKSTEP_PUBLISHED | (uint64_t)state);
}

static inline void lockstep_comm_set_state(struct lockstep_comm *c, enum lockstep_comm_state state)
{
	if (!c)
		return;
	uint64_t gen = __atomic_load_n(&c->state, __ATOMIC_RELAXED) >> LOCKSTEP_GEN_SHIFT;
	LOCKSTEP_SET(&c->state_at, lockstep_now());
	LOCKSTEP_STORE(&c->state, gen << LOCKSTEP_GEN_SHIFT | LOCKSTEP_PUBLISHED | (uint64_t)state);
}

/* The state LOCKSTEP_COMM_ABORTED with its reason, and the rank in the communicator that the error named, -1 for none. */
static inline void lockstep_comm_aborted(struct lockstep_comm *c, enum lockstep_result why, int32_t peer)
{
	if (!c)
		return;
	LOCKSTEP_SET(&c->fault, (uint32_t)why);
	LOCKSTEP_SET(&c->fault_peer, peer);
	lockstep_comm_set_state(c, LOCKSTEP_COMM_ABORTED);
}

/* mono is 0 for one that is going to start at once: its start is its time. */
static inline void lockstep_comm_enqueued(struct lockstep_comm *c, uint64_t seq, int64_t mono, enum lockstep_coll coll, uint64_t bytes)
{
	if (!c)
		return;
	LOCKSTEP_SET(&c->enqueued_at, mono);
	LOCKSTEP_SET(&c->coll, (uint64_t)coll);
	LOCKSTEP_SET(&c->op_bytes, bytes);
	LOCKSTEP_STORE(&c->enqueued, seq);
}

static inline void lockstep_comm_started(struct lockstep_comm *c, uint64_t seq, int64_t mono)
{
	if (!c)
		return;
	LOCKSTEP_SET(&c->started_at, mono);
	LOCKSTEP_STORE(&c->started, seq);
}

static inline void lockstep_comm_finished(struct lockstep_comm *c, uint64_t seq, int64_t mono)
{
	if (!c)
		return;
	LOCKSTEP_SET(&c->finished_at, mono);
	LOCKSTEP_STORE(&c->finished, seq);
}

static inline void lockstep_comm_add_phases(struct lockstep_comm *c, uint64_t own_ns, uint64_t wait_ns, uint64_t transfer_ns, uint64_t bytes)
{
	if (!c)
		return;
	LOCKSTEP_SET(&c->own_ns, c->own_ns + own_ns);
	LOCKSTEP_SET(&c->wait_ns, c->wait_ns + wait_ns);
	LOCKSTEP_SET(&c->transfer_ns, c->transfer_ns + transfer_ns);
	LOCKSTEP_SET(&c->bytes, c->bytes + bytes);
	if (own_ns > c->max_own_ns)
		LOCKSTEP_SET(&c->max_own_ns, own_ns);
	LOCKSTEP_STORE(&c->ops, c->ops + 1);
}

/* ---- connections: the calls of record.Conn; byte counts are totals ---- */

static inline struct lockstep_conn *lockstep_add_conn(struct lockstep_writer *w, uint16_t comm, int32_t peer,
	enum lockstep_transport transport, uint16_t channel, uint64_t id, const char *name, uint32_t *index)
{
	*index = LOCKSTEP_NO_CONN;
	if (!w->hdr)
		return NULL;
	uint64_t i = LOCKSTEP_ADD(&w->hdr->conn_used, 1);
	if (i >= w->hdr->conn_slots) {
		LOCKSTEP_ADD(&w->hdr->conn_overflow, 1);
		return NULL;
	}
	struct lockstep_conn *c = &w->conns[i];
	c->id = id, c->peer = peer, c->comm = comm, c->channel = channel, c->transport = (uint8_t)transport;
	lockstep_put_name(c->name, name);
	LOCKSTEP_STORE(&c->state, (uint64_t)LOCKSTEP_PUBLISHED);
	*index = (uint32_t)i;
	return c;
}

/* lockstep_renew_comm for a connection, whose communicator's slot was renewed. */
static inline void lockstep_renew_conn(struct lockstep_conn *c, uint16_t comm, int32_t peer,
	enum lockstep_transport transport, uint16_t channel, uint64_t id, const char *name)
{
	uint64_t gen = (__atomic_load_n(&c->state, __ATOMIC_RELAXED) >> LOCKSTEP_GEN_SHIFT) + 1;
	LOCKSTEP_STORE(&c->state, (uint64_t)0);
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	uint64_t *words = (uint64_t *)(void *)c;
	for (size_t i = 1; i < sizeof *c / 8; i++)
		LOCKSTEP_SET(&words[i], (uint64_t)0);
	c->id = id, c->peer = peer, c->comm = comm, c->channel = channel, c->transport = (uint8_t)transport;
	lockstep_put_name(c->name, name);
	LOCKSTEP_STORE(&c->state, gen << LOCKSTEP_GEN_SHIFT | (uint64_t)LOCKSTEP_PUBLISHED);
}

/* Takes a connection out of the table, until it is renewed. */
static inline void lockstep_drop_conn(struct lockstep_conn *c)
{
	uint64_t state = __atomic_load_n(&c->state, __ATOMIC_RELAXED);
	LOCKSTEP_STORE(&c->state, state >> LOCKSTEP_GEN_SHIFT << LOCKSTEP_GEN_SHIFT);
}

static inline void lockstep_conn_posted(struct lockstep_conn *c, uint64_t bytes, int64_t mono)
{
	if (!c)
		return;
	LOCKSTEP_SET(&c->posted_at, mono);
	LOCKSTEP_STORE(&c->posted, bytes);
}

static inline void lockstep_conn_completed(struct lockstep_conn *c, uint64_t bytes, int64_t mono)
{
	if (!c)
		return;
	LOCKSTEP_SET(&c->completed_at, mono);
	LOCKSTEP_STORE(&c->completed, bytes);
}

static inline void lockstep_conn_received(struct lockstep_conn *c, uint64_t bytes, int64_t mono)
{
	if (!c)
		return;
	LOCKSTEP_SET(&c->received_at, mono);
	LOCKSTEP_STORE(&c->received, bytes);
}

static inline void lockstep_conn_tx_blocked(struct lockstep_conn *c, int64_t since)
{
	if (c)
		LOCKSTEP_STORE(&c->tx_blocked, since);
}

static inline void lockstep_conn_rx_waiting(struct lockstep_conn *c, int64_t since)
{
	if (c)
		LOCKSTEP_STORE(&c->rx_waiting, since);
}

static inline void lockstep_conn_window(struct lockstep_conn *c, uint64_t bps, enum lockstep_cause cause, int64_t mono)
{
	if (!c)
		return;
	LOCKSTEP_SET(&c->window_bps, bps);
	LOCKSTEP_SET(&c->window_cause, (uint64_t)cause);
	LOCKSTEP_STORE(&c->window_at, mono);
}

static inline void lockstep_conn_slow(struct lockstep_conn *c, uint64_t windows)
{
	if (c)
		LOCKSTEP_STORE(&c->slow, windows);
}

static inline void lockstep_conn_windows(struct lockstep_conn *c, uint64_t windows)
{
	if (c)
		LOCKSTEP_STORE(&c->windows, windows);
}

static inline void lockstep_conn_latency(struct lockstep_conn *c, int64_t ns)
{
	if (c)
		LOCKSTEP_STORE(&c->latency_ns, ns);
}

/* Since when the connection's path is in which state; a connection with several paths has an entry each. */
static inline void lockstep_conn_link(struct lockstep_conn *c, enum lockstep_link_state state, int64_t since)
{
	if (c) {
		c->link_at = since;
		LOCKSTEP_STORE(&c->link, (uint32_t)state);
	}
}

/* How often the path has taken over from another, and the bytes ever sent again on it for that. */
static inline void lockstep_conn_switched(struct lockstep_conn *c, uint64_t switches, uint64_t resent)
{
	if (c) {
		c->resent = resent;
		LOCKSTEP_STORE(&c->switches, switches);
	}
}

/* A new id: a path that comes back has another queue pair. */
static inline void lockstep_conn_renamed(struct lockstep_conn *c, uint64_t id)
{
	if (c)
		LOCKSTEP_STORE(&c->id, id);
}

