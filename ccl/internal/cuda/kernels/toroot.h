// Reduce. The ranks but root reduce a share each and push it to root, so that no link
// carries more than the buffer either way. Of two ranks root does it all: what it reads
// then is all that there is on the links, and goes one way.
//
// Only root knows where it receives. As it enters it tells each peer the address, as
// that one has mapped it. Where peers cannot write there they push into root's staging
// memory, in pieces, and each of root's blocks takes out what blocks of its number
// have brought. Pieces take turns in two places. The last one has the third: it is
// shorter, so other blocks have its parts, and these do not know whether those of the
// piece before last have been taken out.
#pragma once
#include "pair.h"
#include "spread.h"

// By loads and stores, and by bulk copies.
struct BySym {
  FI static void prepare() {}
  FI static void again() {}
  FI static Tiles tiles(const Cut &cut) { return symTiles(cut); }
  template <class T> FI static void reduce(u32) { reduceWork<T>(); }
  template <class T> FI static void alone() { reduceWork<T>(); }
};
#ifdef LS_BULK
struct ByBulk {
  FI static void prepare() { prepareBulk(); }
  FI static void again() { resetBulk(); }
  FI static Tiles tiles(const Cut &cut) { return bulkTiles(cut); }
  template <class T> FI static void reduce(u32 pace) { reduceWorkBulk<T>(pace); }
  template <class T> FI static void alone() { work.ranks == 2 ? reducePair<T>() : reduceWorkBulk<T>(); }
};
#endif

// takeOut copies to root's memory at to what the other ranks' blocks of this number
// have made of work.
template <class T, class By> static __device__ __attribute__((noinline)) void takeOut(u64 to) {
  using Raw = typename RawOf<sizeof(T)>::type;
  Cut cut(sizeof(T));
  Tiles tiles = By::tiles(cut);
  u64 from = work.to[0], ends = cut.head + cut.tail, stride = u64(threads()) * blocks() * work.owners;
  for (u32 owner = 0; owner < work.owners; owner++) {
    for (u64 at = tiles.first(0, owner), step = 0; at < cut.packs; at = tiles.first(++step, owner)) {
      u64 off = cut.head * sizeof(T) + at * 16, dst = to + off;
      spread(from + off, tiles.length(at) * 16, 1, [=](u32) { return dst; });
    }
    for (u64 i = (u64(block()) * work.owners + owner) * threads() + tid(); i < ends; i += stride) { // as reduceEndsOf does them
      u64 off = (i < cut.head ? i : i + cut.packs * 16 / sizeof(T)) * sizeof(T);
      put<Raw>(to + off, get<Raw>(from + off));
    }
  }
}

// reduceStaged is the operation through staging memory, once all have entered. False:
// aborted.
template <class T, class By> FI bool reduceStaged(const Args &a) {
  Heap *own = heap(a, a.rank);
  bool root = a.rank == a.root;
  u32 before = own->block[block()].steps, t = tid() < a.ranks ? tid() : 0, owner = work.owner, k = 0;
  const u32(&flag)[LS_MAX_RANKS] = own->flag[LS_PHASE_STEPS][block()];
  u64 third = a.room / 3 & ~255u, piece = (third - 16 & ~u64(15)) / sizeof(T);
  u64 place = a.ring + a.root * a.stride + (a.send[a.rank] & 15); // aligned as what is sent
  u32 pieces = u32((a.count + piece - 1) / piece);
  for (u64 done = 0; done < a.count; done += piece, k++) {
    bool ok = true;
    if (root) ok = tid() >= a.ranks || tid() == a.rank || waitFlag(a, &flag[t], before + k + 1, pieces - k - 1);
    else if (k >= 2 && tid() == 0) ok = waitFlag(a, &flag[a.root], before + k - 1, pieces - k);
    if (syncOr(!ok)) return false;
    u32 turn = k + 1 == pieces ? 2 : k & 1;
    setWork(a.send[t] + done * sizeof(T), place + turn * third, least(piece, a.count - done), a.ranks, 1, owner, a.ranks - 1, a.op, a.rank, a.ranks);
    if (!root && k > 0) By::again();
    sync();
    if (root) takeOut<T, By>(a.recv[a.rank] + done * sizeof(T));
    else By::template reduce<T>(a.pace);
    sync();
    if (!root && tid() == 0) storeRelease(&heap(a, a.root)->flag[LS_PHASE_STEPS][block()][a.rank], before + k + 1);
    // What was read is read: no fence has to hold these words back.
    if (root && tid() < a.ranks && tid() != a.rank) storeVolatile(&heap(a, tid())->flag[LS_PHASE_STEPS][block()][a.rank], before + k + 1);
  }
  if (tid() == 0) own->block[block()].steps = before + k;
  return true;
}

// reduceToRootBy: count elements, all sends in windows.
template <class T, class By> FI void reduceToRootBy(const Args &a) {
  Op op(a);
  bool root = a.rank == a.root;
  u32 t = tid() < a.ranks ? tid() : 0, others = a.ranks - 1, owners = others < 2 ? 1 : others;
  u32 owner = owners == 1 ? 0 : (a.rank + others - a.root) % a.ranks;
  setWork(a.send[t], 0, a.count, a.ranks, 0, owner, owners, a.op, a.rank, a.ranks);
  if (tid() == 0) work.targets = 1; // which enterTold brings
  By::prepare();
  if (!op.enterTold(&work.to[0])) return;
  if (others > 1 && work.to[0] == 0) {
    if (!reduceStaged<T, By>(a)) return op.stamps.stopped();
  } else if (others < 2) {
    if (root) By::template alone<T>();
  } else if (!root) {
    By::template reduce<T>(a.pace);
  }
  op.leave();
}

KERNEL(LS_SYM_THREADS) void ls_reduce_sym(Args a) { reduceToRootBy<LS_TYPE, BySym>(a); }
#ifdef LS_BULK
KERNEL(LS_BULK_THREADS) void ls_reduce_bulk(Args a) { reduceToRootBy<LS_TYPE, ByBulk>(a); }
#endif
