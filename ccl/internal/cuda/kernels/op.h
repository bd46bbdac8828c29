// A block's part in one kernel of an operation on windows: epoch, barriers,
// stamps.
#pragma once
#include "flags.h"
#include "peers.h"
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
#ifdef LS_PEERS
  Peers peers;

  FI Op(const Args &a) : a(a), stamps(a), peers(a) {
    peers.begin(stamps.seq, stamps.start);
#else

  FI Op(const Args &a) : a(a), stamps(a) {
#endif
    epoch = loadVolatile(&heap(a, a.rank)->block[block()].epoch) + 1;
    if (epoch == 0) epoch = 2; // as everywhere: 0 is what nobody has written
  }

  // enter waits until the same block of all peers has entered, when buffers of
  // all may be touched. False: aborted.
  FI bool enter() {
    come(a, LS_PHASE_ENTER, epoch);
    return meet([&](u32 peer, bool &waited) { return hear(peer, waited); });
  }

  // enterTold is enter where root tells each peer what it has as that peer's recv,
  // in the place of its flag. When it has returned that is in *told, of shared memory;
  // on root, its own recv of one or two ranks, which it reduces itself, and of more what
  // it has told one of them.
  FI bool enterTold(u64 *told) {
    bool root = a.rank == a.root;
    if (!root) {
      come(a, LS_PHASE_ENTER, epoch);
    } else if (tid() < a.ranks) {
      u64 at = a.recv[tid()];
      if (tid() != a.rank) storeLine(&heap(a, tid())->target[block()], u32(at), u32(at >> 32), epoch);
      if (tid() == (a.ranks <= 2 ? a.rank : a.rank == 0 ? 1 : 0)) *told = at;
    }
    return meet([&](u32 peer, bool &waited) { return peer == a.root ? listen(told, waited) : hear(peer, waited); });
  }

  // meet has the thread of each peer wait for that peer's word.
  template <class Word> FI bool meet(const Word &word) {
    stamps.entered(); // a store over the bus, which no fence should have to wait for
    bool ok = true;
    if (tid() < a.ranks) {
      bool waited = false;
      if (tid() != a.rank) ok = word(tid(), waited);
      came[tid()] = waited ? globaltimer() : 0;
    }
    if (syncOr(!ok)) return stamps.stopped(), false;
    if (tid() == 0) {
#pragma unroll 1
      for (u32 p = 0; p < a.ranks; p++) {
        if (came[p] > stamps.seen) stamps.seen = came[p], stamps.peer = p;
      }
    }
#ifdef LS_PEERS
    peers.probe();
#endif
    return true;
  }

  FI bool hear(u32 peer, bool &waited) const {
    const u32 *flag = &heap(a, a.rank)->flag[LS_PHASE_ENTER][block()][peer];
    if (loadAcquire(flag) == epoch) return true;
    waited = true;
    return waitFlag(a, flag, epoch);
  }

  FI bool listen(u64 *told, bool &waited) const {
    const Line *line = &heap(a, a.rank)->target[block()];
    for (u32 turn = 1;; turn++) {
      u32x4 v = loadLine(line);
      if (v.y == epoch && v.w == epoch) return *told = u64(v.z) << 32 | v.x, true;
      waited = true;
      relax();
      if (turn % LS_PATIENCE == 0 && aborted(a)) return false;
    }
  }

  // leave waits until the same block of all peers has left, when what they push
  // here is here and what they pull from here has been read, and ends the kernel.
  FI void leave() {
    arrive(a, LS_PHASE_LEAVE, epoch);
    bool ok = true;
#ifdef LS_PEERS
    if (tid() < a.ranks && tid() != a.rank) ok = waitLast(tid());
    if (syncOr(!ok)) return stamps.stopped();
    peers.tell();
#else
    if (tid() < a.ranks && tid() != a.rank) ok = waitFlag(a, &heap(a, a.rank)->flag[LS_PHASE_LEAVE][block()][tid()], epoch);
    if (syncOr(!ok)) return stamps.stopped();
#endif
    if (tid() == 0) heap(a, a.rank)->block[block()].epoch = epoch;
    stamps.left();
  }

#ifdef LS_PEERS
  // waitLast waits until a peer has left, and notes when. Threads of a warp find their
  // peers' flags one by one, so the time is taken within the loop.
  FI bool waitLast(u32 peer) const {
    const u32 *flag = &heap(a, a.rank)->flag[LS_PHASE_LEAVE][block()][peer];
    u64 at = 0;
    for (u32 turn = 1; at == 0; turn++) {
      if (loadAcquire(flag) == epoch) at = globaltimer();
      else relax();
      if (turn % LS_PATIENCE == 0 && aborted(a)) return false;
    }
    if (peers.on) sightings.first[peer] = came[peer], sightings.last[peer] = at;
    return true;
  }
#endif
};
