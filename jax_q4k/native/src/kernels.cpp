// The kernels for one instruction set: compiled several times, with another JAX_Q4K_KERNELS and -m flags each.

#include "kernels.h"

#include "activations.h"
#include "attention.h"
#include "products.h"

namespace jax_q4k {
namespace {

void gate(const float* gates, const float* up, int64_t count, bool gelu, float* y) {
  for (int64_t i = 0; i < count; i += kLanes) {
    alignas(64) float x[kLanes] = {}, e[kLanes];
    const int n = count - i < kLanes ? static_cast<int>(count - i) : kLanes;
    for (int j = 0; j < n; ++j) {
      // GELU by tanh: x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 x^3), so that both are x / (1 + e^-z)
      const float g = gates[i + j];
      x[j] = gelu ? 1.5957691216f * (g + 0.044715f * g * g * g) : g;
    }
    // by e^-|z|, which cannot overflow
    alignas(64) float negative[kLanes];
    for (int j = 0; j < kLanes; ++j) negative[j] = x[j] > 0 ? -x[j] : x[j];
    exp_of(Floats::load(negative)).store(e);
    for (int j = 0; j < n; ++j) {
      const float sigmoid = (x[j] > 0 ? 1.0f : e[j]) / (1.0f + e[j]);
      y[i + j] = gates[i + j] * sigmoid * up[i + j];
    }
  }
}

}  // namespace

#define JAX_Q4K_FORMATS(of) of<Q4_K>, of<Q5_K>, of<Q6_K>, of<Q8_0>, of<Q5_0>, of<Q4_0>, of<Q5_1>
#define JAX_Q4K_FLOATS_OF(Format) floats<decode_packed<Format>>
#define JAX_Q4K_PAGES(of) of<float>, of<Half>, of<Bf16>, of<int8_t>, of<E4m3>

const Kernels JAX_Q4K_KERNELS = {
    JAX_Q4K_NAME,
    normalize_row,
    quantize_row,
    pack_rows,
    {JAX_Q4K_FORMATS(few)},
    {JAX_Q4K_FORMATS(many)},
    {JAX_Q4K_FLOATS_OF(Q4_K), JAX_Q4K_FLOATS_OF(Q5_K), JAX_Q4K_FLOATS_OF(Q6_K), JAX_Q4K_FLOATS_OF(Q8_0),
     JAX_Q4K_FLOATS_OF(Q5_0), JAX_Q4K_FLOATS_OF(Q4_0), JAX_Q4K_FLOATS_OF(Q5_1), floats<decode_floats<float>>,
     floats<decode_floats<Half>>, floats<decode_floats<Bf16>>},
    {JAX_Q4K_FORMATS(decode_packed), decode_floats<float>, decode_floats<Half>, decode_floats<Bf16>},
    {JAX_Q4K_PAGES(attend_tokens)},
    merge_query,
    {JAX_Q4K_PAGES(append_token)},
    rotate_pairs,
    gate,
};

}  // namespace jax_q4k
