/*
 * The program's own words, for C11 and C++14 on Linux: steps, checkpoints, evaluation,
 * compilation, data loading. A header and nothing else; include it where you need it, with
 * record/c and marks/c in the include path. See package marks for what the calls mean.
 *
 *	lockstep_step(n);
 *	lockstep_begin(LOCKSTEP_MARK_CHECKPOINT);
 *	write_checkpoint();
 *	lockstep_end(LOCKSTEP_MARK_CHECKPOINT);
 *
 * Any thread may call. No call fails, blocks or allocates after the first; where no file can
 * be made (the first call tries once, errno says why) they do nothing. A file of marks belongs
 * to the process that opened it: in its forked children the calls do nothing.
 */
#ifndef LOCKSTEP_H
#define LOCKSTEP_H

#include "lockstep_record.h"
#include "lockstep_launcher.h"

/* One of each for the whole program, in however many files the header is included. */
struct lockstep_marks {
	struct lockstep_writer writer;
	int64_t anchored;
	int32_t pid;  /* whose the file is */
	int32_t state; /* 0 not tried, 1 being made, 2 there, 3 there is none */
};
__attribute__((weak)) struct lockstep_marks lockstep_marks_of_process;

/* Makes the file of marks unless there is one; 0, or -1 with errno. Marks call it. */
static inline int lockstep_marks_open(void)
{
	struct lockstep_marks *m = &lockstep_marks_of_process;
	int32_t state = 0;
	if (!__atomic_compare_exchange_n(&m->state, &state, 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
		return state == 2 ? 0 : -1; /* another thread's first call is making it: its mark counts, this one does not */
	const char *off = getenv("LOCKSTEP_RECORDER");
	if (off && !strcmp(off, "off")) {
		__atomic_store_n(&m->state, 3, __ATOMIC_RELEASE);
		return -1;
	}
	struct lockstep_who who;
	lockstep_whoami(&who);
	if (who.rank < 0) /* no launcher: started by hand */
		who.rank = 0, who.world_size = 1;
	if (!who.node[0])
		gethostname(who.node, sizeof who.node - 1);
	struct lockstep_options o;
	memset(&o, 0, sizeof o);
	o.job = who.job[0] ? who.job : "job";
	o.node = who.node;
	o.rank = who.rank;
	o.world_size = who.world_size > who.rank ? who.world_size : who.rank + 1;
	o.local_rank = who.local_rank;
	o.attempt = who.attempt;
	o.marks_only = 1;
	int failed = lockstep_create(&m->writer, &o);
	m->anchored = lockstep_now();
	m->pid = (int32_t)getpid();
	__atomic_store_n(&m->state, failed ? 3 : 2, __ATOMIC_RELEASE);
	return failed ? -1 : 0;
}

static inline void lockstep_mark(enum lockstep_mark code, uint8_t flags, uint64_t value)
{
	struct lockstep_marks *m = &lockstep_marks_of_process;
	int32_t state = __atomic_load_n(&m->state, __ATOMIC_ACQUIRE);
	if (state == 0 && lockstep_marks_open() == 0)
		state = 2;
	if (state != 2 || m->pid != (int32_t)getpid())
		return;
	struct lockstep_record r;
	memset(&r, 0, sizeof r);
	r.mono = lockstep_now();
	r.kind = LOCKSTEP_KIND_MARK;
	r.flags = flags;
	r.comm = LOCKSTEP_NO_COMM;
	r.body.value.code = (uint8_t)code;
	r.body.value.peer = -1;
	r.body.value.value = value;
	int64_t last = __atomic_load_n(&m->anchored, __ATOMIC_RELAXED);
	if (r.mono - last > 5000000000 && __atomic_compare_exchange_n(&m->anchored, &last, r.mono, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
		lockstep_anchor(&m->writer);
	lockstep_append(&m->writer, &r);
}

/* The step of this number begins. */
static inline void lockstep_step(uint64_t n) { lockstep_mark(LOCKSTEP_MARK_STEP, 0, n); }

/* What the program does until lockstep_end with the same code: LOCKSTEP_MARK_CHECKPOINT, _EVALUATION, _COMPILE
 * (pauses that are no hang), or _DATA_LOADING (which a verdict names, and does not excuse). */
static inline void lockstep_begin(enum lockstep_mark code) { lockstep_mark(code, LOCKSTEP_FLAG_BEGIN, 0); }
static inline void lockstep_end(enum lockstep_mark code) { lockstep_mark(code, 0, 0); }

#endif /* LOCKSTEP_H */
