/*
 * The network: proxy operations (one channel of an operation to one peer), their steps
 * (one transfer) and what the network plugin tells (one work request of a queue pair).
 *
 * Each peer of a communicator is a connection of the recorder, each queue pair another
 * one. A connection's words are written by the proxy thread of its communicator. Which
 * window of requests is slow is judged by the connection's own past.
 */
#include "plugin.h"

#include <sched.h>

#define PROBES 32
#define TURNS 1000 /* that one waits for another's new connection, which takes it a microsecond */
#define WINDOW_WRS 32
#define WINDOW_NS (5 * MS)
#define TELL_NS (1000 * MS)
#define LEARN 16       /* windows before anything is slow */
#define SLOW 4         /* times the usual latency */
#define SLOW_WINDOWS 3 /* in a row */

/* A queue pair's number is its device's own, and has 24 bits; a socket's has no device. What NCCL calls its device is an index
 * into those of its connection, 0 for each NIC that is not merged: whose peer it goes to has to tell two apart, too. (Two
 * connections to one peer over two NICs that number a queue pair alike are one here.) */
static uint64_t key_of(const struct comm *c, uint32_t gen, int qp, uint32_t id, int device)
{
	if (qp)
		id ^= (uint32_t)device << 24;
	return UINT64_C(1) << 63 | (uint64_t)(qp != 0) << 62 | (uint64_t)(gen & 0x3ffff) << 44 | (uint64_t)(c - plugin.comms) << 32 | id;
}

static int key_is_stale(uint64_t key)
{
	return (PEEK(&plugin.comms[key >> 32 & (MAX_COMMS - 1)].gen) & 0x3ffff) != (key >> 44 & 0x3ffff);
}

/* Makes an entry of the table a connection's: who holds conns_busy does. Its former key stays until all else is there, since one
 * who looks for an entry further on would stop at an entry without any. */
static struct conn *new_conn(struct conn *k, uint64_t key, struct comm *c, int32_t peer, enum lockstep_transport t, struct conn *of, uint32_t id, int device)
{
	char name[64];
	if (!of)
		snprintf(name, sizeof name, "nccl net peer %d", peer);
	else if (t == LOCKSTEP_TRANSPORT_RDMA)
		snprintf(name, sizeof name, "nccl net peer %d device %d", peer, device);
	else
		snprintf(name, sizeof name, "nccl net peer %d socket %u", peer, id);
	uint16_t comm = (uint16_t)(c - plugin.comms), channel = of ? (uint16_t)++of->parts : 0;
	struct lockstep_conn *rec = k->rec;
	uint32_t index = k->index;
	if (rec)
		lockstep_renew_conn(rec, comm, peer, t, channel, of ? id : 0, name);
	else if (!(rec = lockstep_add_conn(&plugin.w, comm, peer, t, channel, of ? id : 0, name, &index)))
		return NULL;
	memset((char *)k + sizeof k->key, 0, sizeof *k - sizeof k->key);
	k->rec = rec, k->index = index, k->comm = comm, k->peer = peer, k->of = of;
	STORE(&k->key, key);
	return k;
}

/* The entry of a key and a peer, or NULL and where there is room for it, which is NULL where there is none. */
static struct conn *probe(uint64_t key, const struct conn *of, struct conn **room)
{
	uint32_t at = (uint32_t)(key * UINT64_C(0x9E3779B97F4A7C15) >> 40);
	*room = NULL;
	for (uint32_t i = 0; i < PROBES; i++) {
		struct conn *k = &plugin.conns[(at + i) & (MAX_CONNS - 1)];
		uint64_t has = LOAD(&k->key);
		if (has == key && k->of == of)
			return k;
		if (!*room && (!has || key_is_stale(has)))
			*room = k;
		if (!has)
			break;
	}
	return NULL;
}

/* The connection of a peer (of: NULL), or of a queue pair to it (of: the peer's). Whoever reads tells connections between
 * two ranks apart by their channels: all that goes to the peer is 0, its queue pairs are numbered from 1. */
