// Messages that a sender's blocks put where the receiver wants them.
//
// For each lane the receiver offers places: its buffer, if that is in a window,
// or two places in staging memory in turn. An offer is an address as the sender
// has mapped it and a length, in two lines of the sender's heap. The sender fills
// the place and says so in the receiver's heap. Neither side's host takes part,
// and a replay of a graph begins anew.
#pragma once
#include "p2p_lines.h"
#include "push.h"

// waitPiece waits until *p, a count of pieces, is want or more. False: aborted.
template <class A> FI bool waitPiece(const A &a, const u32 *p, u32 want, bool &waited) {
  for (u32 turn = 1; int(loadAcquire(p) - want) < 0; turn++) {
    waited = true;
    relax();
    if (turn % LS_PATIENCE == 0 && aborted(a)) return false;
  }
  return true;
}

// Offer is a place for bytes at, as mapped here.
struct Offer { u64 at, bytes; };

// await waits for the offer of a piece. Every thread does so by itself. False:
// aborted.
template <class A, class S> FI bool await(const A &a, S &stamps, const Job &out, u32 lane, u32 number, Offer &offer) {
  const Line *line = heap(a, a.rank)->offer[out.peer][lane][number & 1];
  u32 flag = numbered(number);
  for (u32 turn = 0;;) {
    u32x4 at = loadLine(line), bytes = loadLine(line + 1);
    if (at.y == flag && at.w == flag && bytes.y == flag && bytes.w == flag) {
      offer = {u64(at.z) << 32 | at.x, u64(bytes.z) << 32 | bytes.x};
      if (turn != 0) stamps.saw(out.peer);
      return true;
    }
    relax();
    if (++turn % LS_PATIENCE == 0 && aborted(a)) return false;
  }
}

// PlainCopy copies by loads and stores of all threads.
struct PlainCopy {
  FI void operator()(u64 from, u64 to, u64 bytes) {
    spread<TARGET_LASTS>(from, bytes, 1, [=](u32) { return to; });
  }
};

#ifdef LS_BULK
// BulkCopy copies by bulk copies, by thread 0, which counts the tiles so far. What
// is aligned differently at the two ends, and what is outside of 16-byte packs,
// goes by loads and stores.
struct BulkCopy {
  Pace pace;
  u32 turn = 0;

  FI explicit BulkCopy(u32 perKiB) : pace(perKiB) {}

  FI void operator()(u64 from, u64 to, u64 bytes) {
    u64 head = (from ^ to) & 15 ? bytes : least(-from & 15, bytes), packed = (bytes - head) & ~u64(15), tail = head + packed;
    if (tid() == 0) packs(from + head, to + head, packed);
    if (tid() < 32) syncWarp();
    spread(from, head, 1, [=](u32) { return to; });
    spread(from + tail, bytes - tail, 1, [=](u32) { return to + tail; });
  }

  FI void packs(u64 from, u64 to, u64 bytes) {
    u32 here = dynamicBase(), base = here + LS_BULK_PUSH_MBARRIERS;
    u32 stages = u32(least(LS_BULK_PUSH_STAGES, (dynamicBytes() - LS_BULK_PUSH_MBARRIERS) / LS_BULK_PUSH_TILE));
    u32 tiles = u32((bytes + LS_BULK_PUSH_TILE - 1) / LS_BULK_PUSH_TILE), loaded = 0;
    auto stage = [&](u32 t) { return (turn + t) % stages; };
    auto length = [&](u32 t) { return u32(least(LS_BULK_PUSH_TILE, bytes - u64(t) * LS_BULK_PUSH_TILE)); };
    auto load = [&] {
      u32 t = loaded++, s = stage(t);
      mbarrierExpect(here + 8 * s, length(t));
      bulkLoadOnce(base + s * LS_BULK_PUSH_TILE, from + u64(t) * LS_BULK_PUSH_TILE, length(t), here + 8 * s);
    };
    if (tiles == 0) return;
    fenceProxy();
    while (loaded < stages && loaded < tiles) load();
    for (u32 t = 0; t < tiles; t++) {
      mbarrierWait(here + 8 * stage(t), (turn + t) / stages & 1);
      pace.take(length(t));
      bulkStore(to + u64(t) * LS_BULK_PUSH_TILE, base + stage(t) * LS_BULK_PUSH_TILE, length(t));
      bulkCommit();
      if (t >= LS_BULK_PUSH_LAG && loaded < tiles) {
        bulkRead<LS_BULK_PUSH_LAG>();
        load();
      }
    }
    bulkDone<0>();
    fenceProxy();
    turn += tiles;
  }
};
#endif

