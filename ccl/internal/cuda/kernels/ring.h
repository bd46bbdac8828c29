// Collectives that pass chunks round a ring of ranks, by ordinary loads and stores.
// Every rank pushes to the next one alone, into slots in that one's staging memory; what
// has come is combined with the rank's own, and goes on. Peers touch staging memory only,
// so buffers may be anybody's, in windows or not.
//
// A block of a rank speaks with the same block of the next and of the previous rank. Chunk
// k that a block sends has slot k % LS_RING_SLOTS. The sender counts, in landed at the
// receiver, chunks that are there; the receiver counts, in taken at the sender, those that
// it has read. Both count on from one kernel to the next, and nothing is under way when a
// kernel ends.
//
// All warps but one move data. Each has a part of every chunk and goes on by itself to the
// next one, so that loads of some overlap with stores of others. What a chunk
// needs is on its way to shared memory while the one before is moved, as far as it is there:
// links, whose bytes take a microsecond, need more in flight than registers hold. The last warp tells the
// neighbours of chunks with which all warps are done: the fence for that takes about as
// long as a chunk.
//
// A sum begins with the rank after the one where it ends, and goes on round the ring. It
// passes links in its own type, so there are no such kernels for types that are
// accumulated in a wider one.
#pragma once
#include "op.h"
#include "pace.h"
#include "types.h"
#include "vector.h"

enum {
#ifdef LS_HOST
  LS_RING_LANES = 1, // of a warp: few threads to start
  LS_RING_WARPS = 2, // that move data
  LS_RING_CHUNK = 1 << 10,
  LS_RING_LEAST = 128,
  LS_RING_SLOTS = 3, // slots are used again soon
  LS_RING_BATCH = 2,
  LS_RING_ROWS = 4,
#else
  LS_RING_LANES = 32,
#ifdef LS_TYPE
  LS_RING_WARPS = 15,        // with the one that tells 16: of 17, a thread has a quarter fewer registers
  LS_RING_CHUNK = 120 << 10, // bytes at most
#else
  LS_RING_WARPS = 16,        // nothing is combined, which takes registers
  LS_RING_CHUNK = 128 << 10,
#endif
  LS_RING_LEAST = LS_RING_WARPS * 512, // bytes at least, unless there is less to do: a pack for each thread
  LS_RING_SLOTS = 8,         // a chunk's way there, and its slot's way back, take a few chunks' time
  LS_RING_BATCH = 4,         // chunks of a part that follow each other where parts take turns: a part's way to the next rank takes their time
  LS_RING_ROWS = 6,          // packs that a thread has in flight of each source: 96 KiB of a block, which any multiprocessor has
#endif
  LS_RING_TURNS = 4,  // chunks that a block shall have of each part, for ranks to overlap
  LS_RING_MOVERS = LS_RING_WARPS * LS_RING_LANES,
  LS_RING_THREADS = LS_RING_MOVERS + 32,
  LS_RING_SHARED = 2 * LS_RING_ROWS * LS_RING_MOVERS * 16,
};

// pitch is from one slot to the next.
FI u32 pitch() { return blocks() * LS_RING_SLOTS * LS_RING_CHUNK <= LS_RING_BYTES ? u32(LS_RING_CHUNK) : LS_RING_CHUNK / 2; }
static_assert(LS_RING_SHARED <= 96 << 10); // as it is launched (launch.go)
static_assert(LS_RING_BATCH < LS_RING_SLOTS); // or ranks that send a batch would wait for each other
static_assert(u64(LS_MAX_BLOCKS) * LS_RING_SLOTS * LS_RING_CHUNK / 2 <= LS_RING_BYTES);

// RingProgress is the block's: how many warps are done with the chunk of a slot, and with
// everything. A warp cannot come to a slot's next chunk before the slot was told of.
struct RingProgress { u32 sent[LS_RING_SLOTS], received[LS_RING_SLOTS], ended; };
#ifdef LS_HOST
#define ringProgress (*(RingProgress *)(emulated.shared->memory + 72))
#else
static __shared__ RingProgress ringProgress;
#endif

