// An indexed branch (brx.idx), which nvcc makes of no switch of its own accord: y = the code's case, 0 to 4.
extern "C" __global__ void jump_table(const unsigned *codes, unsigned *y) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned r;
  asm volatile(
      "{\n"
      "  .reg .u32 t;\n"
      "TABLE: .branchtargets ZERO, ONE, TWO, THREE, FOUR;\n"
      "  brx.idx %1, TABLE;\n"
      "ZERO: mov.u32 %0, 7;\n"
      "  bra.uni DONE;\n"
      "ONE: shl.b32 %0, %2, 3;\n"
      "  bra.uni DONE;\n"
      "TWO: not.b32 t, %2;\n"
      "  add.u32 %0, t, 100;\n"
      "  bra.uni DONE;\n"
      "THREE:\n"
      "FOUR: mul.lo.u32 %0, %2, %2;\n"
      "DONE:\n"
      "}\n"
      : "=r"(r)
      : "r"(codes[i]), "r"(i));
  y[i] = r;
}
