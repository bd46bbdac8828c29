// Reliable-connected queue pairs: states, posting, the requester and the
// responder. A message is as many packets as the path's MTU makes of it, but
// travels as one.
#include "fake.h"

#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const int64_t rnr_time = 640000; // ns: code 12, for all codes

struct vb_qp *ibv_create_qp(struct vb_pd *pd, struct vb_qp_init_attr *a) {
	if (enter("ibv_create_qp", pd->context)) return NULL;
	struct device *d = device_of(pd->context);
	bool bad = a->qp_type != VB_QPT_RC || !a->send_cq || !a->recv_cq || !a->cap.max_send_wr || a->cap.max_send_wr > 1 << 15 ||
		a->cap.max_recv_wr > 1 << 15 || a->cap.max_inline_data > d->max_inline;
	if (leave(bad ? EINVAL : 0)) return NULL;
	struct qp *q = calloc(1, sizeof *q);
	q->dev = d;
	for (q->sq_size = 1; q->sq_size < a->cap.max_send_wr;) q->sq_size *= 2;
	for (q->rq_size = 1; q->rq_size < a->cap.max_recv_wr;) q->rq_size *= 2;
	q->max_inline = a->cap.max_inline_data;
	q->sq = calloc(q->sq_size, sizeof *q->sq);
	q->rq = calloc(q->rq_size, sizeof *q->rq);
	q->inlined = malloc((size_t)q->sq_size * q->max_inline + 1);
	a->cap.max_send_wr = q->sq_size, a->cap.max_recv_wr = q->rq_size;
	d->qps = realloc(d->qps, (d->nqps + 1) * sizeof *d->qps);
	q->v = (struct vb_qp){.context = pd->context, .qp_context = a->qp_context, .pd = pd, .send_cq = a->send_cq, .recv_cq = a->recv_cq,
		.qp_num = FIRST_QP + d->nqps, .qp_type = VB_QPT_RC};
	d->qps[d->nqps++] = q;
	((struct pd *)pd)->users++;
	((struct cq *)a->send_cq)->users++;
	((struct cq *)a->recv_cq)->users++;
	pthread_mutex_unlock(&lock);
	return &q->v;
}

static void clear(struct qp *q) {
	forget_completions((struct cq *)q->v.send_cq, q);
	forget_completions((struct cq *)q->v.recv_cq, q);
	q->posted = q->sent = q->acked = q->reported = q->freed = q->rq_posted = q->rq_used = q->rq_freed = 0;
	q->deadline = 0;
	q->rnr_wait = false;
}

int ibv_destroy_qp(struct vb_qp *v) {
	struct qp *q = (struct qp *)v;
	int rc = enter("ibv_destroy_qp", NULL);
	if (rc) return rc;
	clear(q);
	forget_events(context_of(v->context), v);
	q->dev->qps[v->qp_num - FIRST_QP] = NULL;
	((struct pd *)v->pd)->users--;
	((struct cq *)v->send_cq)->users--;
	((struct cq *)v->recv_cq)->users--;
	free(q->sq), free(q->rq), free(q->inlined), free(q);
	pthread_mutex_unlock(&lock);
	return 0;
}

// find_qp is NULL for a number that nobody has at the port.
struct qp *find_qp(struct port *p, uint32_t num) {
	uint32_t i = num - FIRST_QP;
	struct qp *q = i < p->dev->nqps ? p->dev->qps[i] : NULL;
	return q && q->port == p ? q : NULL;
}

// peer_port is the port of the rail that has the address.
static struct port *peer_port(struct port *from, struct vb_ah_attr *a) {
	for (int d = 0; d < ndevices; d++)
		for (int p = 0; p < devices[d]->nports; p++) {
			struct port *to = &devices[d]->ports[p];
			if (to->rail != from->rail || to->link_layer != from->link_layer) continue;
			if (from->link_layer == VB_LINK_LAYER_INFINIBAND && a->dlid == to->lid) return to;
			for (int i = 0; a->is_global && i < MAX_GIDS; i++)
				if (!memcmp(&to->gids[i].gid, &a->grh.dgid, 16)) return to;
		}
	return NULL;
}

static int connect_to(struct qp *q, struct vb_qp_attr *a) {
	struct vb_gid_entry *own = &q->port->gids[a->ah_attr.grh.sgid_index % MAX_GIDS];
	if (!a->path_mtu || a->path_mtu > q->port->mtu || a->rq_psn >> 24 || a->ah_attr.port_num != q->port->num) return EINVAL;
	if (q->port->link_layer == VB_LINK_LAYER_ETHERNET && !a->ah_attr.is_global) return EINVAL;
	if (a->ah_attr.is_global && (a->ah_attr.grh.sgid_index >= MAX_GIDS || (!own->gid.align[0] && !own->gid.align[1]))) return EINVAL;
	if (a->ah_attr.is_global && a->ah_attr.grh.flow_label >> 20) return EINVAL;
	if (!(q->peer = peer_port(q->port, &a->ah_attr))) return ETIMEDOUT; // as when nobody answers for the address
	q->out = link_between(q->port, q->peer);
	q->mtu = 128 << a->path_mtu;
	q->peer_qp = a->dest_qp_num;
	q->expected = a->rq_psn;
	q->flow_label = a->ah_attr.is_global ? a->ah_attr.grh.flow_label : 0;
	return 0;
}