// Piece is a part of a chunk: from one of its sources, or both combined, to its targets; 0 is none.
struct Piece {
  u64 from, with; // with, the rank's own, comes second in what is combined
  u64 to, out;
};

// Ahead is packs of a source that are on their way to shared memory while what precedes them is
// moved: a row of them for each thread, at its places. A place is free as soon as the thread
// has read it.
enum { OWN, ARRIVED };
template <u32 SOURCE> struct Ahead {
  u64 from;
  u32 packs;

  FI static Ahead none() { return {0, 0}; }
  static FI u32 place(u32 row) { return (SOURCE * LS_RING_ROWS + row) * LS_RING_MOVERS + tid(); }
  static FI u32 pack(u32 row) { return row * LS_RING_MOVERS + tid(); }
  FI void load(u32 row) const {
    if (pack(row) >= packs) return;
    u64 at = from + u64(pack(row)) * 16;
    SOURCE == OWN ? copyAsyncOnce(place(row), at) : copyAsync(place(row), at);
  }
  FI void load() const {
#pragma unroll
    for (u32 row = 0; row < LS_RING_ROWS; row++) load(row);
  }
  // following is what comes after the first rows.
  FI Ahead following() const {
    constexpr u32 ALL = LS_RING_ROWS * LS_RING_MOVERS;
    return packs > ALL ? Ahead{from + u64(ALL) * 16, packs - ALL} : none();
  }
};
using Own = Ahead<OWN>;
using Arrived = Ahead<ARRIVED>;

// Chunk is a chunk's way through a rank: what comes, if receive, combined with own, if there
// is such, goes to the next rank if send, and to out, if there is such. whole: it is a result.
struct Chunk {
  u64 own, out;
  u32 bytes;
  bool receive, send, whole;
  // packs are whole 16 bytes; none where buffers are not aligned. (Slots are.)
  FI u32 packs() const { return (own | out) & 15 ? 0 : bytes / 16; }
  FI Own ahead() const { return {own, own ? packs() : 0}; }
};

// ringPacks moves packs of 16 bytes, whose first rows are loaded ahead, and loads ahead the
// first rows of what comes then.
template <class T, int OP, bool BOTH> FI void ringPacks(const Piece &p, u32 packs, Own own, Arrived arrived, Own thenOwn, Arrived thenArrived, const Scale<typename Elem<T>::Acc> &scale) {
  bool mine = own.packs > 0;
#pragma unroll 1
  for (u32 first = 0; first < packs; first += LS_RING_ROWS * LS_RING_MOVERS) {
    own = own.following(), arrived = arrived.following();
    Own nextOwn = own;
    Arrived nextArrived = arrived;
    if (own.packs == 0) nextOwn = thenOwn, thenOwn = Own::none();
    if (arrived.packs == 0) nextArrived = thenArrived, thenArrived = Arrived::none();
    copiedAsync();
#pragma unroll
    for (u32 row = 0; row < LS_RING_ROWS; row++) {
      u32x4 x = atPlace(BOTH || !mine ? Arrived::place(row) : Own::place(row));
      if constexpr (BOTH) {
        Pack16<T> sum(x);
        sum.template reduce<OP>(Pack16<T>(atPlace(Own::place(row))));
        sum.finish(scale);
        x = sum.bits16();
      }
      nextOwn.load(row);
      nextArrived.load(row);
      u32 i = first + Own::pack(row);
      if (i >= packs) continue;
      if (p.to) put<u32x4>(p.to + u64(i) * 16, x);
      if (p.out) putOnce<u32x4>(p.out + u64(i) * 16, x);
    }
  }
}

