// What a test does to the model, but for its links.
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct {
	char call[40];
	int code, nth; // nth 0: every call
} faults[16];
static int nfaults; // read without the lock
static pthread_mutex_t fault_lock = PTHREAD_MUTEX_INITIALIZER;

int fault(const char *call) {
	if (!__atomic_load_n(&nfaults, __ATOMIC_ACQUIRE)) return 0;
	int code = 0;
	pthread_mutex_lock(&fault_lock);
	for (int i = 0; i < nfaults && !code; i++) {
		if (!faults[i].code || strcmp(faults[i].call, call)) continue;
		if (!faults[i].nth) {
			code = faults[i].code;
		} else if (!--faults[i].nth) {
			code = faults[i].code;
			faults[i].code = 0;
		}
	}
	pthread_mutex_unlock(&fault_lock);
	return code;
}

// fake_fail makes a call fail; a NULL call forgets all of them.
int fake_fail(const char *call, int code, int nth) {
	pthread_mutex_lock(&fault_lock);
	int n = nfaults;
	if (!call) {
		n = 0;
	} else if (n < (int)(sizeof faults / sizeof *faults)) {
		snprintf(faults[n].call, sizeof faults[n].call, "%s", call);
		faults[n].code = code, faults[n].nth = nth;
		n++;
	} else {
		n = -1;
	}
	if (n >= 0) __atomic_store_n(&nfaults, n, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&fault_lock);
	return n < 0;
}

static char stalled[40]; // a call that does not return, "" for none
static int stalling, waiting; // stalling is read without the lock
static pthread_cond_t stall_over = PTHREAD_COND_INITIALIZER;

void stall(const char *call) {
	if (!__atomic_load_n(&stalling, __ATOMIC_ACQUIRE)) return;
	pthread_mutex_lock(&fault_lock);
	waiting++;
	while (!strcmp(stalled, call)) pthread_cond_wait(&stall_over, &fault_lock);
	waiting--;
	pthread_mutex_unlock(&fault_lock);
}

// fake_stall keeps a call from returning, "" lets all return.
void fake_stall(const char *call) {
	pthread_mutex_lock(&fault_lock);
	snprintf(stalled, sizeof stalled, "%s", call);
	__atomic_store_n(&stalling, call[0] != 0, __ATOMIC_RELEASE);
	pthread_cond_broadcast(&stall_over);
	pthread_mutex_unlock(&fault_lock);
}

// fake_stalled is how many calls do not return.
int fake_stalled(void) {
	pthread_mutex_lock(&fault_lock);
	int n = waiting;
	pthread_mutex_unlock(&fault_lock);
	return n;
}

// fake_reset begins a new model. Devices that are still in use stay, lost.
void fake_reset(int64_t retry_ns) {
	fake_fail(NULL, 0, 0);
	fake_stall("");
	pthread_mutex_lock(&lock);
	clear_network();
	for (int i = 0; i < ndevices; i++) {
		struct device *d = devices[i];
		d->removed = true;
		for (struct context *c = d->contexts; c; c = c->next) c->dead = true;
		if (!d->contexts) {
			free(d->qps), free(d->mrs), free(d);
		}
	}
	ndevices = 0;
	retry_time = retry_ns;
	pthread_mutex_unlock(&lock);
}

int fake_add_device(const char *name, uint64_t guid, int max_inline) {
	pthread_mutex_lock(&lock);
	int i = ndevices < MAX_DEVICES ? ndevices++ : -1;
	if (i >= 0) {
		struct device *d = devices[i] = calloc(1, sizeof *d);
		snprintf(d->name, sizeof d->name, "%s", name);
		d->guid = guid, d->max_inline = max_inline;
	}
	pthread_mutex_unlock(&lock);
	return i;
}

// fake_add_port answers the port's number in the model.
int fake_add_port(int dev, int rail, int infiniband, int lid, int mtu) {
	pthread_mutex_lock(&lock);
	struct device *d = devices[dev];
	int index = -1;
	if (d->nports < MAX_PORTS) {
		struct port *p = &d->ports[d->nports++];
		index = dev * MAX_PORTS + d->nports - 1;
		*p = (struct port){.dev = d, .num = d->nports, .index = index, .rail = rail, .up = true, .lid = lid, .mtu = mtu, .speed = 256, .width = 2,
			.link_layer = infiniband ? VB_LINK_LAYER_INFINIBAND : VB_LINK_LAYER_ETHERNET};
	}
	pthread_mutex_unlock(&lock);
	return index;
}

