// Runs the kernels that send and receive for all ranks of a communicator, one
// thread for each CUDA thread, and compares every byte with what was sent. Ranks
// run ahead of each other as far as the kernels let them.
#include "p2p.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

enum { THREADS = 32, SLOTS = 4096, MARGIN = 64, ROOM = 1024 };

static int failures;
static void fail(const std::string &what) {
  if (failures++ < 20) printf("FAIL %s\n", what.c_str());
}
static std::mt19937_64 rng(1);
static u32 upTo32(u32 n) { return u32(rng() % n); }

// Buffer is bytes at a chosen alignment between margins that nobody may write.
struct Buffer {
  std::vector<u64x2> words;
  u64 skew, bytes;
  Buffer(u64 bytes, u64 skew) : words((bytes + 2 * MARGIN) / 16 + 2, u64x2{0xeeeeeeeeeeeeeeee, 0xeeeeeeeeeeeeeeee}), skew(skew), bytes(bytes) {}
  u8 *data() { return (u8 *)words.data() + MARGIN + skew; }
  bool intact() {
    u8 *all = (u8 *)words.data();
    for (u64 i = 0; i < MARGIN + skew; i++)
      if (all[i] != 0xee) return false;
    for (u64 i = MARGIN + skew + bytes; i < words.size() * 16; i++)
      if (all[i] != 0xee) return false;
    return true;
  }
};

enum Kind { LL, MIXED, BULK };

// Sent is a message as both sides have it.
struct Sent {
  u32 from, to;
  Buffer send, recv;
};

struct Launch {
  Kind kind;
  std::vector<P2PArgs> args; // of each rank
  std::vector<u32> blocks;
  std::vector<std::shared_ptr<Sent>> sent;
  u32 replays;
};

struct World {
  u32 ranks;
  Heap *heaps;
  std::vector<u64x2> stage; // of all ranks
  std::vector<std::vector<Slot>> slots;
  u32 abort = 0;
  std::vector<Launch> launches;

  static constexpr u32 PLACES = LS_MAX_RANKS * LS_LANES * 2 * ROOM;

  explicit World(u32 ranks) : ranks(ranks), heaps((Heap *)aligned_alloc(128, ranks * sizeof(Heap))), stage(ranks * PLACES / 16), slots(ranks) {
    memset(heaps, 0, ranks * sizeof(Heap));
    for (auto &s : slots) s.resize(SLOTS);
    for (u32 r = 0; r < ranks; r++)
      for (u32 p = 0; p < ranks; p++)
        for (u32 l = 0; l < LS_LANES; l++) {
          // Counts of a pair agree, differ between pairs, and pass through 0.
          u32 ll = -3 + l, direct = -2 - l;
          heaps[r].lane[p][l] = {ll, ll, direct, direct};
          heaps[r].credit[p][l] = ll, heaps[r].arrived[p][l] = direct;
          heaps[r].here[p] = heaps[r].arrived[p][0];
        }
  }
  ~World() { free(heaps); }

  u64 stageOf(u32 rank, u32 from) { return u64(stage.data()) + rank * PLACES + from * (LS_LANES * 2 * ROOM); }

  // add makes a launch with messages between the pairs that any says, of size bytes.
  void add(Kind kind, u32 replays, const std::function<bool(u32, u32)> &any, const std::function<u64()> &size) {
    Launch l{kind, {}, {}, {}, replays};
    std::vector<u32> out(ranks), in(ranks), sends(ranks), receives(ranks);
    for (u32 r = 0; r < ranks; r++) {
      P2PArgs a{};
      a.heaps = u64(heaps), a.stride = sizeof(Heap), a.slots = u64(slots[r].data()), a.slotMask = SLOTS - 1, a.abort = u64(&abort);
      a.rank = r, a.ranks = ranks, a.flags = LS_FIRST | LS_LAST, a.desc = r + 1;
      l.args.push_back(a);
    }
    for (u32 from = 0; from < ranks; from++)
      for (u32 to = 0; to < ranks; to++) {
        if (from == to || !any(from, to)) continue;
        u64 bytes = size();
        bool direct = kind == BULK || (kind == MIXED && bytes > 0 && upTo32(2) == 0);
        if (direct && bytes == 0) bytes = 1;
        u32 lanes = 1 + upTo32(direct ? LS_LANES : 4) + (direct ? 0 : bytes / (8 * LS_LANE_LINES));
        u64 piece = upTo((bytes + lanes - 1) / lanes, 128);
        lanes = bytes == 0 ? 1 : u32((bytes + piece - 1) / piece);
        auto s = std::make_shared<Sent>(Sent{from, to, Buffer(bytes, upTo32(2) ? 0 : upTo32(16)), Buffer(bytes, upTo32(2) ? 0 : upTo32(16))});
        for (u64 b = 0; b < bytes; b++) s->send.data()[b] = u8(rng());
        memset(s->recv.data(), 0, bytes);
        l.sent.push_back(s);
        Message m{u64(s->send.data()), bytes, piece, 0, 0, 0, to, lanes, direct, out[from], direct ? 0 : lanes};
        if (!direct) out[from] += lanes;
        l.args[from].send[sends[from]++] = m;
        m.buffer = u64(s->recv.data()), m.peer = from, m.first = in[to];
        if (!direct) in[to] += lanes;
        if (direct && upTo32(2)) m.stage = m.target = stageOf(to, from), m.room = ROOM;
        else if (direct) m.target = m.buffer, m.blocks = 1;
        l.args[to].receive[receives[to]++] = m;
      }
    for (u32 r = 0; r < ranks; r++) {
      u32 next = out[r] > in[r] ? out[r] : in[r];
      for (auto *list : {l.args[r].send, l.args[r].receive})
        for (u32 k = 0; k < LS_MAX_MESSAGES; k++) {
          Message &m = list[k];
          if (!m.direct) continue;
          if (m.blocks == 0) m.blocks = 1 + upTo32(m.lanes < 3 ? m.lanes : 3);
          m.first = next, next += m.blocks;
        }
      l.blocks.push_back(next == 0 ? 1 : next);
    }
    launches.push_back(std::move(l));
  }

