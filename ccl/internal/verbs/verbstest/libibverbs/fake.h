// A model of RDMA devices, their ports and the network between them, within one
// process. One lock guards all of it: a model has to be right before it is fast.
#ifndef FAKE_H
#define FAKE_H

#include "abi.h"

#include <stdbool.h>

enum { MAX_DEVICES = 16, MAX_PORTS = 4, ALL_PORTS = MAX_DEVICES * MAX_PORTS, MAX_GIDS = 16 };

struct device;

struct port {
	struct device *dev;
	int num, index; // from 1 in the device, from 0 in the model
	int rail;       // ports of one rail reach each other
	bool up;
	uint8_t link_layer;
	uint16_t lid;
	uint32_t mtu, speed, width;
	uint32_t fail_status; // of everything sent, unless 0
	struct vb_gid_entry gids[MAX_GIDS];
};

struct context {
	struct vb_verbs_context v; // the library's users see v.context
	struct device *dev;
	bool dead; // the device was removed
	struct event *events, **last_event;
	struct context *next;
};

struct event {
	struct vb_async_event e;
	struct event *next;
};

struct device {
	char name[64];
	uint64_t guid;
	int nports;
	struct port ports[MAX_PORTS];
	bool removed;
	uint32_t max_inline;
	struct context *contexts;
	struct mr **mrs; // by key >> 8
	uint32_t nmrs;
	struct qp **qps; // by number - FIRST_QP; numbers are never used again
	uint32_t nqps;
};

enum { FIRST_QP = 0x11, FIRST_MR = 0x10 };

struct pd {
	struct vb_pd v;
	int users;
};

struct mr {
	struct vb_mr v;
	uint64_t first; // address of the first byte, as work requests name it
	char *host;     // where it is
	uint32_t access;
	void *mapped; // DMA buffers
	size_t mapped_len;
};

struct channel {
	struct vb_comp_channel v;
	struct cq_event {
		struct cq *cq;
		struct cq_event *next;
	} *events, **last;
};

struct cqe {
	struct vb_wc wc;
	struct qp *qp;
	uint64_t *freed; // the counter of its ring's slots, to which polling this adds
	uint32_t slots;
};

struct cq {
	struct vb_cq v;
	struct cqe *ring;
	uint32_t head, count; // count is read without the lock
	bool armed, overrun;
	int users;
};

struct wqe {
	struct vb_send_wr wr;
	struct vb_sge sge;
	uint32_t psn, packets;
};

struct qp {
	struct vb_qp v;
	struct device *dev;
	struct port *port, *peer;
	struct link *out;
	uint32_t access, peer_qp, mtu, flow_label;
	uint8_t timeout, retry_cnt, rnr_retry;
	uint32_t max_inline;

	// Send queue: reported ≤ acked ≤ sent ≤ posted; ring slots free up to freed.
	struct wqe *sq;
	char *inlined;
	uint32_t sq_size, psn;
	uint64_t posted, sent, acked, reported, freed;
	int retries, rnrs;
	bool rnr_wait, pumping;
	int64_t deadline; // of the timer, ns; 0: none

	uint64_t *rq;
	uint32_t rq_size, expected;
	uint64_t rq_posted, rq_used, rq_freed;
};

enum message_kind { DATA, ACK, NAK_ACCESS, NAK_RNR };

struct message {
	enum message_kind kind;
	struct port *from, *to;
	uint32_t from_qp, to_qp;
	uint32_t psn, packets;
	uint64_t addr;
	uint32_t rkey, len, imm;
	bool with_imm, torn;
	const char *data;
};

// One direction between two ports.
struct link {
	bool drop, lose_acks, frozen;
	int drop_next, tear_next;
	int64_t delay;
	struct flight {
		struct message m;
		int64_t due;
		struct flight *next;
		char data[];
	} *first, **last;
	int in_flight;
};

extern pthread_mutex_t lock;
extern struct device *devices[MAX_DEVICES];
extern int ndevices;
extern int64_t retry_time; // ns, of all retries together

// control.c
int fault(const char *call); // errno, or 0
void stall(const char *call); // returns when the call is not to stall

// devices.c
int enter(const char *call, struct vb_context *);
int leave(int rc);
void raise_event(struct device *, uint32_t type, int port);
void raise_qp_event(struct vb_qp *, uint32_t type);
void raise_cq_event(struct vb_cq *, uint32_t type);
void forget_events(struct context *, void *element);
struct mr *find_mr(struct device *, struct vb_pd *, uint32_t key, uint64_t addr, uint64_t len, uint32_t access);
static inline struct context *context_of(struct vb_context *c) {
	return (struct context *)((char *)c - offsetof(struct context, v.context));
}
static inline struct device *device_of(struct vb_context *c) { return context_of(c)->dev; }

// queues.c
void complete(struct cq *, struct qp *, struct vb_wc, uint64_t *freed, uint32_t slots);
void forget_completions(struct cq *, struct qp *);
int poll_cq(struct vb_cq *, int, struct vb_wc *);
int req_notify_cq(struct vb_cq *, int);

// pairs.c
int post_send(struct vb_qp *, struct vb_send_wr *, struct vb_send_wr **);
int post_recv(struct vb_qp *, struct vb_recv_wr *, struct vb_recv_wr **);
struct qp *find_qp(struct port *, uint32_t num);
void to_error(struct qp *, uint32_t status); // of the oldest request
void timer_expired(struct qp *);
void answer(struct qp *, struct message *);
bool respond(struct qp *, struct message *, enum message_kind *reply);

// network.c
void transmit(struct link *, struct message *);
struct link *link_between(struct port *, struct port *);
void clear_network(void);
int64_t now(void);
void set_timer(int64_t deadline); // calls timer_expired then

// How far b is after a in 24 bits.
static inline int32_t psn_diff(uint32_t b, uint32_t a) { return (int32_t)((b - a) << 8) >> 8; }

#endif
