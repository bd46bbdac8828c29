// Messages that a sender's blocks put where the receiver wants them.
//
// For each lane the receiver offers places: its buffer, if that is in a window,
// or two places in staging memory in turn. An offer is an address as the sender
// has mapped it and a length, in two lines of the sender's heap. The sender fills
// the place and says so in the receiver's heap. Neither side's host takes part,
// and a replay of a graph begins anew.
#pragma once
#include "p2p_lines.h"
#include "p2p_stream.h"

// waitPiece waits until *p, a count of pieces, is want or more. False: aborted.
template <class A> FI bool waitPiece(const A &a, const u32 *p, u32 want, bool &waited) {
  for (u32 turn = 1; int(loadAcquire(p) - want) < 0; turn++) {
    waited = true;
    relax();
    if (turn % LS_PATIENCE == 0 && aborted(a)) return false;
  }
  return true;
}

// offered looks for the offer of a piece.
template <class A> FI bool offered(const A &a, const Job &out, u32 lane, u32 number, Offer &offer) {
  const Line *line = heap(a, a.rank)->offer[out.peer][lane][number & 1];
  u32 flag = numbered(number);
  u32x4 at = loadLine(line), bytes = loadLine(line + 1);
  if (at.y != flag || at.w != flag || bytes.y != flag || bytes.w != flag) return false;
  offer = {u64(at.z) << 32 | at.x, u64(bytes.z) << 32 | bytes.x};
  return true;
}

// await waits for the offer of a piece. Every thread does so by itself. False:
// aborted.
template <class A, class S> FI bool await(const A &a, S &stamps, const Job &out, u32 lane, u32 number, Offer &offer) {
  bool waited = false;
  for (u32 turn = 0; !offered(a, out, lane, number, offer);) {
    relax();
    if (++turn % LS_PATIENCE == 0 && aborted(a)) return false;
    waited = true;
  }
  if (waited) stamps.saw(out.peer);
  return true;
}

// PlainCopy copies by loads and stores of all threads.
struct PlainCopy {
  static constexpr bool STREAMS = false;
  FI void operator()(u64 from, u64 to, u64 bytes) {
    spread<TARGET_LASTS>(from, bytes, 1, [=](u32) { return to; });
  }
};

#ifdef LS_BULK
// BulkCopy copies by bulk copies. What is aligned differently at the two ends, and what is outside
// of 16-byte packs, goes by loads and stores.
struct BulkCopy {
  static constexpr bool STREAMS = true;
  Stream stream;

  FI explicit BulkCopy(u32 perKiB) : stream(perKiB) {}

  FI void operator()(u64 from, u64 to, u64 bytes) {
    u64 head = (from ^ to) & 15 ? bytes : least(-from & 15, bytes), packed = (bytes - head) & ~u64(15), tail = head + packed;
    auto none = [](u32, Offer &) { return false; };
    if (tid() == 0 && packed > 0) stream.push(from + head, packed, {to + head, packed}, none, none, [](u32) {});
    if (tid() < 32) syncWarp();
    spread(from, head, 1, [=](u32) { return to; });
    spread(from + tail, bytes - tail, 1, [=](u32) { return to + tail; });
  }
};

// Told is pieces that a lane's stream has filled, for a thread of another warp: what tells the
// receiver is a fence, which takes longer than a tile.
struct Told {
  u32 pieces, end; // words of shared memory

  FI Told() : pieces(dynamicBase() + LS_BULK_PUSH_MBARRIERS - 8), end(pieces + 4) {}
  FI void begin() const { storeShared(pieces, 0), storeShared(end, 0); }
  FI void tell(u32 *arrived, u32 number) const {
    for (u32 told = 0;;) {
      u32 last = loadShared(end), n = loadShared(pieces);
      if (n != told) {
        fenceProxy();
        storeRelease(arrived, number + n);
        told = n;
      }
      if (last) return;
      relax();
    }
  }
};

// pushStream sends a lane, whose first offer is there, as a stream, and counts its pieces. False:
// aborted.
template <class A, class S> FI bool pushStream(const A &a, S &stamps, const Job &out, u32 lane, u32 &number, const Offer &offer, Stream &stream) {
  Told told;
  if (tid() == 0) told.begin();
  sync();
  bool ok = true;
  if (tid() == 0) {
    u32 before = number;
    ok = stream.push(
        out.buffer + out.at(lane), out.end(lane) - out.at(lane), offer, [&](u32 n, Offer &o) { return offered(a, out, lane, before + n, o); },
        [&](u32 n, Offer &o) { return await(a, stamps, out, lane, before + n, o); },
        [&](u32 n) {
          number = before + n;
          storeShared(told.pieces, n);
        });
    storeShared(told.end, 1);
  } else if (tid() == LS_P2P_TELLER) {
    told.tell(&heap(a, out.peer)->arrived[a.rank][lane], number);
  }
  syncWarp(); // of both
  return !syncOr(!ok);
}
#endif

