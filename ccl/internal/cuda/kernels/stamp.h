// The stamps of an operation, as one thread of a block makes them.
//
// Nothing of this may lengthen the kernel: what is read at entry is not needed
// before the data has left, stores are not waited for, and the timer is read
// while nothing else could be done.
#pragma once
#include "device.h"

// Of a collective in several kernels, the first one knows how long the rank waited: in
// later ones peers come as late as the data makes them. Messages are with other peers
// in each.
template <class A> struct MeetsFirst { enum { yes = 0 }; };
template <> struct MeetsFirst<Args> { enum { yes = 1 }; };

// Stamps belongs to thread 0 of each block; the others ignore it. A is Args or
// P2PArgs.
template <class A> struct Stamps {
  const A &a;
  u64 seq, start, seen;
  u32 peer;

  // The constructor reads the time of entry.
  FI Stamps(const A &a) : a(a), seq(0), start(0), seen(0), peer(0xff) {
    if (tid() != 0 || a.slots == 0) return;
    seq = loadVolatile64(&heap(a, a.rank)->op.seq) + 1; // 0 from stopped on
    start = globaltimer();
  }

  FI u64 *slot() const { return (u64 *)(a.slots + (seq & a.slotMask) * sizeof(Slot)); } // seq counts from 1

  // entered tells the world that the operation has begun. It is called before
  // anything that may wait.
  FI void entered() const {
    if (tid() != 0 || block() != 0 || seq == 0 || !(a.flags & LS_FIRST)) return;
    store16(slot(), seq << 16 | a.desc, start);
    if (!(a.flags & LS_LAST)) heap(a, a.rank)->op.start = start; // for the operation's last kernel
  }

  // saw notes that a peer has just come that this thread had to wait for.
  FI void saw(u32 source) {
    if (tid() != 0 || a.slots == 0) return;
    seen = globaltimer(), peer = source;
  }

  // waited is Slot.arrived.
  FI u64 waited() const { return (seen > start ? seen - start : 0) << 8 | peer; }

  // left ends the operation if no other block still runs. All threads of the
  // block have done what they had to; a block that was aborted does not call it.
  // The count orders nothing: a fence here would wait for what peers were sent,
  // and be half of a short kernel. Blocks enter within a fraction of a microsecond
  // of each other, so the last one takes its own entry for the operation's when it
  // tells how long it waited.
  FI void left() {
    if (tid() != 0 || seq == 0) return;
    auto &op = heap(a, a.rank)->op;
    if (!(a.flags & LS_LAST)) {
      if (block() != 0 || !(a.flags & (LS_FIRST | LS_MEET))) return;
      if (a.flags & LS_MEET) start = loadVolatile64(&op.start);
      op.arrived = waited();
      return;
    }
    if (blocks() > 1) {
      if (atomicAdd(&op.blocksDone, 1) != blocks() - 1) return;
      op.blocksDone = 0;
    }
    u64 arrived;
    if (a.flags & LS_FIRST) arrived = waited();
    else if (MeetsFirst<A>::yes) arrived = loadVolatile64(&op.arrived);
    else start = loadVolatile64(&op.start), arrived = waited();
    store16(slot() + 2, arrived, globaltimer());
    op.seq = seq;
  }

  // stopped is called instead of left when the block was aborted: its operation
  // has no end, and what may still follow it on the stream is not recorded.
  FI void stopped() {
    if (tid() == 0 && seq != 0) heap(a, a.rank)->op.seq = ~u64(0);
  }
};
