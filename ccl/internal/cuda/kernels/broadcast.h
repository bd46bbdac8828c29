// Broadcast into windows: bytes, of any count and alignment.
//
// The root's buffer is cut in a share for each of the others. The root pushes each
// its own, and that rank passes it on to the rest while the root goes on, so that
// every link carries the buffer about once, and no byte takes more than two hops.
#pragma once
#include "push.h"

enum { LS_STEP = 112 << 10 }; // bytes that the root pushes between flags

// ls_broadcast_push: root's send, count bytes, to all recvs. Of each step the
// root pushes a tile to each of the others, which pass their own on to the rest
// while the root goes on: every link carries the buffer about once.
KERNEL(512) void ls_broadcast_push(Args a) {
  Op op(a);
  Heap *own = heap(a, a.rank);
  u32 others = a.ranks - 1, before = own->block[block()].steps;
  if (!op.enter()) return;
  Tiles tiles(a.count, others == 0 ? 1 : others, LS_STEP / (others == 0 ? 1 : others) & ~127u, 128);
  u32 rounds = u32(tiles.rounds());
  auto heir = [&](u32 j) { return (a.root + 1 + j) % a.ranks; }; // the rank that tile j of a step goes to
  if (a.rank == a.root) {
    bool keep = a.send[a.rank] != a.recv[a.rank];
    for (u32 step = 0; step < rounds; step++) {
      for (u32 j = 0; j < tiles.owners; j++) {
        u64 at = tiles.first(step, j), here = a.recv[a.rank] + at, there = others == 0 ? here : a.recv[heir(j)] + at;
        spread(a.send[a.rank] + at, tiles.length(at), (others == 0 ? 0 : 1) + keep, [=](u32 d) { return d == 0 ? there : here; });
      }
      if (others < 2) continue; // nobody to pass it on to
      sync();
      if (tid() < a.ranks && tid() != a.rank) {
        storeRelease(&heap(a, tid())->flag[LS_PHASE_STEPS][block()][a.root], before + step + 1);
      }
    }
  } else if (others > 1) {
    u32 self = (a.rank + others - a.root) % a.ranks;
    for (u32 step = 0; step < tiles.steps(self); step++) {
      const u32 *flag = &own->flag[LS_PHASE_STEPS][block()][a.root];
      bool ok = tid() != 0 || waitFlag(a, flag, before + step + 1, rounds - step - 1);
      if (syncOr(!ok)) return op.stamps.stopped();
      u64 at = tiles.first(step, self);
      spread(a.recv[a.rank] + at, tiles.length(at), others - 1, [&](u32 d) { return a.recv[heir((self + 1 + d) % others)] + at; });
    }
  }
  if (tid() == 0) own->block[block()].steps = before + rounds;
  op.leave();
}

#ifdef LS_BULK
// The same by bulk copies. One thread fills stages of shared memory, another
// empties them to other ranks, and on the root a third tells them what has come:
// a flag wants a fence that takes longer than a tile does.
enum {
  LS_RELAY_FLIGHT = 5,       // tiles that the root has on their way before it waits for the first of them
  LS_RELAY_TURNS = 256,      // tiles that a root's block shall have, so that passing on overlaps
  LS_RELAY_LEAST = 8 << 10,  // bytes of a tile at least, unless there is less to do
  LS_RELAY_LOADER = 32, LS_RELAY_TELLER = 64, // threads; the teller is a warp
};

// Relay is the block's pipeline in shared memory.
struct Relay {
  u32 base, stages;
  FI Relay() : base(dynamicBase()), stages(u32(least(LS_BULK_PUSH_STAGES, (dynamicBytes() - LS_BULK_PUSH_MBARRIERS) / LS_BULK_PUSH_TILE))) {}
  FI u32 full(u32 s) const { return base + 8 * s; }                          // mbarrier: the stage's tile has come
  FI u32 empty(u32 s) const { return base + 8 * (LS_BULK_PUSH_STAGES + s); } // mbarrier: it has been read
  FI u32 at(u32 s) const { return base + LS_BULK_PUSH_MBARRIERS + s * LS_BULK_PUSH_TILE; }
  FI u32 written() const { return base + 16 * LS_BULK_PUSH_STAGES; } // tiles that are where they should be
  FI u32 end() const { return written() + 4; }                       // the first tile that will not come

