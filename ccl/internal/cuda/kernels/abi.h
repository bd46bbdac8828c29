// What the host and the kernels agree on. abi.go mirrors these structs, and a
// test compares the two; docs/design/cuda.md says how they are used.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef u32 u32x4 __attribute__((ext_vector_type(4)));
typedef u64 u64x2 __attribute__((ext_vector_type(2)));

enum {
  LS_MAX_RANKS = 8,   // GPUs that reach each other by loads and stores
  LS_MAX_BLOCKS = 32, // of any kernel that talks to peers
  LS_LL_LINES = 1024, // LL lines for one source rank and block
  LS_LL12_LINES = 1536, // likewise of 12 bytes, where there are more than 4 ranks: twice as many for 3 and 4, four times for 2
  LS_CHAIN_WARPS = 16,   // of a block of chains
  LS_CHAIN_BYTES = 256 << 10, // of their lines for a block
  LS_MAX_MESSAGES = 8, // sends, and receives, of one kernel: one each way with each peer
  LS_LANES = 16,       // most of a message
  LS_QUEUES = 4 * (LS_MAX_RANKS - 1), // of P2PListArgs: each peer's, each way, of LL and of direct messages
  LS_ITEMS = 104,      // messages that P2PListArgs has itself
  LS_MORE_ITEMS = 1 << 16, // and as many as Heap.item has
  LS_LOAD_ITEMS = 127, // messages of one ls_p2p_items
  LS_PIECE_UNIT = 128, // of Item.piece
  LS_RING_BYTES = 16 << 20, // of Args.ring, on LS_MAX_BLOCKS
  LS_LANE_LINES = 4 * LS_LL_LINES, // of LL: 32 KiB of data
  LS_PHASES = 4,      // flag rows: barriers that one kernel may need
  LS_PHASE_ENTER = 0, LS_PHASE_LEAVE = 1, // the rows of barriers of kernels on windows
  LS_PHASE_STEPS = 3, // the row that counts steps instead, of pipelines between ranks
};

// Line is 8 bytes of data with a flag beside each half. Its halves are written
// as aligned 8-byte words, which are never torn.
struct alignas(16) Line { u32 d0, f0, d1, f1; };

// Line12 is 12 bytes of data and a flag, written and read by one access.
struct alignas(16) Line12 { u32 d[3], flag; };

// BlockState is a block's own memory from one kernel to the next. Block b of
// rank r only ever speaks with block b of its peers, and all ranks run the same
// kernels with as many blocks, so that equal blocks agree on the epoch without
// anybody counting operations.
struct alignas(128) BlockState {
  u32 epoch;
  u32 steps, tiles;   // of Broadcast's pipeline, and of ls_allreduce_pushbulk, all so far
  u32 pad;
  u64 sent, received; // of chains, steps: to the next rank, from the previous one
  u32 pad2[24];
};

// LaneState counts what a pair of ranks has exchanged on one lane, as both count it.
struct alignas(16) LaneState { u32 sent, received, pushed, taken; }; // pieces: by LL, and direct ones

// Item is a message of a list, cut in lanes as Message is.
struct Item {
  u64 buffer, bytes; // as mapped here
  u64 target;        // of a direct receive: buffer, as the sender has mapped it; 0: through staging memory
  u32 piece, lanes;  // piece: in units of LS_PIECE_UNIT bytes
};

