// Movers by lines of 12 bytes: bytes of any count at any address.
#pragma once
#include "ll12.h"

// ls_broadcast_ll12: root's send, count bytes, to all recvs. The others send a word
// for the epoch's sake.
KERNEL(512) void ls_broadcast_ll12(Args a) {
  Turn12 turn(a);
  Share12 share(a.count);
  Span recv = share.of(a.recv[a.rank]);
  if (a.rank == a.root) {
    Span send = share.of(a.send[a.rank]);
    for (Place u(share.bytes); u.there(); u.next()) {
      Unit v;
      send.load(u, v);
      turn.pushAll(u, v);
      if (send.at != recv.at) recv.store(u, v);
    }
    turn.stamps.entered();
    turn.meet(turn.peers());
  } else {
    turn.eachPeer([&](u32 p) { turn.greet(p); });
    turn.stamps.entered();
    for (Place u(share.bytes); u.there(); u.next()) {
      Unit v;
      if (!turn.hear(a.root, u, v)) break;
      recv.store(u, v);
    }
    turn.meet(turn.peers() & ~(1u << a.root));
  }
  turn.end();
}

// ls_allgather_ll12: each rank's send, count bytes, to its place in all recvs.
KERNEL(512) void ls_allgather_ll12(Args a) {
  Turn12 turn(a);
  Share12 share(a.count);
  u64 recv = a.recv[a.rank];
  Span send = share.of(a.send[a.rank]), own = share.of(recv + a.rank * a.count);
  for (Place u(share.bytes); u.there(); u.next()) {
    Unit v;
    send.load(u, v);
    turn.pushAll(u, v);
    if (own.at != send.at) own.store(u, v);
  }
  turn.stamps.entered();
  for (Place u(share.bytes); u.there(); u.next()) {
    if (!storeSpans(turn, u, [&](u32 p) { return share.of(recv + p * a.count); })) break;
  }
  turn.end();
}

// ls_alltoall_ll12: part p of each rank's send, count bytes, to the sender's place in
// rank p's recv.
KERNEL(512) void ls_alltoall_ll12(Args a) {
  Turn12 turn(a);
  Share12 share(a.count);
  u64 send = a.send[a.rank], recv = a.recv[a.rank], own = a.rank * a.count;
  for (Place u(share.bytes); u.there(); u.next()) {
    pushSpans(turn, u, [&](u32 p) { return share.of(send + p * a.count); });
    if (send != recv) {
      Unit v;
      share.of(send + own).load(u, v);
      share.of(recv + own).store(u, v);
    }
  }
  turn.stamps.entered();
  for (Place u(share.bytes); u.there(); u.next()) {
    if (!storeSpans(turn, u, [&](u32 p) { return share.of(recv + p * a.count); })) break;
  }
  turn.end();
}
