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
// next one, so that loads of some overlap with stores of others. The last warp tells the
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
#else
  LS_RING_LANES = 32,
  LS_RING_WARPS = 16,
  LS_RING_CHUNK = 128 << 10, // bytes at most
  LS_RING_LEAST = 8 << 10,   // bytes at least, unless there is less to do: a pack for each thread
  LS_RING_SLOTS = 8,         // a chunk's way there, and its slot's way back, take a few chunks' time
  LS_RING_BATCH = 4,         // chunks of a part that follow each other where parts take turns: a part's way to the next rank takes their time
#endif
  LS_RING_UNROLL = 4, // loads that a thread has in flight of each buffer: with 8, a seventh slower
  LS_RING_TURNS = 4,  // chunks that a block shall have of each part, for ranks to overlap
  LS_RING_MOVERS = LS_RING_WARPS * LS_RING_LANES,
  LS_RING_THREADS = LS_RING_MOVERS + 32,
};

// pitch is from one slot to the next.
FI u32 pitch() { return blocks() * LS_RING_SLOTS * LS_RING_CHUNK <= LS_RING_BYTES ? u32(LS_RING_CHUNK) : LS_RING_CHUNK / 2; }
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

// Piece is a part of a chunk's way through a rank: from one of its sources, or both combined,
// to its targets; 0 is none.
struct Piece {
  u64 from, with; // with, the rank's own, comes second in what is combined
  u64 to, out;
  bool own; // from is the rank's own
};

// ringPacks moves packs of 16 bytes, from number i on, U at a time, while so many are left.
// Each thread has U loads in flight of each source. What comes may be looked at, and targets
// written, once ready has returned true; own data is loaded before. It returns where it stopped.
template <class T, int OP, bool BOTH, int U, class Ready> FI u32 ringPacks(u32 i, const Piece &p, u32 packs, const Scale<typename Elem<T>::Acc> &scale, const Ready &ready) {
  constexpr u32 STEP = LS_RING_MOVERS * 16;
#pragma unroll 1
  for (; i + (U - 1) * LS_RING_MOVERS < packs; i += U * LS_RING_MOVERS) {
    u32x4 x[U], y[U];
    u64 at = u64(i) * 16;
    if constexpr (BOTH) {
#pragma unroll
      for (int u = 0; u < U; u++) y[u] = get<u32x4>(p.with + at + u * STEP);
      loadedFirst();
      ready();
#pragma unroll
      for (int u = 0; u < U; u++) x[u] = get<u32x4>(p.from + at + u * STEP);
      loadedFirst();
#pragma unroll
      for (int u = 0; u < U; u++) {
        Pack16<T> sum(x[u]);
        sum.template reduce<OP>(Pack16<T>(y[u]));
        sum.finish(scale);
        x[u] = sum.bits16();
      }
    } else {
      if (!p.own) ready();
#pragma unroll
      for (int u = 0; u < U; u++) x[u] = get<u32x4>(p.from + at + u * STEP);
      loadedFirst();
      if (p.own) ready();
    }
    if (p.to) {
#pragma unroll
      for (int u = 0; u < U; u++) put<u32x4>(p.to + at + u * STEP, x[u]);
    }
    if (p.out) {
#pragma unroll
      for (int u = 0; u < U; u++) put<u32x4>(p.out + at + u * STEP, x[u]);
    }
  }
  return i;
}

// ringElements moves single elements [first, count): the end of a buffer, or all of one that
// is not aligned to 16 bytes.
template <class T, int OP, bool BOTH> FI void ringElements(const Piece &p, u32 first, u32 count, const Scale<typename Elem<T>::Acc> &scale) {
  using Raw = typename RawOf<sizeof(T)>::type;
  constexpr int U = 4;
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
      if (p.out) put<Raw>(p.out + at, x[u]);
    }
  }
}

// ringWords moves bytes [first, bytes) as words W, as far as they are whole. It returns where it
// stopped. first and addresses are multiples of a word.
template <class W> FI u32 ringWords(const Piece &p, u32 first, u32 bytes) {
  if (first / sizeof(W) < bytes / sizeof(W)) ringElements<W, LS_SUM, false>(p, first / sizeof(W), bytes / sizeof(W), Scale<typename Elem<W>::Acc>(LS_SUM, 1));
  return bytes - bytes % u32(sizeof(W));
}

