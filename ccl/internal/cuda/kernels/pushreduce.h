// AllReduce of large buffers without loads from peers, by bulk copies of sm_90.
// Every rank sends its part of a tile to the tile's owner, into a ring of slots in
// the owner's staging memory; the owner reduces from there, near, and sends the
// result to everyone. The rings are small, so that they stay in the L2 cache.
//
// Tile k of a pair of ranks has slot k % LS_PUSHREDUCE_SLOTS. Its source counts, in
// landed at the owner, tiles that are there; the owner counts, in taken at the
// source, those that it has read. Both count on from one kernel to the next and end
// each at the same number for all pairs, so that nobody needs to know what ran
// before.
//
// Each warp but the workers' has one part, of which a thread does what concerns one
// peer. Tiles for a peer pass through stages of their own in shared memory; what is
// reduced has stages of a tile of each source, combined into the first of them.
// Order of reduction, accumulators and what is outside of 16-byte packs are as in
// sym.h, so results are the same.
#pragma once
#include "pace.h"
#include "sym.h"

#ifdef LS_BULK
enum {
#ifdef LS_HOST
  LS_PUSHREDUCE_WORKERS = 32, // fewer threads to start, and tiles enough for slots to be used again
  LS_PART_THREADS = LS_MAX_RANKS,
  LS_PUSHREDUCE_TURN = 2 << 10,
  LS_PUSHREDUCE_LEAST = 128,
  LS_PUSHREDUCE_SLOTS = 3,
#else
  LS_PUSHREDUCE_WORKERS = 128,
  LS_PART_THREADS = 32,
  LS_PUSHREDUCE_TURN = 32 << 10, // bytes of a tile of each rank at most
  LS_PUSHREDUCE_LEAST = 2 << 10, // bytes of a tile at least, unless there is less to do
  LS_PUSHREDUCE_SLOTS = 16,      // tiles of a pair of ranks that are under way
#endif
  LS_PUSHREDUCE_TURNS = 8, // tiles of each owner that a block shall have, for its parts to overlap
  LS_PART_LOAD = 0,        // fills peers' stages with tiles of send
  LS_PART_PUSH = 1,        // and empties them to their rings
  LS_PART_COLLECT = 2,     // fills stages with tiles of all sources
  LS_PART_DELIVER = 3,     // and takes the result to everyone
  LS_PART_LANDED = 4,      // tells owners what has been pushed: the fence takes longer than a tile
  LS_PART_TAKEN = 5,       // tells sources what has been read
  LS_PARTS = 6,
  LS_PUSHREDUCE_THREADS = (LS_PUSHREDUCE_WORKERS + LS_PARTS * LS_PART_THREADS + 31) / 32 * 32,
  LS_PUSHREDUCE_FLOW = 2,        // stages for a peer
  LS_PUSHREDUCE_STAGES = 8,      // of what is reduced, at most; as many as dynamic shared memory has room for
  LS_PUSHREDUCE_WORDS = 1 << 10, // bytes before the stages: mbarriers, and words
  LS_PUSHREDUCE_FLIGHT = 2,      // tiles for a peer that are on their way before the first has to be there
  LS_STOP_NS = 100000,           // that a block which was aborted leaves its loads
};
static_assert(u64(LS_MAX_BLOCKS) * LS_PUSHREDUCE_SLOTS * LS_PUSHREDUCE_TURN <= LS_RING_BYTES);

// Shelf is what a block has in shared memory.
struct Shelf {
  u32 base, tile, n, rank, count; // tile in bytes; count: of stages of what is reduced

  FI Shelf(const Args &a, u32 size) : base(dynamicBase()), n(a.ranks), rank(a.rank) {
    u64 share = a.count * size / (u64(n) * blocks() * LS_PUSHREDUCE_TURNS);
    tile = u32(least(LS_PUSHREDUCE_TURN / n, share < LS_PUSHREDUCE_LEAST ? LS_PUSHREDUCE_LEAST : share)) & ~127u;
    count = u32(least((dynamicBytes() - LS_PUSHREDUCE_WORDS - (n - 1) * LS_PUSHREDUCE_FLOW * tile) / (n * tile), LS_PUSHREDUCE_STAGES));
  }
  FI u32 bar(u32 i) const { return base + 8 * i; }
  FI u32 word(u32 i) const { return base + LS_PUSHREDUCE_WORDS - 64 + 4 * i; }

