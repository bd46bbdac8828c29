// Runs the kernels on windows for all ranks of a communicator, and compares what
// they leave in every byte of every buffer with what they should.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "broadcast.h"
#include "fold.h"
#include "pushreduce.h"
#include "ring.h"
#include "sym.h"
#include "toroot.h"

using Elem_ = LS_TYPE;
using Kernel = void (*)(Args);
using Bytes = std::vector<u8>;

static u32 seed = 1;
static u32 random32() { return seed = seed * 1664525 + 1013904223, seed >> 8; }

// run starts every thread of every block, and waits for all.
template <class A> static void run(void (*kernel)(A), const std::vector<A> &args, u32 nBlocks, u32 nThreads) {
  std::vector<std::thread> all;
  std::vector<std::unique_ptr<BlockEmulation>> shared;
  for (auto &a : args) {
    for (u32 b = 0; b < nBlocks; b++) {
      shared.push_back(std::make_unique<BlockEmulation>(nThreads));
      for (u32 t = 0; t < nThreads; t++) {
        all.emplace_back([=, &a, block = shared.back().get()] {
          emulated = {t, b, nThreads, nBlocks, 0, block};
          kernel(a);
        });
      }
    }
  }
  for (auto &t : all) t.join();
}

// A World is n ranks with heaps that live through many operations.
struct World {
  u32 n, blocks, threads;
  std::vector<Heap *> heaps;
  u32 stop = 0;
  u32 room = 0; // not 0: roots of Reduce tell nobody where they receive, and have so much staging memory
  World(u32 n, u32 blocks, u32 threads) : n(n), blocks(blocks), threads(threads) {
    for (u32 r = 0; r < n; r++) heaps.push_back((Heap *)std::aligned_alloc(128, sizeof(Heap))), memset(heaps[r], 0, sizeof(Heap));
  }
  ~World() {
    for (auto h : heaps) free(h);
  }

  // runOn runs a kernel for all ranks; what is pushed to be reduced has memory of its
  // own, with guards behind what a kernel on so many blocks may use.
  void runOn(Kernel kernel, std::vector<Args> args) {
    u64 ring = room != 0 ? room : u64(blocks) * LS_PUSHREDUCE_SLOTS * LS_PUSHREDUCE_TURN, stride = ring + 256;
    std::vector<u32x4> memory(n * stride / 16);
    memset(memory.data(), 0xa5, n * stride);
    for (auto &a : args) a.ring = u64(memory.data()), a.stride = stride;
    run(kernel, args, blocks, threads);
    for (u32 r = 0; r < n; r++) {
      for (u64 i = ring; i < stride; i++) {
        if (((u8 *)memory.data())[r * stride + i] == 0xa5) continue;
        fprintf(stderr, "rank %u's ring is overrun at byte %llu\n", r, (unsigned long long)i);
        exit(1);
      }
    }
  }

