/*
 * Which groups of calls NCCL is asked to time.
 *
 * Calls are told of always. Kernels (KernelCh) cost NCCL far more than they cost the plugin: an
 * entry of the proxy's queue for each channel, a proxy thread that is woken and then polls, and
 * a kernel that ends only when its stamps have reached the host's memory. Waking took the
 * caller 20 µs in a virtual machine, and differs by machine, so it is measured: all of it lies
 * between the start and the stop of NCCL's Group event. Timed calls may take 1/250 of the time. What
 * that affords beside the calls of the last second says which share of them is timed; a job
 * that calls rarely enough has all. Before that is known, and for bursts, there is a budget that
 * fills up: so many calls in a row are timed, and then one in SHARE.
 *
 * Which ones are timed is a function of the number of the call, and those of a small share are
 * among those of a large one: ranks that make the same calls time the same operations.
 *
 * NCCL reads its mask at a group's start, so what holds for a group is decided at the end of
 * the one before. The last call before a pause is timed out of turn where the burst before
 * was as long as this one: a hang in it would be visible nowhere else.
 */
#include "plugin.h"

#include <sched.h>

#define SHARE_OF_TIME 250
#define LEAST_COST_NS INT64_C(1000)  /* the plugin's part, and what the kernel takes longer */
#define MOST_COST_NS INT64_C(100000)
#define SAVED_CALLS 256
#define WINDOW_NS (1000 * MS)
#define MOST_SHARE 256 /* fewer calls lie between two that are timed than CUDA's queue takes, so that a hang stops one of them */
#define SHARE 32
#define RUSH_NS INT64_C(50000)
#define RUSH_CALLS 1024
#define RUSH_SHARE 128
#define PAUSE_NS (1 * MS)
#define REST_NS (64 * MS)
#define UNSURE_NS (1000 * MS)

/* A loop of calls closer than RUSH_NS, without a pause. */
static int is_rush(const struct sampling *s) { return PEEK(&s->calls) > RUSH_CALLS && PEEK(&s->gap) < RUSH_NS; }

/* How far apart calls have to be for each to be timed. Where proxies transfer they are awake in any case. */
static int64_t apart(const struct sampling *s)
{
	int64_t cost = PEEK(&s->network) ? 0 : PEEK(&s->cost);
	return SHARE_OF_TIME * (cost > LEAST_COST_NS ? cost : LEAST_COST_NS);
}

/* What NCCL took for the entries of one timed call. The estimate goes to the median: callers that lose their core do not count. */
HIDDEN void sample_cost(int64_t ns)
{
	struct sampling *s = &plugin.sampling;
	int64_t cost = PEEK(&s->cost), step = cost / 16 + 16;
	cost += ns > cost ? step : -step;
	SET(&s->cost, cost < 0 ? 0 : cost > MOST_COST_NS ? MOST_COST_NS : cost);
}

/* Calls are timed evenly, and in step with no loop of the program. */
static int chosen(const struct sampling *s, uint32_t call)
{
	uint32_t share = PEEK(&s->share), least = !PEEK(&s->tight) ? 1 : is_rush(s) ? RUSH_SHARE : SHARE;
	return call * UINT32_C(2654435769) <= UINT32_MAX / (share > least ? share : least);
}

/* What the last second's calls say of the share that the budget affords. */
static void share_out(struct sampling *s, int64_t now)
{
	int64_t past = now - PEEK(&s->window), room = past / apart(s);
	if (past < WINDOW_NS)
		return;
	int64_t calls = PEEK(&s->total) - PEEK(&s->counted), ends = PEEK(&s->pauses);
	int crowded = ends > room / 4 * 3; /* too many bursts to time the last call of each */
	if (!crowded && calls > room)
		room -= ends;
	uint32_t share = 1;
	while (share < MOST_SHARE && calls / share > room)
		share *= 2;
	SET(&s->share, share);
	SET(&s->crowded, crowded);
	SET(&s->counted, PEEK(&s->total));
	SET(&s->pauses, (uint32_t)0);
	SET(&s->window, now);
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
	int64_t spent = PEEK(&s->spent), each = apart(s), saved = SAVED_CALLS * each;
	spent = (spent > now - saved ? spent : now - saved) + each;
	if (spent > now)
		SET(&s->tight, 1);
	else if (spent < now - saved / 2)
		SET(&s->tight, 0);
	SET(&s->spent, spent < now + each ? spent : now + each);
	share_out(s, now);
	int64_t gap = now - PEEK(&s->called), mean = PEEK(&s->gap);
	SET(&s->gap, mean + ((gap < PAUSE_NS ? gap : PAUSE_NS) - mean) / 64);
	if (gap > PAUSE_NS) {
		SET(&s->burst, PEEK(&s->calls));
		SET(&s->calls, (uint32_t)0);
		SET(&s->pauses, PEEK(&s->pauses) + 1);
	}
	if (gap > REST_NS)
		SET(&s->rested, 1); /* this call may be timed and not be sure to be: the next one is */
	if (gap > saved)
		SET(&s->share, (uint32_t)0);
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
	int rested = PEEK(&s->rested), last = PEEK(&s->calls) + 1 == PEEK(&s->burst) && !PEEK(&s->crowded);
	if (rested)
		SET(&s->rested, 0);
	int quiet = !rested && !last && !chosen(s, PEEK(&s->total) + 1) && now - PEEK(&s->captured) > CAPTURE_NS;
	if (quiet != PEEK(&s->quiet))
		turn(quiet);
	uint64_t want, *word = own_word(s, &want);
	if (PEEK(word) != want)
		SET(word, want);
}

/* Nobody has called for a while: the next call is timed. */
HIDDEN void sample_rest(int64_t now)
{
	struct sampling *s = &plugin.sampling;
	if (is_sampling() && PEEK(&s->quiet) && now - PEEK(&s->called) >= REST_NS)
		turn(0);
}

/* A call goes into a CUDA graph, whose replays tell of their kernels only if it was called so: from now on it is.
 * Returns whether this one was: SURE, UNSURE or, as far as is known, not (QUIET). */
HIDDEN int sample_captured(void)
{
	struct sampling *s = &plugin.sampling;
	int64_t now = lockstep_now();
	int quiet = PEEK(&s->quiet), sure = is_sure(s, now);
	SET(&s->captured, now);
	if (!is_sampling())
		return SURE;
	SET(&s->called, now);
	if (quiet)
		(void)turn(0);
	return quiet ? QUIET : sure ? SURE : UNSURE;
}
