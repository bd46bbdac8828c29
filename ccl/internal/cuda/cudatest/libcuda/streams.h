// Part of fake.c: streams, launches and events.

// ---- streams: a thread each, that runs operations in order ----

typedef struct op {
	enum { COPY, SET8, SET32, WRITE, WRITE64, WAIT, KERNEL, RECORD, AWAIT } kind;
	ptr dst, src;
	size_t n;
	unsigned value;
	uint64_t wide;
	struct event *event;
	uint64_t turn;
	func *f;
	struct fake_launch launch;
	char params[4096];
	size_t size;
	struct op *next;
} op;
typedef struct graph { op *first, **last; int ended; } graph;
typedef struct event { pthread_mutex_t mu; pthread_cond_t cv; uint64_t recorded, happened; struct timespec at; graph *capture; int timing; } event;
typedef struct queue {
	pthread_mutex_t mu;
	pthread_cond_t cv;
	op *first, **last;
	int dead;
	ctx *c;
	graph *capture;
	pthread_t thread;
	struct queue *sibling;
} queue;
static queue *queues;

static void perform(op *o) {
	switch (o->kind) {
	case COPY: memmove((void *)o->dst, (void *)o->src, o->n); break;
	case SET8: memset((void *)o->dst, o->value, o->n); break;
	case SET32: for (size_t i = 0; i < o->n; i++) ((uint32_t *)o->dst)[i] = o->value; break;
	case WRITE: __atomic_store_n((uint32_t *)o->dst, o->value, __ATOMIC_SEQ_CST); break;
	case WRITE64: __atomic_store_n((uint64_t *)o->dst, o->wide, __ATOMIC_SEQ_CST); break;
	case WAIT: while ((int32_t)(__atomic_load_n((uint32_t *)o->dst, __ATOMIC_SEQ_CST) - o->value) < 0) usleep(20); break;
	case KERNEL: if (o->f->run) { int rc = o->f->run(&o->launch, o->params, o->size); if (rc) __atomic_store_n(&lost, rc, __ATOMIC_SEQ_CST); } break;
	case RECORD:
		pthread_mutex_lock(&o->event->mu);
		if (o->turn > o->event->happened) o->event->happened = o->turn;
		clock_gettime(CLOCK_MONOTONIC, &o->event->at);
		pthread_cond_broadcast(&o->event->cv);
		pthread_mutex_unlock(&o->event->mu);
		break;
	case AWAIT:
		pthread_mutex_lock(&o->event->mu);
		while (o->event->happened < o->turn) pthread_cond_wait(&o->event->cv, &o->event->mu);
		pthread_mutex_unlock(&o->event->mu);
	}
}

static void *serve(void *p) {
	queue *q = p;
	pthread_mutex_lock(&q->mu);
	for (;;) {
		while (!q->first && !q->dead) pthread_cond_wait(&q->cv, &q->mu);
		op *o = q->first;
		if (!o) break;
		pthread_mutex_unlock(&q->mu);
		perform(o);
		pthread_mutex_lock(&q->mu);
		q->first = o->next;
		if (!q->first) q->last = &q->first;
		free(o);
		pthread_cond_broadcast(&q->cv);
	}
	pthread_mutex_unlock(&q->mu);
	pthread_mutex_lock(&mu);
	queue **e = &queues;
	while (*e != q) e = &(*e)->sibling;
	*e = q->sibling;
	pthread_mutex_unlock(&mu);
	free(q);
	return 0;
}

// drain waits until nothing that was enqueued on a context's streams is left.
static void drain(ctx *c) {
	for (int left = 1; left; left ? usleep(20) : 0) {
		left = 0;
		pthread_mutex_lock(&mu);
		for (queue *q = queues; q; q = q->sibling) {
			pthread_mutex_lock(&q->mu);
			left |= q->c == c && q->first;
			pthread_mutex_unlock(&q->mu);
		}
		pthread_mutex_unlock(&mu);
	}
}

static queue *new_queue(ctx *c) { // under mu
	queue *q = calloc(1, sizeof *q);
	pthread_mutex_init(&q->mu, 0), pthread_cond_init(&q->cv, 0);
	q->last = &q->first, q->c = c, q->sibling = queues, queues = q;
	pthread_create(&q->thread, 0, serve, q);
	pthread_detach(q->thread);
	return q;
}

// The stream that a handle means in the current context.
static queue *stream(queue *q) {
	if (q) return q->c == current ? q : 0;
	pthread_mutex_lock(&mu);
	if (!current->legacy) current->legacy = new_queue(current);
	pthread_mutex_unlock(&mu);
	return current->legacy;
}

