// nccl measures NCCL on the GPUs of one machine, in one process with a thread a
// GPU, so that `lockstep perf` has something to be compared with that was
// measured on the same machine minutes apart.
//
// It counts as nccl-tests does: operations back to back, a buffer that moves on
// from one to the next, time = total / operations, algorithm and bus bandwidth by
// the same formulas. A time ("us") lies between two CUDA events, and is the
// longest of all ranks; "wall_us" is nccl-tests' own reading, a host clock until
// the stream is idle, averaged over ranks. Both are the median of a few blocks.
//
//	nccl > nccl.jsonl                 all collectives, 8 B to 4 GB
//	nccl -gemm [-b 256M -e 256M]      a GEMM alone, AlltoAll alone, both together
//	nccl -gemm-only [-seconds 30]     a GEMM to run beside anything else
//
// Options, most with a value (parse below has them all):
//
//	-g N                        GPUs (all)
//	-b, -e, -f                  smallest and largest size, factor between (8, 4G, 4)
//	-coll all_reduce,…          collectives (all seven)
//	-mode default,registered,ce (default,registered)
//	-launch stream,graph        one call a time, or captured in a graph of
//	-graph-ops N                operations (20)
//	-block-ms, -blocks          a time is the median of blocks so long (12, 3)
//	-check SIZE                 check results up to this size (4G)
//	-fixed                      always the same part of the buffers, as lockstep perf
//	-limit, -watchdog           seconds for everything (300), for one measurement (30)
//
// Results go to standard output, one JSON object a line; a table for people goes
// to standard error.
//
// Modes: "default" is memory of cudaMalloc; "registered" memory of ncclMemAlloc,
// in symmetric windows (AlltoAll and Send/Recv: ncclCommRegister); "ce" the same
// windows and a communicator with the zero-CTA policy, by which NCCL's copy
// engines do AllGather and AlltoAll.
#include <cuda_runtime.h>
#include <nccl.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "gemm.h"

// ---- failing, and giving up in time ----

static void ncclCheck(ncclResult_t e, const char *what) {
  if (e != ncclSuccess) die("%s: %s (%s)", what, ncclGetErrorString(e), ncclGetLastError(nullptr));
}

#define NCCL(call) ncclCheck((call), #call)

// The watchdog ends the process when one measurement takes far too long: a
// collective that hangs would otherwise eat all the time there is on a machine.
static std::atomic<double> deadline{0};
static char doing[256];

static void watch() {
  for (;;) {
    usleep(100 * 1000);
    double d = deadline.load();
    if (d > 0 && now() > d) die("gave up: %s took too long", doing);
  }
}

// bound gives what comes next so many seconds; rank 0 calls it, for all.
static void bound(double seconds, const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(doing, sizeof doing, format, args);
  va_end(args);
  deadline = now() + seconds;
}

static std::atomic<bool> interrupted{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler writes it");

static void onSignal(int) { interrupted = true; }

#include "options.h"
#include "gang.h"
#include "data.h"

// ---- collectives ----

struct Case {
  Coll coll;
  const char *name;
  size_t count;  // what NCCL is told
  size_t send, recv;  // elements of the buffers
  double bus;  // bus bandwidth over algorithm bandwidth

  size_t bytes() const { return 4 * std::max(send, recv); }
};

static Case makeCase(const std::string &name, size_t bytes, int n) {
  static const std::vector<std::string> names = Options().colls;  // in the order of Coll
  Case c{};
  size_t at = size_t(std::find(names.begin(), names.end(), name) - names.begin());
  c.coll = Coll(at);
  c.name = names[at].c_str();
  size_t all = bytes / 4;
  double others = double(n - 1) / n;
  switch (c.coll) {
    case AllReduce: c.count = c.send = c.recv = all; c.bus = 2 * others; break;
    case AllGather: c.count = c.send = all / n; c.recv = c.count * n; c.bus = others; break;
    case ReduceScatter: c.count = c.recv = all / n; c.send = c.count * n; c.bus = others; break;
    case AllToAll: c.count = all / n; c.send = c.recv = c.count * n; c.bus = others; break;
    case Broadcast: case Reduce: case SendRecv: c.count = c.send = c.recv = all; c.bus = 1; break;
  }
  return c;
}

struct Buffers {
  char *send = nullptr, *recv = nullptr;
  size_t size = 0;
  void *sendHandle = nullptr, *recvHandle = nullptr;
  ncclWindow_t sendWindow = nullptr, recvWindow = nullptr;
};

enum Kind { Plain, Window, Registered };  // how buffers are made

struct Rank {
  const Options *o;
  Gang *gang;
  int rank, n;
  ncclUniqueId id, ceId;
  ncclComm_t comm = nullptr, ceComm = nullptr;
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  unsigned long long *wrong = nullptr;
  Buffers buffers;

  void open(bool ce);
  void close();
  void allocate(Kind kind, ncclComm_t c, size_t size);
  void release(Kind kind, ncclComm_t c);
  void call(const Case &c, ncclComm_t comm, size_t turn);
};

void Rank::open(bool ce) {
  CUDA(cudaSetDevice(rank));
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CUDA(cudaEventCreate(&begin));
  CUDA(cudaEventCreate(&end));
  CUDA(cudaMalloc((void **)&wrong, sizeof *wrong));
  NCCL(ncclCommInitRank(&comm, n, id, rank));
  if (ce) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
    NCCL(ncclCommInitRankConfig(&ceComm, n, ceId, rank, &config));
  }
}

