// The kernels as functions of the fake driver (package cudatest): each launch
// runs them on CPU threads, few for each block. Reductions are of float32,
// whichever module they are looked up in.
#define LS_TYPE float
#include "broadcast.h"
#include "chain_move.h"
#include "chain_reduce.h"
#include "staged.h"
#include "fold.h"
#include "ll12_move.h"
#include "ll12_reduce.h"
#include "ll_move.h"
#include "ll_reduce.h"
#include "mark.h"
#include "p2p.h"
#include "probe.h"
#include "ring.h"
#include "sym.h"
#include "toroot.h"

#include <functional>
#include <latch>
#include <semaphore>
#include <utility>
#include <vector>

struct fake_launch { unsigned blocks, threads, shared; int device; };

enum { FEW = 4 };

// Threads that have run a CUDA thread wait for the next: as many stay as ever ran at once.
struct Worker {
  std::binary_semaphore due{0};
  std::function<void()> task;
};
static std::mutex idling;
static std::vector<Worker *> idle;

static void serve(Worker *w) {
  for (;;) {
    w->due.acquire();
    std::exchange(w->task, nullptr)();
    std::lock_guard lock(idling);
    idle.push_back(w);
  }
}

static void onThread(std::function<void()> task) {
  Worker *w = nullptr;
  {
    std::lock_guard lock(idling);
    if (!idle.empty()) w = idle.back(), idle.pop_back();
  }
  if (!w) {
    w = new Worker;
    std::thread(serve, w).detach();
  }
  w->task = std::move(task);
  w->due.release();
}

template <class A> static int launch(void (*kernel)(A), const fake_launch *l, const void *params, size_t size, u32 threads) {
  if (size != sizeof(A)) return 1; // CUDA_ERROR_INVALID_VALUE
  const A &a = *(const A *)params;
  std::vector<std::unique_ptr<BlockEmulation>> shared;
  auto ended = std::make_shared<std::latch>(l->blocks * threads);
  for (u32 b = 0; b < l->blocks; b++) {
    shared.push_back(std::make_unique<BlockEmulation>(threads));
    for (u32 t = 0; t < threads; t++) {
      onThread([=, &a, block = shared.back().get()] {
        emulated = {t, b, threads, l->blocks, 0, block};
        kernel(a);
        ended->count_down();
      });
    }
  }
  ended->wait();
  return 0;
}

// fake_slow_link makes reads of rank to's memory by rank from take so much longer.
extern "C" __attribute__((visibility("default"))) void fake_slow_link(unsigned from, unsigned to, unsigned us) {
  if (from < LS_MAX_RANKS && to < LS_MAX_RANKS) linkDelay[from][to] = us;
}

#define FAKE(name, threads) \
  extern "C" int kernel_##name(const fake_launch *l, const void *p, size_t n) { return launch(name, l, p, n, threads); }

static u32 threadsOf(const P2PListArgs &a) {
  for (auto &q : a.queue)
    if (q.direct) return 32;
  return FEW;
}

// What peers are heard by needs a thread for each; what moves bytes, whole warps.
FAKE(ls_barrier, LS_MAX_RANKS)
FAKE(ls_clock, 1)
FAKE(ls_delay, 1)
FAKE(ls_fill, FEW)
FAKE(ls_check, FEW)
FAKE(ls_allgather_ll, FEW)
FAKE(ls_alltoall_ll, FEW)
FAKE(ls_broadcast_ll, FEW)
FAKE(ls_broadcast_ll2, FEW)
FAKE(ls_allgather_ll12, FEW)
FAKE(ls_alltoall_ll12, FEW)
FAKE(ls_broadcast_ll12, FEW)
FAKE(ls_broadcast_chain, FEW)
FAKE(ls_p2p_ll, FEW)
FAKE(ls_p2p_direct, 32)
FAKE(ls_p2p_list, threadsOf(*(const P2PListArgs *)p))
FAKE(ls_p2p_items, FEW)
FAKE(ls_copy, 32)
FAKE(ls_staged, 32)
FAKE(ls_mark, 1)
FAKE(ls_allgather_push, 32)
FAKE(ls_alltoall_push, 32)
FAKE(ls_broadcast_push, 32)
FAKE(ls_allreduce_ll, FEW)
FAKE(ls_allreduce_ll2, FEW)
FAKE(ls_reducescatter_ll, FEW)
FAKE(ls_reduce_ll, FEW)
FAKE(ls_allreduce_ll12, FEW)
FAKE(ls_reducescatter_ll12, FEW)
FAKE(ls_reduce_ll12, FEW)
FAKE(ls_reduce_chain, FEW)
FAKE(ls_allreduce_sym, LS_MAX_RANKS)
FAKE(ls_reducescatter_sym, LS_MAX_RANKS)
FAKE(ls_reduce_sym, LS_MAX_RANKS)
FAKE(ls_fold, FEW)
FAKE(ls_broadcast_ring, LS_MAX_RANKS)
FAKE(ls_allgather_ring, LS_MAX_RANKS)
FAKE(ls_allreduce_ring, LS_MAX_RANKS)
FAKE(ls_reducescatter_ring, LS_MAX_RANKS)
FAKE(ls_reduce_ring, LS_MAX_RANKS)