  // Of the tiles for a peer, by stage.
  FI u32 loaded(u32 peer, u32 s) const { return bar(peer * LS_PUSHREDUCE_FLOW + s); }                // mbarrier: the tile has come
  FI u32 sent(u32 peer, u32 s) const { return bar((LS_MAX_RANKS + peer) * LS_PUSHREDUCE_FLOW + s); } // mbarrier: it has been read
  FI u32 flowAt(u32 peer, u32 s) const { return base + LS_PUSHREDUCE_WORDS + ((peer + n - 1 - rank) % n * LS_PUSHREDUCE_FLOW + s) * tile; }
  FI u32 written(u32 peer) const { return word(peer); } // tiles that are in the peer's ring

  // Of what is reduced.
  FI u32 full(u32 s) const { return bar(2 * LS_MAX_RANKS * LS_PUSHREDUCE_FLOW + s); } // mbarrier: tiles of all sources have come
  FI u32 combined(u32 s) const { return full(LS_PUSHREDUCE_STAGES + s); }             // mbarrier: the first one is the result
  FI u32 empty(u32 s) const { return full(2 * LS_PUSHREDUCE_STAGES + s); }            // mbarrier: it has been read
  FI u32 at(u32 s, u32 source) const { return base + LS_PUSHREDUCE_WORDS + ((n - 1) * LS_PUSHREDUCE_FLOW + s * n + source) * tile; }
  FI u32 read() const { return word(LS_MAX_RANKS); } // tiles that have come from all

  FI u32 stopped() const { return word(LS_MAX_RANKS + 1); } // not 0: a thread has seen the abort

  // prepare is called before a barrier that all threads go through.
  FI void prepare() const {
    u32 i = tid() - LS_PUSHREDUCE_WORKERS;
    if (i > LS_MAX_RANKS) return;
#pragma unroll 1
    for (u32 s = 0; i < n && s < LS_PUSHREDUCE_FLOW; s++) mbarrierInit(loaded(i, s), 1), mbarrierInit(sent(i, s), 1);
#pragma unroll 1
    for (u32 s = 0; i == LS_MAX_RANKS && s < count; s++) {
      mbarrierInit(full(s), n);
      mbarrierInit(combined(s), LS_PUSHREDUCE_WORKERS / 32);
      mbarrierInit(empty(s), 1);
    }
    storeShared(word(i), 0);
    if (i == 0) storeShared(stopped(), 0);
    fenceProxy();
  }

  // wait is mbarrierWait that ends when the block is stopped. False: it is.
  FI bool wait(u32 bar, u32 parity) const {
    while (!mbarrierTry(bar, parity)) {
      if (loadShared(stopped())) return false;
      relax();
    }
    return true;
  }
  FI bool stop() const { return storeShared(stopped(), 1), false; }
};

