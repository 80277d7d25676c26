// y = (w . x) * scale: int8 rows of k values times an int8 vector, one warp per row, four products an instruction.
extern "C" __global__ void dp4a_matvec(const int4 *w, const int4 *x, const float *scale, float *y, int n, int k) {
  const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= n) return;
  int sum = 0;
  for (int i = lane; i < k / 16; i += 32) {
    const int4 a = __ldg(w + (size_t)row * (k / 16) + i), b = __ldg(x + i);
    sum = __dp4a(a.x, b.x, sum);
    sum = __dp4a(a.y, b.y, sum);
    sum = __dp4a(a.z, b.z, sum);
    sum = __dp4a(a.w, b.w, sum);
  }
  for (int mask = 16; mask > 0; mask >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
  if (lane == 0) y[row] = (float)sum * scale[row];
}
