// Messages by LL lines.
//
// A block sends its lane of one message and then receives its lane of another: a
// message fits its lanes' lines, so a send waits for nothing that happens after
// it. Pieces of a lane alternate between two buffers. As a receiver begins with a
// piece it says so to the sender, which may then overwrite the piece before: no
// word is left to be said at a kernel's end.
#pragma once
#include "ll.h"

FI Heap *heap(const P2PArgs &a, u32 rank) { return (Heap *)(a.heaps + rank * a.stride); }

// Job is this block's part of a message: lane, and every step lanes on.
struct Job {
  u64 buffer, bytes, piece, target, stage;
  u32 room, peer, lanes, direct, lane, step; // no lanes: nothing to do

  FI u64 at(u32 lane) const { return lane * piece; }
  FI u64 end(u32 lane) const { return least(bytes, at(lane) + piece); }
};

// jobOf finds this block's part. Messages are looked at with constant indices:
// parameters have no others without a copy in local memory.
FI Job jobOf(const Message (&list)[LS_MAX_MESSAGES]) {
  Job job{};
#pragma unroll
  for (u32 k = 0; k < LS_MAX_MESSAGES; k++) {
    const Message &m = list[k];
    u32 nth = block() - m.first;
    if (nth < m.blocks) {
      job = {m.buffer, m.bytes, m.piece, m.target, m.stage, m.room, m.peer, m.lanes, m.direct, nth, m.blocks};
      break;
    }
  }
  return job;
}

// numbered is the flag of a lane's piece, never 0, which fresh memory has.
FI u32 numbered(u32 piece) { return piece | 1u << 31; }

enum { LS_P2P_UNROLL = 4 };

// exchangeLines sends a lane and receives one, if they are there. Everything that
// is read before the first line leaves is asked for at once. False: aborted.
template <class A, class S> FI bool exchangeLines(const A &a, S &stamps, const Job &out, const Job &in) {
  Heap *own = heap(a, a.rank);
  bool sends = out.lanes != 0, receives = in.lanes != 0, alive = true;
  LaneState *sending = &own->lane[out.peer][out.lane], *receiving = &own->lane[in.peer][in.lane];
  const u32 *credit = &own->credit[out.peer][out.lane];
  u32 sent = 0, consumed = 0, received = 0;
  if (sends) sent = loadVolatile(&sending->sent), consumed = loadVolatile(credit);
  if (receives) received = loadVolatile(&receiving->received);

  u64 from = out.buffer + out.at(out.lane);
  u32 bytes = u32(out.end(out.lane) - out.at(out.lane)), lines = !sends ? 0 : bytes == 0 ? 1 : (bytes + 7) / 8;
  Line *there = heap(a, out.peer)->p2p[a.rank][out.lane][sent & 1];
  u32 i = tid();
  do {
    u64 v[LS_P2P_UNROLL];
#pragma unroll
    for (u32 u = 0; u < LS_P2P_UNROLL; u++) {
      u32 k = i + u * threads();
      if (k < lines) v[u] = load8(from + k * 8, u32(least(8, bytes - k * 8)));
    }
    if (i == tid()) { // what was asked for has been on its way long enough to be needed
      if (receives && tid() == 0) storeVolatile(&heap(a, in.peer)->credit[a.rank][in.lane], received);
      stamps.entered();
      for (u32 turn = 1; sends && alive && int(consumed + 1 - sent) < 0; turn++) {
        relax();
        if (turn % LS_PATIENCE == 0 && aborted(a)) alive = false;
        consumed = loadVolatile(credit);
      }
      if (!alive) break;
    }
#pragma unroll
    for (u32 u = 0; u < LS_P2P_UNROLL; u++) {
      u32 k = i + u * threads();
      if (k < lines) push(there + k, v[u], numbered(sent));
    }
    i += LS_P2P_UNROLL * threads();
  } while (i < lines);

  const Line *line = own->p2p[in.peer][in.lane][received & 1];
  u64 to = in.buffer + in.at(in.lane);
  bytes = u32(in.end(in.lane) - in.at(in.lane)), lines = !receives ? 0 : bytes == 0 ? 1 : (bytes + 7) / 8;
  for (u32 i = tid(); alive && i < lines; i += LS_P2P_UNROLL * threads()) {
    u32 waiting = 0;
#pragma unroll
    for (u32 u = 0; u < LS_P2P_UNROLL; u++)
      if (i + u * threads() < lines) waiting |= 1u << u;
    for (u32 turn = 0; alive && waiting != 0;) {
      u32x4 got[LS_P2P_UNROLL];
#pragma unroll
      for (u32 u = 0; u < LS_P2P_UNROLL; u++)
        if (waiting >> u & 1) got[u] = loadLine(line + i + u * threads());
#pragma unroll
      for (u32 u = 0; u < LS_P2P_UNROLL; u++) {
        if ((waiting >> u & 1) && got[u].y == numbered(received) && got[u].w == numbered(received)) {
          u32 k = i + u * threads();
          store8(to + k * 8, u64(got[u].z) << 32 | got[u].x, u32(least(8, bytes - k * 8)));
          waiting &= ~(1u << u);
        }
      }
      if (waiting == 0) {
        if (turn != 0 && i == tid()) stamps.saw(in.peer);
        break;
      }
      relax();
      if (++turn % LS_PATIENCE == 0 && aborted(a)) alive = false;
    }
  }
  alive = !syncOr(!alive);
  if (tid() == 0 && alive) {
    if (sends) sending->sent = sent + 1;
    if (receives) receiving->received = received + 1;
  }
  return alive;
}
