// Reductions over buffers that live in symmetric windows: pulled from all ranks,
// combined in rank order, pushed to whoever receives them.
//
// Each element is read from all ranks before it is written to any, and by one
// thread only, so all of these work in place. The module that includes this
// defines LS_TYPE.
#pragma once
#include "bulk.h"
#include "op.h"
#include "pace.h"
#include "types.h"
#include "vector.h"

enum {
  LS_SYM_THREADS = 512,
  LS_SYM_TILE = 512 * 4, // packs of a block's turn
  LS_BULK_STAGE = 32 << 10,      // bytes of a stage of bulk copies at most: a tile of each source
  LS_BULK_STAGE_OF_2 = 16 << 10, // and of two sources: tiles are as large as of four, and more are under way
};

// Work is a reduction that a block has a share of. It is in shared memory, where
// the one copy of the code that all kernels call finds it.
//
// Of `owners` ranks that take tiles in turn this one is number `owner`. They cut
// alike because windows are mapped at whole pages, so that a buffer is aligned
// alike for everyone.
struct Work {
  u64 from[LS_MAX_RANKS], to[LS_MAX_RANKS]; // addresses
  u64 count; // elements
  u32 sources, targets;
  u32 owner, owners;
  u32 op, rank, ranks;
  u32 stage; // bytes of a stage of bulk copies at most
};
#ifdef LS_HOST
#define work (*(Work *)emulated.shared->memory)
#else
static __shared__ Work work;
#endif

// Each thread of setWork's first LS_MAX_RANKS writes one address of each kind;
// whoever reads work must be behind a barrier.
FI void setWork(u64 from, u64 to, u64 count, u32 sources, u32 targets, u32 owner, u32 owners, u32 op, u32 rank, u32 ranks) {
  if (tid() < sources) work.from[tid()] = from;
  if (tid() < targets) work.to[tid()] = to;
  if (tid() == 0) {
    work.count = count, work.sources = sources, work.targets = targets;
    work.owner = owner, work.owners = owners, work.op = op, work.rank = rank, work.ranks = ranks;
    work.stage = sources > 2 ? LS_BULK_STAGE : LS_BULK_STAGE_OF_2;
  }
}

// reducePacks combines 16-byte packs [first, first + packs) behind byte offset
// body of at most W sources, and stores them to the targets. Each thread has
// U × sources loads in flight.
template <class T, int OP, int W, int U> FI void reducePacks(u64 body, u64 first, u32 packs, const Scale<typename Elem<T>::Acc> &scale) {
  u32 n = work.sources;
  for (u32 i = tid(); i < packs; i += threads() * U) {
    u64 at = body + (first + i) * 16, stride = u64(threads()) * 16;
    u32x4 raw[U][W];
#pragma unroll
    for (int p = 0; p < W; p++) {
      if (p < n) {
        u64 src = work.from[p] + at;
#pragma unroll
        for (int u = 0; u < U; u++)
          if (u == 0 || i + u * threads() < packs) raw[u][p] = get<u32x4>(src + u * stride);
      }
    }
    loadedFirst();
#pragma unroll
    for (int u = 0; u < U; u++) {
      Pack16<T> sum(raw[u][0]);
#pragma unroll
      for (int p = 1; p < W; p++)
        if (p < n) sum.template reduce<OP>(Pack16<T>(raw[u][p]));
      sum.finish(scale);
      raw[u][0] = sum.bits16();
    }
    for (u32 d = 0; d < work.targets; d++) {
      u64 dst = work.to[d] + at;
#pragma unroll
      for (int u = 0; u < U; u++)
        if (u == 0 || i + u * threads() < packs) put<u32x4>(dst + u * stride, raw[u][0]);
    }
  }
}

// reduceOne does so for element i alone: ends of buffers, and buffers whose
// alignments differ.
template <class T> FI void reduceOne(u64 i, const Scale<typename Elem<T>::Acc> &scale) {
  using Raw = typename RawOf<sizeof(T)>::type;
  using A = typename Elem<T>::Acc;
  Raw raw[LS_MAX_RANKS];
#pragma unroll
  for (int p = 0; p < LS_MAX_RANKS; p++)
    if (p < work.sources) raw[p] = get<Raw>(work.from[p] + i * sizeof(T));
  A sum = Elem<T>::up(__builtin_bit_cast(T, raw[0]));
#pragma unroll
  for (int p = 1; p < LS_MAX_RANKS; p++) {
    if (p < work.sources) {
      A x = Elem<T>::up(__builtin_bit_cast(T, raw[p]));
      LS_DISPATCH_OP(work.op, sum = combine<OP>(sum, x));
    }
  }
  Raw out = __builtin_bit_cast(Raw, Elem<T>::down(scale(sum)));
  for (u32 d = 0; d < work.targets; d++) put<Raw>(work.to[d] + i * sizeof(T), out);
}