// ringMove moves a piece of bytes once ready has returned true. False: it has not.
template <class T, int OP, bool BOTH, class Ready> FI bool ringMove(const Piece &p, u32 bytes, const Scale<typename Elem<T>::Acc> &scale, const Ready &ready) {
  constexpr int U = BOTH && sizeof(T) == 1 ? LS_RING_UNROLL / 2 : LS_RING_UNROLL; // a pack of these fills more registers
  u32 packs = (p.from | p.with | p.to | p.out) & 15 ? 0 : bytes / 16, first = packs * u32(16 / sizeof(T)), count = bytes / u32(sizeof(T));
  // All lanes of a warp have to come to ready together.
  bool early = packs >= U * LS_RING_MOVERS, there = !early && ready();
  if (!early && !there) return false;
  u32 i = tid();
  if (early) {
    i = ringPacks<T, OP, BOTH, U>(i, p, U * LS_RING_MOVERS, scale, [&]() __attribute__((always_inline)) { there = ready(); });
    if (!there) return false; // what was moved does not count
  }
  auto is = []() __attribute__((always_inline)) {};
  i = ringPacks<T, OP, BOTH, U>(i, p, packs, scale, is);
  ringPacks<T, OP, BOTH, 1>(i, p, packs, scale, is);
  if constexpr (!BOTH && sizeof(T) == 1) { // bytes that are only moved need not go one by one
    u64 all = p.from | p.to | p.out;
    if (all % 4 == 0) first = ringWords<u32>(p, first, count);
    else if (all % 2 == 0) first = ringWords<u16>(p, first, count);
  }
  if (first < count) ringElements<T, OP, BOTH>(p, first, count, scale);
  return true;
}

// Ring is what a thread that moves data knows of its block's part.
struct Ring {
  const Args &a;
  u32 next, sent, received; // chunks of this kernel
  u32 room, landed;         // of which so many may be sent, and have come, as far as is known
  u32 sentBefore, receivedBefore;
  Pace pace;

  FI explicit Ring(const Args &a)
      : a(a), next(a.rank + 1 == a.ranks ? 0 : a.rank + 1), sent(0), received(0), room(LS_RING_SLOTS), landed(0),
        sentBefore(heap(a, a.rank)->ring[block()].sent), receivedBefore(heap(a, a.rank)->ring[block()].received), pace(a.pace, LS_RING_WARPS) {}

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

