// An operation per element chosen by a code: dense cases, which become a jump table (brx.idx).
extern "C" __global__ void operate(const int *codes, const int *a, const int *b, int *y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const int p = a[i], q = b[i];
  int r;
  switch (codes[i]) {
    case 0: r = p + q; break;
    case 1: r = p - q; break;
    case 2: r = p * q; break;
    case 3: r = __mulhi(p, q); break;
    case 4: r = (int)__funnelshift_l((unsigned)p, (unsigned)q, 11); break;
    case 5: r = __clz(p) * 64 + __popc(q); break;
    case 6: r = (int)__brev((unsigned)p) ^ __ffs(q); break;
    case 7: r = (int)__byte_perm((unsigned)p, (unsigned)q, 0x2415); break;
    case 8: r = __sad(p, q, 7u); break;
    case 9: r = q == 0 ? -1 : p / q; break;
    case 10: r = q == 0 ? -1 : p % q; break;
    case 11: r = (p & q) | (~p & 0x0f0f0f0f) | (p ^ q ^ 0x33333333); break;
    case 12: r = abs(p) - min(p, q) + max(p, q); break;
    case 13: r = p << (q & 31); break;
    case 14: r = p >> (q & 31); break;
    case 15: r = (int)(((unsigned)p >> 5) & 0x7ffu); break;
    default: r = -12345;
  }
  y[i] = r;
}
