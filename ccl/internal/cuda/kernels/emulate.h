// The device, emulated on the host: one CPU thread for each CUDA thread, so that
// tests can run the kernels of all ranks of a communicator in one process.
#pragma once
#include "abi.h"
#include <atomic>
#include <barrier>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define FI inline __attribute__((always_inline))
#define KERNEL(threads) extern "C"

// Votes are taken by all who wait at a barrier, in three places in turn: while one is in use the
// next one is cleared, which nobody reads any more. turn counts a thread's.
struct Votes {
  std::barrier<> barrier;
  std::atomic<u32> votes[3]{};
  explicit Votes(u32 threads) : barrier(threads) {}

  bool any(bool mine, u32 &turn) {
    u32 now = turn % 3;
    turn = (now + 1) % 3;
    votes[turn] = 0;
    if (mine) votes[now] = 1;
    barrier.arrive_and_wait();
    return votes[now] != 0;
  }
};

struct BlockEmulation {
  enum { PAIR = 2 }; // lanes of a warp, where kernels want several
  Votes all;
  std::vector<std::unique_ptr<Votes>> pairs;
  alignas(16) u64 memory[96]{}; // what is __shared__ on the device
  std::shared_ptr<void> bulk;     // emulate_bulk.h's, made at first use
  std::once_flag bulkOnce;
  u32x4 places[64]{};
  explicit BlockEmulation(u32 threads) : all(threads) {
    for (u32 p = 0; p < threads / PAIR; p++) pairs.push_back(std::make_unique<Votes>(PAIR));
  }
};
struct ThreadEmulation {
  u32 tid, block, threads, blocks, votes;
  BlockEmulation *shared;
  u32 pairVotes = 0;
};
inline thread_local ThreadEmulation emulated;

