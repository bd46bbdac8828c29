// Chains: lines of 128 bytes that go from each rank to the next, for a Broadcast, which begins at
// root, and a Reduce, which ends there.
//
// A line is 120 bytes of data and a flag of 8, and eight neighbouring lanes of a warp have 16
// bytes of it each. It rests on this: what they store by one instruction to 128 aligned bytes
// arrives whole over NVLink, so that who reads a flag, and the line after that, reads all of it.
// NCCL's LL128 rests on as much. Nothing promises it elsewhere, over PCIe for one.
//
// A warp waits for a step, its next lines of the previous rank, folds its own data in or
// stores what came, and pushes a step to the next rank: all hops are under way at a time, and no
// link carries the buffer more than once. Peers touch nothing but lines, so buffers may be
// anybody's.
//
// Steps take a warp's slots in turn, and are numbered from one kernel to the next, of any root:
// a rank's lines are always from the rank before it. A flag is its step's number. A warp
// says how many steps it has read to the same warp of the previous rank, in Heap.read, which
// pushes to a slot again when the step before there has been read. All warps of a block have
// as many steps, so one count of a block does.
//
// The epoch is that of all kernels of lines, for whose sake all ranks hear from each other. What
// they read there would take data of a line for a flag, so lines of chains are others.
#pragma once
#include "ll12.h"

enum {
#ifdef LS_HOST
  LS_CHAIN_LANES = 2, // of a line
  LS_CHAIN_SLOTS = 3, // they are used again soon
#else
  LS_CHAIN_LANES = 8,
  LS_CHAIN_SLOTS = 8, // 240 KiB of data for a block, which links carry in 22 µs: a line's way there, and a word's back, take 5
#endif
  LS_CHAIN_ROWS = 4, // lines of a lane in a step, whose loads are in flight together
  LS_CHAIN_FLAGS = LS_WARP / LS_CHAIN_LANES, // lanes that have flags
  LS_CHAIN_PLAIN = LS_WARP - LS_CHAIN_FLAGS, // and those that have none
  LS_CHAIN_LINES = LS_CHAIN_ROWS * LS_CHAIN_FLAGS, // of a step
  LS_CHAIN_STEP = 16 * (LS_CHAIN_ROWS * LS_CHAIN_PLAIN + LS_CHAIN_ROWS / 2 * LS_CHAIN_FLAGS), // bytes of data
};
static_assert(LS_CHAIN_ROWS % 2 == 0 && LS_CHAIN_SLOTS * LS_CHAIN_ROWS * LS_WARP * 16 * LS_CHAIN_WARPS <= LS_CHAIN_BYTES);

// Packs are a lane's of a step: 16 bytes for each row. A lane that has flags has half as many,
// the first ones, whose halves take two rows.
struct Packs {
  u32x4 x[LS_CHAIN_ROWS];

  // take is the first one, and add puts one behind the others, which move up.
  FI u32x4 take() {
    u32x4 first = x[0];
#pragma unroll
    for (u32 i = 0; i + 1 < LS_CHAIN_ROWS; i++) x[i] = x[i + 1];
    return first;
  }
  FI void add(u32x4 last) { take(), x[LS_CHAIN_ROWS - 1] = last; }
};

// PacksAt is where a lane's packs are in a block's part of a buffer: a warp's are side by side.
struct PacksAt {
  u32 group, lane; // the warp's part
  bool flagged;    // the lane has flags

  FI PacksAt() : group(tid() / LS_WARP), lane(tid() % LS_WARP), flagged(lane % LS_CHAIN_LANES + 1 == LS_CHAIN_LANES) {}
  FI u32 first() const {
    u32 flags = lane / LS_CHAIN_LANES; // of lanes before this one
    return group * LS_CHAIN_STEP + 16 * (flagged ? LS_CHAIN_ROWS * LS_CHAIN_PLAIN + flags : lane - flags);
  }
  FI u32 pitch() const { return 16 * (flagged ? LS_CHAIN_FLAGS : LS_CHAIN_PLAIN); }
  FI bool has(u32 i) const { return i < LS_CHAIN_ROWS / 2 || !flagged; }
  FI bool whole(const Span &s) const { return (s.at & 15) == 0 && (group + 1) * LS_CHAIN_STEP <= s.bytes; }

