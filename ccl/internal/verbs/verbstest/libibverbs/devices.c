// Devices, ports, events, protection domains, memory.
#include "fake.h"

#include <endian.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
struct device *devices[MAX_DEVICES];
int ndevices;
int64_t retry_time;

// enter takes the lock, unless the call cannot be: an injected fault, or a lost
// device.
int enter(const char *call, struct vb_context *c) {
	stall(call);
	pthread_mutex_lock(&lock);
	int rc = fault(call);
	if (!rc && c && context_of(c)->dead) rc = EIO;
	return leave(rc);
}

// leave releases the lock if rc is an error, which it puts into errno too.
int leave(int rc) {
	if (!rc) return 0;
	pthread_mutex_unlock(&lock);
	return errno = rc;
}

static int result(int rc) {
	pthread_mutex_unlock(&lock);
	return rc;
}

struct vb_device **ibv_get_device_list(int *n) {
	if (enter("ibv_get_device_list", NULL)) return NULL;
	struct device **list = calloc(MAX_DEVICES + 1, sizeof *list);
	int k = 0;
	for (int i = 0; i < ndevices; i++)
		if (!devices[i]->removed) list[k++] = devices[i];
	if (n) *n = k;
	pthread_mutex_unlock(&lock);
	return (struct vb_device **)list;
}

void ibv_free_device_list(struct vb_device **list) { free(list); }

const char *ibv_get_device_name(struct vb_device *d) { return ((struct device *)d)->name; }

uint64_t ibv_get_device_guid(struct vb_device *d) { return htobe64(((struct device *)d)->guid); }

static struct port *port_of(struct vb_context *c, int n) {
	struct device *d = device_of(c);
	return n < 1 || n > d->nports ? NULL : &d->ports[n - 1];
}

static int query_port(struct vb_context *c, uint8_t n, struct vb_port_attr *a, size_t len) {
	int rc = enter("ibv_query_port", c);
	if (rc) return rc;
	struct port *p = port_of(c, n);
	if (!p) return result(EINVAL);
	struct vb_port_attr full = {
		.state = p->up ? VB_PORT_ACTIVE : VB_PORT_DOWN, .phys_state = p->up ? 5 : 3, .max_mtu = 5, .active_mtu = p->mtu, .gid_tbl_len = MAX_GIDS,
		.max_msg_sz = 1u << 30, .pkey_tbl_len = 1, .lid = p->lid, .active_width = p->width, .link_layer = p->link_layer,
		.active_speed = p->speed > 128 ? 128 : p->speed, .active_speed_ex = p->speed,
	};
	memset(a, 0, len);
	memcpy(a, &full, len < sizeof full ? len : sizeof full);
	return result(0);
}

// The exported function knows the struct as it was before extended contexts.
int ibv_query_port(struct vb_context *c, uint8_t n, struct vb_port_attr *a) {
	return query_port(c, n, a, offsetof(struct vb_port_attr, port_cap_flags2));
}

struct vb_context *ibv_open_device(struct vb_device *v) {
	struct device *d = (struct device *)v;
	if (enter("ibv_open_device", NULL) || leave(d->removed ? ENODEV : 0)) return NULL;
	struct context *c = calloc(1, sizeof *c);
	c->v.context = (struct vb_context){.device = v, .cmd_fd = -1, .async_fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE), .num_comp_vectors = 1};
	c->v.context.ops = (struct vb_context_ops){.poll_cq = poll_cq, .req_notify_cq = req_notify_cq, .post_send = post_send, .post_recv = post_recv};
	pthread_mutex_init(&c->v.context.mutex, NULL);
#ifndef FAKE_OLD
	c->v.context.abi_compat = VB_ABI_EXTENDED;
	c->v.query_port = query_port;
	c->v.sz = sizeof c->v;
#endif
	c->dev = d;
	c->last_event = &c->events;
	c->next = d->contexts;
	d->contexts = c;
	pthread_mutex_unlock(&lock);
	return &c->v.context;
}

