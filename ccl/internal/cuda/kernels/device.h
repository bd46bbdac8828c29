// Builtins and memory operations, so that clang alone, without a CUDA toolkit,
// makes PTX of the kernels.
#pragma once
#include "abi.h"

// What is in callers' buffers passes the L2 cache once, and shall leave it before staging
// memory does, which is written and read again. -DLS_HINTS=0 takes all alike.
#ifndef LS_HINTS
#define LS_HINTS 1
#endif

#ifdef LS_HOST
#include "emulate.h"
#else
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define FI __device__ inline __attribute__((always_inline))
// One block on a multiprocessor will do: without being told, ptxas gives kernels that
// call functions half the registers that there are.
#define KERNEL(threads) extern "C" __global__ __attribute__((launch_bounds(threads, 1)))

FI u32 tid() { return __nvvm_read_ptx_sreg_tid_x(); }
FI u32 block() { return __nvvm_read_ptx_sreg_ctaid_x(); }
FI u32 threads() { return __nvvm_read_ptx_sreg_ntid_x(); }
FI u32 blocks() { return __nvvm_read_ptx_sreg_nctaid_x(); }
FI void sync() { __syncthreads(); }

FI u64 globaltimer() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}

// Volatile accesses are relaxed at system scope, and are not merged or moved.
FI u32 loadVolatile(const u32 *p) {
  u32 v;
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
FI u32 loadPeer(const u32 *p, u32, u32) { return loadVolatile(p); } // rank to's memory, by rank from: the host's emulation may take its time
FI void storeVolatile64(u64 *p, u64 v) { asm volatile("st.volatile.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
FI u64 loadVolatile64(const u64 *p) {
  u64 v;
  asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
FI u32 loadAcquire(const u32 *p) {
  u32 v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
FI void storeRelease(u32 *p, u32 v) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
FI void storeVolatile(u32 *p, u32 v) { asm volatile("st.volatile.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
FI void fenceSystem() { __nvvm_membar_sys(); }

FI void storeLine(Line *p, u32 d0, u32 d1, u32 flag) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%2};" ::"l"(p), "r"(d0), "r"(flag), "r"(d1) : "memory");
}
FI u32x4 loadLine(const Line *p) {
  u32x4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
FI void storeLine12(Line12 *p, u32 d0, u32 d1, u32 d2, u32 flag) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(d0), "r"(d1), "r"(d2), "r"(flag) : "memory");
}
FI u32x4 loadLine12(const Line12 *p) { return loadLine((const Line *)p); }
FI void store16(u64 *p, u64 a, u64 b) {
  asm volatile("st.volatile.global.v2.u64 [%0], {%1,%2};" ::"l"(p), "l"(a), "l"(b) : "memory");
}

FI u32 atomicAdd(u32 *p, u32 v) {
  u32 old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}

// syncOr is sync, and whether any thread of the block said so.
FI bool syncOr(bool mine) { return __nvvm_bar0_or(mine) != 0; }
// Lanes are threads of a warp: syncLanes waits for all of them, allLanes whether all say so.
template <u32 LANES = 32> FI void syncLanes() { __nvvm_bar_warp_sync(0xffffffff); }
template <u32 LANES = 32> FI bool allLanes(bool mine) { return __nvvm_vote_all_sync(0xffffffff, mine); }
// A warp's rows of 16 bytes a lane, LANES apart. What flagged lanes store in the upper half tells
// that the others' is there (chain.h): all lanes store at a time.
template <u32 LANES, u32 ROWS> FI void storeRows(u64x2 *p, const u64x2 (&rows)[ROWS], bool) {
  syncLanes();
#pragma unroll
  for (u32 r = 0; r < ROWS; r++) store16((u64 *)(p + r * LANES), rows[r].x, rows[r].y);
}
template <u32 LANES, u32 ROWS> FI void loadRows(const u64x2 *p, u64x2 (&rows)[ROWS]) {
#pragma unroll
  for (u32 r = 0; r < ROWS; r++) rows[r] = __builtin_bit_cast(u64x2, loadLine((const Line *)(p + r * LANES)));
}
// A word of a block's shared memory: what threads did before they add to it is seen by who
// loads the sum.
FI void addInBlock(u32 *p, u32 v) { asm volatile("red.release.cta.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
FI u32 loadInBlock(const u32 *p) {
  u32 v;
  asm volatile("ld.acquire.cta.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
FI void storeInBlock(u32 *p, u32 v) { asm volatile("st.relaxed.cta.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
FI void atomicAdd64(u64 *p, u64 v) { asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
FI void relax() {} // a turn of a loop that waits

extern __shared__ u8 dynamicShared[] __attribute__((aligned(128)));

// dynamicBase is the address of the block's dynamic shared memory.
FI u32 dynamicBase() {
  u32 s;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(s) : "l"(dynamicShared));
  return s;
}
FI u32x4 getShared(u32 p) {
  u32x4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p) : "memory");
  return v;
}

// A copy of 16 bytes to a place, counted in as many, of dynamic shared memory, which no
// register holds meanwhile. The thread that asked for it may read it after copiedAsync.
FI void copyAsync(u32 place, u64 from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dynamicBase() + place * 16), "l"(from) : "memory"); }
FI void copiedAsync() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#if LS_HINTS && __CUDA_ARCH__ >= 900
// once is the policy of lines that nobody needs again.
FI u64 once() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
FI void copyAsyncOnce(u32 place, u64 from) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(dynamicBase() + place * 16), "l"(from), "l"(once()) : "memory");
}
#else
FI void copyAsyncOnce(u32 place, u64 from) { copyAsync(place, from); }
#endif
FI u32x4 atPlace(u32 place) { return getShared(dynamicBase() + place * 16); }
#endif

// A is Args or P2PArgs.
template <class A> FI Heap *heap(const A &a, u32 rank) { return (Heap *)a.heap[rank]; }

// aborted looks at the host's word, over the bus: not to be done at every turn.
template <class A> FI bool aborted(const A &a) { return loadVolatile((const u32 *)a.abort) != 0; }

// Every loop that waits for a peer counts its turns and looks for an abort once
// in so many of them.
#ifdef LS_HOST
enum { LS_PATIENCE = 1 << 6 }; // threads are slow there
#else
enum { LS_PATIENCE = 1 << 12 };
#endif