  // load reads packs at any address, and zeros for what is not there; store writes what is
  // there, and nothing else.
  FI void load(const Span &s, Packs &v) const {
    u32 off = first();
    if (whole(s)) {
#pragma unroll
      for (u32 i = 0; i < LS_CHAIN_ROWS; i++) v.x[i] = has(i) ? get<u32x4>(s.at + off + i * pitch()) : u32x4{0, 0, 0, 0};
      return;
    }
#pragma unroll 1
    for (u32 i = 0; i < LS_CHAIN_ROWS; i++, off += pitch()) {
      u32 n = has(i) ? s.valid(off) : 0;
      u64 lo = load8(s.at + off, n < 8 ? n : 8), hi = load8(s.at + off + 8, n < 8 ? 0 : n - 8);
      v.add(u32x4{u32(lo), u32(lo >> 32), u32(hi), u32(hi >> 32)});
    }
  }
  FI void store(const Span &s, Packs v) const {
    u32 off = first();
    if (whole(s)) {
#pragma unroll
      for (u32 i = 0; i < LS_CHAIN_ROWS; i++)
        if (has(i)) put<u32x4>(s.at + off + i * pitch(), v.x[i]);
      return;
    }
#pragma unroll 1
    for (u32 i = 0; i < LS_CHAIN_ROWS; i++, off += pitch()) {
      u32 n = has(i) ? s.valid(off) : 0;
      u32x4 x = v.take();
      store8(s.at + off, u64(x.y) << 32 | x.x, n < 8 ? n : 8);
      if (n > 8) store8(s.at + off + 8, u64(x.w) << 32 | x.z, n - 8);
    }
  }
};

// TurnChain is a Turn12 that goes through steps, which count from 0 in a kernel. All lanes of a
// warp call what waits, and alive is the warp's.
struct TurnChain : Turn12 {
  u32 from, to;       // the previous and the next rank
  bool first, last;   // nothing comes from the one, or goes to the other
  u64 sent, received; // steps before this kernel
  u64 read;           // of what was sent, as far as this thread knows

  FI TurnChain(const Args &a, u32 start)
      : Turn12(a), from((a.rank == 0 ? a.ranks : a.rank) - 1), to(next(1)), first(a.rank == start), last(to == start), sent(loadVolatile64(&self->block[block()].sent)),
        received(loadVolatile64(&self->block[block()].received)), read(sent - LS_CHAIN_SLOTS) {}

  FI static u32 warp() { return tid() / LS_WARP; }
  FI static u32 lane() { return tid() % LS_WARP; }

  // slot is where rank to has a step.
  FI u64x2 *slot(u32 to, u64 step) const { return heap(a, to)->chain[block()] + (warp() * LS_CHAIN_SLOTS + u32(step % LS_CHAIN_SLOTS)) * u32(LS_CHAIN_LINES) * LS_CHAIN_LANES; }

  // await waits until something is there for all lanes. False: aborted.
  template <class There> FI bool await(const There &there) {
#pragma unroll 1
    for (u32 turn = 1; alive; turn++) {
      if (allLanes<LS_WARP>(there())) return true;
      relax();
      if (turn % LS_PATIENCE == 0) alive = allLanes<LS_WARP>(!aborted(a));
    }
    return false;
  }

