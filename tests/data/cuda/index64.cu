// 64-bit indices and arithmetic: products past 2^32, division, remainder and shifts of 64-bit integers.
extern "C" __global__ void index64(const long long *x, unsigned long long *y, float *f, long long stride,
                                   unsigned long long divisor, unsigned n) {
  const unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const long long at = (long long)i * stride;
  const unsigned long long u = (unsigned long long)x[i];
  y[8 * i] = (unsigned long long)at;
  y[8 * i + 1] = u / divisor;
  y[8 * i + 2] = u % divisor;
  y[8 * i + 3] = (unsigned long long)(x[i] / (long long)divisor);
  y[8 * i + 4] = (unsigned long long)(x[i] >> (i & 63));
  y[8 * i + 5] = __umul64hi(u, 0x9e3779b97f4a7c15ull);
  y[8 * i + 6] = (unsigned long long)__popcll(u) | (unsigned long long)__clzll(x[i]) << 8 |
                 (unsigned long long)__ffsll(x[i]) << 16;
  y[8 * i + 7] = __brevll(u);
  f[2 * i] = (float)x[i];
  f[2 * i + 1] = (float)u;
}
