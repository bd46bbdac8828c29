// libgemm.so multiplies matrices inside a program that is not ours to change:
//
//	LD_PRELOAD=./libgemm.so GEMM_OUT=gemm lockstep perf alltoall --device cuda ...
//
// Every process that has a GEMM_RANK_VAR (default LOCKSTEP_LOCAL_RANK) in its
// environment gets a thread that keeps the GPU of that number busy and appends its
// speed to GEMM_OUT.<number>, two lines a second, until the process ends. It has to
// be inside: kernels of two processes take turns on a GPU, and do not overlap.
//
// GEMM_TURNS=BUSY,IDLE has it come and go, in seconds. GEMM_RANKS=N, without a rank in the
// environment, keeps GPUs 0 to N-1 busy from one process.
#include "gemm.h"

#include <thread>

static std::atomic<bool> never{false};

static void beside(int number, std::string path) {
  FILE *out = fopen((path + "." + std::to_string(number)).c_str(), "a");
  if (!out) die("cannot write %s.%d", path.c_str(), number);
  int devices = 0;
  CUDA(cudaGetDeviceCount(&devices));
  blas.open();
  const char *size = getenv("GEMM_SIZE");
  Turns turns;
  if (const char *t = getenv("GEMM_TURNS"); t && sscanf(t, "%lf,%lf", &turns.busy, &turns.idle) != 2) die("GEMM_TURNS=%s: want BUSY,IDLE", t);
  multiply(number % devices, size ? atoi(size) : 8192, 0, 0.5, never, out, turns);
}

__attribute__((constructor)) static void start() {
  const char *path = getenv("GEMM_OUT"), *var = getenv("GEMM_RANK_VAR");
  const char *number = getenv(var ? var : "LOCKSTEP_LOCAL_RANK");
  const char *ranks = getenv("GEMM_RANKS");
  for (int i = 0; path && !number && ranks && i < atoi(ranks); i++) std::thread(beside, i, std::string(path)).detach();
  if (path && number) std::thread(beside, atoi(number), std::string(path)).detach();
}
