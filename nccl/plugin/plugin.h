/*
 * The profiler plugin's own declarations.
 *
 * Handles and contexts that NCCL gets are numbers, never pointers: each names a slot
 * and the generation of its owner, and is checked when it comes back. So one that is
 * stale, of another process (PXN) or made up is passed over, whatever NCCL does.
 *
 * Threads: NCCL's call the four callbacks, one helper of ours does what nobody calls
 * for (anchors, the control file, ends that nobody tells). Only init, finalize, fork
 * and the helper's start take the lock.
 */
#ifndef LOCKSTEP_NCCL_PLUGIN_H
#define LOCKSTEP_NCCL_PLUGIN_H

#include "lockstep_record.h"

#include <pthread.h>
#include <stdarg.h>

#include "abi.h"

#define LOAD(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define PEEK(p) __atomic_load_n((p), __ATOMIC_RELAXED)
#define STORE(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define SET(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
#define ADD(p, v) __atomic_fetch_add((p), (v), __ATOMIC_RELAXED)
#define CAS(p, old, v) __atomic_compare_exchange_n((p), (old), (v), 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)
#define HIDDEN __attribute__((visibility("hidden")))
#define ALIGNED __attribute__((aligned(64)))

#define MAX_COMMS 4096 /* = LOCKSTEP_MAX_COMM_SLOTS: a context is its entry's index */
#define MAX_CONNS 4096 /* a power of two: also a hash table */
#define MAX_PROXIES 8192
#define MAX_STEPS 16384
#define MAX_NETS 16384
#define MAX_GROUPS 1024
#define OP_BUSY (UINT64_C(1) << 63) /* of an operation's number: it is being filled */
#define RING_SLOTS 32768
#ifndef GRACE_NS
#define GRACE_NS INT64_C(10000000000) /* until the slot of a communicator that is gone is used again */
#endif

#define MS INT64_C(1000000)

/* An operation's count: low 24 bits of seq << 40 | who is at its words << 32 | channels stopped << 16 | channels started. Who writes
 * of what its channels tell holds it by one compare-and-swap, which finds that it is the operation meant; while somebody does, it
 * is not over, and once it is over (255), nobody can. */
#define COUNT_SEQ(seq) (((seq) & 0xffffff) << 40)
#define COUNT_HELD (UINT64_C(1) << 32)
#define COUNT_STOPPED (UINT64_C(1) << 16)
#define COUNT_STARTED UINT64_C(1)
#define COUNT_OVER (UINT64_C(255) << 32)
static inline uint32_t count_held(uint64_t count) { return count >> 32 & 255; }
static inline uint32_t count_stopped(uint64_t count) { return count >> 16 & 0xffff; }
static inline uint32_t count_started(uint64_t count) { return count & 0xffff; }

/* Flags of an operation. */
enum {
	OP_PLACED = 1, /* NCCL has put it into a kernel: channels are to come */
	OP_TOLD = 2,   /* its enqueue record is written */
	OP_REPLAY = 4, /* of a CUDA graph */
	OP_COPY = 8,   /* by copy engines */
	OP_QUIET = 16, /* called while NCCL was not asked for kernels: its end is that of a later one */
};

/* An operation under way. The first line is the caller's, the second the proxy thread's. */
struct op {
	uint64_t seq; /* its number in the communicator, from 1; 0: free */
	int64_t called, launched;
	uint64_t bytes;
	uint32_t stream, plan, flags;
	int32_t root;
	uint16_t channels; /* to be told, 0 when nobody knows */
	uint8_t coll, dtype, algo, proto;
	uint8_t pad[2];
	uint64_t group; /* handle of its API group, 0 when the call has returned */

	uint64_t count; /* see COUNT_ */
	uint64_t gpu_start, gpu_end; /* first and last by the GPU's clock */
	int64_t seen_start, seen_end; /* when this process was told */
	uint64_t stopped;  /* of the channels that started, in that order: a bit each of the first 64 */
	uint32_t wait;     /* a span: until the last peer's first bytes were there, by proxies */
	int32_t wait_peer;
	uint64_t lost; /* operations of this slot up to this one that are not in it were lost */
} ALIGNED;
_Static_assert(sizeof(struct op) == 128, "op");

struct comm {
	/* Fixed while the generation is. */
	uint32_t gen; /* odd while the communicator lives */
	uint32_t mask; /* of ops */
	struct op *ops;
	uint32_t size; /* of ops as allocated */
	int32_t ranks, version; /* of the interface: two libraries of NCCL may be in one process */
	int *events; /* the mask of its library */
	struct lockstep_comm *rec;
	int64_t left; /* when it was finalized */
	struct comm *next_left;