static int modify(struct qp *q, struct vb_qp_attr *a, int mask) {
	static const int need[] = {
		[VB_QPS_INIT] = VB_QP_PKEY_INDEX | VB_QP_PORT | VB_QP_ACCESS_FLAGS,
		[VB_QPS_RTR] = VB_QP_AV | VB_QP_PATH_MTU | VB_QP_DEST_QPN | VB_QP_RQ_PSN | VB_QP_MAX_DEST_RD_ATOMIC | VB_QP_MIN_RNR_TIMER,
		[VB_QPS_RTS] = VB_QP_TIMEOUT | VB_QP_RETRY_CNT | VB_QP_RNR_RETRY | VB_QP_SQ_PSN | VB_QP_MAX_QP_RD_ATOMIC,
		[VB_QPS_ERR] = 0,
	};
	if (!(mask & VB_QP_STATE) || a->qp_state >= sizeof need / sizeof *need) return EINVAL;
	if (mask != (need[a->qp_state] | VB_QP_STATE)) return EINVAL;
	uint32_t from = q->v.state;
	switch (a->qp_state) {
	case VB_QPS_RESET:
		clear(q);
		break;
	case VB_QPS_INIT:
		if (from != VB_QPS_RESET || a->port_num < 1 || a->port_num > q->dev->nports) return EINVAL;
		q->port = &q->dev->ports[a->port_num - 1];
		q->access = a->qp_access_flags;
		break;
	case VB_QPS_RTR: {
		int rc = from == VB_QPS_INIT ? connect_to(q, a) : EINVAL;
		if (rc) return rc;
		break;
	}
	case VB_QPS_RTS:
		if (from != VB_QPS_RTR || a->timeout > 31 || a->retry_cnt > 7 || a->rnr_retry > 7 || a->sq_psn >> 24) return EINVAL;
		q->timeout = a->timeout, q->retry_cnt = a->retry_cnt, q->rnr_retry = a->rnr_retry, q->psn = a->sq_psn;
		q->retries = q->rnrs = 0;
		break;
	case VB_QPS_ERR:
		to_error(q, VB_WC_WR_FLUSH_ERR);
		break;
	default:
		return EINVAL;
	}
	q->v.state = a->qp_state;
	return 0;
}

int ibv_modify_qp(struct vb_qp *v, struct vb_qp_attr *a, int mask) {
	int rc = enter("ibv_modify_qp", v->context);
	if (rc) return rc;
	rc = modify((struct qp *)v, a, mask);
	pthread_mutex_unlock(&lock);
	return rc;
}

int ibv_query_qp(struct vb_qp *v, struct vb_qp_attr *a, int mask, struct vb_qp_init_attr *i) {
	(void)mask, (void)i;
	int rc = enter("ibv_query_qp", v->context);
	if (rc) return rc;
	a->qp_state = v->state;
	pthread_mutex_unlock(&lock);
	return 0;
}

// A completion that failed has nothing but its ID, status and queue pair.
static struct vb_wc failed(uint64_t id, uint32_t status) {
	return (struct vb_wc){.wr_id = id, .status = status, .opcode = 0xbad, .byte_len = 0xbad, .vendor_err = status == VB_WC_WR_FLUSH_ERR ? 249 : 129};
}

static void sent(struct qp *q, uint64_t i, struct vb_wc wc) {
	complete((struct cq *)q->v.send_cq, q, wc, &q->freed, i + 1 - q->reported);
	q->reported = i + 1;
}

static struct wqe *slot(struct qp *q, uint64_t i) { return &q->sq[i & (q->sq_size - 1)]; }

// to_error completes what is outstanding; status is the oldest request's.
void to_error(struct qp *q, uint32_t status) {
	if (q->v.state == VB_QPS_ERR) return;
	q->v.state = VB_QPS_ERR;
	q->deadline = 0;
	for (; q->acked < q->posted; q->acked++, status = VB_WC_WR_FLUSH_ERR) sent(q, q->acked, failed(slot(q, q->acked)->wr.wr_id, status));
	q->sent = q->posted;
	for (; q->rq_used < q->rq_posted; q->rq_used++)
		complete((struct cq *)q->v.recv_cq, q, failed(q->rq[q->rq_used & (q->rq_size - 1)], VB_WC_WR_FLUSH_ERR), &q->rq_freed, 1);
}