  // run runs all launches on the ranks of set; a rank's follow each other, as on a
  // stream.
  void run(u32 set = ~0u) {
    std::vector<std::thread> streams;
    for (u32 r = 0; r < ranks; r++) {
      if (!(set >> r & 1)) continue;
      streams.emplace_back([=, this] {
        for (auto &l : launches)
          for (u32 i = 0; i < l.replays; i++) {
            std::vector<std::thread> all;
            std::vector<std::unique_ptr<BlockEmulation>> shared;
            for (u32 b = 0; b < l.blocks[r]; b++) {
              auto *block = shared.emplace_back(std::make_unique<BlockEmulation>(THREADS)).get();
              for (u32 t = 0; t < THREADS; t++) {
                all.emplace_back([=, &l] {
                  emulated = {t, b, THREADS, l.blocks[r], 0, block};
                  (l.kind == LL ? ls_p2p_ll : l.kind == BULK ? ls_p2p_bulk : ls_p2p_direct)(l.args[r]);
                });
              }
            }
            for (auto &t : all) t.join();
          }
      });
    }
    for (auto &s : streams) s.join();
  }

  void verify() {
    for (u32 k = 0; k < launches.size(); k++)
      for (auto &s : launches[k].sent) {
        std::string what = "launch " + std::to_string(k) + ": " + std::to_string(s->send.bytes) + " bytes from " + std::to_string(s->from) + " to " + std::to_string(s->to);
        if (!s->recv.intact()) fail(what + ": written outside of the buffer");
        if (memcmp(s->recv.data(), s->send.data(), s->send.bytes)) fail(what + ": differ");
      }
    u32 ops = 0;
    for (auto &l : launches) ops += l.replays;
    for (u32 r = 0; r < ranks; r++) {
      u64 before = 0;
      for (u64 seq = 1; seq <= ops; seq++) {
        Slot &s = slots[r][seq & (SLOTS - 1)];
        u64 peer = s.arrived & 0xff;
        if (s.id != (seq << 16 | (r + 1)) || s.start < before || s.end < s.start || (peer != 0xff && (peer >= ranks || peer == r))) fail("stamps of operation " + std::to_string(seq));
        before = s.end;
      }
      if (heaps[r].op.seq != ops || heaps[r].op.blocksDone != 0) fail("operations are miscounted");
    }
  }
};

static u64 anySize() {
  switch (upTo32(4)) {
  case 0: return upTo32(3);
  case 1: return upTo32(300);
  case 2: return upTo32(5000);
  }
  return upTo32(40000);
}

// Nobody answers: those who need it leave when told to, and claim no end.
static void aborts(Kind kind) {
  World w(2);
  w.add(kind, 4, [](u32 from, u32) { return from == 0; }, [] { return u64(3000); });
  for (u32 r : {0, 1}) {
    memset(w.slots[r].data(), 0, SLOTS * sizeof(Slot));
    std::thread later([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      storeVolatile(&w.abort, 1);
    });
    w.run(1u << r);
    later.join();
    w.abort = 0;
    u64 ended = 0;
    for (auto &s : w.slots[r]) ended += s.end != 0;
    // By LL a sender is not held up before its third message.
    if (w.heaps[r].op.seq != ~u64(0) || ended != (w.launches[0].args[0].send[0].direct ? 0 : 2)) fail("aborted, and ended " + std::to_string(ended));
  }
}

int main() {
  for (u32 ranks : {2, 3}) {
    World w(ranks);
    auto ring = [=](u32 from, u32 to) { return to == (from + 1) % ranks; };
    for (Kind kind : {LL, MIXED, BULK}) {
      w.add(kind, 4, ring, anySize);
      w.add(kind, 2, ring, [] { return u64(1 + upTo32(120000)); });
      w.add(kind, 3, [](u32 from, u32) { return from == 0; }, anySize);
      for (u32 i = 0; i < 6; i++) {
        u32 some = u32(rng());
        w.add(Kind(i < 4 ? kind : upTo32(3)), 1 + upTo32(3), [=](u32 from, u32 to) { return some >> (from * 5 + to) % 32 & 1; }, anySize);
      }
    }
    w.run();
    w.verify();
    printf("%u ranks\n", ranks);
  }
  for (Kind kind : {LL, MIXED, BULK}) aborts(kind);
  return failures != 0;
}