// Cut is where the 16-byte packs of work's buffers lie: head elements before
// them, tail elements after them. Buffers with different alignments have none.
struct Cut {
  u64 head, packs, tail;
  FI explicit Cut(u32 size) {
    u64 base = work.from[0], skew = 0;
    for (u32 p = 1; p < work.sources; p++) skew |= base ^ work.from[p];
    for (u32 d = 0; d < work.targets; d++) skew |= base ^ work.to[d];
    head = skew & 15 ? work.count : least((-base & 15) / size, work.count);
    packs = (work.count - head) * size / 16;
    tail = work.count - head - packs * 16 / size;
  }
};

// reduceEnds does the elements outside of packs: a few by the first owner's first
// block, a whole buffer of them by everyone.
template <class T> static __device__ __attribute__((noinline)) void reduceEndsOf(u64 head, u64 packs, u64 tail) {
  Scale<typename Elem<T>::Acc> scale(work.op, work.ranks);
  u64 ends = head + tail, stride = u64(threads()) * blocks() * work.owners;
  for (u64 i = (u64(block()) * work.owners + work.owner) * threads() + tid(); i < ends; i += stride) {
    reduceOne<T>(i < head ? i : i + packs * 16 / sizeof(T), scale);
  }
}
template <class T> FI void reduceEnds(const Cut &cut) {
  if (cut.head + cut.tail > 0) reduceEndsOf<T>(cut.head, cut.packs, cut.tail);
}

// reduceTile does one tile of work by loads and stores of all threads.
template <class T> static __device__ __attribute__((noinline)) void reduceTile(u64 body, u64 first, u32 packs) {
  Scale<typename Elem<T>::Acc> scale(work.op, work.ranks);
  constexpr int U = isFloat<typename Elem<T>::Acc> && sizeof(T) == 1 ? 1 : 2; // a pack of these fills more registers
  switch (work.op) {
  case LS_PROD: reducePacks<T, LS_PROD, 8, 1>(body, first, packs, scale); break;
  case LS_MAX: reducePacks<T, LS_MAX, 8, 1>(body, first, packs, scale); break;
  case LS_MIN: reducePacks<T, LS_MIN, 8, 1>(body, first, packs, scale); break;
  default:
    if (work.sources <= 4) reducePacks<T, LS_SUM, 4, 2 * U>(body, first, packs, scale);
    else reducePacks<T, LS_SUM, 8, U>(body, first, packs, scale);
  }
}

// symTiles is how reduceWork cuts work.
FI Tiles symTiles(const Cut &cut) { return Tiles(cut.packs, work.owners, LS_SYM_TILE, 8); }

// reduceWork does this block's share of work so.
template <class T> static __device__ __attribute__((noinline)) void reduceWork() {
  Cut cut(sizeof(T));
  Tiles tiles = symTiles(cut);
  for (u64 at = tiles.first(0, work.owner), step = 0; at < cut.packs; at = tiles.first(++step, work.owner)) {
    reduceTile<T>(cut.head * sizeof(T), at, tiles.length(at));
  }
  reduceEnds<T>(cut);
}

#ifdef LS_BULK
// The same by bulk copies. One thread keeps stages of shared memory full of tiles of
// all sources, another empties them to the targets; the workers combine what is in a
// stage into its first tile, each warp another stage: what a tile takes is mostly
// waiting, for its arrival and for the fence after it.
enum {
#ifdef LS_HOST
  LS_BULK_WORKERS = 96, // more warps than stages
#else
  LS_BULK_WORKERS = 256,
#endif
  LS_BULK_LOADER = LS_BULK_WORKERS, // threads, each in a warp of its own
  LS_BULK_STORER = LS_BULK_LOADER + 32,
  LS_BULK_THREADS = LS_BULK_STORER + 32,
  LS_BULK_LEAST = 8 << 10,                // bytes of a stage at least, unless there is less to do
  LS_BULK_TURNS = 8,                      // tiles that a block shall have, for what comes, is combined and leaves to overlap
  LS_BULK_STAGES = 16,                    // at most; as many as dynamic shared memory has room for
  LS_BULK_MBARRIERS = 384,                // bytes before the stages: three for each
};

