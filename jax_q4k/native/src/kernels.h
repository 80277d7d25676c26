// Table of the functions that are compiled once per instruction set; `library.cpp` selects one when the library is
// loaded.

#pragma once

#include <cstdint>
#include <string_view>

#define JAX_Q4K_LIST_ALONE
#include "formats.h"
#undef JAX_Q4K_LIST_ALONE

namespace jax_q4k {

constexpr int kSpan = 256;  // columns of a row that are processed at a time
constexpr int kLanes = 16;  // rows of activations per block, one per lane, if there are many
constexpr int kTile = 64;   // rows of weights that are then unpacked at a time
constexpr int kPartSpans = 16;  // maximum spans of a row whose sums are kept apart by group; they are then added up
constexpr int kUnpackedBytes = 2 * kTile * kPartSpans * kSpan;  // memory for a part of a tile; 1.5 times the weights are enough
constexpr int kGemvRows = 8;     // maximum rows of activations for which weights are unpacked in registers
constexpr int kFloatGemvRows = 4;  // the same for float activations
constexpr int kDeltaColumns = 32;  // columns of a state (key_dim, value_dim) that process all tokens before the next columns
constexpr int kMaxHeadDim = 576;  // of keys, and of values
constexpr int kTokens = 16;  // tokens per step of attention; page sizes are multiples, except in a contiguous cache

// Element types of matrices (GGUF's block formats, and floats) and of cache pages.
#define JAX_Q4K_TYPE(name, ...) k##name,
enum Type { JAX_Q4K_FORMATS(JAX_Q4K_TYPE) kF32, kF16, kBF16, kTypes };
#undef JAX_Q4K_TYPE
constexpr int kBlockFormats = kF32;

// Storage of a type (`ptx_kernels/formats`): GGUF's name, columns of a block, and the bytes of each plane for kSpan
// columns.
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

// Codebooks of ggml's formats, which Python fills in when it loads the library: entries of several bytes. Bytes of
// `iq1_s` are 8 * value + 8.
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

// 256 activations of a row as int8 in groups of 32 (`jax_q4k.quantize_q8_1`), in four steps. Step i has columns
// [8 i, 8 i + 8) of every group, so that two lanes, which sum products of four bytes, belong to a group, and for two
// steps to half a group. The sums are -scale * sum of values. `sums.h` defines the order of scales and sums.
struct alignas(64) RowSpan {
  int8_t values[4][64];
  float scale_sum32[16];         // per group of 32
  float scale16[16], sum16[16];  // per 16 columns, for formats that scale these
  int32_t zero_point[16];          // -kZeroPoint * the sum of the values that a lane multiplies
};

// The same for 16 rows, one per lane. Columns and groups are in order.
struct alignas(64) BlockSpan {
  int8_t values[kSpan / 4][kLanes][4];
  float scale32[8][kLanes], sum32[8][kLanes], sum16[16][kLanes];
  int32_t zero_point[8][kLanes];
};

// Layout of keys (head_dim elements each) and values (value_dim). Those of (page, head, token) are vector page *
// page_stride + head * head_stride + token * token_stride of their array. Scales, for int8, are contiguous (page, head,
// token). Latent: a key begins with its value, and v and v_scales are null.
struct Tokens {
  void *k, *v;
  float *k_scales, *v_scales;
  int64_t num_pages, num_heads, page_size, head_dim, value_dim;
  int64_t page_stride, head_stride, token_stride;
  bool latent;
};

// A query that sees tokens [first, last) of its sequence, and its online softmax: running maximum m, sum l, output o.
struct Query {
  const float* q;
  int64_t first, last;
  float* o;  // (value_dim,)
  float m, l;
  bool seen;  // whether it saw any token: if so, sums of infinities are NaN, and not those of an empty sequence
};

// Activation that gates one product by another (`jax_q4k.ACTIVATION_FUNCTIONS`).
enum Activation { kSilu, kGelu, kSwigluOai, kActivations };
constexpr std::string_view kActivationNames[kActivations] = {"silu", "gelu", "swiglu_oai"};

// Tokens of a head of the gated delta rule. Pointers are to the first token's q and k (key_dim,), v and o from some
// column, g and beta; the steps lead to the next token's.
struct DeltaTokens {
  const float *q, *k, *v, *g, *beta;
  float* o;
  int64_t count, key_step, value_step, gate_step, key_dim;
  float scale;
};

struct AttentionOptions {
  float scale, soft_cap;  // soft_cap 0: none
};

// Formats whose values are entries of a codebook (`codebook_search.h`).
#define JAX_Q4K_BOOK(name, ...) kBook##name,
enum BookFormat { JAX_Q4K_BOOKS(JAX_Q4K_BOOK) kBookFormats };
#undef JAX_Q4K_BOOK
// Signs of their values: one bit each; seven bits for eight values, of which an even number is negative; or part of the
// entries, whose values are then raised or lowered by 1 / 8.
enum Signs { kFreeSigns, kEvenSigns, kTernary };

// Blocks of 256 floats for which codebook entries are searched, and where the results go. weight = d * unit * (2 * scale +
// 1) * signed value of an entry.
constexpr int64_t kMostPairs = 96;
struct CodebookSearch {
  int64_t blocks;
  const float *x, *w;     // values, and weights of their squared errors (blocks, 256)
  int64_t num_entries;    // at most 2048
  const uint8_t* digits;  // levels of the entries' values (num_entries, 4 or 8)
  const float* levels;    // 3 or 8 values
  int64_t num_pairs;      // at most kMostPairs
  const uint8_t* pairs;   // second halves of entries whose errors are compared first (num_pairs, 2): numbers of 81 or 64 halves,
                          // or that number plus an earlier pair's
  float unit;
  float* d;           // (blocks,) f16 values
  uint8_t* scales;    // (blocks, 8 or 16)
  uint16_t* entries;  // (blocks, 32 or 64)
  uint8_t* signs;     // (blocks, 32): bits of eight negative values; if values are ternary, 1 if 1 / 8 is subtracted
};

struct Kernels {
  const char* name;
  // y = x / sqrt(mean(x^2) + eps) * weight, for k elements.
  void (*normalize)(const float* x, const float* weight, float eps, int64_t k, float* y);
  // Quantizes x (k,) to spans, zero-padded after k.
  void (*quantize)(const float* x, int64_t k, RowSpan* spans);
  // Packs span `s` of `count` <= 16 rows, `spans` apart, into a block; the other lanes are zero.
  void (*pack)(const RowSpan* rows, int64_t spans, int count, int64_t s, BlockSpan* block);
  // y[j * stride + r] = row (first + r) . row j of x, r < count, j < m <= kGemvRows.
  void (*gemv[kBlockFormats])(const Matrix&, int64_t first, int64_t count, const RowSpan* x, int m, float* y, int64_t stride);
  // total[r * 16 * blocks + j] = row (first + r) . lane j of the blocks (blocks, spans), r < count <= kTile; uses
  // kUnpackedBytes of memory, aligned to 64 bytes. The bits are those of `gemv`.
  void (*gemm[kBlockFormats])(const Matrix&, int64_t first, int64_t count, const BlockSpan* x, int64_t blocks, void* memory,
                              float* total);
  // Decodes row `row` to k floats.
  void (*decode[kTypes])(const Matrix&, int64_t row, float* y);
  // y[j * stride + r] = row (first + r) . row j of x (m, k), r < count, j < m <= kFloatGemvRows.
  void (*float_gemv[kTypes])(const Matrix&, int64_t first, int64_t count, const float* x, int m, float* y, int64_t stride);
  // The same for any m and for count <= kTile; uses kTile * (kSpan + m) floats of memory, aligned to 64 bytes.
  void (*float_gemm[kTypes])(const Matrix&, int64_t first, int64_t count, const float* x, int64_t m, float* memory, float* y,
                             int64_t stride);
  // Attends to tokens [first, last) of a sequence with the queries that see them. Token i is in pages[i / page_size];
  // pages outside [0, num_pages) are skipped.
  void (*attend[kPageTypes])(const Tokens&, const int32_t* pages, int64_t head, int64_t first, int64_t last, Query*, int count,
                             const AttentionOptions&);
  // Merges the softmax of another part of a query's tokens.
  void (*merge)(const Query& part, int64_t value_dim, Query* to);
  // Stores a token's k (num_heads, head_dim) and, unless latent, v (num_heads, value_dim) in a page.
  void (*append[kPageTypes])(const Tokens&, int64_t page, int64_t offset, const float* k, const float* v);
  // Rotates the first 2 * half dimensions by angles: pairs (2 i, 2 i + 1) if interleaved, else (i, i + half).
  void (*rotate)(float* x, const float* cos, const float* sin, int64_t half, bool interleaved);
  // y = activation(gate, up), for `count` elements.
  void (*gate)(const float* gate, const float* up, int64_t count, Activation activation, float* y);
  // to[j * stride + r] = from[r * pitch + j], j < m <= 16, r < count; 16 elements of each row of `from` are readable.
  void (*transpose)(const float* from, int64_t pitch, int64_t count, int64_t m, float* to, int64_t stride);
  // Runs the gated delta rule on `columns` columns, kDeltaColumns or 16, of a state with rows `stride` apart; uses
  // key_dim * columns floats of memory, aligned to 64 bytes.
  void (*delta)(const DeltaTokens&, int64_t columns, float* state, int64_t stride, float* memory);
  // y = silu(sum over the last `width` tokens of column * tap), for `count` channels, a multiple of 16. The column of
  // the token at `position` is x; that of an earlier token t is slot t % width of the ring (width, channels); weight
  // (count, width).
  void (*convolve)(const float* x, const float* ring, int64_t channels, int64_t width, int64_t position, const float* weight,
                   int64_t count, float* y);
  // x /= sqrt(sum(x^2) + eps), for a multiple of 16 elements.
  void (*make_unit)(float* x, int64_t count, float eps);
  // Finds the entries, signs, scales and d of blocks with a small weighted error.
  void (*search_codebook[kBookFormats])(const CodebookSearch&);
};

// Only the sets for this machine are defined.
extern const Kernels kernels_avx512, kernels_avxvnni, kernels_avx2, kernels_neon, kernels_portable;

extern const Kernels* kernels;  // the set in use

}  // namespace jax_q4k