// ringElements moves single elements [first, count): the end of a buffer, or all of one that
// is not aligned to 16 bytes.
template <class T, int OP, bool BOTH> FI void ringElements(const Piece &p, u32 first, u32 count, const Scale<typename Elem<T>::Acc> &scale) {
  using Raw = typename RawOf<sizeof(T)>::type;
  constexpr int U = 6;
#pragma unroll 1
  for (u32 i = first + tid(); i < count; i += LS_RING_MOVERS * U) {
    Raw x[U], y[U];
#pragma unroll
    for (int u = 0; u < U; u++) { // past the end the last one instead: a branch would make the next load wait
      u64 at = least(i + u * LS_RING_MOVERS, count - 1) * sizeof(T);
      x[u] = get<Raw>(p.from + at);
      if constexpr (BOTH) y[u] = get<Raw>(p.with + at);
    }
    loadedFirst();
#pragma unroll
    for (int u = 0; u < U; u++) {
      if (i + u * LS_RING_MOVERS >= count) continue;
      u64 at = u64(i + u * LS_RING_MOVERS) * sizeof(T);
      if constexpr (BOTH) x[u] = __builtin_bit_cast(Raw, T(scale(combine<OP>(__builtin_bit_cast(T, x[u]), __builtin_bit_cast(T, y[u])))));
      if (p.to) put<Raw>(p.to + at, x[u]);
      if (p.out) putOnce<Raw>(p.out + at, x[u]);
    }
  }
}

// ringWords moves bytes [first, bytes) as words W, as far as they are whole. It returns where it
// stopped. first and addresses are multiples of a word.
template <class W> FI u32 ringWords(const Piece &p, u32 first, u32 bytes) {
  if (first / sizeof(W) < bytes / sizeof(W)) ringElements<W, LS_SUM, false>(p, first / sizeof(W), bytes / sizeof(W), Scale<typename Elem<W>::Acc>(LS_SUM, 1));
  return bytes - bytes % u32(sizeof(W));
}

// ringMove moves a chunk.
template <class T, int OP, bool BOTH> FI void ringMove(const Piece &p, const Chunk &c, Arrived arrived, Own thenOwn, Arrived thenArrived, const Scale<typename Elem<T>::Acc> &scale) {
  u32 packs = c.packs(), first = packs * u32(16 / sizeof(T)), count = c.bytes / u32(sizeof(T));
  if (packs > 0) ringPacks<T, OP, BOTH>(p, packs, c.ahead(), arrived, thenOwn, thenArrived, scale);
  else thenOwn.load(), thenArrived.load();
  if constexpr (!BOTH && sizeof(T) == 1) { // bytes that are only moved need not go one by one
    u64 all = p.from | p.to | p.out;
    if (all % 4 == 0) first = ringWords<u32>(p, first, count);
    else if (all % 2 == 0) first = ringWords<u16>(p, first, count);
  }
  if (first < count) ringElements<T, OP, BOTH>(p, first, count, scale);
}

// Ring is what a thread that moves data knows of its block's part.
struct Ring {
  const Args &a;
  u32 next, sent, received; // chunks of this kernel
  u32 room, landed;         // of which so many may be sent, and have come, as far as is known
  u32 sentBefore, receivedBefore;
  bool early; // what arrived of the chunk that is next is loaded ahead
  Pace pace;

  FI explicit Ring(const Args &a)
      : a(a), next(a.rank + 1 == a.ranks ? 0 : a.rank + 1), sent(0), received(0), room(LS_RING_SLOTS), landed(0),
        sentBefore(heap(a, a.rank)->ring[block()].sent), receivedBefore(heap(a, a.rank)->ring[block()].received), early(false), pace(a.pace, LS_RING_WARPS) {}

  FI u32 previous() const { return (a.rank == 0 ? a.ranks : a.rank) - 1; }
  // slot is where rank r keeps chunk k of this block.
  FI u64 slot(u32 r, u32 k) const { return a.ring + r * a.stride + (u64(block()) * LS_RING_SLOTS + k % LS_RING_SLOTS) * pitch(); }

