// Reduce of elements of type T by a chain, from the rank after root on: what comes is first in
// what a rank folds, and its own second.
//
// Sums pass the links as they are accumulated, since 16- and 8-bit floats are rounded once: in
// two and four times as many steps, each of which has a half or a quarter of all packs.
#pragma once
#include "chain.h"
#include "types.h"

// Strip is those elements of a pack that are a whole one when they are accumulated.
template <class T> struct Strip {
  using Acc = typename Elem<T>::Acc;
  using Sum = Pack16<Acc>;
  enum { STEPS = sizeof(Acc) / sizeof(T), WORDS = 4 / STEPS };
  using Part = Pack<T, 4 * WORDS>;

  // take is the first of a pack's; the others move up, and add puts others behind them.
  FI static Sum take(u32x4 &pack) {
    u32 w[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; i++) w[i] = pack[i];
#pragma unroll
    for (int i = 0; i + WORDS < 4; i++) pack[i] = pack[i + WORDS];
    Part part(w);
    Sum sum;
#pragma unroll
    for (int i = 0; i < Sum::N; i++) sum.v[i] = part.v[i];
    return sum;
  }
  FI static void add(u32x4 &pack, const Sum &sum) {
    Part part;
#pragma unroll
    for (int i = 0; i < Sum::N; i++) part.v[i] = sum.v[i];
    u32 w[WORDS];
    part.getWords(w);
#pragma unroll
    for (int i = 0; i < WORDS; i++) pack[4 - WORDS + i] = w[i];
  }
};

// fold folds strips of own packs into sums.
template <class T, int OP> FI void fold(Packs &sums, Packs &own) {
  using S = Strip<T>;
#pragma unroll
  for (u32 i = 0; i < LS_CHAIN_ROWS; i++) {
    typename S::Sum sum(sums.x[i]);
    sum.template reduce<OP>(S::take(own.x[i]));
    sums.x[i] = sum.bits16();
  }
}

template <class T> FI void reduceChain(const Args &a) {
  using S = Strip<T>;
  Scale<typename S::Acc> scale(a.op, a.ranks);
  u64 send = a.send[a.rank], recv = a.recv[a.rank];
  auto pass = [&](TurnChain &chain, const Share12 &share, const PacksAt &at, u32 step) {
    Packs own, sums;
    at.load(share.of(send), own);
#pragma unroll 1
    for (u32 k = 0; k < S::STEPS; k++) {
      if (chain.first) {
#pragma unroll
        for (u32 i = 0; i < LS_CHAIN_ROWS; i++) sums.x[i] = S::take(own.x[i]).bits16();
      } else {
        if (!chain.hear(step + k, sums)) return false;
        LS_DISPATCH_OP(a.op, fold<T, OP>(sums, own))
      }
      if (!chain.last) {
        if (!chain.push(step + k, sums)) return false;
        continue;
      }
#pragma unroll
      for (u32 i = 0; i < LS_CHAIN_ROWS; i++) {
        typename S::Sum sum(sums.x[i]);
        sum.finish(scale);
        S::add(own.x[i], sum);
      }
    }
    if (chain.last) at.store(share.of(recv), own);
    return true;
  };
  u64 bytes = a.count * sizeof(T);
  u32 start = a.root + 1 == a.ranks ? 0 : a.root + 1;
  if constexpr (sizeof(T) > 1) alongChain<S::STEPS>(a, bytes, start, pass);
  else // so long that it would be called, with all it is given in memory
    alongChain<S::STEPS>(a, bytes, start, [&](TurnChain &chain, const Share12 &share, const PacksAt &at, u32 step) __attribute__((always_inline)) {
      [[clang::always_inline]] return pass(chain, share, at, step);
    });
}

// ls_reduce_chain: count elements of all sends to root's recv.
KERNEL(512) void ls_reduce_chain(Args a) { reduceChain<LS_TYPE>(a); }
