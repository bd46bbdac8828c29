// Reduction of what copy engines have brought into this GPU's memory.
#pragma once
#include "sym.h"

// foldPacks combines the packs behind byte offset body of k sources, at most K of
// them. Where k is K, each thread has sixteen loads in flight: a branch around a
// load would make the next one wait for it, so that what is past the end is the
// last pack instead, and ignored.
template <class T, int OP, int K> FI void foldPacks(const FoldArgs &a, u32 k, u64 body, u64 packs, const Scale<typename Elem<T>::Acc> &scale) {
  constexpr int U = 16 / K;
  for (u64 i = u64(block()) * U * threads() + tid(); i < packs; i += u64(blocks()) * U * threads()) {
    u64 at[U];
    u32x4 raw[U][K];
#pragma unroll
    for (int u = 0; u < U; u++) at[u] = body + least(i + u * threads(), packs - 1) * 16;
#pragma unroll
    for (int u = 0; u < U; u++) {
#pragma unroll
      for (int p = 0; p < K; p++)
        if (p < k) raw[u][p] = get<u32x4>(a.src[p] + at[u]);
    }
    loadedFirst();
#pragma unroll
    for (int u = 0; u < U; u++) {
      Pack16<T> sum(raw[u][0]);
#pragma unroll
      for (int p = 1; p < K; p++)
        if (p < k) sum.template reduce<OP>(Pack16<T>(raw[u][p]));
      sum.finish(scale);
      raw[u][0] = sum.bits16();
    }
#pragma unroll
    for (int u = 0; u < U; u++)
      if (i + u * threads() < packs) put<u32x4>(a.dst + at[u], raw[u][0]);
  }
}

FI void setFold(const FoldArgs &a) {
  setWork(a.src[tid() < a.k ? tid() : 0], a.dst, a.count, a.k, 1, 0, 1, a.op, a.rank, a.ranks);
}

// ls_fold: dst[i] = reduction over the k sources, in their order. dst may be one
// of the sources. It speaks with nobody.
KERNEL(512) void ls_fold(FoldArgs a) {
  Stamps<FoldArgs> stamps(a);
  stamps.entered();
  setFold(a);
  sync();
  using T = LS_TYPE;
  Scale<typename Elem<T>::Acc> scale(a.op, a.ranks);
  Cut cut(sizeof(T));
  u64 body = cut.head * sizeof(T);
  switch (a.op) {
  case LS_PROD: foldPacks<T, LS_PROD, 8>(a, a.k, body, cut.packs, scale); break;
  case LS_MAX: foldPacks<T, LS_MAX, 8>(a, a.k, body, cut.packs, scale); break;
  case LS_MIN: foldPacks<T, LS_MIN, 8>(a, a.k, body, cut.packs, scale); break;
  default:
    if (a.k == 2) foldPacks<T, LS_SUM, 2>(a, 2, body, cut.packs, scale);
    else if (a.k == 4) foldPacks<T, LS_SUM, 4>(a, 4, body, cut.packs, scale);
    else if (a.k == 8) foldPacks<T, LS_SUM, 8>(a, 8, body, cut.packs, scale);
    else foldPacks<T, LS_SUM, 8>(a, a.k, body, cut.packs, scale);
  }
  reduceEnds<T>(cut);
  sync();
  stamps.left();
}

#ifdef LS_BULK
// ls_fold_bulk is ls_fold by bulk copies.
KERNEL(LS_BULK_THREADS) void ls_fold_bulk(FoldArgs a) {
  Stamps<FoldArgs> stamps(a);
  stamps.entered();
  setFold(a);
  prepareBulk();
  sync();
  reduceWorkBulk<LS_TYPE>();
  sync();
  stamps.left();
}
#endif