	/* The thread that calls collectives. */
	uint64_t called ALIGNED; /* operations numbered */
	uint32_t plans;
	uint64_t loud, loud_before; /* last operation whose kernel NCCL is going to tell of, and the one before */
	uint64_t deaf; /* channels that NCCL tells nothing true of, a bit each: see selves.c */
	/* The API group, and the plan, whose sends and receives are one operation, and its number. */
	uint64_t group, group_seq, plan, plan_seq;
	uint64_t last_group, first_of_group; /* of the last call, and the first operation of it */
	uint32_t maybe, maybe_told; /* captured calls whose replays may not be told, since the last whose are; replays of such that were */
	uint64_t maybe_group;       /* the API group of sends and receives among them */
	int64_t maybe_at;
	int64_t launched, posting; /* the last kernel's launch; since when NCCL makes entries for its proxy, 0 where nobody asks */
	uint32_t posted;           /* operations that they are of */
	int p2p;                   /* it has carried sends or receives, whose numbers are each rank's own */

	/* The proxy thread. */
	uint64_t started ALIGNED; /* last operation with a channel that started */
	int64_t started_at;
	uint32_t stopped_plan; /* last plan with a channel that stopped */
	int64_t stopped_at;

	/* Whoever holds busy. */
	uint32_t busy ALIGNED;
	uint32_t dirty;
	uint64_t finished; /* all operations up to this one are over */
	uint64_t quiet;    /* finished without times since the last one with them */
	uint64_t told_started;
} ALIGNED;

/* A window of a connection's requests, and what was usual. */
struct window {
	int64_t first, last, told_at;
	uint64_t bytes, latency;
	uint32_t wrs, back, out;
	uint64_t windows, slow;
	uint32_t in_a_row;
	double usual; /* ns a request */
};

/* One peer of a communicator over the network, or one queue pair to it. */
struct conn {
	uint64_t key; /* 0: never used */
	const struct conn *of; /* its peer's, of a queue pair or a socket */
	struct lockstep_conn *rec;
	uint32_t index;
	int32_t peer;
	uint16_t comm;
	uint32_t parts;            /* queue pairs of a peer that are connections of their own; whoever holds conns_busy */
	uint32_t blocked, waiting; /* steps */
	uint64_t posted, completed, received;
	int64_t blocked_ns, blocked_since;
	struct window w;
} ALIGNED;

/* Where a transfer or an operation of a proxy is kept while it lasts. */
struct slot {
	uint64_t owner; /* generation << 1 | 1 while it is taken */
	int64_t at;
	uint64_t op;     /* handle of the operation */
	uint64_t ctx;    /* generation << 32 | index of the communicator */
	struct conn *conn;
	uint64_t bytes;
	int64_t first; /* bytes, of a proxy operation that receives */
	uint8_t captured, is_send, blocked, waiting, posted; /* captured: SURE … QUIET, of an API group's next call */
} ALIGNED;
_Static_assert(sizeof(struct slot) == 64, "slot");

struct pool {
	struct slot *slots;
	uint32_t mask, next;
};

#define CAPTURE_NS (1000 * MS) /* calls that are captured closer than that go into one graph, and are timed */

/* Which groups of calls NCCL is asked to time: see sample.c. */
struct sampling {
	int quiet;         /* kernels are not asked for now */
	int network;       /* proxies have told of transfers */
	int tight;         /* what was saved for calls in a row is spent */
	int64_t spent;     /* until when the budget is spent */
	int64_t called;    /* last call */
	int64_t gap;       /* mean time between calls of late, each 1 ms at most */
	int64_t captured;  /* last call that went into a graph */
	int64_t turned;    /* when the mask was last changed */
	uint32_t turns;    /* twice how often it was; odd while it is being changed */
	uint32_t turning;
	uint32_t calls, burst, total; /* of this burst, of the one before, of the process */
	uint64_t untimed;  /* operations since the last one with times */
	int64_t cost;      /* ns that NCCL takes its caller for a timed call: the median of late */
	int64_t window;    /* when counting began of what follows */
	uint32_t counted, pauses; /* total then, and pauses since */
	uint32_t share;    /* one call in so many is timed, by the window before; 0: not known */
	int rested;        /* the last call came after a rest: the next one is timed */
	int crowded;       /* by the window before there are too many bursts to time the last call of each */
	uint64_t seen[64]; /* by thread: what it is << 32 | turns at the end of its last group */
} ALIGNED;

struct plugin {
	uint32_t *live; /* in a page that a forked child sees wiped: 0 there */
	int opened;     /* 0 not yet, 1 it is, -1 it cannot be */
	uint32_t salt;  /* of contexts */
	struct lockstep_writer w;
	int set, chosen; /* sets of events: in use, chosen at the start */
	struct { int *mask, version; uint32_t comms; } masks[16]; /* of each library that has communicators */
	uint32_t nmasks;
	uint32_t used, alive; /* communicators: entries ever used, living */
	struct comm *first_left, *last_left; /* those that were finalized, in that order */
	int helping;
	int64_t tick; /* the time as the helper has seen it last */
	nccl_logger log;
	enum lockstep_transport transport;
	int64_t gpu_end; /* of any operation */
	struct sampling sampling;
	struct comm comms[MAX_COMMS];
	struct conn conns[MAX_CONNS];
	uint32_t conns_busy;
	struct pool groups, proxies, steps, nets;
};