static void start_timer(struct qp *q) {
	if (!q->timeout) return; // for ever
	q->deadline = now() + retry_time / (q->retry_cnt + 1);
	set_timer(q->deadline);
}

// send_next sends what has not been sent.
static void send_next(struct qp *q) {
	while (q->v.state == VB_QPS_RTS && !q->rnr_wait && q->sent < q->posted) {
		struct wqe *w = slot(q, q->sent);
		struct mr *m = NULL;
		const char *data = (const char *)w->sge.addr;
		uint32_t error = q->port->fail_status;
		if (!error && w->sge.length && !(w->wr.send_flags & VB_SEND_INLINE)) {
			m = find_mr(q->dev, q->v.pd, w->sge.lkey, w->sge.addr, w->sge.length, 0);
			if (m) data = m->host + (w->sge.addr - m->first);
			else error = VB_WC_LOC_PROT_ERR;
		}
		if (error) {
			// Completions are in order: what was sent before comes first.
			if (q->acked == q->sent) to_error(q, error);
			return;
		}
		bool imm = w->wr.opcode == VB_WR_RDMA_WRITE_WITH_IMM;
		struct message msg = {
			.kind = DATA, .from = q->port, .to = q->peer, .from_qp = q->v.qp_num, .to_qp = q->peer_qp, .psn = w->psn, .packets = w->packets,
			.addr = w->wr.rdma.remote_addr, .rkey = w->wr.rdma.rkey, .len = w->sge.length, .imm = w->wr.imm_data, .with_imm = imm, .data = data,
		};
		q->sent++; // before: the answer may be here when transmit returns
		transmit(q->out, &msg);
	}
}

static void pump(struct qp *q) {
	if (q->pumping) return; // an acknowledgement came while sending: the loop goes on
	q->pumping = true;
	send_next(q);
	q->pumping = false;
	if (q->v.state == VB_QPS_RTS && q->acked < q->sent && !q->deadline) start_timer(q);
}

static void retire(struct qp *q) {
	struct wqe *w = slot(q, q->acked);
	if (w->wr.send_flags & VB_SEND_SIGNALED)
		sent(q, q->acked, (struct vb_wc){.wr_id = w->wr.wr_id, .opcode = VB_WC_RDMA_WRITE, .byte_len = w->sge.length});
	q->acked++;
}

// acknowledged completes all up to the packet psn.
static void acknowledged(struct qp *q, uint32_t psn) {
	uint64_t before = q->acked;
	while (q->acked < q->sent) {
		struct wqe *w = slot(q, q->acked);
		if (psn_diff(psn, w->psn + w->packets - 1) < 0) break;
		retire(q);
	}
	if (q->acked == before) return;
	q->retries = q->rnrs = 0;
	q->deadline = 0;
	if (q->acked < q->sent) start_timer(q);
	if (q->sent < q->posted) pump(q);
}

void timer_expired(struct qp *q) {
	q->deadline = 0;
	if (q->v.state != VB_QPS_RTS || q->acked == q->posted || context_of(q->v.context)->dead) return;
	if (q->rnr_wait) {
		q->rnr_wait = false;
		if (q->rnr_retry != 7 && ++q->rnrs > q->rnr_retry) to_error(q, VB_WC_RNR_RETRY_EXC_ERR);
	} else if (++q->retries > q->retry_cnt) {
		to_error(q, VB_WC_RETRY_EXC_ERR);
	}
	q->sent = q->v.state == VB_QPS_RTS ? q->acked : q->sent;
	pump(q);
}

// answer takes what the responder says about the packet psn.
void answer(struct qp *q, struct message *m) {
	if (q->v.state != VB_QPS_RTS) return;
	if (m->kind == ACK) {
		acknowledged(q, m->psn);
		return;
	}
	// A NAK acknowledges what was before.
	acknowledged(q, m->psn - 1);
	if (q->acked == q->sent || slot(q, q->acked)->psn != m->psn) return; // of an earlier transmission
	if (m->kind == NAK_ACCESS) {
		to_error(q, VB_WC_REM_ACCESS_ERR);
		return;
	}
	q->rnr_wait = true;
	q->sent = q->acked;
	q->deadline = now() + rnr_time;
	set_timer(q->deadline);
}

// Words that a reader polls may not be torn, as they are not by PCIe.
static void copy(char *to, const char *from, uint32_t n) {
	if (n <= 256 && !(((uintptr_t)to | n) & 7)) {
		for (; n; n -= 8, to += 8, from += 8) {
			uint64_t w;
			memcpy(&w, from, 8);
			__atomic_store_n((uint64_t *)to, w, __ATOMIC_RELEASE);
		}
		return;
	}
	memcpy(to, from, n);
}

