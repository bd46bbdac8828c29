// Copies by all threads of a block: bytes, of any count and alignment, to one
// place or several. What goes to several is read once; eight loads of a thread are
// in flight at a time.
#pragma once
#include "vector.h"

enum {
  LS_PUSH_UNROLL = 8,
  LS_PUSH_TILE = 64 << 10, // bytes of a block's turn: 512 threads, 8 loads of 16 bytes
};

// Team is who copies: thread `me` of `all`. At least 30 of them, for the ends.
struct Team {
  u32 me, all;
};

// Lasts says which end of a copy is needed again soon, and stays in the L2 cache.
struct Lasts {
  bool from, to;
};
constexpr Lasts BOTH_LAST{true, true}, SOURCE_LASTS{true, false}, TARGET_LASTS{false, true};

// spreadUnits copies units of U from src to n destinations, to(i) being the i-th.
template <class U, Lasts LASTS, class To> FI void spreadUnits(Team team, u64 src, u64 units, u32 n, const To &to) {
  auto load = [](u64 p) { return LASTS.from ? get<U>(p) : getOnce<U>(p); };
  auto store = [](u64 p, U v) { LASTS.to ? put<U>(p, v) : putOnce<U>(p, v); };
  u64 i = team.me;
  for (; i + (LS_PUSH_UNROLL - 1) * team.all < units; i += LS_PUSH_UNROLL * team.all) {
    U v[LS_PUSH_UNROLL];
#pragma unroll
    for (int u = 0; u < LS_PUSH_UNROLL; u++) v[u] = load(src + (i + u * team.all) * sizeof(U));
    for (u32 d = 0; d < n; d++) {
      u64 dst = to(d) + i * sizeof(U);
#pragma unroll
      for (int u = 0; u < LS_PUSH_UNROLL; u++) store(dst + u * team.all * sizeof(U), v[u]);
    }
  }
  // Fewer than a full turn is left to this thread; still loaded before stored.
  if (i < units) {
    U v[LS_PUSH_UNROLL];
#pragma unroll
    for (int u = 0; u < LS_PUSH_UNROLL - 1; u++)
      if (i + u * team.all < units) v[u] = load(src + (i + u * team.all) * sizeof(U));
    for (u32 d = 0; d < n; d++) {
      u64 dst = to(d) + i * sizeof(U);
#pragma unroll
      for (int u = 0; u < LS_PUSH_UNROLL - 1; u++)
        if (i + u * team.all < units) store(dst + u * team.all * sizeof(U), v[u]);
    }
  }
}

// spread copies bytes from src to n destinations in the widest units that fit
// all of their alignments, with single bytes at the ends.
template <Lasts LASTS = BOTH_LAST, class To> FI void spread(Team team, u64 src, u64 bytes, u32 n, const To &to) {
  u64 skew = 0;
  for (u32 d = 0; d < n; d++) skew |= src ^ to(d);
  u32 unit = skew & 1 ? 1 : skew & 2 ? 2 : skew & 12 ? 4 : 16;
  u64 head = least(-src & (unit - 1), bytes), body = (bytes - head) & ~u64(unit - 1), tail = head + body;
  auto bodyTo = [&](u32 d) { return to(d) + head; };
  switch (unit) {
  case 16: spreadUnits<u32x4, LASTS>(team, src + head, body / 16, n, bodyTo); break;
  case 4: spreadUnits<u32, LASTS>(team, src + head, body / 4, n, bodyTo); break;
  case 2: spreadUnits<u16, LASTS>(team, src + head, body / 2, n, bodyTo); break;
  default: spreadUnits<u8, LASTS>(team, src + head, body, n, bodyTo);
  }
  u64 end = team.me < head ? team.me : tail + (team.me - head);
  if (end < bytes && (team.me < head || end >= tail)) {
    u8 v = get<u8>(src + end);
    for (u32 d = 0; d < n; d++) put<u8>(to(d) + end, v);
  }
}

// By all threads of the block.
template <Lasts LASTS = BOTH_LAST, class To> FI void spread(u64 src, u64 bytes, u32 n, const To &to) { spread<LASTS>(Team{tid(), threads()}, src, bytes, n, to); }
