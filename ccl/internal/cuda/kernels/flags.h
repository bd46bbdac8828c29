// Barriers between a block and the same block of each peer.
//
// A flag holds the epoch of its source's block and never runs ahead of its
// reader: a peer cannot be past a barrier that this block has not reached. So
// waiting is for equality, and a flag that nobody wrote for billions of kernels
// cannot be taken for a new one.
#pragma once
#include "device.h"

// waitFlag waits until *p is want or up to ahead more. False: aborted.
FI bool waitFlag(const Args &a, const u32 *p, u32 want, u32 ahead = 0) {
  for (u32 turn = 1; loadAcquire(p) - want > ahead; turn++) {
    relax();
    if (turn % LS_PATIENCE == 0 && aborted(a)) return false;
  }
  return true;
}

// come tells the same block of all peers that this one has come to phase. What
// kernels before this one have stored is visible to peers anyhow.
FI void come(const Args &a, u32 phase, u32 epoch) {
  if (tid() < a.ranks && tid() != a.rank) storeVolatile(&heap(a, tid())->flag[phase][block()][a.rank], epoch);
}

// arrive is come with all that the block's threads have stored. All of them call it.
FI void arrive(const Args &a, u32 phase, u32 epoch) {
  sync();
  if (tid() < a.ranks && tid() != a.rank) storeRelease(&heap(a, tid())->flag[phase][block()][a.rank], epoch);
}
