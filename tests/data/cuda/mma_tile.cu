// One warp: d (16 x 8) = a (16 x 16, f16, row-major) . b (16 x 8, f16, stored by columns) + c, f32; and an int8 tile
// d8 (16 x 8) = a8 (16 x 32) . b8 (32 x 8, by columns). Fragments as PTX ISA 9.7.14.5 lays them out.
extern "C" __global__ void mma_tile(const unsigned *a, const unsigned *b, const float *c, float *d, const unsigned *a8,
                                    const unsigned *b8, int *d8) {
  const unsigned lane = threadIdx.x, group = lane / 4, member = lane % 4;
  const unsigned a0 = a[group * 8 + member], a1 = a[(group + 8) * 8 + member];
  const unsigned a2 = a[group * 8 + member + 4], a3 = a[(group + 8) * 8 + member + 4];
  const unsigned b0 = b[group * 8 + member], b1 = b[group * 8 + member + 4];
  float d0 = c[group * 8 + member * 2], d1 = c[group * 8 + member * 2 + 1];
  float d2 = c[(group + 8) * 8 + member * 2], d3 = c[(group + 8) * 8 + member * 2 + 1];
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  d[group * 8 + member * 2] = d0;
  d[group * 8 + member * 2 + 1] = d1;
  d[(group + 8) * 8 + member * 2] = d2;
  d[(group + 8) * 8 + member * 2 + 1] = d3;
  int e0, e1, e2, e3;
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
               : "=r"(e0), "=r"(e1), "=r"(e2), "=r"(e3)
               : "r"(a8[group * 8 + member]), "r"(a8[(group + 8) * 8 + member]), "r"(a8[group * 8 + member + 4]),
                 "r"(a8[(group + 8) * 8 + member + 4]), "r"(b8[group * 8 + member]), "r"(b8[group * 8 + member + 4]),
                 "r"(0));
  *(int2 *)(d8 + group * 8 + member * 2) = make_int2(e0, e1);
  *(int2 *)(d8 + (group + 8) * 8 + member * 2) = make_int2(e2, e3);
}
