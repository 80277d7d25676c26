// Softmax attention of some queries over tokens in pages, 16 tokens at a time, with a running maximum.

#pragma once

#include <cmath>

#include "activations.h"
#include "conversions.h"
#include "kernels.h"

namespace jax_q4k {

namespace {

// e^x for x <= 0, to about 1e-7 of it; 0 below -87.
inline Floats exp_of(const Floats& x) {
  const Floats low = Floats::all(-87.0f);
  Floats y;
  for (int i = 0; i < Floats::kParts; ++i) {
    auto part = x.part[i] < low.part[i] ? low.part[i] : x.part[i];
    auto shifted = part * 1.44269504f + 12582912.0f;  // its low bits are the integer
    auto n = shifted - 12582912.0f;
    auto f = part - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts
    auto p = f * (1.0f / 5040) + 1.0f / 720;
    p = p * f + 1.0f / 120, p = p * f + 1.0f / 24, p = p * f + 1.0f / 6, p = p * f + 0.5f, p = p * f + 1.0f, p = p * f + 1.0f;
    using Lanes = typename Ints::Part;
    auto power = ((Lanes)shifted << 23) + (Lanes)(Floats::Part{} + 1.0f);
    p *= (Floats::Part)power;
    y.part[i] = x.part[i] < low.part[i] ? Floats::Part{} : p;
  }
  return y;
}

// A query's sums, now relative to `highest`, which is no lower than before.
inline void rescale(Query& query, float highest, int dims) {
  if (query.highest == highest) return;
  const float factor = query.total == 0 ? 0 : __builtin_expf(query.highest - highest);
  query.highest = highest;
  query.total *= factor;
  for (int d = 0; d < dims; ++d) query.values[d] *= factor;
}

inline void merge_query(const Query& part, int64_t head_dim, Query* to) {
  if (part.total == 0) return;
  const float highest = !(part.highest <= to->highest) ? part.highest : to->highest;
  rescale(*to, highest, static_cast<int>(head_dim));
  const float factor = __builtin_expf(part.highest - highest);
  to->total += part.total * factor;
  for (int64_t d = 0; d < head_dim; ++d) to->values[d] += part.values[d] * factor;
}

template <class T>
void append_vector(const float* x, int64_t count, T* to, float*) {
  for (int64_t i = 0; i < count; ++i) from_float(x[i], to + i);
}
template <>
void append_vector(const float* x, int64_t count, int8_t* to, float* scale) { quantize_group(x, count, to, scale); }

// Adds 16 tokens from `start` of the sequence on, which lie from `offset` of a page on, to the queries that see them.
template <class T>
void attend_tokens(const Tokens& tokens, int64_t page, int64_t head, int64_t offset, int64_t start, Query* queries,
                   int count, const AttentionOptions& options) {
  const int dims = static_cast<int>(tokens.head_dim);
  alignas(64) float k[kMaxHeadDim][kTokens], v[kTokens][kMaxHeadDim];
  int64_t first = INT64_MAX, last = 0;  // seen by any query
  for (int i = 0; i < count; ++i) {
    first = queries[i].first < first ? queries[i].first : first;
    last = queries[i].last > last ? queries[i].last : last;
  }
  const int64_t at = page * tokens.page_stride + head * tokens.head_stride + offset * tokens.token_stride;
  const int64_t scale_at = (page * tokens.num_heads + head) * tokens.page_size + offset;
  for (int t = 0; t < kTokens; ++t) {
    alignas(64) float row[kMaxHeadDim] = {};
    const bool seen = start + t >= first && start + t < last;
    if (seen) {
      const int64_t from = at + t * tokens.token_stride;
      load_floats(static_cast<const T*>(tokens.k) + from, dims, row);
      load_floats(static_cast<const T*>(tokens.v) + from, dims, v[t]);
      if (tokens.k_scales) {
        const float k_scale = tokens.k_scales[scale_at + t], v_scale = tokens.v_scales[scale_at + t];
        for (int d = 0; d < dims; ++d) row[d] *= k_scale, v[t][d] *= v_scale;
      }
    }
    for (int d = 0; d < dims; ++d) k[d][t] = row[d];
  }
  for (int i = 0; i < count; ++i) {
    Query& query = queries[i];
    const int from = query.first > start ? static_cast<int>(query.first - start) : 0;
    const int to = query.last - start < kTokens ? static_cast<int>(query.last - start) : kTokens;
    if (from >= to) continue;
    Floats sums[4];
    for (auto& part : sums) part = Floats::all(0);
    for (int d = 0; d < dims; d += 4)
      for (int j = 0; j < 4; ++j) sums[j] = fma(Floats::all(query.q[d + j]), Floats::load(k[d + j]), sums[j]);
    alignas(64) float scores[kTokens], weights[kTokens];
    ((sums[0] + sums[1]) + (sums[2] + sums[3])).store(scores);
    float highest = query.highest;
    for (int t = from; t < to; ++t) {
      scores[t] *= options.scale;
      if (options.soft_cap != 0) scores[t] = options.soft_cap * __builtin_tanhf(scores[t] / options.soft_cap);
      highest = !(scores[t] <= highest) ? scores[t] : highest;  // NaN too
    }
    for (int t = 0; t < kTokens; ++t) scores[t] = t >= from && t < to ? scores[t] - highest : -INFINITY;
    exp_of(Floats::load(scores)).store(weights);
    rescale(query, highest, dims);
    for (int t = from; t < to; ++t) query.total += weights[t];
    for (int d = 0; d < dims; d += kTokens) {
      Floats values = Floats::load(query.values + d);
      for (int t = from; t < to; ++t) values = fma(Floats::all(weights[t]), Floats::load(v[t] + d), values);
      values.store(query.values + d);
    }
  }
}

template <class T>
void append_token(const Tokens& tokens, int64_t page, int64_t offset, const float* k, const float* v) {
  for (int64_t head = 0; head < tokens.num_heads; ++head) {
    const int64_t at = page * tokens.page_stride + head * tokens.head_stride + offset * tokens.token_stride;
    const int64_t scale_at = (page * tokens.num_heads + head) * tokens.page_size + offset;
    append_vector(k + head * tokens.head_dim, tokens.head_dim, static_cast<T*>(tokens.k) + at, tokens.k_scales + scale_at);
    append_vector(v + head * tokens.head_dim, tokens.head_dim, static_cast<T*>(tokens.v) + at, tokens.v_scales + scale_at);
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
