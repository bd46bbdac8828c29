/*
 * Which groups of calls NCCL is asked to time.
 *
 * Calls are told of always. Kernels (KernelCh) cost NCCL far more than they cost the plugin, by
 * its source: an entry of the proxy's queue for each channel, a proxy thread that is woken and
 * then polls, and a kernel that ends only when its stamps have reached the host's memory.
 * All that was on cost 0.9 µs an operation of 8 B (docs/design/nccl.md); without a plugin that
 * does nothing beside it, nobody has measured the kernels' part alone. A job that makes up to 4,000 calls a second has every
 * operation timed, and bursts of 256 above that. Of one that calls more often, one operation in 32
 * is, and in a long loop of calls closer than 50 µs one in 128; it tells that all before it are over.
 * Which ones is a function of the number of the call, so that ranks that make the same calls choose
 * the same ones, and their progress compares.
 *
 * NCCL reads its mask at a group's start, so what holds for a group is decided at the end of
 * the one before. The last call before a pause is timed out of turn where the burst before
 * was as long as this one: a hang in it would be visible nowhere else.
 */
#include "plugin.h"

#include <sched.h>

#define COST_NS INT64_C(250000)
#define SAVED_NS (256 * COST_NS)
#define SHARE 32
#define RUSH_NS INT64_C(50000)
#define RUSH_CALLS 1024
#define RUSH_SHARE 128
#define PAUSE_NS (1 * MS)
#define CAPTURE_NS (1000 * MS)
#define UNSURE_NS (1000 * MS)

static int is_sampling(void) { return PEEK(&plugin.set) == LOCKSTEP_EVENTS_DEFAULT; }

/* A loop of calls closer than RUSH_NS, without a pause. A call that is timed among others that are not wakes NCCL's
 * proxy, which costs it some 10 µs. A hang there does not go unseen: such a loop goes on calling until CUDA's queue
 * is full, which is more calls than lie between two that are timed. */
static int is_rush(const struct sampling *s) { return PEEK(&s->calls) > RUSH_CALLS && PEEK(&s->gap) < RUSH_NS; }

/* One call in SHARE, evenly, and in step with no loop of the program; of a rush one in RUSH_SHARE. These are among
 * those: ranks that do not agree on how fast they call still time some of the same operations. */
static int chosen(const struct sampling *s, uint32_t call)
{
	return call * UINT32_C(2654435769) < UINT32_MAX / (is_rush(s) ? RUSH_SHARE : SHARE);
}

/* The word of this thread, and what is in it while nobody has turned anything since its last group. */
static uint64_t *own_word(struct sampling *s, uint64_t *want)
{
	uint64_t self = (uint64_t)pthread_self() * UINT64_C(0x9E3779B97F4A7C15);
	*want = (self & ~(uint64_t)UINT32_MAX) | LOAD(&s->turns);
	return &s->seen[self >> 58];
}

/* Whoever may turn the mask does so alone, or leaves it at that. While `quiet` is 0 the mask asks for kernels. */
static int turn(int quiet)
{
	struct sampling *s = &plugin.sampling;
	if (__atomic_exchange_n(&s->turning, 1, __ATOMIC_ACQUIRE))
		return 0;
	if (quiet == PEEK(&s->quiet)) {
		set_masks(quiet);
	} else {
		__atomic_fetch_add(&s->turns, 1, __ATOMIC_SEQ_CST);
		if (quiet)
			STORE(&s->quiet, 1);
		set_masks(quiet);
		SET(&s->turned, lockstep_now());
		if (!quiet)
			STORE(&s->quiet, 0);
		__atomic_fetch_add(&s->turns, 1, __ATOMIC_SEQ_CST);
	}
	STORE(&s->turning, (uint32_t)0);
	return 1;
}

/* The set of events is another one, or another communicator has come: its first calls are timed. */
HIDDEN void sample_reset(void)
{
	for (int i = 0; i < 1000 && !turn(0); i++)
		sched_yield();
}

/* What the calls of late say of how often this process calls. */
static void weigh(struct sampling *s, int64_t now)
{
	int64_t spent = PEEK(&s->spent);
	spent = (spent > now - SAVED_NS ? spent : now - SAVED_NS) + COST_NS;
	if (spent > now)
		SET(&s->tight, 1);
	else if (spent < now - SAVED_NS / 2)
		SET(&s->tight, 0);
	SET(&s->spent, spent < now + COST_NS ? spent : now + COST_NS);
	int64_t gap = now - PEEK(&s->called), mean = PEEK(&s->gap);
	SET(&s->gap, mean + ((gap < PAUSE_NS ? gap : PAUSE_NS) - mean) / 64);
	if (gap > PAUSE_NS) {
		SET(&s->burst, PEEK(&s->calls));
		SET(&s->calls, (uint32_t)0);
	}
	SET(&s->called, now);
	SET(&s->calls, PEEK(&s->calls) + 1);
	SET(&s->total, PEEK(&s->total) + 1);
}

/* NCCL has read its mask for this call some time ago, before which another thread may have turned it:
 * the kernel is waited for only if nobody has since the thread's last group. */
static int is_sure(struct sampling *s, int64_t now)
{
	uint64_t want, *word = own_word(s, &want);
	if (want & 1)
		return 0; /* it is being turned */
	return (uint32_t)want == 0 || PEEK(word) == want || now - PEEK(&s->turned) > UNSURE_NS;
}

/* A call: returns OP_QUIET when NCCL is not, or perhaps not, going to tell of its kernel. */
HIDDEN uint32_t sample_call(int64_t now)
{
	struct sampling *s = &plugin.sampling;
	if (!is_sampling())
		return 0;
	weigh(s, now);
	if (LOAD(&s->quiet))
		return OP_QUIET;
	return is_sure(s, now) ? 0 : OP_QUIET;
}

/* A group of calls is over: what is NCCL to tell of the next one? */
HIDDEN void sample_group(void)
{
	struct sampling *s = &plugin.sampling;
	if (!is_sampling())
		return;
	int64_t now = PEEK(&s->called);
	int quiet = PEEK(&s->tight) && !chosen(s, PEEK(&s->total) + 1) && PEEK(&s->calls) + 1 != PEEK(&s->burst) && now - PEEK(&s->captured) > CAPTURE_NS;
	if (quiet != PEEK(&s->quiet))
		turn(quiet);
	uint64_t want, *word = own_word(s, &want);
	if (PEEK(word) != want)
		SET(word, want);
}

/* Nobody has called for as long as it takes to have the whole budget again: the next call is timed. */
HIDDEN void sample_rest(int64_t now)
{
	struct sampling *s = &plugin.sampling;
	if (!is_sampling() || !PEEK(&s->quiet) || now - PEEK(&s->called) < SAVED_NS)
		return;
	SET(&s->tight, 0);
	turn(0);
}

/* A call goes into a CUDA graph, whose replays tell of their kernels only if it was called so: from now on it is.
 * Returns whether this one was. */
HIDDEN int sample_captured(void)
{
	struct sampling *s = &plugin.sampling;
	if (!is_sampling())
		return 1;
	int64_t now = lockstep_now();
	int quiet = PEEK(&s->quiet);
	SET(&s->captured, now);
	SET(&s->called, now);
	if (quiet)
		(void)turn(0);
	return !quiet;
}