void Rank::close() {
  if (ceComm) NCCL(ncclCommDestroy(ceComm));
  NCCL(ncclCommDestroy(comm));
  CUDA(cudaFree(wrong));
  CUDA(cudaEventDestroy(begin));
  CUDA(cudaEventDestroy(end));
  CUDA(cudaStreamDestroy(stream));
}

void Rank::allocate(Kind kind, ncclComm_t c, size_t size) {
  Buffers &b = buffers;
  b = Buffers{};
  b.size = (size + 4095) / 4096 * 4096;
  if (kind == Plain) {
    CUDA(cudaMalloc((void **)&b.send, b.size));
    CUDA(cudaMalloc((void **)&b.recv, b.size));
    return;
  }
  NCCL(ncclMemAlloc((void **)&b.send, b.size));
  NCCL(ncclMemAlloc((void **)&b.recv, b.size));
  if (kind == Window) {
    NCCL(ncclCommWindowRegister(c, b.send, b.size, &b.sendWindow, NCCL_WIN_COLL_SYMMETRIC));
    NCCL(ncclCommWindowRegister(c, b.recv, b.size, &b.recvWindow, NCCL_WIN_COLL_SYMMETRIC));
  } else {
    NCCL(ncclCommRegister(c, b.send, b.size, &b.sendHandle));
    NCCL(ncclCommRegister(c, b.recv, b.size, &b.recvHandle));
  }
}

void Rank::release(Kind kind, ncclComm_t c) {
  Buffers &b = buffers;
  CUDA(cudaStreamSynchronize(stream));
  gang->barrier();  // peers may still read
  if (kind == Plain) {
    CUDA(cudaFree(b.send));
    CUDA(cudaFree(b.recv));
    return;
  }
  if (kind == Window) {
    NCCL(ncclCommWindowDeregister(c, b.sendWindow));
    NCCL(ncclCommWindowDeregister(c, b.recvWindow));
  } else {
    NCCL(ncclCommDeregister(c, b.sendHandle));
    NCCL(ncclCommDeregister(c, b.recvHandle));
  }
  gang->barrier();
  NCCL(ncclMemFree(b.send));
  NCCL(ncclMemFree(b.recv));
}

// call enqueues one operation. Like nccl-tests it moves through the buffer from
// one operation to the next, so that large ones do not profit from the cache.
void Rank::call(const Case &c, ncclComm_t comm, size_t turn) {
  size_t stride = (c.bytes() + 511) / 512 * 512;
  size_t turns = o->fixed ? 1 : std::max<size_t>(buffers.size / stride, 1);
  size_t offset = turn % turns * stride;
  void *s = buffers.send + offset, *r = buffers.recv + offset;
  switch (c.coll) {
    case AllReduce: NCCL(ncclAllReduce(s, r, c.count, ncclFloat32, ncclSum, comm, stream)); break;
    case AllGather: NCCL(ncclAllGather(s, r, c.count, ncclFloat32, comm, stream)); break;
    case ReduceScatter: NCCL(ncclReduceScatter(s, r, c.count, ncclFloat32, ncclSum, comm, stream)); break;
    case Broadcast: NCCL(ncclBroadcast(s, r, c.count, ncclFloat32, 0, comm, stream)); break;
    case Reduce: NCCL(ncclReduce(s, r, c.count, ncclFloat32, ncclSum, 0, comm, stream)); break;
    case AllToAll: NCCL(ncclAlltoAll(s, r, c.count, ncclFloat32, comm, stream)); break;
    case SendRecv:
      NCCL(ncclGroupStart());
      NCCL(ncclSend(s, c.count, ncclFloat32, (rank + 1) % n, comm, stream));
      NCCL(ncclRecv(r, c.count, ncclFloat32, (rank + n - 1) % n, comm, stream));
      NCCL(ncclGroupEnd());
      break;
  }
}

