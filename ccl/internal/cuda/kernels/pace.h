// The pace of bulk copies to peers.
//
// A few blocks can ask for more than a GPU's links carry. Links that are asked for more
// carry less: on H200s, 16 blocks that push as fast as they can get 326 GB/s through
// both ways, and at a pace of 370 GB/s they get 368. So senders wait for their turn.
#pragma once
#include "device.h"

enum { LS_PACE_SLACK = 4 }; // turns

// Pace is one thread's.
struct Pace {
  u64 from;     // when it began, in ns
  u64 due, per; // ps after that: when the next byte may go; and for each KiB

  // shares is among how many threads of a block its pace is divided.
  FI explicit Pace(u32 pace, u32 shares = 1) : from(globaltimer()), due(0), per(u64(pace) * shares) {}

  // take waits until bytes more may go. What was not used is lost, but for a little.
  FI void take(u32 bytes) {
    if (per == 0) return;
    u64 now, turn = bytes * per >> 10;
    do now = (globaltimer() - from) * 1000;
    while (now < due);
    due = (due + LS_PACE_SLACK * turn < now ? now - LS_PACE_SLACK * turn : due) + turn;
  }
};
