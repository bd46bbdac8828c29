// LL reductions of elements of type T.
#pragma once
#include "ll.h"
#include "types.h"

// Reducer combines a line of each rank, rank 0's first.
template <class T> struct Reducer {
  const Args &a;
  Scale<typename Elem<T>::Acc> scale;

  FI explicit Reducer(const Args &a) : a(a), scale(a.op, a.ranks) {}
  FI u64 operator()(u64 own, const u64 (&v)[LS_MAX_RANKS]) const {
    Pack8<T> acc;
    LS_DISPATCH_OP(a.op, acc = combined<OP>(own, v))
    acc.finish(scale);
    return acc.bits8();
  }

private:
  template <int OP> FI Pack8<T> combined(u64 own, const u64 (&v)[LS_MAX_RANKS]) const {
    Pack8<T> acc(a.rank == 0 ? own : v[0]);
#pragma unroll
    for (u32 p = 1; p < LS_MAX_RANKS; p++) {
      if (p == a.ranks) break;
      acc.template reduce<OP>(Pack8<T>(a.rank == p ? own : v[p]));
    }
    return acc;
  }
};

// allReduceOneShot: everyone sends everything to everyone.
template <class T> FI void allReduceOneShot(const Args &a) {
  Turn turn(a);
  Share share(a.count * sizeof(T));
  Reducer<T> reduce(a);
  u64 send = a.send[a.rank], recv = a.recv[a.rank];
  for (u32 i = tid(); i < share.count; i += threads()) {
    u64 v = load8(send + share.at(i), share.valid(i));
    turn.eachPeer([&](u32 p) { push(turn.ll(p, a.rank) + i, v, turn.epoch); });
  }
  turn.stamps.entered();
  for (u32 i = tid(); i < share.count; i += threads()) {
    u32 n = share.valid(i);
    u64 own = load8(send + share.at(i), n), v[LS_MAX_RANKS];
    if (!turn.hear(turn.ll(a.rank, 0) + i, turn.peers(), v)) break;
    store8(recv + share.at(i), reduce(own, v), n);
  }
  turn.end();
}

// allReduceTwoShot: part j of a block's lines goes to rank j, which sends the
// result to all. All parts are equally long, the last ones padded with lines of
// nothing, so that every rank hears from every other twice.
template <class T> FI void allReduceTwoShot(const Args &a) {
  Turn turn(a);
  Share share(a.count * sizeof(T));
  Reducer<T> reduce(a);
  u64 send = a.send[a.rank], recv = a.recv[a.rank];
  u32 part = (share.count + a.ranks - 1) / a.ranks;
  auto valid = [&](u32 i) { return i < share.count ? share.valid(i) : 0; };
  for (u32 k = tid(); k < part; k += threads()) {
    pushParts(turn, k, [&](u32 p) { return Part{send + share.at(p * part + k), valid(p * part + k)}; });
  }
  turn.stamps.entered();
  u64 v[LS_MAX_RANKS];
  for (u32 k = tid(); k < part; k += threads()) {
    u32 i = a.rank * part + k;
    u64 own = load8(send + share.at(i), valid(i));
    if (!turn.hear(turn.ll(a.rank, 0) + k, turn.peers(), v)) break;
    u64 sum = reduce(own, v);
    turn.eachPeer([&](u32 p) { push(turn.ll2(p, a.rank) + k, sum, turn.epoch); });
    store8(recv + share.at(i), sum, valid(i));
  }
  for (u32 k = tid(); k < part && turn.hear(turn.ll2(a.rank, 0) + k, turn.peers(), v); k += threads()) {
    storeParts(a, v, [&](u32 p) { return Part{recv + share.at(p * part + k), valid(p * part + k)}; });
  }
  turn.end();
}

// reduceScatter: part p of every send goes to rank p.
template <class T> FI void reduceScatter(const Args &a) {
  Turn turn(a);
  u64 bytes = a.count * sizeof(T), send = a.send[a.rank], recv = a.recv[a.rank];
  Share share(bytes);
  Reducer<T> reduce(a);
  for (u32 i = tid(); i < share.count; i += threads()) {
    pushParts(turn, i, [&](u32 p) { return Part{send + p * bytes + share.at(i), share.valid(i)}; });
  }
  turn.stamps.entered();
  for (u32 i = tid(); i < share.count; i += threads()) {
    u32 n = share.valid(i);
    u64 own = load8(send + a.rank * bytes + share.at(i), n), v[LS_MAX_RANKS];
    if (!turn.hear(turn.ll(a.rank, 0) + i, turn.peers(), v)) break;
    store8(recv + share.at(i), reduce(own, v), n);
  }
  turn.end();
}

// reduceToRoot: all lines go to root; the others hear a line of nothing from
// everyone, for the epoch's sake.
template <class T> FI void reduceToRoot(const Args &a) {
  Turn turn(a);
  Share share(a.count * sizeof(T));
  Reducer<T> reduce(a);
  u64 send = a.send[a.rank];
  bool root = a.rank == a.root;
  for (u32 i = tid(); i < (root ? 1 : share.count); i += threads()) {
    u64 v = root ? 0 : load8(send + share.at(i), share.valid(i));
    turn.eachPeer([&](u32 p) {
      if (i == 0 || p == a.root) push(turn.ll(p, a.rank) + i, v, turn.epoch);
    });
  }
  turn.stamps.entered();
  for (u32 i = tid(); i < (root ? share.count : 1); i += threads()) {
    u32 n = root ? share.valid(i) : 0;
    u64 own = load8(send + share.at(i), n), v[LS_MAX_RANKS];
    if (!turn.hear(turn.ll(a.rank, 0) + i, turn.peers(), v)) break;
    if (root) store8(a.recv[a.rank] + share.at(i), reduce(own, v), n);
  }
  turn.end();
}

KERNEL(512) void ls_allreduce_ll(Args a) { allReduceOneShot<LS_TYPE>(a); }
KERNEL(512) void ls_allreduce_ll2(Args a) { allReduceTwoShot<LS_TYPE>(a); }
KERNEL(512) void ls_reducescatter_ll(Args a) { reduceScatter<LS_TYPE>(a); }
KERNEL(512) void ls_reduce_ll(Args a) { reduceToRoot<LS_TYPE>(a); }