// Heap is a rank's control memory, mapped by all ranks; zero before first use.
// What peers write is written by one peer each.
struct alignas(128) Heap {
  BlockState block[LS_MAX_BLOCKS]; // own
  struct alignas(128) { u64 seq, start, arrived; u32 blocksDone; u32 pad[25]; } op; // own: operations ended; when this one began, and Slot.arrived by its first kernel; blocks of its kernel that have ended
  u32 flag[LS_PHASES][LS_MAX_BLOCKS][LS_MAX_RANKS]; // [source rank] = epoch of the source's block
  u32 here[LS_MAX_RANKS]; // [source rank] = direct pieces of lane 0, with the one that it has come for
  u32 pace;               // ps that a KiB takes of what this GPU sends by bulk copies, at least; 0: nothing
  u32 pad[23]; // lines are pushed by whole 128-byte lines of the cache
  u32 copied[2][LS_MAX_RANKS]; // [channel][source rank] = copy-engine transfers of the pair that have arrived
  u32 ready[2][LS_MAX_RANKS];  // [channel][destination rank] = those it is ready for
  u32 landed[LS_MAX_BLOCKS][LS_MAX_RANKS]; // [source rank] = tiles of ls_allreduce_pushbulk that it has pushed here, as BlockState.tiles counts them
  u32 taken[LS_MAX_BLOCKS][LS_MAX_RANKS];  // [destination rank] = those of this rank's that have left its ring
  struct alignas(128) { u32 sent, received, landed, taken; u32 pad[28]; } ring[LS_MAX_BLOCKS]; // own: chunks that a ring's kernels have sent to the next rank and received from the previous one; landed: from that one; taken: by the next
  Line target[LS_MAX_BLOCKS];              // where the root of a Reduce receives, as mapped here; the flag is its block's epoch
  Line ll[2][LS_MAX_BLOCKS][LS_MAX_RANKS][LS_LL_LINES];  // [epoch & 1][block][source]
  Line ll2[2][LS_MAX_BLOCKS][LS_MAX_RANKS][LS_LL_LINES]; // second stage of two-stage algorithms
  Line12 ll12[2][LS_MAX_BLOCKS][LS_MAX_RANKS * LS_LL12_LINES]; // [epoch & 1][block], each source's after the other's
  alignas(128) u64 read[LS_MAX_BLOCKS][LS_CHAIN_WARPS];           // of chains: steps of a warp that the next rank's has read
  alignas(128) u64x2 chain[LS_MAX_BLOCKS][LS_CHAIN_BYTES / 16];   // lines of chains, from the previous rank, each warp's after the other's
  LaneState lane[LS_MAX_RANKS][LS_LANES];   // own: [peer]
  u32 credit[LS_MAX_RANKS][LS_LANES];       // [destination] = LL pieces it has consumed
  u32 arrived[LS_MAX_RANKS][LS_LANES];      // [source] = direct pieces that are here
  Line offer[LS_MAX_RANKS][LS_LANES][2][2]; // [destination][lane][piece & 1]: where a direct piece shall go, and how much of it
  Line p2p[LS_MAX_RANKS][LS_LANES][2][LS_LANE_LINES]; // [source][lane][piece & 1]
  Item item[LS_MORE_ITEMS]; // own: of the list under way, what its parameter had no room for
};

// Slot is where an operation's stamps go: %globaltimer in ns, in memory of the
// flight recorder. Each half is one 16-byte store; the first is written when
// block 0 enters, the second at the end. A second half that is older than the
// first belongs to the slot's former operation.
struct alignas(32) Slot {
  u64 id;      // seq << 16 | desc; seq counts from 1
  u64 start;   // block 0 entered
  u64 arrived; // ns from start until the last peer was seen << 8 | that peer, 0xff when nobody came after
  u64 end;
};

// PeerRow is what each peer was to the operation of the same slot, by rank; nothing is
// stored of the rank itself. Each entry is one 16-byte store, made before the end.
struct PeerRow {
  struct alignas(16) {
    u32 came, there; // ns from Slot.start until the peer came, 0 when it was not waited for, and until the last of it was here
    u32 seq, trip;   // Slot.id's, its low 32 bits; ns that a read of the peer's memory took, 0: none was made
  } peer[LS_MAX_RANKS];
};

enum {
  LS_FIRST = 1, // Args.flags: the operation begins with this kernel
  LS_LAST = 2,  // it ends with it
  LS_MEET = 4,  // its ranks meet in this kernel first, after ls_mark has stamped its begin
};

// Args is every kernel's one parameter. Counts follow ccl/internal/algo.Call:
// elements of one rank's share for the collectives that have shares
// (AllGather, ReduceScatter, AlltoAll), of the whole otherwise; the movers'
// elements are bytes.
struct Args {
  u64 heap[LS_MAX_RANKS]; // Heap of each rank, as mapped here
  u64 send[LS_MAX_RANKS]; // each rank's send buffer as mapped here; only send[rank] is set where peers need no access
  u64 recv[LS_MAX_RANKS]; // likewise; of Reduce, on root alone: recv as each peer has mapped it, 0 when it has not
  u64 count;
  u64 slots;    // Slot[slotMask + 1], 0: not recorded
  u64 abort;    // u32 in host memory: not zero means leave
  u32 slotMask;
  u32 desc;     // which operation this is, for Slot.id
  u32 rank, ranks;
  u32 root;
  u32 op;       // record.RedOp
  u32 flags;
  u32 room;         // of Reduce: so many bytes of ring are for results that root cannot be sent in place
  u32 pace;         // of bulk copies to peers: ps that a KiB takes a block at least; 0: as fast as they go
  u32 peers;        // PeerRow[slotMask + 1] are at slots + 16 * peers; 0: none are told. For modules that make them (peers.h)
  u64 ring, stride; // rank r has memory for what peers push, as mapped here at ring + r * stride: of ls_allreduce_pushbulk and of rings LS_RING_BYTES
};

