// LL lines of 12 bytes and one flag, where bandwidth counts as much as latency.
//
// A line rests on this: an aligned access of 16 bytes by one thread is one
// transaction in one sector, so that nobody sees a flag without its data.
//
// A thread's unit is three pieces of 16 bytes of a buffer and four lines; warps
// read, push, poll and store 512 bytes side by side. As in ll.h, the same thread
// reads, sends, receives and writes a unit, on all ranks.
#pragma once
#include "ll.h"

#ifdef LS_HOST
enum { LS_WARP = 2 }; // tests have few threads, and want several warps
#else
enum { LS_WARP = 32 };
#endif

enum {
  LS_PIECES = 16 * LS_WARP,     // from one piece of a unit to the next
  LS_GROUP = 3 * LS_PIECES,     // a warp's units
  LS_GROUP_LINES = 4 * LS_WARP, // and their lines
};

// Unit is 48 bytes of data.
struct Unit {
  u32 w[12];

  // take is the first 16 bytes; the others move up.
  FI u32x4 take() {
    u32x4 x = {w[0], w[1], w[2], w[3]};
#pragma unroll
    for (int i = 0; i < 8; i++) w[i] = w[i + 4];
    return x;
  }
  // add puts 16 bytes behind the others, which move up.
  FI void add(u32x4 x) {
    take();
    w[8] = x.x, w[9] = x.y, w[10] = x.z, w[11] = x.w;
  }
};

// Place goes through a thread's units in a block's part of something.
struct Place {
  u32 bytes, group; // of the part; which units of the warp's
  u32 at;           // bytes, of the first piece; the others follow in steps of LS_PIECES
  u32 line;         // the first line; the others follow in steps of LS_WARP
  u32 lines;        // those that hold data, or have to be heard

  FI explicit Place(u32 bytes) : bytes(bytes), group(tid() / LS_WARP) { find(); }
  FI void next() { group += threads() / LS_WARP, find(); }
  // there: thread 0 has a unit in any case, since every block must be heard by its
  // peers.
  FI bool there() const { return at < bytes || (at | group) == 0; }
  FI u32 end() const { return at + 2 * LS_PIECES + 16; }

private:
  FI void find() {
    u32 lane = tid() % LS_WARP;
    at = group * LS_GROUP + lane * 16, line = group * LS_GROUP_LINES + lane, lines = 4;
    if (end() <= bytes) return;
    u32 have = 0;
#pragma unroll
    for (u32 i = 0; i < 3; i++) {
      u32 p = at + i * LS_PIECES;
      if (p < bytes) have += bytes - p < 16 ? bytes - p : 16;
    }
    lines = have == 0 ? 1 : (have + 11) / 12;
  }
};

// Span is bytes of a rank's buffer.
struct Span {
  u64 at;
  u32 bytes;

  FI u32 valid(u32 off) const { return off < bytes ? u32(least(16, bytes - off)) : 0; }
  // whole: all of a unit is there, and aligned.
  FI bool whole(const Place &u) const { return (at & 15) == 0 && u.end() <= bytes; }

  FI void loadWhole(const Place &u, Unit &v) const {
#pragma unroll
    for (u32 i = 0; i < 3; i++) v.add(get<u32x4>(at + u.at + i * LS_PIECES));
  }
  FI void storeWhole(const Place &u, Unit v) const {
#pragma unroll
    for (u32 i = 0; i < 3; i++) put<u32x4>(at + u.at + i * LS_PIECES, v.take());
  }
  FI void loadAny(const Place &u, Unit &v) const {
#pragma unroll 1
    for (u32 off = u.at; off < u.at + 3 * LS_PIECES; off += LS_PIECES) {
      u32 n = valid(off);
      u64 lo = load8(at + off, n < 8 ? n : 8), hi = load8(at + off + 8, n < 8 ? 0 : n - 8);
      v.add(u32x4{u32(lo), u32(lo >> 32), u32(hi), u32(hi >> 32)});
    }
  }
  FI void storeAny(const Place &u, Unit v) const {
#pragma unroll 1
    for (u32 off = u.at; off < u.at + 3 * LS_PIECES; off += LS_PIECES) {
      u32 n = valid(off);
      u32x4 x = v.take();
      store8(at + off, u64(x.y) << 32 | x.x, n < 8 ? n : 8);
      if (n > 8) store8(at + off + 8, u64(x.w) << 32 | x.z, n - 8);
    }
  }
  // load reads a unit at any address, and zeros for what is not there; store writes
  // what is there, and nothing else.
  FI void load(const Place &u, Unit &v) const { whole(u) ? loadWhole(u, v) : loadAny(u, v); }
  FI void store(const Place &u, const Unit &v) const { whole(u) ? storeWhole(u, v) : storeAny(u, v); }
};