int ibv_close_device(struct vb_context *v) {
	struct context *c = context_of(v);
	int rc = enter("ibv_close_device", NULL);
	if (rc) return rc;
	forget_events(c, NULL);
	for (struct context **p = &c->dev->contexts; *p; p = &(*p)->next)
		if (*p == c) {
			*p = c->next;
			break;
		}
	close(v->async_fd);
	free(c);
	return result(0);
}

int ibv_query_device(struct vb_context *c, struct vb_device_attr *a) {
	int rc = enter("ibv_query_device", c);
	if (rc) return rc;
	struct device *d = device_of(c);
	memset(a, 0, sizeof *a);
	strcpy(a->fw_ver, "1.2.3");
	a->node_guid = a->sys_image_guid = htobe64(d->guid);
	a->max_mr_size = UINT64_MAX;
	a->vendor_id = 0x2c9, a->vendor_part_id = 4129;
	a->max_qp = 1 << 17, a->max_qp_wr = 1 << 15, a->max_sge = 30, a->max_cq = 1 << 24, a->max_cqe = (1 << 22) - 1, a->max_mr = 1 << 24;
	a->phys_port_cnt = d->nports;
	return result(0);
}

int ibv_query_gid(struct vb_context *c, uint8_t port, int index, union vb_gid *gid) {
	struct port *p = port_of(c, port);
	if (enter("ibv_query_gid", c) || leave(!p || index < 0 || index >= MAX_GIDS ? EINVAL : 0)) return -1;
	*gid = p->gids[index].gid;
	return result(0);
}

#ifndef FAKE_OLD
static bool empty(const struct vb_gid_entry *g) { return !g->gid.align[0] && !g->gid.align[1]; }

ssize_t _ibv_query_gid_table(struct vb_context *c, struct vb_gid_entry *out, size_t room, uint32_t flags, size_t size) {
	int rc = enter("_ibv_query_gid_table", c);
	if (rc) return -rc;
	if (flags || size != sizeof *out) return result(-EINVAL);
	struct device *d = device_of(c);
	size_t n = 0;
	for (int p = 0; p < d->nports; p++)
		for (int i = 0; i < MAX_GIDS; i++) {
			if (empty(&d->ports[p].gids[i])) continue;
			if (n == room) return result(-EINVAL);
			out[n++] = d->ports[p].gids[i];
		}
	return result(n);
}
#endif

// Asynchronous events

static void add_event(struct context *c, struct vb_async_event e) {
	struct event *n = malloc(sizeof *n);
	n->next = NULL;
	n->e = e;
	*c->last_event = n;
	c->last_event = &n->next;
	eventfd_write(c->v.context.async_fd, 1);
}

void raise_event(struct device *d, uint32_t type, int port) {
	for (struct context *c = d->contexts; c; c = c->next) add_event(c, (struct vb_async_event){.element.port_num = port, .event_type = type});
}

void raise_qp_event(struct vb_qp *q, uint32_t type) { add_event(context_of(q->context), (struct vb_async_event){.element.qp = q, .event_type = type}); }

void raise_cq_event(struct vb_cq *q, uint32_t type) { add_event(context_of(q->context), (struct vb_async_event){.element.cq = q, .event_type = type}); }

// forget_events forgets those about a queue pair or completion queue, or all.
void forget_events(struct context *c, void *element) {
	for (struct event **p = &c->events; *p;) {
		struct event *e = *p;
		if (element && e->e.element.qp != element) {
			p = &e->next;
			continue;
		}
		*p = e->next;
		free(e);
	}
	for (c->last_event = &c->events; *c->last_event; c->last_event = &(*c->last_event)->next) {}
}

int ibv_get_async_event(struct vb_context *v, struct vb_async_event *out) {
	uint64_t one;
	if (eventfd_read(v->async_fd, &one)) return -1; // blocks, unless the descriptor does not
	struct context *c = context_of(v);
	if (enter("ibv_get_async_event", NULL)) return -1;
	struct event *e = c->events;
	if (!e) return leave(EAGAIN), -1;
	*out = e->e;
	c->events = e->next;
	if (!c->events) c->last_event = &c->events;
	free(e);
	return result(0);
}

void ibv_ack_async_event(struct vb_async_event *e) { (void)e; }

// Protection domains and memory

