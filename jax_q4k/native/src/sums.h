// The order in which products with int8 activations are added. It is the same for few rows of activations (GEMV) and
// for many (GEMM), so that the bits of a row's result do not depend on the rows beside it.
//
// Products of a group of 32 or 16 columns are summed exactly, as integers. Times their scales they are floats, which
// are added span by span, separately for every group of a span. Mins have sums of their own if groups have 32 columns.
// After a part of a row, of at most kPartSpans spans, these sums are added in pairs, as `added` adds lanes. Parts are
// added in order.

#pragma once

#include "formats.h"

namespace jax_q4k {
namespace {

// Number of spans of a part of a row: all but the last part have as many.
inline int64_t part_spans(int64_t spans) {
  const int64_t parts = spans > kPartSpans ? (spans + kPartSpans - 1) / kPartSpans : 1;
  return (spans + parts - 1) / parts;
}

// Lane of the sum of a group of 32 columns in a vector of eight, and its inverse.
constexpr int lane32(int group) { return kWidth == 32 ? (group & 1) | (group & 2) << 1 | (group & 4) >> 1 : group; }
// Lane of the sum of a group of 16 columns, and its inverse.
constexpr int lane16(int group) { return middle_swapped(group); }

// Places in `RowSpan::scale_sum32` of the scale, and of the sum, of a group of 32 columns.
constexpr int scale_at(int group) { return kWidth == 64 ? 2 * group : lane32(group); }
constexpr int sum_at(int group) { return kWidth == 64 ? 2 * group + 1 : 8 + lane32(group); }

// Lane that comes i-th if `lanes` are listed so that `sum` first adds neighbours, then neighbouring pairs, and so on.
constexpr int added_as(int i, int lanes) {
  int lane = 0;
  for (int bit = 1; bit < lanes; bit *= 2) lane = lane * 2 + (i / bit) % 2;
  return lane;
}

template <int... i>
using Steps = std::integer_sequence<int, i...>;

constexpr int kSumsBytes = 128;  // suffice for the sums of a row of activations

// Sums of a row of a matrix times M rows of activations, for groups of 32 columns. `dot(j, steps)` returns the
// products with row j of these steps of span s.
#if defined(JAX_Q4K_AVX512)
template <class Format, int M>
class Sums32 {
  static_assert(M == 1 || M % 2 == 0);
  static constexpr int kVectors = (M + 1) / 2;  // two rows share a vector; of every four lanes, each has two groups

 public:
  struct Scales {
    Floats scale, min;
  };

  static JAX_Q4K_INLINE Scales scales_of(const uint8_t* const*, const Floats& scales) {
    if (M == 1) return {scales, scales};
    Scales found;
    found.scale.part[0] = halved<0>(scales.part[0], scales.part[0]);
    found.min.part[0] = halved<1>(scales.part[0], scales.part[0]);
    return found;
  }
  JAX_Q4K_INLINE void clear() {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) products_[i] = mins_[i] = Floats::all(0);
  }
  template <class Dot>
  JAX_Q4K_INLINE void add(const Scales& scales, const RowSpan* const (&x)[M], int64_t s, const Dot& dot) {
    auto dot_span = [&](int j) __attribute__((always_inline)) { return dot(j, Steps<0, 1, 2, 3>()); };
    if constexpr (M == 1) {  // products in even lanes, mins in odd ones
      const Floats of_x = Floats::load(x[0][s].scale_sum32);
      const Ints products = dot_span(0);
      products_[0] = fma(scales.scale * of_x, to_float(products + neighbours(products)), products_[0]);
      if (!Format::kSigned) mins_[0] = fma(scales.min, of_x, mins_[0]);
    } else {
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) {
        Ints sums;
        sums.part[0] = sums_of_pairs(dot_span(2 * i).part[0], dot_span(2 * i + 1).part[0]);
        const auto a = Floats::load(x[2 * i][s].scale_sum32).part[0], b = Floats::load(x[2 * i + 1][s].scale_sum32).part[0];
        Floats scale, sum;
        scale.part[0] = halved<0>(a, b), sum.part[0] = halved<1>(a, b);
        products_[i] = fma(scales.scale * scale, to_float(sums), products_[i]);
        if (!Format::kSigned) mins_[i] = fma(scales.min, sum, mins_[i]);
      }
    }
  }
  JAX_Q4K_INLINE void add_up(float (&to)[M]) const {
    auto fold = [](auto v, auto apart) __attribute__((always_inline)) { return v + shuffled<lane_apart<decltype(apart)::value>>(v, v); };
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      Floats all = products_[i];
      if (!Format::kSigned) all = all + (M == 1 ? neighbours(mins_[i]) : mins_[i]);
      const auto folded = fold(fold(all.part[0], std::integral_constant<int, 8>()), std::integral_constant<int, 4>());
      if constexpr (M == 1)
        to[0] = folded[0] + folded[2];
      else
        to[2 * i] = folded[0] + folded[1], to[2 * i + 1] = folded[2] + folded[3];
    }
  }

 private:
  Floats products_[kVectors], mins_[kVectors];
};
#else
template <class Format, int M>
class Sums32 {
 public:
  struct Scales {
    EightFloats scale, min;
  };

