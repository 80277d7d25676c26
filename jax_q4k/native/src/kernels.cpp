// The kernels for one instruction set: compiled several times, with another JAX_Q4K_KERNELS and -m flags each.

#include "kernels.h"

#include "activations.h"
#include "attention.h"
#include "products.h"

namespace jax_q4k {

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
