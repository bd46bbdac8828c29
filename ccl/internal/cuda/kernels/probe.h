// Kernels that serve clocks, checks before a job, and tests.
#pragma once
#include "vector.h"

// ls_clock answers changes of a host's word with the time it saw them: one
// thread. The host bounds the offset of the clocks by the time before its change
// and the time when the answer is there.
KERNEL(32) void ls_clock(ClockArgs a) {
  if (tid() != 0) return;
  u32 last = a.first;
  u64 turn = 0;
  for (u32 round = 0; round < a.rounds; round++) {
    u32 word;
    while ((word = loadVolatile((const u32 *)a.word)) == last) {
      relax();
      if (++turn >= a.turns || (turn % 16 == 0 && aborted(a))) return;
    }
    store16((u64 *)a.slot, globaltimer(), word);
    last = word;
  }
}

// ls_delay keeps a stream busy: one thread.
KERNEL(32) void ls_delay(DelayArgs a) {
  if (tid() != 0) return;
  u64 start = globaltimer();
  for (u32 turn = 1; globaltimer() - start < a.ns; turn++) {
    relax();
    if (turn % 256 == 0 && aborted(a)) return;
  }
}

// patternWord is word i of the pattern of a seed (splitmix64).
FI u64 patternWord(u64 seed, u64 i) {
  u64 z = seed + (i + 1) * 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

// ls_fill writes a pattern to bytes at an 8-byte-aligned address: any grid.
KERNEL(512) void ls_fill(PatternArgs a) {
  for (u64 i = u64(block()) * threads() + tid(); i * 8 < a.bytes; i += u64(blocks()) * threads()) {
    u64 v = patternWord(a.seed, i);
    if (i * 8 + 8 <= a.bytes) put<u64>(a.buffer + i * 8, v);
    else for (u32 k = 0; i * 8 + k < a.bytes; k++) put<u8>(a.buffer + i * 8 + k, u8(v >> 8 * k));
  }
}

// ls_check counts the bytes that differ from what ls_fill wrote.
KERNEL(512) void ls_check(PatternArgs a) {
  u64 wrong = 0;
  for (u64 i = u64(block()) * threads() + tid(); i * 8 < a.bytes; i += u64(blocks()) * threads()) {
    u64 v = patternWord(a.seed, i);
    if (i * 8 + 8 <= a.bytes && get<u64>(a.buffer + i * 8) == v) continue;
    for (u32 k = 0; k < 8 && i * 8 + k < a.bytes; k++) wrong += get<u8>(a.buffer + i * 8 + k) != u8(v >> 8 * k);
  }
  if (wrong != 0) atomicAdd64((u64 *)a.wrong, wrong);
}
