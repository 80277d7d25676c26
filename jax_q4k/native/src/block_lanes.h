// Sixteen blocks of floats at a time, one per lane, for searches of scales and minimums: sums over a block's values are sums
// of vectors, and blocks do not affect each other's results.

#pragma once

#include <algorithm>
#include <cmath>

#include "conversions.h"
#include "quantizers.h"

namespace jax_q4k {
namespace {

constexpr int kLanes = 16;
constexpr float kLargestHalf = 65504, kSmallestHalf = 0x1p-24f, kSmallestNormal = 0x1p-126f;
constexpr float kRoundoff = 0x1p-24f;  // largest relative error of one rounding
constexpr float kRounds = 12582912;  // 1.5 * 2^23: adding and subtracting it rounds a float below 2^22 to an integer

// 1 / x, and 0 where x is 0 or subnormal, which XLA's threads take for 0.
inline float reciprocal(float x) { return std::fabs(x) >= kSmallestNormal ? 1 / x : 0; }
JAX_Q4K_INLINE Floats magnitude(const Floats& x) { return larger(x, Floats::all(0) - x); }
JAX_Q4K_INLINE Floats reciprocal(const Floats& x) {
  return where_less(magnitude(x), Floats::all(kSmallestNormal), Floats::all(0), Floats::all(1) / x);
}
// Nearest integers, which may be no more than 2^22 away from 0; and those from `low` to `high`.
JAX_Q4K_INLINE Floats rounded(const Floats& x) {
  const Floats shifted = x + Floats::all(kRounds);
  return shifted - Floats::all(kRounds);
}
JAX_Q4K_INLINE Floats rounded(const Floats& x, float low, float high) {
  return rounded(smaller(larger(x, Floats::all(low)), Floats::all(high)));
}
JAX_Q4K_INLINE bool any_less(const Floats& a, const Floats& b) {
  float lanes[kLanes];
  where_less(a, b, Floats::all(-1), Floats::all(0)).store(lanes);
  return std::any_of(lanes, lanes + kLanes, [](float less) { return less != 0; });
}

// The finite f16 nearest to x.
JAX_Q4K_INLINE Floats nearest_half(const Floats& x) {
  const Floats finite = smaller(larger(x, Floats::all(-kLargestHalf)), Floats::all(kLargestHalf));
  Floats y;
#if defined(JAX_Q4K_AVX512)
  y.part[0] = (Floats::Part)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)finite.part[0], _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  for (int i = 0; i < Floats::kParts; ++i)
    y.part[i] = (Floats::Part)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)finite.part[i], _MM_FROUND_TO_NEAREST_INT));
#else
  float lanes[kLanes];
  finite.store(lanes);
  for (float& lane : lanes) {
    Half nearest;
    from_float(lane, &nearest);
    lane = to_float(nearest);
  }
  y = Floats::load(lanes);
#endif
  return y;
}
inline void store_half(float x, uint8_t* to) {
  Half nearest;
  from_float(x, &nearest);
  std::memcpy(to, &nearest, sizeof nearest);
}

JAX_Q4K_INLINE Floats square_root(const Floats& x) {
  float lanes[kLanes];
  x.store(lanes);
  for (float& lane : lanes) lane = std::sqrt(lane);
  return Floats::load(lanes);
}

// Values of sixteen blocks, and weights of their squared errors: importance * sqrt(1 + x^2 / (2 * mean of x^2)).
template <int kValues, int kSubs = 1>
struct Lanes {
  static constexpr int kBlock = kValues * kSubs;
  Floats x[kBlock], w[kBlock];  // (sub-blocks, values)

