// Counts of 64 byte values: atomics in shared memory, then in global memory. blockDim.x = 128.
extern "C" __global__ void histogram(const unsigned char *x, unsigned *counts, unsigned *largest, int n) {
  __shared__ unsigned local[64];
  if (threadIdx.x < 64) local[threadIdx.x] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    atomicAdd(&local[x[i] & 63], 1u);
    atomicMax(largest, (unsigned)x[i]);
  }
  __syncthreads();
  if (threadIdx.x < 64 && local[threadIdx.x]) atomicAdd(&counts[threadIdx.x], local[threadIdx.x]);
}