  // prepare is called before a barrier that all threads go through.
  FI void prepare() const {
    if (tid() != LS_RELAY_LOADER) return;
    for (u32 s = 0; s < LS_BULK_PUSH_STAGES; s++) mbarrierInit(full(s), 1), mbarrierInit(empty(s), 1);
    storeShared(written(), 0);
    storeShared(end(), ~0u);
    fenceProxy();
  }
};

// settle tells of the last tiles one by one, as they are written.
template <int LEFT> FI void settle(const Relay &relay, u32 tiles) {
  bulkDone<LEFT>();
  if (tiles > LEFT) storeShared(relay.written(), tiles - LEFT);
  if constexpr (LEFT > 0) settle<LEFT - 1>(relay, tiles);
}

// relayLoad fills stages with tiles: what(from, bytes) is called for one after the
// other, and await(k) waits until tile k may be read. False: aborted.
template <class What, class Await> FI bool relayLoad(const Relay &relay, u32 tiles, What what, Await await) {
  Stage stage{0, 0};
  for (u32 k = 0; k < tiles; k++, stage.next(relay.stages)) {
    if (k >= relay.stages) mbarrierWait(relay.empty(stage.s), stage.parity ^ 1);
    if (!await(k)) {
      storeShared(relay.end(), k);
      mbarrierArrive(relay.full(stage.s));
      return false;
    }
    u64 from;
    u32 bytes;
    what(from, bytes);
    mbarrierExpect(relay.full(stage.s), bytes);
    bulkLoad(relay.at(stage.s), from, bytes, relay.full(stage.s));
  }
  return true;
}

// relayStore empties stages: stores(from) asks for the copies of one tile after the
// other, which is at from in shared memory.
template <bool TELL, class Stores> FI void relayStore(const Relay &relay, u32 tiles, Stores stores) {
  Stage stage{0, 0}, read{0, 0};
  for (u32 k = 0; k < tiles; k++, stage.next(relay.stages)) {
    mbarrierWait(relay.full(stage.s), stage.parity);
    if (loadShared(relay.end()) <= k) break;
    stores(relay.at(stage.s));
    bulkCommit();
    if (k >= LS_BULK_PUSH_LAG) {
      bulkRead<LS_BULK_PUSH_LAG>();
      mbarrierArrive(relay.empty(read.s));
      read.next(relay.stages);
    }
    if constexpr (TELL) {
      if (k >= LS_RELAY_FLIGHT) {
        bulkDone<LS_RELAY_FLIGHT>();
        storeShared(relay.written(), k + 1 - LS_RELAY_FLIGHT);
      }
    }
  }
  if constexpr (TELL) settle<LS_RELAY_FLIGHT - 1>(relay, tiles);
  bulkDone<0>();
  fenceProxy();
}

// RootTiles goes through what a root's block pushes, a tile to each heir in turn.
struct RootTiles {
  const Tiles &tiles;
  u64 first;
  u32 j;
  FI explicit RootTiles(const Tiles &tiles) : tiles(tiles), first(tiles.first(0, 0)), j(0) {}
  FI void next() {
    first += tiles.tile;
    if (++j == tiles.owners) j = 0, first += u64(blocks() - 1) * tiles.owners * tiles.tile;
  }
};

