// Runs the LL kernels of all ranks of a communicator on the
// CPU, one thread for each CUDA thread, and compares what they make with a plain
// computation. Ranks run ahead of each other as far as the kernels let them.
#define LS_TYPE float // of the entry points, which are not used

#include "chain_move.h"
#include "chain_reduce.h"
#include "ll12_move.h"
#include "ll12_reduce.h"
#include "ll_move.h"
#include "ll_reduce.h"
#include "probe.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

enum { THREADS = 4, BLOCKS = 7, SLOTS = 4096, MARGIN = 32 };

static int failures;
static void fail(const std::string &what) {
  if (failures++ < 20) printf("FAIL %s\n", what.c_str());
}

// Buffer is bytes at a chosen alignment between margins that nobody may write.
struct Buffer {
  std::vector<u64> words;
  u64 skew = 0, bytes = 0;
  Buffer() {}
  Buffer(u64 bytes, u64 skew) : words((bytes + 2 * MARGIN) / 8 + 2, 0xeeeeeeeeeeeeeeee), skew(skew), bytes(bytes) {}
  u8 *data() { return (u8 *)words.data() + MARGIN + skew; }
  bool intact() {
    u8 *all = (u8 *)words.data();
    for (u64 i = 0; i < MARGIN + skew; i++)
      if (all[i] != 0xee) return false;
    for (u64 i = MARGIN + skew + bytes; i < words.size() * 8; i++)
      if (all[i] != 0xee) return false;
    return true;
  }
};

struct Kernel {
  std::string name;
  u32 blocks;
  std::vector<std::function<void()>> run; // of each rank
  std::function<void()> verify;
};

struct World {
  u32 ranks;
  std::vector<std::unique_ptr<Heap, void (*)(void *)>> heaps;
  std::vector<std::vector<Slot>> slots;
  u32 abort = 0;
  std::vector<Kernel> kernels;

  explicit World(u32 ranks) : ranks(ranks) {
    for (u32 r = 0; r < ranks; r++) {
      void *p = aligned_alloc(128, sizeof(Heap));
      memset(p, 0, sizeof(Heap));
      heaps.emplace_back((Heap *)p, free);
      slots.emplace_back(SLOTS);
    }
  }

  template <class A> A args(u32 rank) {
    A a{};
    for (u32 r = 0; r < ranks; r++) a.heap[r] = (u64)heaps[r].get();
    a.rank = rank, a.ranks = ranks, a.flags = LS_FIRST | LS_LAST, a.desc = rank + 1;
    a.abort = (u64)&abort, a.slots = (u64)slots[rank].data(), a.slotMask = SLOTS - 1;
    return a;
  }

  // run runs all kernels on the ranks of set; a rank's kernels follow each other,
  // as on a stream.
  void run(u32 set = ~0u) {
    std::vector<std::thread> all;
    std::vector<std::unique_ptr<std::barrier<>>> streams;
    std::vector<std::unique_ptr<BlockEmulation>> blocks;
    for (u32 r = 0; r < ranks; r++) {
      if (!(set >> r & 1)) continue;
      auto *stream = streams.emplace_back(std::make_unique<std::barrier<>>(BLOCKS * THREADS)).get();
      for (u32 b = 0; b < BLOCKS; b++) {
        auto *shared = blocks.emplace_back(std::make_unique<BlockEmulation>(THREADS)).get();
        for (u32 t = 0; t < THREADS; t++) {
          all.emplace_back([=, this] {
            emulated = {t, b, THREADS, 0, 0, shared};
            for (auto &k : kernels) {
              emulated.blocks = k.blocks;
              if (b < k.blocks) k.run[r]();
              stream->arrive_and_wait();
            }
          });
        }
      }
    }
    for (auto &t : all) t.join();
  }
};

static std::mt19937_64 rng(1);
static u32 upTo32(u32 n) { return u32(rng() % n); }

