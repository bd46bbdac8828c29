// Sends and receives: small messages by LL lines, larger ones straight into the
// receiver's memory.
//
// A message is split over lanes, each of which a block of the sender and a block
// of the receiver do. What a pair of ranks has exchanged on a lane is counted by
// both sides alike, in their heaps, so that a graph's replays go on counting.
#pragma once
#include "p2p_direct.h"
#include "p2p_lines.h"
#include "p2p_list.h"

// end leaves the kernel.
template <class A> FI void end(Stamps<A> &stamps, bool alive) {
  if (alive) stamps.left();
  else stamps.stopped();
}

// ls_p2p_ll: messages by LL.
KERNEL(512) void ls_p2p_ll(P2PArgs a) {
  Stamps<P2PArgs> stamps(a);
  end(stamps, exchangeLines(a, stamps, jobOf(a.send), jobOf(a.receive)));
}

// ls_p2p_direct: messages of all kinds at once.
KERNEL(512) void ls_p2p_direct(P2PArgs a) {
  Stamps<P2PArgs> stamps(a);
  Job out = jobOf(a.send), in = jobOf(a.receive);
  PlainCopy copy;
  bool alive;
  if (out.direct) stamps.entered(), alive = pushDirect(a, stamps, out, copy);
  else if (in.direct) stamps.entered(), alive = takeDirect(a, stamps, in, copy);
  else alive = exchangeLines(a, stamps, out, in);
  end(stamps, alive);
}

// ls_p2p_list: any number of messages of all kinds.
KERNEL(512) void ls_p2p_list(P2PListArgs a) {
  Stamps<P2PListArgs> stamps(a);
  stamps.entered();
  end(stamps, walk<true>(a, stamps, PlainCopy{}));
}

// ls_p2p_items: the part of a list that its parameter has no room for.
KERNEL(128) void ls_p2p_items(ItemsArgs a) {
  eachItem(a.item, a.count, [&](u32 i, const Item &item) { ((Item *)a.to)[i] = item; });
}

#ifdef LS_BULK
// ls_p2p_bulk: direct messages, by bulk copies.
KERNEL(LS_BULK_PUSH_THREADS) void ls_p2p_bulk(P2PArgs a) {
  Stamps<P2PArgs> stamps(a);
  prepareBulkPush();
  stamps.entered();
  Job out = jobOf(a.send), in = jobOf(a.receive);
  BulkCopy copy(a.pace);
  bool alive = true;
  if (out.direct) alive = pushDirect(a, stamps, out, copy);
  else if (in.direct) alive = takeDirect(a, stamps, in, copy);
  end(stamps, alive);
}

// ls_p2p_list_bulk: any number of direct messages, by bulk copies.
KERNEL(LS_BULK_PUSH_THREADS) void ls_p2p_list_bulk(P2PListArgs a) {
  Stamps<P2PListArgs> stamps(a);
  prepareBulkPush();
  stamps.entered();
  end(stamps, walk<false>(a, stamps, BulkCopy(a.pace)));
}
#endif
