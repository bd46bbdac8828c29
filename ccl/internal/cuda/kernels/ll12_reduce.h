// Reductions of elements of type T, by lines of 12 bytes.
#pragma once
#include "ll12.h"
#include "types.h"

// reduceAll combines 16 bytes of each rank but 0 into acc.
template <int OP, class T, int N> FI void reduceAll(Pack16<T> &acc, const u32x4 (&x)[N], u32 ranks) {
#pragma unroll
  for (u32 p = 1; p < N; p++)
    if (p < ranks) acc.template reduce<OP>(Pack16<T>(x[p]));
}

// Heard is 16 bytes of all ranks combined, the last rank waited for (or none), and
// whether all have come: they have not when the operation was aborted.
struct Heard {
  u32x4 sum;
  u32 last;
  bool all;
};

// hear8 waits for piece i of a unit of each rank of set and combines all ranks', of
// which own is this one's. It lies in lines i and i + 1 of so many, and at is rank 0's
// line i. A call, since it is long, and for many ranks only.
template <class T>
__device__ static __attribute__((noinline)) Heard hear8(const Line12 *at, u32 room, u32 set, u32 i, u32 lines, u32 epoch, u64 abort, u32 op, u32 ranks, u32 rank, u32x4 own) {
  Heard h{own, ~0u, true};
  u32x4 x[LS_MAX_RANKS];
#pragma unroll
  for (u32 p = 0; p < LS_MAX_RANKS; p++)
    if (p == rank) x[p] = own;
  for (u32 round = 0; set != 0;) {
    u32x4 got[LS_MAX_RANKS][2];
#pragma unroll
    for (u32 p = 0; p < LS_MAX_RANKS; p++)
      if (set >> p & 1) got[p][0] = loadLine12(at + p * room), got[p][1] = loadLine12(at + p * room + LS_WARP);
    u32 missing = set, last = 0;
#pragma unroll
    for (u32 p = 0; p < LS_MAX_RANKS; p++) {
      u32x4 l = got[p][0], m = got[p][1];
      if (!(set >> p & 1) || (l.w != epoch && i < lines) || (m.w != epoch && i + 1 < lines)) continue;
      x[p] = i == 0 ? u32x4{l.x, l.y, l.z, m.x} : i == 1 ? u32x4{l.y, l.z, m.x, m.y} : u32x4{l.z, m.x, m.y, m.z};
      missing &= ~(1u << p), last = p;
    }
    if (round != 0 && missing != set) h.last = last;
    set = missing;
    if (set != 0) {
      relax();
      if (++round % LS_PATIENCE == 0 && loadVolatile((const u32 *)abort) != 0) return h.all = false, h;
    }
  }
  Pack16<T> acc(x[0]);
  LS_DISPATCH_OP(op, reduceAll<OP>(acc, x, ranks))
  acc.finish(Scale<typename Elem<T>::Acc>(op, ranks));
  h.sum = acc.bits16();
  return h;
}