// Small floats decoded and encoded the slow way.
static float decode8(u8 x, int mantissa, int bias, bool ieee) {
  int e = x >> mantissa & ((1 << (7 - mantissa)) - 1), m = x & ((1 << mantissa) - 1), top = (1 << (7 - mantissa)) - 1;
  float f;
  if (ieee && e == top) f = m ? NAN : INFINITY;
  else if (!ieee && e == top && m == (1 << mantissa) - 1) f = NAN;
  else f = e == 0 ? ldexpf(m, 1 - bias - mantissa) : ldexpf((1 << mantissa) + m, e - bias - mantissa);
  return x & 0x80 ? -f : f;
}
static u8 encode8(float f, int mantissa, int bias, bool ieee) {
  if (f != f) return 0x7f;
  u8 sign = std::signbit(f) ? 0x80 : 0, best = 0;
  double want = std::fabs((double)f), least = INFINITY;
  for (int x = 0; x < 128; x++) {
    double v = decode8(x, mantissa, bias, ieee);
    if (!std::isfinite(v)) continue;
    double d = std::isinf(want) ? -v : std::fabs(v - want);
    if (d < least || (d == least && x % 2 == 0)) best = x, least = d;
  }
  return best | sign;
}

template <class T> struct Plain {
  using Acc = T;
  static T up(T x) { return x; }
  static T down(T x) { return x; }
  static T random() {
    if constexpr (std::is_floating_point_v<T>) return T(int(upTo32(4001)) - 2000) / T(7);
    else return T(rng());
  }
};
template <> struct Plain<float16> {
  using Acc = float;
  static float up(float16 x) { return __builtin_bit_cast(_Float16, x.bits); }
  static float16 down(float x) { return {__builtin_bit_cast(u16, _Float16(x))}; }
  static float16 random() { return down(float(int(upTo32(401)) - 200) / 7); }
};
template <> struct Plain<bfloat16> {
  using Acc = float;
  static float up(bfloat16 x) { return asFloat(u32(x.bits) << 16); }
  static bfloat16 down(float x) {
    u32 low = u32(asBits(x) >> 16 << 16), high = low + 0x10000;
    double a = std::fabs((double)asFloat(low) - x), b = std::fabs((double)asFloat(high) - x);
    return {u16((a < b || (a == b && (low >> 16) % 2 == 0) ? low : high) >> 16)};
  }
  static bfloat16 random() { return down(float(int(upTo32(401)) - 200) / 7); }
};
template <> struct Plain<float8e4m3> {
  using Acc = float;
  static float up(float8e4m3 x) { return decode8(x.bits, 3, 7, false); }
  static float8e4m3 down(float x) { return {encode8(x, 3, 7, false)}; }
  static float8e4m3 random() { return down(float(int(upTo32(41)) - 20) / 3); }
};
template <> struct Plain<float8e5m2> {
  using Acc = float;
  static float up(float8e5m2 x) { return decode8(x.bits, 2, 15, true); }
  static float8e5m2 down(float x) { return {encode8(x, 2, 15, true)}; }
  static float8e5m2 random() { return down(float(int(upTo32(41)) - 20) / 3); }
};

template <class T> T plainReduce(u32 op, const std::vector<T> &in) {
  using A = typename Plain<T>::Acc;
  A acc = Plain<T>::up(in[0]);
  for (size_t r = 1; r < in.size(); r++) {
    A x = Plain<T>::up(in[r]);
    if (op == LS_SUM || op == LS_AVG) acc = A(typename unsignedOf<A>::type(acc) + typename unsignedOf<A>::type(x));
    else if (op == LS_PROD) acc = A(typename unsignedOf<A>::type(acc) * typename unsignedOf<A>::type(x));
    else if (op == LS_MAX) acc = x > acc ? x : acc;
    else acc = x < acc ? x : acc;
  }
  if (op == LS_AVG) acc = A(acc / A(in.size()));
  return Plain<T>::down(acc);
}

enum Kind { ONE_SHOT, TWO_SHOT, REDUCE_SCATTER, REDUCE, CHAIN_REDUCE, ALL_GATHER, ALL_TO_ALL, BROADCAST, BROADCAST2, CHAIN_BROADCAST, KINDS };
static const char *kindNames[] = {"allreduce_ll", "allreduce_ll2", "reducescatter_ll", "reduce_ll", nullptr, "allgather_ll", "alltoall_ll", "broadcast_ll", "broadcast_ll2", nullptr};
static const char *kindNames12[] = {"allreduce_ll12", nullptr, "reducescatter_ll12", "reduce_ll12", "reduce_chain", "allgather_ll12", "alltoall_ll12", "broadcast_ll12", nullptr, "broadcast_chain"};
static const u64 FULL = ~u64(0); // a count: all that lines of 12 bytes hold; of a chain, several times what its slots hold