  // Reads up to sixteen blocks; other lanes are zeros. Returns false if a value is NaN or exceeds the largest magnitude.
  bool read(const FloatBlocks& s, int64_t start, int count) {
    Floats squares = Floats::all(0), most = Floats::all(0);
    for (int at = 0; at < kBlock; at += kLanes) {
      auto &values = *reinterpret_cast<Floats(*)[kLanes]>(x + at), &importance = *reinterpret_cast<Floats(*)[kLanes]>(w + at);
      for (int b = 0; b < kLanes; ++b) values[b] = b < count ? Floats::load(s.x + (start + b) * kBlock + at) : Floats::all(0);
      transpose(values);
      for (const Floats& v : values) most = larger(most, magnitude(v));
      if (s.period == 1) {
        for (int i = 0; i < kLanes; ++i) importance[i] = Floats::all(s.importance[at + i]);
      } else {
        for (int b = 0; b < kLanes; ++b) importance[b] = Floats::load(s.importance + (s.first + start + b) % s.period * kBlock + at);
        transpose(importance);
      }
    }
    for (int i = 0; i < kValues; ++i)  // in the order of XLA's sums: rounding errors choose among candidates that fit exactly
      for (int sub = 0; sub < kSubs; ++sub) squares = squares + x[sub * kValues + i] * x[sub * kValues + i];
    float greatest[kLanes], total[kLanes];
    most.store(greatest), squares.store(total);
    for (int b = 0; b < kLanes; ++b)
      if (!(greatest[b] <= s.largest) || std::isnan(total[b])) return false;
    const Floats mean = squares * Floats::all(1.0f / kBlock), over = reciprocal(mean + mean);
    for (int i = 0; i < kBlock; ++i) w[i] = w[i] * square_root(Floats::all(1) + x[i] * x[i] * over);
    return true;
  }
};

// Calls search(lanes, count, x, packed) for every sixteen blocks; x and `packed` are those of the first one.
template <int kValues, int kSubs, int kBytes, class Search>
JAX_Q4K_INLINE bool each_sixteen(const FloatBlocks& s, Search search) {
  Lanes<kValues, kSubs> lanes;
  constexpr int kBlock = kValues * kSubs;
  for (int64_t start = 0; start < s.blocks; start += kLanes) {
    const int count = static_cast<int>(s.blocks - start < kLanes ? s.blocks - start : kLanes);
    if (!lanes.read(s, start, count)) return false;
    search(lanes, count, s.x + start * kBlock, s.packed + start * kBytes);
  }
  return true;
}

// Quants of one block, from 0 on: (x + offset) / step rounded to integers from `low`, which is even, to `high`, minus `low`.
template <int kValues>
JAX_Q4K_INLINE void quantize_values(const float* x, float step, float offset, float low, float high, uint8_t* quants) {
  using Eight = EightFloats;
  const Eight inverse = Eight::all(reciprocal(step)), from = Eight::all(offset), shift = Eight::all(kRounds - low);
  int32_t integers[kValues];
  for (int i = 0; i < kValues; i += 8) {
    const Eight scaled = (Eight::load(x + i) + from) * inverse;
    (smaller(larger(scaled, Eight::all(low)), Eight::all(high)) + shift).store(integers + i);  // in the low bits
  }
  for (int i = 0; i < kValues; ++i) quants[i] = static_cast<uint8_t>(integers[i]);
}

// Packs kBits bits, from bit `shift` on, of kCount groups of n integers: group i goes to bit i * kBits of n bytes.
template <int kBits, int kCount>
JAX_Q4K_INLINE void pack_bits(const uint8_t* values, int n, int shift, uint8_t* packed) {
  for (int j = 0; j < n; ++j) {
    unsigned byte = 0;
    for (int i = 0; i < kCount; ++i) byte |= (static_cast<unsigned>(values[i * n + j]) >> shift & ((1u << kBits) - 1)) << i * kBits;
    packed[j] = static_cast<uint8_t>(byte);
  }
}
// Bit i of the four bytes, little-endian, is the fifth bit of quant i.
JAX_Q4K_INLINE void pack_fifth_bits(const uint8_t* quants, uint8_t* packed) {
  for (int byte = 0; byte < 4; ++byte) {
    uint64_t eight;
    std::memcpy(&eight, quants + 8 * byte, sizeof eight);
    // the product has bit 8 i of the first factor as bit 56 + i
    packed[byte] = static_cast<uint8_t>((eight >> 4 & 0x0101010101010101) * 0x0102040810204080 >> 56);
  }
}

}  // namespace
}  // namespace jax_q4k