extern HIDDEN struct plugin plugin;

/* A captured call's handle has in place of a sequence what is needed when it is replayed: whether NCCL may not have been asked for its
 * kernel; then, whether it tells of the replay all the same, for transfers; else, of how many calls before it it may not. */
#define CAPTURED_MAYBE (UINT64_C(1) << 31)
#define CAPTURED_TOLD (UINT64_C(1) << 30)
#define CAPTURED_BEFORE UINT64_C(0xffff)

/* What a handle is: kind << 60 | captured << 59 | comm << 41 | generation << 32 | sequence; of a kernel's channel, which of its
 * operation's to start it was << 53, 0 beyond the 64th. */
enum handle_kind { H_GROUP_API = 1, H_COLL_API, H_P2P_API, H_GROUP, H_COLL, H_P2P, H_KERNEL, H_LAUNCH, H_CE, H_PROXY, H_STEP, H_NET };
#define H_CAPTURED (UINT64_C(1) << 59)

static inline enum handle_kind handle_kind(uint64_t h) { return (enum handle_kind)(h >> 60); }
static inline uint64_t make_handle(enum handle_kind kind, const struct comm *c, uint64_t gen, uint64_t seq)
{
	return (uint64_t)kind << 60 | (uint64_t)(c - plugin.comms) << 41 | (gen & 511) << 32 | (seq & UINT32_MAX);
}

static inline int64_t span_ns(uint32_t span) { return span & LOCKSTEP_SPAN_MICRO ? (int64_t)(span & ~LOCKSTEP_SPAN_MICRO) * 1000 : (int64_t)span; }

/* 1 in the process that opened the recorder, not in its forked children. */
static inline int is_live(void) { return plugin.live && PEEK(plugin.live); }

/* plugin.c */
HIDDEN void set_masks(int quiet);
/* sample.c */
static inline int is_sampling(void) { return PEEK(&plugin.set) == LOCKSTEP_EVENTS_DEFAULT; }
HIDDEN uint32_t sample_call(int64_t now);
HIDDEN void sample_group(void);
HIDDEN void sample_cost(int64_t ns);
enum { SURE, UNSURE, QUIET };
HIDDEN int sample_captured(void);
HIDDEN void sample_reset(void);
HIDDEN void sample_rest(int64_t now);
/* comms.c */
HIDDEN void *make_context(const struct comm *c);
HIDDEN struct comm *comm_of_context(void *context, uint32_t *gen);
HIDDEN struct comm *comm_of_handle(uint64_t h);
HIDDEN struct comm *place_comm(int version, uint64_t id, const char *name, int32_t rank, int32_t ranks);
HIDDEN void leave_comm(struct comm *c);
HIDDEN int take_turn(uint32_t *word);
/* identity.c */
HIDDEN void identify(struct lockstep_options *o, int32_t rank, int32_t ranks, char job[64], char node[64]);
HIDDEN int chosen_events(void);
HIDDEN void sweep(const struct lockstep_options *o);
HIDDEN enum lockstep_transport network(void);
/* names.c */
HIDDEN uint8_t coll_of(const char *func);
HIDDEN uint8_t dtype_of(const char *datatype, uint32_t *size);
HIDDEN uint8_t algo_of(const char *algo);
HIDDEN uint8_t proto_of(const char *proto);
/* ops.c */
HIDDEN uint64_t op_event(void *context, const struct nccl_event *e, uint32_t type, int v4);
HIDDEN void op_stop(uint64_t h);
HIDDEN void kernel_stop(uint64_t h, uint64_t timer);
HIDDEN void op_waited(uint64_t h, int64_t ns, int32_t peer);
/* selves.c */
HIDDEN void note_self(struct comm *c, const struct nccl_event *e);
HIDDEN void loud_call(struct comm *c, uint64_t seq);
HIDDEN void loud_placed(struct comm *c, const struct op *o, uint64_t seq);
HIDDEN int is_deaf(const struct comm *c, const struct op *o);
static inline uint32_t channels_told(const struct comm *c, uint32_t channels)
{
	return channels > 1 && PEEK(&c->deaf) == 1 ? channels - 1 : channels;
}
/* settle.c */
HIDDEN void settle(struct comm *c, uint32_t gen, int64_t now, int tick);
HIDDEN int settle_last(struct comm *c, int64_t now);
/* net.c */
HIDDEN int pools_init(void);
HIDDEN struct slot *take(struct pool *p, enum handle_kind kind, uint64_t *handle);
HIDDEN struct slot *slot_of(struct pool *p, uint64_t h);
HIDDEN int give(struct slot *s, uint64_t h);
HIDDEN uint64_t net_event(void *context, const struct nccl_event *e, uint32_t type);
HIDDEN void net_stop(uint64_t h);
HIDDEN void net_state(uint64_t h, int state, const union nccl_state_args *args);

#endif
