/*
 * Which operations of a communicator are over, and what is recorded of them.
 *
 * NCCL tells of channels, not of ends, and may lose some. Operations of a communicator
 * run in the order of their plans, so one is over when all its channels have stopped,
 * or when a later plan's have and its own do not come any more. It is recorded then:
 * enqueue, start, end. One thread at a time looks; who comes meanwhile leaves word.
 */
#include "plugin.h"

enum verdict { KEEP, EXACT, UNSEEN, ASSUMED };

/* Whether the call of an operation has returned: its API group is over. Where nobody has told that, a call of another group has. */
static int returned(const struct comm *c, const struct op *o, uint64_t seq)
{
	uint64_t group = PEEK(&o->group);
	return handle_kind(group) != H_GROUP_API || seq < LOAD(&c->first_of_group) || !slot_of(&plugin.groups, group);
}

/* Whether an operation is over, by its count, which is told. tick: the helper looks, and may go by the time that nothing came. */
static enum verdict judge(const struct comm *c, const struct op *o, uint64_t seq, int64_t now, int tick, uint64_t *at)
{
	/* What tells of others is read before its own channels: this thread may be held up anywhere in between, and what
	 * has run in the meantime would make an operation that was told of look like one that was not. */
	uint32_t flags = LOAD(&o->flags), plan = PEEK(&o->plan);
	int full = LOAD(&c->called) - seq > c->size / 4 * 3;
	int passed = flags & OP_PLACED && (int32_t)(LOAD(&c->stopped_plan) - plan) > 0; /* a later plan has run */
	int later = LOAD(&c->started) > seq;
	uint64_t count = *at = LOAD(&o->count);
	uint32_t started = count_started(count), stopped = count_stopped(count);
	uint32_t channels = channels_told(c, PEEK(&o->channels));

	if (count_held(count)) /* the helper looks again */
		return KEEP;
	if (started && stopped >= started) {
		if ((channels && stopped >= channels) || passed)
			return EXACT;
		if (tick && now - PEEK(&o->seen_end) > (channels ? 100 : 5) * MS)
			return EXACT;
		return KEEP;
	}
	if ((flags & OP_QUIET || is_deaf(c, o)) && !started && returned(c, o, seq)) { /* what NCCL times behind it tells that it is over */
		if (full || later)
			return UNSEEN;
		return tick && PEEK(&c->loud) < seq && now - PEEK(&o->called) > 250 * MS ? ASSUMED : KEEP;
	}
	if (passed) /* its last channels may be on the way: the poller looks at several plans in turn */
		return full || now - PEEK(&c->stopped_at) > 20 * MS || now - PEEK(&o->called) > 2000 * MS ? UNSEEN : KEEP;
	if (flags & OP_PLACED || !returned(c, o, seq))
		return KEEP;
	/* NCCL gave it to no kernel that it tells of: symmetric memory, copy engines, or nothing to do. */
	if (flags & OP_COPY || full || later)
		return UNSEEN;
	return tick && now - o->called > 250 * MS ? UNSEEN : KEEP;
}

static struct lockstep_record record_of(struct comm *c, uint64_t seq, enum lockstep_kind kind, int64_t mono)
{
	struct lockstep_record r = {.mono = mono, .kind = (uint8_t)kind, .comm = (uint16_t)(c - plugin.comms), .op_seq = seq};
	return r;
}

static void tell_enqueue(struct comm *c, struct op *o, uint64_t seq)
{
	if (__atomic_fetch_or(&o->flags, OP_TOLD, __ATOMIC_RELAXED) & OP_TOLD)
		return;
	struct lockstep_record r = record_of(c, seq, LOCKSTEP_KIND_ENQUEUE, o->called);
	uint8_t coll = PEEK(&o->coll);
	int reduces = lockstep_coll_is(coll, LOCKSTEP_COLLS_REDUCES);
	int64_t launched = PEEK(&o->launched);
	r.body.enqueue = (struct lockstep_body_enqueue){
		.coll = coll, .dtype = PEEK(&o->dtype), .op = reduces ? LOCKSTEP_OP_UNKNOWN_OP : LOCKSTEP_OP_SUM, .root = PEEK(&o->root),
		.bytes = PEEK(&o->bytes), .stream = PEEK(&o->stream), .launch = launched ? lockstep_pack_span(o->called, launched) : 0,
	};
	lockstep_append(&plugin.w, &r);
}