// pushDirect sends the block's lanes of a message. False: aborted.
template <class A, class S, class Copy> FI bool pushDirect(const A &a, S &stamps, const Job &out, Copy &&copy) {
  Heap *own = heap(a, a.rank), *peer = heap(a, out.peer);
  for (u32 lane = out.lane; lane < out.lanes; lane += out.step) {
    LaneState *state = &own->lane[out.peer][lane];
    u32 number = loadVolatile(&state->pushed);
    if (lane == 0 && tid() == 0) storeVolatile(&peer->here[a.rank], number + 1);
    for (u64 at = out.at(lane), end = out.end(lane); at < end;) {
      Offer offer{};
      bool ok = await(a, stamps, out, lane, number, offer);
      if (syncOr(!ok)) return false;
      u64 n = least(offer.bytes, end - at);
      copy(out.buffer + at, offer.at, n);
      at += n, number++;
      sync();
      if (tid() == 0) storeRelease(&peer->arrived[a.rank][lane], number);
    }
    if (tid() == 0) state->pushed = number;
  }
  return true;
}

// Taker is the receiver's side of a block's lanes.
template <class A, class S> struct Taker {
  const A &a;
  S &stamps;
  const Job &in;
  Heap *own, *peer;

  FI Taker(const A &a, S &stamps, const Job &in) : a(a), stamps(stamps), in(in), own(heap(a, a.rank)), peer(heap(a, in.peer)) {}

  FI void offer(u32 lane, u32 number, u64 at, u64 bytes) const {
    Line *line = peer->offer[a.rank][lane][number & 1];
    push(line, at, numbered(number));
    push(line + 1, bytes, numbered(number));
  }

  // taken waits for a piece. The thread of a message's first one notes when its
  // sender came, which may be long before its bytes.
  FI bool taken(u32 lane, u32 number, bool first) const {
    bool waited = false, ok = true;
    if (first && lane == 0) {
      ok = waitPiece(a, &own->here[in.peer], number + 1, waited);
      if (waited) stamps.saw(in.peer);
    }
    return ok && waitPiece(a, &own->arrived[in.peer][lane], number + 1, waited);
  }

  // whole takes lane first, and every step lanes on, into the receiver's buffer, a
  // thread each.
  FI bool whole(u32 first, u32 step) const {
    for (u32 lane = first + tid() * step; lane < in.lanes; lane += threads() * step) {
      offer(lane, loadVolatile(&own->lane[in.peer][lane].taken), in.target + in.at(lane), in.end(lane) - in.at(lane));
    }
    bool ok = true;
    for (u32 lane = first + tid() * step; ok && lane < in.lanes; lane += threads() * step) {
      u32 *state = &own->lane[in.peer][lane].taken, number = loadVolatile(state);
      ok = taken(lane, number, true);
      *state = number + 1;
    }
    return !syncOr(!ok);
  }

  // staged takes the block's lanes from staging memory. A place is offered again
  // once all threads have read it.
  FI bool staged() const {
    for (u32 lane = in.lane; lane < in.lanes; lane += in.step) {
      u32 *state = &own->lane[in.peer][lane].taken, number = loadVolatile(state);
      u64 begin = in.at(lane), end = in.end(lane), offered = begin, places = u64(lane) * 2 * in.room;
      auto place = [&](u32 n) { return places + (n & 1) * in.room; };
      auto next = [&](u32 n) {
        u64 bytes = least(in.room, end - offered);
        if (tid() == 0 && bytes > 0) offer(lane, n, in.target + place(n), bytes);
        offered += bytes;
      };
      next(number), next(number + 1);
      for (u64 at = begin; at < end; number++) {
        bool ok = tid() != 0 || taken(lane, number, at == begin);
        if (syncOr(!ok)) return false;
        u64 bytes = least(in.room, end - at), to = in.buffer + at;
        spread<SOURCE_LASTS>(in.stage + place(number), bytes, 1, [=](u32) { return to; });
        at += bytes;
        sync();
        next(number + 2);
      }
      if (tid() == 0) *state = number;
    }
    return true;
  }
};

// takeDirect receives the block's lanes of a message, of which the only block has
// all where they need no staging. False: aborted.
FI bool takeDirect(const P2PArgs &a, Stamps<P2PArgs> &stamps, const Job &in) {
  Taker taker(a, stamps, in);
  return in.stage == 0 ? taker.whole(0, 1) : taker.staged();
}
