// Generic addresses: one function reads through a pointer that is global, shared or constant; a local array is indexed.
__constant__ float table[8] = {1.0f, -2.0f, 3.5f, 0.25f, 8.0f, -0.5f, 0.0f, 100.0f};
__device__ float bias[4] = {10.0f, 20.0f, 30.0f, 40.0f};

__device__ __noinline__ float third(const float *p) { return p[2]; }

extern "C" __global__ void generic(const float *x, float *y, int which) {
  __shared__ float copy[64];
  const int t = threadIdx.x;
  copy[t] = 2.0f * x[t];
  __syncthreads();
  const float *p = which == 0 ? x : copy;
  float last[5];
  for (int i = 0; i < 5; ++i) last[(i + t) % 5] = p[(t + i) & 63] + table[(i + t) & 7];
  y[t] = third(p + (t & 31)) + third(table + (t & 3)) + last[t % 5] + last[(t * 3) % 5] * bias[t & 3];
}