struct Stages {
  u32 count, tile; // tile in bytes
  FI u32 full(u32 s) const { return dynamicBase() + 8 * s; }                        // mbarrier: its tiles have come
  FI u32 combined(u32 s) const { return dynamicBase() + 8 * (LS_BULK_STAGES + s); } // mbarrier: its first one is the result
  FI u32 empty(u32 s) const { return dynamicBase() + 8 * (2 * LS_BULK_STAGES + s); } // mbarrier: it has been read
  FI u32 at(u32 s, u32 source) const { return dynamicBase() + LS_BULK_MBARRIERS + (s * work.sources + source) * tile; }
};

// combinePacks reduces n tiles, at most W, of which the first is at p, into that one, by
// so many threads, of which this is number me. A thread has U packs under way.
template <class T, int OP, int W, int U> FI void combinePacks(u32 p, u32 tile, u32 n, u32 packs, u32 me, u32 workers, const Scale<typename Elem<T>::Acc> &scale) {
  for (u32 i = me; i < packs; i += workers * U) {
    u32x4 raw[U][W];
#pragma unroll
    for (int u = 0; u < U; u++) {
#pragma unroll
      for (int k = 0; k < W; k++)
        if ((u == 0 || i + u * workers < packs) && (k == 0 || k < n)) raw[u][k] = getShared(p + k * tile + (i + u * workers) * 16);
    }
#pragma unroll
    for (int u = 0; u < U; u++) {
      Pack16<T> sum(raw[u][0]);
#pragma unroll
      for (int k = 1; k < W; k++)
        if (k < n) sum.template reduce<OP>(Pack16<T>(raw[u][k]));
      sum.finish(scale);
      if (u == 0 || i + u * workers < packs) putShared(p + (i + u * workers) * 16, sum.bits16());
    }
  }
}
template <class T> static __device__ __attribute__((noinline)) void combineTiles(u32 p, u32 tile, u32 n, u32 packs, u32 me, u32 workers) {
  Scale<typename Elem<T>::Acc> scale(work.op, work.ranks);
  switch (work.op) {
  case LS_PROD: combinePacks<T, LS_PROD, 8, 1>(p, tile, n, packs, me, workers, scale); break;
  case LS_MAX: combinePacks<T, LS_MAX, 8, 1>(p, tile, n, packs, me, workers, scale); break;
  case LS_MIN: combinePacks<T, LS_MIN, 8, 1>(p, tile, n, packs, me, workers, scale); break;
  default:
    if (n <= 2) combinePacks<T, LS_SUM, 2, 4>(p, tile, n, packs, me, workers, scale);
    else if (n <= 4) combinePacks<T, LS_SUM, 4, 2>(p, tile, n, packs, me, workers, scale);
    else combinePacks<T, LS_SUM, 8, 1>(p, tile, n, packs, me, workers, scale);
  }
}

// prepareBulk sets up mbarriers, by a thread that has nothing else to do, before a barrier that all threads go through.
FI void prepareBulk() {
  if (tid() != LS_BULK_WORKERS) return;
  Stages stages{};
  for (u32 s = 0; s < LS_BULK_STAGES; s++) {
    mbarrierInit(stages.full(s), 1);
    mbarrierInit(stages.combined(s), 1);
    mbarrierInit(stages.empty(s), 1);
  }
  fenceProxy();
}

// resetBulk does so again, when all of a reduction is done.
FI void resetBulk() {
  if (tid() != LS_BULK_WORKERS) return;
  Stages stages{};
  for (u32 s = 0; s < LS_BULK_STAGES; s++) mbarrierInval(stages.full(s)), mbarrierInval(stages.combined(s)), mbarrierInval(stages.empty(s));
  prepareBulk();
}

// bulkTiles is how reduceWorkBulk cuts work.
FI Tiles bulkTiles(const Cut &cut) {
  u32 n = work.sources;
  u64 share = cut.packs / (u64(blocks()) * work.owners * LS_BULK_TURNS), fewest = LS_BULK_LEAST / n / 16;
  return Tiles(cut.packs, work.owners, u32(least(work.stage / n / 16, share < fewest ? fewest : share)) & ~7u, 8);
}

