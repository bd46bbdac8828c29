// Movers that write into peers' windows: bytes, of any count and alignment.
//
// A push beats a pull over NVLink (no requests go the other way).
#pragma once
#include "bulk.h"
#include "op.h"
#include "spread.h"

// ToPeers are the n destinations of what every rank receives at the same place
// of its recv: the next rank first and this one last, so that ranks do not all
// write to the same one.
struct ToPeers {
  const Args &a;
  u64 offset;
  FI u64 operator()(u32 d) const { return a.recv[(a.rank + 1 + d) % a.ranks] + offset; }
};

// ls_allgather_push: each rank's send, count bytes, to its place in all recvs.
KERNEL(512) void ls_allgather_push(Args a) {
  Op op(a);
  if (!op.enter()) return;
  u64 src = a.send[a.rank], place = a.rank * a.count;
  u32 n = a.recv[a.rank] + place == src ? a.ranks - 1 : a.ranks; // in place: its own part is there
  Tiles tiles(a.count, 1, LS_PUSH_TILE, 128);
  for (u64 at = tiles.first(0, 0), step = 0; at < a.count; at = tiles.first(++step, 0)) {
    spread(src + at, tiles.length(at), n, ToPeers{a, place + at});
  }
  op.leave();
}

// exchange pushes part p of each rank's send, count bytes, to the sender's place
// in rank p's recv. Blocks take the peers in turn, so that all are written to at
// one time.
FI void exchange(const Args &a) {
  u64 tile = least(LS_PUSH_TILE, upTo((a.count * a.ranks + blocks() - 1) / blocks(), 128));
  u64 tiles = tile == 0 ? 0 : (a.count + tile - 1) / tile;
  for (u64 k = block(); k < tiles * a.ranks; k += blocks()) {
    u32 peer = (a.rank + 1 + k % a.ranks) % a.ranks;
    u64 at = k / a.ranks * tile, dst = a.recv[peer] + a.rank * a.count + at;
    spread(a.send[a.rank] + peer * a.count + at, least(tile, a.count - at), 1, [=](u32) { return dst; });
  }
}

// ls_alltoall_push: exchange. Not in place.
KERNEL(512) void ls_alltoall_push(Args a) {
  Op op(a);
  if (!op.enter()) return;
  exchange(a);
  op.leave();
}

// ls_copy: count bytes from send[rank] to recv[rank], in memory of any GPU that
// is mapped here. It speaks with nobody, so it may have any number of blocks,
// and ranks need not all run it.
KERNEL(512) void ls_copy(Args a) {
  Stamps<Args> stamps(a);
  stamps.entered();
  u64 dst = a.recv[a.rank];
  Tiles tiles(a.count, 1, LS_PUSH_TILE, 128);
  for (u64 at = tiles.first(0, 0), step = 0; at < a.count; at = tiles.first(++step, 0)) {
    spread(a.send[a.rank] + at, tiles.length(at), 1, [=](u32) { return dst + at; });
  }
  sync();
  stamps.left();
}

#ifdef LS_BULK
// The same by bulk copies of sm_90: one thread moves all of a block's tiles
// through stages of shared memory.
enum {
  LS_BULK_PUSH_THREADS = 256,
  LS_BULK_PUSH_TILE = 16 << 10,
  LS_BULK_PUSH_STAGES = 8,      // at most; as many as dynamic shared memory has room for
  LS_BULK_PUSH_LAG = 3,         // turns until a stage is filled again; there are more stages than that
  LS_BULK_PUSH_MBARRIERS = 256, // bytes before the stages: one or two for each, and two words
};

FI void prepareBulkPush() {
  if (tid() != 0) return;
  for (u32 s = 0; s < LS_BULK_PUSH_STAGES; s++) mbarrierInit(dynamicBase() + 8 * s, 1);
  fenceProxy();
}

