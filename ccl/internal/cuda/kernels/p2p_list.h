// Several messages of a pair in one launch.
//
// Messages of a peer, direction and kind are a queue with blocks of its own, which
// walk it in order, each with the same lanes of every message. So a queue waits for
// the same queue at the other end and for nothing else: a peer may be late, or need
// what another queue brings. Blocks that serve two queues, as those of ls_p2p_ll do,
// would make one wait for the other.
//
// Lines, offers and counts are those of single messages: what one end does in a
// launch of its own, the other may have in a queue.
#pragma once
#include "p2p_direct.h"

FI Heap *heap(const P2PListArgs &a, u32 rank) { return (Heap *)(a.heaps + rank * a.stride); }

#ifdef LS_HOST
FI void readItems(const P2PListArgs &) {}
FI Item itemOf(const P2PListArgs &a, u32 i) { return i < LS_ITEMS ? a.item[i] : heap(a, a.rank)->item[i - LS_ITEMS]; }
template <u32 N, class To> FI void eachItem(const Item (&list)[N], u32 count, const To &to) {
  for (u32 i = tid(); i < count; i += threads()) to(i, list[i]);
}
#else
// fourth calls to for every fourth item from I on. Items of a parameter have constant
// indices only (see jobOf).
template <u32 I, u32 N, class To> FI void fourth(const Item (&list)[N], u32 count, const To &to) {
  if constexpr (I < N) {
    if (I >= count) return;
    to(I, list[I]);
    fourth<I + 4>(list, count, to);
  }
}

// eachItem calls to for all items, by the first threads of four warps: a few items
// take no time.
template <u32 N, class To> FI void eachItem(const Item (&list)[N], u32 count, const To &to) {
  if (tid() == 0) fourth<0>(list, count, to);
  if (tid() == 32) fourth<1>(list, count, to);
  if (tid() == 64) fourth<2>(list, count, to);
  if (tid() == 96) fourth<3>(list, count, to);
}

static __shared__ Item items[LS_ITEMS];

// readItems brings the parameter's items to where they have indices.
FI void readItems(const P2PListArgs &a) {
  eachItem(a.item, a.items, [](u32 i, const Item &item) { items[i] = item; });
  sync();
}

FI Item itemOf(const P2PListArgs &a, u32 i) {
  if (i < LS_ITEMS) return items[i];
  return heap(a, a.rank)->item[i - LS_ITEMS];
}
#endif

// Walk is a block's place in its queue.
struct Walk {
  Queue queue;
  u32 nth;
};

FI Walk walkOf(const P2PListArgs &a) {
  Walk w{};
#pragma unroll
  for (u32 k = 0; k < LS_QUEUES; k++) {
    const Queue &q = a.queue[k];
    u32 nth = block() - q.first;
    if (nth < q.blocks) {
      w = {q, nth};
      break;
    }
  }
  return w;
}

// jobOf is the block's part of an item.
FI Job jobOf(const P2PListArgs &a, const Walk &w, const Item &m) {
  const Queue &q = w.queue;
  Job job{m.buffer, m.bytes, u64(m.piece) * LS_PIECE_UNIT, m.target, 0, a.room, q.peer, m.lanes, q.direct, w.nth, q.blocks};
  if (q.direct && !q.send && m.target == 0) {
    job.target = q.target;
    job.stage = a.stage + u64(q.peer) * (2 * LS_LANES) * a.room;
  }
  return job;
}

// FirstSeen are the stamps as messages of a queue see them: a peer has come with its
// first one.
struct FirstSeen {
  Stamps<P2PListArgs> &stamps;
  bool first;
  FI void entered() const {}
  FI void saw(u32 source) {
    if (first) stamps.saw(source);
  }
};

// exchangeLanes is exchangeLines for all of the block's lanes, one after the other.
FI bool exchangeLanes(const P2PListArgs &a, FirstSeen &stamps, Job job, bool send) {
  for (Job none{}; job.lane < job.lanes; job.lane += job.step) {
    if (!exchangeLines(a, stamps, send ? job : none, send ? none : job)) return false;
  }
  return true;
}

// walk does the block's part of its queue. A message's counts are there for all
// threads before the next one begins. False: aborted.
template <bool LINES, class Copy> FI bool walk(const P2PListArgs &a, Stamps<P2PListArgs> &stamps, Copy copy) {
  readItems(a);
  Walk w = walkOf(a);
  for (u32 i = 0; i < w.queue.count; i++) {
    Job job = jobOf(a, w, itemOf(a, w.queue.begin + i));
    FirstSeen seen{stamps, i == 0};
    bool ok = true;
    if (LINES && !w.queue.direct) {
      ok = exchangeLanes(a, seen, job, w.queue.send);
    } else if (w.queue.send) {
      ok = pushDirect(a, seen, job, copy);
    } else {
      Taker taker(a, seen, job);
      ok = job.stage == 0 ? taker.whole(job.lane, job.step) : taker.staged(copy);
    }
    if (!ok) return false;
    sync();
  }
  return true;
}