  // hear waits for a step of the previous rank. Data is read when all flags are there.
  FI bool hear(u32 step, Packs &v) {
    if (step > 0 && step % 2 == 0) heard(step); // a word for each would take the links more time
    const u64x2 *at = slot(a.rank, received + step);
    bool there = await([&] {
      bool all = true;
#pragma unroll
      for (u32 i = 0; i == 0 || i < u32(LS_CHAIN_LINES) / LS_WARP; i++) {
        u32 line = (lane() + i * LS_WARP) % LS_CHAIN_LINES;
        all = all && loadVolatile64((const u64 *)(at + (line + 1) * LS_CHAIN_LANES) - 1) == received + step + 1;
      }
      return all;
    });
    if (!there) return false;
    u64x2 rows[LS_CHAIN_ROWS];
    loadRows<LS_WARP>(at + lane(), rows);
    bool flagged = PacksAt().flagged;
#pragma unroll
    for (u32 i = 0; i < LS_CHAIN_ROWS; i++) {
      u64x2 pack = rows[i];
      if (i < LS_CHAIN_ROWS / 2) pack = flagged ? u64x2{rows[2 * i].x, rows[2 * i + 1].x} : pack;
      v.x[i] = __builtin_bit_cast(u32x4, pack);
    }
#ifdef LS_PEERS
    sight.heard(1u << from, false);
#endif
    return true;
  }

  // heard tells the previous rank that steps have been read. Values have come for all lanes of
  // a warp when one has used its own, so no fence has to hold the word back.
  FI void heard(u32 steps) const {
    if (first) return;
    syncLanes<LS_WARP>();
    if (lane() == 0) storeVolatile64(&heap(a, from)->read[block()][warp()], received + steps);
  }

  // push waits until the next rank has read what was in a step's slot, and sends it. False: aborted.
  FI bool push(u32 step, const Packs &v) {
    if (first && step == 0) stamps.entered(); // it may have to wait
    bool free = await([&] {
      if (sent + step - read >= LS_CHAIN_SLOTS) read = loadVolatile64(&self->read[block()][warp()]);
      return sent + step - read < LS_CHAIN_SLOTS;
    });
    if (!free) return false;
    bool flagged = PacksAt().flagged;
    u64x2 rows[LS_CHAIN_ROWS];
#pragma unroll
    for (u32 i = 0; i < LS_CHAIN_ROWS; i++) {
      u64x2 own = __builtin_bit_cast(u64x2, v.x[i]), half = __builtin_bit_cast(u64x2, v.x[i / 2]);
      rows[i] = flagged ? u64x2{i % 2 == 0 ? half.x : half.y, sent + step + 1} : own;
    }
    storeRows<LS_WARP>(slot(to, sent + step) + lane(), rows, flagged);
    return true;
  }

  // end is after so many steps.
  FI void end(u32 steps) {
    if (alive) heard(steps);
    Turn::end();
    if (tid() != 0) return;
    auto &state = self->block[block()];
    if (!last) state.sent = sent + steps;
    if (!first) state.received = received + steps;
  }
};

// alongChain passes bytes of buffers on, from rank start to the one before it: pass does a
// warp's packs of the block's part by STEPS steps, and is false when it is aborted.
template <u32 STEPS, class Pass> FI void alongChain(const Args &a, u64 bytes, u32 start, const Pass &pass) {
  TurnChain chain(a, start);
  Share12 share(bytes);
  u32 warps = threads() / LS_WARP, groups = (share.bytes + LS_CHAIN_STEP - 1) / LS_CHAIN_STEP, step = 0;
  chain.eachPeer([&](u32 p) { chain.greet(p); });
  bool met = false;
#pragma unroll 1
  for (PacksAt at;; at.group += warps, step += STEPS) {
    bool done = at.group >= groups;
    // Words come no later than the first lines. Who has none to wait for pushes first.
    if (!met && (!chain.first || step > 0 || done)) {
      met = true;
      if (step == 0 || chain.last) chain.stamps.entered();
      chain.meet(chain.peers());
      chain.alive = allLanes<LS_WARP>(chain.alive);
    }
    if (done || !pass(chain, share, at, step)) break;
  }
  chain.end((groups + warps - 1) / warps * STEPS);
}