// ---- one measurement ----

struct Timing {
  double us, wall;  // of one operation
};

struct Measurement {
  Rank *r;
  Case c;
  ncclComm_t comm;
  cudaGraphExec_t graph = nullptr;
  size_t perLaunch = 1;  // operations

  void launch(size_t turn) {
    if (graph) CUDA(cudaGraphLaunch(graph, r->stream));
    else r->call(c, comm, turn);
  }

  void capture(size_t ops) {
    cudaGraph_t g;
    CUDA(cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeThreadLocal));
    for (size_t i = 0; i < ops; i++) r->call(c, comm, i);
    CUDA(cudaStreamEndCapture(r->stream, &g));
    CUDA(cudaGraphInstantiate(&graph, g, 0));
    CUDA(cudaGraphDestroy(g));
    perLaunch = ops;
  }

  // block times launches back to back; all ranks get the same answer.
  Timing block(size_t launches) {
    r->gang->barrier();
    double t0 = now();
    CUDA(cudaEventRecord(r->begin, r->stream));
    for (size_t i = 0; i < launches; i++) launch(i);
    CUDA(cudaEventRecord(r->end, r->stream));
    CUDA(cudaStreamSynchronize(r->stream));
    double wall = now() - t0;
    float millis = 0;
    CUDA(cudaEventElapsedTime(&millis, r->begin, r->end));
    double ops = double(launches * perLaunch);
    double us = r->gang->max(r->rank, double(millis) * 1e3 / ops);
    double all = r->gang->sum(r->rank, wall * 1e6 / ops);
    return {us, all / r->n};
  }

  // check runs one launch on known data and counts what is wrong on any rank.
  long long check() {
    cudaStream_t s = r->stream;
    fillKernel<<<blocksFor(c.send), 256, 0, s>>>((float *)r->buffers.send, c.send, r->rank);
    CUDA(cudaGetLastError());
    CUDA(cudaMemsetAsync(r->buffers.recv, 0xff, c.recv * 4, s));
    CUDA(cudaMemsetAsync(r->wrong, 0, sizeof *r->wrong, s));
    CUDA(cudaStreamSynchronize(s));
    r->gang->barrier();
    launch(0);
    if (c.coll != Reduce || r->rank == 0) {
      checkKernel<<<blocksFor(c.recv), 256, 0, s>>>((const float *)r->buffers.recv, c.recv, c.coll, r->rank, r->n, 0, c.count, r->wrong);
      CUDA(cudaGetLastError());
    }
    unsigned long long wrong = 0;
    CUDA(cudaMemcpyAsync(&wrong, r->wrong, sizeof wrong, cudaMemcpyDeviceToHost, s));
    CUDA(cudaStreamSynchronize(s));
    return (long long)r->gang->sum(r->rank, double(wrong));
  }
};

static void measure(Rank *r, const Case &c, ncclComm_t comm, const std::string &mode, const std::string &how) {
  const Options &o = *r->o;
  if (r->rank == 0) bound(o.watchdog, "%s of %zu bytes, %s, %s", c.name, c.bytes(), mode.c_str(), how.c_str());
  Measurement m{r, c, comm};
  double budget = o.blockMillis * 1e3;  // µs
  for (int i = 0; i < 3; i++) m.launch(size_t(i));  // the first one connects
  double t = m.block(1).us;
  if (t < 1000) t = m.block(16).us;
  if (how == "graph") {
    m.capture(size_t(std::min(std::max(budget / 4 / t, 1.0), double(o.graphOps))));
    m.launch(0);
    t = m.block(t < 1000 ? 4 : 1).us;
  }
  long long wrong = c.bytes() <= o.check ? m.check() : -1;
  size_t launches = size_t(std::min(std::max(budget / (t * double(m.perLaunch)), 2.0), 5000.0));
  std::vector<Timing> times;
  for (int i = 0; i < o.blocks; i++) times.push_back(m.block(launches));
  std::sort(times.begin(), times.end(), [](const Timing &a, const Timing &b) { return a.us < b.us; });
  Timing median = times[times.size() / 2];
  if (m.graph) CUDA(cudaGraphExecDestroy(m.graph));
  if (r->rank != 0) return;

  double alg = double(c.bytes()) / median.us / 1e3, bus = alg * c.bus;
  int version = 0;
  NCCL(ncclGetVersion(&version));
  printf("{\"lib\":\"nccl\",\"version\":%d,\"coll\":\"%s\",\"bytes\":%zu,\"type\":\"float32\",\"ranks\":%d,\"mode\":\"%s\",\"launch\":\"%s\","
         "\"us\":%.3f,\"wall_us\":%.3f,\"algbw\":%.4f,\"busbw\":%.4f,\"wrong\":%lld,\"iters\":%zu,\"buffers\":\"%s\"}\n",
         version, c.name, c.bytes(), r->n, mode.c_str(), how.c_str(), median.us, median.wall, alg, bus, wrong, launches * m.perLaunch, o.fixed ? "fixed" : "moving");
  fflush(stdout);
  fprintf(stderr, "%12zu %12zu  float  %8s %10.2f %8.2f %8.2f %7lld\n", c.bytes(), c.count, how.c_str(), median.us, alg, bus, wrong);
}