  static JAX_Q4K_INLINE Scales scales_of(const uint8_t* const*, const Floats& scales) {
    Scales found;
    for (int i = 0; i < EightFloats::kParts; ++i) {
      found.scale.part[i] = halved<0>(scales.part[2 * i], scales.part[2 * i + 1]);
      found.min.part[i] = halved<1>(scales.part[2 * i], scales.part[2 * i + 1]);
    }
    return found;
  }
  JAX_Q4K_INLINE void clear() {
#pragma GCC unroll 8
    for (int j = 0; j < M; ++j) products_[j] = mins_[j] = EightFloats::all(0);
  }
  template <class Dot>
  JAX_Q4K_INLINE void add(const Scales& scales, const RowSpan* const (&x)[M], int64_t s, const Dot& dot) {
#pragma GCC unroll 8
    for (int j = 0; j < M; ++j) {
      const Ints products = dot(j, Steps<0, 1, 2, 3>());
      EightInts sums;
      for (int i = 0; i < EightInts::kParts; ++i) sums.part[i] = sums_of_pairs(products.part[2 * i], products.part[2 * i + 1]);
      products_[j] = fma(scales.scale * EightFloats::load(x[j][s].scale_sum32), to_float(sums), products_[j]);
      if (!Format::kSigned) mins_[j] = fma(scales.min, EightFloats::load(x[j][s].scale_sum32 + 8), mins_[j]);
    }
  }
  JAX_Q4K_INLINE void add_up(float (&to)[M]) const {
#pragma GCC unroll 8
    for (int j = 0; j < M; ++j) to[j] = Format::kSigned ? sum(products_[j]) : sum(products_[j] + mins_[j]);
  }

 private:
  EightFloats products_[M], mins_[M];
};
#endif

// The same for groups of 16 columns.
template <class Format, int M>
class Sums16 {
 public:
  struct Scales {
    Floats scale, min;
  };

  static JAX_Q4K_INLINE Scales scales_of(const uint8_t* const* planes, const Floats& scales) {
    const Floats mins = mins_of<Format>(planes, scales);
    Scales found;
    for (int i = 0; i < Floats::kParts; ++i) {
      found.scale.part[i] = shuffled<middle_swapped>(scales.part[i], scales.part[i]);
      found.min.part[i] = shuffled<middle_swapped>(mins.part[i], mins.part[i]);
    }
    return found;
  }
  JAX_Q4K_INLINE void clear() {
#pragma GCC unroll 8
    for (int j = 0; j < M; ++j) total_[j] = Floats::all(0);
  }
  template <class Dot>
  JAX_Q4K_INLINE void add(const Scales& scales, const RowSpan* const (&x)[M], int64_t s, const Dot& dot) {
#pragma GCC unroll 8
    for (int j = 0; j < M; ++j) {
      const Ints first = dot(j, Steps<0, 1>()), second = dot(j, Steps<2, 3>());  // 16 columns each of every 32
      Ints sums;
      for (int i = 0; i < Ints::kParts; ++i) sums.part[i] = sums_of_pairs(first.part[i], second.part[i]);
      total_[j] = fma(scales.min, Floats::load(x[j][s].sum16), total_[j]);
      total_[j] = fma(scales.scale * Floats::load(x[j][s].scale16), to_float(sums), total_[j]);
    }
  }
  JAX_Q4K_INLINE void add_up(float (&to)[M]) const {
#pragma GCC unroll 8
    for (int j = 0; j < M; ++j) to[j] = sum(total_[j]);
  }

 private:
  Floats total_[M];
};

template <class Format, int M>
using SumsOf = std::conditional_t<Format::kGroup == 32, Sums32<Format, M>, Sums16<Format, M>>;

}  // namespace
}  // namespace jax_q4k
