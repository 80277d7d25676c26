// Softmax attention of some queries over tokens in pages, 16 tokens at a time, with a running maximum.

#pragma once

#include <cmath>

#include "activations.h"
#include "conversions.h"
#include "kernels.h"

namespace jax_q4k {

namespace {

// A query's sums, now relative to `highest`, which is no lower than before.
inline void rescale(Query& query, float highest, int64_t dims) {
  if (query.highest == highest) return;
  const float factor = query.total == 0 ? 0 : __builtin_expf(query.highest - highest);
  query.highest = highest;
  query.total *= factor;
  for (int64_t d = 0; d < dims; d += kLanes) (Floats::load(query.values + d) * Floats::all(factor)).store(query.values + d);
}

inline void merge_query(const Query& part, int64_t dims, Query* to) {
  to->seen |= part.seen;
  if (part.total == 0) return;
  const float highest = part.highest > to->highest ? part.highest : to->highest;
  rescale(*to, highest, dims);
  const float factor = __builtin_expf(part.highest - highest);
  to->total += part.total * factor;
  for (int64_t d = 0; d < dims; d += kLanes)
    fma(Floats::load(part.values + d), Floats::all(factor), Floats::load(to->values + d)).store(to->values + d);
}

template <class T>
void append_vector(const float* x, int64_t count, T* to, float*, int64_t) {
  for (int64_t i = 0; i < count; ++i) from_float(x[i], to + i);
}
template <>
void append_vector(const float* x, int64_t count, int8_t* to, float* scales, int64_t at) {
  quantize_group(x, count, to, scales + at);
}

// Sixteen tokens as attention reads them: k (dims, 16), v (16, dims).
struct alignas(64) TokenTile {
  float k[kMaxHeadDim][kTokens], v[kTokens][kMaxHeadDim];
};

// Lanes [from, to); the others -inf.
inline Floats only(const Floats& v, int from, int to) {
  int32_t lane[16];
  for (int i = 0; i < 16; ++i) lane[i] = i;
  const Ints lanes = Ints::load(lane);
  Floats w;
  for (int i = 0; i < Floats::kParts; ++i)
    w.part[i] = ((lanes.part[i] >= from) & (lanes.part[i] < to)) ? v.part[i] : Floats::all(-INFINITY).part[i];
  return w;
}

// Adds tokens [from, to) of a tile, which all of Q queries see, to their sums.
template <int Q>
void attend_tile(const TokenTile& tile, int64_t dims, int from, int to, Query* queries, const AttentionOptions& options) {
  Floats sums[2][Q], weights[Q];  // two chains of additions each
  for (int i = 0; i < Q; ++i) sums[0][i] = sums[1][i] = Floats::all(0);
  for (int64_t d = 0; d < dims; d += 2)
    for (int j = 0; j < 2; ++j) {
      const Floats k = Floats::load(tile.k[d + j]);
      for (int i = 0; i < Q; ++i) sums[j][i] = fma(Floats::all(queries[i].q[d + j]), k, sums[j][i]);
    }
  for (int i = 0; i < Q; ++i) {
    Query& query = queries[i];
    query.seen = true;
    Floats scores = (sums[0][i] + sums[1][i]) * Floats::all(options.scale);
    if (options.soft_cap != 0) {
      alignas(64) float capped[kTokens];
      scores.store(capped);
      for (float& score : capped) score = options.soft_cap * __builtin_tanhf(score / options.soft_cap);
      scores = Floats::load(capped);
    }
    if (to - from < kTokens) scores = only(scores, from, to);
    const float top = highest(scores);
    rescale(query, top > query.highest ? top : query.highest, dims);
    // Where all are -inf so far: every weight is 0, and not e^NaN.
    weights[i] = exp_of(scores - Floats::all(query.highest == -INFINITY ? 0 : query.highest));
    query.total += sum(weights[i]);
  }
  alignas(64) float weight[Q][kTokens];
  for (int i = 0; i < Q; ++i) weights[i].store(weight[i]);
  for (int64_t d = 0; d < dims; d += kLanes) {
    Floats values[2][Q];
    for (int i = 0; i < Q; ++i) values[0][i] = Floats::load(queries[i].values + d), values[1][i] = Floats::all(0);
    auto add = [&](int t, Floats (&to)[Q]) __attribute__((always_inline)) {
      const Floats v = Floats::load(tile.v[t] + d);
      for (int i = 0; i < Q; ++i) to[i] = fma(Floats::all(weight[i][t]), v, to[i]);
    };
    int t = from;
    for (; t + 2 <= to; t += 2) add(t, values[0]), add(t + 1, values[1]);
    if (t < to) add(t, values[0]);
    for (int i = 0; i < Q; ++i) (values[0][i] + values[1][i]).store(queries[i].values + d);
  }
}

// Tokens [start, start + 16) of a page from `offset` on, of which [first, last) of the sequence count; others are zero.
template <class T>
void load_tile(const Tokens& tokens, int64_t page, int64_t head, int64_t offset, int64_t start, int64_t first, int64_t last,
               TokenTile* tile) {
  static const T nothing[kMaxHeadDim] = {};
  const int64_t at = page * tokens.page_stride + head * tokens.head_stride + offset * tokens.token_stride;
  const int64_t scale_at = (page * tokens.num_heads + head) * tokens.page_size + offset;
  const T *keys[kTokens], *values[kTokens];
  float scales[2][kTokens];  // of keys and of values, where these are int8
  for (int t = 0; t < kTokens; ++t) {
    const bool counts = start + t >= first && start + t < last;
    keys[t] = counts ? static_cast<const T*>(tokens.k) + at + t * tokens.token_stride : nothing;
    values[t] = counts ? static_cast<const T*>(tokens.v) + at + t * tokens.token_stride : nothing;
    if (!std::is_same_v<T, int8_t>) continue;
    scales[0][t] = counts ? tokens.k_scales[scale_at + t] : 0;
    scales[1][t] = counts ? tokens.v_scales[scale_at + t] : 0;
  }
  for (int64_t d = 0; d < tokens.head_dim; d += kLanes) {
    Floats k[kTokens];
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
      k[t] = load_lanes(keys[t] + d);
      Floats v = load_lanes(values[t] + d);
      if (std::is_same_v<T, int8_t>) {
        k[t] = k[t] * Floats::all(scales[0][t]);
        v = v * Floats::all(scales[1][t]);
      }
      v.store(tile->v[t] + d);
    }
    transpose(k);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) k[i].store(tile->k[d + i]);
  }
}

