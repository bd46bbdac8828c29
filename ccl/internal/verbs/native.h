// The calls into libibverbs. Each returns 0 or an errno, unless it says
// otherwise: the library itself answers in three ways.
#include "abi.h"

#include <dlfcn.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define VB_REQUIRED(X)                                                                    \
	X(struct vb_device **, ibv_get_device_list, (int *))                              \
	X(void, ibv_free_device_list, (struct vb_device **))                              \
	X(const char *, ibv_get_device_name, (struct vb_device *))                        \
	X(uint64_t, ibv_get_device_guid, (struct vb_device *))                            \
	X(struct vb_context *, ibv_open_device, (struct vb_device *))                     \
	X(int, ibv_close_device, (struct vb_context *))                                   \
	X(int, ibv_query_device, (struct vb_context *, struct vb_device_attr *))          \
	X(int, ibv_query_port, (struct vb_context *, uint8_t, struct vb_port_attr *))     \
	X(int, ibv_query_gid, (struct vb_context *, uint8_t, int, union vb_gid *))        \
	X(int, ibv_get_async_event, (struct vb_context *, struct vb_async_event *))       \
	X(void, ibv_ack_async_event, (struct vb_async_event *))                           \
	X(struct vb_pd *, ibv_alloc_pd, (struct vb_context *))                            \
	X(int, ibv_dealloc_pd, (struct vb_pd *))                                          \
	X(struct vb_mr *, ibv_reg_mr, (struct vb_pd *, void *, size_t, int))              \
	X(int, ibv_dereg_mr, (struct vb_mr *))                                            \
	X(struct vb_comp_channel *, ibv_create_comp_channel, (struct vb_context *))       \
	X(int, ibv_destroy_comp_channel, (struct vb_comp_channel *))                      \
	X(struct vb_cq *, ibv_create_cq, (struct vb_context *, int, void *, struct vb_comp_channel *, int)) \
	X(int, ibv_destroy_cq, (struct vb_cq *))                                          \
	X(int, ibv_get_cq_event, (struct vb_comp_channel *, struct vb_cq **, void **))    \
	X(void, ibv_ack_cq_events, (struct vb_cq *, unsigned))                            \
	X(struct vb_qp *, ibv_create_qp, (struct vb_pd *, struct vb_qp_init_attr *))      \
	X(int, ibv_modify_qp, (struct vb_qp *, struct vb_qp_attr *, int))                 \
	X(int, ibv_query_qp, (struct vb_qp *, struct vb_qp_attr *, int, struct vb_qp_init_attr *)) \
	X(int, ibv_destroy_qp, (struct vb_qp *))

#define VB_OPTIONAL(X)                                                                    \
	X(ssize_t, _ibv_query_gid_table, (struct vb_context *, struct vb_gid_entry *, size_t, uint32_t, size_t)) \
	X(struct vb_mr *, ibv_reg_mr_iova2, (struct vb_pd *, void *, size_t, uint64_t, unsigned)) \
	X(struct vb_mr *, ibv_reg_dmabuf_mr, (struct vb_pd *, uint64_t, size_t, uint64_t, int, int))

#define FIELD(ret, name, args) ret(*name) args;
static struct {
	VB_REQUIRED(FIELD)
	VB_OPTIONAL(FIELD)
} ib;

// vb_load leaves in err why it failed. dlsym finds the default version of a
// symbol, which is the newest: no name used here has one newer than 1.1.
static int vb_load(const char *path, char *err, size_t len) {
	void *h = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!h) {
		snprintf(err, len, "cannot load %s", dlerror());
		return -1;
	}
	size_t at = 0;
#define FIND(ret, name, args) ib.name = (ret(*) args)dlsym(h, #name);
#define NEED(ret, name, args) \
	FIND(ret, name, args) \
	if (!ib.name && at < len) at += snprintf(err + at, len - at, "%s%s", at ? ", " : "", #name);
	VB_REQUIRED(NEED)
	VB_OPTIONAL(FIND)
	return at ? -2 : 0;
}

static int vb_rc(int rc) { return rc == -1 ? (errno ? errno : EIO) : rc < 0 ? -rc : rc; }

// vb_null is why a call that makes something made nothing.
static int vb_null(void) { return errno ? errno : EIO; }

