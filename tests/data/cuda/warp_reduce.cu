// Per warp: float sum by shuffles down, integer sum and maximum by redux, ballot, match and the active mask.
extern "C" __global__ void warp_reduce(const float *x, const int *v, float *sums, int *integers, unsigned *masks) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x, warp = i / 32, lane = i % 32;
  float s = x[i];
  for (int step = 16; step > 0; step /= 2) s += __shfl_down_sync(0xffffffffu, s, step);
  const int total = __reduce_add_sync(0xffffffffu, v[i]);
  const int largest = __reduce_max_sync(0xffffffffu, v[i]);
  const unsigned smallest = __reduce_min_sync(0xffffffffu, (unsigned)v[i]);
  const unsigned bits = __reduce_or_sync(0xffffffffu, (unsigned)v[i]);
  const unsigned positive = __ballot_sync(0xffffffffu, v[i] > 0);
  const unsigned same = __match_any_sync(0xffffffffu, v[i]);
  if (lane == 0) {
    sums[warp] = s;
    integers[4 * warp] = total;
    integers[4 * warp + 1] = largest;
    integers[4 * warp + 2] = (int)smallest;
    integers[4 * warp + 3] = (int)bits;
  }
  masks[2 * i] = same;
  masks[2 * i + 1] = lane < 7 ? (__activemask() & 127u) | (__popc(positive) << 8) : positive;
}
