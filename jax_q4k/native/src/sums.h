// The order in which products with int8 activations are added. It is the same for few rows of activations (GEMV) and
// for many (GEMM), so that the bits of a row's result do not depend on the rows beside it.
//
// Products of a group of 32 or 16 columns are summed exactly, as integers. Times their scales they are floats, which
// are added span by span, separately for every group of a span. Mins have sums of their own if groups have 32 columns.
// After a part of a row, of at most kPartSpans spans, these sums are added in pairs, as `sum` adds lanes. Parts are added
// in order.

#pragma once

#include "formats.h"

namespace jax_q4k {
namespace {

// Number of spans of a part of a row: all but the last part have as many.
inline int64_t part_spans(int64_t spans) {
  const int64_t parts = spans > kPartSpans ? (spans + kPartSpans - 1) / kPartSpans : 1;
  return (spans + parts - 1) / parts;
}

// Group of 32 columns in a lane of eight, and its inverse.
constexpr int lane32(int i) { return kWidth == 32 ? (i & 1) | (i & 2) << 1 | (i & 4) >> 1 : i; }
// Group of 16 columns in a lane of sixteen, and its inverse.
constexpr int lane16(int i) { return middle_swapped(i); }

// Places in `RowSpan::scale_sum32` of the scale, and of the sum, of a group of 32 columns.
constexpr int scale_at(int group) { return kWidth == 64 ? 2 * group : lane32(group); }
constexpr int sum_at(int group) { return kWidth == 64 ? 2 * group + 1 : 8 + lane32(group); }

// Lane that `sum` adds as the i-th of `lanes`, if it added one after the other what now are pairs, pairs of pairs and
// so on.
constexpr int added_as(int i, int lanes) {
  int lane = 0;
  for (int bit = 1; bit < lanes; bit *= 2) lane = lane * 2 + (i / bit) % 2;
  return lane;
}

#if defined(JAX_Q4K_AVX512)
// Sums of groups of 32 columns: products in even lanes, mins in odd ones.
template <class Format>
class Sums32 {
 public:
  using Scales = Floats;  // scale and min of a group alternate

  static JAX_Q4K_INLINE Scales scales_of(const uint8_t* const*, const Floats& scales) { return scales; }
  JAX_Q4K_INLINE void clear() { total_ = Floats::all(0); }
  JAX_Q4K_INLINE void add(const Scales& scales, const Ints& products, const RowSpan& x) {
    const Ints sums = products + neighbours(products);
    const Floats of_x = Floats::load(x.scale_sum32);
    total_ = Format::kSigned ? fma(scales * of_x, to_float(sums), total_)
                             : fma(times_in_even_lanes(scales, of_x), to_float_in_even_lanes(sums, of_x), total_);
  }
  JAX_Q4K_INLINE float added() const {
    const auto both = folded<Floats::kPartLanes / 2, 2>(total_.part[0], [](auto a, auto b) { return a + b; });
    return Format::kSigned ? both[0] : both[0] + both[1];
  }

 private:
  Floats total_;
};
#else
// Sums of groups of 32 columns, in the order of `lane32`.
template <class Format>
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
  JAX_Q4K_INLINE void clear() { products_ = mins_ = EightFloats::all(0); }
  JAX_Q4K_INLINE void add(const Scales& scales, const Ints& products, const RowSpan& x) {
    EightInts sums;
    for (int i = 0; i < EightInts::kParts; ++i) sums.part[i] = sums_of_pairs(products.part[2 * i], products.part[2 * i + 1]);
    products_ = fma(scales.scale * EightFloats::load(x.scale_sum32), to_float(sums), products_);
    if (!Format::kSigned) mins_ = fma(scales.min, EightFloats::load(x.scale_sum32 + 8), mins_);
  }
  JAX_Q4K_INLINE float added() const { return Format::kSigned ? sum(products_) : sum(products_) + sum(mins_); }

 private:
  EightFloats products_, mins_;
};
#endif

// Sums of groups of 16 columns, in the order of `lane16`.
template <class Format>
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
  JAX_Q4K_INLINE void clear() { total_ = Floats::all(0); }
  // `first` and `second`: products of the first, and of the second, 16 columns of every 32.
  JAX_Q4K_INLINE void add(const Scales& scales, const Ints& first, const Ints& second, const RowSpan& x) {
    Ints sums;
    for (int i = 0; i < Ints::kParts; ++i) sums.part[i] = sums_of_pairs(first.part[i], second.part[i]);
    total_ = fma(scales.min, Floats::load(x.sum16), total_);
    total_ = fma(scales.scale * Floats::load(x.scale16), to_float(sums), total_);
  }
  JAX_Q4K_INLINE float added() const { return sum(total_); }

 private:
  Floats total_;
};

template <class Format>
using SumsOf = std::conditional_t<Format::kGroup == 32, Sums32<Format>, Sums16<Format>>;

}  // namespace
}  // namespace jax_q4k