// bulkSpread copies steps tiles: tile(step) says from where and how many bytes,
// to(step, d) the d-th of n destinations. All threads of the block call it.
template <class Tile, class To> FI void bulkSpread(u64 steps, const Tile &tile, u32 n, const To &to) {
  if (tid() == 0 && steps > 0) {
    u32 here = dynamicBase(), base = here + LS_BULK_PUSH_MBARRIERS;
    u32 stages = u32(least(LS_BULK_PUSH_STAGES, (dynamicBytes() - LS_BULK_PUSH_MBARRIERS) / LS_BULK_PUSH_TILE));
    fenceProxy();
    auto load = [&](u64 step, u32 s) {
      u64 src;
      u32 bytes;
      tile(step, src, bytes);
      mbarrierExpect(here + 8 * s, bytes);
      bulkLoad(base + s * LS_BULK_PUSH_TILE, src, bytes, here + 8 * s);
    };
    for (u32 s = 0; s < stages && s < steps; s++) load(s, s);
    u32 s = 0, parity = 0;
    for (u64 step = 0; step < steps; step++) {
      u64 src;
      u32 bytes;
      tile(step, src, bytes);
      mbarrierWait(here + 8 * s, parity);
      for (u32 d = 0; d < n; d++) bulkStore(to(step, d), base + s * LS_BULK_PUSH_TILE, bytes);
      bulkCommit();
      // Half of the stages load while half are being stored: one that was given to
      // the copy unit a few turns ago has been read by now, and is filled again.
      if (step >= LS_BULK_PUSH_LAG && step - LS_BULK_PUSH_LAG + stages < steps) {
        bulkRead<LS_BULK_PUSH_LAG>();
        load(step - LS_BULK_PUSH_LAG + stages, (s + stages - LS_BULK_PUSH_LAG) % stages);
      }
      if (++s == stages) s = 0, parity ^= 1;
    }
    bulkDone<0>();
    fenceProxy();
  }
  if (tid() < 32) syncWarp();
}

// ls_allgather_bulk is ls_allgather_push. What is aligned differently at the two
// ends, and what is outside of 16-byte packs, goes by loads and stores.
KERNEL(LS_BULK_PUSH_THREADS) void ls_allgather_bulk(Args a) {
  Op op(a);
  prepareBulkPush();
  if (!op.enter()) return;
  u64 src = a.send[a.rank], place = a.rank * a.count, skew = 0;
  u32 n = a.recv[a.rank] + place == src ? a.ranks - 1 : a.ranks;
  for (u32 d = 0; d < n; d++) skew |= src ^ ToPeers{a, place}(d);
  u64 head = skew & 15 ? a.count : least(-src & 15, a.count), packs = (a.count - head) / 16, tail = head + packs * 16;
  Tiles tiles(packs, 1, LS_BULK_PUSH_TILE / 16, 8);
  bulkSpread(tiles.steps(0), [&](u64 step, u64 &from, u32 &bytes) {
    u64 first = tiles.first(step, 0);
    from = src + head + first * 16, bytes = tiles.length(first) * 16;
  }, n, [&](u64 step, u32 d) { return ToPeers{a, place + head + tiles.first(step, 0) * 16}(d); });
  Tiles heads(head, 1, LS_PUSH_TILE, 128);
  for (u64 at = heads.first(0, 0), step = 0; at < head; at = heads.first(++step, 0)) {
    spread(src + at, heads.length(at), n, ToPeers{a, place + at});
  }
  if (block() == blocks() - 1 && tail < a.count) spread(src + tail, a.count - tail, n, ToPeers{a, place + tail});
  op.leave();
}

// ls_alltoall_bulk is ls_alltoall_push, and does as it does where count and
// buffers are not all multiples of 16.
KERNEL(LS_BULK_PUSH_THREADS) void ls_alltoall_bulk(Args a) {
  Op op(a);
  prepareBulkPush();
  if (!op.enter()) return;
  u64 odd = a.count | a.send[a.rank];
  for (u32 p = 0; p < a.ranks; p++) odd |= a.recv[p];
  if (odd & 15) {
    exchange(a);
    op.leave();
    return;
  }
  u64 tile = least(LS_BULK_PUSH_TILE, upTo((a.count * a.ranks + blocks() - 1) / blocks(), 128));
  u64 items = tile == 0 ? 0 : (a.count + tile - 1) / tile * a.ranks;
  u64 steps = items > block() ? (items - block() + blocks() - 1) / blocks() : 0;
  auto peerOf = [&](u64 step) { return u32((a.rank + 1 + (block() + step * blocks()) % a.ranks) % a.ranks); };
  auto offset = [&](u64 step) { return (block() + step * blocks()) / a.ranks * tile; };
  bulkSpread(steps, [&](u64 step, u64 &from, u32 &bytes) {
    u64 at = offset(step);
    from = a.send[a.rank] + peerOf(step) * a.count + at, bytes = u32(least(tile, a.count - at));
  }, 1, [&](u64 step, u32) { return a.recv[peerOf(step)] + a.rank * a.count + offset(step); });
  op.leave();
}
#endif