  // check runs kernel on buffers of so many bytes, with an offset from 16-byte
  // alignment and guards around them. want says what recv[r] becomes, given all
  // sends. In place, send lies at inPlace(r) of recv.
  void check(const char *name, Kernel kernel, u64 count, u32 op, u32 root, u64 sendBytes, u64 recvBytes, u32 sendSkew, u32 recvSkew,
             std::function<u64(u32)> inPlace, std::function<void(u32, const std::vector<Bytes> &, u8 *)> want) {
    const u64 guard = 64;
    std::vector<Bytes> recv(n), send(n), given(n);
    std::vector<Args> args(n);
    Args common{};
    for (u32 r = 0; r < n; r++) {
      recv[r].resize(recvBytes + sendBytes + 2 * guard + 32);
      for (auto &x : recv[r]) x = u8(random32());
      send[r] = recv[r];
      u64 base = u64(recv[r].data()), aligned = (base + 15) / 16 * 16 + guard + recvSkew;
      u64 other = (u64(send[r].data()) + 15) / 16 * 16 + guard + sendSkew;
      common.recv[r] = aligned;
      common.send[r] = inPlace ? aligned + inPlace(r) : other;
      common.heap[r] = u64(heaps[r]);
      given[r] = Bytes((u8 *)common.send[r], (u8 *)common.send[r] + sendBytes);
    }
    common.count = count, common.ranks = n, common.root = root, common.op = op;
    common.abort = u64(&stop), common.flags = LS_FIRST | LS_LAST;
    std::vector<Bytes> before = recv;
    for (u32 r = 0; r < n; r++) {
      args[r] = common, args[r].rank = r, args[r].room = room, args[r].pace = count % 2 * 100;
      if (kernel != ls_reduce_sym && kernel != ls_reduce_bulk) continue;
      // Root alone knows where it receives.
      for (u32 p = 0; p < n; p++) args[r].recv[p] = r == root && (p == r || room == 0) ? common.recv[root] : 0;
    }
    for (u32 r = 0; r < n; r++) {
      u64 at = common.recv[r] - u64(recv[r].data());
      want(r, given, before[r].data() + at);
    }
    runOn(kernel, args);
    for (u32 r = 0; r < n; r++) {
      for (u64 i = 0; i < recv[r].size(); i++) {
        if (recv[r][i] == before[r][i]) continue;
        fprintf(stderr, "%s: %u ranks, %u blocks of %u, count %llu, op %u, root %u, skews %u %u, in place %d: rank %u, byte %lld is %u, want %u\n", name, n,
                blocks, threads, count, op, root, sendSkew, recvSkew, bool(inPlace), r, (long long)(u64(recv[r].data()) + i - common.recv[r]), recv[r][i],
                before[r][i]);
        exit(1);
      }
    }
  }

  Elem_ reduced(u32 op, const std::vector<Bytes> &given, u64 i) {
    Elem_ x;
    memcpy(&x, given[0].data() + i * sizeof x, sizeof x);
    for (u32 p = 1; p < n; p++) {
      Elem_ y;
      memcpy(&y, given[p].data() + i * sizeof y, sizeof y);
      LS_DISPATCH_OP(op, x = combine<OP>(x, y));
    }
    return x;
  }

  void checkAlltoAll(u64 part) {
    threads = 64;
    check("ls_alltoall_bulk", ls_alltoall_bulk, part, 0, 0, n * part, n * part, 0, 0, nullptr, [&](u32 r, const std::vector<Bytes> &given, u8 *out) {
      for (u32 p = 0; p < n; p++) memcpy(out + p * part, given[p].data() + r * part, part);
    });
  }

  void checkBroadcast(u64 count, u32 root, u32 sendSkew, u32 recvSkew) {
    auto zero = [](u32) { return u64(0); };
    threads = LS_RELAY_TELLER + 32;
    for (bool inPlace : {false, true}) {
      check("ls_broadcast_bulk", ls_broadcast_bulk, count, 0, root, count, count, sendSkew, recvSkew, inPlace ? std::function<u64(u32)>(zero) : nullptr,
            [&](u32, const std::vector<Bytes> &given, u8 *out) { memcpy(out, given[root].data(), count); });
    }
  }

  void checkPush(u64 count, u32 op, u32 sendSkew, u32 recvSkew) {
    const u64 size = sizeof(Elem_), all = count * size;
    threads = LS_PUSHREDUCE_THREADS;
    for (bool inPlace : {false, true}) {
      auto whole = inPlace ? std::function<u64(u32)>([](u32) { return u64(0); }) : nullptr;
      check("ls_allreduce_pushbulk", ls_allreduce_pushbulk, count, op, 0, all, all, sendSkew * size, recvSkew * size, whole,
            [&](u32, const std::vector<Bytes> &given, u8 *out) {
              for (u64 i = 0; i < count; i++) {
                Elem_ x = reduced(op, given, i);
                memcpy(out + i * size, &x, size);
              }
            });
    }
  }

