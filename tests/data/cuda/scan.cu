// Inclusive prefix sum of each block's 256 integers: warps by shuffles up, their totals through shared memory.
extern "C" __global__ void scan(const int *x, int *y, int n) {
  __shared__ int totals[8];
  const int i = blockIdx.x * 256 + threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int v = i < n ? x[i] : 0;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, v, step);
    if (lane >= step) v += other;
  }
  if (lane == 31) totals[warp] = v;
  __syncthreads();
  if (warp == 0) {
    int total = lane < 8 ? totals[lane] : 0;
    for (int step = 1; step < 8; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, total, step);
      if (lane >= step) total += other;
    }
    if (lane < 8) totals[lane] = total;
  }
  __syncthreads();
  if (warp > 0) v += totals[warp - 1];
  if (i < n) y[i] = v;
}
