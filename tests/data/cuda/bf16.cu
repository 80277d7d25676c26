// f32 <-> bf16, singly and in pairs, and fused arithmetic on pairs.
#include <cuda_bf16.h>
extern "C" __global__ void bf16(const float *x, const float *y, __nv_bfloat16 *out, float *back, __nv_bfloat162 *pairs,
                                int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const __nv_bfloat16 h = __float2bfloat16_rn(x[i]);
  out[2 * i] = h;
  out[2 * i + 1] = __float2bfloat16_rz(x[i]);
  back[i] = __bfloat162float(h);
  const __nv_bfloat162 a = __floats2bfloat162_rn(x[i], y[i]), b = __floats2bfloat162_rn(y[i], x[i]);
  pairs[4 * i] = __hfma2(a, b, a);
  pairs[4 * i + 1] = a;
  pairs[4 * i + 2] = __hadd2_rn(a, b);
  pairs[4 * i + 3] = __hmul2_rn(a, __hneg2(b));
}
