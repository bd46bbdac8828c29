// Broadcast by a chain: bytes of any count at any address.
#pragma once
#include "chain.h"

// ls_broadcast_chain: root's send, count bytes, to all recvs.
KERNEL(512) void ls_broadcast_chain(Args a) {
  u64 send = a.send[a.rank], recv = a.recv[a.rank];
  bool keep = a.rank != a.root || send != recv;
  alongChain<1>(a, a.count, a.root, [&](TurnChain &chain, const Share12 &share, const PacksAt &at, u32 step) {
    Packs v;
    if (chain.first) at.load(share.of(send), v);
    else if (!chain.hear(step, v)) return false;
    if (!chain.last && !chain.push(step, v)) return false;
    if (keep) at.store(share.of(recv), v);
    return true;
  });
}
