/*
 * Slots for what lasts: API groups, proxy operations, steps, network requests. A slot is
 * taken with one compare-and-swap among a few next ones; where all of these are in use,
 * what was to be kept is counted as lost. One whose stop never came is taken over when
 * its communicator is gone, or after ten minutes.
 */
#include "plugin.h"

#define TRIES 8
#ifndef FORGOTTEN
#define FORGOTTEN (600000 * MS)
#endif

static int pool_init(struct pool *p, uint32_t n)
{
	void *mem = mmap(NULL, (size_t)n * sizeof(struct slot), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (mem == MAP_FAILED)
		return -1;
	p->slots = mem, p->mask = n - 1;
	return 0;
}

HIDDEN int pools_init(void)
{
	if (plugin.groups.slots)
		return 0;
	return pool_init(&plugin.proxies, MAX_PROXIES) || pool_init(&plugin.steps, MAX_STEPS) || pool_init(&plugin.nets, MAX_NETS) ||
			pool_init(&plugin.groups, MAX_GROUPS) ? -1 : 0;
}

static int forgotten(const struct slot *s, int64_t now)
{
	uint64_t ctx = PEEK(&s->ctx);
	if (ctx && PEEK(&plugin.comms[ctx & (MAX_COMMS - 1)].gen) != ctx >> 32)
		return 1;
	int64_t at = PEEK(&s->at);
	return at && now - at > FORGOTTEN;
}

HIDDEN struct slot *take(struct pool *p, enum handle_kind kind, uint64_t *handle)
{
	uint32_t first = ADD(&p->next, 1);
	int64_t now = 0;
	for (uint32_t i = 0; i < TRIES; i++) {
		uint32_t at = (first + i) & p->mask;
		struct slot *s = &p->slots[at];
		uint64_t owner = LOAD(&s->owner);
		if (owner & 1) {
			if (i < TRIES - 2)
				continue;
			if (!now)
				now = lockstep_now();
			if (!forgotten(s, now))
				continue;
		}
		uint64_t mine = ((owner >> 1) + 1) << 1 | 1;
		if (CAS(&s->owner, &owner, mine)) {
			SET(&s->ctx, (uint64_t)0);
			SET(&s->at, 0);
			*handle = (uint64_t)kind << 60 | (mine >> 1 & UINT32_MAX >> 4) << 32 | at;
			return s;
		}
	}
	ADD(&plugin.w.hdr->events_lost, 1);
	return NULL;
}

HIDDEN struct slot *slot_of(struct pool *p, uint64_t h)
{
	uint32_t at = (uint32_t)h;
	if (!p->slots || at > p->mask)
		return NULL;
	struct slot *s = &p->slots[at];
	uint64_t owner = LOAD(&s->owner);
	return owner & 1 && (owner >> 1 & UINT32_MAX >> 4) == (h >> 32 & UINT32_MAX >> 4) ? s : NULL;
}

/* Gives a slot back; 0 when somebody else has. */
HIDDEN int give(struct slot *s, uint64_t h)
{
	uint64_t owner = LOAD(&s->owner);
	if (!(owner & 1) || (owner >> 1 & UINT32_MAX >> 4) != (h >> 32 & UINT32_MAX >> 4))
		return 0;
	return CAS(&s->owner, &owner, owner & ~UINT64_C(1));
}
