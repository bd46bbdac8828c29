// Completion queues and channels.
#include "fake.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct vb_comp_channel *ibv_create_comp_channel(struct vb_context *c) {
	if (enter("ibv_create_comp_channel", c)) return NULL;
	struct channel *ch = calloc(1, sizeof *ch);
	ch->v = (struct vb_comp_channel){.context = c, .fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE)};
	ch->last = &ch->events;
	pthread_mutex_unlock(&lock);
	return &ch->v;
}

// forget takes events of a queue, or all, out of a channel. Its descriptor may
// stay readable, as it may where the kernel does this.
static void forget(struct channel *ch, struct cq *cq) {
	for (struct cq_event **p = &ch->events; *p;) {
		struct cq_event *e = *p;
		if (cq && e->cq != cq) {
			p = &e->next;
			continue;
		}
		*p = e->next;
		free(e);
	}
	for (ch->last = &ch->events; *ch->last; ch->last = &(*ch->last)->next) {}
}

int ibv_destroy_comp_channel(struct vb_comp_channel *v) {
	int rc = enter("ibv_destroy_comp_channel", NULL);
	if (rc || (rc = leave(v->refcnt ? EBUSY : 0))) return rc;
	forget((struct channel *)v, NULL);
	close(v->fd);
	free(v);
	pthread_mutex_unlock(&lock);
	return 0;
}

struct vb_cq *ibv_create_cq(struct vb_context *c, int depth, void *user, struct vb_comp_channel *ch, int vector) {
	if (enter("ibv_create_cq", c) || leave(depth < 1 || depth >= 1 << 22 || vector ? EINVAL : 0)) return NULL;
	static uint32_t handles;
	struct cq *q = calloc(1, sizeof *q);
	int room = 1;
	while (room < depth) room *= 2;
	q->v = (struct vb_cq){.context = c, .channel = ch, .cq_context = user, .handle = ++handles, .cqe = room};
	q->ring = calloc(room, sizeof *q->ring);
	if (ch) ch->refcnt++;
	pthread_mutex_unlock(&lock);
	return &q->v;
}

int ibv_destroy_cq(struct vb_cq *v) {
	struct cq *q = (struct cq *)v;
	int rc = enter("ibv_destroy_cq", NULL);
	if (rc || (rc = leave(q->users ? EBUSY : 0))) return rc;
	if (v->channel) {
		v->channel->refcnt--;
		forget((struct channel *)v->channel, q);
	}
	forget_events(context_of(v->context), q);
	free(q->ring);
	free(q);
	pthread_mutex_unlock(&lock);
	return 0;
}

int ibv_get_cq_event(struct vb_comp_channel *v, struct vb_cq **cq, void **user) {
	uint64_t one;
	if (eventfd_read(v->fd, &one)) return -1; // blocks, unless the descriptor does not
	if (enter("ibv_get_cq_event", NULL)) return -1;
	struct channel *ch = (struct channel *)v;
	struct cq_event *e = ch->events;
	if (e) {
		*cq = &e->cq->v;
		*user = e->cq->v.cq_context;
		if (!(ch->events = e->next)) ch->last = &ch->events;
		free(e);
	}
	pthread_mutex_unlock(&lock);
	if (e) return 0;
	errno = EAGAIN;
	return -1;
}

void ibv_ack_cq_events(struct vb_cq *cq, unsigned n) { (void)cq, (void)n; }

void complete(struct cq *q, struct qp *qp, struct vb_wc wc, uint64_t *freed, uint32_t slots) {
	if (q->count == (uint32_t)q->v.cqe) {
		// What no longer fits is lost, and the queue is declared broken.
		if (!q->overrun) {
			q->overrun = true;
			raise_cq_event(&q->v, VB_EVENT_CQ_ERR);
		}
		return;
	}
	wc.qp_num = qp->v.qp_num;
	q->ring[(q->head + q->count) & (q->v.cqe - 1)] = (struct cqe){wc, qp, freed, slots};
	__atomic_store_n(&q->count, q->count + 1, __ATOMIC_RELEASE);
	if (!q->armed || !q->v.channel) return;
	q->armed = false;
	struct channel *ch = (struct channel *)q->v.channel;
	struct cq_event *e = calloc(1, sizeof *e);
	e->cq = q;
	*ch->last = e;
	ch->last = &e->next;
	eventfd_write(ch->v.fd, 1);
}

int poll_cq(struct vb_cq *v, int n, struct vb_wc *out) {
	struct cq *q = (struct cq *)v;
	int rc = fault("ibv_poll_cq");
	if (rc) return -rc;
	if (!__atomic_load_n(&q->count, __ATOMIC_ACQUIRE)) return 0;
	pthread_mutex_lock(&lock);
	int k = 0;
	for (; k < n && q->count; k++) {
		struct cqe *e = &q->ring[q->head];
		q->head = (q->head + 1) & (q->v.cqe - 1);
		__atomic_store_n(&q->count, q->count - 1, __ATOMIC_RELEASE);
		out[k] = e->wc;
		*e->freed += e->slots;
	}
	pthread_mutex_unlock(&lock);
	return k;
}

// forget_completions takes those of a queue pair out, as providers do when it
// is destroyed.
void forget_completions(struct cq *q, struct qp *qp) {
	uint32_t kept = 0;
	for (uint32_t i = 0; i < q->count; i++) {
		struct cqe *e = &q->ring[(q->head + i) & (q->v.cqe - 1)];
		if (e->qp != qp) q->ring[(q->head + kept++) & (q->v.cqe - 1)] = *e;
	}
	__atomic_store_n(&q->count, kept, __ATOMIC_RELEASE);
}

int req_notify_cq(struct vb_cq *v, int solicited_only) {
	(void)solicited_only;
	int rc = enter("ibv_req_notify_cq", v->context);
	if (rc) return rc;
	((struct cq *)v)->armed = true;
	pthread_mutex_unlock(&lock);
	return 0;
}
