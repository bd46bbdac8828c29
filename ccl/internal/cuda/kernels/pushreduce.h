// Reductions of large buffers that push: every rank sends its part of a tile to
// the tile's owner, into a ring of slots in the owner's staging memory, and the
// owner reduces from there, near, what peers' loads would bring more slowly. The
// rings are small, so that they stay in the L2 cache. The result goes straight to
// everyone (AllReduce), stays (ReduceScatter), or goes to root's ring (Reduce),
// from where root takes it. All three go on at once for different tiles.
//
// Tile k of a pair of ranks has slot k % slots. Its source counts, in landed at
// the owner, tiles that are there; the owner counts, in taken at the source, those
// that it has read. Both count on from one kernel to the next and end each at the
// same number for all pairs, so that nobody needs to know what ran before.
//
// Order of reduction, accumulators and what is outside of 16-byte packs are as in
// sym.h, so results are the same.
#pragma once
#include "spread.h"
#include "sym.h"

// OwnShare is what one owner reduces: packs behind head elements, in tiles.
struct OwnShare {
  u64 send, recv; // offsets of the first pack in every send, and in recv
  Tiles tiles;
  u32 turn;
  FI u32 steps() const { return u32(tiles.steps(turn)); }
  FI u64 at(u32 k) const { return tiles.first(k, turn) * 16; }
  FI u32 bytes(u32 k) const { return tiles.length(tiles.first(k, turn)) * 16; }
};

// Pushing is a block's part of the operation.
template <class T> struct Pushing {
  const PushArgs &p;
  const Args &a;
  u32 first, owners; // owner j is rank (first + j) % ranks
  u32 before;        // what landed and taken were
  u32 rounds;        // the most tiles that any owner's block has
  bool relayed;      // root owns nothing, and receives results

  FI explicit Pushing(const PushArgs &p) : p(p), a(p.a) {
    // Of more than two ranks, all but root own tiles of a Reduce, so that no link
    // carries more than the buffer once.
    relayed = p.kind == LS_PUSH_ROOT && a.ranks > 2;
    first = p.kind == LS_PUSH_ROOT ? (a.root + relayed) % a.ranks : 0;
    owners = p.kind != LS_PUSH_ROOT ? a.ranks : relayed ? a.ranks - 1 : 1;
    before = heap(a, a.rank)->block[block()].tiles;
    rounds = u32(Tiles(a.count * sizeof(T) / 16, p.kind == LS_PUSH_SHARES ? 1 : owners, p.tile / 16).rounds());
  }

  FI u32 index(u32 rank) const { return (rank + a.ranks - first) % a.ranks; }
  FI u32 owner(u32 j) const { return (first + j) % a.ranks; }
  FI bool owns(u32 rank) const { return index(rank) < owners; }

  // share is the same on all ranks: buffers in windows are aligned alike for all.
  FI OwnShare share(u32 owner) const {
    bool shares = p.kind == LS_PUSH_SHARES;
    u64 from = shares ? owner * a.count * sizeof(T) : 0, base = a.send[a.rank] + from;
    u64 head = least((-base & 15) / sizeof(T), a.count);
    if (p.kind == LS_PUSH_ALL && ((base ^ a.recv[a.rank]) & 15)) head = a.count;
    u64 packs = (a.count - head) * sizeof(T) / 16;
    return {from + head * sizeof(T), head * sizeof(T), Tiles(packs, shares ? 1 : owners, p.tile / 16), shares ? 0 : index(owner)};
  }
  // steps is how many tiles go from one rank to another; results are tiles too.
  FI u32 steps(u32 from, u32 to) const {
    if (relayed && to == a.root) return share(from).steps();
    return owns(to) ? share(to).steps() : 0;
  }

  // slot is where rank to keeps tile k from rank from.
  FI u64 slot(u32 to, u32 from, u32 k) const {
    return p.ring[to] + ((u64(block()) * a.ranks + from) * p.slots + k % p.slots) * p.tile;
  }
  // landed waits until tile k from a rank is here, room until tile k may be pushed
  // to one; both return how many tiles are known. 0: aborted.
  FI u32 landed(u32 from, u32 k) const { return reached(&heap(a, a.rank)->landed[block()][from], k + 1); }
  FI u32 room(u32 to, u32 k) const {
    if (k < p.slots) return p.slots;
    u32 n = reached(&heap(a, a.rank)->taken[block()][to], k + 1 - p.slots);
    return n == 0 ? 0 : n + p.slots;
  }
  FI u32 roomNow(u32 to) const { return loadAcquire(&heap(a, a.rank)->taken[block()][to]) - before + p.slots; }
  FI u32 reached(const u32 *count, u32 want) const {
    if (!waitFlag(a, count, before + want, rounds - want)) return 0;
    return loadAcquire(count) - before;
  }
  // tellLanded and tellTaken say how many tiles, after those that a rank has pushed
  // to rank to, and read of rank from's. Reading is over when its values are there:
  // no fence has to hold the word back.
  FI void tellLanded(u32 to, u32 n) const { storeRelease(&heap(a, to)->landed[block()][a.rank], before + n); }
  FI void tellTaken(u32 from, u32 n) const { storeVolatile(&heap(a, from)->taken[block()][a.rank], before + n); }

  // setEnds and ends reduce what is outside of packs, a few elements, by loads from
  // peers. For Reduce root does it.
  FI void setEnds() const {
    u32 t = tid() < a.ranks ? tid() : 0;
    if (p.kind == LS_PUSH_ALL) allReduceWork(a);
    else if (p.kind == LS_PUSH_SHARES) reduceScatterWork(a, sizeof(T));
    else setWork(a.send[t], a.recv[a.rank], a.count, a.ranks, 1, 0, 1, a.op, a.rank, a.ranks);
  }
  FI void ends() const {
    if (p.kind == LS_PUSH_ROOT && a.rank != a.root) return;
    OwnShare s = share(a.rank);
    reduceEnds<T>(Cut(s.recv / sizeof(T), s.tiles.units, a.count, sizeof(T)));
  }

  FI void end() const {
    if (tid() == 0) heap(a, a.rank)->block[block()].tiles = before + rounds;
  }
};