static struct conn *conn_of(struct comm *c, uint32_t gen, int32_t peer, enum lockstep_transport t, struct conn *of, uint32_t id, int device)
{
	uint64_t key = key_of(c, gen, of != NULL, of ? id : (uint32_t)peer, device);
	struct conn *room, *k = probe(key, of, &room);
	if (k)
		return k;
	if (!room) {
		ADD(&plugin.w.hdr->conn_overflow, 1);
		return NULL;
	}
	for (int i = 0; __atomic_exchange_n(&plugin.conns_busy, 1, __ATOMIC_ACQUIRE); i++) {
		if (i == TURNS) { /* who makes one has lost its core */
			ADD(&plugin.w.hdr->events_lost, 1);
			return NULL;
		}
		sched_yield();
	}
	if (!(k = probe(key, of, &room))) { /* meanwhile somebody may have made it, or taken the room */
		if (room)
			k = new_conn(room, key, c, peer, t, of, id, device);
		else
			ADD(&plugin.w.hdr->conn_overflow, 1);
	}
	STORE(&plugin.conns_busy, 0);
	return k;
}

static void tell_window(struct conn *k, enum lockstep_cause cause, int anomaly)
{
	struct window *w = &k->w;
	struct lockstep_record r = {.mono = w->last, .kind = LOCKSTEP_KIND_WINDOW, .comm = k->comm};
	r.flags = anomaly ? LOCKSTEP_FLAG_ANOMALY : 0;
	r.body.conn = (struct lockstep_body_conn){
		.peer = k->peer, .conn = (uint16_t)k->index, .code = (uint8_t)cause, .bytes = w->bytes, .wrs = (uint16_t)w->wrs,
		.back = (uint16_t)(w->back < UINT16_MAX ? w->back : UINT16_MAX), .span = lockstep_pack_span(w->first, w->last), .last = w->last,
	};
	lockstep_append(&plugin.w, &r);
	w->told_at = w->last;
}

/* Closes a window: its bandwidth and latency, and whether that is slow for this connection. */
static void close_window(struct conn *k, int64_t now)
{
	struct window *w = &k->w;
	double each = (double)w->latency / w->wrs;
	int64_t span = w->last > w->first ? w->last - w->first : 1;
	int slow = w->windows >= LEARN && each > SLOW * w->usual;
	enum lockstep_cause cause = LOCKSTEP_CAUSE_NONE;
	w->windows++;
	if (slow) {
		w->in_a_row++;
		if (w->in_a_row >= SLOW_WINDOWS) {
			cause = k->blocked_ns > span / 2 ? LOCKSTEP_CAUSE_RECEIVER_NOT_READY : LOCKSTEP_CAUSE_NETWORK;
			w->slow++;
		}
		w->usual += (each - w->usual) / 4096; /* a state that stays becomes usual, slowly */
	} else {
		w->in_a_row = 0;
		w->usual += (each - w->usual) / (w->windows < LEARN ? (double)w->windows : 64);
	}
	lockstep_conn_latency(k->rec, (int64_t)each);
	lockstep_conn_window(k->rec, (uint64_t)((double)w->bytes * 1e9 / (double)span), cause, now);
	lockstep_conn_windows(k->rec, w->windows);
	lockstep_conn_slow(k->rec, w->slow);
	if (cause || now - w->told_at >= TELL_NS)
		tell_window(k, cause, cause != LOCKSTEP_CAUSE_NONE);
	k->blocked_ns = 0;
	w->first = 0, w->bytes = w->latency = 0, w->wrs = 0, w->back = w->out;
}

static void window_post(struct conn *k, int64_t now)
{
	struct window *w = &k->w;
	if (!w->first)
		w->first = now;
	if (++w->out > w->back)
		w->back = w->out;
}

static void window_complete(struct conn *k, uint64_t bytes, int64_t posted, int64_t now)
{
	struct window *w = &k->w;
	if (w->out)
		w->out--;
	if (!w->first)
		w->first = posted;
	w->bytes += bytes, w->latency += (uint64_t)(now > posted ? now - posted : 0), w->last = now;
	if (++w->wrs >= WINDOW_WRS || now - w->first >= WINDOW_NS)
		close_window(k, now);
}

