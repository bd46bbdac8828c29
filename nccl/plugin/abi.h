/*
 * NCCL's profiler interface, versions 4 to 7, as far as the plugin and its driver
 * need it: the layouts of the public headers on LP64, in declarations of our own.
 * One struct serves all versions, since each keeps the offsets of the one before;
 * what a version lacks is not looked at. Offsets are checked below.
 */
#ifndef LOCKSTEP_NCCL_ABI_H
#define LOCKSTEP_NCCL_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { /* bits of the mask, and values of an event's type */
	NCCL_GROUP = 1 << 0,
	NCCL_COLL = 1 << 1,
	NCCL_P2P = 1 << 2,
	NCCL_PROXY_OP = 1 << 3,
	NCCL_PROXY_STEP = 1 << 4,
	NCCL_PROXY_CTRL = 1 << 5,
	NCCL_KERNEL_CH = 1 << 6,
	NCCL_NET_PLUGIN = 1 << 7,
	NCCL_GROUP_API = 1 << 8, /* from v5 */
	NCCL_COLL_API = 1 << 9,
	NCCL_P2P_API = 1 << 10,
	NCCL_KERNEL_LAUNCH = 1 << 11,
	NCCL_CE_COLL = 1 << 12, /* from v6 */
	NCCL_CE_SYNC = 1 << 13,
	NCCL_CE_BATCH = 1 << 14,
	NCCL_KERNEL_PHASE = 1 << 15, /* from v7 */
};

enum { /* states */
	NCCL_STEP_SEND_GPU_WAIT = 8,
	NCCL_STEP_SEND_WAIT = 9,
	NCCL_STEP_RECV_WAIT = 10,
	NCCL_STEP_RECV_FLUSH_WAIT = 11,
	NCCL_STEP_RECV_GPU_WAIT = 12,
	NCCL_PROXY_OP_IN_PROGRESS = 19,
	NCCL_STEP_SEND_PEER_WAIT = 20,
	NCCL_NET_PLUGIN_UPDATE = 21,
	NCCL_KERNEL_CH_STOP = 22,
	NCCL_GROUP_START_API_STOP = 23,
	NCCL_GROUP_END_API_START = 24,
};

struct nccl_event {
	uint64_t type; /* v4: its first byte only */
	void *parent;
	int rank;
	union {
		struct { bool captured; int depth; } group_api;
		struct { const char *func; size_t count; const char *datatype; int root; void *stream; bool captured; uint64_t tag; } coll_api;
		struct { const char *func; size_t count; const char *datatype; void *stream; bool captured; uint64_t tag; } p2p_api;
		struct { void *stream; } kernel_launch;
		struct {
			uint64_t seq;
			const char *func;
			const void *send;
			void *recv;
			size_t count;
			int root;
			const char *datatype;
			uint8_t channels, warps;
			const char *algo, *proto;
			void *group;         /* from v5; v4 has it in parent */
			const char *variant; /* from v7 */
			bool symmetric;
			uint64_t tag;
		} coll;
		struct { const char *func; void *buff; const char *datatype; size_t count; int peer; uint8_t channels; void *group; uint64_t tag; } p2p;
		struct { int32_t pid; uint8_t channel; int peer, steps, chunk, is_send; } proxy_op;
		struct { int step; } proxy_step;
		struct { uint8_t channel; uint64_t timer; } kernel_ch;
		struct { int64_t id; void *data; } net;
		struct {
			uint64_t seq;
			const char *func;
			const void *send;
			void *recv;
			size_t count;
			int root;
			const char *datatype, *sync;
			bool intra;
			uint32_t batch_size, batches, ce_seq;
			void *stream;
		} ce_coll;
		struct { bool complete; int ranks; } ce_sync;
		struct { int ops; size_t bytes; bool intra; } ce_batch;
		struct { uint8_t channel, phase; const char *name; uint64_t timer; } phase;
	} u;
};