  // checkRing: buffers of any alignment, and of no window: nobody knows those of others.
  void checkRing(u64 count, u32 op, u32 root, u32 sendSkew, u32 recvSkew) {
    const u64 size = sizeof(Elem_), all = count * size;
    threads = LS_MAX_RANKS;
    // A sum begins with the rank after last, and ends there.
    auto summed = [&](u32 op, const std::vector<Bytes> &given, u64 i, u32 last, u8 *out) {
      std::vector<Bytes> turned;
      for (u32 k = 1; k <= n; k++) turned.push_back(Bytes(given[(last + k) % n].begin() + i * size, given[(last + k) % n].begin() + (i + 1) * size));
      Elem_ x = Scale<Elem_>(op, n)(reduced(op, turned, 0));
      memcpy(out, &x, size);
    };
    for (bool inPlace : {false, true}) {
      auto whole = inPlace ? std::function<u64(u32)>([](u32) { return u64(0); }) : nullptr;
      check("ls_broadcast_ring", ls_broadcast_ring, all, 0, root, all, all, sendSkew, recvSkew, whole,
            [&](u32, const std::vector<Bytes> &given, u8 *out) { memcpy(out, given[root].data(), all); });
      check("ls_allgather_ring", ls_allgather_ring, all, 0, 0, all, n * all, sendSkew, recvSkew, inPlace ? std::function<u64(u32)>([&](u32 r) { return r * all; }) : nullptr,
            [&](u32, const std::vector<Bytes> &given, u8 *out) {
              for (u32 p = 0; p < n; p++) memcpy(out + p * all, given[p].data(), all);
            });
      if constexpr (!std::is_same_v<typename Elem<Elem_>::Acc, Elem_>) continue;
      check("ls_allreduce_ring", ls_allreduce_ring, count, op, 0, all, all, sendSkew * size, recvSkew * size, whole,
            [&](u32, const std::vector<Bytes> &given, u8 *out) {
              emulated.blocks = blocks; // for ringChunk
              Tiles tiles(all, n, ringChunk(all / n, LS_RING_BATCH));
              for (u64 i = 0; i < count; i++) summed(op, given, i, u32(i * size / tiles.tile % n), out + i * size);
            });
      check("ls_reduce_ring", ls_reduce_ring, count, op, root, all, all, sendSkew * size, recvSkew * size, whole,
            [&](u32 r, const std::vector<Bytes> &given, u8 *out) {
              for (u64 i = 0; r == root && i < count; i++) summed(op, given, i, root, out + i * size);
            });
      if (inPlace) continue;
      check("ls_reducescatter_ring", ls_reducescatter_ring, count, op, 0, n * all, all, sendSkew * size, recvSkew * size, nullptr,
            [&](u32 r, const std::vector<Bytes> &given, u8 *out) {
              for (u64 i = 0; i < count; i++) summed(op, given, r * count + i, r, out + i * size);
            });
    }
  }

  // checkReduce: both kernels, into root's memory and through staging memory in turn.
  void checkReduce(u64 count, u32 op, u32 root, u32 sendSkew, u32 recvSkew, u32 staging) {
    const u64 size = sizeof(Elem_), all = count * size;
    for (u32 bytes : {staging, 0u, staging}) {
      for (bool bulk : {false, true}) {
        for (bool inPlace : {false, true}) {
          threads = bulk ? u32(LS_BULK_THREADS) : 32, room = bytes;
          check(bulk ? "ls_reduce_bulk" : "ls_reduce_sym", bulk ? ls_reduce_bulk : ls_reduce_sym, count, op, root, all, all, sendSkew * size, recvSkew * size,
                inPlace ? std::function<u64(u32)>([](u32) { return u64(0); }) : nullptr, [&](u32 r, const std::vector<Bytes> &given, u8 *out) {
                  for (u64 i = 0; r == root && i < count; i++) {
                    Elem_ x = reduced(op, given, i);
                    memcpy(out + i * size, &x, size);
                  }
                });
        }
      }
    }
    room = 0;
  }

  // checkReduceAbort: root waits in vain, for who comes late or for what is not brought.
  void checkReduceAbort(bool come) {
    threads = 32;
    std::vector<Bytes> memory(n, Bytes(8 << 10));
    std::vector<Args> args(n);
    for (u32 r = 0; r < n; r++) {
      Args &a = args[r];
      for (u32 p = 0; p < n; p++) a.heap[p] = u64(heaps[p]), a.send[p] = (u64(memory[p].data()) + 15) / 16 * 16;
      a.recv[r] = a.send[r];
      a.count = r == 0 || !come ? 5000 / sizeof(Elem_) : 0, a.rank = r, a.ranks = n, a.abort = u64(&stop), a.flags = LS_FIRST | LS_LAST, a.room = room = 1024;
    }
    if (!come) args.erase(args.begin()); // root
    std::thread later([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      storeVolatile(&stop, 1);
    });
    runOn(ls_reduce_sym, args);
    later.join();
    stop = room = 0;
    for (auto h : heaps) {
      for (u32 b = 0; b < blocks; b++) {
        if (h->block[b].epoch == 0) continue;
        fprintf(stderr, "an aborted block has ended its operation\n");
        exit(1);
      }
    }
  }