// ---- the table ----

// kindOf says how a mode's buffers are made for a collective, or -1 if NCCL has
// no such way.
static int kindOf(const std::string &mode, const std::string &coll) {
  bool p2p = coll == "alltoall" || coll == "sendrecv";
  if (mode == "default") return Plain;
  if (mode == "registered") return p2p ? Registered : Window;
  return coll == "all_gather" || coll == "alltoall" ? Window : -1;
}

static void table(Rank *r) {
  const Options &o = *r->o;
  double begun = now();
  bool late = false;
  for (const std::string &mode : o.modes) {
    ncclComm_t comm = mode == "ce" ? r->ceComm : r->comm;
    for (int kind : {int(Plain), int(Window), int(Registered)}) {
      bool allocated = false;
      for (const std::string &coll : o.colls) {
        if (late || kindOf(mode, coll) != kind) continue;
        if (!allocated) {
          if (r->rank == 0) bound(o.watchdog, "allocating buffers, %s", mode.c_str());
          r->allocate(Kind(kind), comm, o.end);
        }
        allocated = true;
        if (r->rank == 0)
          fprintf(stderr, "# %s, %d GPUs, %s\n#%11s %12s   type  %8s %10s %8s %8s %7s\n#%11s %12s         %8s %10s %8s %8s\n", coll.c_str(), r->n,
                  mode.c_str(), "size", "count", "launch", "time", "algbw", "busbw", "#wrong", "(B)", "(elements)", "", "(us)", "(GB/s)", "(GB/s)");
        for (size_t bytes = o.begin; bytes <= o.end; bytes *= o.factor) {
          Case c = makeCase(coll, bytes, r->n);
          if (c.count == 0) continue;
          for (const std::string &how : o.launches) {
            late = r->gang->max(r->rank, interrupted || now() - begun > o.limit) > 0;
            if (late) break;
            measure(r, c, comm, mode, how);
          }
          if (late) break;
        }
      }
      if (!allocated) continue;
      if (r->rank == 0) bound(o.watchdog, "freeing buffers, %s", mode.c_str());
      r->release(Kind(kind), comm);
    }
  }
  if (late && r->rank == 0) fprintf(stderr, "# INCOMPLETE: stopped after %.0f s (-limit %.0f)\n", now() - begun, o.limit);
}

// ---- GEMM beside AlltoAll ----

// allToAlls runs AlltoAlls until the meter's window is over, the same number on
// all ranks.
static void allToAlls(Rank *r, const Case &c, ncclComm_t comm, size_t times, Meter *meter) {
  Pipe pipe;
  pipe.open(r->stream);
  size_t turn = 0;
  while (r->gang->max(r->rank, now() >= meter->to + 0.1) == 0) {
    for (size_t i = 0; i < times; i++) r->call(c, comm, turn++);
    if (pipe.filled()) meter->done(double(times) * double(c.bytes()) / 1e9);
  }
  pipe.close();
}

