// A kernel set: compiled once per instruction set, each time with its own JAX_Q4K_KERNELS and -m flags.

#include "kernels.h"

#include "activations.h"
#include "attention.h"
#include "codebook_search.h"
#include "delta.h"
#include "float_products.h"
#include "formats.h"
#include "products.h"

namespace jax_q4k {

#define JAX_Q4K_GEMV(format, ...) gemv<format>,
#define JAX_Q4K_GEMM(format, ...) gemm<format>,
#define JAX_Q4K_DECODE(format, ...) decode_row<PackedRow<format>>,
#define JAX_Q4K_FLOAT_GEMV(format, ...) float_gemv<PackedRow<format>>,
#define JAX_Q4K_FLOAT_GEMM(format, ...) float_gemm<PackedRow<format>>,
#define JAX_Q4K_FLOATS(of) of<FloatRow<float>>, of<FloatRow<Half>>, of<FloatRow<Bf16>>
#define JAX_Q4K_SEARCH(format, ...) search_codebook<Book##format>,
#define JAX_Q4K_PAGES(of) of<float>, of<Half>, of<Bf16>, of<int8_t>, of<E4m3>

const Kernels JAX_Q4K_KERNELS = {
    JAX_Q4K_NAME,
    normalize_row,
    quantize_row,
    pack_rows,
    {JAX_Q4K_FORMATS(JAX_Q4K_GEMV)},
    {JAX_Q4K_FORMATS(JAX_Q4K_GEMM)},
    {JAX_Q4K_FORMATS(JAX_Q4K_DECODE) JAX_Q4K_FLOATS(decode_row)},
    {JAX_Q4K_FORMATS(JAX_Q4K_FLOAT_GEMV) JAX_Q4K_FLOATS(float_gemv)},
    {JAX_Q4K_FORMATS(JAX_Q4K_FLOAT_GEMM) JAX_Q4K_FLOATS(float_gemm)},
    {JAX_Q4K_PAGES(attend_tokens)},
    merge_query,
    {JAX_Q4K_PAGES(append_token)},
    rotate_pairs,
    gate,
    transpose_totals,
    delta,
    convolve,
    make_unit,
    {JAX_Q4K_BOOKS(JAX_Q4K_SEARCH)},
};

}  // namespace jax_q4k