// capacity12 is how many bytes those of so many blocks hold.
static u64 capacity12(u32 ranks, u32 blocks) { return u64(blocks) * LS_LL12_LINES * 12 * (ranks <= 2 ? 4 : ranks <= 4 ? 2 : 1); }

template <class T> constexpr bool allByLines = std::is_same_v<T, float8e4m3> || std::is_same_v<T, bfloat16> || std::is_floating_point_v<T>;

// reduceByLines runs a reduction by a chain, or by lines of 12 bytes: all of these for a type of
// each size, which is what they depend on, and one for the others, to compile in time.
template <class T> void reduceByLines(Kind kind, const Args &a) {
  if (kind == CHAIN_REDUCE) return reduceChain<T>(a);
  if constexpr (allByLines<T>) {
    if (kind == REDUCE_SCATTER) return reduceScatterLines<T>(a);
    if (kind == REDUCE) return reduceLines<T>(a);
  }
  allReduceLines<T>(a);
}

static u64 leaves; // rank 1 of a collective has so many elements alone, if not 0, and leaves in the middle of it

// Late says of a collective which rank comes late, with how many of a block's threads.
struct Late {
  u32 rank, threads;

  void wait(u32 r) const {
    if (r == rank && emulated.tid < threads) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
};

template <class T> void collective(World &w, Kind kind, bool wide, u32 op, u64 count, u32 root, bool inPlace, const char *type) {
  u32 n = w.ranks;
  bool sendAll = kind == REDUCE_SCATTER || kind == ALL_TO_ALL, recvAll = kind == ALL_GATHER || kind == ALL_TO_ALL;
  u32 blocks = 1 + upTo32(3);
  bool chain = kind == CHAIN_REDUCE || kind == CHAIN_BROADCAST;
  Late late{chain && upTo32(4) == 0 ? upTo32(n) : n, 1 + upTo32(THREADS)};
  if (count == FULL) count = (chain ? u64(blocks) * LS_CHAIN_STEP * (8 + upTo32(40)) : capacity12(n, blocks)) / sizeof(T);
  u64 bytes = count * sizeof(T), sendBytes = sendAll ? n * bytes : bytes, recvBytes = recvAll ? n * bytes : bytes;
  auto send = std::make_shared<std::vector<Buffer>>(), recv = std::make_shared<std::vector<Buffer>>();
  auto in = std::make_shared<std::vector<std::vector<T>>>();
  Kernel k;
  k.blocks = blocks;
  k.name = std::string((wide ? kindNames12 : kindNames)[kind]) + " " + type + " op " + std::to_string(op) + " count " + std::to_string(count) + " ranks " + std::to_string(n) +
           " blocks " + std::to_string(k.blocks) + (inPlace ? " in place" : "");
  for (u32 r = 0; r < n; r++) {
    u64 grain = sizeof(T), skew = upTo32(16 / grain) * grain, skew2 = upTo32(16 / grain) * grain;
    if (upTo32(2)) skew = skew2 = 0;
    Buffer s(inPlace ? std::max(sendBytes, recvBytes) : sendBytes, skew), d(recvBytes, skew2);
    std::vector<T> values(sendBytes / sizeof(T));
    for (T &v : values) v = Plain<T>::random();
    memset(s.data(), 0, s.bytes), memset(d.data(), 0, d.bytes);
    memcpy(s.data() + (inPlace && kind == ALL_GATHER ? r * bytes : 0), values.data(), sendBytes);
    in->push_back(values), send->push_back(std::move(s)), recv->push_back(std::move(d));
  }
  for (u32 r = 0; r < n; r++) {
    Args a = w.args<Args>(r);
    u8 *s = (*send)[r].data();
    a.send[r] = (u64)s + (inPlace && kind == ALL_GATHER ? r * bytes : 0);
    a.recv[r] = inPlace ? (u64)s + (kind == REDUCE_SCATTER ? r * bytes : 0) : (u64)(*recv)[r].data();
    a.root = root, a.op = op, a.count = kind >= ALL_GATHER ? bytes : count;
    if (leaves > 0 && r == 1) a.count = kind >= ALL_GATHER ? leaves * sizeof(T) : leaves;
    k.run.push_back([=] {
      late.wait(r);
      switch (kind) {
      case ONE_SHOT: wide ? reduceByLines<T>(kind, a) : allReduceOneShot<T>(a); break;
      case TWO_SHOT: allReduceTwoShot<T>(a); break;
      case REDUCE_SCATTER: wide ? reduceByLines<T>(kind, a) : reduceScatter<T>(a); break;
      case CHAIN_REDUCE: reduceByLines<T>(kind, a); break;
      case CHAIN_BROADCAST: ls_broadcast_chain(a); break;
      case REDUCE: wide ? reduceByLines<T>(kind, a) : reduceToRoot<T>(a); break;
      case ALL_GATHER: wide ? ls_allgather_ll12(a) : ls_allgather_ll(a); break;
      case ALL_TO_ALL: wide ? ls_alltoall_ll12(a) : ls_alltoall_ll(a); break;
      case BROADCAST2: ls_broadcast_ll2(a); break;
      default: wide ? ls_broadcast_ll12(a) : ls_broadcast_ll(a);
      }
    });
  }
  k.verify = [=, name = k.name] {
    for (u32 r = 0; r < n; r++) {
      if (!(*send)[r].intact() || !(*recv)[r].intact()) fail(name + ": rank " + std::to_string(r) + " wrote outside its buffers");
      if ((kind == REDUCE || kind == CHAIN_REDUCE) && r != root) continue;
      u64 elems = recvBytes / sizeof(T);
      u8 *out = inPlace ? (*send)[r].data() + (kind == REDUCE_SCATTER ? r * bytes : 0) : (*recv)[r].data();
      for (u64 i = 0; i < elems; i++) {
        T want, got;
        u64 at = kind == REDUCE_SCATTER ? r * count + i : i;
        if (kind == ALL_GATHER) want = (*in)[i / count][i % count];
        else if (kind == ALL_TO_ALL) want = (*in)[i / count][r * count + i % count];
        else if (kind >= BROADCAST) want = (*in)[root][i];
        else {
          std::vector<T> column;
          for (u32 p = 0; p < n; p++) column.push_back((*in)[kind == CHAIN_REDUCE ? (root + 1 + p) % n : p][at]);
          want = plainReduce(op, column);
        }
        memcpy(&got, out + i * sizeof(T), sizeof(T));
        if (memcmp(&got, &want, sizeof(T)) != 0 && !(std::is_floating_point_v<typename Plain<T>::Acc> && Plain<T>::up(got) == Plain<T>::up(want))) {
          fail(name + ": rank " + std::to_string(r) + " element " + std::to_string(i) + " is " + std::to_string((double)Plain<T>::up(got)) + ", want " +
               std::to_string((double)Plain<T>::up(want)));
          break;
        }
      }
    }
  };
  w.kernels.push_back(std::move(k));
}

template <class T> void collectives(World &w, const char *type) {
  for (bool wide : {false, true}) {
    for (int kind = 0; kind < KINDS; kind++) {
      if ((wide ? kindNames12 : kindNames)[kind] == nullptr || (w.ranks == 1 && kind == BROADCAST2)) continue;
      bool chain = kind == CHAIN_REDUCE || kind == CHAIN_BROADCAST;
      if (wide && !allByLines<T> && kind != ONE_SHOT && !chain) continue;
      auto one = [&](u32 op, u64 count) { collective<T>(w, Kind(kind), wide, op, count, upTo32(w.ranks), upTo32(2), type); };
      for (u64 count : {0, 1, 3, 8, 17, 64, 101}) one(upTo32(5), count);
      for (u32 op = 0; op < 5; op++) one(op, 1 + upTo32(200));
      if (wide) one(LS_SUM, 500 + upTo32(500));
      if (wide && (std::is_same_v<T, float> || chain)) one(LS_SUM, FULL);
      for (u64 steps : {1, 2, 2 * LS_CHAIN_SLOTS, 4 * LS_CHAIN_SLOTS + 1}) // of a warp; of both as many as they have slots
        for (int more : {-1, 0, 1})
          if (chain) one(upTo32(5), steps * LS_CHAIN_STEP / sizeof(T) + more);
    }
  }
}

// mixed is kernels that share lines, in any order: ranks that are ahead push to sets that those
// before have used.
static void mixed(World &w) {
  auto any = [&]<class T>(T, const char *type) {
    static const Kind some[] = {CHAIN_BROADCAST, CHAIN_REDUCE, CHAIN_BROADCAST, CHAIN_REDUCE, BROADCAST, REDUCE, ONE_SHOT, ALL_TO_ALL};
    Kind kind = some[upTo32(8)];
    bool wide = kindNames[kind] == nullptr || upTo32(2);
    u64 count = !wide || upTo32(3) == 0 ? upTo32(60) : kind == CHAIN_BROADCAST || kind == CHAIN_REDUCE ? FULL : upTo32(600);
    collective<T>(w, kind, wide, upTo32(5), count, upTo32(w.ranks), upTo32(2), type);
  };
  for (u32 k = 0; k < 60; k++) upTo32(2) ? any(float(0), "float32") : any(bfloat16{}, "bfloat16");
}

static void barrier(World &w) {
  Kernel k;
  k.name = "barrier", k.blocks = 1, k.verify = [] {};
  for (u32 r = 0; r < w.ranks; r++) {
    Args a = w.args<Args>(r);
    k.run.push_back([=] { ls_barrier(a); });
  }
  w.kernels.push_back(std::move(k));
}

static void stamps(World &w) {
  for (u32 r = 0; r < w.ranks; r++) {
    u64 before = 0;
    for (u64 seq = 1; seq <= w.kernels.size(); seq++) {
      Slot &s = w.slots[r][seq & (SLOTS - 1)];
      u64 peer = s.arrived & 0xff, arrived = s.arrived >> 8;
      if (s.id != (seq << 16 | (r + 1)) || s.start < before || s.end < s.start || (w.kernels[seq - 1].blocks == 1 && arrived > s.end - s.start) || (peer != 0xff && peer >= w.ranks)) {
        fail(w.kernels[seq - 1].name + ": stamps of rank " + std::to_string(r) + " operation " + std::to_string(seq));
      }
      before = s.end;
    }
    if (w.heaps[r]->op.seq != w.kernels.size() || w.heaps[r]->op.blocksDone != 0) fail("operations are miscounted");
  }
}

static void conversions() {
  for (u32 x = 0; x < 65536; x++) {
    float got = Elem<float16>::up({u16(x)}), want = Plain<float16>::up({u16(x)});
    if (got != want && (got == got || want == want)) fail("float16 up " + std::to_string(x));
    u8 b = u8(x);
    float g4 = Elem<float8e4m3>::up({b}), w4 = decode8(b, 3, 7, false), g5 = Elem<float8e5m2>::up({b}), w5 = decode8(b, 2, 15, true);
    if ((g4 != w4 && (g4 == g4 || w4 == w4)) || (g5 != w5 && (g5 == g5 || w5 == w5))) fail("float8 up " + std::to_string(b));
    // Values around every small float, so that ties come up.
    float f = Plain<float16>::up({u16(x)});
    for (float v : {f, f * 1.0001f, f * 0.9999f}) {
      if (v != v) continue;
      if (Elem<float8e4m3>::down(v).bits != encode8(v, 3, 7, false)) fail("float8_e4m3 down " + std::to_string(v));
      if (Elem<float8e5m2>::down(v).bits != encode8(v, 2, 15, true)) fail("float8_e5m2 down " + std::to_string(v));
    }
  }
  for (int i = 0; i < 1000000; i++) {
    float v = asFloat(u32(rng()));
    if (i % 2) v = Plain<float16>::up({u16(rng())}) + Plain<float16>::up({u16(rng())}) / 4096;
    if (v != v || std::isinf(v)) continue;
    if (Elem<float16>::down(v).bits != Plain<float16>::down(v).bits) fail("float16 down " + std::to_string(v));
    if (Elem<bfloat16>::down(v).bits != Plain<bfloat16>::down(v).bits && std::fabs(v) < 3.3e38) fail("bfloat16 down " + std::to_string(v));
  }
}

// Rank 1 never comes, or is not among those who stay; those who need it leave when told to, and
// claim no end.
static void aborts(u32 stuck, const std::function<void(World &)> &op, u32 set = 0b101) {
  World w(3);
  op(w), op(w);
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    storeVolatile(&w.abort, 1);
  });
  w.run(set);
  later.join();
  for (u32 r : {0, 2})
    if ((stuck >> r & 1) && (w.slots[r][1].id == 0 || w.slots[r][1].end != 0)) fail(w.kernels[0].name + " was aborted: it began and did not end");
}

