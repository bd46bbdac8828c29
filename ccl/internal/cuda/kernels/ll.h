// LL: data that carries its own flags, for messages whose latency counts.
//
// A block has its part of an operation in lines, and line i is always thread
// i % threads()'s: it reads the line of all buffers, sends, receives and writes
// it, which makes every operation right in place with no barrier in the block.
#pragma once
#include "peers.h"
#include "stamp.h"
#include "vector.h"

// Share is what one block has of a buffer: lines [first, first + count) of 8
// bytes, the last of which may hold fewer. A share without bytes has a line of
// none, since every block must be heard by its peers.
struct Share {
  u64 first, bytes; // of the whole buffer
  u32 count;

  FI explicit Share(u64 bytes) : bytes(bytes) {
    u64 lines = (bytes + 7) / 8, per = (lines + blocks() - 1) / blocks();
    first = per * block();
    count = first < lines ? u32(least(per, lines - first)) : 0;
    if (count == 0) count = 1, first = lines;
  }
  FI u64 at(u32 i) const { return (first + i) * 8; }
  // valid is how many bytes of line i are the buffer's.
  FI u32 valid(u32 i) const { return at(i) < bytes ? u32(least(8, bytes - at(i))) : 0; }
};

// load8 reads n bytes at any address, and zeros after them. It reads whole
// aligned words, of which each holds a byte that was asked for.
FI u64 load8(u64 p, u32 n) {
  u32 skew = p & 7;
  if (skew == 0 && n == 8) return get<u64>(p);
  if (n == 0) return 0;
  u64 v = get<u64>(p - skew) >> 8 * skew;
  if (skew + n > 8) v |= get<u64>(p - skew + 8) << (64 - 8 * skew);
  return n == 8 ? v : v & ((u64(1) << 8 * n) - 1);
}

// store8 writes the first n bytes of v to any address, and no others.
FI void store8(u64 p, u64 v, u32 n) {
  if ((p & 7) == 0 && n == 8) return put<u64>(p, v);
#pragma unroll 1
  while (n > 0) {
    if ((p & 3) == 0 && n >= 4) put<u32>(p, u32(v)), v >>= 32, p += 4, n -= 4;
    else if ((p & 1) == 0 && n >= 2) put<u16>(p, u16(v)), v >>= 16, p += 2, n -= 2;
    else put<u8>(p, u8(v)), v >>= 8, p++, n--;
  }
}

// pick is v[i] for an i that the compiler does not know, with v in registers.
FI u64 pick(const u64 (&v)[LS_MAX_RANKS], u32 i) {
  u64 x = v[0];
#pragma unroll
  for (u32 p = 1; p < LS_MAX_RANKS; p++)
    if (p == i) x = v[p];
  return x;
}

FI void push(Line *line, u64 v, u32 flag) { storeLine(line, u32(v), u32(v >> 32), flag); }