inline u32 tid() { return emulated.tid; }
inline u32 block() { return emulated.block; }
inline u32 threads() { return emulated.threads; }
inline u32 blocks() { return emulated.blocks; }
inline void sync() { emulated.shared->all.barrier.arrive_and_wait(); }
inline bool syncOr(bool mine) { return emulated.shared->all.any(mine, emulated.votes); }
// relax yields, and sleeps where it has been of no use: there are many more threads than
// processors, and a virtual machine spends more on short sleeps than on what they wait for.
inline void relax() {
  static thread_local u32 turns;
  if (++turns % 8 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  else std::this_thread::yield();
}

inline u64 globaltimer() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

template <class T> T loadHost(const T *p) { return std::atomic_ref<T>(*const_cast<T *>(p)).load(std::memory_order_acquire); }
template <class T> void storeHost(T *p, T v) { std::atomic_ref<T>(*p).store(v, std::memory_order_release); }
inline u32 loadVolatile(const u32 *p) { return loadHost(p); }
inline u64 loadVolatile64(const u64 *p) { return loadHost(p); }
inline u32 loadAcquire(const u32 *p) { return loadHost(p); }
inline void storeRelease(u32 *p, u32 v) { storeHost(p, v); }
inline void storeVolatile(u32 *p, u32 v) { storeHost(p, v); }
inline void storeVolatile64(u64 *p, u64 v) { storeHost(p, v); }
inline void fenceSystem() { std::atomic_thread_fence(std::memory_order_seq_cst); }

// The halves of a line may be seen in any order, but are not torn.
inline void storeLine(Line *p, u32 d0, u32 d1, u32 flag) {
  storeHost((u64 *)p + 1, u64(flag) << 32 | d1);
  storeHost((u64 *)p, u64(flag) << 32 | d0);
}
inline u32x4 loadLine(const Line *p) {
  u64 a = loadHost((const u64 *)p), b = loadHost((const u64 *)p + 1);
  return u32x4{u32(a), u32(a >> 32), u32(b), u32(b >> 32)};
}
// A line of 12 bytes is seen whole or not at all: its flag goes out last and is read
// first. Now and then one comes late, after others have been looked at.
inline void storeLine12(Line12 *p, u32 d0, u32 d1, u32 d2, u32 flag) {
  static thread_local u32 lines;
  if (++lines % 5 == 0) std::this_thread::yield();
  u32 d[3] = {d0, d1, d2};
  for (int i = 0; i < 3; i++) std::atomic_ref<u32>(p->d[i]).store(d[i], std::memory_order_relaxed);
  storeHost(&p->flag, flag);
}
inline u32x4 loadLine12(const Line12 *p) {
  auto *line = const_cast<Line12 *>(p);
  u32 flag = loadHost(&line->flag), d[3];
  for (int i = 0; i < 3; i++) d[i] = std::atomic_ref<u32>(line->d[i]).load(std::memory_order_relaxed);
  return u32x4{d[0], d[1], d[2], flag};
}
inline void store16(u64 *p, u64 a, u64 b) { storeHost(p, a), storeHost(p + 1, b); }
inline u32 atomicAdd(u32 *p, u32 v) { return std::atomic_ref<u32>(*p).fetch_add(v); }
// A warp has one lane here (LS_RING_LANES), or two, which run apart as threads do.
inline Votes &pair() { return *emulated.shared->pairs[tid() / BlockEmulation::PAIR]; }
template <u32 LANES = 1> void syncLanes() {
  static_assert(LANES == 1 || LANES == BlockEmulation::PAIR);
  if (LANES > 1) pair().barrier.arrive_and_wait();
}
template <u32 LANES = 1> bool allLanes(bool mine) {
  static_assert(LANES == 1 || LANES == BlockEmulation::PAIR);
  return LANES == 1 ? mine : !pair().any(!mine, emulated.pairVotes);
}
// Lines that lanes store together are seen whole or not at all: the flags go out when all else is
// there. Now and then they come late.
template <u32 LANES, u32 ROWS> void storeRows(u64x2 *p, const u64x2 (&rows)[ROWS], bool flagged) {
  static thread_local u32 turns;
  auto relaxed = [](u64 &word, u64 v) { std::atomic_ref<u64>(word).store(v, std::memory_order_relaxed); };
  for (u32 r = 0; r < ROWS; r++) {
    u64 *to = (u64 *)(p + r * LANES);
    relaxed(to[0], rows[r].x);
    if (!flagged) relaxed(to[1], rows[r].y);
  }
  syncLanes<LANES>();
  if (++turns % 5 == 0) std::this_thread::yield();
  for (u32 r = 0; flagged && r < ROWS; r++) storeHost((u64 *)(p + r * LANES) + 1, u64(rows[r].y));
}
template <u32 LANES, u32 ROWS> void loadRows(const u64x2 *p, u64x2 (&rows)[ROWS]) {
  auto relaxed = [](const u64 *word) { return std::atomic_ref<u64>(*const_cast<u64 *>(word)).load(std::memory_order_relaxed); };
  for (u32 r = 0; r < ROWS; r++) rows[r] = u64x2{relaxed((const u64 *)(p + r * LANES)), relaxed((const u64 *)(p + r * LANES) + 1)};
}
inline void addInBlock(u32 *p, u32 v) { std::atomic_ref<u32>(*p).fetch_add(v); }
inline u32 loadInBlock(const u32 *p) { return loadHost(p); }
inline void storeInBlock(u32 *p, u32 v) { storeHost(p, v); }
inline void atomicAdd64(u64 *p, u64 v) { std::atomic_ref<u64>(*p).fetch_add(v); }

// Copies to places are made at once or as late as can be, by chance.
struct AsyncCopy { u32 place; u64 from; };
inline std::vector<AsyncCopy> &asyncCopies() {
  static thread_local std::vector<AsyncCopy> copies;
  return copies;
}
inline void copyNow(const AsyncCopy &c) {
  if (c.place >= sizeof emulated.shared->places / sizeof(u32x4)) abort();
  emulated.shared->places[c.place] = *(const u32x4 *)c.from;
}
inline void copyAsync(u32 place, u64 from) {
  static thread_local u32 chance = 1;
  chance = chance * 1664525 + 1013904223;
  if (chance >> 31) copyNow({place, from});
  else asyncCopies().push_back({place, from});
}
inline void copyAsyncOnce(u32 place, u64 from) { copyAsync(place, from); }
inline void copiedAsync() {
  for (auto &c : asyncCopies()) copyNow(c);
  asyncCopies().clear();
}
inline u32x4 atPlace(u32 place) { return emulated.shared->places[place]; }

// loadPeer is loadVolatile of a word of rank to's memory by rank from, which takes longer by
// linkDelay, µs.
inline std::atomic<u32> linkDelay[LS_MAX_RANKS][LS_MAX_RANKS]; // [from][to]
inline u32 loadPeer(const u32 *p, u32 from, u32 to) {
  if (u32 us = linkDelay[from][to]) std::this_thread::sleep_for(std::chrono::microseconds(us));
  return loadVolatile(p);
}