  // checkPushAbort: the last rank has nothing to push, the others wait for it, and
  // all leave when told to.
  void checkPushAbort() {
    threads = LS_PUSHREDUCE_THREADS;
    std::vector<Bytes> memory(2 * n, Bytes(64 << 10));
    std::vector<Args> args(n);
    for (u32 r = 0; r < n; r++) {
      Args &a = args[r];
      for (u32 p = 0; p < n; p++) {
        a.heap[p] = u64(heaps[p]);
        a.send[p] = (u64(memory[p].data()) + 15) / 16 * 16, a.recv[p] = (u64(memory[n + p].data()) + 15) / 16 * 16;
      }
      a.count = r + 1 < n ? 5000 / sizeof(Elem_) : 0, a.rank = r, a.ranks = n, a.abort = u64(&stop), a.flags = LS_FIRST | LS_LAST;
    }
    std::thread later([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      storeVolatile(&stop, 1);
    });
    runOn(ls_allreduce_pushbulk, args);
    later.join();
    stop = 0;
    for (u32 b = 0; b < blocks; b++) {
      if (heaps[0]->block[b].epoch == 0) continue;
      fprintf(stderr, "an aborted block has ended its operation\n");
      exit(1);
    }
  }

  // checkBulk is checkAll of the kernels by bulk copies, which need as many
  // threads as they were made for.
  void checkBulk(u64 count, u32 op, u32 root, u32 sendSkew, u32 recvSkew) {
    const u64 size = sizeof(Elem_), all = count * size;
    auto put = [&](u8 *at, u64 i, Elem_ x) { memcpy(at + i * size, &x, size); };
    auto zero = [](u32) { return u64(0); };
    checkBroadcast(all, root, sendSkew, recvSkew);
    for (bool inPlace : {false, true}) {
      auto whole = inPlace ? std::function<u64(u32)>(zero) : nullptr;
      threads = LS_BULK_THREADS;
      check("ls_allreduce_bulk", ls_allreduce_bulk, count, op, 0, all, all, sendSkew * size, recvSkew * size, whole,
            [&](u32, const std::vector<Bytes> &given, u8 *out) {
              for (u64 i = 0; i < count; i++) put(out, i, reduced(op, given, i));
            });
      check("ls_reduce_bulk", ls_reduce_bulk, count, op, root, all, all, sendSkew * size, recvSkew * size, whole,
            [&](u32 r, const std::vector<Bytes> &given, u8 *out) {
              for (u64 i = 0; r == root && i < count; i++) put(out, i, reduced(op, given, i));
            });
      threads = 64;
      check("ls_allgather_bulk", ls_allgather_bulk, all, 0, 0, all, n * all, sendSkew, recvSkew,
            inPlace ? std::function<u64(u32)>([&](u32 r) { return r * all; }) : nullptr, [&](u32, const std::vector<Bytes> &given, u8 *out) {
              for (u32 p = 0; p < n; p++) memcpy(out + p * all, given[p].data(), all);
            });
    }
    for (u64 part : {all & ~u64(15), all}) checkAlltoAll(part);
    threads = LS_BULK_THREADS;
    check("ls_reducescatter_bulk", ls_reducescatter_bulk, count, op, 0, n * all, all, sendSkew * size, recvSkew * size, nullptr,
          [&](u32 r, const std::vector<Bytes> &given, u8 *out) {
            for (u64 i = 0; i < count; i++) put(out, i, reduced(op, given, r * count + i));
          });
  }