template <class T> static __device__ __attribute__((noinline)) void reduceWorkBulk(u32 perKiB = 0) {
  Cut cut(sizeof(T));
  u64 body = cut.head * sizeof(T);
  u32 n = work.sources;
  Tiles tiles = bulkTiles(cut);
  u32 tile = tiles.tile * 16;
  Stages stages{u32(least(LS_BULK_STAGES, (dynamicBytes() - LS_BULK_MBARRIERS) / (n * tile))), tile};
  u64 steps = tiles.steps(work.owner), first = tiles.first(0, work.owner), stride = u64(blocks()) * work.owners * tiles.tile;
  Stage stage{0, 0};
  // A step has a fraction of a microsecond: divisions would be felt.
  if (tid() < LS_BULK_WORKERS) {
    // A stage is always the same warp's: nobody may wait for a phase of an mbarrier before
    // the one before it is over.
    for (u64 round = 0; round < steps; round += stages.count, stage.parity ^= 1) {
      for (u32 s = tid() / 32; s < stages.count && round + s < steps; s += LS_BULK_WORKERS / 32) {
        mbarrierWait(stages.full(s), stage.parity);
        combineTiles<T>(stages.at(s, 0), tile, n, tiles.length(first + (round + s) * stride), tid() % 32, 32);
        fenceProxyShared();
        syncWarp();
        if (tid() % 32 == 0) mbarrierArrive(stages.combined(s));
      }
    }
  } else if (tid() == LS_BULK_LOADER) {
    fenceProxy(); // what peers' ordinary stores have made, before they entered
    Pace pace(perKiB, work.targets > 1 ? 2 : 1); // of a reduction for all, half of what passes the links is results
    u32 begin = (work.rank + block() + 1) % n; // not all ranks and blocks from the same one first
    for (u64 k = 0; k < steps; k++, first += stride, stage.next(stages.count)) {
      if (k >= stages.count) mbarrierWait(stages.empty(stage.s), stage.parity ^ 1);
      u32 bytes = tiles.length(first) * 16;
      mbarrierExpect(stages.full(stage.s), n * bytes);
      for (u32 i = 0, p = begin; i < n; i++) {
        if (p != work.rank) pace.take(bytes);
        bulkLoad(stages.at(stage.s, p), work.from[p] + body + first * 16, bytes, stages.full(stage.s));
        if (++p == n) p = 0;
      }
    }
  } else if (tid() == LS_BULK_STORER) {
    Pace pace(perKiB, 2);
    u32 targets = work.targets, begin = block() % targets;
    Stage read{0, 0};
    for (u64 k = 0; k < steps; k++, first += stride, stage.next(stages.count)) {
      u32 bytes = tiles.length(first) * 16;
      mbarrierWait(stages.combined(stage.s), stage.parity);
      for (u32 i = 0, t = begin; i < targets; i++) {
        if (t + 1 != targets) pace.take(bytes);
        bulkStore(work.to[t] + body + first * 16, stages.at(stage.s, 0), bytes);
        if (++t == targets) t = 0;
      }
      bulkCommit();
      if (k == 0) continue;
      bulkRead<1>(); // what was given to the copy unit before this has been read
      mbarrierArrive(stages.empty(read.s));
      read.next(stages.count);
    }
    bulkDone<0>();
    fenceProxy();
  }
  if (tid() >= LS_BULK_WORKERS) syncWarp();
  reduceEnds<T>(cut);
}
#endif

// The collectives that reduce for all, as work. Addresses are this thread's, by its number.

// allReduceWork: each rank reduces a share and pushes it to all, the next rank
// first and itself last, so that ranks do not all write to the same one.
FI void allReduceWork(const Args &a) {
  u32 t = tid() < a.ranks ? tid() : 0;
  setWork(a.send[t], a.recv[(a.rank + 1 + t) % a.ranks], a.count, a.ranks, a.ranks, a.rank, a.ranks, a.op, a.rank, a.ranks);
}

FI void reduceScatterWork(const Args &a, u32 size) {
  u32 t = tid() < a.ranks ? tid() : 0;
  setWork(a.send[t] + a.rank * a.count * size, a.recv[a.rank], a.count, a.ranks, 1, 0, 1, a.op, a.rank, a.ranks);
}

// ls_allreduce_sym: count elements, send to recv, all of both in windows.
KERNEL(LS_SYM_THREADS) void ls_allreduce_sym(Args a) {
  Op op(a);
  allReduceWork(a);
  if (!op.enter()) return;
  reduceWork<LS_TYPE>();
  op.leave();
}

// ls_reducescatter_sym: count elements a rank; sends in windows, recv anywhere.
KERNEL(LS_SYM_THREADS) void ls_reducescatter_sym(Args a) {
  Op op(a);
  reduceScatterWork(a, sizeof(LS_TYPE));
  if (!op.enter()) return;
  reduceWork<LS_TYPE>();
  op.leave();
}

#ifdef LS_BULK
// The same by bulk copies. They need dynamic shared memory for two stages at
// least: 65 KiB does for any number of ranks, 193 KiB makes six.

KERNEL(LS_BULK_THREADS) void ls_allreduce_bulk(Args a) {
  Op op(a);
  allReduceWork(a);
  prepareBulk();
  if (!op.enter()) return;
  reduceWorkBulk<LS_TYPE>(a.pace);
  op.leave();
}
#endif
