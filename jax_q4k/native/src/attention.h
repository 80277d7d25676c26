// Online-softmax attention of some queries over tokens in pages, 16 tokens at a time. A query's sums are added in the same
// order whatever other queries share the tokens.

#pragma once

#include <algorithm>
#include <cmath>

#include "activations.h"
#include "conversions.h"
#include "kernels.h"

namespace jax_q4k {

namespace {

// Makes a query's l and o relative to a new running maximum m, which is not below the old one.
inline void rescale(Query& query, float m, int64_t dims) {
  if (query.m == m) return;
  const float factor = query.l == 0 ? 0 : __builtin_expf(query.m - m);
  query.m = m;
  query.l *= factor;
  for (int64_t d = 0; d < dims; d += kLanes) (Floats::load(query.o + d) * Floats::all(factor)).store(query.o + d);
}

inline void merge_query(const Query& part, int64_t dims, Query* to) {
  if (!to->seen) {
    to->m = part.m, to->l = part.l, to->seen = part.seen;
    std::copy_n(part.o, dims, to->o);
    return;
  }
  if (part.l == 0) return;
  const float m = part.m > to->m ? part.m : to->m;
  rescale(*to, m, dims);
  const float factor = __builtin_expf(part.m - m);
  to->l += part.l * factor;
  for (int64_t d = 0; d < dims; d += kLanes)
    fma(Floats::load(part.o + d), Floats::all(factor), Floats::load(to->o + d)).store(to->o + d);
}

template <class T>
void append_vector(const float* x, int64_t count, T* to, float*, int64_t) {
  for (int64_t i = 0; i < count; ++i) from_float(x[i], to + i);
}
template <>
void append_vector(const float* x, int64_t count, int8_t* to, float* scales, int64_t at) {
  scales[at] = quantize_group(x, count, to, 8);
}

constexpr int kFewQueries = 8;  // up to this many queries, keys are read in place and not transposed first

// Number of adjacent vectors whose sums for Q queries fill `sums` registers.
constexpr int at_once(int sums, int queries) {
  const int vectors = sums / (queries * Floats::kParts);
  return vectors < 1 ? 1 : vectors > 8 ? 8 : vectors;
}

// Keeps lanes [from, to); sets the others to -inf.
inline Floats only(const Floats& v, int from, int to) {
  int32_t lane[16];
  for (int i = 0; i < 16; ++i) lane[i] = i;
  const Ints lanes = Ints::load(lane);
  Floats w;
  for (int i = 0; i < Floats::kParts; ++i)
    w.part[i] = ((lanes.part[i] >= from) & (lanes.part[i] < to)) ? v.part[i] : Floats::all(-INFINITY).part[i];
  return w;
}

// One online-softmax step over tokens [from, to) of sixteen, whose products with the queries are `dots`: updates m and
// l; `weights` receives exp(score - m).
template <int Q>
void weigh(const Floats (&dots)[Q], int from, int to, int64_t dims, Query* queries, const AttentionOptions& options,
           Floats (&weights)[Q]) {
  for (int i = 0; i < Q; ++i) {
    Query& query = queries[i];
    query.seen = true;
    Floats scores = dots[i] * Floats::all(options.scale);
    if (options.soft_cap != 0) {
      alignas(64) float capped[kTokens];
      scores.store(capped);
      for (float& score : capped) score = options.soft_cap * __builtin_tanhf(score / options.soft_cap);
      scores = Floats::load(capped);
    }
    if (to - from < kTokens) scores = only(scores, from, to);
    const float top = highest(scores);
    rescale(query, top > query.m ? top : query.m, dims);
    // If all scores so far are -inf, every weight is 0, and not e^NaN.
    weights[i] = exp_of(scores - Floats::all(query.m == -INFINITY ? 0 : query.m));
    query.l += sum(weights[i]);
  }
}

// Prefetches the next sixteen tokens while these are read: into L2, as L1 has no room for both. A prefetch of all at
// once would exceed the outstanding misses of a core.
template <class T>
JAX_Q4K_INLINE void prefetch(const T* row, int64_t d) {
  if (d * sizeof(T) % 64 == 0) __builtin_prefetch(row + d, 0, 2);
}

// Adds values [from, to) of sixteen tokens, times their weights, to the queries' o. `next`: null if these are in L1.
template <int Q, class T, class Next>
void add_values(const T* const* values, Next next, int from, int to, int64_t dims, const Floats (&weights)[Q],
                Query* queries) {
  alignas(64) float weight[Q][kTokens];
  for (int i = 0; i < Q; ++i) weights[i].store(weight[i]);
  auto add = [&](int64_t start, auto vectors) __attribute__((always_inline)) {
    constexpr int D = decltype(vectors)::value;
    Floats sums[D][Q];
#pragma GCC unroll 8
    for (int d = 0; d < D; ++d)
#pragma GCC unroll 8
      for (int i = 0; i < Q; ++i) sums[d][i] = Floats::load(queries[i].o + start + d * kLanes);
    for (int t = from; t < to; ++t)
#pragma GCC unroll 8
      for (int d = 0; d < D; ++d) {
        if constexpr (!std::is_null_pointer_v<Next>) prefetch(next[t], start + d * kLanes);
        const Floats v = load_lanes(values[t] + start + d * kLanes);
#pragma GCC unroll 8
        for (int i = 0; i < Q; ++i) sums[d][i] = fma(Floats::all(weight[i][t]), v, sums[d][i]);
      }
#pragma GCC unroll 8
    for (int d = 0; d < D; ++d)
#pragma GCC unroll 8
      for (int i = 0; i < Q; ++i) sums[d][i].store(queries[i].o + start + d * kLanes);
  };
  constexpr int kVectors = at_once(8, Q);  // as many sums as additions in flight
  int64_t start = 0;
  for (; start + kVectors * kLanes <= dims; start += kVectors * kLanes) add(start, std::integral_constant<int, kVectors>());
  for (; start < dims; start += kLanes) add(start, std::integral_constant<int, 1>());
}

// Addresses of the keys and values of sixteen tokens. A token that does not count has another token's addresses.
template <class T>
struct TokenRows {
  const T *k[kTokens], *v[kTokens];
  alignas(64) float k_scales[kTokens], v_scales[kTokens];  // for int8
};

// Tokens [start, start + 16) of a page from `offset`; those in [from, to) count.
template <class T>
TokenRows<T> rows_of(const Tokens& tokens, int64_t page, int64_t head, int64_t offset, int from, int to) {
  TokenRows<T> rows;
  const int64_t first = page * tokens.page_stride + head * tokens.head_stride;
  const int64_t scale_at = (page * tokens.num_heads + head) * tokens.page_size;
  for (int t = 0; t < kTokens; ++t) {
    const int64_t token = offset + (t < from ? from : t < to ? t : to - 1), at = first + token * tokens.token_stride;
    rows.k[t] = static_cast<const T*>(tokens.k) + at * tokens.head_dim;
    rows.v[t] = tokens.latent ? rows.k[t] : static_cast<const T*>(tokens.v) + at * tokens.value_dim;
    if (!std::is_same_v<T, int8_t>) continue;
    rows.k_scales[t] = tokens.k_scales[scale_at + token];
    rows.v_scales[t] = tokens.latent ? rows.k_scales[t] : tokens.v_scales[scale_at + token];
  }
  return rows;
}

// Products of sixteen tokens with Q queries, from keys in place: for few queries, as in a decode step. The lanes of a sum
// are dimensions d, d + 16, ...
template <int Q, class T>
void multiply_rows(const TokenRows<T>& rows, const TokenRows<T>& next, int64_t head_dim, const Query* queries,
                   Floats (&dots)[Q]) {
  constexpr int kRows = at_once(kWidth == 64 ? 16 : 8, Q);
  Floats parts[Q][kTokens];
#pragma GCC unroll 1
  for (int first = 0; first < kTokens; first += kRows) {
    Floats sums[kRows][Q];
    for (int t = 0; t < kRows; ++t)
      for (int i = 0; i < Q; ++i) sums[t][i] = Floats::all(0);
    for (int64_t d = 0; d < head_dim; d += kLanes)
      for (int t = 0; t < kRows; ++t) {
        prefetch(next.k[first + t], d);
        const Floats k = load_lanes(rows.k[first + t] + d);
        for (int i = 0; i < Q; ++i) sums[t][i] = fma(Floats::load(queries[i].q + d), k, sums[t][i]);
      }
    for (int t = 0; t < kRows; ++t)
      for (int i = 0; i < Q; ++i) parts[i][first + t] = sums[t][i];
  }
  for (int i = 0; i < Q; ++i) {
    transpose(parts[i]);
    for (int apart = kTokens / 2; apart; apart /= 2)
      for (int t = 0; t < apart; ++t) parts[i][t] = parts[i][t] + parts[i][t + apart];
    dots[i] = parts[i][0];
  }
}

// Sixteen tokens as floats, for many queries: k (lanes, head_dim / 16, 16 tokens), v (16 tokens, value_dim).
struct alignas(64) TokenTile {
  float k[kMaxHeadDim][kTokens], v[kTokens][kMaxHeadDim];
};

template <class T>
void load_tile(const TokenRows<T>& rows, const TokenRows<T>& next, const Tokens& tokens, TokenTile* tile) {
  const int64_t steps = tokens.head_dim / kLanes;
  for (int64_t step = 0; step < steps; ++step) {
    Floats k[kTokens];
    const int64_t d = step * kLanes;
    const bool is_value = tokens.latent && d < tokens.value_dim;
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
      prefetch(next.k[t], d);
      k[t] = load_lanes(rows.k[t] + d);
      if (is_value) k[t].store(tile->v[t] + d);
    }
    transpose(k);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) k[i].store(tile->k[i * steps + step]);
  }
  for (int64_t d = 0; !tokens.latent && d < tokens.value_dim; d += kLanes)
    for (int t = 0; t < kTokens; ++t) {
      prefetch(next.v[t], d);
      load_lanes(rows.v[t] + d).store(tile->v[t] + d);
    }
}

