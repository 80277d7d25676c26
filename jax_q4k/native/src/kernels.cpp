// The kernels for one instruction set: compiled several times, with another JAX_Q4K_KERNELS and -m flags each.

#include "kernels.h"

#include "activations.h"
#include "attention.h"
#include "products.h"

namespace jax_q4k {
namespace {

void gate(const float* gates, const float* up, int64_t count, bool gelu, float* y) {
  for (int64_t i = 0; i < count; i += kLanes) {
    alignas(64) float ends[2][kLanes] = {};  // where fewer are left
    const int64_t n = count - i < kLanes ? count - i : kLanes;
    if (n < kLanes) std::memcpy(ends[0], gates + i, n * 4), std::memcpy(ends[1], up + i, n * 4);
    const Floats x = Floats::load(n < kLanes ? ends[0] : gates + i), one = Floats::all(1);
    // GELU by tanh: x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 x^3), so that both are x / (1 + e^-z)
    const Floats z = gelu ? Floats::all(1.5957691216f) * fma(Floats::all(0.044715f) * x * x, x, x) : x;
    const Floats e = exp_of(Floats::all(0) - larger(z, Floats::all(0) - z));  // e^-|z|, which cannot overflow
    Floats sigmoid;
    for (int p = 0; p < Floats::kParts; ++p) sigmoid.part[p] = z.part[p] > 0 ? one.part[p] : e.part[p];
    const Floats gated = x * (sigmoid / (one + e)) * Floats::load(n < kLanes ? ends[1] : up + i);
    gated.store(ends[0]);
    std::memcpy(y + i, ends[0], n * 4);
  }
}

// to[j * stride + r] = from[r * pitch + j], j < m <= 16, r < count.
void transpose_totals(const float* from, int64_t pitch, int64_t count, int64_t m, float* to, int64_t stride) {
  for (int64_t r = 0; r < count; r += kLanes) {
    const int64_t n = count - r < kLanes ? count - r : kLanes;
    Floats square[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) square[i] = Floats::load(from + (r + (i < n ? i : 0)) * pitch);
    transpose(square);
    for (int64_t j = 0; j < m; ++j) {
      float row[kLanes];
      square[j].store(row);
      std::memcpy(to + j * stride + r, row, n * 4);
    }
  }
}

}  // namespace

#define JAX_Q4K_FORMATS(of) of<Q4_K>, of<Q5_K>, of<Q6_K>, of<Q8_0>, of<Q5_0>, of<Q4_0>, of<Q5_1>
#define JAX_Q4K_PAGES(of) of<float>, of<Half>, of<Bf16>, of<int8_t>, of<E4m3>

const Kernels JAX_Q4K_KERNELS = {
    JAX_Q4K_NAME,
    normalize_row,
    quantize_row,
    pack_rows,
    {JAX_Q4K_FORMATS(few)},
    {JAX_Q4K_FORMATS(many)},
    {JAX_Q4K_FORMATS(decode_packed), decode_floats<float>, decode_floats<Half>, decode_floats<Bf16>},
    dot_rows,
    {JAX_Q4K_PAGES(attend_tokens)},
    merge_query,
    {JAX_Q4K_PAGES(append_token)},
    rotate_pairs,
    gate,
    transpose_totals,
};

}  // namespace jax_q4k
