// ls_pushreduce by bulk copies of sm_90. Each warp but the workers' has one part,
// of which a thread does what concerns one peer. Tiles for a peer pass through
// stages of their own in shared memory; what is reduced has stages of a tile of
// each source, combined into the first of them.
#pragma once
#include "pushreduce.h"

#ifdef LS_BULK
enum {
#ifdef LS_HOST
  LS_PART_THREADS = LS_MAX_RANKS, // fewer threads to start
#else
  LS_PART_THREADS = 32,
#endif
  LS_PART_LOAD = 0,    // fills peers' stages with tiles of send
  LS_PART_PUSH = 1,    // and empties them to their rings
  LS_PART_COLLECT = 2, // fills stages with tiles of all sources
  LS_PART_DELIVER = 3, // and takes the result to where it belongs
  LS_PART_LANDED = 4,  // tells owners, and root, what has been pushed: the fence takes longer than a tile
  LS_PART_TAKEN = 5,   // tells sources what has been read
  LS_PARTS = 6,
  LS_PUSHREDUCE_THREADS = (LS_BULK_WORKERS + LS_PARTS * LS_PART_THREADS + 31) / 32 * 32,
  LS_PUSHREDUCE_STAGES = 8,     // at most, of each kind
  LS_PUSHREDUCE_WORDS = 2 << 10, // bytes before the stages: mbarriers, and words
  LS_STOP_NS = 100000,          // that a block which was aborted leaves its loads
  LS_PUSHREDUCE_FLIGHT = 2,     // tiles for a peer that are on their way before the first has to be there
};

// Shelf is what a pushing block has in shared memory.
struct Shelf {
  u32 base, tile, n, rank, flow, count; // flow: stages for a peer; count: of those that are combined

  FI explicit Shelf(const PushArgs &p) : base(dynamicBase()), tile(p.tile), n(p.a.ranks), rank(p.a.rank), flow(u32(least(p.stages, LS_PUSHREDUCE_STAGES))) {
    count = u32(least((dynamicBytes() - LS_PUSHREDUCE_WORDS - (n - 1) * flow * tile) / (n * tile), LS_PUSHREDUCE_STAGES));
  }
  FI u32 bar(u32 kind, u32 peer, u32 stage) const { return base + 8 * ((kind * LS_MAX_RANKS + peer) * LS_PUSHREDUCE_STAGES + stage); }
  FI u32 word(u32 i) const { return base + LS_PUSHREDUCE_WORDS - 64 + 4 * i; }

  // Of the tiles for a peer.
  FI u32 loaded(u32 peer, u32 k) const { return bar(0, peer, k % flow); } // mbarrier: tile k has come
  FI u32 sent(u32 peer, u32 k) const { return bar(1, peer, k % flow); }   // mbarrier: it has been read
  FI u32 flowTurn(u32 k) const { return k / flow & 1; }
  FI u32 flowAt(u32 peer, u32 k) const { return base + LS_PUSHREDUCE_WORDS + ((peer + n - 1 - rank) % n * flow + k % flow) * tile; }
  FI u32 written(u32 peer) const { return word(peer); } // tiles that are in the peer's ring

  // Of what is combined.
  FI u32 full(u32 k) const { return bar(2, 0, k % count); }     // mbarrier: tiles of all sources have come
  FI u32 combined(u32 k) const { return bar(2, 1, k % count); } // mbarrier: the first one is the result
  FI u32 empty(u32 k) const { return bar(2, 2, k % count); }    // mbarrier: it has been read
  FI u32 turn(u32 k) const { return k / count & 1; }
  FI u32 at(u32 k, u32 source) const { return base + LS_PUSHREDUCE_WORDS + ((n - 1) * flow + k % count * n + source) * tile; }
  FI u32 read() const { return word(LS_MAX_RANKS); } // items that have come

  FI u32 stopped() const { return word(LS_MAX_RANKS + 1); } // not 0: a thread has seen the abort