// Message is one send or receive of P2PArgs; one without blocks is none. It is
// cut in lanes as its size says, so that both sides agree; what else is here is
// this side's own business.
struct Message {
  u64 buffer; // as mapped here
  u64 bytes;
  u64 piece;  // bytes of a lane, the last of which may have fewer; by LL at most a lane's lines
  u64 target; // of a direct receive: buffer, or staging memory, as the sender has mapped it
  u64 stage;  // not 0: likewise, as mapped here, two places of room bytes for each lane
  u32 room;
  u32 peer, lanes;
  u32 direct;        // not LL
  u32 first, blocks; // the blocks that do it: as many as lanes for LL, one for a direct receive without staging
};

// P2PArgs is the parameter of the kernels that send and receive: at most one
// message each way with each peer, and none with the rank itself. Blocks of an LL
// send and an LL receive may be the same.
struct P2PArgs {
  u64 heaps, stride; // rank r's Heap, as mapped here, is at heaps + r * stride
  u64 slots, abort;  // slots to flags as in Args
  u32 slotMask, desc, rank, ranks, flags;
  u32 pace; // as in Args, of each block that pushes
  Message send[LS_MAX_MESSAGES], receive[LS_MAX_MESSAGES];
};

// Queue is messages of one peer, direction and kind, in their order: count items
// from begin on, which the blocks from first on do.
struct Queue {
  u64 target; // of direct receives: staging memory, as the sender has mapped it
  u32 begin, count;
  u16 first, blocks; // none: no queue
  u8 peer, send, direct, pad;
};

// P2PListArgs is the parameter of the kernels that send and receive any number of
// messages of each pair.
struct P2PListArgs {
  u64 heaps, stride; // as in P2PArgs, to flags
  u64 slots, abort;
  u32 slotMask, desc, rank, ranks, flags;
  u32 room;  // of staging memory: two such places for each lane
  u64 stage; // staging memory of direct receives, as mapped here, rank 0's first
  u32 items; // of all queues; those beyond LS_ITEMS are in the own heap
  u32 pace;
  Queue queue[LS_QUEUES];
  Item item[LS_ITEMS];
};

// ItemsArgs is ls_p2p_items' parameter: count items for the memory at to.
struct ItemsArgs {
  u64 to;
  u32 count, pad;
  Item item[LS_LOAD_ITEMS];
};

// ClockArgs is ls_clock's parameter.
struct ClockArgs {
  u64 word;  // u32 in host memory, first at the start, that the host changes
  u64 slot;  // 16 bytes in host memory: %globaltimer, and the word it answers
  u64 abort;
  u32 first, rounds;
  u64 turns; // looks at the word in all, before giving up
};

// DelayArgs is ls_delay's parameter.
struct DelayArgs { u64 ns, abort; };

// PatternArgs is ls_fill's and ls_check's parameter.
struct PatternArgs { u64 buffer, bytes, seed, wrong; }; // wrong: a u64 that ls_check adds the wrong bytes to

// What a message's halves of pinned memory have besides, for its alignment; and how
// many turns ls_staged makes between two looks for an abort, each over the bus anyhow.
enum { LS_STAGED_PAD = 64, LS_STAGED_PATIENCE = 64 };

// StagedMessage is a message of ls_staged, in pinned memory. Its pieces go through two places
// there in turn, half bytes and a pad each. Counts of pieces are of all messages
// from, or to, a peer: first is how many came before this one.
struct StagedMessage {
  u64 buffer, bytes; // in the GPU's memory
  u64 slot;          // the places
  u64 mine;          // u32: pieces that the GPU has copied
  u64 theirs;        // u32: pieces that the host has sent, or brought
  u64 after;         // 0, or a u32 that counts copies out of where this one's bytes go: they come first
  u32 half, first, afterFirst, send;
};

// StagedArgs is ls_staged's parameter.
struct StagedArgs {
  u64 abort, list; // StagedMessage[count]
  u32 count, pad;
};

// MarkArgs is ls_mark's parameter.
struct MarkArgs {
  u64 heap;         // this rank's
  u64 slot, id;     // the operation's
  u64 word;         // u32 in host memory that is then given count
  u32 count, flags; // LS_FIRST or LS_LAST
};

// FoldArgs is ls_fold's parameter. Where slots is not 0, ls_fold stamps as the
// other kernels do.
struct FoldArgs {
  u64 heap[LS_MAX_RANKS];
  u64 slots, abort; // slots to flags as in Args
  u32 slotMask, desc, rank, ranks, flags; // ranks: of the communicator, what Avg divides by
  u32 op;           // record.RedOp
  u64 src[LS_MAX_RANKS]; // what is reduced, in this order
  u64 dst;          // may be one of src
  u64 count;        // elements
  u32 k;            // sources, 1 to LS_MAX_RANKS
  u32 pad;
};
