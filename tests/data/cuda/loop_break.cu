// Steps of the Collatz sequence until 1, with break and continue; threads of a warp leave at different rounds.
extern "C" __global__ void loop_break(const unsigned *x, int *steps, unsigned *peaks, int n, int most) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  unsigned v = x[i], peak = v;
  int count = 0;
  for (;; ++count) {
    if (v == 1 || count == most) break;
    if (v % 2 == 0) {
      v /= 2;
      continue;
    }
    if (v > 0x55555554u) {
      count = -count - 1;
      break;
    }
    v = 3 * v + 1;
    peak = max(peak, v);
  }
  steps[i] = count;
  peaks[i] = peak;
}
