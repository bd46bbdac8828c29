// Links and timers. While nothing is wrong with a link, transmit delivers in
// the caller's thread; else messages lie in a queue until a thread, or whoever
// releases them, delivers them.
#include "fake.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

static struct link links[ALL_PORTS][ALL_PORTS];

struct link *link_between(struct port *from, struct port *to) { return &links[from->index][to->index]; }

int64_t now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static void deliver(struct message *m) {
	if (!m->from->up || !m->to->up || m->from->dev->removed || m->to->dev->removed) return;
	struct qp *q = find_qp(m->to, m->to_qp);
	if (!q) return;
	if (m->kind != DATA) {
		if (m->from == q->peer && m->from_qp == q->peer_qp) answer(q, m);
		return;
	}
	struct message reply = {.from = m->to, .to = m->from, .from_qp = m->to_qp, .to_qp = m->from_qp};
	if (!respond(q, m, &reply.kind)) return;
	// An acknowledgement names the last packet, a refusal the first.
	reply.psn = (reply.kind == ACK ? m->psn + m->packets - 1 : m->psn) & 0xffffff;
	transmit(link_between(m->to, m->from), &reply);
}

static void enqueue(struct link *l, struct message *m) {
	struct flight *f = malloc(sizeof *f + m->len);
	*f = (struct flight){.m = *m, .due = now() + l->delay};
	if (m->len) memcpy(f->data, m->data, m->len);
	f->m.data = f->data;
	if (!l->first) l->last = &l->first;
	*l->last = f;
	l->last = &f->next;
	l->in_flight++;
	if (!l->frozen) set_timer(f->due);
}

// Source ports whose way through the network is dead.
static bool dead[1 << 16];
static int ndead;

// strays says whether a message is lost on the way that its sender's source port takes. Linux
// makes the port of the label; without one it is of no test.
static bool strays(struct message *m) {
	if (!ndead) return false;
	struct qp *q = find_qp(m->from, m->from_qp);
	return q && q->flow_label && dead[0xc000 | ((q->flow_label & 0x3fff) ^ (q->flow_label >> 14))];
}

void transmit(struct link *l, struct message *m) {
	if (!m->from->up || m->from->dev->removed || strays(m)) return;
	if (l->drop || (m->kind != DATA && l->lose_acks)) return;
	if (m->kind == DATA) {
		if (l->drop_next && l->drop_next--) return;
		m->torn = l->tear_next && l->tear_next--;
	}
	if (l->frozen || l->delay || l->first) enqueue(l, m);
	else deliver(m);
}

// take removes the oldest in flight, to be freed.
static struct flight *take(struct link *l) {
	struct flight *f = l->first;
	l->first = f->next;
	l->in_flight--;
	return f;
}

// release_link delivers what is due before a time. Answers and retransmissions
// may add to the queue meanwhile.
static void release_link(struct link *l, int64_t before) {
	while (l->first && !l->frozen && l->first->due <= before) {
		struct flight *f = take(l);
		deliver(&f->m);
		free(f);
	}
}

static void forget_link(struct link *l) {
	while (l->first) free(take(l));
}

// Timers: one thread, which sleeps unless a message is delayed or a sender
// waits for an acknowledgement.

static pthread_cond_t timer_set;
static int64_t earliest; // 0: none
static bool started;

static struct qp *next_expired(int64_t t, int64_t *later) {
	for (int d = 0; d < ndevices; d++)
		for (uint32_t i = 0; i < devices[d]->nqps; i++) {
			struct qp *q = devices[d]->qps[i];
			if (!q || !q->deadline) continue;
			if (q->deadline <= t) return q;
			if (!*later || q->deadline < *later) *later = q->deadline;
		}
	return NULL;
}

static int total_ports(void) { return ndevices * MAX_PORTS; }