static void patterns() {
  std::vector<u64> words(100);
  BlockEmulation block(1);
  emulated = {0, 0, 1, 1, 0, &block};
  u64 wrong = 0;
  PatternArgs a{(u64)words.data(), 797, 42, (u64)&wrong};
  ls_fill(a), ls_check(a);
  if (wrong != 0) fail("ls_check finds fault with ls_fill");
  ((u8 *)words.data())[796] ^= 1, ((u8 *)words.data())[3] ^= 1;
  ls_check(a);
  if (wrong != 2) fail("ls_check counts " + std::to_string(wrong) + ", want 2");
}

int main() {
  conversions();
  patterns();
  for (u32 ranks : {1, 2, 3, 4, 5, 8}) {
    World w(ranks);
    // Epochs pass through 0 in the middle of it.
    for (auto &h : w.heaps)
      for (auto &b : h->block) b.epoch = -100;
    collectives<signed char>(w, "int8"), barrier(w);
    collectives<u8>(w, "uint8"), barrier(w);
    collectives<int>(w, "int32"), barrier(w);
    collectives<u32>(w, "uint32"), barrier(w);
    collectives<long long>(w, "int64"), barrier(w);
    collectives<u64>(w, "uint64"), barrier(w);
    collectives<float16>(w, "float16"), barrier(w);
    collectives<float>(w, "float32"), barrier(w);
    collectives<double>(w, "float64"), barrier(w);
    collectives<bfloat16>(w, "bfloat16"), barrier(w);
    collectives<float8e4m3>(w, "float8_e4m3"), barrier(w);
    collectives<float8e5m2>(w, "float8_e5m2"), barrier(w);
    mixed(w);
    w.run();
    for (auto &k : w.kernels) k.verify();
    stamps(w);
    printf("%u ranks: %zu kernels\n", ranks, w.kernels.size());
  }
  aborts(0b101, barrier);
  aborts(0b101, [](World &w) { collective<float>(w, TWO_SHOT, false, LS_SUM, 50, 0, false, "float32"); });
  aborts(0b101, [](World &w) { collective<float>(w, ONE_SHOT, true, LS_SUM, 50, 0, false, "float32"); });
  aborts(0b101, [](World &w) { collective<float>(w, REDUCE, true, LS_SUM, 50, 0, false, "float32"); });
  aborts(0b101, [](World &w) { collective<float>(w, BROADCAST, true, LS_SUM, 50, 0, false, "float32"); });
  for (u64 count : {u64(50), FULL})
    for (Kind kind : {CHAIN_REDUCE, CHAIN_BROADCAST})
      for (u32 root : {0, 2}) aborts(0b101, [=](World &w) { collective<float>(w, kind, true, LS_SUM, count, root, false, "float32"); });
  u64 much = 3 * 48 * LS_CHAIN_STEP / sizeof(float); // on three blocks at most, eight times what slots hold
  leaves = much / 4;
  for (Kind kind : {CHAIN_REDUCE, CHAIN_BROADCAST})
    for (u32 root : {0, 2}) aborts(0b101, [=](World &w) { collective<float>(w, kind, true, LS_SUM, much, root, false, "float32"); }, 0b111);
  return failures != 0;
}