// Asks for the 16 tokens of a page from `offset` on.
template <class T>
void prefetch_tile(const Tokens& tokens, int64_t page, int64_t head, int64_t offset) {
  const int64_t at = page * tokens.page_stride + head * tokens.head_stride + offset * tokens.token_stride;
  for (int64_t t = 0; t < kTokens; ++t)
    for (int64_t d = 0; d < tokens.head_dim; d += 64 / sizeof(T)) {
      __builtin_prefetch(static_cast<const T*>(tokens.k) + at + t * tokens.token_stride + d);
      __builtin_prefetch(static_cast<const T*>(tokens.v) + at + t * tokens.token_stride + d);
    }
}

template <class T>
void attend_tokens(const Tokens& tokens, const int32_t* pages, int64_t head, int64_t first, int64_t last, Query* queries,
                   int count, const AttentionOptions& options) {
  auto page_of = [&](int64_t at) { return at < last ? int64_t{pages[at / tokens.page_size]} : -1; };
  auto usable = [&](int64_t page) { return page >= 0 && page < tokens.num_pages; };
  TokenTile tile;
  for (int64_t start = first / kTokens * kTokens; start < last; start += kTokens) {
    const int64_t page = page_of(start), next = page_of(start + kTokens);
    if (usable(page)) load_tile<T>(tokens, page, head, start % tokens.page_size, start, first, last, &tile);
    if (usable(next)) prefetch_tile<T>(tokens, next, head, (start + kTokens) % tokens.page_size);
    if (!usable(page)) continue;
    auto bound = [&](int64_t token) {
      return token <= start ? 0 : token - start < kTokens ? static_cast<int>(token - start) : kTokens;
    };
    for (int i = 0, taken; i < count; i += taken) {  // four queries that see the same tokens, or one
      const int from = bound(queries[i].first), to = bound(queries[i].last);
      auto same = [&](int j) { return j < count && bound(queries[j].first) == from && bound(queries[j].last) == to; };
      taken = same(i + 1) && same(i + 2) && same(i + 3) ? 4 : 1;
      if (from < to) (taken == 4 ? attend_tile<4> : attend_tile<1>)(tile, tokens.head_dim, from, to, queries + i, options);
    }
  }
}

template <class T>
void append_token(const Tokens& tokens, int64_t page, int64_t offset, const float* k, const float* v) {
  for (int64_t head = 0; head < tokens.num_heads; ++head) {
    const int64_t at = page * tokens.page_stride + head * tokens.head_stride + offset * tokens.token_stride;
    const int64_t scale_at = (page * tokens.num_heads + head) * tokens.page_size + offset;
    append_vector(k + head * tokens.head_dim, tokens.head_dim, static_cast<T*>(tokens.k) + at, tokens.k_scales, scale_at);
    append_vector(v + head * tokens.head_dim, tokens.head_dim, static_cast<T*>(tokens.v) + at, tokens.v_scales, scale_at);
  }
}

inline void rotate_pairs(float* x, const float* cos, const float* sin, int64_t half, bool interleaved) {
  const int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : half;
  for (int64_t i = 0; i < half; ++i) {
    float *first = x + i * step, *second = first + apart;
    const float a = *first, b = *second;
    *first = a * cos[i] - b * sin[i];
    *second = a * sin[i] + b * cos[i];
  }
}

}  // namespace
}  // namespace jax_q4k
