/* What probes on NCCL are given, keep and tell. User space has the same types, generated from these. */
#pragma once
#include "kernel.h"

/* A probe's cookie says what the function is: the kind (record.CollKind), and which of its arguments
 * are the communicator, the count, the type, the operator, and the root or peer; 15 for none. */
#define COOKIE_KIND(c) ((u32)(c) & 255)
#define COOKIE_COMM(c) ((u32)((c) >> 8) & 15)
#define COOKIE_COUNT(c) ((u32)((c) >> 12) & 15)
#define COOKIE_DTYPE(c) ((u32)((c) >> 16) & 15)
#define COOKIE_OP(c) ((u32)((c) >> 20) & 15)
#define COOKIE_PEER(c) ((u32)((c) >> 24) & 15)
#define COOKIE_STREAM(c) ((u32)((c) >> 28) & 15)
#define COOKIE_P2P (1ull << 32)
enum { NO_ARG = 15 };

/* Cookies of probes on what makes communicators. */
enum { INIT_RANK = 1, INIT_SCALABLE = 2 };

enum state { JOINING = 1, JOINED, LEFT, ABORTED };

struct comm_key {
	u64 comm; /* its address, with JOINING_KEY that of the pointer to it which init is to fill in */
	u32 tgid;
	u32 zero;
};
#define JOINING_KEY (1ull << 63)

/* comm is one process's communicator. */
struct comm {
	u64 created;  /* when init was called; of one whose init was not seen, the first call */
	u64 id;       /* hash of the unique id, or of the parent's id, the split's number and its color; 0: not known */
	u64 parent;   /* id of the communicator that it was split from */
	u64 at;       /* of the state */
	u64 called;   /* collectives, which all members call in one order */
	u64 returned; /* of them */
	u64 called_at;
	u64 returned_at;
	u64 count; /* of the last called: its elements */
	u64 p2p;   /* sends and receives */
	u64 p2p_at;
	s32 rank; /* -1: not known */
	s32 size;
	s32 peer;  /* of the last called: its root, -1 when none */
	u8 kind;   /* of the last called */
	u8 dtype;
	u8 state;
	u8 pad;
	u32 splits;  /* calls of ncclCommSplit and ncclCommShrink so far */
	u32 settled; /* of them, those that have returned */
	u32 nth;     /* which of its parent's it was made by, from 1; 0 by none */
	s32 key;     /* as ncclCommSplit was given it */
};

/* call is one call, in the ring. */
struct call {
	u64 comm;
	u64 created; /* of the communicator */
	u64 seq;
	u64 at;
	u64 count;
	u64 stream;
	u32 tgid;
	u32 tid;
	s32 peer;
	u8 kind;
	u8 dtype;
	u8 op;
	u8 in_place;
};

enum { IN_GROUP = 8, PENDING = 8, EXCLUDED = 64 };

/* pending is a communicator that is being made. */
struct pending {
	u64 out;  /* where its address will be */
	u64 from; /* communicator that it is split from */
	struct comm comm;
};

/* thread is what a thread is in. */
struct thread {
	u64 inside; /* communicator of the call that it is in, 0 when in none */
	u64 sp;     /* on entry of that */
	u32 depth;  /* of groups */
	u32 ncomms;
	u64 comms[IN_GROUP]; /* called on in the group */
	u32 npending;
	u32 pad;
	struct pending pending[PENDING];
};

/* end is how a process ended, in its own ring. */
struct end {
	u64 at;
	u32 tgid;
	u32 code; /* as wait(2) has it */
};

enum stat { STAT_CALLS, STAT_P2P, STAT_RECORDED, STAT_SAMPLED_OUT, STAT_RING_FULL, STAT_TABLE_FULL, STAT_UNREAD, NSTATS };
