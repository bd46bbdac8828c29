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
  LS_BATCH = 4,                 // ranks whose lines are heard together: what registers hold
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

// Parts are what ranks have of a block's share where there are two stages: equally
// long, but for the last ones.
struct Parts12 {
  const Share12 &share;
  u32 bytes;
  FI Parts12(const Share12 &share, u32 n) : share(share), bytes(u32(upTo((share.bytes + n - 1) / n, 128))) {}
  FI Span of(u64 buffer, u32 i) const {
    u32 from = u32(least(u64(i) * bytes, share.bytes));
    return Span{buffer + share.first + from, u32(least(bytes, share.bytes - from))};
  }
};

// Heirs12 are the ranks but root, each of which has a part of a block's share where
// there are two stages from or to root.
struct Heirs12 : Parts12 {
  const Args &a;
  FI Heirs12(const Args &a, const Share12 &share) : Parts12(share, a.ranks - 1), a(a) {}
  FI Span of(u64 buffer, u32 rank) const { return Parts12::of(buffer, rank - a.root - 1 + (rank > a.root ? 0 : a.ranks)); }
};

// Turn12 is a Turn on these lines.
struct Turn12 : Turn {
  u32 room; // lines of a source

  FI explicit Turn12(const Args &a) : Turn(a), room(LS_LL12_LINES * (a.ranks <= 2 ? 4 : a.ranks <= 4 ? 2 : 1)) {}

  // line is where rank to keeps this block's lines of a stage from rank from.
  FI Line12 *line(u32 to, u32 stage, u32 from) const { return heap(a, to)->ll12[epoch & 1][stage][block()] + from * room; }

  FI void push(u32 to, u32 stage, const Place &u, const Unit &v) const {
    Line12 *at = line(to, stage, a.rank) + u.line;
#pragma unroll
    for (u32 q = 0; q < 4; q++)
      if (q < u.lines) storeLine12(at + q * LS_WARP, v.w[3 * q], v.w[3 * q + 1], v.w[3 * q + 2], epoch);
  }
  FI void pushAll(u32 stage, const Place &u, const Unit &v) const {
    eachPeer([&](u32 p) { push(p, stage, u, v); });
  }

  // hear waits for a unit of each rank of set, which counts from rank first, and puts
  // them in v. All their lines are asked for together. False, and no more to be done:
  // aborted.
  FI bool hear(u32 stage, u32 first, u32 set, const Place &u, Unit (&v)[LS_BATCH]) {
    if (!alive) return false;
    const Line12 *at = line(a.rank, stage, first) + u.line;
    for (u32 turn = 0; set != 0;) {
      u32 flag[LS_BATCH][4];
#pragma unroll
      for (u32 p = 0; p < LS_BATCH; p++) {
        if (!(set >> p & 1)) continue;
#pragma unroll
        for (u32 q = 0; q < 4; q++) {
          u32x4 got = loadLine12(at + p * room + q * LS_WARP);
          v[p].w[3 * q] = got.x, v[p].w[3 * q + 1] = got.y, v[p].w[3 * q + 2] = got.z, flag[p][q] = got.w;
        }
      }
      u32 missing = set, last = 0;
#pragma unroll
      for (u32 p = 0; p < LS_BATCH; p++) {
        if (!(set >> p & 1)) continue;
        bool here = flag[p][0] == epoch;
#pragma unroll
        for (u32 q = 1; q < 4; q++) here = here && (flag[p][q] == epoch || q >= u.lines);
        if (here) missing &= ~(1u << p), last = first + p;
      }
      if (turn != 0 && missing != set) stamps.saw(last);
      set = missing;
      if (set != 0) {
        relax();
        if (++turn % LS_PATIENCE == 0 && aborted(a)) return alive = false;
      }
    }
    return true;
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

// pushSpans sends a unit of part(rank) to each rank of set. What goes to as many as
// registers allow is read before the first of it is sent.
template <class F> FI void pushSpans(const Turn12 &turn, u32 stage, const Place &u, u32 set, const F &part) {
  const Args &a = turn.a;
#pragma unroll 1
  for (u32 first = 1; first < a.ranks; first += LS_BATCH - 1) {
    Unit v[LS_BATCH - 1];
    bool whole = true;
#pragma unroll
    for (u32 k = 0; k < LS_BATCH - 1; k++) {
      u32 p = turn.next(first + k);
      if (first + k < a.ranks && (set >> p & 1)) whole = whole && part(p).whole(u);
    }
    if (whole) {
#pragma unroll
      for (u32 k = 0; k < LS_BATCH - 1; k++) {
        u32 p = turn.next(first + k);
        if (first + k < a.ranks && (set >> p & 1)) part(p).loadWhole(u, v[k]);
      }
      loadedFirst();
#pragma unroll
      for (u32 k = 0; k < LS_BATCH - 1; k++) {
        u32 p = turn.next(first + k);
        if (first + k < a.ranks && (set >> p & 1)) turn.push(p, stage, u, v[k]);
      }
      continue;
    }
#pragma unroll 1
    for (u32 k = first; k < first + LS_BATCH - 1 && k < a.ranks; k++) {
      u32 p = turn.next(k);
      if (!(set >> p & 1)) continue;
      part(p).loadAny(u, v[0]);
      turn.push(p, stage, u, v[0]);
    }
  }
}

// storeSpans hears a unit of each rank of a set and stores it to part(rank). False:
// aborted.
template <class F> FI bool storeSpans(Turn12 &turn, u32 stage, const Place &u, u32 ranks, const F &part) {
#pragma unroll 1
  for (u32 first = 0; ranks >> first != 0; first += LS_BATCH) {
    u32 set = ranks >> first & ((1u << LS_BATCH) - 1);
    Unit v[LS_BATCH];
    if (!turn.hear(stage, first, set, u, v)) return false;
    bool whole = true;
#pragma unroll
    for (u32 p = 0; p < LS_BATCH; p++)
      if (set >> p & 1) whole = whole && part(first + p).whole(u);
    if (whole) {
#pragma unroll
      for (u32 p = 0; p < LS_BATCH; p++)
        if (set >> p & 1) part(first + p).storeWhole(u, v[p]);
      continue;
    }
#pragma unroll 1
    for (u32 p = 0; p < LS_BATCH; p++) {
      if (set >> p & 1) part(first + p).storeAny(u, v[0]);
#pragma unroll
      for (u32 k = 1; k < LS_BATCH; k++) v[k - 1] = v[k];
    }
  }
  return true;
}