// ls_broadcast_bulk is ls_broadcast_push. A root whose send is aligned unlike the
// windows goes by loads and stores, as do the ends outside of 16-byte packs.
KERNEL(LS_BULK_PUSH_THREADS) void ls_broadcast_bulk(Args a) {
  Op op(a);
  Heap *own = heap(a, a.rank);
  u32 others = a.ranks - 1, before = own->block[block()].steps;
  Relay relay;
  relay.prepare();
  if (!op.enter()) return;

  u64 send = a.send[a.rank], recv = a.recv[a.rank];
  u64 head = least(-recv & 15, a.count), packs = (a.count - head) / 16, tail = head + packs * 16;
  u32 owners = others == 0 ? 1 : others;
  u64 share = packs / (u64(blocks()) * LS_RELAY_TURNS);
  u32 most = u32(least(LS_BULK_PUSH_TILE / 16, share < LS_RELAY_LEAST / 16 ? LS_RELAY_LEAST / 16 : share)) & ~7u;
  Tiles tiles(packs, owners, most, 8);
  u32 rounds = u32(tiles.rounds());
  bool ok = true;

  // Tile j of a step goes to another rank in each block, so that all are written
  // to at any time.
  u32 turn = block() % owners;
  auto heir = [&](u32 j) { return (a.root + 1 + (j + turn) % owners) % a.ranks; };
  auto heirAfter = [&](u32 rank) { // another rank than root
    do {
      if (++rank == a.ranks) rank = 0;
    } while (rank == a.root && others > 0);
    return rank;
  };
  if (a.rank == a.root) {
    bool keep = send != recv;
    u32 n = (others == 0 ? 0 : 1) + keep, all = 0;
    for (u32 j = 0; j < owners; j++) all += u32(tiles.steps(j));
    auto offset = [&](u32 k) { return head + tiles.first(k / owners, k % owners) * 16; };
    auto to = [&](u32 k, u32 d) { return (d == 0 && others > 0 ? a.recv[heir(k % owners)] : recv) + offset(k); };
    auto tile = [&](u32 k, u64 &from, u32 &bytes) {
      u64 first = tiles.first(k / owners, k % owners);
      from = send + head + first * 16, bytes = tiles.length(first) * 16;
    };
    auto tell = [&](u32 j, u32 step) { storeRelease(&heap(a, heir(j))->flag[LS_PHASE_STEPS][block()][a.rank], before + step); };
    if (n == 0) all = 0;
    if ((send ^ recv) & 15) {
      for (u32 k = 0; k < all;) {
        for (u32 j = 0; j < owners && k < all; j++, k++) {
          u64 from;
          u32 bytes;
          tile(k, from, bytes);
          spread(from, bytes, n, [&](u32 d) { return to(k, d); });
        }
        sync();
        if (others > 1 && tid() < others) tell(tid(), (k + owners - 1) / owners);
      }
    } else if (tid() == 0) {
      RootTiles at(tiles);
      Pace pace(a.pace);
      u32 target = heir(0);
      relayStore<true>(relay, all, [&](u32 from) {
        u32 bytes = tiles.length(at.first) * 16;
        u64 offset = head + at.first * 16;
        if (others > 0) pace.take(bytes), bulkStore(a.recv[target] + offset, from, bytes);
        if (keep) bulkStore(recv + offset, from, bytes);
        at.next();
        target = heirAfter(target);
      });
    } else if (tid() == LS_RELAY_LOADER) {
      fenceProxy();
      RootTiles at(tiles);
      relayLoad(relay, all, [&](u64 &from, u32 &bytes) {
        from = send + head + at.first * 16, bytes = tiles.length(at.first) * 16;
        at.next();
      }, [](u32) { return true; });
    } else if (others > 1 && tid() >= LS_RELAY_TELLER && tid() - LS_RELAY_TELLER < others) {
      u32 j = tid() - LS_RELAY_TELLER;
      for (u32 now = 0, told = 0; now < all;) {
        now = loadShared(relay.written());
        u32 step = (now + owners - 1 - j) / owners; // of this heir's tiles
        if (step == told) {
          relax();
          continue;
        }
        fenceProxy();
        tell(j, step);
        told = step;
      }
    }
    syncWarp();
    if (block() == blocks() - 1) { // what is outside of packs goes to everyone at once
      spread(send, head, others + keep, ToPeers{a, 0});
      spread(send + tail, a.count - tail, others + keep, ToPeers{a, tail});
    }
  } else if (others > 1) {
    u32 self = ((a.rank + a.ranks - a.root - 1) % a.ranks + others - turn) % others;
    u32 all = u32(tiles.steps(self)), seen = 0;
    const u32 *flag = &own->flag[LS_PHASE_STEPS][block()][a.root];
    u64 first = tiles.first(0, self), stride = u64(blocks()) * owners * tiles.tile;
    if (tid() == 0) {
      u32 next = heirAfter(a.rank);
      Pace pace(a.pace);
      relayStore<false>(relay, all, [&](u32 from) {
        u32 bytes = tiles.length(first) * 16, target = next;
        for (u32 d = 1; d < others; d++, target = heirAfter(target)) {
          pace.take(bytes);
          bulkStore(a.recv[target] + head + first * 16, from, bytes);
        }
        first += stride;
      });
    } else if (tid() == LS_RELAY_LOADER) {
      ok = relayLoad(relay, all, [&](u64 &from, u32 &bytes) {
        from = recv + head + first * 16, bytes = tiles.length(first) * 16;
        first += stride;
      }, [&](u32 k) {
        if (k < seen) return true;
        if (!waitFlag(a, flag, before + k + 1, rounds - k - 1)) return false;
        seen = loadAcquire(flag) - before;
        fenceProxy();
        return true;
      });
    }
  }
  syncWarp();
  if (syncOr(!ok)) return op.stamps.stopped();
  if (tid() == 0) own->block[block()].steps = before + rounds;
  op.leave();
}
#endif
