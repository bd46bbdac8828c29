// Bytes as a stream of tiles, by bulk copies of one thread through stages of shared memory.
//
// A message's pieces do not end the stream: the sender loads what comes next while it waits for a
// place, and tells of a piece some tiles later, when its stores are known to be done; the receiver
// gives a place back as soon as its bytes are in shared memory. Copies out by loads and stores of
// all threads have 32 KiB of a block under way, these have 128.
#pragma once
#include "push.h"

// Offer is a place for bytes at, as mapped here.
struct Offer { u64 at, bytes; };

#ifdef LS_BULK
enum {
  LS_STREAM_FLIGHT = 4, // tiles behind a piece, before it is told of: its stores are done by then
#ifdef LS_HOST
  LS_P2P_TELLER = 1,
#else
  LS_P2P_TELLER = 32, // the thread that tells: of another warp
#endif
};

// Stream is thread 0's. Others may have one, and not use it.
struct Stream {
  u32 here, base, count; // mbarriers, stages, and how many there are
  Stage loading, storing;
  Pace pace;

  FI explicit Stream(u32 perKiB)
      : here(dynamicBase()), base(here + LS_BULK_PUSH_MBARRIERS), count(u32(least(LS_BULK_PUSH_STAGES, (dynamicBytes() - LS_BULK_PUSH_MBARRIERS) / LS_BULK_PUSH_TILE))), loading{0, 0},
        storing{0, 0}, pace(perKiB) {}

  template <bool LASTS> FI void load(u64 from, u32 bytes) {
    u32 bar = here + 8 * loading.s, to = base + loading.s * LS_BULK_PUSH_TILE;
    mbarrierExpect(bar, bytes);
    if constexpr (LASTS) bulkLoad(to, from, bytes, bar);
    else bulkLoadOnce(to, from, bytes, bar);
    loading.next(count);
  }
  // loaded waits for the next tile, and returns where it is.
  FI u32 loaded() {
    u32 s = storing.s;
    mbarrierWait(here + 8 * s, storing.parity);
    storing.next(count);
    return base + s * LS_BULK_PUSH_TILE;
  }
  // stop waits for n tiles that nobody wants: shared memory is the block's until they have come.
  FI bool stop(u32 n) {
    for (; n > 0; n--) loaded();
    bulkDone<0>();
    return false;
  }

  // push stores bytes to offer and to those that follow it: look(n, offer) finds the n-th if it
  // is there, wait(n, offer) waits for it, false when that was aborted, and tell(n) says that n
  // have been filled. from and offers are multiples of 16. False: aborted.
  template <class Look, class Wait, class Tell> FI bool push(u64 from, u64 bytes, Offer offer, const Look &look, const Wait &wait, const Tell &tell) {
    u64 packed = bytes & ~u64(15);
    u32 tiles = u32((packed + LS_BULK_PUSH_TILE - 1) / LS_BULK_PUSH_TILE), asked = 0, filled = 0, told = 0, last = 0;
    auto length = [&](u32 t) { return u32(least(LS_BULK_PUSH_TILE, packed - u64(t) * LS_BULK_PUSH_TILE)); };
    auto ask = [&] {
      load<false>(from + u64(asked) * LS_BULK_PUSH_TILE, length(asked));
      asked++;
    };
    auto done = [&] {
      fenceProxy();
      if (told != filled) tell(told = filled);
    };
    auto more = [&] {
      if (offer.bytes > 0 || look(filled, offer)) return true;
      bulkCommit(); // the place that is waited for may depend on what has been filled
      bulkDone<0>();
      done();
      return wait(filled, offer);
    };
    fenceProxy();
    while (asked < count && asked < tiles) ask();
    for (u32 t = 0; t < tiles; t++) {
      u32 at = loaded(), n = length(t);
      pace.take(n);
      while (n > 0) {
        if (!more()) return stop(asked - t - 1);
        u32 part = u32(least(n, offer.bytes));
        bulkStore(offer.at, at, part);
        offer.at += part, offer.bytes -= part, at += part, n -= part;
        if (offer.bytes == 0) filled++, last = t;
      }
      bulkCommit();
      if (t >= LS_BULK_PUSH_LAG && asked < tiles) {
        bulkRead<LS_BULK_PUSH_LAG>();
        ask();
      }
      if (told != filled && t - last >= LS_STREAM_FLIGHT) {
        bulkDone<LS_STREAM_FLIGHT>();
        done();
      }
    }
    if (packed < bytes) {
      if (!more()) return stop(0);
      for (u64 i = packed; i < bytes; i++) put<u8>(offer.at + i - packed, get<u8>(from + i));
      filled++;
    }
    bulkDone<0>();
    done();
    return true;
  }

  // take stores bytes to to that come in pieces of room bytes, the n-th at place(n): there(n) says
  // whether it has come, wait(n) waits for it, false when that was aborted, and read(n) gives the
  // place back. to and places are multiples of 16. False: aborted.
  template <class Place, class There, class Wait, class Read>
  FI bool take(u64 to, u64 bytes, u32 room, const Place &place, const There &there, const Wait &wait, const Read &read) {
    u64 packed = bytes & ~u64(15), asked = 0, stored = 0;
    u32 loads = 0, stores = 0, piece = 0, in = 0, here = 0; // in: bytes of the piece that have been asked for; here: pieces that have come
    u32 leaving = 0, out = 0;                               // likewise of what is stored
    auto arrive = [&] {
      if (loads != stores ? !there(piece) : !wait(piece)) return false;
      here = piece + 1;
      fenceProxy();
      return true;
    };
    while (stored < packed) {
      if (stores > LS_BULK_PUSH_LAG) bulkRead<LS_BULK_PUSH_LAG>();
      while (asked < packed && loads < count + (stores > LS_BULK_PUSH_LAG ? stores - LS_BULK_PUSH_LAG : 0)) {
        if (piece == here && !arrive()) break;
        u32 n = u32(least(least(LS_BULK_PUSH_TILE, room - in), packed - asked));
        load<true>(place(piece) + in, n);
        loads++, asked += n;
        if ((in += n) == room) piece++, in = 0;
      }
      if (loads == stores) return stop(0);
      u32 at = loaded(), n = u32(least(least(LS_BULK_PUSH_TILE, room - out), packed - stored));
      bulkStoreOnce(to + stored, at, n);
      bulkCommit();
      stores++, stored += n;
      if ((out += n) == room) read(leaving++), out = 0;
    }
    if (packed < bytes) {
      if (piece == here && !arrive()) return stop(0);
      for (u64 i = packed; i < bytes; i++) put<u8>(to + i, get<u8>(place(piece) + in + i - packed));
    }
    bulkDone<0>();
    fenceProxy();
    return true;
  }
};
#endif
