// Reduction of what copy engines have brought into this GPU's memory.
#pragma once
#include "sym.h"

// ls_fold: dst[i] = reduction over the k sources, in their order. dst may be one
// of the sources. It speaks with nobody; a few blocks saturate what arrives.
KERNEL(512) void ls_fold(FoldArgs a) {
  Stamps<FoldArgs> stamps(a);
  stamps.entered();
  setWork(a.src[tid() < a.k ? tid() : 0], a.dst, a.count, a.k, 1, 0, 1, a.op, a.rank, a.ranks);
  sync();
  reduceWork<LS_TYPE>();
  sync();
  stamps.left();
}