static void gemmBeside(Rank *r) {
  const Options &o = *r->o;
  const double warm = 0.3, lasting = o.seconds > 0 ? o.seconds : 2;
  Gemm gemm;
  gemm.open(o.gemmSize);
  auto window = [&] {  // the same for all ranks
    double from = r->gang->max(r->rank, now()) + warm;
    if (r->rank == 0) bound(warm + lasting + o.watchdog, "a GEMM beside AlltoAll");
    return Meter{from, from + lasting};
  };
  Meter alone = window();
  gemm.run(&alone);
  double gemmAlone = r->gang->sum(r->rank, alone.rate()) / r->n;

  for (const std::string &mode : o.modes) {
    int kind = kindOf(mode, "alltoall");
    ncclComm_t comm = mode == "ce" ? r->ceComm : r->comm;
    r->allocate(Kind(kind), comm, o.end);
    for (size_t bytes = o.begin; bytes <= o.end; bytes *= o.factor) {
      Case c = makeCase("alltoall", bytes, r->n);
      if (c.count == 0) continue;
      Measurement m{r, c, comm};
      m.block(3);
      double t = m.block(8).us;
      size_t times = size_t(std::min(std::max(10e3 / t, 1.0), 500.0));

      Meter comms = window();
      allToAlls(r, c, comm, times, &comms);
      double busAlone = r->gang->sum(r->rank, comms.rate()) / r->n * c.bus;

      Meter both = window();
      comms = both;
      std::thread beside([&] {
        CUDA(cudaSetDevice(r->rank));
        gemm.run(&both);
      });
      allToAlls(r, c, comm, times, &comms);
      beside.join();
      double gemmBoth = r->gang->sum(r->rank, both.rate()) / r->n;
      double busBoth = r->gang->sum(r->rank, comms.rate()) / r->n * c.bus;
      if (r->rank == 0) {
        double percent = gemmAlone > 0 ? 100 * gemmBoth / gemmAlone : 0;
        printf("{\"lib\":\"nccl\",\"test\":\"gemm_beside_alltoall\",\"mode\":\"%s\",\"bytes\":%zu,\"ranks\":%d,\"gemm\":%d,\"gemm_alone_tflops\":%.1f,"
               "\"gemm_beside_tflops\":%.1f,\"gemm_percent\":%.1f,\"busbw_alone\":%.2f,\"busbw_beside\":%.2f}\n",
               mode.c_str(), c.bytes(), r->n, o.gemmSize, gemmAlone, gemmBoth, percent, busAlone, busBoth);
        fflush(stdout);
        fprintf(stderr, "# GEMM %d beside AlltoAll of %zu bytes, %s: %.1f -> %.1f TFLOP/s (%.1f %%), AlltoAll %.1f -> %.1f GB/s bus\n", o.gemmSize,
                c.bytes(), mode.c_str(), gemmAlone, gemmBoth, percent, busAlone, busBoth);
      }
    }
    r->release(Kind(kind), comm);
  }
}

int main(int argc, char **argv) {
  setenv("NCCL_NVLS_ENABLE", "0", 1);  // multicast harms hosts that are shared
  Options o = parse(argc, argv);
  signal(SIGTERM, onSignal);
  signal(SIGINT, onSignal);
  int devices = 0;
  CUDA(cudaGetDeviceCount(&devices));
  int n = o.ranks ? o.ranks : devices;
  if (n < 1 || n > devices || n > maxRanks) die("-g %d: there are %d GPUs", n, devices);
  if (o.gemm || o.gemmOnly) blas.open();
  std::vector<std::thread> threads;
  if (o.gemmOnly) {
    for (int d = 0; d < n; d++) threads.emplace_back([&o, d] { multiply(d, o.gemmSize, o.seconds, 1, interrupted, stdout); });
    for (std::thread &t : threads) t.join();
    return 0;
  }

  bool ce = std::find(o.modes.begin(), o.modes.end(), "ce") != o.modes.end();
  int version = 0;
  NCCL(ncclGetVersion(&version));
  fprintf(stderr, "# NCCL %d (headers %d), %d GPUs, NVLS off\n", version, NCCL_VERSION_CODE, n);
  bound(120, "setting up the communicators");
  std::thread(watch).detach();
  Gang gang(n);
  ncclUniqueId id, ceId;
  NCCL(ncclGetUniqueId(&id));
  NCCL(ncclGetUniqueId(&ceId));
  for (int i = 0; i < n; i++)
    threads.emplace_back([&, i] {
      Rank r{};
      r.o = &o;
      r.gang = &gang;
      r.rank = i;
      r.n = n;
      r.id = id;
      r.ceId = ceId;
      r.open(ce);
      if (o.gemm) gemmBeside(&r);
      else table(&r);
      gang.barrier();
      if (i == 0) bound(30, "closing the communicators");
      r.close();
    });
  for (std::thread &t : threads) t.join();
  fflush(stdout);
  _exit(0);  // the watchdog's thread is still there
}