  // prepare is called before a barrier that all threads go through.
  FI void prepare(u32 sources) const {
    if (tid() != LS_BULK_WORKERS) return;
    for (u32 s = 0; s < LS_PUSHREDUCE_STAGES; s++) {
      for (u32 p = 0; p < n; p++) mbarrierInit(bar(0, p, s), 1), mbarrierInit(bar(1, p, s), 1);
      mbarrierInit(bar(2, 0, s), sources);
      mbarrierInit(bar(2, 1, s), LS_BULK_WORKERS / 32);
      mbarrierInit(bar(2, 2, s), 1);
    }
    for (u32 i = 0; i < LS_MAX_RANKS + 2; i++) storeShared(word(i), 0);
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

// Item is the k-th thing that a block combines, or that root takes.
struct Item {
  u32 from, step; // from: of those that root takes
  u64 at;
  u32 bytes;
};

// PushingBulk is Pushing with the parts that threads have. They return false when
// the operation was aborted.
template <class T> struct PushingBulk : Pushing<T> {
  using F = Pushing<T>;
  using F::a, F::p;
  Shelf shelf;
  bool takes, passes; // as root, from owners; as owner, to root
  u32 items;

  FI explicit PushingBulk(const PushArgs &args) : F(args), shelf(args), takes(F::relayed && a.rank == a.root), passes(F::relayed && !takes), items(0) {
    for (u32 j = 0; j < F::owners; j++)
      if (takes || F::owner(j) == a.rank) items += F::share(F::owner(j)).steps();
  }
  FI u32 sources() const { return takes ? 1 : a.ranks; }

  FI Item item(u32 k) const {
    u32 from = takes ? F::owner(k % F::owners) : a.rank, step = takes ? k / F::owners : k;
    OwnShare s = F::share(from);
    return {from, step, s.at(step), s.bytes(step)};
  }

  FI bool load(u32 peer) const {
    if (!F::owns(peer)) return true;
    OwnShare s = F::share(peer);
    u64 src = a.send[a.rank] + s.send;
    for (u32 k = 0, n = s.steps(); k < n; k++) {
      if (k >= shelf.flow && !shelf.wait(shelf.sent(peer, k), shelf.flowTurn(k) ^ 1)) return false;
      mbarrierExpect(shelf.loaded(peer, k), s.bytes(k));
      bulkLoad(shelf.flowAt(peer, k), src + s.at(k), s.bytes(k), shelf.loaded(peer, k));
    }
    return true;
  }

  // room waits until tile k may be pushed to a rank. The rank may wait itself, to be
  // told of all that has been pushed.
  FI bool room(u32 to, u32 k, u32 &known) const {
    known = F::roomNow(to);
    if (k < known) return true;
    bulkDone<0>();
    storeShared(shelf.written(to), k);
    known = F::room(to, k);
    return known != 0;
  }

  FI bool push(u32 peer) const {
    if (!F::owns(peer)) return true;
    OwnShare s = F::share(peer);
    u32 n = s.steps();
    for (u32 k = 0, known = 0; k < n; k++) {
      if (!shelf.wait(shelf.loaded(peer, k), shelf.flowTurn(k))) return false;
      if (k >= known && !room(peer, k, known)) return shelf.stop();
      bulkStore(F::slot(peer, a.rank, k), shelf.flowAt(peer, k), s.bytes(k));
      bulkCommit();
      if (k >= 1) {
        bulkRead<1>();
        mbarrierArrive(shelf.sent(peer, k - 1));
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

  FI bool collect(u32 source) const {
    OwnShare mine = F::share(a.rank);
    for (u32 k = 0, known = 0; k < items; k++) {
      if (k >= shelf.count && !shelf.wait(shelf.empty(k), shelf.turn(k) ^ 1)) return false;
      Item i = item(k);
      u64 src = a.send[a.rank] + mine.send + i.at;
      u32 from = takes ? i.from : source;
      if (from != a.rank) {
        if (takes || k >= known) {
          if ((known = F::landed(from, i.step)) == 0) return shelf.stop();
          fenceProxy();
        }
        src = F::slot(a.rank, from, i.step);
      }
      mbarrierExpect(shelf.full(k), i.bytes);
      bulkLoad(shelf.at(k, source), src, i.bytes, shelf.full(k));
    }
    return true;
  }

  // out is where the result of an item goes in this rank's own recv.
  FI u64 out(const Item &i) const { return a.recv[a.rank] + F::share(i.from).recv + i.at; }
  FI bool odd(u64 out) const { return p.kind != LS_PUSH_ALL && !passes && (out & 15); }

  FI bool deliver() const {
    for (u32 k = 0, known = 0; k < items; k++) {
      if (!shelf.wait(shelf.combined(k), shelf.turn(k))) return false;
      Item i = item(k);
      u32 result = shelf.at(k, 0);
      if (passes) {
        if (k >= known && !room(a.root, k, known)) return shelf.stop();
        bulkStore(F::slot(a.root, a.rank, k), result, i.bytes);
      } else if (p.kind == LS_PUSH_ALL) {
        u64 at = F::share(a.rank).recv + i.at;
        for (u32 d = 0; d < a.ranks; d++) bulkStore(a.recv[(a.rank + 1 + block() + k + d) % a.ranks] + at, result, i.bytes);
      } else if (!odd(out(i))) {
        bulkStore(out(i), result, i.bytes);
      }
      bulkCommit();
      if (k >= 1) {
        bulkRead<1>();
        mbarrierArrive(shelf.empty(k - 1));
      }
      if (passes && k >= LS_PUSHREDUCE_FLIGHT) {
        bulkDone<LS_PUSHREDUCE_FLIGHT>();
        storeShared(shelf.written(a.root), k + 1 - LS_PUSHREDUCE_FLIGHT);
      }
    }
    bulkDone<0>();
    if (passes) storeShared(shelf.written(a.root), items);
    fenceProxy();
    return true;
  }

  // tell tells count(now) as the word goes up to end, and the round number of tiles
  // when it is there.
  template <class Count, class Tell> FI bool tell(u32 word, u32 end, const Count &count, const Tell &say) const {
    u32 all = count(end);
    for (u32 told = 0, n = 0;;) {
      n = count(loadShared(word));
      if (n > told || n == all) {
        fenceProxy();
        say(n == all ? F::rounds : n);
        told = n;
      }
      if (n == all) return true;
      if (loadShared(shelf.stopped())) return false;
      relax();
    }
  }
  FI bool tellPushed(u32 peer) const {
    return tell(shelf.written(peer), F::steps(a.rank, peer), [](u32 n) { return n; }, [&](u32 n) { F::tellLanded(peer, n); });
  }
  FI bool tellRead(u32 peer) const {
    u32 j = F::index(peer);
    return tell(shelf.read(), items, [&](u32 n) { return takes ? (n + F::owners - 1 - j) / F::owners : n; }, [&](u32 n) { F::tellTaken(peer, n); });
  }

  FI bool reduceItems() const {
    bool ok = true;
    for (u32 k = 0; k < items; k++) {
      ok = ok && shelf.wait(shelf.full(k), shelf.turn(k));
      if (ok) {
        if (tid() == 0) storeShared(shelf.read(), k + 1);
        Item i = item(k);
        u32 at = shelf.at(k, 0);
        u64 dst = out(i);
        if (!takes) combineTiles<T>(at, shelf.tile, a.ranks, i.bytes / 16);
        if (odd(dst)) // by the thread that has combined it
          for (u32 j = tid() * 16; j < i.bytes; j += LS_BULK_WORKERS * 16) putElements(dst + j, getShared(at + j));
        fenceProxyShared();
      }
      syncWarp(); // of all threads, also of those that have stopped
      if (tid() % 32 == 0) mbarrierArrive(shelf.combined(k));
    }
    return ok;
  }
  FI void putElements(u64 dst, u32x4 v) const {
    using Raw = typename RawOf<sizeof(T)>::type;
    u64 half[2] = {u64(v.y) << 32 | v.x, u64(v.w) << 32 | v.z};
#pragma unroll
    for (u32 i = 0; i < 16; i += sizeof(T)) put<Raw>(dst + i, Raw(half[i / 8] >> i % 8 * 8));
  }

  // part is this thread's. Peers are served from the next one on.
  FI bool part() const {
    if (tid() < LS_BULK_WORKERS) return reduceItems();
    u32 i = (tid() - LS_BULK_WORKERS) % LS_PART_THREADS, peer = (a.rank + 1 + i) % a.ranks;
    bool speaks = i + 1 < a.ranks;
    switch ((tid() - LS_BULK_WORKERS) / LS_PART_THREADS) {
    case LS_PART_LOAD: return !speaks || load(peer);
    case LS_PART_PUSH: return !speaks || push(peer);
    case LS_PART_COLLECT: return i >= sources() || collect(i);
    case LS_PART_DELIVER: return i != 0 || deliver();
    case LS_PART_LANDED: return !speaks || tellPushed(peer);
    case LS_PART_TAKEN: return !speaks || tellRead(peer);
    }
    return true;
  }
};

KERNEL(LS_PUSHREDUCE_THREADS) void ls_pushreduce_bulk(PushArgs p) {
  using T = LS_TYPE;
  const Args &a = p.a;
  Op op(a);
  PushingBulk<T> f(p);
  f.shelf.prepare(f.sources());
  f.setEnds();
  if (!op.enter()) return;
  fenceProxy(); // what kernels before this one, and peers, have stored
  bool ok = f.part();
  syncWarp();
  if (syncOr(!ok)) {
    // Shared memory is this block's until loads that were asked for have come.
    for (u64 from = globaltimer(); globaltimer() - from < LS_STOP_NS;) relax();
    return op.stamps.stopped();
  }
  f.ends();
  f.end();
  op.leave();
}
#endif
