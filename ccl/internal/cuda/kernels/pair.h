// A reduction of two ranks' buffers by one of them. Tiles of both come by bulk copies, and
// ordinary stores take the result from registers to this rank's own memory: a stage is
// free again once it has been read, with no fence between threads and the copy unit and
// no second trip through shared memory. What the links carry is bound by the bytes of
// the peer's that can be on their way, so a stage must not be held for anything else.
#pragma once
#include "sym.h"

#ifdef LS_BULK
enum {
  LS_PAIR_TILE = 8 << 10,
  LS_PAIR_LEAST = 4 << 10, // bytes of a tile at least, unless there is less to do
  LS_PAIR_TURNS = 32,      // tiles that a block shall have, a few for each warp
};

FI Tiles pairTiles(const Cut &cut) {
  u64 share = cut.packs / (u64(blocks()) * LS_PAIR_TURNS), fewest = LS_PAIR_LEAST / 16;
  return Tiles(cut.packs, 1, u32(least(LS_PAIR_TILE / 16, share < fewest ? fewest : share)) & ~7u, 8);
}

// combinePair combines two tiles in shared memory, the second behind the first, and
// stores the result to global memory, by a warp.
template <class T, int OP> FI void combinePair(u64 to, u32 tiles, u32 tile, u32 packs, const Scale<typename Elem<T>::Acc> &scale) {
  constexpr u32 U = 4, STEP = 32;
#pragma unroll 1
  for (u32 i = tid() % 32; i < packs; i += U * STEP) {
    u32x4 x[U], y[U];
#pragma unroll
    for (u32 u = 0; u < U; u++) {
      u32 at = tiles + (i + u * STEP) * 16;
      if (i + u * STEP < packs) x[u] = getShared(at), y[u] = getShared(at + tile);
    }
#pragma unroll
    for (u32 u = 0; u < U; u++) {
      if (i + u * STEP >= packs) continue;
      Pack16<T> sum(x[u]);
      sum.template reduce<OP>(Pack16<T>(y[u]));
      sum.finish(scale);
      put<u32x4>(to + (i + u * STEP) * 16, sum.bits16());
    }
  }
}

// reducePair does work, of two sources and one target. prepareBulk has been called.
template <class T> static __device__ __attribute__((noinline)) void reducePair() {
  Cut cut(sizeof(T));
  u64 body = cut.head * sizeof(T);
  Tiles tiles = pairTiles(cut);
  u32 tile = tiles.tile * 16;
  Stages stages{u32(least(LS_BULK_STAGES, (dynamicBytes() - LS_BULK_MBARRIERS) / (2 * tile))), tile};
  u64 steps = tiles.steps(0), first = tiles.first(0, 0), stride = u64(blocks()) * tiles.tile;
  Stage stage{0, 0};
  if (tid() < LS_BULK_WORKERS) {
    Scale<typename Elem<T>::Acc> scale(work.op, work.ranks);
    u64 to = work.to[0] + body;
    for (u64 round = 0; round < steps; round += stages.count, stage.parity ^= 1) {
#pragma unroll 1
      for (u32 s = tid() / 32; s < stages.count && round + s < steps; s += LS_BULK_WORKERS / 32) { // a stage is always the same warp's
        u64 pack = first + (round + s) * stride;
        u32 packs = tiles.length(pack);
        mbarrierWait(stages.full(s), stage.parity);
        LS_DISPATCH_OP(work.op, combinePair<T, OP>(to + pack * 16, stages.at(s, 0), tile, packs, scale))
        syncWarp();
        if (tid() % 32 == 0) mbarrierArrive(stages.empty(s));
      }
    }
  } else if (tid() == LS_BULK_LOADER) {
    fenceProxy(); // what the peer's ordinary stores have made, before it entered
    u64 mine = work.from[work.rank] + body, peers = work.from[1 - work.rank] + body;
    for (u64 k = 0; k < steps; k++, first += stride, stage.next(stages.count)) {
      if (k >= stages.count) mbarrierWait(stages.empty(stage.s), stage.parity ^ 1);
      u32 bytes = tiles.length(first) * 16;
      mbarrierExpect(stages.full(stage.s), 2 * bytes);
      bulkLoad(stages.at(stage.s, 1 - work.rank), peers + first * 16, bytes, stages.full(stage.s));
      bulkLoad(stages.at(stage.s, work.rank), mine + first * 16, bytes, stages.full(stage.s));
    }
  }
  if (tid() >= LS_BULK_WORKERS) syncWarp();
  reduceEnds<T>(cut);
}

// ls_reducescatter_bulk is ls_reducescatter_sym by bulk copies.
KERNEL(LS_BULK_THREADS) void ls_reducescatter_bulk(Args a) {
  Op op(a);
  reduceScatterWork(a, sizeof(LS_TYPE));
  prepareBulk();
  if (!op.enter()) return;
  if (a.ranks == 2) reducePair<LS_TYPE>();
  else reduceWorkBulk<LS_TYPE>(a.pace);
  op.leave();
}
#endif
