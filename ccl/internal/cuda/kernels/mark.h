// Stamps of operations of which a kernel is only a part: begin and end of those between
// nodes, whose other part is copies, and the host's.
#pragma once
#include "device.h"

// ls_mark stamps an operation and tells the host, who sees the stamp when it sees the
// count: one thread. An operation whose kernels were aborted has no end.
KERNEL(32) void ls_mark(MarkArgs a) {
  if (tid() != 0) return;
  u64 now = globaltimer(), seq = a.id >> 16;
  auto &op = ((Heap *)a.heap)->op;
  if (a.flags & LS_FIRST) {
    store16((u64 *)a.slot, a.id, now);
    op.seq = seq - 1, op.start = now, op.arrived = 0xff;
  } else if (loadVolatile64(&op.seq) == seq - 1) {
    store16((u64 *)a.slot + 2, op.arrived, now);
    op.seq = seq;
  }
  storeRelease((u32 *)a.word, a.count);
}