// PushReduce is a block's part of the operation, once peers have entered. What its
// threads have to do returns false when the operation was aborted.
template <class T> struct PushReduce {
  const Args &a;
  const Shelf &shelf;
  Cut cut; // the same on all ranks: buffers in windows are aligned alike for all
  u64 body;
  Tiles tiles;
  u32 before; // what landed and taken were
  u32 rounds; // the most tiles that any owner's block has
  u32 mine;   // those that this one has

  FI PushReduce(const Args &a, const Shelf &shelf)
      : a(a), shelf(shelf), cut(sizeof(T)), body(cut.head * sizeof(T)), tiles(cut.packs, a.ranks, shelf.tile / 16),
        before(heap(a, a.rank)->block[block()].tiles), rounds(u32(tiles.rounds())), mine(steps(a.rank)) {}

  FI u32 steps(u32 owner) const { return u32(tiles.steps(owner)); }
  FI u64 at(u32 owner, u32 k) const { return body + tiles.first(k, owner) * 16; }
  FI u32 bytes(u32 owner, u32 k) const { return tiles.length(tiles.first(k, owner)) * 16; }
  // slot is where rank to keeps tile k from rank from.
  FI u64 slot(u32 to, u32 from, u32 k) const {
    return a.ring + to * a.stride + ((u64(block()) * a.ranks + from) * LS_PUSHREDUCE_SLOTS + k % LS_PUSHREDUCE_SLOTS) * shelf.tile;
  }

  // reached waits until a count is want, and returns what it is. 0: aborted.
  FI u32 reached(const u32 *count, u32 want) const {
    if (!waitFlag(a, count, before + want, rounds - want)) return 0;
    return loadAcquire(count) - before;
  }
  // room waits until tile k may be pushed to a rank, and sets how many may be known
  // to. The rank may wait itself, to be told of all that has been pushed.
  FI bool room(u32 to, u32 k, u32 &known) const {
    const u32 *taken = &heap(a, a.rank)->taken[block()][to];
    known = loadAcquire(taken) - before + LS_PUSHREDUCE_SLOTS;
    if (k < known) return true;
    bulkDone<0>();
    storeShared(shelf.written(to), k);
    u32 n = reached(taken, k + 1 - LS_PUSHREDUCE_SLOTS);
    known = n + LS_PUSHREDUCE_SLOTS;
    return n != 0;
  }
  // stored waits, when tile k has been given to the copy unit, until one a turn or
  // two before it has been read from its stage. False: there is none.
  FI bool stored(u32 k, u32 stages) const {
    u32 lag = stages > 3 ? 2 : 1;
    if (k < lag) return false;
    if (lag == 2) bulkRead<2>();
    else bulkRead<1>();
    return true;
  }

  FI bool load(u32 peer) const {
    Stage stage{0, 0};
    for (u32 k = 0, n = steps(peer); k < n; k++, stage.next(LS_PUSHREDUCE_FLOW)) {
      if (k >= LS_PUSHREDUCE_FLOW && !shelf.wait(shelf.sent(peer, stage.s), stage.parity ^ 1)) return false;
      u32 size = bytes(peer, k);
      mbarrierExpect(shelf.loaded(peer, stage.s), size);
      bulkLoad(shelf.flowAt(peer, stage.s), a.send[a.rank] + at(peer, k), size, shelf.loaded(peer, stage.s));
    }
    return true;
  }

  FI bool push(u32 peer) const {
    u32 n = steps(peer), known = LS_PUSHREDUCE_SLOTS;
    Pace pace(a.pace, 2 * (a.ranks - 1)); // half of what is sent is results, and each peer gets as much
    Stage stage{0, 0}, read{0, 0};
    for (u32 k = 0; k < n; k++, stage.next(LS_PUSHREDUCE_FLOW)) {
      if (!shelf.wait(shelf.loaded(peer, stage.s), stage.parity)) return false;
      if (k >= known && !room(peer, k, known)) return shelf.stop();
      pace.take(bytes(peer, k));
      bulkStore(slot(peer, a.rank, k), shelf.flowAt(peer, stage.s), bytes(peer, k));
      bulkCommit();
      if (stored(k, LS_PUSHREDUCE_FLOW)) {
        mbarrierArrive(shelf.sent(peer, read.s));
        read.next(LS_PUSHREDUCE_FLOW);
      }
      if (k >= LS_PUSHREDUCE_FLIGHT) {
        bulkDone<LS_PUSHREDUCE_FLIGHT>();
        storeShared(shelf.written(peer), k + 1 - LS_PUSHREDUCE_FLIGHT);
      }
    }
    bulkDone<0>();
    storeShared(shelf.written(peer), n);
    return true;
  }

  // collect brings the tiles of a source.
  FI bool collect(u32 from) const {
    u32 known = 0;
    Stage stage{0, 0};
    for (u32 k = 0; k < mine; k++, stage.next(shelf.count)) {
      if (k >= shelf.count && !shelf.wait(shelf.empty(stage.s), stage.parity ^ 1)) return false;
      if (from != a.rank && k >= known) {
        if ((known = reached(&heap(a, a.rank)->landed[block()][from], k + 1)) == 0) return shelf.stop();
        fenceProxy();
      }
      u32 size = bytes(a.rank, k);
      mbarrierExpect(shelf.full(stage.s), size);
      bulkLoad(shelf.at(stage.s, from), from == a.rank ? a.send[a.rank] + at(a.rank, k) : slot(a.rank, from, k), size, shelf.full(stage.s));
    }
    return true;
  }

  FI bool deliver() const {
    u32 first = (a.rank + 1 + block()) % a.ranks; // another rank for each tile, so that ranks do not all write to the same one
    Stage stage{0, 0}, read{0, 0};
    Pace pace(a.pace, 2);
    for (u32 k = 0; k < mine; k++, stage.next(shelf.count)) {
      if (!shelf.wait(shelf.combined(stage.s), stage.parity)) return false;
      for (u32 d = 0, to = first; d < a.ranks; d++) {
        if (to != a.rank) pace.take(bytes(a.rank, k));
        bulkStore(a.recv[to] + at(a.rank, k), shelf.at(stage.s, 0), bytes(a.rank, k));
        if (++to == a.ranks) to = 0;
      }
      bulkCommit();
      if (++first == a.ranks) first = 0;
      if (stored(k, shelf.count)) {
        mbarrierArrive(shelf.empty(read.s));
        read.next(shelf.count);
      }
    }
    bulkDone<0>();
    fenceProxy();
    return true;
  }

  // tell says how many tiles there are as a word goes up to end, and the round
  // number of tiles when it is there.
  template <class Say> FI bool tell(u32 word, u32 end, const Say &say) const {
    for (u32 told = 0, n = 0;;) {
      n = loadShared(word);
      if (n > told || n == end) {
        fenceProxy();
        say(n == end ? rounds : n);
        told = n;
      }
      if (n == end) return true;
      if (loadShared(shelf.stopped())) return false;
      relax();
    }
  }
  FI bool tellLanded(u32 peer) const {
    return tell(shelf.written(peer), steps(peer), [&](u32 n) { storeRelease(&heap(a, peer)->landed[block()][a.rank], before + n); });
  }
  // Reading is over when its values are there: no fence has to hold the word back.
  FI bool tellTaken(u32 peer) const {
    return tell(shelf.read(), mine, [&](u32 n) { storeVolatile(&heap(a, peer)->taken[block()][a.rank], before + n); });
  }

  FI bool reduce() const {
    bool ok = true;
    Stage stage{0, 0};
    for (u32 k = 0; k < mine; k++, stage.next(shelf.count)) {
      ok = ok && shelf.wait(shelf.full(stage.s), stage.parity);
      if (ok) {
        if (tid() == 0) storeShared(shelf.read(), k + 1);
        combineTiles<T>(shelf.at(stage.s, 0), shelf.tile, a.ranks, bytes(a.rank, k) / 16, tid(), LS_PUSHREDUCE_WORKERS);
        fenceProxyShared();
      }
      syncWarp(); // of all threads, also of those that have stopped
      if (tid() % 32 == 0) mbarrierArrive(shelf.combined(stage.s));
    }
    return ok;
  }

  // part is this thread's. Peers are served from the next one on.
  FI bool part() const {
    if (tid() < LS_PUSHREDUCE_WORKERS) return reduce();
    u32 i = (tid() - LS_PUSHREDUCE_WORKERS) % LS_PART_THREADS, peer = (a.rank + 1 + i) % a.ranks;
    bool speaks = i + 1 < a.ranks;
    switch ((tid() - LS_PUSHREDUCE_WORKERS) / LS_PART_THREADS) {
    case LS_PART_LOAD: return !speaks || load(peer);
    case LS_PART_PUSH: return !speaks || push(peer);
    case LS_PART_COLLECT: return i >= a.ranks || collect(i);
    case LS_PART_DELIVER: return i != 0 || deliver();
    case LS_PART_LANDED: return !speaks || tellLanded(peer);
    case LS_PART_TAKEN: return !speaks || tellTaken(peer);
    }
    return true;
  }
};

// ls_allreduce_pushbulk: count elements, send to recv, all of both in windows.
KERNEL(LS_PUSHREDUCE_THREADS) void ls_allreduce_pushbulk(Args a) {
  using T = LS_TYPE;
  Op op(a);
  Shelf shelf(a, sizeof(T));
  shelf.prepare();
  allReduceWork(a);
  if (!op.enter()) return;
  fenceProxy(); // what kernels before this one, and peers, have stored
  PushReduce<T> f(a, shelf);
  bool ok = f.part();
  syncWarp();
  if (syncOr(!ok)) {
    // Shared memory is this block's until loads that were asked for have come.
    for (u64 from = globaltimer(); globaltimer() - from < LS_STOP_NS;) relax();
    return op.stamps.stopped();
  }
  reduceEnds<T>(f.cut); // by loads from peers
  if (tid() == 0) heap(a, a.rank)->block[block()].tiles = f.before + f.rounds;
  op.leave();
}
#endif
