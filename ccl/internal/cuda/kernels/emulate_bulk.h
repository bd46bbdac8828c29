// Bulk copies, emulated on the host. Stores are made as late as a wait allows,
// so that tests see shared memory that is overwritten too early, and bytes that
// are told of before they are there.
#pragma once
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

struct BulkEmulation {
  struct Mbarrier { u32 count = 0, pending = 0, phase = 0; long bytes = 0; };
  struct Store { u64 to; u32 from, bytes; std::vector<u8> read; };
  alignas(128) u8 memory[80 << 10]{};
  std::mutex lock;
  std::map<u32, Mbarrier> mbarriers;
  using Groups = std::vector<std::vector<Store>>;
  std::vector<Groups> stored; // of each thread
  std::vector<std::unique_ptr<std::barrier<>>> warps;

  void settle(Mbarrier &m) {
    if (m.pending == 0 && m.bytes == 0) m.pending = m.count, m.phase ^= 1;
  }
  Groups &groups() { return stored[tid()]; }
  void read(u32 left) {
    auto &groups = this->groups();
    for (u32 g = 0; g + left + 1 < groups.size(); g++) {
      for (auto &s : groups[g])
        if (s.read.empty()) s.read.assign(memory + s.from, memory + s.from + s.bytes);
    }
  }
  void finish(u32 left) {
    read(left);
    auto &groups = this->groups();
    while (groups.size() > left + 1) {
      for (auto &s : groups.front()) memcpy((void *)s.to, s.read.data(), s.bytes);
      groups.erase(groups.begin());
    }
  }
};

// bulkEmulation is the calling thread's block's.
inline BulkEmulation &bulkEmulation() {
  std::call_once(emulated.shared->bulkOnce, [] {
    auto b = std::make_shared<BulkEmulation>();
    b->stored.assign(threads(), BulkEmulation::Groups(1));
    for (u32 w = 0; w < threads() / 32; w++) b->warps.push_back(std::make_unique<std::barrier<>>(32));
    emulated.shared->bulk = b;
  });
  return *static_cast<BulkEmulation *>(emulated.shared->bulk.get());
}

inline u32 dynamicBase() { return 0; }
inline u32 dynamicBytes() { return sizeof(BulkEmulation::memory); }
inline void mbarrierInit(u32 bar, u32 count) {
  auto &b = bulkEmulation();
  std::lock_guard g(b.lock);
  b.mbarriers[bar] = {count, count};
}
inline void mbarrierInval(u32 bar) {
  auto &b = bulkEmulation();
  std::lock_guard g(b.lock);
  if (b.mbarriers.erase(bar) == 0) abort();
}
inline void mbarrierExpect(u32 bar, u32 bytes) {
  auto &b = bulkEmulation();
  std::lock_guard g(b.lock);
  auto &m = b.mbarriers[bar];
  m.bytes += bytes, m.pending--;
  b.settle(m);
}
inline void mbarrierArrive(u32 bar) { mbarrierExpect(bar, 0); }
inline bool mbarrierTry(u32 bar, u32 parity) {
  auto &b = bulkEmulation();
  std::lock_guard g(b.lock);
  return b.mbarriers[bar].phase != parity;
}
inline void mbarrierWait(u32 bar, u32 parity) {
  while (!mbarrierTry(bar, parity)) relax();
}
inline void bulkLoad(u32 to, u64 from, u32 bytes, u32 bar) {
  auto &b = bulkEmulation();
  if ((to | from | bytes) % 16 != 0 || to + bytes > sizeof b.memory) abort();
  memcpy(b.memory + to, (const void *)from, bytes);
  std::lock_guard g(b.lock);
  auto &m = b.mbarriers[bar];
  m.bytes -= bytes;
  b.settle(m);
}
inline void bulkStore(u64 to, u32 from, u32 bytes) {
  if ((to | from | bytes) % 16 != 0) abort();
  bulkEmulation().groups().back().push_back({to, from, bytes, {}});
}
inline void bulkLoadOnce(u32 to, u64 from, u32 bytes, u32 bar) { bulkLoad(to, from, bytes, bar); }
inline void bulkStoreOnce(u64 to, u32 from, u32 bytes) { bulkStore(to, from, bytes); }
inline void bulkCommit() { bulkEmulation().groups().emplace_back(); }
template <int LEFT> void bulkDone() { bulkEmulation().finish(LEFT); }
template <int LEFT> void bulkRead() { bulkEmulation().read(LEFT); }
inline void fenceProxy() {}
inline void fenceProxyShared() {}
inline void syncWarp() { bulkEmulation().warps[tid() / 32]->arrive_and_wait(); }
inline u32x4 getShared(u32 p) {
  u32x4 v;
  memcpy(&v, bulkEmulation().memory + p, 16);
  return v;
}
inline void putShared(u32 p, u32x4 v) { memcpy(bulkEmulation().memory + p, &v, 16); }
inline void storeShared(u32 p, u32 v) { storeHost((u32 *)(bulkEmulation().memory + p), v); }
inline u32 loadShared(u32 p) { return loadHost((u32 *)(bulkEmulation().memory + p)); }
