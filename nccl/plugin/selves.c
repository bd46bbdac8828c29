/*
 * Sends to oneself, after which NCCL (2.27 to 2.30 at least) no longer knows whose stamps it reads.
 *
 * Its kernel counts the pieces of work of each channel, and stamps of the n-th go into slot n mod 64. Its host counts
 * them as well, and tells that the n-th has begun once slot n mod 64 holds a count of n or more. A send to oneself,
 * which is a part of every all-to-all, is work of the kernel's that the host does not count (addP2pToPlan in
 * enqueue.cc). From then on the channel's host is behind by one for each. What it waits for has been stamped long ago:
 * then the work begins and ends the moment that it is posted, with the times of an older one; or that older one was not
 * timed: then nothing is told until the slot is used again, which with few timed calls may be never, and meanwhile
 * nothing of what is queued behind it on that channel.
 *
 * So what such a channel tells is passed over. A send to oneself that takes one channel takes channel 0: it comes first
 * in NCCL's order of peers. One that takes several takes any.
 */
#include "plugin.h"

#define ALL_CHANNELS UINT64_MAX

/* A send or receive goes into a kernel: is it to oneself? v4 does not say how many channels it takes. */
HIDDEN void note_self(struct comm *c, const struct nccl_event *e)
{
	if (e->u.p2p.peer != e->rank)
		return;
	uint64_t deaf = c->version > 4 && e->u.p2p.channels <= 1 ? 1 : ALL_CHANNELS;
	if (PEEK(&c->deaf) != (PEEK(&c->deaf) | deaf)) {
		SET(&c->deaf, PEEK(&c->deaf) | deaf);
		SET(&c->loud, (uint64_t)0), SET(&c->loud_before, (uint64_t)0); /* it may be one that is never told */
	}
}

/* Whether NCCL tells nothing true of an operation: none of its channels counts. Of sends and receives it is not known how many there
 * are; those of a collective are the first ones. */
HIDDEN int is_deaf(const struct comm *c, const struct op *o)
{
	uint64_t deaf = PEEK(&c->deaf);
	return deaf && PEEK(&o->flags) & OP_PLACED && (deaf == ALL_CHANNELS || PEEK(&o->channels) <= 1);
}

/* NCCL is asked for the kernel of a call. */
HIDDEN void loud_call(struct comm *c, uint64_t seq)
{
	SET(&c->loud_before, PEEK(&c->loud));
	SET(&c->loud, seq);
}

/* It is known how many channels the kernel has: nobody is to wait for one that tells nothing. */
HIDDEN void loud_placed(struct comm *c, const struct op *o, uint64_t seq)
{
	if (!is_deaf(c, o))
		return;
	if (PEEK(&c->loud_before) == seq)
		SET(&c->loud_before, (uint64_t)0);
	if (PEEK(&c->loud) == seq)
		SET(&c->loud, PEEK(&c->loud_before));
}
