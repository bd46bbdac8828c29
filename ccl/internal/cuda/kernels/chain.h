// Chains: lines of 12 bytes that go from each rank to the next, for a Broadcast, which begins at
// root, and a Reduce, which ends there.
//
// A thread waits for its unit of the previous rank, folds its own in or stores it, and pushes it
// to the next rank: all hops are under way at a time, and no link carries the buffer more than
// once. Peers touch nothing but lines, so buffers may be anybody's.
//
// A block has one source, which has all of its lines. A share that is larger than they hold goes
// in rounds, which have an epoch each, and so take the two sets of lines in turn. This is why a
// rank may push to a set:
//  - In round 0 it was read two epochs ago, as in every kernel of lines: whoever is in a kernel
//    knows that all peers have begun the one before, and have ended what was before that.
//  - In round k the next rank has read round k-2; for k = 1, it has ended the kernel before. Each
//    of its threads says so to the thread of its number, whose lines it reads, in Heap.read. That
//    has two sets as well, which kernels take in turn, and each word is waited for, so none comes
//    late. Of the last two rounds there are no words, since nobody waits for them.
//  - In the next kernel, whichever it is, any rank may push to the set of the last round but one.
//    So where there are rounds a block ends only when all peers have told that they have read
//    that one; their words have the last round's time to come.
// The number of rounds is odd: from kernel to kernel epochs alternate as without rounds.
#pragma once
#include "ll12.h"

enum {
#ifdef LS_HOST
  LS_CHAIN_GROUPS = 24, // rounds come soon
#else
  LS_CHAIN_GROUPS = u32(LS_MAX_RANKS) * LS_LL12_LINES / LS_GROUP_LINES,
#endif
  LS_CHAIN_ROOM = u32(LS_CHAIN_GROUPS) * LS_GROUP, // bytes of a block's share that its lines hold at a time
  LS_CHAIN_CAME = 0, LS_CHAIN_READ = 1,       // LL lines of words: a rank has begun; it has read the last round but one
};
static_assert(u32(LS_CHAIN_GROUPS) * LS_GROUP_LINES <= u32(LS_MAX_RANKS) * LS_LL12_LINES && LS_CHAIN_GROUPS % 4 == 0);

// TurnChain is a Turn12 that goes through rounds.
struct TurnChain : Turn12 {
  u32 from, to;         // the previous and the next rank
  bool first, last;     // nothing comes from the one, or goes to the other
  u32 words;            // the set of Heap.read
  u32 before, previous; // the epochs of the last round but one, and of the last

  FI TurnChain(const Args &a, u32 start)
      : Turn12(a), from((a.rank == 0 ? a.ranks : a.rank) - 1), to(next(1)), first(a.rank == start), last(to == start), words(epoch & 1), before(0), previous(epoch - 1) {
    room = 0; // from one source's lines to the next one's
  }

  FI void nextRound() {
    before = previous, previous = epoch;
    if (++epoch == 0) epoch = 2;
  }

  // tell sends all peers a word, and hearAll waits for theirs. It is thread 0 that does.
  FI void tell(u32 word) const {
    if (tid() == 0) eachPeer([&](u32 p) { ::push(ll(p, a.rank) + word, 0, epoch); });
  }
  FI void hearAll(u32 word) {
    if (tid() != 0) return;
#pragma unroll 1
    for (u32 k = 1; k < a.ranks; k++) {
      u32 p = next(k);
      const Line *line = ll(a.rank, p) + word;
#pragma unroll 1
      for (u32 turn = 0; alive;) {
        u32x4 got = loadLine(line);
        if (got.y == epoch && got.w == epoch) {
          if (turn != 0) stamps.saw(p);
#ifdef LS_PEERS
          sight.heard(1u << p, turn != 0);
#endif
          break;
        }
        relax();
        if (++turn % LS_PATIENCE == 0 && aborted(a)) alive = false;
      }
    }
  }

  // tellRead tells the previous rank's thread that the lines of an epoch have been read.
  // Reading is over when its values are there: no fence has to hold the word back.
  FI void tellRead(u32 last) const { storeVolatile(&heap(a, from)->read[words][block()][tid()], last); }

  // mayPush waits until the next rank has read what was in this round's set. False: aborted.
  FI bool mayPush() {
    const u32 *word = &self->read[words][block()][tid()];
#pragma unroll 1
    for (u32 turn = 1; alive; turn++) {
      u32 read = loadVolatile(word);
      if (read == before || read == previous) return true;
      relax();
      if (turn % LS_PATIENCE == 0 && aborted(a)) alive = false;
    }
    return false;
  }
};

// alongChain passes bytes of buffers on, from rank start to the one before it: pass does a
// thread's unit of a part, false when it is aborted. wide is how many bytes travel for
// each of a buffer.
template <class Pass> FI void alongChain(const Args &a, u64 bytes, u32 start, u32 wide, const Pass &pass) {
  TurnChain chain(a, start);
  Share12 share(bytes), part = share;
  u32 room = LS_CHAIN_ROOM / wide, rounds = (share.bytes + room - 1) / room | 1;
  u32 each = u32(least(upTo((share.bytes + rounds - 1) / rounds, u64(threads() / LS_WARP) * LS_GROUP), room)); // whole turns of all warps
  chain.tell(LS_CHAIN_CAME);
  if (rounds > 1 && !chain.first) chain.tellRead(chain.previous);
  // Words come no later than the first lines. Who has none to wait for pushes first.
  auto begin = [&] { chain.stamps.entered(), chain.hearAll(LS_CHAIN_CAME); };
  if (!chain.first) begin();
#pragma unroll 1
  for (u32 k = 0;;) {
    if (k > 0 && k + 1 == rounds) {
      sync();
      chain.tell(LS_CHAIN_READ);
    }
    u32 at = k * each < share.bytes ? k * each : share.bytes;
    part.first = share.first + at, part.bytes = u32(least(each, share.bytes - at));
    if (k == 0 || chain.last || chain.mayPush()) {
#pragma unroll 1
      for (Place u(part.bytes); u.there(); u.next())
        if (!pass(chain, part, u)) break;
    }
    if (k == 0 && chain.first) begin();
    if (++k == rounds) break;
    if (k + 1 < rounds && !chain.first) chain.tellRead(chain.epoch);
    chain.nextRound();
  }
  if (rounds > 1) chain.hearAll(LS_CHAIN_READ);
  chain.end();
}