// respond does a message's write, and tells what to answer; false: nothing.
bool respond(struct qp *q, struct message *m, enum message_kind *kind) {
	if (q->v.state != VB_QPS_RTR && q->v.state != VB_QPS_RTS) return false;
	if (m->from != q->peer || m->from_qp != q->peer_qp) return false;
	int32_t ahead = psn_diff(m->psn, q->expected);
	*kind = ACK;
	if (ahead > 0) return false; // something is missing before it: the sender's timer will tell
	if (ahead < 0) return true;  // once more, unasked for: acknowledged, not done
	struct mr *r = NULL;
	if (m->len) {
		r = q->access & VB_ACCESS_REMOTE_WRITE ? find_mr(q->dev, q->v.pd, m->rkey, m->addr, m->len, VB_ACCESS_REMOTE_WRITE) : NULL;
		if (!r) {
			*kind = NAK_ACCESS;
			raise_qp_event(&q->v, VB_EVENT_QP_ACCESS_ERR);
			to_error(q, VB_WC_WR_FLUSH_ERR);
			return true;
		}
	}
	if (m->with_imm && q->rq_used == q->rq_posted) {
		*kind = NAK_RNR;
		return true;
	}
	if (r) copy(r->host + (m->addr - r->first), m->data, m->torn ? m->len - (m->len + 1) / 2 : m->len);
	if (m->torn) return false; // the last packet was lost
	q->expected = (m->psn + m->packets) & 0xffffff;
	if (!m->with_imm) return true;
	uint64_t id = q->rq[q->rq_used++ & (q->rq_size - 1)];
	complete((struct cq *)q->v.recv_cq, q, (struct vb_wc){.wr_id = id, .opcode = VB_WC_RECV_RDMA_WITH_IMM, .byte_len = m->len,
		.imm_data = m->imm, .src_qp = m->from_qp, .wc_flags = VB_WC_WITH_IMM}, &q->rq_freed, 1);
	return true;
}

int post_send(struct vb_qp *v, struct vb_send_wr *wr, struct vb_send_wr **bad) {
	struct qp *q = (struct qp *)v;
	*bad = wr;
	int rc = enter("ibv_post_send", v->context);
	if (rc) return rc;
	for (; wr && !rc; wr = wr->next) {
		*bad = wr;
		uint32_t len = wr->num_sge == 1 ? wr->sg_list->length : 0;
		bool inlined = wr->send_flags & VB_SEND_INLINE;
		if (v->state != VB_QPS_RTS && v->state != VB_QPS_ERR) rc = EINVAL;
		else if (wr->opcode > VB_WR_RDMA_WRITE_WITH_IMM || wr->num_sge > 1) rc = EINVAL;
		else if (wr->num_sge && !len) rc = EINVAL; // some devices take it for 2 GiB
		else if (inlined && len > q->max_inline) rc = EINVAL;
		else if (q->posted - q->freed == q->sq_size) rc = ENOMEM;
		if (rc) break;
		struct wqe *w = slot(q, q->posted);
		w->wr = *wr;
		w->sge = len ? *wr->sg_list : (struct vb_sge){0};
		w->packets = len > q->mtu ? (len + q->mtu - 1) / q->mtu : 1;
		w->psn = q->psn;
		q->psn = (q->psn + w->packets) & 0xffffff;
		if (inlined && len) {
			char *at = q->inlined + (q->posted & (q->sq_size - 1)) * q->max_inline;
			memcpy(at, (void *)w->sge.addr, len);
			w->sge.addr = (uint64_t)at;
		}
		q->posted++;
		if (v->state == VB_QPS_ERR) {
			q->sent = q->acked = q->posted;
			sent(q, q->posted - 1, failed(wr->wr_id, VB_WC_WR_FLUSH_ERR));
		}
	}
	pump(q);
	pthread_mutex_unlock(&lock);
	return rc;
}

int post_recv(struct vb_qp *v, struct vb_recv_wr *wr, struct vb_recv_wr **bad) {
	struct qp *q = (struct qp *)v;
	*bad = wr;
	int rc = enter("ibv_post_recv", v->context);
	if (rc) return rc;
	for (; wr; wr = wr->next) {
		*bad = wr;
		rc = v->state == VB_QPS_RESET || wr->num_sge ? EINVAL : q->rq_posted - q->rq_freed == q->rq_size ? ENOMEM : 0;
		if (rc) break;
		q->rq[q->rq_posted++ & (q->rq_size - 1)] = wr->wr_id;
		if (v->state != VB_QPS_ERR) continue;
		q->rq_used++;
		complete((struct cq *)v->recv_cq, q, failed(wr->wr_id, VB_WC_WR_FLUSH_ERR), &q->rq_freed, 1);
	}
	pthread_mutex_unlock(&lock);
	return rc;
}