// Reducer12 hears a unit of all peers and combines it with this rank's own, rank 0's
// first.
template <class T> struct Reducer12 {
  Turn12 &turn;
  Scale<typename Elem<T>::Acc> scale;

  FI explicit Reducer12(Turn12 &turn) : turn(turn), scale(turn.a.op, turn.a.ranks) {}

  // False: aborted.
  FI bool operator()(u32 stage, const Place &u, Unit &v) {
    const Args &a = turn.a;
    if (a.ranks > LS_BATCH) return many(stage, u, v);
    Unit all[LS_BATCH];
    if (!turn.hear(stage, 0, turn.peers(), u, all)) return false;
#pragma unroll
    for (u32 p = 0; p < LS_BATCH; p++) // not before: it may still be on its way
      if (p == a.rank) all[p] = v;
    constexpr int COPIES = sizeof(T) > 2 ? 3 : 1; // of long code
#pragma unroll COPIES
    for (int i = 0; i < 3; i++) {
      u32x4 x[LS_BATCH];
#pragma unroll
      for (u32 p = 0; p < LS_BATCH; p++) x[p] = all[p].take();
      Pack16<T> acc(x[0]);
      LS_DISPATCH_OP(a.op, reduceAll<OP>(acc, x, a.ranks))
      acc.finish(scale);
      v.add(acc.bits16());
    }
    return true;
  }

private:
  // many is for more ranks than registers hold units of: piece by piece.
  FI bool many(u32 stage, const Place &u, Unit &v) {
    const Args &a = turn.a;
    const Line12 *at = turn.line(a.rank, stage, 0) + u.line;
#pragma unroll 1
    for (u32 i = 0; turn.alive && i < 3; i++) {
      Heard h = hear8<T>(at + i * LS_WARP, turn.room, turn.peers(), i, u.lines, turn.epoch, a.abort, a.op, a.ranks, a.rank, v.take());
      v.w[8] = h.sum.x, v.w[9] = h.sum.y, v.w[10] = h.sum.z, v.w[11] = h.sum.w;
      if (h.last < a.ranks) turn.stamps.saw(h.last);
      turn.alive = h.all;
    }
    return turn.alive;
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
    turn.pushAll(0, u, v);
  }
  turn.stamps.entered();
  for (Place u(share.bytes); u.there(); u.next()) {
    Unit v;
    send.load(u, v);
    if (!reduce(0, u, v)) break;
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
    pushSpans(turn, 0, u, turn.peers(), [&](u32 p) { return share.of(send + p * bytes); });
  }
  turn.stamps.entered();
  Span own = share.of(send + a.rank * bytes), recv = share.of(a.recv[a.rank]);
  for (Place u(share.bytes); u.there(); u.next()) {
    Unit v;
    own.load(u, v);
    if (!reduce(0, u, v)) break;
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
      turn.push(a.root, 0, u, v);
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
      if (!reduce(0, u, v)) break;
      recv.store(u, v);
    }
  } else {
    turn.meet(turn.peers());
  }
  turn.end();
}

// allReduceLines2: part j of a block's share goes to rank j, which sends the result to
// all.
template <class T> FI void allReduceLines2(const Args &a) {
  Turn12 turn(a);
  Share12 share(a.count * sizeof(T));
  Parts12 parts(share, a.ranks);
  Reducer12<T> reduce(turn);
  u64 send = a.send[a.rank], recv = a.recv[a.rank];
  for (Place u(parts.bytes); u.there(); u.next()) {
    pushSpans(turn, 0, u, turn.peers(), [&](u32 p) { return parts.of(send, p); });
  }
  turn.stamps.entered();
  Span own = parts.of(send, a.rank), mine = parts.of(recv, a.rank);
  for (Place u(parts.bytes); u.there(); u.next()) {
    Unit v;
    own.load(u, v);
    if (!reduce(0, u, v)) break;
    turn.pushAll(1, u, v);
    mine.store(u, v);
  }
  for (Place u(parts.bytes); u.there(); u.next()) {
    if (!storeSpans(turn, 1, u, turn.peers(), [&](u32 p) { return parts.of(recv, p); })) break;
  }
  turn.end();
}

// reduceLines2: each rank but root combines a part and sends it to root. For two
// ranks or more.
template <class T> FI void reduceLines2(const Args &a) {
  Turn12 turn(a);
  Share12 share(a.count * sizeof(T));
  Heirs12 heirs(a, share);
  Reducer12<T> reduce(turn);
  u64 send = a.send[a.rank];
  u32 others = turn.peers() & ~(1u << a.root);
  for (Place u(heirs.bytes); u.there(); u.next()) {
    pushSpans(turn, 0, u, others, [&](u32 p) { return heirs.of(send, p); });
  }
  turn.stamps.entered();
  if (a.rank == a.root) {
    u64 recv = a.recv[a.rank];
    for (Place u(heirs.bytes); u.there(); u.next()) {
      if (!storeSpans(turn, 1, u, others, [&](u32 p) { return heirs.of(recv, p); })) break;
    }
  } else {
    Span own = heirs.of(send, a.rank);
    for (Place u(heirs.bytes); u.there(); u.next()) {
      Unit v;
      own.load(u, v);
      if (!reduce(0, u, v)) break;
      turn.push(a.root, 1, u, v);
    }
  }
  turn.end();
}

KERNEL(512) void ls_allreduce_ll12x2(Args a) { allReduceLines2<LS_TYPE>(a); }
KERNEL(512) void ls_reduce_ll12x2(Args a) { reduceLines2<LS_TYPE>(a); }
KERNEL(512) void ls_allreduce_ll12(Args a) { allReduceLines<LS_TYPE>(a); }
KERNEL(512) void ls_reducescatter_ll12(Args a) { reduceScatterLines<LS_TYPE>(a); }
KERNEL(512) void ls_reduce_ll12(Args a) { reduceLines<LS_TYPE>(a); }