// The same products and sums as `multiply_rows`, from a tile: the lanes of a sum are tokens.
template <int Q>
void multiply_tile(const TokenTile& tile, int64_t head_dim, const Query* queries, Floats (&dots)[Q]) {
  constexpr int kSums = 2, kRest = kLanes / kSums;  // dimensions of every 16 that are added at a time
  const int64_t steps = head_dim / kLanes;
  Floats parts[kRest][Q];
#pragma GCC unroll 8
  for (int lane = 0; lane < kRest; ++lane) {
    Floats sums[kSums][Q];
    for (int j = 0; j < kSums; ++j)
      for (int i = 0; i < Q; ++i) sums[j][i] = Floats::all(0);
    for (int64_t step = 0; step < steps; ++step)
#pragma GCC unroll 2
      for (int j = 0; j < kSums; ++j) {
        const int at = lane + j * kRest;
        const Floats k = Floats::load(tile.k[at * steps + step]);
#pragma GCC unroll 4
        for (int i = 0; i < Q; ++i) sums[j][i] = fma(Floats::all(queries[i].q[step * kLanes + at]), k, sums[j][i]);
      }
    for (int apart = kSums / 2; apart; apart /= 2)
      for (int j = 0; j < apart; ++j)
        for (int i = 0; i < Q; ++i) sums[j][i] = sums[j][i] + sums[j + apart][i];
    for (int i = 0; i < Q; ++i) parts[lane][i] = sums[0][i];
  }
  for (int apart = kRest / 2; apart; apart /= 2)
    for (int lane = 0; lane < apart; ++lane)
      for (int i = 0; i < Q; ++i) parts[lane][i] = parts[lane][i] + parts[lane + apart][i];
  for (int i = 0; i < Q; ++i) dots[i] = parts[0][i];
}