static void run_timers(int64_t t) {
	int64_t later = 0;
	for (int i = 0; i < total_ports(); i++)
		for (int j = 0; j < total_ports(); j++) release_link(&links[i][j], t);
	for (struct qp *q; (q = next_expired(t, &later)); later = 0) timer_expired(q);
	for (int i = 0; i < total_ports(); i++)
		for (int j = 0; j < total_ports(); j++) {
			struct link *l = &links[i][j];
			if (l->first && !l->frozen && (!later || l->first->due < later)) later = l->first->due;
		}
	earliest = later;
}

static void *timer_thread(void *unused) {
	pthread_mutex_lock(&lock);
	for (;;) {
		int64_t t = now();
		if (earliest && earliest <= t) {
			run_timers(t);
		} else if (earliest) {
			struct timespec until = {earliest / 1000000000, earliest % 1000000000};
			pthread_cond_timedwait(&timer_set, &lock, &until);
		} else {
			pthread_cond_wait(&timer_set, &lock);
		}
	}
	return unused;
}

void set_timer(int64_t deadline) {
	if (earliest && earliest <= deadline) return;
	earliest = deadline;
	if (!started) {
		started = true;
		pthread_condattr_t a;
		pthread_condattr_init(&a);
		pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
		pthread_cond_init(&timer_set, &a);
		pthread_t t;
		pthread_create(&t, NULL, timer_thread, NULL);
		pthread_detach(t);
	}
	pthread_cond_signal(&timer_set);
}

// What tests do to a link or to time

static struct link *at(int from, int to) { return &links[from][to]; }

// fake_drop_from loses what leaves from a source port.
void fake_drop_from(int port, int on) {
	pthread_mutex_lock(&lock);
	ndead += (on != 0) - dead[port & 0xffff];
	dead[port & 0xffff] = on;
	pthread_mutex_unlock(&lock);
}

void fake_drop(int from, int to, int on, int messages) {
	pthread_mutex_lock(&lock);
	at(from, to)->drop = on;
	at(from, to)->drop_next = messages;
	pthread_mutex_unlock(&lock);
}

void fake_tear(int from, int to, int messages) {
	pthread_mutex_lock(&lock);
	at(from, to)->tear_next = messages;
	pthread_mutex_unlock(&lock);
}

void fake_lose_acks(int from, int to, int on) {
	pthread_mutex_lock(&lock);
	at(from, to)->lose_acks = on;
	pthread_mutex_unlock(&lock);
}

void fake_delay(int from, int to, int64_t ns) {
	pthread_mutex_lock(&lock);
	at(from, to)->delay = ns;
	pthread_mutex_unlock(&lock);
}

void fake_freeze(int from, int to) {
	pthread_mutex_lock(&lock);
	at(from, to)->frozen = true;
	pthread_mutex_unlock(&lock);
}

// fake_release ends a freeze; what lies there is delivered now, or forgotten.
int fake_release(int from, int to, int deliver_them) {
	pthread_mutex_lock(&lock);
	struct link *l = at(from, to);
	int n = l->in_flight;
	l->frozen = false;
	if (deliver_them) release_link(l, INT64_MAX);
	else forget_link(l);
	pthread_mutex_unlock(&lock);
	return n;
}

int fake_in_flight(int from, int to) {
	pthread_mutex_lock(&lock);
	int n = at(from, to)->in_flight;
	pthread_mutex_unlock(&lock);
	return n;
}

// fake_expire lets the retries of all senders that wait run out now.
int fake_expire(void) {
	pthread_mutex_lock(&lock);
	int n = 0;
	for (int d = 0; d < ndevices; d++)
		for (uint32_t i = 0; i < devices[d]->nqps; i++) {
			struct qp *q = devices[d]->qps[i];
			if (!q || !q->deadline || q->rnr_wait) continue;
			q->retries = q->retry_cnt;
			timer_expired(q);
			n++;
		}
	pthread_mutex_unlock(&lock);
	return n;
}

void clear_network(void) {
	memset(dead, 0, sizeof dead), ndead = 0;
	for (int i = 0; i < ALL_PORTS; i++)
		for (int j = 0; j < ALL_PORTS; j++) {
			forget_link(&links[i][j]);
			links[i][j] = (struct link){0};
		}
}
