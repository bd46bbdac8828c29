// LL movers: bytes of any count at any address.
#pragma once
#include "ll.h"

// gather sends this rank's bytes to all, and receives everybody's at their
// places.
FI void gather(const Args &a, u64 bytes) {
  Turn turn(a);
  Share share(bytes);
  u64 send = a.send[a.rank], recv = a.recv[a.rank], own = recv + a.rank * bytes;
  for (u32 i = tid(); i < share.count; i += threads()) {
    u32 n = share.valid(i);
    u64 v = load8(send + share.at(i), n);
    turn.eachPeer([&](u32 p) { push(turn.ll(p, a.rank) + i, v, turn.epoch); });
    if (own != send) store8(own + share.at(i), v, n);
  }
  turn.stamps.entered();
  u64 v[LS_MAX_RANKS];
  for (u32 i = tid(); i < share.count && turn.hear(turn.ll(a.rank, 0) + i, turn.peers(), v); i += threads()) {
    storeParts(a, v, [&](u32 p) { return Part{recv + p * bytes + share.at(i), share.valid(i)}; });
  }
  turn.end();
}

// ls_allgather_ll: each rank's send, count bytes, to its place in all recvs.
KERNEL(512) void ls_allgather_ll(Args a) { gather(a, a.count); }

// ls_barrier: one block of one warp.
KERNEL(32) void ls_barrier(Args a) { gather(a, 0); }

// ls_alltoall_ll: part p of each rank's send, count bytes, to the sender's place
// in rank p's recv.
KERNEL(512) void ls_alltoall_ll(Args a) {
  Turn turn(a);
  Share share(a.count);
  u64 send = a.send[a.rank], recv = a.recv[a.rank];
  for (u32 i = tid(); i < share.count; i += threads()) {
    u32 n = share.valid(i);
    pushParts(turn, i, [&](u32 p) { return Part{send + p * a.count + share.at(i), n}; });
    u64 own = a.rank * a.count + share.at(i);
    if (send != recv) store8(recv + own, load8(send + own, n), n);
  }
  turn.stamps.entered();
  u64 v[LS_MAX_RANKS];
  for (u32 i = tid(); i < share.count && turn.hear(turn.ll(a.rank, 0) + i, turn.peers(), v); i += threads()) {
    storeParts(a, v, [&](u32 p) { return Part{recv + p * a.count + share.at(i), share.valid(i)}; });
  }
  turn.end();
}

// ls_broadcast_ll: root's send, count bytes, to all recvs. The others send a
// line of nothing, for the epoch's sake.
KERNEL(512) void ls_broadcast_ll(Args a) {
  Turn turn(a);
  Share share(a.count);
  u64 recv = a.recv[a.rank];
  bool root = a.rank == a.root;
  for (u32 i = tid(); i < (root ? share.count : 1); i += threads()) {
    u32 n = root ? share.valid(i) : 0;
    u64 v = root ? load8(a.send[a.rank] + share.at(i), n) : 0;
    turn.eachPeer([&](u32 p) { push(turn.ll(p, a.rank) + i, v, turn.epoch); });
    if (root && a.send[a.rank] != recv) store8(recv + share.at(i), v, n);
  }
  turn.stamps.entered();
  u64 v[LS_MAX_RANKS];
  u32 source = root ? 0 : 1u << a.root;
  for (u32 i = tid(); i < (root ? 1 : share.count); i += threads()) {
    if (!turn.hear(turn.ll(a.rank, 0) + i, i == 0 ? turn.peers() : source, v)) break;
    if (root) continue;
    store8(recv + share.at(i), pick(v, a.root), share.valid(i));
  }
  turn.end();
}

// ls_broadcast_ll2: root sends a part to each of the others, and they pass it on
// to the rest. For two ranks or more; the others send root a line of nothing.
KERNEL(512) void ls_broadcast_ll2(Args a) {
  Turn turn(a);
  Share share(a.count);
  Heirs heirs(a, share);
  u64 recv = a.recv[a.rank], v[LS_MAX_RANKS];
  if (a.rank == a.root) {
    u64 send = a.send[a.rank];
    for (u32 k = tid(); k < heirs.part; k += threads()) {
      pushParts(turn, k, [&](u32 p) { return heirs.of(send, p, k); });
    }
    turn.stamps.entered();
    for (u32 i = tid(); send != recv && i < share.count; i += threads()) {
      store8(recv + share.at(i), load8(send + share.at(i), share.valid(i)), share.valid(i));
    }
    if (tid() == 0) turn.hear(turn.ll(a.rank, 0), turn.peers(), v);
  } else {
    if (tid() == 0) push(turn.ll(a.root, a.rank), 0, turn.epoch);
    turn.stamps.entered();
    for (u32 k = tid(); k < heirs.part; k += threads()) {
      if (!turn.hear(turn.ll(a.rank, 0) + k, 1u << a.root, v)) break;
      u64 x = pick(v, a.root);
      turn.eachPeer([&](u32 p) {
        if (p != a.root) push(turn.ll2(p, a.rank) + k, x, turn.epoch);
      });
      Part mine = heirs.of(recv, a.rank, k);
      store8(mine.at, x, mine.valid);
    }
    for (u32 k = tid(); k < heirs.part; k += threads()) {
      if (!turn.hear(turn.ll2(a.rank, 0) + k, turn.peers() & ~(1u << a.root), v)) break;
      storeParts(a, v, [&](u32 p) { return heirs.of(recv, p, k); }, a.root);
    }
  }
  turn.end();
}
