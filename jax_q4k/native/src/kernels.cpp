// The kernels for one instruction set: compiled several times, with another JAX_Q4K_KERNELS and -m flags each.

#include "kernels.h"

#include "activations.h"
#include "attention.h"
#include "formats.h"
#include "products.h"

namespace jax_q4k {

#define JAX_Q4K_GEMV(format, ...) gemv<format>,
#define JAX_Q4K_GEMM(format, ...) gemm<format>,
#define JAX_Q4K_DECODE(format, ...) decode_packed<format>,
#define JAX_Q4K_PAGES(of) of<float>, of<Half>, of<Bf16>, of<int8_t>, of<E4m3>

const Kernels JAX_Q4K_KERNELS = {
    JAX_Q4K_NAME,
    normalize_row,
    quantize_row,
    pack_rows,
    {JAX_Q4K_FORMATS(JAX_Q4K_GEMV)},
    {JAX_Q4K_FORMATS(JAX_Q4K_GEMM)},
    {JAX_Q4K_FORMATS(JAX_Q4K_DECODE) decode_floats<float>, decode_floats<Half>, decode_floats<Bf16>},
    dot_rows,
    {JAX_Q4K_PAGES(attend_tokens)},
    merge_query,
    {JAX_Q4K_PAGES(append_token)},
    rotate_pairs,
    gate,
    transpose_totals,
};

}  // namespace jax_q4k
