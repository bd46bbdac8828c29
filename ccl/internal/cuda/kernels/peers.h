// Stamps by peer: when each peer came, when the last of it was here, and how long a
// read of its memory took. They are made by block 0 of kernels that an operation
// begins with, and only by modules of their own (LS_PEERS): the others have none of this code.
#pragma once
#include "device.h"

#if defined(LS_HOST) && !defined(LS_PEERS)
#define LS_PEERS 1
#endif

#ifdef LS_PEERS
// Sightings is what a block has seen of its peers, in shared memory. Times are the GPU's, 0 for none.
struct Sightings {
  u64 seq, start;
  u64 first[LS_MAX_RANKS], last[LS_MAX_RANKS]; // when each was first heard, if it was waited for, and last
  u32 trip[LS_MAX_RANKS];
};
#ifdef LS_HOST
#define sightings (*(Sightings *)(emulated.shared->memory + 64))
enum { LS_PROBE_STEP = 1 };
#else
static __shared__ Sightings sightings;
enum { LS_PROBE_STEP = 32 }; // a warp waits for all that its threads have asked for
#endif

FI u32 saturated(u64 ns) { return ns >> 32 ? ~0u : u32(ns); }

// Peers is for all threads of a block.
struct Peers {
  const Args &a;
  bool on;

  FI explicit Peers(const Args &a) : a(a), on(a.peers != 0 && a.slots != 0 && block() == 0 && (a.flags & LS_FIRST)) {}

  // begin is thread 0's, with what Stamps has read.
  FI void begin(u64 seq, u64 start) const {
    if (!on || tid() != 0) return;
    sightings.seq = seq, sightings.start = start;
#pragma unroll 1
    for (u32 p = 0; p < a.ranks; p++) sightings.first[p] = sightings.last[p] = 0, sightings.trip[p] = 0;
  }

  // heard notes, by thread 0, that a line of each rank of set has come, and whether it was waited for.
  FI void heard(u32 set, bool waited) const {
    if (!on || tid() != 0) return;
    u64 now = globaltimer();
#pragma unroll 1
    for (u32 p = 0; p < a.ranks; p++) {
      if (!(set >> p & 1)) continue;
      if (sightings.last[p] == 0) sightings.first[p] = waited ? now : 0;
      sightings.last[p] = now;
    }
  }

  // probe reads a word of each peer's memory, each by a warp of its own, with whatever
  // else goes over the links: what has been asked for until then is under way.
  FI void probe() const {
    u32 k = tid() / LS_PROBE_STEP;
    if (!on || tid() % LS_PROBE_STEP != 0 || k == 0 || k >= a.ranks) return;
    u32 p = a.rank + k < a.ranks ? a.rank + k : a.rank + k - a.ranks;
    u64 asked = globaltimer();
    u32 word = loadPeer(&heap(a, p)->block[0].epoch, a.rank, p);
    *(volatile u32 *)&sightings.trip[p] = word; // which waits for it
    sightings.trip[p] = saturated(globaltimer() - asked);
  }

  // tell stores the row, after a barrier behind all that was noted.
  FI void tell() const {
    if (!on || sightings.seq == 0) return;
    u64 start = sightings.start, row = a.slots + u64(a.peers) * 16 + (sightings.seq & a.slotMask) * sizeof(PeerRow);
#pragma unroll 1
    for (u32 p = tid(); p < a.ranks; p += threads()) {
      u64 came = sightings.first[p], there = sightings.last[p];
      if (p == a.rank || there == 0) continue;
      came = came > start ? came - start : 0, there = there > start ? there - start : 0;
      store16((u64 *)(row + p * 16), u64(saturated(there)) << 32 | saturated(came), u64(sightings.trip[p]) << 32 | u32(sightings.seq));
    }
  }
};
#endif