static void tell_run(struct comm *c, struct op *o, uint64_t seq, enum lockstep_kind kind, int64_t seen, uint64_t gpu, uint8_t flags)
{
	struct lockstep_record r = record_of(c, seq, kind, seen);
	r.flags = flags;
	r.body.run = (struct lockstep_body_run){
		.coll = PEEK(&o->coll), .algo = PEEK(&o->algo), .proto = PEEK(&o->proto),
		.clock = gpu ? LOCKSTEP_CLOCK_GPU : LOCKSTEP_CLOCK_HOST, .chans = (uint16_t)count_started(PEEK(&o->count)),
		.stamp = gpu ? (int64_t)gpu : seen,
	};
	lockstep_append(&plugin.w, &r);
}

static void tell_phase(struct comm *c, uint64_t seq, enum lockstep_phase code, uint8_t index, int32_t peer, int64_t end, int64_t dur)
{
	struct lockstep_record r = record_of(c, seq, LOCKSTEP_KIND_PHASE, end);
	r.body.phase = (struct lockstep_body_phase){.code = (uint8_t)code, .index = index, .peer = peer, .stamp = end, .dur = dur};
	lockstep_append(&plugin.w, &r);
}

/* What lay between the process's last operation, of any communicator, and this one. */
static uint64_t own_time(uint64_t start, uint64_t end)
{
	uint64_t untimed = __atomic_exchange_n(&plugin.sampling.untimed, 0, __ATOMIC_RELAXED) * (end - start);
	int64_t last = PEEK(&plugin.gpu_end), own = last ? (int64_t)start - last : 0;
	while (last < (int64_t)end && !CAS(&plugin.gpu_end, &last, (int64_t)end))
		;
	own -= untimed < INT64_C(3600000000000) ? (int64_t)untimed : INT64_C(3600000000000); /* each took as long as this one, as far as is known */
	return own > 0 && own < INT64_C(3600000000000) ? (uint64_t)own : 0; /* more is another GPU's clock */
}

/* Records an operation that is over. Returns when, by the host's clock. */
static int64_t finish(struct comm *c, struct op *o, uint64_t seq, enum verdict v, int64_t now)
{
	uint64_t start = PEEK(&o->gpu_start), end = PEEK(&o->gpu_end);
	int64_t seen_start = PEEK(&o->seen_start), seen_end = PEEK(&o->seen_end);
	uint8_t replay = PEEK(&o->flags) & OP_REPLAY ? LOCKSTEP_FLAG_REPLAY : 0;
	tell_enqueue(c, o, seq);
	if (v != EXACT) {
		if (seen_start)
			tell_run(c, o, seq, LOCKSTEP_KIND_START, seen_start, start != UINT64_MAX ? start : 0, replay);
		tell_run(c, o, seq, LOCKSTEP_KIND_END, now, 0, LOCKSTEP_FLAG_UNSEEN);
		if (PEEK(&o->flags) & OP_QUIET || is_deaf(c, o)) {
			c->quiet++;
			ADD(&plugin.sampling.untimed, 1);
		} else {
			ADD(&plugin.w.hdr->ops_unseen, 1);
		}
		lockstep_comm_add_phases(c->rec, 0, 0, 0, PEEK(&o->bytes));
		return now;
	}
	/* A poller that lags hands out a younger operation's stamp: then its own times are all there is. */
	int exact = start != UINT64_MAX && end >= start && end - start < UINT64_C(1) << 62;
	uint64_t dur = exact ? end - start : (uint64_t)(seen_end - seen_start);
	uint64_t wait = (uint64_t)span_ns(PEEK(&o->wait)), own = exact ? own_time(start, end) : 0;
	if (wait > dur)
		wait = dur;
	tell_run(c, o, seq, LOCKSTEP_KIND_START, seen_start, exact ? start : 0, replay);
	if (wait) {
		tell_phase(c, seq, LOCKSTEP_PHASE_WAIT, 0, PEEK(&o->wait_peer), seen_end - (int64_t)(dur - wait), (int64_t)wait);
		tell_phase(c, seq, LOCKSTEP_PHASE_TRANSFER, 1, -1, seen_end, (int64_t)(dur - wait));
	}
	tell_run(c, o, seq, LOCKSTEP_KIND_END, seen_end, exact ? end : 0, 0);
	/* It stands for those before it that were not timed: sums stay comparable between ranks. */
	lockstep_comm_add_phases(c->rec, own, wait * (c->quiet + 1), (dur - wait) * (c->quiet + 1), PEEK(&o->bytes));
	c->quiet = 0;
	return seen_end;
}