  // chunk moves bytes: of own and, if receive, of what comes; to the next rank if send,
  // and to out. False: aborted.
  template <class Move> FI bool chunk(bool receive, bool send, u64 own, u64 out, u32 bytes, const Move &move) {
    if (bytes == 0) return true; // for all ranks alike
    auto ready = [&]() __attribute__((always_inline)) {
      const auto &counts = heap(a, a.rank)->ring[block()];
      bool ok = !receive || reached(&counts.landed, receivedBefore, received, 0, landed);
      ok = ok && (!send || reached(&counts.taken, sentBefore, sent, LS_RING_SLOTS, room));
      if (!allLanes(ok)) return false;
      if (send) pace.take((bytes + LS_RING_WARPS - 1) / LS_RING_WARPS);
      return true;
    };
    if (!move(receive ? slot(a.rank, received) : 0, own, send ? slot(next, sent) : 0, out, bytes, ready)) return false;
    syncLanes();
    if (receive) done(ringProgress.received[received++ % LS_RING_SLOTS]);
    if (send) done(ringProgress.sent[sent++ % LS_RING_SLOTS]);
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

// ringChunk is the size of chunks where blocks share bytes of each of so many parts.
FI u32 ringChunk(u64 bytes) {
  u64 share = upTo(bytes / (u64(blocks()) * LS_RING_TURNS), LS_RING_LEAST);
  return u32(share < LS_RING_LEAST ? LS_RING_LEAST : least(share, pitch()));
}

// inRing runs an operation: pass has each warp that moves data do all of its chunks, and
// returns false if it was aborted.
template <class Pass> FI void inRing(const Args &a, const Pass &pass) {
  Op op(a);
  for (u32 i = tid(); i < sizeof ringProgress / 4; i += threads()) ((u32 *)&ringProgress)[i] = 0;
  if (!op.enter()) return; // behind a barrier
  Ring ring(a);
  bool ok = true;
  if (tid() < LS_RING_MOVERS) {
    ok = pass(ring);
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

// RingCopy is a chunk's way through a rank that combines nothing.
struct RingCopy {
  template <class Ready> FI bool operator()(u64 in, u64 own, u64 to, u64 out, u32 bytes, const Ready &ready) const {
    return ringMove<u8, LS_SUM, false>({in ? in : own, 0, to, out, !in}, bytes, Scale<u8>(LS_SUM, 1), ready);
  }
};

// broadcastRing is ls_broadcast_ring: count bytes, from root's send to every recv.
FI void broadcastRing(const Args &a) {
  inRing(a, [&](Ring &ring) __attribute__((always_inline)) {
    bool root = a.rank == a.root, send = ring.next != a.root;
    u64 own = root ? a.send[a.rank] : 0, out = root && own == a.recv[a.rank] ? 0 : a.recv[a.rank];
    Tiles tiles(a.count, 1, ringChunk(a.count));
    for (u64 step = 0, n = tiles.steps(0); step < n; step++) {
      u64 at = tiles.first(step, 0);
      if (!ring.chunk(!root, send, own ? own + at : 0, out ? out + at : 0, tiles.length(at), RingCopy{})) return false;
    }
    return true;
  });
}

#if !defined(LS_TYPE) || defined(LS_HOST)
KERNEL(LS_RING_THREADS) void ls_broadcast_ring(Args a) { broadcastRing(a); }
#endif

#if defined(LS_TYPE) && !defined(LS_WIDENED)
// RingCombine is a chunk's way through a rank. An average is divided where its sum is whole.
struct RingCombine {
  u32 op, ranks;
  FI RingCombine(const Args &a, bool whole) : op(a.op == LS_AVG && !whole ? u32(LS_SUM) : a.op), ranks(a.ranks) {}
  template <class Ready> FI bool operator()(u64 in, u64 own, u64 to, u64 out, u32 bytes, const Ready &ready) const {
    Scale<typename Elem<LS_TYPE>::Acc> scale(op, ranks);
    bool ok = false;
    if (in && own) LS_DISPATCH_OP(op, (ok = ringMove<LS_TYPE, OP, true>({in, own, to, out, false}, bytes, scale, ready)))
    else ok = ringMove<LS_TYPE, LS_SUM, false>({in ? in : own, 0, to, out, !in}, bytes, scale, ready);
    return ok;
  }
};

// ls_allreduce_ring: count elements, send to recv. Each rank's part goes round once to be
// summed, beginning with the rank after the one that the part belongs to, and once more as
// a result.
KERNEL(LS_RING_THREADS) void ls_allreduce_ring(Args a) {
  inRing(a, [&](Ring &ring) __attribute__((always_inline)) {
    u32 n = a.ranks;
    u64 bytes = a.count * sizeof(LS_TYPE);
    Tiles tiles(bytes, n, ringChunk(bytes / n));
    for (u64 batch = 0, rounds = tiles.rounds(); batch < rounds; batch += LS_RING_BATCH) {
      for (u32 turn = 0, part = ring.previous(); turn < 2 * n - 1; turn++) {
#pragma unroll 1
        for (u64 step = batch; step < batch + LS_RING_BATCH; step++) {
          u64 at = tiles.first(step, part);
          if (!ring.chunk(turn > 0, turn < 2 * n - 2, turn < n ? a.send[a.rank] + at : 0, turn + 1 < n ? 0 : a.recv[a.rank] + at, tiles.length(at),
                          RingCombine(a, turn + 1 == n)))
            return false;
        }
        part = (part == 0 ? n : part) - 1;
      }
    }
    return true;
  });
}

// ls_reducescatter_ring: count elements a rank.
KERNEL(LS_RING_THREADS) void ls_reducescatter_ring(Args a) {
  inRing(a, [&](Ring &ring) __attribute__((always_inline)) {
    u64 bytes = a.count * sizeof(LS_TYPE);
    Tiles tiles(bytes, 1, ringChunk(bytes));
    for (u64 batch = 0, steps = tiles.steps(0); batch < steps; batch += LS_RING_BATCH) {
      for (u32 turn = 0, part = ring.previous(); turn < a.ranks; turn++) {
        bool whole = turn + 1 == a.ranks;
#pragma unroll 1
        for (u64 step = batch; step < batch + LS_RING_BATCH; step++) {
          u64 at = tiles.first(step, 0);
          if (!ring.chunk(turn > 0, !whole, a.send[a.rank] + part * bytes + at, whole ? a.recv[a.rank] + at : 0, tiles.length(at), RingCombine(a, whole))) return false;
        }
        part = (part == 0 ? a.ranks : part) - 1;
      }
    }
    return true;
  });
}

// ls_reduce_ring: count elements. A chain, from the rank after root to root.
KERNEL(LS_RING_THREADS) void ls_reduce_ring(Args a) {
  inRing(a, [&](Ring &ring) __attribute__((always_inline)) {
    bool root = a.rank == a.root, first = ring.previous() == a.root;
    u64 bytes = a.count * sizeof(LS_TYPE);
    Tiles tiles(bytes, 1, ringChunk(bytes));
    for (u64 step = 0, steps = tiles.steps(0); step < steps; step++) {
      u64 at = tiles.first(step, 0);
      if (!ring.chunk(!first, !root, a.send[a.rank] + at, root ? a.recv[a.rank] + at : 0, tiles.length(at), RingCombine(a, root))) return false;
    }
    return true;
  });
}
#endif