// pushDirect sends the block's lanes of a message. False: aborted.
template <class A, class S, class Copy> FI bool pushDirect(const A &a, S &stamps, const Job &out, Copy &copy) {
  Heap *own = heap(a, a.rank), *peer = heap(a, out.peer);
  for (u32 lane = out.lane; lane < out.lanes; lane += out.step) {
    LaneState *state = &own->lane[out.peer][lane];
    u32 number = loadVolatile(&state->pushed);
    if (lane == 0 && tid() == 0) storeVolatile(&peer->here[a.rank], number + 1);
    for (u64 at = out.at(lane), end = out.end(lane); at < end;) {
      Offer offer{};
      bool ok = await(a, stamps, out, lane, number, offer);
      if (syncOr(!ok)) return false;
#ifdef LS_BULK
      if constexpr (Copy::STREAMS) {
        if (((out.buffer | offer.at) & 15) == 0) { // so are the other offers
          if (!pushStream(a, stamps, out, lane, number, offer, copy.stream)) return false;
          break;
        }
      }
#endif
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

  // place is where the n-th piece ever of a lane goes, in staging memory.
  FI u64 place(u32 lane, u32 n) const { return (u64(lane) * 2 + (n & 1)) * in.room; }

  // next offers a place for piece k of a lane, if it has so many; before is what it had before them.
  FI void next(u32 lane, u32 before, u32 k) const {
    u64 at = in.at(lane) + u64(k) * in.room, end = in.end(lane);
    if (at < end) offer(lane, before + k, in.target + place(lane, before + k), least(in.room, end - at));
  }

  // staged takes the block's lanes from staging memory. A place is offered again once it
  // has been read, and the first two of all lanes at once: a lane does not wait for the
  // one before it.
  template <class Copy> FI bool staged(Copy &copy) const {
    for (u32 lane = in.lane + tid() * in.step; lane < in.lanes; lane += threads() * in.step) {
      u32 before = loadVolatile(&own->lane[in.peer][lane].taken);
      next(lane, before, 0), next(lane, before, 1);
    }
    for (u32 lane = in.lane; lane < in.lanes; lane += in.step) {
      u32 *state = &own->lane[in.peer][lane].taken, before = loadVolatile(state), k = 0;
      u64 begin = in.at(lane), end = in.end(lane);
#ifdef LS_BULK
      if constexpr (Copy::STREAMS) {
        if ((in.buffer & 15) == 0) {
          if (!takeStream(lane, before, copy.stream)) return false;
          if (tid() == 0) *state = before + u32((end - begin + in.room - 1) / in.room);
          continue;
        }
      }
#endif
      for (u64 at = begin; at < end; k++) {
        bool ok = tid() != 0 || taken(lane, before + k, at == begin);
        if (syncOr(!ok)) return false;
        u64 bytes = least(in.room, end - at), to = in.buffer + at;
        spread<SOURCE_LASTS>(in.stage + place(lane, before + k), bytes, 1, [=](u32) { return to; });
        at += bytes;
        sync();
        if (tid() == 0) next(lane, before, k + 2);
      }
      if (tid() == 0) *state = before + k;
    }
    return true;
  }

#ifdef LS_BULK
  // takeStream takes a lane as a stream.
  FI bool takeStream(u32 lane, u32 before, Stream &stream) const {
    bool ok = true;
    if (tid() == 0) {
      const u32 *arrived = &own->arrived[in.peer][lane];
      ok = stream.take(
          in.buffer + in.at(lane), in.end(lane) - in.at(lane), in.room, [&](u32 k) { return in.stage + place(lane, before + k); },
          [&](u32 k) { return int(loadAcquire(arrived) - (before + k + 1)) >= 0; }, [&](u32 k) { return taken(lane, before + k, k == 0); },
          [&](u32 k) { next(lane, before, k + 2); });
    }
    if (tid() < 32) syncWarp();
    return !syncOr(!ok);
  }
#endif
};

// takeDirect receives the block's lanes of a message, of which the only block has
// all where they need no staging. False: aborted.
template <class Copy> FI bool takeDirect(const P2PArgs &a, Stamps<P2PArgs> &stamps, const Job &in, Copy &copy) {
  Taker taker(a, stamps, in);
  return in.stage == 0 ? taker.whole(0, 1) : taker.staged(copy);
}
