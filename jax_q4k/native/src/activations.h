// Activations: RMSNorm, int8 in groups of 32 (`jax_q4k.quantize_q8_1`) in two layouts, and gates.

#pragma once

#include "sums.h"

namespace jax_q4k {

namespace {

// Clips v to [low, high]; NaN stays NaN.
inline Floats clipped(const Floats& v, float low, float high) {
  Floats y;
  for (int i = 0; i < Floats::kParts; ++i) {
    const auto least = Floats::Part{} + low, most = Floats::Part{} + high, part = v.part[i];
    const auto capped = part > most ? most : part;
    y.part[i] = capped < least ? least : capped;
  }
  return y;
}

// Quantizes x to int8, values = round(x * (127 / amax)), in groups of eight that begin `apart` bytes apart. Returns
// amax * (1 / 127), with amax the largest magnitude. Values are 0 if amax is 0, infinite or NaN.
JAX_Q4K_INLINE float quantize_group(const float* x, int64_t count, int8_t* values, int64_t apart) {
  auto part = [&](int64_t i) __attribute__((always_inline)) {  // 16 elements from the i-th, zero-padded
    if (count - i >= 16) return Floats::load(x + i);
    float rest[16] = {};
    std::memcpy(rest, x + i, (count - i) * 4);
    return Floats::load(rest);
  };
  auto higher = [](auto a, auto b) {  // compares bits, of which NaN's are the highest
    const auto left = (Ints::Part)a, right = (Ints::Part)b;
    return (Floats::Part)(left > right ? left : right);
  };
  Floats highest = Floats::all(0);
  for (int64_t i = 0; i < count; i += 16) {
    const Floats magnitudes = (part(i).as<int32_t>() & Ints::all(0x7fffffff)).as<float>();
    for (int p = 0; p < Floats::kParts; ++p) highest.part[p] = higher(highest.part[p], magnitudes.part[p]);
  }
  const float amax = reduced(highest, higher);
  const Floats inverse = Floats::all(amax > 0 && amax < __builtin_inff() ? 127.0f / amax : 0.0f);
  for (int64_t i = 0; i < count; i += 16, values += 2 * apart) {
    const Floats scaled = clipped(part(i) * inverse, -127, 127);
    int8_t bytes[16];
    for (int p = 0; p < Floats::kParts; ++p) {
      using Small __attribute__((vector_size(Floats::kPartLanes))) = int8_t;
      // NaN becomes 0: 0 * infinity for a tiny amax, or NaN * 0
      const auto number = scaled.part[p] == scaled.part[p] ? scaled.part[p] : Floats::Part{};
      const auto rounded = (Ints::Part)(number + 12582912.0f) - 0x4b400000;  // its low bits are the integer
      const auto narrow = __builtin_convertvector(rounded, Small);
      std::memcpy(bytes + p * Floats::kPartLanes, &narrow, sizeof narrow);
    }
    const int64_t left = count - i < 16 ? count - i : 16;
    std::memcpy(values, bytes, left < 8 ? left : 8);
    if (left > 8) std::memcpy(values + apart, bytes + 8, left - 8);
  }
  return amax * (1.0f / 127.0f);
}

inline void quantize_row(const float* x, int64_t k, RowSpan* spans) {
  for (int64_t start = 0; start < k; start += kSpan, ++spans) {
    if (k - start < kSpan) std::memset(spans, 0, sizeof *spans);
    float scales[8] = {};
    for (int g = 0; g < 8 && start + 32 * g < k; ++g) {
      scales[g] = quantize_group(x + start + 32 * g, 32, spans->values[0] + 8 * g, 64);
    }
    Ints sums[2];  // two lanes for every 16 columns
    int32_t lanes[2][16];
    for (int i = 0; i < 2; ++i) {
      sums[i] = dot(Bytes::all(1), SignedBytes::load(spans->values[2 * i]), dot(Bytes::all(1), SignedBytes::load(spans->values[2 * i + 1])));
      sums[i].store(lanes[i]);
    }
    for (int g = 0; g < 8; ++g) {
      int32_t total = 0;
      for (int i = 0; i < 2; ++i) {
        const int32_t part = lanes[i][2 * g] + lanes[i][2 * g + 1];
        const int lane = lane16(2 * g + i);
        spans->scale16[lane] = scales[g], spans->sum16[lane] = -scales[g] * static_cast<float>(part);
        total += part;
      }
      spans->scale_sum32[scale_at(g)] = scales[g], spans->scale_sum32[sum_at(g)] = -scales[g] * static_cast<float>(total);
    }
    ((sums[0] + sums[1]) * Ints::all(-kZeroPoint)).store(spans->zero_point);
  }
}

inline void pack_rows(const RowSpan* rows, int64_t spans, int count, int64_t s, BlockSpan* block) {
  if (count < kLanes) std::memset(block, 0, sizeof *block);
  for (int lane = 0; lane < count; ++lane) {
    const RowSpan& from = rows[lane * spans + s];
    for (int i = 0; i < kSpan / 4; ++i) std::memcpy(block->values[i][lane], from.values[i % 8 / 2] + i / 8 * 8 + i % 2 * 4, 4);
    for (int g = 0; g < 8; ++g) {
      block->scale32[g][lane] = from.scale_sum32[scale_at(g)], block->sum32[g][lane] = from.scale_sum32[sum_at(g)];
      block->zero_point[g][lane] = from.zero_point[2 * g] + from.zero_point[2 * g + 1];
    }
    for (int g = 0; g < 16; ++g) block->sum16[g][lane] = from.sum16[lane16(g)];
  }
}

inline void normalize_row(const float* x, const float* weight, float eps, int64_t k, float* y) {
  Floats squares = Floats::all(0);
  float rest = 0;
  int64_t i = 0;
  for (; i + 16 <= k; i += 16) squares = fma(Floats::load(x + i), Floats::load(x + i), squares);
  for (; i < k; ++i) rest += x[i] * x[i];
  const float factor = 1.0f / __builtin_sqrtf((sum(squares) + rest) / static_cast<float>(k) + eps);
  for (i = 0; i < k; ++i) y[i] = x[i] * factor * weight[i];
}

// e^x for x <= 0, with a relative error of about 1e-7; 0 below -87.
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

inline Floats sigmoid(const Floats& z) {
  const Floats one = Floats::all(1), e = exp_of(Floats::all(0) - larger(z, Floats::all(0) - z));  // e^-|z| cannot overflow
  Floats numerator;
  for (int p = 0; p < Floats::kParts; ++p) numerator.part[p] = z.part[p] > 0 ? one.part[p] : e.part[p];
  return numerator / (one + e);
}

// activation(gate, up) = x / (1 + e^-z) * factor; x, z and factor depend on the activation.
inline void gate(const float* gates, const float* up, int64_t count, Activation activation, float* y) {
  auto sixteen = [&](const float* from, const float* other, float* to) {
    Floats x = Floats::load(from), factor = Floats::load(other), z = x;
    if (activation == kGelu) {  // tanh approximation: x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 x^3)
      z = Floats::all(1.5957691216f) * fma(Floats::all(0.044715f) * x * x, x, x);
    } else if (activation == kSwigluOai) {
      x = clipped(x, -__builtin_inff(), 7.0f);
      z = Floats::all(1.702f) * x, factor = clipped(factor, -7.0f, 7.0f) + Floats::all(1);
    }
    (x * sigmoid(z) * factor).store(to);
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sixteen(gates + i, up + i, y + i);
  if (i == count) return;
  float ends[3][kLanes] = {};
  std::memcpy(ends[0], gates + i, (count - i) * 4), std::memcpy(ends[1], up + i, (count - i) * 4);
  sixteen(ends[0], ends[1], ends[2]);
  std::memcpy(y + i, ends[2], (count - i) * 4);
}

}  // namespace
}  // namespace jax_q4k
