// Messages of other nodes: between the GPU's memory and pinned host memory, which
// the host sends from and receives into.
#pragma once
#include "spread.h"

// Carry is a piece that a block copies.
struct Carry {
  u64 from, to, bytes, word;
  u32 number, open, stop;
};

#ifdef LS_HOST
#define carry (*(Carry *)emulated.shared->memory)
#else
static __shared__ Carry carry;
#endif

// lookAt finds out whether the next piece of a message may be copied: its place is free,
// or filled. Pieces of a peer are counted over all messages, so that of several the
// later ones wait for the earlier.
FI void lookAt(const StagedMessage *f) {
  u64 buffer = loadVolatile64(&f->buffer), bytes = loadVolatile64(&f->bytes), slot = loadVolatile64(&f->slot), after = loadVolatile64(&f->after);
  u32 half = loadVolatile(&f->half), first = loadVolatile(&f->first), send = loadVolatile(&f->send), base = loadVolatile(&f->afterFirst);
  u32 *mine = (u32 *)loadVolatile64(&f->mine);
  const u32 *theirs = (const u32 *)loadVolatile64(&f->theirs);
  u32 number = loadVolatile(mine), piece = number - first;
  carry.bytes = 0, carry.open = 1;
  if (int(piece) < 0) return;
  u64 at = u64(piece) * half;
  if (at >= bytes) {
    carry.open = 0;
    return;
  }
  if (int(loadAcquire(theirs) - (send ? number - 1 : number + 1)) < 0) return;
  if (after != 0 && int(loadAcquire((const u32 *)after) - (base + piece + 1)) < 0) return;
  u64 place = slot + (number & 1) * (half + LS_STAGED_PAD) + (buffer & 15);
  carry.from = send ? buffer + at : place, carry.to = send ? place : buffer + at;
  carry.bytes = least(half, bytes - at), carry.word = (u64)mine, carry.number = number + 1;
}

// ls_staged: blocks take messages in turn, and copy a piece of each that can go on.
// Nobody waits for one that cannot.
KERNEL(512) void ls_staged(StagedArgs a) {
  for (u32 turn = 1, left = 1; left != 0; turn++) {
    left = 0;
    bool moved = false;
    for (u32 i = block(); i < a.count; i += blocks()) {
      if (tid() == 0) {
        lookAt((const StagedMessage *)a.list + i);
        carry.stop = turn % LS_STAGED_PATIENCE == 0 && aborted(a);
      }
      sync();
      u64 from = carry.from, to = carry.to, bytes = carry.bytes, word = carry.word;
      u32 number = carry.number, stop = carry.stop;
      left |= carry.open;
      if (stop) return;
      if (bytes != 0) spread(from, bytes, 1, [=](u32) { return to; });
      sync();
      if (bytes != 0) {
        moved = true;
        if (tid() == 0) storeRelease((u32 *)word, number);
      }
    }
    if (!moved) relax();
  }
}
