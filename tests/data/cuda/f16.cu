// f32 <-> f16 in every rounding mode, and arithmetic on pairs.
#include <cuda_fp16.h>
extern "C" __global__ void f16(const float *x, const float *y, __half *out, float *back, __half2 *pairs, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const __half h = __float2half_rn(x[i]), g = __float2half_rn(y[i]);
  out[4 * i] = h;
  out[4 * i + 1] = __float2half_rz(x[i]);
  out[4 * i + 2] = __float2half_rd(x[i]);
  out[4 * i + 3] = __float2half_ru(x[i]);
  back[3 * i] = __half2float(h);
  back[3 * i + 1] = __half2float(__hadd_rn(h, g)) + __half2float(__hmul_rn(h, g));
  back[3 * i + 2] = (float)__half2int_rn(h) + (float)__half2int_rz(g);
  const __half2 a = __floats2half2_rn(x[i], y[i]), b = __halves2half2(g, h);
  pairs[3 * i] = __hfma2(a, b, a);
  pairs[3 * i + 1] = __hadd2_rn(a, b);
  pairs[3 * i + 2] = __hmax2(a, __hneg2(b));
}