static void append(queue *q, op o) {
	op *e = malloc(sizeof *e);
	*e = o, e->next = 0;
	if (q->capture) {
		*q->capture->last = e, q->capture->last = &e->next;
		return;
	}
	pthread_mutex_lock(&q->mu);
	*q->last = e, q->last = &e->next;
	pthread_cond_broadcast(&q->cv);
	pthread_mutex_unlock(&q->mu);
}
#define STREAM(s) CONTEXT; if (__atomic_load_n(&lost, __ATOMIC_SEQ_CST)) return lost; queue *q = stream(s); if (!q) return INVALID_HANDLE; \
	if (q->capture && q->capture->ended) q->capture = 0

API CUresult cuStreamCreateWithPriority(queue **s, unsigned flags, int priority) {
	CONTEXT;
	(void)priority;
	if (flags > 1) return INVALID_VALUE;
	pthread_mutex_lock(&mu);
	*s = new_queue(current);
	pthread_mutex_unlock(&mu);
	return 0;
}
API CUresult cuStreamDestroy_v2(queue *s) {
	CONTEXT;
	if (!s || s->c != current) return INVALID_HANDLE;
	pthread_mutex_lock(&s->mu);
	s->dead = 1;
	pthread_cond_broadcast(&s->cv);
	pthread_mutex_unlock(&s->mu);
	return 0;
}
API CUresult cuStreamQuery(queue *s) {
	STREAM(s);
	if (q->capture) return CAPTURE_UNSUPPORTED;
	pthread_mutex_lock(&q->mu);
	CUresult rc = q->first ? NOT_READY : 0;
	pthread_mutex_unlock(&q->mu);
	return rc ? rc : lost;
}
API CUresult cuStreamSynchronize(queue *s) {
	STREAM(s);
	if (q->capture) return CAPTURE_UNSUPPORTED;
	pthread_mutex_lock(&q->mu);
	while (q->first) pthread_cond_wait(&q->cv, &q->mu);
	pthread_mutex_unlock(&q->mu);
	return lost;
}
API CUresult cuCtxSynchronize(void) { CONTEXT; drain(current); return lost; }
API CUresult cuMemcpyAsync(ptr dst, ptr src, size_t n, queue *s) {
	STREAM(s);
	if (!touchable(dst, n) || !touchable(src, n)) return INVALID_VALUE;
	append(q, (op){.kind = COPY, .dst = dst, .src = src, .n = n});
	return 0;
}
// Pageable memory: staged at once on the way in, waited for on the way out.
API CUresult cuMemcpyHtoDAsync_v2(ptr dst, const void *src, size_t n, queue *s) {
	STREAM(s);
	if (!touchable(dst, n)) return INVALID_VALUE;
	if (q->capture) return CAPTURE_UNSUPPORTED;
	append(q, (op){.kind = COPY, .dst = dst, .src = (ptr)src, .n = n});
	return touchable((ptr)src, n) ? 0 : cuStreamSynchronize(s);
}
API CUresult cuMemcpyDtoHAsync_v2(void *dst, ptr src, size_t n, queue *s) {
	STREAM(s);
	if (!touchable(src, n)) return INVALID_VALUE;
	if (q->capture) return CAPTURE_UNSUPPORTED;
	append(q, (op){.kind = COPY, .dst = (ptr)dst, .src = src, .n = n});
	return touchable((ptr)dst, n) ? 0 : cuStreamSynchronize(s);
}
API CUresult cuMemsetD8Async(ptr p, unsigned char v, size_t n, queue *s) {
	STREAM(s);
	if (!touchable(p, n)) return INVALID_VALUE;
	append(q, (op){.kind = SET8, .dst = p, .value = v, .n = n});
	return 0;
}
API CUresult cuMemsetD32Async(ptr p, unsigned v, size_t n, queue *s) {
	STREAM(s);
	if (p % 4 || !touchable(p, 4 * n)) return INVALID_VALUE;
	append(q, (op){.kind = SET32, .dst = p, .value = v, .n = n});
	return 0;
}
API CUresult cuStreamWriteValue32_v2(queue *s, ptr p, uint32_t v, unsigned flags) {
	STREAM(s);
	if (p % 4 || flags > 1 || !touchable(p, 4)) return INVALID_VALUE;
	append(q, (op){.kind = WRITE, .dst = p, .value = v});
	return 0;
}
API CUresult cuStreamWaitValue32_v2(queue *s, ptr p, uint32_t v, unsigned flags) {
	STREAM(s);
	if (p % 4 || flags || !touchable(p, 4)) return INVALID_VALUE;
	append(q, (op){.kind = WAIT, .dst = p, .value = v});
	return 0;
}
static CUresult write64(queue *s, ptr p, uint64_t v) {
	STREAM(s);
	if (p % 8 || !touchable(p, 8)) return INVALID_VALUE;
	append(q, (op){.kind = WRITE64, .dst = p, .wide = v});
	return 0;
}
struct memop { int op; ptr at; union { uint32_t v; uint64_t v64; }; unsigned flags; ptr alias; uint64_t pad; };
_Static_assert(sizeof(struct memop) == 48, "CUstreamBatchMemOpParams");
API CUresult cuStreamBatchMemOp_v2(queue *s, unsigned n, const struct memop *ops, unsigned flags) {
	CONTEXT;
	if (n > 256 || flags) return INVALID_VALUE;
	for (unsigned i = 0; i < n; i++) {
		CUresult rc = ops[i].op == 1 ? cuStreamWaitValue32_v2(s, ops[i].at, ops[i].v, ops[i].flags)
		            : ops[i].op == 2 ? cuStreamWriteValue32_v2(s, ops[i].at, ops[i].v, ops[i].flags)
		            : ops[i].op == 5 ? write64(s, ops[i].at, ops[i].v64) : INVALID_VALUE;
		if (rc) return rc;
	}
	return 0;
}
API CUresult cuLaunchKernel(func *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, queue *s, void **params, void **extra) {
	STREAM(s);
	if (!gx || !bx || bx * by * bz > 1024 || gy != 1 || gz != 1 || params || (shared > 48 << 10 && (int)shared > f->shared)) return INVALID_VALUE;
	op o = {.kind = KERNEL, .f = f, .launch = {gx, bx, shared, current->dev}};
	if (!extra || extra[0] != (void *)1 || extra[2] != (void *)2 || extra[4]) return INVALID_VALUE;
	o.size = *(size_t *)extra[3];
	if (o.size > sizeof o.params) return INVALID_VALUE;
	memcpy(o.params, extra[1], o.size);
	append(q, o);
	return 0;
}

