// Movers that write into peers' windows: bytes, of any count and alignment.
//
// A push beats a pull over NVLink (no requests go the other way).
#pragma once
#include "bulk.h"
#include "op.h"
#include "pace.h"
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
#ifdef LS_HOST
  LS_BULK_PUSH_CHUNK = 40 << 10, // so that there are several
#else
  LS_BULK_PUSH_CHUNK = 256 << 10, // bytes that a kernel pushes to one peer before it turns to the next
#endif
  LS_BULK_PUSH_STAGES = 8,      // at most; as many as dynamic shared memory has room for
  LS_BULK_PUSH_LAG = 3,         // turns until a stage is filled again; there are more stages than that
  LS_BULK_PUSH_MBARRIERS = 256, // bytes before the stages: one or two for each, and two words
};

FI void prepareBulkPush() {
  if (tid() != 0) return;
  for (u32 s = 0; s < LS_BULK_PUSH_STAGES; s++) mbarrierInit(dynamicBase() + 8 * s, 1);
  fenceProxy();
}

// bulkSpread copies steps tiles: what(src, bytes) says from where and how many bytes,
// and stores(from) asks for the copies of a tile that is at from in shared memory;
// both are called for one tile after the other. A step takes a thread a third of a
// microsecond, so that divisions would be felt. All threads of the warp call it.
template <class What, class Stores> FI void bulkSpread(u64 steps, What what, Stores stores) {
  if (tid() == 0 && steps > 0) {
    u32 here = dynamicBase(), base = here + LS_BULK_PUSH_MBARRIERS;
    u32 stages = u32(least(LS_BULK_PUSH_STAGES, (dynamicBytes() - LS_BULK_PUSH_MBARRIERS) / LS_BULK_PUSH_TILE));
    fenceProxy();
    auto load = [&](u32 s) {
      u64 src;
      u32 bytes;
      what(src, bytes);
      mbarrierExpect(here + 8 * s, bytes);
      bulkLoad(base + s * LS_BULK_PUSH_TILE, src, bytes, here + 8 * s);
    };
    for (u32 s = 0; s < stages && s < steps; s++) load(s);
    u32 s = 0, parity = 0;
    for (u64 step = 0; step < steps; step++) {
      mbarrierWait(here + 8 * s, parity);
      stores(base + s * LS_BULK_PUSH_TILE);
      bulkCommit();
      // Half of the stages load while half are being stored: one that was given to
      // the copy unit a few turns ago has been read by now, and is filled again.
      if (step >= LS_BULK_PUSH_LAG && step - LS_BULK_PUSH_LAG + stages < steps) {
        bulkRead<LS_BULK_PUSH_LAG>();
        load(s >= LS_BULK_PUSH_LAG ? s - LS_BULK_PUSH_LAG : s + stages - LS_BULK_PUSH_LAG);
      }
      if (++s == stages) s = 0, parity ^= 1;
    }
    bulkDone<0>();
    fenceProxy();
  }
  syncWarp();
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
  u64 loaded = tiles.first(0, 0), stored = loaded, stride = u64(blocks()) * tiles.tile;
  if (tid() < 32) {
    Pace pace(a.pace);
    bulkSpread(tiles.steps(0), [&](u64 &from, u32 &bytes) {
      from = src + head + loaded * 16, bytes = tiles.length(loaded) * 16;
      loaded += stride;
    }, [&](u32 from) {
      u32 peer = a.rank, bytes = tiles.length(stored) * 16;
      for (u32 d = 0; d < n; d++) {
        if (++peer == a.ranks) peer = 0;
        if (peer != a.rank) pace.take(bytes);
        bulkStore(a.recv[peer] + place + head + stored * 16, from, bytes);
      }
      stored += stride;
    });
  }
  Tiles heads(head, 1, LS_PUSH_TILE, 128);
  for (u64 at = heads.first(0, 0), step = 0; at < head; at = heads.first(++step, 0)) {
    spread(src + at, heads.length(at), n, ToPeers{a, place + at});
  }
  if (block() == blocks() - 1 && tail < a.count) spread(src + tail, a.count - tail, n, ToPeers{a, place + tail});
  op.leave();
}

// Parts goes through the tiles that a block pushes of a part of count bytes for each
// peer: a chunk for the next rank, one for the rank after it, and so on, so that
// peers are not all written to from everywhere at one time.
struct Parts {
  const Args &a;
  u32 tile, tiles, chunk; // bytes of a tile; tiles of a part, and of a chunk
  u32 group, length, left, peer; // the tile is number group + left, and left < length, of peer's part

  FI explicit Parts(const Args &a) : a(a), group(0), peer(a.rank) {
    tile = u32(least(LS_BULK_PUSH_TILE, upTo((a.count * (a.ranks - 1) + blocks() - 1) / blocks(), 128)));
    tiles = tile == 0 ? 0 : u32((a.count + tile - 1) / tile);
    chunk = tile == 0 ? 1 : LS_BULK_PUSH_CHUNK / tile;
    length = u32(least(chunk, tiles)), left = block();
    if (++peer == a.ranks) peer = 0;
    settle();
  }
  FI u64 steps() const {
    u64 items = u64(tiles) * (a.ranks - 1);
    return items > block() ? (items - block() + blocks() - 1) / blocks() : 0;
  }
  FI void next() {
    left += blocks();
    settle();
  }
  FI void settle() {
    while (left >= length && group < tiles) {
      left -= length;
      if (++peer == a.ranks) peer = 0;
      if (peer != a.rank) continue;
      if (++peer == a.ranks) peer = 0; // all have had theirs of this chunk
      group += length, length = u32(least(chunk, tiles - group));
    }
  }
  FI u64 at() const { return u64(group + left) * tile; }
  FI u32 bytes() const { return u32(least(tile, a.count - at())); }
};

// ls_alltoall_bulk is ls_alltoall_push, and does as it does where count and
// buffers are not all multiples of 16. One thread serves the peers; the others
// copy what stays.
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
  if (tid() < 32) {
    Parts loads(a), stores = loads;
    Pace pace(a.pace);
    bulkSpread(loads.steps(), [&](u64 &from, u32 &bytes) {
      from = a.send[a.rank] + loads.peer * a.count + loads.at(), bytes = loads.bytes();
      loads.next();
    }, [&](u32 from) {
      pace.take(stores.bytes());
      bulkStore(a.recv[stores.peer] + a.rank * a.count + stores.at(), from, stores.bytes());
      stores.next();
    });
  } else {
    u64 own = a.rank * a.count, dst = a.recv[a.rank] + own;
    Tiles tiles(a.count, 1, LS_PUSH_TILE, 128);
    for (u64 at = tiles.first(0, 0), step = 0; at < a.count; at = tiles.first(++step, 0)) {
      spread(Team{tid() - 32, threads() - 32}, a.send[a.rank] + own + at, tiles.length(at), 1, [=](u32) { return dst + at; });
    }
  }
  op.leave();
}
#endif
