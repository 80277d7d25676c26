// Float functions that nvcc expands to many instructions: expf, logf, tanhf, sinf with a small argument, sqrtf,
// division, rounding modes, conversions to integers that saturate.
extern "C" __global__ void math(const float *x, float *y, int *integers, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const float v = x[i];
  y[8 * i] = expf(v);
  y[8 * i + 1] = logf(fabsf(v));
  y[8 * i + 2] = tanhf(v);
  y[8 * i + 3] = sqrtf(fabsf(v));
  y[8 * i + 4] = 1.0f / (1.0f + __expf(-v));
  y[8 * i + 5] = fmaxf(fminf(v, 2.5f), -2.5f) / 3.0f;
  y[8 * i + 6] = rintf(v) + floorf(v) + ceilf(v) + truncf(v);
  y[8 * i + 7] = erff(v);
  integers[4 * i] = __float2int_rn(v);
  integers[4 * i + 1] = __float2int_rd(v);
  integers[4 * i + 2] = (int)__float2uint_rz(v);
  integers[4 * i + 3] = (int)(signed char)v + (int)(unsigned short)(short)v;
}
