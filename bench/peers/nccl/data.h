// Part of nccl.cu: what buffers hold, and whether it is right afterwards.

// value is element i of a rank's send buffer: whole numbers of 0 to 15, so that a
// float holds the sum over 64 ranks exactly, with no period that would hide data
// in the wrong place.
__device__ static float value(int rank, size_t i) {
  uint32_t x = uint32_t(i) ^ uint32_t(i >> 32) * 0x85ebca6bu ^ uint32_t(rank + 1) * 0x9e3779b9u;
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return float(x & 15);
}

__global__ void fillKernel(float *p, size_t n, int rank) {
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) p[i] = value(rank, i);
}

enum Coll { AllReduce, AllGather, ReduceScatter, Broadcast, Reduce, AllToAll, SendRecv };

__device__ static float expected(Coll coll, int rank, int ranks, int root, size_t count, size_t i) {
  switch (coll) {
    case AllGather: return value(int(i / count), i % count);
    case AllToAll: return value(int(i / count), size_t(rank) * count + i % count);
    case Broadcast: return value(root, i);
    case SendRecv: return value((rank + ranks - 1) % ranks, i);
    default: break;
  }
  size_t at = coll == ReduceScatter ? size_t(rank) * count + i : i;
  float sum = 0;
  for (int r = 0; r < ranks; r++) sum += value(r, at);
  return sum;
}

__global__ void checkKernel(const float *p, size_t n, Coll coll, int rank, int ranks, int root, size_t count, unsigned long long *wrong) {
  unsigned long long mine = 0;
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
    mine += !(p[i] == expected(coll, rank, ranks, root, count, i));  // not a number is wrong, too
  if (mine) atomicAdd(wrong, mine);
}

static unsigned blocksFor(size_t n) { return unsigned(std::min<size_t>(std::max<size_t>((n + 255) / 256, 1), 1056)); }