static void tell_started(struct comm *c, uint64_t seq, int64_t at)
{
	if (seq > c->told_started) {
		c->told_started = seq;
		lockstep_comm_started(c->rec, seq, at);
	}
}

/* Operations one after the other, up to the first that is not over. */
static void walk(struct comm *c, int64_t now, int tick)
{
	uint64_t done = c->finished;
	int64_t at = 0;
	int assumed = 0;
	tell_started(c, LOAD(&c->started), PEEK(&c->started_at));
	for (;;) {
		uint64_t seq = done + 1;
		struct op *o = &c->ops[seq & c->mask];
		if (seq > LOAD(&c->called))
			break;
		if (LOAD(&o->seq) != seq) {
			if (seq > LOAD(&o->lost))
				break; /* it is being filled */
			done = seq;
			continue;
		}
		uint64_t count;
		enum verdict v = judge(c, o, seq, now, tick, &count);
		if (v != KEEP && !CAS(&o->count, &count, count | COUNT_OVER))
			continue; /* another channel has told meanwhile */
		if (v == KEEP) {
			if (!tick)
				break;
			if (now - o->called > 200 * MS)
				tell_enqueue(c, o, seq);
			if (seq <= c->told_started && now - PEEK(&o->seen_start) > 100 * MS) {
				/* It is held up: the live words tell of what runs, as a GPU's do, not of what is queued behind it. */
				LOCKSTEP_SET(&c->rec->coll, (uint64_t)PEEK(&o->coll));
				LOCKSTEP_SET(&c->rec->op_bytes, PEEK(&o->bytes));
			}
			if (!(PEEK(&o->flags) & OP_PLACED) && now - o->called > 100 * MS && !returned(c, o, seq))
				tell_started(c, seq, o->called); /* the call itself waits for others: connections are made */
			if ((PEEK(&o->flags) & OP_QUIET || is_deaf(c, o)) && now - o->called > 100 * MS)
				tell_started(c, seq, o->called); /* what is timed behind it has not begun: it is this one, or one soon after it */
			break;
		}
		at = finish(c, o, seq, v, now);
		assumed = v == ASSUMED;
		STORE(&o->seq, (uint64_t)0);
		done = seq;
	}
	if (done != c->finished) {
		tell_started(c, done, at ? at : now);
		if (assumed && !PEEK(&c->p2p) && c->rec)
			at = PEEK(&c->rec->started_at); /* no time is known: while another rank has not called it, it is not over */
		SET(&c->finished, done);
		lockstep_comm_finished(c->rec, done, at ? at : now);
	}
}

HIDDEN void settle(struct comm *c, uint32_t gen, int64_t now, int tick)
{
	STORE(&c->dirty, 1);
	for (int i = 0; i < 4 && __atomic_exchange_n(&c->dirty, 0, __ATOMIC_ACQ_REL); i++) {
		if (__atomic_exchange_n(&c->busy, 1, __ATOMIC_ACQUIRE)) {
			STORE(&c->dirty, 1);
			return; /* who is there looks again, or the helper does */
		}
		if (LOAD(&c->gen) == gen && gen & 1)
			walk(c, now, tick);
		STORE(&c->busy, 0);
	}
}

/* A communicator goes: what is known of its operations is recorded now. The caller holds
 * busy. Returns whether one was still running, and for long: then it was aborted. */
HIDDEN int settle_last(struct comm *c, int64_t now)
{
	int running = 0;
	walk(c, now, 1);
	for (uint64_t seq = PEEK(&c->finished) + 1; seq <= PEEK(&c->called); seq++) {
		struct op *o = &c->ops[seq & c->mask];
		if (LOAD(&o->seq) != seq) {
			if (seq > LOAD(&o->lost))
				ADD(&plugin.w.hdr->ops_lost, 1);
			continue;
		}
		uint64_t count = __atomic_fetch_or(&o->count, COUNT_OVER, __ATOMIC_ACQ_REL);
		uint32_t started = count_started(count), stopped = count_stopped(count);
		int over = started && stopped >= started;
		running |= started > stopped && now - PEEK(&o->seen_start) > 5000 * MS;
		int64_t at = finish(c, o, seq, over ? EXACT : UNSEEN, now);
		STORE(&o->seq, (uint64_t)0);
		if (over && seq == PEEK(&c->finished) + 1) {
			SET(&c->finished, seq);
			tell_started(c, seq, at);
			lockstep_comm_finished(c->rec, seq, at);
		}
	}
	return running;
}
