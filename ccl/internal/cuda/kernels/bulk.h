// Bulk copies of sm_90: a thread asks, the copy unit moves bytes between global
// and shared memory, and nobody's registers hold them. All addresses of global
// memory and all lengths are multiples of 16.
//
// Bulk copies are in the async proxy: a fence stands between them and ordinary
// accesses to the same memory, on either side.
#pragma once
#include "device.h"

#ifdef LS_HOST
#define LS_BULK 1
#include "emulate_bulk.h"
#elif __CUDA_ARCH__ >= 900
#define LS_BULK 1

// dynamicBytes is the size of the block's dynamic shared memory.
FI u32 dynamicBytes() {
  u32 n;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(n));
  return n;
}

FI void mbarrierInit(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
FI void mbarrierInval(u32 bar) { asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(bar) : "memory"); }
// mbarrierExpect arrives, and adds bytes to what the phase waits for.
FI void mbarrierExpect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
FI void mbarrierArrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
// mbarrierTry tells whether the phase of that parity has ended, or waits a while.
FI bool mbarrierTry(u32 bar, u32 parity) {
  u32 done;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  return done;
}
// mbarrierWait waits for the end of the phase of that parity. What it waits for
// is this GPU's own doing, so it has no abort to look for.
FI void mbarrierWait(u32 bar, u32 parity) {
  while (!mbarrierTry(bar, parity)) {}
}

FI void bulkLoad(u32 to, u64 from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
FI void bulkStore(u64 to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
// The same of what nobody needs again soon.
#if LS_HINTS
FI void bulkLoadOnce(u32 to, u64 from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               ::"r"(to), "l"(from), "r"(bytes), "r"(bar), "l"(once()) : "memory");
}
FI void bulkStoreOnce(u64 to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to), "r"(from), "r"(bytes), "l"(once()) : "memory");
}
#else
FI void bulkLoadOnce(u32 to, u64 from, u32 bytes, u32 bar) { bulkLoad(to, from, bytes, bar); }
FI void bulkStoreOnce(u64 to, u32 from, u32 bytes) { bulkStore(to, from, bytes); }
#endif
FI void bulkCommit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// bulkDone waits until all but the last LEFT groups of stores have been written,
// bulkRead until shared memory has been read for them.
template <int LEFT> FI void bulkDone() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(LEFT) : "memory"); }
template <int LEFT> FI void bulkRead() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory"); }

FI void fenceProxy() { asm volatile("fence.proxy.async;" ::: "memory"); }
FI void fenceProxyShared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
FI void syncWarp() { __nvvm_bar_warp_sync(0xffffffff); }

FI void putShared(u32 p, u32x4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// A word of shared memory that one thread writes and others of the block look at,
// with what the writer has done before.
FI void storeShared(u32 p, u32 v) { asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(p), "r"(v) : "memory"); }
FI u32 loadShared(u32 p) {
  u32 v;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(v) : "r"(p) : "memory");
  return v;
}
#endif

#ifdef LS_BULK
// Stage goes round the stages of a pipeline: s, and the parity of the phase that its mbarriers are in.
struct Stage {
  u32 s, parity;
  FI void next(u32 count) {
    if (++s == count) s = 0, parity ^= 1;
  }
};
#endif