static void vb_nonblocking(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

static int vb_open(const char *name, struct vb_context **out) {
	int n = 0, rc = ENXIO;
	struct vb_device **list = ib.ibv_get_device_list(&n);
	if (!list) return vb_null();
	for (int i = 0; i < n; i++) {
		if (strcmp(ib.ibv_get_device_name(list[i]), name)) continue;
		rc = (*out = ib.ibv_open_device(list[i])) ? 0 : vb_null();
		if (*out) vb_nonblocking((*out)->async_fd);
	}
	ib.ibv_free_device_list(list);
	return rc;
}

// The exported ibv_query_port fills the struct as it was in 2009, up to
// link_layer or less; the header calls a member of the extended context.
static int vb_query_port(struct vb_context *c, uint8_t port, struct vb_port_attr *a) {
	memset(a, 0, sizeof *a);
	if (c->abi_compat == VB_ABI_EXTENDED) {
		struct vb_verbs_context *v = (struct vb_verbs_context *)((char *)c - offsetof(struct vb_verbs_context, context));
		if (v->sz >= sizeof *v && v->query_port) return vb_rc(v->query_port(c, port, a, sizeof *a));
	}
	return vb_rc(ib.ibv_query_port(c, port, a));
}

// vb_gid_table gives all ports' entries, to be freed.
static int vb_gid_table(struct vb_context *c, struct vb_gid_entry **out, ssize_t *n) {
	if (!ib._ibv_query_gid_table) return EOPNOTSUPP;
	struct vb_device_attr d;
	int rc = vb_rc(ib.ibv_query_device(c, &d));
	size_t room = 0;
	for (int p = 1; !rc && p <= d.phys_port_cnt; p++) {
		struct vb_port_attr a;
		if (!(rc = vb_query_port(c, p, &a))) room += a.gid_tbl_len;
	}
	if (rc) return rc;
	if (!(*out = calloc(room ? room : 1, sizeof **out))) return ENOMEM;
	*n = ib._ibv_query_gid_table(c, *out, room, 0, sizeof **out);
	if (*n >= 0) return 0;
	free(*out);
	return -(int)*n;
}

// object is the number of the queue pair or completion queue, or the port.
static int vb_event(struct vb_context *c, uint32_t *type, uint32_t *object) {
	struct vb_async_event e;
	errno = 0;
	if (ib.ibv_get_async_event(c, &e)) return vb_null();
	*type = e.event_type;
	*object = 0;
	switch (e.event_type) {
	case VB_EVENT_CQ_ERR:
		*object = e.element.cq->handle;
		break;
	case VB_EVENT_QP_FATAL: case VB_EVENT_QP_REQ_ERR: case VB_EVENT_QP_ACCESS_ERR: case VB_EVENT_COMM_EST: case VB_EVENT_SQ_DRAINED:
	case VB_EVENT_PATH_MIG: case VB_EVENT_PATH_MIG_ERR: case VB_EVENT_QP_LAST_WQE_REACHED:
		*object = e.element.qp->qp_num;
		break;
	case VB_EVENT_PORT_ACTIVE: case VB_EVENT_PORT_ERR: case VB_EVENT_LID_CHANGE: case VB_EVENT_PKEY_CHANGE: case VB_EVENT_SM_CHANGE:
	case VB_EVENT_CLIENT_REREGISTER: case VB_EVENT_GID_CHANGE:
		*object = e.element.port_num;
	}
	ib.ibv_ack_async_event(&e); // the element may be destroyed from here on
	return 0;
}

static int vb_mr_made(struct vb_mr *m, struct vb_mr **out, uint32_t *lkey, uint32_t *rkey) {
	if (!m) return vb_null();
	*out = m;
	*lkey = m->lkey;
	*rkey = m->rkey;
	return 0;
}

static int vb_reg(struct vb_pd *pd, uint64_t addr, uint64_t len, uint32_t access, struct vb_mr **out, uint32_t *lkey, uint32_t *rkey) {
	errno = 0;
	uint32_t plain = access & ~VB_ACCESS_OPTIONAL_RANGE;
	if (plain != access && ib.ibv_reg_mr_iova2)
		return vb_mr_made(ib.ibv_reg_mr_iova2(pd, (void *)addr, len, addr, access), out, lkey, rkey);
	return vb_mr_made(ib.ibv_reg_mr(pd, (void *)addr, len, plain), out, lkey, rkey);
}

static int vb_reg_dmabuf(struct vb_pd *pd, uint64_t offset, uint64_t len, uint64_t iova, int fd, uint32_t access, struct vb_mr **out, uint32_t *lkey, uint32_t *rkey) {
	if (!ib.ibv_reg_dmabuf_mr) return EOPNOTSUPP;
	errno = 0;
	return vb_mr_made(ib.ibv_reg_dmabuf_mr(pd, offset, len, iova, fd, access), out, lkey, rkey);
}

static int vb_drain(struct vb_comp_channel *ch, int *n) {
	struct vb_cq *cq;
	void *unused;
	for (*n = 0;; ++*n) {
		errno = 0;
		if (ib.ibv_get_cq_event(ch, &cq, &unused)) return errno == EAGAIN || errno == EINTR ? 0 : vb_null();
		ib.ibv_ack_cq_events(cq, 1);
	}
}

static int vb_create_qp(struct vb_pd *pd, struct vb_cq *send, struct vb_cq *recv, struct vb_qp_cap *cap, struct vb_qp **out) {
	struct vb_qp_init_attr a = {.send_cq = send, .recv_cq = recv, .cap = *cap, .qp_type = VB_QPT_RC};
	errno = 0;
	if (!(*out = ib.ibv_create_qp(pd, &a))) return vb_null();
	*cap = a.cap;
	return 0;
}

static int vb_modify(struct vb_qp *q, struct vb_qp_attr *a, uint32_t state, int mask) {
	a->qp_state = state;
	return vb_rc(ib.ibv_modify_qp(q, a, mask | VB_QP_STATE));
}

static int vb_init(struct vb_qp *q, uint8_t port, uint32_t access) {
	struct vb_qp_attr a = {.port_num = port, .qp_access_flags = access};
	return vb_modify(q, &a, VB_QPS_INIT, VB_QP_PKEY_INDEX | VB_QP_PORT | VB_QP_ACCESS_FLAGS);
}

static int vb_rtr(struct vb_qp *q, struct vb_qp_attr *a) {
	a->max_dest_rd_atomic = 1; // asked for by the mask although nobody reads
	return vb_modify(q, a, VB_QPS_RTR, VB_QP_AV | VB_QP_PATH_MTU | VB_QP_DEST_QPN | VB_QP_RQ_PSN | VB_QP_MAX_DEST_RD_ATOMIC | VB_QP_MIN_RNR_TIMER);
}

static int vb_rts(struct vb_qp *q, uint32_t psn, uint8_t timeout, uint8_t retries, uint8_t rnr) {
	struct vb_qp_attr a = {.sq_psn = psn & 0xffffff, .timeout = timeout, .retry_cnt = retries, .rnr_retry = rnr, .max_rd_atomic = 1};
	return vb_modify(q, &a, VB_QPS_RTS, VB_QP_TIMEOUT | VB_QP_RETRY_CNT | VB_QP_RNR_RETRY | VB_QP_SQ_PSN | VB_QP_MAX_QP_RD_ATOMIC);
}

static int vb_query_qp(struct vb_qp *q, uint32_t *state) {
	struct vb_qp_attr a;
	struct vb_qp_init_attr i;
	memset(&a, 0, sizeof a);
	int rc = vb_rc(ib.ibv_query_qp(q, &a, VB_QP_STATE, &i));
	*state = a.qp_state;
	return rc;
}

// Laid out as Write and Completion are in Go.
struct vb_write {
	uint64_t id, addr, remote_addr;
	uint32_t lkey, rkey, len, imm;
	bool with_imm, signalled, inlined;
};

struct vb_completion {
	uint64_t id;
	uint32_t status, opcode, bytes, imm, qp, vendor_err;
	bool has_imm;
};

#define VB_CHAIN 32 // work requests of one call of the provider: 5 KiB of stack

// vb_post and vb_post_empty return how many were posted, and an errno << 32.
static uint64_t vb_post(struct vb_qp *q, const struct vb_write *w, int64_t n) {
	struct vb_send_wr wr[VB_CHAIN], *bad = wr;
	struct vb_sge sge[VB_CHAIN];
	int64_t done = 0;
	while (done < n) {
		int k = 0;
		for (; k < VB_CHAIN && done + k < n; k++, w++) {
			sge[k] = (struct vb_sge){w->addr, w->len, w->lkey};
			struct vb_send_wr *r = &wr[k];
			r->wr_id = w->id;
			r->next = r + 1;
			r->sg_list = &sge[k];
			r->num_sge = w->len != 0;
			r->opcode = w->with_imm ? VB_WR_RDMA_WRITE_WITH_IMM : VB_WR_RDMA_WRITE;
			r->send_flags = (w->signalled ? VB_SEND_SIGNALED : 0) | (w->inlined ? VB_SEND_INLINE : 0);
			r->imm_data = htobe32(w->imm);
			r->rdma.remote_addr = w->remote_addr;
			r->rdma.rkey = w->rkey;
		}
		wr[k - 1].next = NULL;
		int rc = q->context->ops.post_send(q, wr, &bad);
		if (rc) return (uint64_t)vb_rc(rc) << 32 | (done + (bad - wr));
		done += k;
	}
	return done;
}

static uint64_t vb_post_empty(struct vb_qp *q, uint64_t id, int64_t n) {
	struct vb_recv_wr wr[VB_CHAIN], *bad = wr;
	int64_t done = 0;
	while (done < n) {
		int k = n - done < VB_CHAIN ? n - done : VB_CHAIN;
		for (int i = 0; i < k; i++) wr[i] = (struct vb_recv_wr){id, i + 1 < k ? &wr[i + 1] : NULL, NULL, 0};
		int rc = q->context->ops.post_recv(q, wr, &bad);
		if (rc) return (uint64_t)vb_rc(rc) << 32 | (done + (bad - wr));
		done += k;
	}
	return done;
}

// vb_poll returns how many, or a negative number.
static int64_t vb_poll(struct vb_cq *cq, struct vb_completion *out, int64_t n) {
	struct vb_wc wc[VB_CHAIN];
	int64_t done = 0;
	for (;;) {
		int want = n - done < VB_CHAIN ? n - done : VB_CHAIN;
		int got = cq->context->ops.poll_cq(cq, want, wc);
		if (got < 0) return done ? done : got; // again at the next poll
		for (int i = 0; i < got; i++, out++) {
			struct vb_wc *w = &wc[i];
			bool imm = w->wc_flags & VB_WC_WITH_IMM;
			*out = (struct vb_completion){w->wr_id, w->status, w->opcode, w->byte_len, imm ? be32toh(w->imm_data) : 0, w->qp_num, w->vendor_err, imm};
		}
		done += got;
		if (got < want || done == n) return done;
	}
}
