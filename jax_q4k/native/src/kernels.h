// The functions that are compiled once per instruction set, as a table; `library.cpp` chooses one when the library is loaded.

#pragma once

#include <cstdint>
#include <string_view>

#define JAX_Q4K_LIST_ALONE
#include "formats.h"
#undef JAX_Q4K_LIST_ALONE

namespace jax_q4k {

constexpr int kSpan = 256;  // columns that rows are walked by
constexpr int kLanes = 16;  // rows of activations that are multiplied at once, where there are many
constexpr int kTile = 64;   // rows of weights that are then unpacked at a time
constexpr int kGemvRows = 8;     // rows of activations up to which weights are unpacked in registers
constexpr int kFloatGemvRows = 4;  // the same of activations that stay floats
constexpr int kDeltaColumns = 32;  // of a state (key_dim, value_dim) that go through all tokens before the next
constexpr int kMaxHeadDim = 576;  // of keys, and of values
constexpr int kTokens = 16;  // that attention sees at a time; pages hold a multiple of it, a sequence's only one may not

// Element types of matrices (the block formats of GGUF, and floats) and of caches' pages.
#define JAX_Q4K_TYPE(name, ...) k##name,
enum Type { JAX_Q4K_FORMATS(JAX_Q4K_TYPE) kF32, kF16, kBF16, kTypes };
#undef JAX_Q4K_TYPE
constexpr int kBlockFormats = kF32;

// How a type is stored (`ptx_kernels/formats`): what GGUF calls it, columns of a block, and the bytes that every plane
// has of kSpan columns.
struct Layout {
  std::string_view name;
  int block, planes, bytes[4];
};
constexpr Layout layout(std::string_view name, int block, int first, int second = 0, int third = 0, int fourth = 0) {
  return {name, block, 1 + (second > 0) + (third > 0) + (fourth > 0), {first, second, third, fourth}};
}
#define JAX_Q4K_LAYOUT(name, ...) layout(#name, __VA_ARGS__),
constexpr Layout kLayouts[kTypes] = {
    JAX_Q4K_FORMATS(JAX_Q4K_LAYOUT) layout("F32", 1, 1024), layout("F16", 1, 512), layout("BF16", 1, 512)};
#undef JAX_Q4K_LAYOUT

// Code books of ggml's formats, that Python fills in when it loads the library: bytes of entries. Those of `iq1_s` are
// eight times the entries and above 8.
struct CodeBooks {
  uint64_t iq1_s[2048], iq2_s[1024], iq2_xs[512], iq2_xxs[256];
  uint32_t iq3_s[512], iq3_xxs[256];
};
extern CodeBooks code_books;

enum PageType { kPageF32, kPageF16, kPageBF16, kPageInt8, kPageE4M3, kPageTypes };

// A matrix (n, k): the planes of its format, or its elements. k is a multiple of the format's block.
struct Matrix {
  int64_t n, k;
  Type type;
  const uint8_t* planes[4];
};

// 256 activations of a row as int8 in groups of 32 (`jax_q4k.quantize_q8_1`), in four steps: step i has columns [8 i, + 8)
// of every group, so that two lanes that sum products of four bytes stay with a group, and for two steps with half of it.
// The sums are scale * sum of values.
struct alignas(64) RowSpan {
  int8_t values[4][64];
  float scale_sum32[8][2];       // per group of 32
  float scale16[16], sum16[16];  // per 16 columns, for formats that scale these
  int32_t zero_point[16];          // -kZeroPoint * the sums of what a lane multiplies
};

// The same of 16 rows, a lane each.
struct alignas(64) BlockSpan {
  int8_t values[kSpan / 4][kLanes][4];
  float scale32[8][kLanes], sum32[8][kLanes], sum16[16][kLanes];
  int32_t zero_point[8][kLanes];
};

// Where keys (head_dim elements each) and values (value_dim) lie: those of (page, head, token) are vector page * page_stride +
// head * head_stride + token * token_stride of their array. Scales (of int8): contiguous (page, head, token). Latent: a key
// begins with its value, and there are no v and v_scales.
struct Tokens {
  void *k, *v;
  float *k_scales, *v_scales;
  int64_t num_pages, num_heads, page_size, head_dim, value_dim;
  int64_t page_stride, head_stride, token_stride;
  bool latent;
};

// A query that sees tokens [first, last) of its sequence, and its running softmax.
struct Query {
  const float* q;
  int64_t first, last;
  float highest, total;
  bool seen;  // a token at all: then sums of nothing but infinities are NaN, and not those of an empty sequence
  float values[kMaxHeadDim];
};

// How two products gate each other (`jax_q4k.ACTIVATION_FUNCTIONS`).
enum Activation { kSilu, kGelu, kSwigluOai, kActivations };
constexpr std::string_view kActivationNames[kActivations] = {"silu", "gelu", "swiglu_oai"};

// Tokens of a head of the gated delta rule: of the first one q and k (key_dim,), v and o from some column on, the decay's
// logarithm and beta; the steps lead to the next token's.
struct DeltaTokens {
  const float *q, *k, *v, *g, *beta;
  float* o;
  int64_t count, key_step, value_step, gate_step, key_dim;
  float scale;
};

struct AttentionOptions {
  float scale, soft_cap;  // soft_cap 0: none
};

struct Kernels {
  const char* name;
  // y = x / sqrt(mean(x^2) + eps) * weight, of k elements.
  void (*normalize)(const float* x, const float* weight, float eps, int64_t k, float* y);
  // x (k,) -> its spans, zeros after k.
  void (*quantize)(const float* x, int64_t k, RowSpan* spans);
  // Span `s` of `count` <= 16 rows, `spans` apart, as a block; the other lanes are zero.
  void (*pack)(const RowSpan* rows, int64_t spans, int count, int64_t s, BlockSpan* block);
  // y[j * stride + r] = row (first + r) . row j of x, r < count, j < m <= kGemvRows.
  void (*gemv[kBlockFormats])(const Matrix&, int64_t first, int64_t count, const RowSpan* x, int m, float* y, int64_t stride);
  // total[r * 16 * blocks + j] = row (first + r) . lane j of the blocks (blocks, spans), r < count <= kTile. Null of
  // formats that files have few tensors of.
  void (*gemm[kBlockFormats])(const Matrix&, int64_t first, int64_t count, const BlockSpan* x, int64_t blocks, float* total);
  // Row `row` as k floats.
  void (*decode[kTypes])(const Matrix&, int64_t row, float* y);
  // y[j * stride + r] = row (first + r) . row j of x (m, k), r < count, j < m <= kFloatGemvRows.
  void (*float_gemv[kTypes])(const Matrix&, int64_t first, int64_t count, const float* x, int m, float* y, int64_t stride);
  // The same of any m, for count <= kTile; uses kTile * (kSpan + m) floats of memory, aligned to 64 bytes.
  void (*float_gemm[kTypes])(const Matrix&, int64_t first, int64_t count, const float* x, int64_t m, float* memory, float* y,
                             int64_t stride);
  // Adds tokens [first, last) of a sequence, whose token i lies in pages[i / page_size], to the queries that see them;
  // those of pages outside [0, num_pages) are left out.
  void (*attend[kPageTypes])(const Tokens&, const int32_t* pages, int64_t head, int64_t first, int64_t last, Query*, int count,
                             const AttentionOptions&);
  // Adds what another part of a query's tokens came to.
  void (*merge)(const Query& part, int64_t value_dim, Query* to);
  // Stores a token's vectors, k (num_heads, head_dim) and, where not latent, v (num_heads, value_dim), in a page.
  void (*append[kPageTypes])(const Tokens&, int64_t page, int64_t offset, const float* k, const float* v);
  // Rotates the first 2 * half dimensions by angles: pairs (2 i, 2 i + 1) if interleaved, else (i, i + half).
  void (*rotate)(float* x, const float* cos, const float* sin, int64_t half, bool interleaved);
  // y = activation(gate, up) of `count` elements.
  void (*gate)(const float* gate, const float* up, int64_t count, Activation activation, float* y);
  // to[j * stride + r] = from[r * pitch + j], j < m <= 16, r < count; 16 of a row of `from` can be read.
  void (*transpose)(const float* from, int64_t pitch, int64_t count, int64_t m, float* to, int64_t stride);
  // The gated delta rule on `columns` columns, kDeltaColumns or 16, of a state with rows `stride` apart; uses key_dim *
  // columns floats of memory, aligned to 64 bytes.
  void (*delta)(const DeltaTokens&, int64_t columns, float* state, int64_t stride, float* memory);
  // y = silu(sum over the last `width` tokens of column * tap) of `count` channels, a multiple of 16. The column of the
  // token at `position` is x, an earlier one is slot t % width of the ring (width, channels); weight (count, width).
  void (*convolve)(const float* x, const float* ring, int64_t channels, int64_t width, int64_t position, const float* weight,
                   int64_t count, float* y);
  // x /= sqrt(sum(x^2) + eps), of a multiple of 16 elements.
  void (*make_unit)(float* x, int64_t count, float eps);
};

// Those of other machines are not there.
extern const Kernels kernels_avx512, kernels_avxvnni, kernels_avx2, kernels_neon, kernels_portable;

extern const Kernels* kernels;  // those in use

}  // namespace jax_q4k
