// Accesses of whole units at addresses, and how a buffer is cut for blocks and
// ranks. Nothing here is particular to a GPU.
#pragma once
#include "device.h"

#ifdef LS_HOST
#define LS_GLOBAL
#else
#define LS_GLOBAL __attribute__((address_space(1))) // ld.global instead of generic loads
#endif

template <class U> FI U get(u64 p) { return *(const LS_GLOBAL U *)p; }
template <class U> FI void put(u64 p, U v) { *(LS_GLOBAL U *)p = v; }

// getOnce and putOnce are of what nobody needs again soon.
#if LS_HINTS && !defined(LS_HOST)
template <class U> FI U getOnce(u64 p) {
  if constexpr (sizeof(U) == 16) {
    u32x4 v;
    asm volatile("ld.global.cs.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return __builtin_bit_cast(U, v);
  } else if constexpr (sizeof(U) == 4) {
    u32 v;
    asm volatile("ld.global.cs.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return __builtin_bit_cast(U, v);
  } else {
    return get<U>(p);
  }
}
template <class U> FI void putOnce(u64 p, U v) {
  if constexpr (sizeof(U) == 16) {
    u32x4 x = __builtin_bit_cast(u32x4, v);
    asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
  } else if constexpr (sizeof(U) == 4) {
    asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(p), "r"(__builtin_bit_cast(u32, v)) : "memory");
  } else {
    put<U>(p, v);
  }
}
#else
template <class U> FI U getOnce(u64 p) { return get<U>(p); }
template <class U> FI void putOnce(u64 p, U v) { put<U>(p, v); }
#endif

// RawOf<S> is an unsigned integer of S bytes.
template <int S> struct RawOf;
template <> struct RawOf<1> { using type = u8; };
template <> struct RawOf<2> { using type = u16; };
template <> struct RawOf<4> { using type = u32; };
template <> struct RawOf<8> { using type = u64; };

// loadedFirst keeps the compiler from moving loads that stand before it to where
// what they load is used, behind branches, where they would wait for each other.
FI void loadedFirst() { asm volatile("" ::: "memory"); }

FI u64 least(u64 a, u64 b) { return a < b ? a : b; }
FI u64 upTo(u64 x, u64 multiple) { return (x + multiple - 1) / multiple * multiple; }

// Tiles cuts units into tiles that owners take in turn, and of an owner's the
// blocks: all of them work near the same place of the buffer, which keeps the
// pages that peers' accesses touch at one time few. It depends on nothing that
// differs between ranks.
struct Tiles {
  u64 units;
  u32 tile, owners;

  // The tile is as large as most, smaller when each owner and block would
  // otherwise not have one, and a multiple of grain.
  FI Tiles(u64 units, u32 owners, u32 most, u32 grain) : units(units), owners(owners) {
    tile = u32(least(most, upTo((units + u64(blocks()) * owners - 1) / (u64(blocks()) * owners), grain)));
    if (tile == 0) tile = grain;
  }
  // Tiles of that size.
  FI Tiles(u64 units, u32 owners, u32 tile) : units(units), tile(tile), owners(owners) {}
  // first is where this block's tile of a step begins, at or past units when
  // there is none.
  FI u64 first(u64 step, u32 owner) const { return ((step * blocks() + block()) * owners + owner) * tile; }
  FI u32 length(u64 first) const { return first < units ? u32(least(tile, units - first)) : 0; }
  // steps is how many tiles this block has of the owner's.
  FI u64 steps(u32 owner) const {
    u64 start = first(0, owner), stride = u64(blocks()) * owners * tile;
    return start < units ? (units - start + stride - 1) / stride : 0;
  }
  // rounds is the most steps that anyone has.
  FI u64 rounds() const {
    u64 stride = u64(blocks()) * owners * tile;
    return (units + stride - 1) / stride;
  }
};
