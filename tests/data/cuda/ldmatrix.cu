// One warp: four 8 x 8 tiles of a 16 x 16 f16 matrix from shared memory, as they lie and transposed.
extern "C" __global__ void ldmatrix(const uint4 *x, unsigned *straight, unsigned *transposed) {
  __shared__ __align__(16) uint4 tile[32];
  const unsigned lane = threadIdx.x;
  tile[lane] = x[lane];
  __syncthreads();
  const unsigned address = (unsigned)__cvta_generic_to_shared(tile + (lane % 16) * 2 + lane / 16);
  unsigned a, b, c, d;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(address));
  ((uint4 *)straight)[lane] = make_uint4(a, b, c, d);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(address));
  ((uint4 *)transposed)[lane] = make_uint4(a, b, c, d);
}
