// One sum and one maximum per block, by a tree in shared memory. blockDim.x = 128.
extern "C" __global__ void block_reduce(const float *x, float *sums, float *maxima, int n) {
  __shared__ float sum[128];
  __shared__ float maximum[128];
  const int t = threadIdx.x, i = blockIdx.x * 128 + t;
  sum[t] = i < n ? x[i] : 0.0f;
  maximum[t] = i < n ? x[i] : -INFINITY;
  __syncthreads();
  for (int half = 64; half > 0; half >>= 1) {
    if (t < half) {
      sum[t] += sum[t + half];
      maximum[t] = fmaxf(maximum[t], maximum[t + half]);
    }
    __syncthreads();
  }
  if (t == 0) {
    sums[blockIdx.x] = sum[0];
    maxima[blockIdx.x] = maximum[0];
  }
}