  // reached waits until *count, less before, is more than k, and sets known to it.
  FI bool reached(const u32 *count, u32 before, u32 k, u32 slots, u32 &known) const {
    for (u32 turn = 1; known <= k; turn++) {
      known = loadAcquire(count) - before + slots;
      if (known > k) break;
      relax();
      if (turn % LS_PATIENCE == 0 && aborted(a)) return false;
    }
    return true;
  }

  // chunk moves one, and loads ahead of then what is there. False: aborted.
  template <class Move> FI bool chunk(const Chunk &c, const Chunk &then, const Move &move) {
    const auto &counts = heap(a, a.rank)->ring[block()];
    bool ok = !c.receive || reached(&counts.landed, receivedBefore, received, 0, landed);
    ok = ok && (!c.send || reached(&counts.taken, sentBefore, sent, LS_RING_SLOTS, room));
    if (!allLanes(ok)) return false;
    if (c.send) pace.take((c.bytes + LS_RING_WARPS - 1) / LS_RING_WARPS);
    u64 in = c.receive ? slot(a.rank, received) : 0;
    Arrived arrived{in, in ? c.packs() : 0}, thenArrived = Arrived::none();
    if (!early) arrived.load();
    u32 k = received + c.receive;
    early = then.receive && landed > k;
    if (early) thenArrived = {slot(a.rank, k), then.packs()};
    move(c, in, c.send ? slot(next, sent) : 0, arrived, then.ahead(), thenArrived);
    syncLanes();
    if (c.receive) done(ringProgress.received[received++ % LS_RING_SLOTS]);
    if (c.send) done(ringProgress.sent[sent++ % LS_RING_SLOTS]);
    return true;
  }
  FI void done(u32 &count) const {
    if (tid() % LS_RING_LANES == 0) addInBlock(&count, 1);
  }

  // tell is the other warp's work, of one thread: it tells the neighbours of chunks until
  // all warps are done.
  FI void tell() {
    auto all = [](u32 &count) {
      if (loadInBlock(&count) != LS_RING_WARPS) return false;
      storeInBlock(&count, 0);
      return true;
    };
    for (;;) {
      bool last = loadInBlock(&ringProgress.ended) == LS_RING_WARPS;
      u32 r = received, s = sent;
      while (all(ringProgress.received[received % LS_RING_SLOTS])) received++;
      while (all(ringProgress.sent[sent % LS_RING_SLOTS])) sent++;
      if (r == received && s == sent) {
        if (last) return;
        relax();
        continue;
      }
      // Reading is over when its values are there: no fence has to hold the word back.
      if (r != received) storeVolatile(&heap(a, previous())->ring[block()].taken, receivedBefore + received);
      if (s != sent) storeRelease(&heap(a, next)->ring[block()].landed, sentBefore + sent);
    }
  }
};

// ringChunk is the size of chunks where blocks share bytes: as large as may be, but that each
// block has several, a multiple of batch, and about as many as any other.
FI u32 ringChunk(u64 bytes, u32 batch = 1) {
  u64 most = pitch(), share = (bytes + blocks() - 1) / blocks(), turns = (share + most - 1) / most;
  turns = upTo(turns < LS_RING_TURNS ? LS_RING_TURNS : turns, batch);
  u64 chunk = upTo((share + turns - 1) / turns, LS_RING_LEAST);
  return u32(chunk < LS_RING_LEAST ? LS_RING_LEAST : least(chunk, pitch()));
}