// ls_pushreduce by loads and stores: in each turn a block pushes one tile to each
// owner, and reduces an earlier one while that one travels.
KERNEL(LS_SYM_THREADS) void ls_pushreduce(PushArgs p) {
  using T = LS_TYPE;
  const Args &a = p.a;
  Op op(a);
  Pushing<T> f(p);
  f.setEnds();
  if (!op.enter()) return;
  f.ends();
  sync(); // work is written from here on

  bool takes = f.relayed && a.rank == a.root, passes = f.relayed && !takes;
  OwnShare mine = f.share(a.rank);
  u32 steps = f.owns(a.rank) ? mine.steps() : 0, lag = p.slots / 2, peer = tid();
  bool speaks = peer < a.ranks && peer != a.rank, toOwner = speaks && !(passes && peer == a.root);
  for (u32 t = 0; t < f.rounds + lag; t++) {
    bool ok = true;
    if (t < f.rounds) {
      if (toOwner && t < f.steps(a.rank, peer)) ok = f.room(peer, t) != 0;
      if (syncOr(!ok)) return op.stamps.stopped();
      for (u32 d = 1; d < a.ranks; d++) {
        u32 to = (a.rank + d) % a.ranks;
        if (!f.owns(to)) continue;
        OwnShare s = f.share(to);
        if (t >= s.steps()) continue;
        spreadTo(f.slot(to, a.rank, t), a.send[a.rank] + s.send + s.at(t), s.bytes(t));
      }
      sync();
      if (toOwner) f.tellLanded(peer, t + 1);
    }
    if (t < lag) continue;
    u32 u = t - lag;
    if (takes) {
      for (u32 j = 0; j < f.owners; j++) {
        u32 from = f.owner(j);
        OwnShare s = f.share(from);
        if (u >= s.steps()) continue;
        ok = tid() != 0 || f.landed(from, u) != 0;
        if (syncOr(!ok)) return op.stamps.stopped();
        spreadTo(a.recv[a.rank] + s.recv + s.at(u), f.slot(a.rank, from, u), s.bytes(u));
      }
    } else if (u < steps) {
      u64 at = mine.at(u), out = a.recv[a.rank] + mine.recv + at;
      bool odd = !passes && out & 15; // first reduced into a slot that has been read
      if (peer < a.ranks) {
        if (speaks) ok = f.landed(peer, u) != 0 && (!passes || peer != a.root || f.room(peer, u) != 0);
        work.from[peer] = speaks ? f.slot(a.rank, peer, u) : a.send[a.rank] + mine.send + at;
        if (p.kind == LS_PUSH_ALL) work.to[peer] = a.recv[(a.rank + 1 + peer) % a.ranks] + mine.recv + at;
        else if (peer == 0) work.to[0] = passes ? f.slot(a.root, a.rank, u) : odd ? f.slot(a.rank, (a.rank + 1) % a.ranks, u) : out;
      }
      if (syncOr(!ok)) return op.stamps.stopped();
      reduceTile<T>(0, 0, mine.bytes(u) / 16);
      if (odd) {
        sync();
        spreadTo(out, work.to[0], mine.bytes(u));
      }
    }
    sync();
    if (passes && speaks && peer == a.root) f.tellLanded(peer, u + 1);
    if (speaks) f.tellTaken(peer, u + 1);
  }
  f.end();
  op.leave();
}