  void checkAll(u64 count, u32 op, u32 root, u32 sendSkew, u32 recvSkew) {
    const u64 size = sizeof(Elem_), all = count * size;
    auto put = [&](u8 *at, u64 i, Elem_ x) { memcpy(at + i * size, &x, size); };
    auto zero = [](u32) { return u64(0); };
    for (bool inPlace : {false, true}) {
      auto whole = inPlace ? std::function<u64(u32)>(zero) : nullptr;
      check("ls_allreduce_sym", ls_allreduce_sym, count, op, 0, all, all, sendSkew * size, recvSkew * size, whole,
            [&](u32, const std::vector<Bytes> &given, u8 *out) {
              for (u64 i = 0; i < count; i++) put(out, i, reduced(op, given, i));
            });
      check("ls_reduce_sym", ls_reduce_sym, count, op, root, all, all, sendSkew * size, recvSkew * size, whole,
            [&](u32 r, const std::vector<Bytes> &given, u8 *out) {
              for (u64 i = 0; r == root && i < count; i++) put(out, i, reduced(op, given, i));
            });
      check("ls_broadcast_push", ls_broadcast_push, all, 0, root, all, all, sendSkew, recvSkew, whole,
            [&](u32, const std::vector<Bytes> &given, u8 *out) { memcpy(out, given[root].data(), all); });
      check("ls_allgather_push", ls_allgather_push, count, 0, 0, count, n * count, sendSkew, recvSkew,
            inPlace ? std::function<u64(u32)>([&](u32 r) { return r * count; }) : nullptr, [&](u32, const std::vector<Bytes> &given, u8 *out) {
              for (u32 p = 0; p < n; p++) memcpy(out + p * count, given[p].data(), count);
            });
    }
    check("ls_reducescatter_sym", ls_reducescatter_sym, count, op, 0, n * all, all, sendSkew * size, recvSkew * size, nullptr,
          [&](u32 r, const std::vector<Bytes> &given, u8 *out) {
            for (u64 i = 0; i < count; i++) put(out, i, reduced(op, given, r * count + i));
          });
    check("ls_alltoall_push", ls_alltoall_push, count, 0, 0, n * count, n * count, sendSkew, recvSkew, nullptr,
          [&](u32 r, const std::vector<Bytes> &given, u8 *out) {
            for (u32 p = 0; p < n; p++) memcpy(out + p * count, given[p].data() + r * count, count);
          });
    check("ls_copy", ls_copy, count, 0, 0, count, count, sendSkew, recvSkew, nullptr,
          [&](u32 r, const std::vector<Bytes> &given, u8 *out) { memcpy(out, given[r].data(), count); });
  }
};

// checkFold checks ls_fold and ls_fold_bulk, the result in memory of its own or
// over the last source.
static void checkFold(u32 k, u64 count, u32 op, u32 skew, bool inPlace) {
  const u64 size = sizeof(Elem_);
  for (bool bulk : {false, true}) {
    std::vector<std::vector<u64>> raw(k + 1, std::vector<u64>(count * size / 8 + 32));
    World w(k, 0, 0);
    FoldArgs a{};
    std::vector<Bytes> given;
    for (u32 p = 0; p <= k; p++) {
      for (auto &x : raw[p]) x = u64(random32()) << 32 | random32();
      u64 at = (u64(raw[p].data()) + 15) / 16 * 16 + skew * size;
      (p == k ? a.dst : a.src[p]) = at;
      if (p < k) given.emplace_back((u8 *)at, (u8 *)at + count * size);
    }
    if (inPlace) a.dst = a.src[k - 1];
    u64 after = *(u8 *)(a.dst + count * size);
    a.count = count, a.k = k, a.op = op, a.ranks = k;
    if (bulk) run(ls_fold_bulk, std::vector<FoldArgs>{a}, 2, LS_BULK_THREADS);
    else run(ls_fold, std::vector<FoldArgs>{a}, 2, 32);
    for (u64 i = 0; i < count; i++) {
      Elem_ x = w.reduced(op, given, i);
      if (memcmp(&x, (u8 *)a.dst + i * size, size) != 0 || *(u8 *)(a.dst + count * size) != after) {
        fprintf(stderr, "ls_fold, bulk %d: %u sources, count %llu, op %u, skew %u: element %llu, or what follows, is wrong\n", bulk, k, count, op, skew, i);
        exit(1);
      }
    }
  }
}