template <class T>
void attend_tokens(const Tokens& tokens, const int32_t* pages, int64_t head, int64_t first, int64_t last, Query* queries,
                   int count, const AttentionOptions& options) {
  auto page_of = [&](int64_t at) { return at < last ? int64_t{pages[at / tokens.page_size]} : -1; };
  auto usable = [&](int64_t page) { return page >= 0 && page < tokens.num_pages; };
  const bool few = count <= kFewQueries && !tokens.latent;  // a tile converts latent rows once for keys and values
  TokenTile tile;
  const float* tile_values[kTokens];
  for (int t = 0; t < kTokens; ++t) tile_values[t] = tile.v[t];
  for (int64_t start = first / kTokens * kTokens; start < last; start += kTokens) {
    const int64_t page = page_of(start), next_page = page_of(start + kTokens);
    if (!usable(page)) continue;
    auto bound = [&](int64_t token) {
      return token <= start ? 0 : token - start < kTokens ? static_cast<int>(token - start) : kTokens;
    };
    const int64_t offset = start % tokens.page_size, next_offset = (start + kTokens) % tokens.page_size;
    const auto rows = rows_of<T>(tokens, page, head, offset, bound(first), bound(last));
    const auto next = usable(next_page) ? rows_of<T>(tokens, next_page, head, next_offset, 0, bound(last - kTokens)) : rows;
    if (!few) load_tile(rows, next, tokens, &tile);
    for (int i = 0, taken; i < count; i += taken) {  // several queries that see the same tokens, or one
      const int from = bound(std::max(queries[i].first, first)), to = bound(std::min(queries[i].last, last));
      auto same = [&](int j) {
        return j < count && bound(std::max(queries[j].first, first)) == from && bound(std::min(queries[j].last, last)) == to;
      };
      taken = same(i + 1) && same(i + 2) && same(i + 3) ? 4 : same(i + 1) ? 2 : 1;
      if (from >= to) continue;
      auto attend = [&](auto number) {
        constexpr int Q = decltype(number)::value;
        Floats dots[Q], weights[Q];
        if (few)
          multiply_rows<Q>(rows, next, tokens.head_dim, queries + i, dots);
        else
          multiply_tile<Q>(tile, tokens.head_dim, queries + i, dots);
        if (std::is_same_v<T, int8_t>)
          for (int j = 0; j < Q; ++j) dots[j] = dots[j] * Floats::load(rows.k_scales);
        weigh(dots, from, to, tokens.value_dim, queries + i, options, weights);
        if (std::is_same_v<T, int8_t>)
          for (int j = 0; j < Q; ++j) weights[j] = weights[j] * Floats::load(rows.v_scales);
        if (few)
          add_values<Q>(rows.v, &next.v[0], from, to, tokens.value_dim, weights, queries + i);
        else
          add_values<Q>(tile_values, nullptr, from, to, tokens.value_dim, weights, queries + i);
      };
      taken == 4 ? attend(std::integral_constant<int, 4>()) : taken == 2 ? attend(std::integral_constant<int, 2>())
                                                                          : attend(std::integral_constant<int, 1>());
    }
  }
}

template <class T>
void append_token(const Tokens& tokens, int64_t page, int64_t offset, const float* k, const float* v) {
  for (int64_t head = 0; head < tokens.num_heads; ++head) {
    const int64_t at = page * tokens.page_stride + head * tokens.head_stride + offset * tokens.token_stride;
    const int64_t scale_at = (page * tokens.num_heads + head) * tokens.page_size + offset;
    auto append = [&](const float* x, int64_t dims, void* to, float* scales) {
      append_vector(x + head * dims, dims, static_cast<T*>(to) + at * dims, scales, scale_at);
    };
    append(k, tokens.head_dim, tokens.k, tokens.k_scales);
    if (!tokens.latent) append(v, tokens.value_dim, tokens.v, tokens.v_scales);
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