// inRing runs an operation: way makes one chunk after the other, false when there are no
// more, and each warp that moves data moves them.
template <class Way, class Move> FI void inRing(const Args &a, const Way &ways, const Move &move) {
  Op op(a);
  for (u32 i = tid(); i < sizeof ringProgress / 4; i += threads()) ((u32 *)&ringProgress)[i] = 0;
  if (!op.enter()) return; // behind a barrier
  Ring ring(a);
  bool ok = true;
  if (tid() < LS_RING_MOVERS) {
    Way way = ways;
    Chunk c{}, then{};
    bool more = way.next(c);
    c.ahead().load();
#pragma unroll 1
    while (more && ok) {
      more = way.next(then);
      if (!more) then = Chunk{};
      ok = ring.chunk(c, then, move);
      c = then;
    }
    copiedAsync(); // of those that are aborted
    if (tid() % LS_RING_LANES == 0) addInBlock(&ringProgress.ended, 1);
  } else if (tid() == LS_RING_MOVERS) {
    ring.tell();
  }
  syncLanes();
  if (syncOr(!ok)) return op.stamps.stopped();
  if (tid() == 0) {
    auto &counts = heap(a, a.rank)->ring[block()];
    counts.sent = ring.sentBefore + ring.sent, counts.received = ring.receivedBefore + ring.received;
  }
  op.leave();
}

// RingCopy moves a chunk and combines nothing.
struct RingCopy {
  FI void operator()(const Chunk &c, u64 in, u64 to, Arrived arrived, Own thenOwn, Arrived thenArrived) const {
    ringMove<u8, LS_SUM, false>({in ? in : c.own, 0, to, c.out}, c, arrived, thenOwn, thenArrived, Scale<u8>(LS_SUM, 1));
  }
};

// Chain is the chunks of a Broadcast, from root on, or of a Reduce, which ends there.
struct Chain {
  Tiles tiles;
  u32 step, steps;
  Chunk c; // of the beginning of the buffers
  FI Chain(const Args &a, u64 bytes, const Chunk &c) : tiles(bytes, 1, ringChunk(bytes)), step(0), steps(u32(tiles.steps(0))), c(c) {}
  FI bool next(Chunk &to) {
    if (step == steps) return false;
    u64 at = tiles.first(step++, 0);
    to = c;
    if (c.own) to.own += at;
    if (c.out) to.out += at;
    to.bytes = tiles.length(at);
    return true;
  }
};

// What goes round: sums that all ranks get (AllReduce), or one each (ReduceScatter), or parts as
// they are (AllGather).
enum { LS_ROUND_SUM, LS_ROUND_SCATTER, LS_ROUND_GATHER };

// Round is the chunks of what goes round, of bytes that a rank has or gets. A part is summed on
// its way once round, beginning with the rank after the one that it belongs to; an AllReduce's
// goes once more, and an AllGather's goes once, as a result. LS_RING_BATCH chunks of a part follow
// each other. A batch's last turn sends nothing, and the first one of the next batch receives
// nothing: their chunks alternate, so that the links are not idle meanwhile.
template <int ROUND> struct Round {
  static constexpr bool GATHER = ROUND == LS_ROUND_GATHER;
  Tiles tiles; // of an AllReduce they belong to ranks in turn
  u64 send, recv, bytes;
  u32 batch, step, end, ranks, rank, turn, turns, part;
  bool early, placed; // the next batch's chunk comes next; an AllGather's own part is in its place

  FI Round(const Args &a, u64 bytes)
      : tiles(bytes, ROUND == LS_ROUND_SUM ? a.ranks : 1, ringChunk(bytes / (ROUND == LS_ROUND_SUM ? a.ranks : 1), LS_RING_BATCH)), send(a.send[a.rank]), recv(a.recv[a.rank]), bytes(bytes),
        batch(0), step(0), end(u32(tiles.rounds())), ranks(a.ranks), rank(a.rank), turn(0), turns(ROUND == LS_ROUND_SUM ? 2 * a.ranks - 1 : a.ranks), part(first()), early(false),
        placed(send == recv + rank * bytes) {}

  FI u32 previous(u32 r) const { return (r == 0 ? ranks : r) - 1; }
  FI u32 first() const { return GATHER ? rank : previous(rank); } // the part of the first turn
  FI Chunk chunk(u32 turn, u32 part, u32 step) const {
    u64 at = tiles.first(step, ROUND == LS_ROUND_SUM ? part : 0);
    bool own = turn < (GATHER ? 1 : ranks), out = GATHER ? turn > 0 || !placed : turn + 1 >= ranks;
    return {own ? send + (ROUND == LS_ROUND_SCATTER ? part * bytes : 0) + at : 0, out ? recv + (GATHER ? part * bytes : 0) + at : 0, tiles.length(at), turn > 0, turn + 1 < turns, turn + 1 == ranks};
  }
  FI bool next(Chunk &c) {
    while (batch < end) {
      bool last = turn + 1 == turns;
      if (early) c = chunk(0, first(), step + LS_RING_BATCH);
      else c = chunk(turn, part, step);
      early = last && !early;
      if (!early && ++step == batch + LS_RING_BATCH) {
        step = batch, part = previous(part), turn++;
        if (last) {
          step = batch += LS_RING_BATCH, part = previous(first()), turn = 1; // its turn 0 has been, early
        }
      }
      if (c.bytes > 0) return true; // the end of the buffer, for all ranks alike
    }
    return false;
  }
};