struct vb_pd *ibv_alloc_pd(struct vb_context *c) {
	if (enter("ibv_alloc_pd", c)) return NULL;
	struct pd *p = calloc(1, sizeof *p);
	p->v.context = c;
	pthread_mutex_unlock(&lock);
	return &p->v;
}

int ibv_dealloc_pd(struct vb_pd *v) {
	struct pd *p = (struct pd *)v;
	int rc = enter("ibv_dealloc_pd", NULL);
	if (rc || (rc = leave(p->users ? EBUSY : 0))) return rc;
	free(p);
	return result(0);
}

static struct vb_mr *reg(struct vb_pd *pd, const char *call, char *host, uint64_t first, size_t len, uint32_t access) {
	bool bad = (access & (VB_ACCESS_REMOTE_WRITE | VB_ACCESS_REMOTE_ATOMIC)) && !(access & VB_ACCESS_LOCAL_WRITE);
	if (enter(call, pd->context) || leave(bad ? EINVAL : 0)) return NULL;
	struct device *d = device_of(pd->context);
	struct mr *m = calloc(1, sizeof *m);
	d->mrs = realloc(d->mrs, (d->nmrs + 1) * sizeof *d->mrs);
	d->mrs[d->nmrs] = m;
	uint32_t key = (FIRST_MR + d->nmrs++) << 8;
	// Two keys, as some devices have: a mix-up is found out.
	m->v = (struct vb_mr){.context = pd->context, .pd = pd, .addr = (void *)first, .length = len, .lkey = key | 1, .rkey = key | 2};
	m->first = first, m->host = host, m->access = access;
	((struct pd *)pd)->users++;
	pthread_mutex_unlock(&lock);
	return &m->v;
}

struct vb_mr *ibv_reg_mr(struct vb_pd *pd, void *addr, size_t len, int access) {
	return reg(pd, "ibv_reg_mr", addr, (uint64_t)addr, len, access);
}

#ifndef FAKE_OLD
struct vb_mr *ibv_reg_mr_iova2(struct vb_pd *pd, void *addr, size_t len, uint64_t iova, unsigned access) {
	return reg(pd, "ibv_reg_mr_iova2", addr, iova, len, access);
}

// Any descriptor that can be mapped serves as a DMA buffer.
struct vb_mr *ibv_reg_dmabuf_mr(struct vb_pd *pd, uint64_t offset, size_t len, uint64_t iova, int fd, int access) {
	uint64_t page = offset & ~(uint64_t)4095;
	size_t mapped_len = offset - page + len;
	char *p = mmap(NULL, mapped_len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, page);
	if (p == MAP_FAILED) return NULL;
	struct vb_mr *v = reg(pd, "ibv_reg_dmabuf_mr", p + (offset - page), iova, len, access);
	if (!v) {
		int rc = errno;
		munmap(p, mapped_len);
		errno = rc;
		return NULL;
	}
	struct mr *m = (struct mr *)v;
	m->mapped = p, m->mapped_len = mapped_len;
	return v;
}
#endif

int ibv_dereg_mr(struct vb_mr *v) {
	struct mr *m = (struct mr *)v;
	int rc = enter("ibv_dereg_mr", NULL);
	if (rc) return rc;
	device_of(v->context)->mrs[(v->lkey >> 8) - FIRST_MR] = NULL;
	((struct pd *)v->pd)->users--;
	if (m->mapped) munmap(m->mapped, m->mapped_len);
	free(m);
	return result(0);
}

// find_mr is NULL unless all of it may be accessed like that: remotely by rkey,
// locally (access 0) by lkey.
struct mr *find_mr(struct device *d, struct vb_pd *pd, uint32_t key, uint64_t addr, uint64_t len, uint32_t access) {
	uint32_t i = (key >> 8) - FIRST_MR;
	struct mr *m = i < d->nmrs ? d->mrs[i] : NULL;
	if (!m || m->v.pd != pd || key != (access ? m->v.rkey : m->v.lkey) || (m->access & access) != access) return NULL;
	return addr >= m->first && len <= m->v.length && addr - m->first <= m->v.length - len ? m : NULL;
}
