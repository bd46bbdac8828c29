// ls_pushreduce by bulk copies of sm_90. Each warp but the workers' has one part,
// of which a thread does what concerns one peer. Tiles for a peer pass through
// stages of their own in shared memory; what is reduced has stages of a tile of
// each source, combined into the first of them.
#pragma once
#include "pushreduce.h"

#ifdef LS_BULK
enum {
#ifdef LS_HOST
  LS_PUSHREDUCE_WORKERS = 32, // fewer threads to start
  LS_PART_THREADS = LS_MAX_RANKS,
#else
  LS_PUSHREDUCE_WORKERS = 128,
  LS_PART_THREADS = 32,
#endif
  LS_PART_LOAD = 0,    // fills peers' stages with tiles of send
  LS_PART_PUSH = 1,    // and empties them to their rings
  LS_PART_COLLECT = 2, // fills stages with tiles of all sources
  LS_PART_DELIVER = 3, // and takes the result to where it belongs
  LS_PART_LANDED = 4,  // tells owners, and root, what has been pushed: the fence takes longer than a tile
  LS_PART_TAKEN = 5,   // tells sources what has been read
  LS_PARTS = 6,
  LS_PUSHREDUCE_THREADS = (LS_PUSHREDUCE_WORKERS + LS_PARTS * LS_PART_THREADS + 31) / 32 * 32,
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

  // Of the tiles for a peer, by stage.
  FI u32 loaded(u32 peer, u32 s) const { return bar(0, peer, s); } // mbarrier: the tile has come
  FI u32 sent(u32 peer, u32 s) const { return bar(1, peer, s); }   // mbarrier: it has been read
  FI u32 flowAt(u32 peer, u32 s) const { return base + LS_PUSHREDUCE_WORDS + ((peer + n - 1 - rank) % n * flow + s) * tile; }
  FI u32 written(u32 peer) const { return word(peer); } // tiles that are in the peer's ring

  // Of what is combined.
  FI u32 full(u32 s) const { return bar(2, 0, s); }     // mbarrier: tiles of all sources have come
  FI u32 combined(u32 s) const { return bar(2, 1, s); } // mbarrier: the first one is the result
  FI u32 empty(u32 s) const { return bar(2, 2, s); }    // mbarrier: it has been read
  FI u32 at(u32 s, u32 source) const { return base + LS_PUSHREDUCE_WORDS + ((n - 1) * flow + s * n + source) * tile; }
  FI u32 read() const { return word(LS_MAX_RANKS); } // items that have come

  FI u32 stopped() const { return word(LS_MAX_RANKS + 1); } // not 0: a thread has seen the abort