// checkPace: bytes take as long as they should, and what was not used is lost.
static void checkPace() {
  BlockEmulation block(1);
  emulated = {0, 0, 1, 1, 0, &block};
  auto timed = [](auto f) {
    u64 from = globaltimer();
    f();
    return globaltimer() - from;
  };
  Pace pace(500000, 2); // 1 µs a KiB
  u64 all = timed([&] { for (u32 k = 0; k < 101; k++) pace.take(1024); });
  if (all < 95'000) fprintf(stderr, "100 turns of 1 µs took %llu ns\n", all), exit(1);
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  all = timed([&] { for (u32 k = 0; k < 105; k++) pace.take(1024); });
  if (all < 95'000) fprintf(stderr, "100 turns of 1 µs after a pause took %llu ns\n", all), exit(1);
}

int main() {
  checkPace();
  for (u32 n : {1, 2, 3, 8}) {
    World w(n, n == 8 ? 1 : 2, 32);
    for (u64 count : {0, 5, 4099}) w.checkAll(count, random32() % 4, random32() % n, 0, 0);
    w.checkAll(1001, LS_SUM, n - 1, 1, 1);
    w.checkAll(1001, LS_SUM, 0, 3, 1);
    for (u32 k = 0; k < 2; k++) w.checkAll(random32() % 3000, random32() % 4, random32() % n, random32() % 4, random32() % 4);
  }
  World(3, 1, 32).checkAll(200003, LS_SUM, 1, 0, 0); // several tiles and steps of each
  World(2, 2, 32).checkAll(200001, LS_SUM, 1, 2, 2);
  for (u32 n : {1, 2, 3}) {
    World w(n, n == 1 ? 2 : 1, 0);
    for (u64 count : {0, 1001}) w.checkBulk(count, random32() % 4, random32() % n, 1, 1);
    w.checkBulk(100003, LS_SUM, n - 1, 0, 0); // more tiles than stages
    w.checkBulk(77, LS_SUM, 0, 2, 1);
  }
  for (u32 n : {2, 3, 5}) {
    World w(n, n == 2 ? 2 : 1, 0);
    for (u64 count : {0, 3, 4099}) w.checkPush(count, random32() % 4, 0, 0);
    w.checkPush(3001, LS_SUM, 1, 1);
    w.checkPush(777, LS_SUM, 2, 1); // what is aligned differently is not pushed
    w.checkPush(9001, LS_SUM, 3, 3); // the counters stand where tiles of another size have left them
  }
  for (u32 n : {2, 3, 5}) {
    World w(n, n == 2 ? 2 : 1, 0);
    for (u64 count : {0, 3, 1024, 4099}) w.checkRing(count, random32() % 5, random32() % n, 0, 0);
    w.checkRing(3001, LS_AVG, n - 1, 1, 3);
    w.checkRing(20'011, LS_SUM, 0, 0, 0); // slots are used again
    w.checkRing(777, LS_MAX, 1, 2, 2);
  }
  for (u32 n : {4, 8}) {
    World w(n, 1, 0);
    w.checkRing(4099, LS_SUM, 1, 0, 0);
    w.checkRing(1001, LS_MIN, n - 1, 3, 1);
  }
  World(3, 1, 0).checkPushAbort();
  for (u32 n : {1, 2, 4}) {
    World w(n, n == 2 ? 2 : 1, 0);
    for (u64 count : {1, 1003, 5000}) w.checkReduce(count, random32() % 4, random32() % n, 0, 0, 2048);
    w.checkReduce(2001, LS_SUM, n - 1, 1, 1, 4096);
    w.checkReduce(701, LS_SUM, 0, 3, 1, 1024);
  }
  for (bool come : {false, true}) World(3, 2, 0).checkReduceAbort(come);
  for (u32 n : {2, 4}) {
    World w(n, 2, 0);
    for (u64 part : {16, 200000}) w.checkAlltoAll(part); // less than a tile, and several chunks
  }
  World relay(5, 2, 0);
  for (u32 root : {3, 3, 0}) relay.checkBroadcast(400003, root, root, root);
  relay.checkBroadcast(70001, 4, 3, 5);
  for (u32 k = 1; k <= LS_MAX_RANKS; k++) {
    checkFold(k, 777, random32() % 4, k % 3, false);
    checkFold(k, 5003, LS_SUM, k % 3, true);
  }
  checkFold(4, 50021, LS_SUM, 0, false);
  puts("ok");
}
