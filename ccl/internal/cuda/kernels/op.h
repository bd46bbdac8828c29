// A block's part in one kernel of an operation on windows: epoch, barriers,
// stamps.
#pragma once
#include "flags.h"
#include "stamp.h"

// came is when each peer was seen, for those waited for.
#ifdef LS_HOST
#define came (emulated.shared->memory + 56)
#else
static __shared__ u64 came[LS_MAX_RANKS];
#endif

struct Op {
  const Args &a;
  Stamps<Args> stamps;
  u32 epoch;

  FI Op(const Args &a) : a(a), stamps(a) {
    epoch = loadVolatile(&heap(a, a.rank)->block[block()].epoch) + 1;
    if (epoch == 0) epoch = 2; // as everywhere: 0 is what nobody has written
  }

  // enter waits until the same block of all peers has entered, when buffers of
  // all may be touched. False: aborted.
  FI bool enter() {
    come(a, LS_PHASE_ENTER, epoch);
    stamps.entered(); // a store over the bus, which no fence should have to wait for
    bool ok = true;
    if (tid() < a.ranks) {
      u64 when = 0;
      if (tid() != a.rank) {
        const u32 *flag = &heap(a, a.rank)->flag[LS_PHASE_ENTER][block()][tid()];
        if (loadAcquire(flag) != epoch) {
          ok = waitFlag(a, flag, epoch);
          when = globaltimer();
        }
      }
      came[tid()] = when;
    }
    if (syncOr(!ok)) return stamps.stopped(), false;
    if (tid() == 0) {
      for (u32 p = 0; p < a.ranks; p++) {
        if (came[p] > stamps.seen) stamps.seen = came[p], stamps.peer = p;
      }
    }
    return true;
  }

  // leave waits until the same block of all peers has left, when what they push
  // here is here and what they pull from here has been read, and ends the kernel.
  FI void leave() {
    arrive(a, LS_PHASE_LEAVE, epoch);
    bool ok = true;
    if (tid() < a.ranks && tid() != a.rank) ok = waitFlag(a, &heap(a, a.rank)->flag[LS_PHASE_LEAVE][block()][tid()], epoch);
    if (syncOr(!ok)) return stamps.stopped();
    if (tid() == 0) heap(a, a.rank)->block[block()].epoch = epoch;
    stamps.left();
  }
};