static struct port *port_at(int index) { return &devices[index / MAX_PORTS]->ports[index % MAX_PORTS]; }

// fake_set_gid sets an entry of a port's table.
int fake_set_gid(int port, int index, const void *gid, int type, int ifindex) {
	if (index < 0 || index >= MAX_GIDS) return -1;
	pthread_mutex_lock(&lock);
	struct port *p = port_at(port);
	p->gids[index] = (struct vb_gid_entry){.gid_index = index, .port_num = p->num, .gid_type = type, .ndev_ifindex = ifindex};
	memcpy(&p->gids[index].gid, gid, 16);
	pthread_mutex_unlock(&lock);
	return 0;
}

void fake_port_up(int port, int up) {
	pthread_mutex_lock(&lock);
	port_at(port)->up = up;
	pthread_mutex_unlock(&lock);
}

void fake_fail_sends(int port, int status) {
	pthread_mutex_lock(&lock);
	port_at(port)->fail_status = status;
	pthread_mutex_unlock(&lock);
}

// fake_raise raises an event of a device's port, or of the device.
void fake_raise(int dev, int type, int port) {
	pthread_mutex_lock(&lock);
	raise_event(devices[dev], type, port);
	pthread_mutex_unlock(&lock);
}

// fake_raise_qp raises an event of a queue pair.
int fake_raise_qp(int dev, int type, uint32_t num) {
	pthread_mutex_lock(&lock);
	struct device *d = devices[dev];
	struct qp *q = num - FIRST_QP < d->nqps ? d->qps[num - FIRST_QP] : NULL;
	if (q) raise_qp_event(&q->v, type);
	pthread_mutex_unlock(&lock);
	return q ? 0 : -1;
}

// fake_remove takes a device out for good, as far as its contexts go; a device
// that comes back has to be opened again.
void fake_remove(int dev, int removed) {
	pthread_mutex_lock(&lock);
	struct device *d = devices[dev];
	d->removed = removed;
	if (removed) {
		for (struct context *c = d->contexts; c; c = c->next) c->dead = true;
		for (uint32_t i = 0; i < d->nqps; i++)
			if (d->qps[i]) d->qps[i]->deadline = 0, d->qps[i]->port = NULL;
		raise_event(d, VB_EVENT_DEVICE_FATAL, 0);
	}
	pthread_mutex_unlock(&lock);
}

// fake_open counts what a device has open: its contexts, queue pairs (1) or
// memory regions (2).
int fake_open(int dev, int kind) {
	pthread_mutex_lock(&lock);
	struct device *d = devices[dev];
	int n = 0;
	for (struct context *c = kind ? NULL : d->contexts; c; c = c->next) n++;
	for (uint32_t i = 0; kind == 1 && i < d->nqps; i++) n += d->qps[i] != NULL;
	for (uint32_t i = 0; kind == 2 && i < d->nmrs; i++) n += d->mrs[i] != NULL;
	pthread_mutex_unlock(&lock);
	return n;
}

void fake_heal(void) {
	fake_fail(NULL, 0, 0);
	pthread_mutex_lock(&lock);
	clear_network();
	for (int d = 0; d < ndevices; d++)
		for (int p = 0; p < devices[d]->nports; p++) devices[d]->ports[p].fail_status = 0;
	pthread_mutex_unlock(&lock);
}

// fake_flow_label is the one that a queue pair was connected with, -1 when there is none of that number.
int fake_flow_label(int dev, uint32_t num) {
	pthread_mutex_lock(&lock);
	struct device *d = devices[dev];
	struct qp *q = num - FIRST_QP < d->nqps ? d->qps[num - FIRST_QP] : NULL;
	int label = q ? (int)q->flow_label : -1;
	pthread_mutex_unlock(&lock);
	return label;
}

// fake_time is how many ns it takes to poll a queue pair's empty queue n times
// (post 0), or to post n inline writes of no bytes to it and to poll each.
int fake_time(int dev, uint32_t num, int n, int post) {
	struct vb_qp *q = &devices[dev]->qps[num - FIRST_QP]->v;
	struct vb_context_ops *ops = &q->context->ops;
	struct vb_send_wr wr = {.opcode = VB_WR_RDMA_WRITE, .send_flags = VB_SEND_SIGNALED | VB_SEND_INLINE}, *bad;
	struct vb_wc wc[16];
	int64_t began = now();
	for (int i = 0; i < n; i++)
		if ((post && ops->post_send(q, &wr, &bad)) || ops->poll_cq(q->send_cq, 16, wc) != post) return -1;
	return now() - began;
}
