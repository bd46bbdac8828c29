// Broadcast by a chain: bytes of any count at any address.
#pragma once
#include "chain.h"

// ls_broadcast_chain: root's send, count bytes, to all recvs.
KERNEL(512) void ls_broadcast_chain(Args a) {
  u64 send = a.send[a.rank], recv = a.recv[a.rank];
  bool keep = a.rank != a.root || send != recv;
  alongChain(a, a.count, a.root, 1, [&](TurnChain &chain, const Share12 &part, const Place &u) {
    Unit v;
    if (chain.first) part.of(send).load(u, v);
    else if (!chain.hear<false>(chain.from, u, v)) return false;
    if (!chain.last) chain.push(chain.to, u, v);
    if (keep) part.of(recv).store(u, v);
    return true;
  });
}
