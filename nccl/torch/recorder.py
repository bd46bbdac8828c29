"""Reads a flight recorder of the NCCL plugin, for measurements: no dependency but Python.

    python3 recorder.py FILE.rec     what its communicators have done, as JSON
"""
import json
import mmap
import struct
import sys

HEADER, COMM, CONN, RECORD = 4096, 256, 256, 64
ENQUEUE, START, PHASE, END = 2, 3, 4, 5  # record.Kind
UNSEEN, REPLAY = 32, 8  # record.Flag…
COLL = ["none", "AllReduce", "Reduce", "Broadcast", "AllGather", "ReduceScatter", "AlltoAll", "AlltoAllv", "Gather", "Scatter", "Send", "Recv", "Barrier", "Group"]


class Recorder:
    """One file. It may be read while the process writes: words are whole."""

    def __init__(self, path):
        with open(path, "rb") as f:
            self.mem = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
        magic, version, header = struct.unpack_from("<8sII", self.mem, 0)
        if magic != b"LOCKSTEP" or version != 4 or header != HEADER:
            raise ValueError(f"{path}: not a flight recorder of version 4")
        self.comm_slots, self.conn_slots, stamps, self.ring_slots = struct.unpack_from("<IIII", self.mem, 24)
        if stamps:
            raise ValueError(f"{path}: not by the NCCL plugin")
        self.conn_at = HEADER + self.comm_slots * COMM
        self.ring_at = self.conn_at + self.conn_slots * CONN

    def word(self, at):
        return struct.unpack_from("<Q", self.mem, at)[0]

    def counters(self):
        source, version, mask, lost, unseen, events_lost, foreign = struct.unpack_from("<IIQQQQQ", self.mem, 576)
        return {"source": source, "version": version, "mask": mask, "ops_lost": lost, "ops_unseen": unseen,
                "events_lost": events_lost, "events_foreign": foreign, "appended": self.word(256), "dropped": self.word(320)}

    def comms(self):
        """Live words of each communicator."""
        out = []
        for i in range(min(self.word(384), self.comm_slots)):
            at = HEADER + i * COMM
            state, cid = struct.unpack_from("<QQ", self.mem, at)
            if not state & 256:
                continue
            rank, size = struct.unpack_from("<ii", self.mem, at + 24)
            name = self.mem[at + 64:at + 128].split(b"\0")[0].decode(errors="replace")
            started, _, finished, _, own, wait, transfer, ops = struct.unpack_from("<8Q", self.mem, at + 192)
            out.append({"index": i, "id": f"{cid:x}", "name": name, "rank": rank, "size": size, "enqueued": self.word(at + 128),
                        "started": started, "finished": finished, "own_ns": own, "wait_ns": wait, "transfer_ns": transfer, "ops": ops})
        return out

    def conns(self):
        out = []
        for i in range(min(self.word(392), self.conn_slots)):
            at = self.conn_at + i * CONN
            state, cid, peer = struct.unpack_from("<QQi", self.mem, at)
            if state & 256:
                w = struct.unpack_from("<16Q", self.mem, at + 128)
                out.append({"id": cid, "peer": peer, "name": self.mem[at + 64:at + 128].split(b"\0")[0].decode(errors="replace"),
                            "posted": w[0], "completed": w[2], "bps": w[5], "received": w[8], "slow": w[11], "windows": w[12], "latency_ns": w[13]})
        return out

    def records(self, since=0):
        """Records with a ticket from since on that are still there, in order, and how many are not."""
        head = self.word(256)
        first = max(since, head - self.ring_slots)
        out, lost = [], first - since
        for ticket in range(first, head):
            at = self.ring_at + (ticket % self.ring_slots) * RECORD
            seq, mono, kind, flags, comm, _, op = struct.unpack_from("<QqBBHIQ", self.mem, at)
            body = self.mem[at + 32:at + 64]
            if seq != ticket + 1 or self.word(at) != seq:
                lost += 1
                continue
            out.append((kind, flags, comm, op, mono, body))
        return out, lost

    def durations(self, since=0):
        """(communicator, sequence, collective, bytes, ns by the GPU's clock, how many channels) of what ended, in order; and counts."""
        begun, called, out = {}, {}, []
        records, lost = self.records(since)
        ended = unseen = 0
        for kind, flags, comm, op, _, body in records:
            if kind == ENQUEUE:
                called[comm, op] = (COLL[body[0]] if body[0] < len(COLL) else "?", struct.unpack_from("<Q", body, 8)[0])
            elif kind == START and body[3] == 1:
                begun[comm, op] = struct.unpack_from("<q", body, 8)[0], struct.unpack_from("<H", body, 6)[0]
            elif kind == END:
                ended += 1
                unseen += flags & UNSEEN != 0
                if (comm, op) in begun and body[3] == 1:
                    coll, size = called.get((comm, op), ("?", 0))
                    start, channels = begun[comm, op]
                    out.append((comm, op, coll, size, struct.unpack_from("<q", body, 8)[0] - start, channels))
        return out, {"ended": ended, "unseen": unseen, "overwritten": lost}


if __name__ == "__main__":
    r = Recorder(sys.argv[1])
    times, counts = r.durations()
    print(json.dumps({"counters": r.counters(), "comms": r.comms(), "conns": r.conns(), "counts": counts,
                      "ns": [t[4] for t in times]}))