// Turn is a block's part in one LL kernel: an epoch, from the first line sent to
// the last one heard.
struct Turn {
  const Args &a;
  Heap *self;
  u32 epoch;
  bool alive; // false once this thread has seen the abort
  Stamps<Args> stamps;
#ifdef LS_PEERS
  Peers sight;
  FI explicit Turn(const Args &a) : a(a), self(heap(a, a.rank)), epoch(0), alive(true), stamps(a), sight(a) {
    sight.begin(stamps.seq, stamps.start);
#else

  FI explicit Turn(const Args &a) : a(a), self(heap(a, a.rank)), epoch(0), alive(true), stamps(a) {
#endif
    epoch = loadVolatile(&self->block[block()].epoch) + 1;
    if (epoch == 0) epoch = 2; // a line that was never written has flag 0
  }

  // ll is where rank to keeps this block's lines from rank from.
  FI Line *ll(u32 to, u32 from) const { return heap(a, to)->ll[epoch & 1][block()][from]; }
  FI Line *ll2(u32 to, u32 from) const { return heap(a, to)->ll2[epoch & 1][block()][from]; }

  FI u32 peers() const { return ((1u << a.ranks) - 1) & ~(1u << a.rank); }

  // next is the rank k places on. Peers are served from the next one on, so that
  // ranks do not all write to the same one.
  FI u32 next(u32 k) const { return a.rank + k < a.ranks ? a.rank + k : a.rank + k - a.ranks; }
  template <class F> FI void eachPeer(const F &f) const {
#pragma unroll 1
    for (u32 k = 1; k < a.ranks; k++) f(next(k));
  }

  // hear waits for a line of each rank of set and puts its data in v; line is
  // that of rank 0 and the others' follow in steps of LS_LL_LINES. The loads of
  // all ranks are in flight together. False, and no more to be done: aborted.
  FI bool hear(const Line *line, u32 set, u64 (&v)[LS_MAX_RANKS]) {
    if (!alive) return false;
    for (u32 turn = 0; set != 0;) {
      u32x4 got[LS_MAX_RANKS];
#pragma unroll
      for (u32 p = 0; p < LS_MAX_RANKS; p++) {
        if (set >> p == 0) break;
        if (set >> p & 1) got[p] = loadLine(line + p * LS_LL_LINES);
      }
      u32 missing = set, last = 0;
#pragma unroll
      for (u32 p = 0; p < LS_MAX_RANKS; p++) {
        if (set >> p == 0) break;
        if ((set >> p & 1) && got[p].y == epoch && got[p].w == epoch) {
          v[p] = u64(got[p].z) << 32 | got[p].x;
          missing &= ~(1u << p), last = p;
        }
      }
      if (turn != 0 && missing != set) stamps.saw(last);
#ifdef LS_PEERS
      if (missing != set) sight.heard(set & ~missing, turn != 0);
#endif
      set = missing;
      if (set != 0) {
        relax();
        if (++turn % LS_PATIENCE == 0 && aborted(a)) return alive = false;
      }
    }
    return true;
  }

  // end leaves the kernel.
  FI void end() {
#ifdef LS_PEERS
    bool stopped = syncOr(!alive);
    if (!stopped) sight.tell();
    if (stopped) stamps.stopped();
    else stamps.left();
#else
    if (syncOr(!alive)) stamps.stopped();
    else stamps.left();
#endif
    if (tid() == 0) self->block[block()].epoch = epoch;
  }
};

// Part is where line i of something of one rank's is in this rank's buffers.
struct Part {
  u64 at;
  u32 valid;
  FI bool whole() const { return (at & 7) == 0 && valid == 8; }
};

// pushParts sends line i of part(rank) to each peer. All are read before the first
// is sent: a read waits for memory, and a push is not moved before it.
template <class F> FI void pushParts(const Turn &turn, u32 i, const F &part) {
  const Args &a = turn.a;
  bool whole = true;
  turn.eachPeer([&](u32 p) { whole = whole && part(p).whole(); });
  if (!whole) { // rare, and not worth eight copies of this code
    turn.eachPeer([&](u32 p) { push(turn.ll(p, a.rank) + i, load8(part(p).at, part(p).valid), turn.epoch); });
    return;
  }
  u64 v[LS_MAX_RANKS];
#pragma unroll
  for (u32 k = 1; k < LS_MAX_RANKS; k++) {
    if (k == a.ranks) break;
    v[k] = get<u64>(part(turn.next(k)).at);
  }
#pragma unroll
  for (u32 k = 1; k < LS_MAX_RANKS; k++) {
    if (k == a.ranks) break;
    push(turn.ll(turn.next(k), a.rank) + i, v[k], turn.epoch);
  }
}

// storeParts stores what was heard of each peer but one, v, to part(rank).
template <class F> FI void storeParts(const Args &a, const u64 (&v)[LS_MAX_RANKS], const F &part, u32 but = ~0u) {
  bool whole = true;
#pragma unroll 1
  for (u32 p = 0; p < a.ranks; p++) whole = whole && (p == but || part(p).whole());
  if (whole) {
#pragma unroll
    for (u32 p = 0; p < LS_MAX_RANKS; p++) {
      if (p == a.ranks) break;
      if (p != a.rank && p != but) put<u64>(part(p).at, v[p]);
    }
    return;
  }
#pragma unroll 1
  for (u32 p = 0; p < a.ranks; p++)
    if (p != a.rank && p != but) store8(part(p).at, pick(v, p), part(p).valid);
}

// Heirs are the ranks but root, each of which has a part of a block's lines in
// Broadcast of two stages.
struct Heirs {
  const Args &a;
  const Share &share;
  u32 part; // lines of each; the last ones are padded with lines of nothing
  FI Heirs(const Args &a, const Share &share) : a(a), share(share), part((share.count + a.ranks - 2) / (a.ranks - 1)) {}
  FI u32 line(u32 rank, u32 k) const { return (rank + a.ranks - a.root - 1) % a.ranks * part + k; }
  FI u32 valid(u32 i) const { return i < share.count ? share.valid(i) : 0; }
  // of is line k of a rank's part of a buffer.
  FI Part of(u64 buffer, u32 rank, u32 k) const { return Part{buffer + share.at(line(rank, k)), valid(line(rank, k))}; }
};