static uint64_t proxy_start(void *context, const struct nccl_event *e)
{
	uint32_t gen;
	uint64_t h;
	if (e->u.proxy_op.pid != plugin.w.hdr->pid) { /* PXN: another process's, and so are its parent and its context */
		ADD(&plugin.w.hdr->events_foreign, 1);
		return 0;
	}
	struct comm *c = comm_of_context(context, &gen);
	if (!c || e->u.proxy_op.peer < 0 || e->u.proxy_op.peer >= c->ranks)
		return 0;
	struct conn *k = conn_of(c, gen, e->u.proxy_op.peer, plugin.transport, NULL, 0, 0);
	struct slot *s = k ? take(&plugin.proxies, H_PROXY, &h) : NULL;
	if (!s)
		return 0;
	s->op = (uint64_t)(uintptr_t)e->parent, s->conn = k, s->bytes = 0, s->first = 0;
	s->is_send = e->u.proxy_op.is_send != 0;
	SET(&s->at, lockstep_now());
	SET(&s->ctx, (uint64_t)gen << 32 | (uint64_t)(c - plugin.comms));
	return h;
}

static void proxy_stop(struct slot *s, uint64_t h)
{
	int64_t wait = !s->is_send && s->first ? s->first - s->at : 0;
	uint64_t op = s->op;
	int32_t peer = s->conn->peer;
	if (give(s, h) && wait > 0)
		op_waited(op, wait, peer);
}

/* A step's context is its operation's: of PXN's no operation is kept, so there is no parent. */
static uint64_t step_start(const struct nccl_event *e)
{
	uint64_t parent = (uint64_t)(uintptr_t)e->parent, h;
	struct slot *p = handle_kind(parent) == H_PROXY ? slot_of(&plugin.proxies, parent) : NULL;
	struct slot *s = p ? take(&plugin.steps, H_STEP, &h) : NULL;
	if (!s)
		return 0;
	s->op = parent, s->conn = p->conn, s->is_send = p->is_send, s->bytes = 0;
	s->blocked = s->waiting = s->posted = 0;
	SET(&s->at, p->at);
	SET(&s->ctx, PEEK(&p->ctx));
	return h;
}

/* A connection's words are its communicator's proxy thread's; of one that is gone nothing is told. */
static struct conn *own_conn(const struct slot *s)
{
	uint64_t ctx = PEEK(&s->ctx);
	return ctx && PEEK(&plugin.comms[ctx & (MAX_COMMS - 1)].gen) == ctx >> 32 && !key_is_stale(LOAD(&s->conn->key)) ? s->conn : NULL;
}

static void unblock(struct slot *s, struct conn *k, int64_t now)
{
	if (!s->blocked)
		return;
	s->blocked = 0;
	k->blocked_ns += now - k->blocked_since;
	k->blocked_since = now;
	if (k->blocked && --k->blocked)
		lockstep_conn_tx_blocked(k->rec, now); /* others still are, but credits come */
	else
		lockstep_conn_tx_blocked(k->rec, 0);
}

static void arrived(struct slot *s, struct conn *k, uint64_t bytes, int64_t now)
{
	if (!s->waiting)
		return;
	s->waiting = 0;
	k->received += bytes;
	lockstep_conn_received(k->rec, k->received, now);
	lockstep_conn_rx_waiting(k->rec, k->waiting && --k->waiting ? now : 0);
	struct slot *p = slot_of(&plugin.proxies, s->op);
	if (p && !p->first)
		p->first = now;
}

static void step_state(struct slot *s, int state, uint64_t bytes)
{
	struct conn *k = own_conn(s);
	int64_t now;
	if (!k)
		return;
	switch (state) {
	case NCCL_STEP_SEND_PEER_WAIT: /* told again and again while it lasts */
		if (s->blocked || !s->is_send)
			return;
		now = lockstep_now();
		s->blocked = 1;
		if (!k->blocked++) {
			k->blocked_since = now;
			lockstep_conn_tx_blocked(k->rec, now);
		}
		return;
	case NCCL_STEP_SEND_WAIT:
		if (s->posted || !s->is_send)
			return;
		now = lockstep_now();
		unblock(s, k, now);
		s->posted = 1, s->bytes = bytes;
		SET(&s->at, now);
		k->posted += bytes;
		lockstep_conn_posted(k->rec, k->posted, now);
		window_post(k, now);
		return;
	case NCCL_STEP_RECV_WAIT:
		if (s->waiting || s->posted || s->is_send)
			return;
		s->waiting = s->posted = 1;
		if (!k->waiting++)
			lockstep_conn_rx_waiting(k->rec, lockstep_now());
		return;
	case NCCL_STEP_RECV_FLUSH_WAIT:
	case NCCL_STEP_RECV_GPU_WAIT:
		if (s->waiting)
			arrived(s, k, bytes, lockstep_now());
	}
}