#define NCCL_SIZE_V4 104
#define NCCL_SIZE_V5 112
#define NCCL_SIZE_V7 136
#define NCCL_AT(field, at) _Static_assert(offsetof(struct nccl_event, field) == (at), #field)
NCCL_AT(parent, 8);
NCCL_AT(rank, 16);
NCCL_AT(u, 24);
NCCL_AT(u.group_api.depth, 28);
NCCL_AT(u.coll_api.count, 32);
NCCL_AT(u.coll_api.datatype, 40);
NCCL_AT(u.coll_api.root, 48);
NCCL_AT(u.coll_api.stream, 56);
NCCL_AT(u.coll_api.captured, 64);
NCCL_AT(u.coll_api.tag, 72);
NCCL_AT(u.p2p_api.stream, 48);
NCCL_AT(u.p2p_api.captured, 56);
NCCL_AT(u.p2p_api.tag, 64);
NCCL_AT(u.coll.func, 32);
NCCL_AT(u.coll.send, 40);
NCCL_AT(u.coll.recv, 48);
NCCL_AT(u.coll.count, 56);
NCCL_AT(u.coll.root, 64);
NCCL_AT(u.coll.datatype, 72);
NCCL_AT(u.coll.channels, 80);
NCCL_AT(u.coll.warps, 81);
NCCL_AT(u.coll.algo, 88);
NCCL_AT(u.coll.proto, 96);
NCCL_AT(u.coll.group, 104);
NCCL_AT(u.coll.variant, 112);
NCCL_AT(u.coll.symmetric, 120);
NCCL_AT(u.coll.tag, 128);
NCCL_AT(u.p2p.buff, 32);
NCCL_AT(u.p2p.datatype, 40);
NCCL_AT(u.p2p.count, 48);
NCCL_AT(u.p2p.peer, 56);
NCCL_AT(u.p2p.channels, 60);
NCCL_AT(u.p2p.group, 64);
NCCL_AT(u.p2p.tag, 72);
NCCL_AT(u.proxy_op.channel, 28);
NCCL_AT(u.proxy_op.peer, 32);
NCCL_AT(u.proxy_op.steps, 36);
NCCL_AT(u.proxy_op.chunk, 40);
NCCL_AT(u.proxy_op.is_send, 44);
NCCL_AT(u.kernel_ch.timer, 32);
NCCL_AT(u.net.data, 32);
NCCL_AT(u.ce_coll.sync, 80);
NCCL_AT(u.ce_coll.intra, 88);
NCCL_AT(u.ce_coll.batch_size, 92);
NCCL_AT(u.ce_coll.batches, 96);
NCCL_AT(u.ce_coll.ce_seq, 100);
NCCL_AT(u.ce_coll.stream, 104);
NCCL_AT(u.ce_sync.ranks, 28);
NCCL_AT(u.ce_batch.bytes, 32);
NCCL_AT(u.phase.name, 32);
NCCL_AT(u.phase.timer, 40);
_Static_assert(sizeof(struct nccl_event) == NCCL_SIZE_V7, "v7");

union nccl_state_args {
	size_t trans_size; /* of a step */
	int appended;
	void *data;
	uint64_t timer; /* of a kernel's channel */
};
_Static_assert(sizeof(union nccl_state_args) == 8, "state arguments");

/* What a network plugin tells with an event; netPlugin.id is type << 16 | version. */
enum { NCCL_NET_IB = 1, NCCL_NET_SOCKET = 2 };
struct nccl_qp { uint8_t type; struct { int device; uint64_t wr_id; int opcode, qp; size_t length; } qp; };
struct nccl_socket { uint8_t type; struct { int fd, op; size_t length; } sock; };
_Static_assert(offsetof(struct nccl_qp, qp) == 8 && offsetof(struct nccl_qp, qp.qp) == 28 && offsetof(struct nccl_qp, qp.length) == 32, "qp");
_Static_assert(offsetof(struct nccl_socket, sock) == 8 && offsetof(struct nccl_socket, sock.length) == 16, "socket");

typedef void (*nccl_logger)(int level, unsigned long flags, const char *file, int line, const char *fmt, ...);

struct nccl_profiler_v4 {
	const char *name;
	int (*init)(void **context, int *mask, const char *comm_name, uint64_t comm_hash, int nodes, int ranks, int rank, nccl_logger log);
	int (*start)(void *context, void **handle, struct nccl_event *e);
	int (*stop)(void *handle);
	int (*state)(void *handle, int state, union nccl_state_args *args);
	int (*finalize)(void *context);
};

struct nccl_profiler_v5 { /* and v6, v7 */
	const char *name;
	int (*init)(void **context, uint64_t comm_id, int *mask, const char *comm_name, int nodes, int ranks, int rank, nccl_logger log);
	int (*start)(void *context, void **handle, struct nccl_event *e);
	int (*stop)(void *handle);
	int (*state)(void *handle, int state, union nccl_state_args *args);
	int (*finalize)(void *context);
};
_Static_assert(sizeof(struct nccl_profiler_v4) == 48 && sizeof(struct nccl_profiler_v5) == 48, "tables");

#endif