// ---- events ----

API CUresult cuEventCreate(event **e, unsigned flags) {
	CONTEXT;
	*e = calloc(1, sizeof **e);
	pthread_mutex_init(&(*e)->mu, 0), pthread_cond_init(&(*e)->cv, 0);
	(*e)->timing = !(flags & 2);
	return 0;
}
API CUresult cuEventDestroy_v2(event *e) { CONTEXT; return e ? 0 : INVALID_HANDLE; } // kept: an operation may still refer to it
API CUresult cuEventRecord(event *e, queue *s) {
	STREAM(s);
	if (!e) return INVALID_HANDLE;
	pthread_mutex_lock(&e->mu);
	uint64_t turn = q->capture ? 0 : ++e->recorded;
	e->capture = q->capture;
	pthread_mutex_unlock(&e->mu);
	append(q, (op){.kind = RECORD, .event = e, .turn = turn});
	return 0;
}
// Waiting for an event of a capture draws the stream into it. Operations of a
// graph run in the order of their capture, which satisfies every dependency.
API CUresult cuStreamWaitEvent(queue *s, event *e, unsigned flags) {
	STREAM(s);
	if (!e || flags) return INVALID_VALUE;
	pthread_mutex_lock(&e->mu);
	uint64_t turn = e->recorded;
	graph *capture = e->capture && !e->capture->ended ? e->capture : 0;
	pthread_mutex_unlock(&e->mu);
	if (capture) { q->capture = capture; return 0; }
	if (q->capture) return 905; // isolation
	append(q, (op){.kind = AWAIT, .event = e, .turn = turn});
	return 0;
}
API CUresult cuEventQuery(event *e) {
	CONTEXT;
	if (!e) return INVALID_HANDLE;
	pthread_mutex_lock(&e->mu);
	CUresult rc = e->capture && !e->capture->ended ? 907 : e->happened < e->recorded ? NOT_READY : 0;
	pthread_mutex_unlock(&e->mu);
	return rc ? rc : lost;
}
API CUresult cuEventSynchronize(event *e) {
	CONTEXT;
	if (!e) return INVALID_HANDLE;
	pthread_mutex_lock(&e->mu);
	while (e->happened < e->recorded) pthread_cond_wait(&e->cv, &e->mu);
	pthread_mutex_unlock(&e->mu);
	return lost;
}
API CUresult cuEventElapsedTime(float *ms, event *a, event *b) {
	CONTEXT;
	if (!a || !b || !a->timing || !b->timing || !a->recorded || !b->recorded) return INVALID_HANDLE;
	pthread_mutex_lock(&a->mu);
	struct timespec from = a->at;
	int done = a->happened == a->recorded;
	pthread_mutex_unlock(&a->mu);
	pthread_mutex_lock(&b->mu);
	struct timespec to = b->at;
	done &= b->happened == b->recorded;
	pthread_mutex_unlock(&b->mu);
	*ms = (to.tv_sec - from.tv_sec) * 1e3f + (to.tv_nsec - from.tv_nsec) / 1e6f;
	return done ? 0 : NOT_READY;
}
