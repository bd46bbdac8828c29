// Reduce of elements of type T by a chain, from the rank after root on: what comes is first in
// what a rank folds, and its own second.
//
// Sums pass the links as they are accumulated, since 16- and 8-bit floats are rounded once: in
// two and four times as many lines.
#pragma once
#include "chain.h"
#include "types.h"

// Strip is those elements of a unit that four lines of a thread hold.
template <class T> struct Strip {
  using Acc = typename Elem<T>::Acc;
  using Sum = Pack<Acc, 48>;
  using Part = Pack<T, 48 * sizeof(T) / sizeof(Acc)>;
  enum { WIDE = sizeof(Acc) / sizeof(T), WORDS = 12 / WIDE };

  // take is the first elements of a unit; the others move up, and add puts others behind them.
  FI static Sum take(Unit &v) {
    u32 w[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; i++) w[i] = v.w[i];
#pragma unroll
    for (int i = 0; i < 12 - WORDS; i++) v.w[i] = v.w[i + WORDS];
    Part part(w);
    Sum sum;
#pragma unroll
    for (int i = 0; i < Sum::N; i++) sum.v[i] = part.v[i];
    return sum;
  }
  FI static void add(Unit &v, const Sum &sum) {
    Part part;
#pragma unroll
    for (int i = 0; i < Sum::N; i++) part.v[i] = sum.v[i];
    part.getWords(v.w + 12 - WORDS);
  }
  // place is where the lines of a unit's strip k are.
  FI static Place place(Place u, u32 k) {
    if (WIDE > 1) u.line += (u.group * (WIDE - 1) + k) * LS_GROUP_LINES, u.lines = 4;
    return u;
  }
};

template <class T> FI void reduceChain(const Args &a) {
  using S = Strip<T>;
  Scale<typename S::Acc> scale(a.op, a.ranks);
  u64 send = a.send[a.rank], recv = a.recv[a.rank];
  alongChain(a, a.count * sizeof(T), a.root + 1 == a.ranks ? 0 : a.root + 1, S::WIDE, [&](TurnChain &chain, const Share12 &part, const Place &u) {
    Unit v;
    part.of(send).load(u, v);
#pragma unroll 1
    for (u32 k = 0; k < S::WIDE; k++) {
      Place at = S::place(u, k);
      Unit x;
      typename S::Sum own = S::take(v);
      if (!chain.first) {
        if (!chain.template hear<false>(chain.from, at, x)) return false;
        typename S::Sum sum(x.w);
        LS_DISPATCH_OP(a.op, sum.template reduce<OP>(own))
        own = sum;
      }
      if (chain.last) {
        own.finish(scale);
        S::add(v, own);
      } else {
        own.getWords(x.w);
        chain.push(chain.to, at, x);
      }
    }
    if (chain.last) part.of(recv).store(u, v);
    return true;
  });
}

// ls_reduce_chain: count elements of all sends to root's recv.
KERNEL(512) void ls_reduce_chain(Args a) { reduceChain<LS_TYPE>(a); }
