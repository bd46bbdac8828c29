// Reductions of elements of type T, by lines of 12 bytes.
#pragma once
#include "ll12.h"
#include "types.h"

// Reducer12 hears a unit of all peers and combines it with this rank's own, rank 0's
// first.
template <class T> struct Reducer12 {
  Turn12 &turn;
  Scale<typename Elem<T>::Acc> scale;

  FI explicit Reducer12(Turn12 &turn) : turn(turn), scale(turn.a.op, turn.a.ranks) {}

  // False: aborted.
  FI bool operator()(const Place &u, Unit &v) {
    const Args &a = turn.a;
    Pack<T, 48> sum;
#pragma unroll 1
    for (u32 p = 0; p < a.ranks; p++) {
      Unit x = v;
      if (p != a.rank && !turn.hear(p, u, x)) return false;
      if (p == 0) sum = Pack<T, 48>(x.w);
      else LS_DISPATCH_OP(a.op, sum.template reduce<OP>(Pack<T, 48>(x.w)))
    }
    sum.finish(scale);
    sum.getWords(v.w);
    return true;
  }
};

// allReduceLines: everyone sends everything to everyone.
template <class T> FI void allReduceLines(const Args &a) {
  Turn12 turn(a);
  Share12 share(a.count * sizeof(T));
  Reducer12<T> reduce(turn);
  Span send = share.of(a.send[a.rank]), recv = share.of(a.recv[a.rank]);
  for (Place u(share.bytes); u.there(); u.next()) {
    Unit v;
    send.load(u, v);
    turn.pushAll(u, v);
  }
  turn.stamps.entered();
  for (Place u(share.bytes); u.there(); u.next()) {
    Unit v;
    send.load(u, v);
    if (!reduce(u, v)) break;
    recv.store(u, v);
  }
  turn.end();
}

// reduceScatterLines: part p of every send goes to rank p.
template <class T> FI void reduceScatterLines(const Args &a) {
  Turn12 turn(a);
  u64 bytes = a.count * sizeof(T), send = a.send[a.rank];
  Share12 share(bytes);
  Reducer12<T> reduce(turn);
  for (Place u(share.bytes); u.there(); u.next()) {
    pushSpans(turn, u, [&](u32 p) { return share.of(send + p * bytes); });
  }
  turn.stamps.entered();
  Span own = share.of(send + a.rank * bytes), recv = share.of(a.recv[a.rank]);
  for (Place u(share.bytes); u.there(); u.next()) {
    Unit v;
    own.load(u, v);
    if (!reduce(u, v)) break;
    recv.store(u, v);
  }
  turn.end();
}

// reduceLines: everyone sends everything to root, and the others a word for the
// epoch's sake, as root does.
template <class T> FI void reduceLines(const Args &a) {
  Turn12 turn(a);
  Share12 share(a.count * sizeof(T));
  Reducer12<T> reduce(turn);
  bool root = a.rank == a.root;
  Span send = share.of(a.send[a.rank]);
  if (!root) {
    for (Place u(share.bytes); u.there(); u.next()) {
      Unit v;
      send.load(u, v);
      turn.push(a.root, u, v);
    }
  }
  turn.eachPeer([&](u32 p) {
    if (p != a.root) turn.greet(p);
  });
  turn.stamps.entered();
  if (root) {
    Span recv = share.of(a.recv[a.rank]);
    for (Place u(share.bytes); u.there(); u.next()) {
      Unit v;
      send.load(u, v);
      if (!reduce(u, v)) break;
      recv.store(u, v);
    }
  } else {
    turn.meet(turn.peers());
  }
  turn.end();
}

KERNEL(512) void ls_allreduce_ll12(Args a) { allReduceLines<LS_TYPE>(a); }
KERNEL(512) void ls_reducescatter_ll12(Args a) { reduceScatterLines<LS_TYPE>(a); }
KERNEL(512) void ls_reduce_ll12(Args a) { reduceLines<LS_TYPE>(a); }
