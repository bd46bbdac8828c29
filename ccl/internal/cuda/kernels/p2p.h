// Sends and receives by LL lines.
//
// One block does all messages of one direction with one peer, in their order;
// messages of a pair are counted, by both sides alike, and alternate between two
// buffers. A sender waits until the message before the last has been consumed.
// The counters live in the heap, so that a graph's replays go on counting.
#pragma once
#include "ll.h"

enum { LS_P2P_BYTES = 4 * LS_LL_LINES * 8, LS_P2P_UNROLL = 4 };

// Pair is a block's way to or from one peer.
struct Pair {
  const P2PArgs &a;
  Stamps<P2PArgs> &stamps;
  u32 peer, message; // the next
  bool alive;

  FI u32 flag() const { return message | 1u << 31; } // never 0, which fresh memory has

  // send passes up to LS_P2P_BYTES on.
  FI void send(u64 from, u32 bytes) {
    const u32 *credit = &heap(a, a.rank)->credit[peer];
    for (u32 turn = 1; alive && int(loadAcquire(credit) + 1 - message) < 0; turn++) {
      relax();
      if (turn % LS_PATIENCE == 0 && aborted(a)) alive = false;
    }
    if (!alive) return;
    Line *line = heap(a, peer)->p2p[a.rank][message & 1];
    u32 lines = bytes == 0 ? 1 : (bytes + 7) / 8;
    for (u32 i = tid(); i < lines; i += LS_P2P_UNROLL * threads()) {
      u64 v[LS_P2P_UNROLL];
#pragma unroll
      for (u32 u = 0; u < LS_P2P_UNROLL; u++) {
        u32 k = i + u * threads();
        if (k < lines) v[u] = load8(from + k * 8, u32(least(8, bytes - k * 8)));
      }
#pragma unroll
      for (u32 u = 0; u < LS_P2P_UNROLL; u++) {
        u32 k = i + u * threads();
        if (k < lines) push(line + k, v[u], flag());
      }
    }
    message++;
  }

  // receive takes up to LS_P2P_BYTES. All threads of the block call it.
  FI void receive(u64 to, u32 bytes) {
    const Line *line = heap(a, a.rank)->p2p[peer][message & 1];
    u32 lines = bytes == 0 ? 1 : (bytes + 7) / 8;
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
          if ((waiting >> u & 1) && got[u].y == flag() && got[u].w == flag()) {
            u32 k = i + u * threads();
            store8(to + k * 8, u64(got[u].z) << 32 | got[u].x, u32(least(8, bytes - k * 8)));
            waiting &= ~(1u << u);
          }
        }
        if (waiting == 0) {
          if (turn != 0) stamps.saw(peer);
          break;
        }
        relax();
        if (++turn % LS_PATIENCE == 0 && aborted(a)) alive = false;
      }
    }
    message++;
    alive = !syncOr(!alive);
    if (alive && tid() == 0) storeRelease(&heap(a, peer)->credit[a.rank], message);
  }
};

// copyOwn copies what the n'th send to this rank has to where its n'th receive
// from itself wants it.
FI void copyOwn(const P2PArgs &a, const Message &receive, u32 nth) {
  for (u32 s = 0; s < a.sends; s++) {
    if (a.message[s].peer != a.rank || nth-- != 0) continue;
    u64 from = a.message[s].buffer, to = receive.buffer, bytes = receive.bytes;
    if (from == to) return;
    for (u64 at = u64(tid()) * 8; at < bytes; at += threads() * 8) {
      u32 n = u32(least(8, bytes - at));
      store8(to + at, load8(from + at, n), n);
    }
    return;
  }
}

// ls_p2p_ll: a block for each send and each receive, at least one; the first with
// a peer does all of its direction with that peer.
KERNEL(512) void ls_p2p_ll(P2PArgs a) {
  Stamps<P2PArgs> stamps(a);
  stamps.entered();
  bool sending = block() < a.sends, alive = true;
  u32 first = sending ? 0 : LS_MAX_MESSAGES, end = first + (sending ? a.sends : a.receives);
  u32 own = sending ? block() : LS_MAX_MESSAGES + block() - a.sends;
  u32 peer = a.message[own].peer;
  bool mine = own < end;
  for (u32 m = first; m < own; m++) mine = mine && a.message[m].peer != peer;
  if (mine && peer == a.rank) {
    u32 nth = 0;
    for (u32 m = first; m < end && !sending; m++)
      if (a.message[m].peer == peer) copyOwn(a, a.message[m], nth++);
    sync();
  } else if (mine) {
    auto &count = heap(a, a.rank)->pair;
    u32 *counter = sending ? &count.sent[peer] : &count.received[peer];
    Pair pair{a, stamps, peer, loadVolatile(counter), true};
    for (u32 m = first; m < end && pair.alive; m++) {
      if (a.message[m].peer != peer) continue;
      u64 buffer = a.message[m].buffer, bytes = a.message[m].bytes, at = 0;
      do {
        u32 n = u32(least(LS_P2P_BYTES, bytes - at));
        if (sending) pair.send(buffer + at, n);
        else pair.receive(buffer + at, n);
        at += n;
      } while (at < bytes && pair.alive);
    }
    alive = !syncOr(!pair.alive);
    if (tid() == 0) *counter = pair.message;
  }
  if (alive) stamps.left();
  else stamps.stopped();
}