// broadcastRing is ls_broadcast_ring: count bytes, from root's send to every recv.
FI void broadcastRing(const Args &a) {
  bool root = a.rank == a.root, send = (a.rank + 1) % a.ranks != a.root;
  u64 own = root ? a.send[a.rank] : 0, out = root && own == a.recv[a.rank] ? 0 : a.recv[a.rank];
  inRing(a, Chain(a, a.count, {own, out, 0, !root, send, true}), RingCopy{});
}

#if !defined(LS_TYPE) || defined(LS_HOST)
KERNEL(LS_RING_THREADS) void ls_broadcast_ring(Args a) { broadcastRing(a); }

// ls_allgather_ring: count bytes a rank.
KERNEL(LS_RING_THREADS) void ls_allgather_ring(Args a) { inRing(a, Round<LS_ROUND_GATHER>(a, a.count), RingCopy{}); }
#endif

#if defined(LS_TYPE) && !defined(LS_WIDENED)
// RingCombine moves a chunk, combined with the rank's own. An average is divided where its sum
// is whole.
struct RingCombine {
  u32 op, ranks;
  FI RingCombine(const Args &a) : op(a.op), ranks(a.ranks) {}
  FI void operator()(const Chunk &c, u64 in, u64 to, Arrived arrived, Own thenOwn, Arrived thenArrived) const {
    u32 o = op == LS_AVG && !c.whole ? u32(LS_SUM) : op;
    Scale<typename Elem<LS_TYPE>::Acc> scale(o, ranks);
    if (in && c.own) LS_DISPATCH_OP(o, (ringMove<LS_TYPE, OP, true>({in, c.own, to, c.out}, c, arrived, thenOwn, thenArrived, scale)))
    else ringMove<LS_TYPE, LS_SUM, false>({in ? in : c.own, 0, to, c.out}, c, arrived, thenOwn, thenArrived, scale);
  }
};

// ls_allreduce_ring: count elements, send to recv.
KERNEL(LS_RING_THREADS) void ls_allreduce_ring(Args a) { inRing(a, Round<LS_ROUND_SUM>(a, a.count * sizeof(LS_TYPE)), RingCombine(a)); }

// ls_reducescatter_ring: count elements a rank.
KERNEL(LS_RING_THREADS) void ls_reducescatter_ring(Args a) { inRing(a, Round<LS_ROUND_SCATTER>(a, a.count * sizeof(LS_TYPE)), RingCombine(a)); }

// ls_reduce_ring: count elements. A chain, from the rank after root to root.
KERNEL(LS_RING_THREADS) void ls_reduce_ring(Args a) {
  bool root = a.rank == a.root, first = a.rank == (a.root + 1) % a.ranks;
  inRing(a, Chain(a, a.count * sizeof(LS_TYPE), {a.send[a.rank], root ? a.recv[a.rank] : 0, 0, !first, !root, root}), RingCombine(a));
}
#endif