static void step_stop(struct slot *s, uint64_t h)
{
	struct conn *k = own_conn(s);
	if (k && (s->blocked || s->waiting || (s->posted && s->is_send))) {
		int64_t now = lockstep_now();
		unblock(s, k, now);
		arrived(s, k, 0, now);
		if (s->posted && s->is_send) {
			k->completed += s->bytes;
			lockstep_conn_completed(k->rec, k->completed, now);
			window_complete(k, s->bytes, s->at, now);
		}
	}
	give(s, h);
}

static uint64_t request_start(const struct nccl_event *e)
{
	uint64_t parent = (uint64_t)(uintptr_t)e->parent, h, bytes;
	int type = (int)(e->u.net.id >> 16 & 0xffff), version = (int)(e->u.net.id & 0xffff), device = 0;
	uint32_t id;
	enum lockstep_transport t;
	struct slot *p = handle_kind(parent) == H_STEP ? slot_of(&plugin.steps, parent) : NULL;
	struct conn *peer = p && p->is_send ? own_conn(p) : NULL; /* a receive is as long as its sender is late */
	if (!peer || !e->u.net.data || version != 1)
		return 0;
	if (type == NCCL_NET_IB) {
		struct nccl_qp q;
		memcpy(&q, e->u.net.data, sizeof q);
		id = (uint32_t)q.qp.qp, device = q.qp.device, bytes = q.qp.length, t = LOCKSTEP_TRANSPORT_RDMA;
	} else if (type == NCCL_NET_SOCKET) {
		struct nccl_socket q;
		memcpy(&q, e->u.net.data, sizeof q);
		id = (uint32_t)q.sock.fd, bytes = q.sock.length, t = LOCKSTEP_TRANSPORT_TCP;
	} else {
		return 0;
	}
	uint64_t ctx = PEEK(&p->ctx);
	struct conn *k = conn_of(&plugin.comms[ctx & (MAX_COMMS - 1)], (uint32_t)(ctx >> 32), peer->peer, t, peer, id, device);
	struct slot *s = k ? take(&plugin.nets, H_NET, &h) : NULL;
	if (!s)
		return 0;
	int64_t now = lockstep_now();
	s->op = parent, s->conn = k, s->bytes = bytes;
	SET(&s->at, now);
	SET(&s->ctx, ctx);
	window_post(k, now);
	return h;
}

static void request_stop(struct slot *s, uint64_t h)
{
	struct conn *k = own_conn(s);
	if (k)
		window_complete(k, s->bytes, s->at, lockstep_now());
	give(s, h);
}

HIDDEN uint64_t net_event(void *context, const struct nccl_event *e, uint32_t type)
{
	switch (type) {
	case NCCL_PROXY_OP:
		if (!PEEK(&plugin.sampling.network))
			SET(&plugin.sampling.network, 1); /* transfers are told of in any case from now on */
		return proxy_start(context, e);
	case NCCL_PROXY_STEP:
		return step_start(e);
	case NCCL_NET_PLUGIN:
		return request_start(e);
	}
	return 0;
}

HIDDEN void net_stop(uint64_t h)
{
	struct slot *s;
	switch (handle_kind(h)) {
	case H_PROXY:
		if ((s = slot_of(&plugin.proxies, h)))
			proxy_stop(s, h);
		return;
	case H_STEP:
		if ((s = slot_of(&plugin.steps, h)))
			step_stop(s, h);
		return;
	case H_NET:
		if ((s = slot_of(&plugin.nets, h)))
			request_stop(s, h);
		return;
	default:
		return;
	}
}

HIDDEN void net_state(uint64_t h, int state, const union nccl_state_args *args)
{
	struct slot *s = handle_kind(h) == H_STEP ? slot_of(&plugin.steps, h) : NULL;
	if (s)
		step_state(s, state, args ? args->trans_size : 0);
}