  // prepare is called before a barrier that all threads go through.
  FI void prepare(u32 sources) const {
    u32 i = tid() - LS_PUSHREDUCE_WORKERS;
    if (i > LS_MAX_RANKS) return;
#pragma unroll 1
    for (u32 s = 0; i < n && s < flow; s++) mbarrierInit(loaded(i, s), 1), mbarrierInit(sent(i, s), 1);
#pragma unroll 1
    for (u32 s = 0; i == LS_MAX_RANKS && s < count; s++) {
      mbarrierInit(full(s), sources);
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

// PushingBulk is Pushing with the parts that threads have. They return false when
// the operation was aborted.
template <class T> struct PushingBulk : Pushing<T> {
  using F = Pushing<T>;
  using F::a, F::p;
  Shelf shelf;
  bool takes, passes; // as root, from owners; as owner, to root
  OwnShare mine;      // what is combined, or taken
  u32 items;          // of it

  FI explicit PushingBulk(const PushArgs &args)
      : F(args), shelf(args), takes(F::relayed && a.rank == a.root), passes(F::relayed && !takes), mine(F::share(takes ? F::owner(0) : a.rank)), items(0) {
    if (takes) {
      for (u32 j = 0; j < F::owners; j++) items += u32(mine.tiles.steps(j));
    } else if (F::owns(a.rank)) {
      items = mine.steps();
    }
  }
  FI u32 sources() const { return takes ? 1 : a.ranks; }

  // Items goes through what is combined, or taken: tile step of an owner.
  struct Items {
    const PushingBulk &b;
    u32 k, step, turn; // turn: of the owner's
    Stage stage;
    FI explicit Items(const PushingBulk &b, u32 first = 0) : b(b), k(0), step(0), turn(b.takes ? 0 : b.mine.turn), stage{0, 0} {
      for (u32 i = 0; i < first; i++) next();
    }
    FI bool more() const { return k < b.items; }
    FI void next() {
      k++, stage.next(b.shelf.count);
      if (b.takes && ++turn < b.owners) return;
      if (b.takes) turn = 0;
      step++;
    }
    FI u64 first() const { return b.mine.tiles.first(step, turn); }
    FI u64 at() const { return first() * 16; }
    FI u32 bytes() const { return b.mine.tiles.length(first()) * 16; }
  };

  FI bool load(u32 peer) const {
    if (!F::owns(peer)) return true;
    OwnShare s = F::share(peer);
    u64 src = a.send[a.rank] + s.send;
    Stage stage{0, 0};
    for (u32 k = 0, n = s.steps(); k < n; k++, stage.next(shelf.flow)) {
      if (k >= shelf.flow && !shelf.wait(shelf.sent(peer, stage.s), stage.parity ^ 1)) return false;
      u32 bytes = s.bytes(k);
      mbarrierExpect(shelf.loaded(peer, stage.s), bytes);
      bulkLoad(shelf.flowAt(peer, stage.s), src + s.at(k), bytes, shelf.loaded(peer, stage.s));
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

  // stored waits, when tile k has been given to the copy unit, until one a turn or
  // two before it has been read from its stage. False: there is none.
  FI bool stored(u32 k, u32 stages) const {
    u32 lag = stages > 3 ? 2 : 1;
    if (k < lag) return false;
    if (lag == 2) bulkRead<2>();
    else bulkRead<1>();
    return true;
  }

  FI bool push(u32 peer) const {
    if (!F::owns(peer)) return true;
    OwnShare s = F::share(peer);
    u64 ring = F::slot(peer, a.rank, 0);
    u32 n = s.steps(), known = p.slots;
    Stage stage{0, 0}, slot{0, 0}, read{0, 0};
    for (u32 k = 0; k < n; k++, stage.next(shelf.flow), slot.next(p.slots)) {
      if (!shelf.wait(shelf.loaded(peer, stage.s), stage.parity)) return false;
      if (k >= known && !room(peer, k, known)) return shelf.stop();
      bulkStore(ring + slot.s * p.tile, shelf.flowAt(peer, stage.s), s.bytes(k));
      bulkCommit();
      if (stored(k, shelf.flow)) {
        mbarrierArrive(shelf.sent(peer, read.s));
        read.next(shelf.flow);
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

  // collect brings the tiles of a source, or root those of one owner after another,
  // each thread from its own.
  FI bool collect(u32 i) const {
    u32 from = takes ? F::owner(i) : i, known = 0;
    u64 ring = F::slot(a.rank, from, 0), src = a.send[a.rank] + mine.send;
    Stage slot{0, 0};
    for (Items item(*this, takes ? i : 0); item.more(); slot.next(p.slots)) {
      if (item.k >= shelf.count && !shelf.wait(shelf.empty(item.stage.s), item.stage.parity ^ 1)) return false;
      if (from != a.rank && item.step >= known) {
        if ((known = F::landed(from, item.step)) == 0) return shelf.stop();
        fenceProxy();
      }
      mbarrierExpect(shelf.full(item.stage.s), item.bytes());
      bulkLoad(shelf.at(item.stage.s, takes ? 0 : i), from == a.rank ? src + item.at() : ring + slot.s * p.tile, item.bytes(), shelf.full(item.stage.s));
      for (u32 step = item.step; item.step == step || (takes && item.turn != i);) item.next();
    }
    return true;
  }

  // out is where the result of an item goes in this rank's own recv.
  FI u64 out(const Items &item) const { return a.recv[a.rank] + mine.recv + item.at(); }
  FI bool odd(u64 out) const { return p.kind != LS_PUSH_ALL && !passes && (out & 15); }

  FI bool deliver() const {
    u64 ring = F::slot(a.root, a.rank, 0);
    u32 known = p.slots, next = (a.rank + 1 + block()) % a.ranks;
    Stage slot{0, 0}, read{0, 0};
    for (Items item(*this); item.more(); item.next(), slot.next(p.slots)) {
      if (!shelf.wait(shelf.combined(item.stage.s), item.stage.parity)) return false;
      u32 result = shelf.at(item.stage.s, 0), bytes = item.bytes();
      if (passes) {
        if (item.k >= known && !room(a.root, item.k, known)) return shelf.stop();
        bulkStore(ring + slot.s * p.tile, result, bytes);
      } else if (p.kind == LS_PUSH_ALL) {
        u64 at = mine.recv + item.at();
        u32 to = next;
        for (u32 d = 0; d < a.ranks; d++) {
          bulkStore(a.recv[to] + at, result, bytes);
          if (++to == a.ranks) to = 0;
        }
        if (++next == a.ranks) next = 0;
      } else if (!odd(out(item))) {
        bulkStore(out(item), result, bytes);
      }
      bulkCommit();
      if (stored(item.k, shelf.count)) {
        mbarrierArrive(shelf.empty(read.s));
        read.next(shelf.count);
      }
      if (passes && item.k >= LS_PUSHREDUCE_FLIGHT) {
        bulkDone<LS_PUSHREDUCE_FLIGHT>();
        storeShared(shelf.written(a.root), item.k + 1 - LS_PUSHREDUCE_FLIGHT);
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
    for (Items item(*this); item.more(); item.next()) {
      ok = ok && shelf.wait(shelf.full(item.stage.s), item.stage.parity);
      if (ok) {
        if (tid() == 0) storeShared(shelf.read(), item.k + 1);
        u32 at = shelf.at(item.stage.s, 0), bytes = item.bytes();
        u64 dst = out(item);
        if (!takes) combineTiles<T>(at, shelf.tile, a.ranks, bytes / 16, LS_PUSHREDUCE_WORKERS);
        if (odd(dst)) // by the thread that has combined it
          for (u32 j = tid() * 16; j < bytes; j += LS_PUSHREDUCE_WORKERS * 16) putElements(dst + j, getShared(at + j));
        fenceProxyShared();
      }
      syncWarp(); // of all threads, also of those that have stopped
      if (tid() % 32 == 0) mbarrierArrive(shelf.combined(item.stage.s));
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
    if (tid() < LS_PUSHREDUCE_WORKERS) return reduceItems();
    u32 i = (tid() - LS_PUSHREDUCE_WORKERS) % LS_PART_THREADS, peer = (a.rank + 1 + i) % a.ranks;
    bool speaks = i + 1 < a.ranks;
    switch ((tid() - LS_PUSHREDUCE_WORKERS) / LS_PART_THREADS) {
    case LS_PART_LOAD: return !speaks || load(peer);
    case LS_PART_PUSH: return !speaks || push(peer);
    case LS_PART_COLLECT: return i >= (takes ? F::owners : a.ranks) || collect(i);
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
