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

enum { THREADS = 32, SLOTS = 4096, MARGIN = 64 };

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

enum Kind { LL, MIXED, BULK, LIST, LIST_BULK };

// Sent is a message as both sides have it.
struct Sent {
  u32 from, to;
  Buffer send, recv;
};

struct Launch {
  Kind kind;
  std::vector<P2PArgs> args; // of each rank
  std::vector<P2PListArgs> lists;       // instead, of lists
  std::vector<std::vector<Item>> more; // of lists: what their parameters have no room for
  std::vector<u32> blocks;
  std::vector<std::shared_ptr<Sent>> sent;
  u32 replays;
};

struct World {
  u32 ranks, room, places; // places: bytes of staging memory, in places of room bytes
  Heap *heaps;
  std::vector<u64x2> stage; // of all ranks
  std::vector<std::vector<Slot>> slots;
  u32 abort = 0;
  std::vector<Launch> launches;

  explicit World(u32 ranks, u32 room = 1024)
      : ranks(ranks), room(room), places(LS_MAX_RANKS * LS_LANES * 2 * room), heaps((Heap *)aligned_alloc(128, ranks * sizeof(Heap))), stage(ranks * places / 16), slots(ranks) {
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

  u64 stageOf(u32 rank, u32 from) { return u64(stage.data()) + rank * places + from * (LS_LANES * 2 * room); }

  template <class A> A begin(u32 r) {
    A a{};
    a.heaps = u64(heaps), a.stride = sizeof(Heap), a.slots = u64(slots[r].data()), a.slotMask = SLOTS - 1, a.abort = u64(&abort);
    a.rank = r, a.ranks = ranks, a.flags = LS_FIRST | LS_LAST, a.desc = r + 1, a.pace = 100;
    return a;
  }

  static u64 cut(u64 bytes, bool direct, u32 &lanes) {
    lanes = 1 + upTo32(direct ? LS_LANES : 4) + (direct ? 0 : bytes / (8 * LS_LANE_LINES));
    u64 piece = upTo((bytes + lanes - 1) / lanes, LS_PIECE_UNIT);
    lanes = bytes == 0 ? 1 : u32((bytes + piece - 1) / piece);
    return piece;
  }

  static std::shared_ptr<Sent> letter(Launch &l, u32 from, u32 to, u64 bytes) {
    auto s = std::make_shared<Sent>(Sent{from, to, Buffer(bytes, upTo32(2) ? 0 : upTo32(16)), Buffer(bytes, upTo32(2) ? 0 : upTo32(16))});
    for (u64 b = 0; b < bytes; b++) s->send.data()[b] = u8(rng());
    memset(s->recv.data(), 0, bytes);
    l.sent.push_back(s);
    return s;
  }

  // addList makes a launch with count messages between two ranks, of size bytes.
  void addList(Kind kind, u32 replays, const std::function<u32(u32, u32)> &count, const std::function<u64()> &size) {
    Launch l{kind, {}, {}, {}, {}, {}, replays};
    std::vector<std::vector<Item>> queues(ranks * 4 * ranks); // [rank][peer][sends][direct]
    auto queue = [&](u32 rank, u32 peer, bool send, bool direct) -> std::vector<Item> & { return queues[((rank * ranks + peer) * 2 + send) * 2 + direct]; };
    for (u32 from = 0; from < ranks; from++)
      for (u32 to = 0; to < ranks; to++)
        for (u32 k = from == to ? 0 : count(from, to); k > 0; k--) {
          u64 bytes = size();
          bool direct = kind == LIST_BULK || (bytes > 0 && upTo32(2) == 0);
          if (direct && bytes == 0) bytes = 1;
          u32 lanes;
          u64 piece = cut(bytes, direct, lanes);
          auto s = letter(l, from, to, bytes);
          Item m{u64(s->send.data()), bytes, 0, u32(piece / LS_PIECE_UNIT), lanes};
          queue(from, to, true, direct).push_back(m);
          m.buffer = u64(s->recv.data());
          if (direct && upTo32(2)) m.target = m.buffer;
          queue(to, from, false, direct).push_back(m);
        }
    for (u32 r = 0; r < ranks; r++) {
      P2PListArgs a = begin<P2PListArgs>(r);
      a.room = room, a.stage = stageOf(r, 0);
      std::vector<Item> more;
      u32 n = 0, blocks = 0;
      for (u32 k = 0; k < 4 * ranks; k++) {
        auto &items = queues[r * 4 * ranks + k];
        if (items.empty()) continue;
        u32 own = 1 + upTo32(3);
        a.queue[n++] = {stageOf(r, k / 4), a.items, u32(items.size()), u16(blocks), u16(own), u8(k / 4), u8(k / 2 % 2), u8(k % 2), 0};
        blocks += own;
        for (auto &m : items) {
          if (a.items < LS_ITEMS) a.item[a.items] = m;
          else more.push_back(m);
          a.items++;
        }
      }
      l.lists.push_back(a), l.more.push_back(more), l.blocks.push_back(blocks == 0 ? 1 : blocks);
    }
    launches.push_back(std::move(l));
  }

  // add makes a launch with messages between the pairs that any says, of size bytes.
  void add(Kind kind, u32 replays, const std::function<bool(u32, u32)> &any, const std::function<u64()> &size) {
    Launch l{kind, {}, {}, {}, {}, {}, replays};
    std::vector<u32> out(ranks), in(ranks), sends(ranks), receives(ranks);
    for (u32 r = 0; r < ranks; r++) l.args.push_back(begin<P2PArgs>(r));
    for (u32 from = 0; from < ranks; from++)
      for (u32 to = 0; to < ranks; to++) {
        if (from == to || !any(from, to)) continue;
        u64 bytes = size();
        bool direct = kind == BULK || (kind == MIXED && bytes > 0 && upTo32(2) == 0);
        if (direct && bytes == 0) bytes = 1;
        u32 lanes;
        u64 piece = cut(bytes, direct, lanes);
        auto s = letter(l, from, to, bytes);
        Message m{u64(s->send.data()), bytes, piece, 0, 0, 0, to, lanes, direct, out[from], direct ? 0 : lanes};
        if (!direct) out[from] += lanes;
        l.args[from].send[sends[from]++] = m;
        m.buffer = u64(s->recv.data()), m.peer = from, m.first = in[to];
        if (!direct) in[to] += lanes;
        if (direct && upTo32(2)) m.stage = m.target = stageOf(to, from), m.room = room;
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

  // loadItems brings what a list has no room for to the rank's heap.
  void loadItems(const Launch &l, u32 r) {
    if (l.more.empty()) return;
    for (u32 at = 0; at < l.more[r].size(); at += LS_LOAD_ITEMS) {
      ItemsArgs a{};
      a.to = u64(&heaps[r].item[at]), a.count = u32(least(LS_LOAD_ITEMS, l.more[r].size() - at));
      for (u32 i = 0; i < a.count; i++) a.item[i] = l.more[r][at + i];
      emulated = {0, 0, 1, 1, 0, nullptr};
      ls_p2p_items(a);
    }
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
            loadItems(l, r);
            std::vector<std::thread> all;
            std::vector<std::unique_ptr<BlockEmulation>> shared;
            for (u32 b = 0; b < l.blocks[r]; b++) {
              auto *block = shared.emplace_back(std::make_unique<BlockEmulation>(THREADS)).get();
              for (u32 t = 0; t < THREADS; t++) {
                all.emplace_back([=, &l] {
                  emulated = {t, b, THREADS, l.blocks[r], 0, block};
                  if (l.kind >= LIST) (l.kind == LIST ? ls_p2p_list : ls_p2p_list_bulk)(l.lists[r]);
                  else (l.kind == LL ? ls_p2p_ll : l.kind == BULK ? ls_p2p_bulk : ls_p2p_direct)(l.args[r]);
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

// Nobody answers the first of several messages.
static void abortsLists(Kind kind) {
  World w(2);
  w.addList(kind, 1, [](u32 from, u32) { return from == 0 ? 4 : 0; }, [] { return u64(3000); });
  for (u32 r : {0, 1}) {
    std::thread later([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      storeVolatile(&w.abort, 1);
    });
    w.run(1u << r);
    later.join();
    w.abort = 0;
    u64 ended = 0;
    for (auto &s : w.slots[r]) ended += s.end != 0;
    if (w.heaps[r].op.seq != ~u64(0) || ended != 0) fail("a list was aborted, and ended " + std::to_string(ended));
  }
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
  for (u32 worlds = 0; worlds < 3; worlds++) {
    u32 ranks = worlds == 1 ? 3 : 2, room = worlds == 2 ? 24448 : 1024; // smaller than a tile of bulk copies, and larger
    World w(ranks, room);
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
    for (Kind kind : {LIST, LIST_BULK}) {
      w.addList(kind, 3, [](u32, u32) { return 1 + upTo32(5); }, anySize);
      w.addList(kind, 2, [](u32, u32) { return 150u; }, [] { return u64(upTo32(100)); });
      w.add(MIXED, 2, ring, anySize); // goes on where lists have left off
      w.addList(kind, 2, [](u32, u32) { return upTo32(4); }, anySize);
      w.addList(kind, 1, [](u32 from, u32) { return from == 0 ? 3 : 0; }, anySize);
    }
    w.run();
    w.verify();
    printf("%u ranks, places of %u bytes\n", ranks, room);
  }
  for (Kind kind : {LL, MIXED, BULK}) aborts(kind);
  for (Kind kind : {LIST, LIST_BULK}) abortsLists(kind);
  return failures != 0;
}
