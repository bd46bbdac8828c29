// A GEMM that keeps a GPU busy, to measure what communication beside it costs.
// nccl.cu runs it beside NCCL, gemm.cu inside any program.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#ifndef CUBLAS_LIBRARY
#define CUBLAS_LIBRARY "libcublas.so"
#endif

[[noreturn]] static void die(const char *format, ...) {
  va_list args;
  va_start(args, format);
  fputs("nccl: ", stderr);
  vfprintf(stderr, format, args);
  fputc('\n', stderr);
  va_end(args);
  fflush(stdout);
  _exit(1);  // other threads may sit inside CUDA
}

static void cudaCheck(cudaError_t e, const char *what) {
  if (e != cudaSuccess) die("%s: %s (%s)", what, cudaGetErrorName(e), cudaGetErrorString(e));
}

#define CUDA(call) cudaCheck((call), #call)

static double now() {  // seconds
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

// The few entries of cuBLAS that a GEMM needs, found at run time: cuBLAS is in the
// toolkit of one machine and in a Python package of another.
struct Blas {
  int (*create)(void **);
  int (*setStream)(void *, cudaStream_t);
  int (*gemm)(void *handle, int transa, int transb, int m, int n, int k, const void *alpha, const void *a, int atype, int lda, const void *b,
              int btype, int ldb, const void *beta, void *c, int ctype, int ldc, int compute, int algo);

  void open() {
    void *lib = nullptr;
    std::string tried;
    const char *env = getenv("CUBLAS_LIBRARY_PATH");
    for (const char *path : {env ? env : CUBLAS_LIBRARY, CUBLAS_LIBRARY, "libcublas.so.13", "libcublas.so.12", "libcublas.so"}) {
      std::string light = path;  // what it needs lies beside it
      size_t at = light.rfind("libcublas.");
      if (at != std::string::npos) dlopen(light.replace(at, 9, "libcublasLt").c_str(), RTLD_NOW | RTLD_GLOBAL);
      lib = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
      if (lib) break;
      tried += std::string("\n  ") + dlerror();
    }
    if (!lib) die("no cuBLAS (CUBLAS_LIBRARY_PATH may name it):%s", tried.c_str());
    find(lib, "cublasCreate_v2", (void **)&create);
    find(lib, "cublasSetStream_v2", (void **)&setStream);
    find(lib, "cublasGemmEx", (void **)&gemm);
  }

 private:
  static void find(void *lib, const char *name, void **entry) {
    *entry = dlsym(lib, name);
    if (!*entry) die("cuBLAS has no %s", name);
  }
};

static Blas blas;

// Random bits make a bfloat16 of [1, 2) or (-2, -1]: zeros would draw less power,
// and run faster than any model's data.
__global__ void randomKernel(uint16_t *p, size_t n, uint32_t seed) {
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
    uint32_t x = uint32_t(i) * 0x9e3779b9u ^ seed;
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    p[i] = uint16_t(0x3f80u | (x & 0x807fu));
  }
}

// Meter turns work seen done at times into a rate, over the part that lies in a
// window of time.
struct Meter {
  double from, to;  // seconds
  double first = 0, last = 0, work = 0;

  void done(double amount) {
    double t = now();
    if (t < from || t > to) return;
    if (first == 0) first = t;
    else work += amount;
    last = t;
  }
  double rate() const { return last > first ? work / (last - first) : 0; }
};

// Pipe keeps two batches of work in a stream, and waits for the older.
struct Pipe {
  cudaStream_t stream = nullptr;
  cudaEvent_t events[2] = {};
  size_t batches = 0;

  void open(cudaStream_t s) {
    stream = s;
    for (cudaEvent_t &e : events) CUDA(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
  }
  // filled is called after a batch was enqueued; true: the one before is done.
  bool filled() {
    CUDA(cudaEventRecord(events[batches & 1], stream));
    if (batches++ == 0) return false;
    CUDA(cudaEventSynchronize(events[batches & 1]));
    return true;
  }
  void close() {
    CUDA(cudaStreamSynchronize(stream));
    for (cudaEvent_t e : events) CUDA(cudaEventDestroy(e));
  }
};

struct Gemm {
  int size;
  void *handle = nullptr;
  uint16_t *a, *b, *c;
  cudaStream_t stream;

  void open(int n) {
    size = n;
    size_t elements = size_t(n) * n;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (uint16_t **p : {&a, &b, &c}) CUDA(cudaMalloc((void **)p, elements * 2));
    randomKernel<<<1056, 256, 0, stream>>>(a, elements, 1);
    randomKernel<<<1056, 256, 0, stream>>>(b, elements, 2);
    CUDA(cudaGetLastError());
    check(blas.create(&handle), "cublasCreate");
    check(blas.setStream(handle, stream), "cublasSetStream");
    batch(3);
    CUDA(cudaStreamSynchronize(stream));
  }

  // batch enqueues times products of bfloat16, summed in float32.
  void batch(int times) {
    const float one = 1, zero = 0;
    const int bf16 = 14;  // CUDA_R_16BF
    for (int i = 0; i < times; i++)
      check(blas.gemm(handle, 0, 0, size, size, size, &one, a, bf16, size, b, bf16, size, &zero, c, bf16, size,
                      68 /* CUBLAS_COMPUTE_32F */, -1 /* CUBLAS_GEMM_DEFAULT */),
            "cublasGemmEx");
  }

  double teraflop() const { return 2.0 * size * size * size / 1e12; }

  // run multiplies until the meter's window is over, and a bit longer, so that
  // whoever runs beside it has company to the end.
  void run(Meter *meter) {
    Pipe pipe;
    pipe.open(stream);
    const int times = 8;
    while (now() < meter->to + 0.1) {
      batch(times);
      if (pipe.filled()) meter->done(times * teraflop());
    }
    pipe.close();
  }

 private:
  static void check(int status, const char *what) {
    if (status != 0) die("%s: cuBLAS status %d", what, status);
  }
};

// Turns are how long a GEMM is busy, and idle after that, in seconds; never idle where busy is 0.
struct Turns { double busy = 0, idle = 0; };

// multiply writes a line each period seconds, until stop or the time is up (0: never).
static void multiply(int device, int size, double seconds, double period, const std::atomic<bool> &stop, FILE *out, Turns turns = {}) {
  CUDA(cudaSetDevice(device));
  Gemm gemm;
  gemm.open(size);
  Pipe pipe;
  pipe.open(gemm.stream);
  const int times = 8;
  double begun = now(), since = begun, work = 0, turn = begun;
  while (!stop && (seconds <= 0 || now() - begun < seconds)) {
    gemm.batch(times);
    if (pipe.filled()) work += times * gemm.teraflop();
    double t = now();
    if (turns.busy > 0 && t - turn >= turns.busy) {
      usleep(useconds_t(turns.idle * 1e6));
      turn = t = now();
    }
    if (t - since < period) continue;
    fprintf(out, "{\"test\":\"gemm\",\"device\":%d,\"seconds\":%.2f,\"gemm\":%d,\"tflops\":%.1f}\n", device, t - begun, size, work / (t - since));
    fflush(out);
    since = t;
    work = 0;
  }
  pipe.close();
}