// Share12 is what one block has of a buffer.
struct Share12 {
  u64 first;
  u32 bytes;

  FI explicit Share12(u64 all) { // all is less than 4 GiB by far
    u64 per = upTo((u32(all) + blocks() - 1) / blocks(), 128);
    first = least(per * block(), all), bytes = u32(least(per, all - first));
  }
  FI Span of(u64 buffer) const { return Span{buffer + first, bytes}; }
};

// Turn12 is a Turn on these lines. Peers are dealt with one after the other, in loops that
// are not unrolled: code that has to be fetched for the first time in each launch costs more
// than what a peer's loads in flight beside another's would save.
struct Turn12 : Turn {
  u32 room; // lines of a source

  FI explicit Turn12(const Args &a) : Turn(a), room(LS_LL12_LINES * (a.ranks <= 2 ? 4 : a.ranks <= 4 ? 2 : 1)) {}

  // line is where rank to keeps this block's lines from rank from.
  FI Line12 *line(u32 to, u32 from) const { return heap(a, to)->ll12[epoch & 1][block()] + from * room; }

  FI void push(u32 to, const Place &u, const Unit &v) const {
    Line12 *at = line(to, a.rank) + u.line;
#pragma unroll
    for (u32 q = 0; q < 4; q++)
      if (q < u.lines) storeLine12(at + q * LS_WARP, v.w[3 * q], v.w[3 * q + 1], v.w[3 * q + 2], epoch);
  }
  FI void pushAll(const Place &u, const Unit &v) const {
#pragma unroll 1
    for (u32 k = 1; k < a.ranks; k++) push(next(k), u, v);
  }

  // hear waits for a unit of rank p, whose lines are asked for together. False, and no more to be
  // done: aborted.
  FI bool hear(u32 p, const Place &u, Unit &v) {
    const Line12 *at = line(a.rank, p) + u.line;
#pragma unroll 1
    for (u32 turn = 0; alive;) {
      bool here = true;
#pragma unroll
      for (u32 q = 0; q < 4; q++) {
        u32x4 got = loadLine12(at + q * LS_WARP);
        v.w[3 * q] = got.x, v.w[3 * q + 1] = got.y, v.w[3 * q + 2] = got.z;
        here = here && (got.w == epoch || q >= u.lines);
      }
      if (here) {
        if (turn != 0) stamps.saw(p);
#ifdef LS_PEERS
        sight.heard(1u << p, turn != 0);
#endif
        return true;
      }
      relax();
      if (++turn % LS_PATIENCE == 0 && aborted(a)) alive = false;
    }
    return false;
  }

  // greet sends a peer a word for the epoch's sake, an LL line of nothing, and meet
  // waits for those of a set of ranks. It is thread 0 that does.
  FI void greet(u32 p) const {
    if (tid() == 0) ::push(ll(p, a.rank), 0, epoch);
  }
  FI void meet(u32 set) {
    u64 v[LS_MAX_RANKS];
    if (tid() == 0) Turn::hear(ll(a.rank, 0), set, v);
  }
};

// pushSpans sends a unit of part(rank) to each peer.
template <class F> FI void pushSpans(const Turn12 &turn, const Place &u, const F &part) {
#pragma unroll 1
  for (u32 k = 1; k < turn.a.ranks; k++) {
    u32 p = turn.next(k);
    Unit v;
    part(p).load(u, v);
    turn.push(p, u, v);
  }
}

// storeSpans hears a unit of each peer and stores it to part(rank). False: aborted.
template <class F> FI bool storeSpans(Turn12 &turn, const Place &u, const F &part) {
#pragma unroll 1
  for (u32 k = 1; k < turn.a.ranks; k++) {
    u32 p = turn.next(k);
    Unit v;
    if (!turn.hear(p, u, v)) return false;
    part(p).store(u, v);
  }
  return true;
}
