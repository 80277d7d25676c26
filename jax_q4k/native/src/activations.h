// Activations: RMSNorm, and int8 in groups of 32 (`jax_q4k.quantize_q8_1`) in two layouts.

#pragma once

#include "kernels.h"
#include "vectors.h"

namespace jax_q4k {

namespace {

// x as int8: values = round(x * (127 / amax)), scale = amax * (1 / 127), amax the largest magnitude. Zeros where amax
// is 0, infinite or NaN. Returns the values' sum.
inline int32_t quantize_group(const float* x, int64_t count, int8_t* values, float* scale) {
  int32_t highest = 0;  // as bits, of which NaN's are the highest
  for (int64_t i = 0; i < count; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;
    highest = bits > highest ? bits : highest;
  }
  float amax;
  std::memcpy(&amax, &highest, 4);
  *scale = amax * (1.0f / 127.0f);
  const bool usable = amax > 0 && highest < 0x7f800000;
  if (!usable) {
    std::memset(values, 0, count);
    return 0;
  }
  const float inverse = 127.0f / amax;
  int32_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    float scaled = __builtin_rintf(x[i] * inverse);
    scaled = scaled > 127.0f ? 127.0f : scaled < -127.0f ? -127.0f : scaled;
    const int32_t value = static_cast<int32_t>(scaled);
    values[i] = static_cast<int8_t>(value);
    total += value;
  }
  return total;
}

inline void quantize_row(const float* x, int64_t k, RowSpan* spans) {
  for (int64_t start = 0; start < k; start += kSpan, ++spans) {
    if (k - start < kSpan) std::memset(spans, 0, sizeof *spans);
    for (int g = 0; g < 8 && start + 32 * g < k; ++g) {
      int8_t values[2][16];
      float scale;
      const int32_t total = quantize_group(x + start + 32 * g, 32, values[0], &scale);
      int32_t sums[2] = {0, total};
      for (int i = 0; i < 16; ++i) sums[0] += values[0][i];
      sums[1] -= sums[0];
      for (int i = 0; i < 2; ++i) {
        std::memcpy(spans->values[g % 2 * 2 + i] + g / 2 * 16, values[i], 16);
        spans->scale16[2 * g + i] = scale;
        spans->sum16[2 * g + i] = scale * static_cast<float>(sums[i]);
      }
      spans->scale_sum32[g][0] = scale;
      spans->scale_sum32[g][1] = scale * static_cast<float>(total);
    }
    for (int i = 0; i < 2; ++i) {
      const Bytes raise = Bytes::all(kRaised);
      const Ints sums = dot(raise, SignedBytes::load(spans->values[2 * i]));
      (Ints::all(0) - dot(raise, SignedBytes::load(spans->values[2 * i + 1]), sums)).store(spans->raised[i]);
    }
  }
}

inline void pack_rows(const RowSpan* rows, int64_t spans, int count, int64_t s, BlockSpan* block) {
  if (count < kLanes) std::memset(block, 0, sizeof *block);
  for (int lane = 0; lane < count; ++lane) {
    const RowSpan& from = rows[lane * spans + s];
    for (int i = 0; i < kSpan / 4; ++i) std::memcpy(block->values[i][lane], from.values[0] + 4 * i, 4);
    for (int g = 0; g < 8; ++g) {
      block->scale32[g][lane] = from.scale_sum32[g][0], block->sum32[g][lane] = from.scale_sum32[g][1];
      const int32_t* raised = from.raised[g % 2] + g / 2 * 4;
      block->raised[g][lane] = raised[0] + raised[1] + raised[2] + raised[3];
    }
    for (int g = 0; g < 16; ++g) block->sum16[g][lane] = from.sum16[g];
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

}  // namespace
}  // namespace jax_q4k
