// Packed rows times activations: a few rows of them, many, or floats.

#pragma once

#include "conversions.h"
#include "formats.h"

namespace jax_q4k {
namespace {

// `few` for R rows of the matrix and M of activations; where there are fewer, the last ones are taken again.
template <class Format, int R, int M>
void few_rows(const Matrix& w, int64_t first, int64_t count, const RowSpan* x, int m, float* y, int64_t stride) {
  constexpr int kParts = 32 / Format::kGroup;  // eight scales each
  const int64_t spans = (w.k + kSpan - 1) / kSpan, whole = w.k / kSpan;
  const uint8_t* planes[R][Format::kPlanes];
  const RowSpan* values[M];
  Floats total[M][R];
  Floats8 low[M][R];  // what mins take away
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < Format::kPlanes; ++i) planes[r][i] = plane<Format>(w, i, first + (r < count ? r : count - 1), 0);
  for (int j = 0; j < M; ++j) {
    values[j] = x + (j < m ? j : m - 1) * spans;
    for (int r = 0; r < R; ++r) total[j][r] = Floats::all(0), low[j][r] = Floats8::all(0);
  }

  auto add_span = [&](int64_t s) {
    Floats scales[M][R];
    for (int r = 0; r < R; ++r) {
      Floats8 scale[kParts], min[kParts];
      Format::scales(planes[r], scale, min);
      for (int j = 0; j < M; ++j) {
        const RowSpan& span = values[j][s];
        for (int i = 0; i < kParts; ++i)
          low[j][r] = fma(min[i], Floats8::load(kParts == 1 ? span.sum32 : span.sum16 + 8 * i), low[j][r]);
        scales[j][r] = joined(scale) * Floats::load(kParts == 1 ? span.scale32 : span.scale16);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      for (int r = 0; r < R; ++r) {
        const Bytes quants = Format::quants(planes[r], i);
        for (int j = 0; j < M; ++j) {
          const SignedBytes bytes = SignedBytes::load(values[j][s].values + 64 * i);
          const Ints products = Format::kSigned ? dot_signed(quants, bytes) : dot(quants, bytes);
          total[j][r] = fma(to_float(products), spread<Format::kGroup>(scales[j][r], i), total[j][r]);
        }
      }
  };

  for (int64_t s = 0; s < whole; ++s) {
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < Format::kPlanes; ++i)
        for (int b = 0; b < Format::kBytes[i]; b += 64) __builtin_prefetch(planes[r][i] + 2 * R * (w.k / kSpan) * Format::kBytes[i] + b, 0, 3);
    add_span(s);
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < Format::kPlanes; ++i) planes[r][i] += Format::kBytes[i];
  }
  CutSpan<Format> cut[R];
  if (whole < spans) {
    for (int r = 0; r < R; ++r) cut[r].copy(w, first + (r < count ? r : count - 1), planes[r]);
    add_span(whole);
  }
  for (int j = 0; j < M && j < m; ++j)
    for (int r = 0; r < R && r < count; ++r) y[j * stride + r] = sum(total[j][r]) - sum(low[j][r]);
}

template <class Format>
void few(const Matrix& w, int64_t first, int64_t count, const RowSpan* x, int m, float* y, int64_t stride) {
  constexpr int R = 2;  // rows that share the loads of activations
  static_assert(kFew == 4);
  for (int64_t r = 0; r < count; r += R) {
    auto* rows = m == 1 ? few_rows<Format, R, 1> : m == 2 ? few_rows<Format, R, 2> : few_rows<Format, R, 4>;
    rows(w, first + r, count - r, x, m, y + r, stride);
  }
}

// A span of a tile of rows. Of scales and mins, groups come first, so that a group's are side by side.
struct alignas(64) Unpacked {
  uint8_t quants[kTile][kSpan];
  float scale[16][kTile], min[16][kTile];
};

template <class Format>
void unpack(const uint8_t* const* planes, int64_t r, Unpacked* to) {
  constexpr int kGroups = kSpan / Format::kGroup;
  for (int i = 0; i < 4; ++i) Format::quants(planes, i).store(to->quants[r] + 64 * i);
  Floats8 scale[kGroups / 8], min[kGroups / 8];
  Format::scales(planes, scale, min);
  float scales[kGroups], mins[kGroups];
  std::memcpy(scales, scale, sizeof scales), std::memcpy(mins, min, sizeof mins);
  for (int g = 0; g < kGroups; ++g) to->scale[g][r] = scales[g], to->min[g][r] = -mins[g];
}

// total[r][b] += rows [row, row + R) of the tile times B blocks of activations, `spans` apart.
template <class Format, int R, int B>
void add_span(const Unpacked& w, int64_t row, const BlockSpan* x, int64_t spans, float* total, int64_t pitch) {
  constexpr int kGroups = kSpan / Format::kGroup, kSteps = Format::kGroup / 4;
  Floats acc[R][B];
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) acc[r][b] = Floats::load(total + r * pitch + b * kLanes);
  for (int g = 0; g < kGroups; ++g) {
    Ints products[R][B];
    for (int r = 0; r < R; ++r)
      for (int b = 0; b < B; ++b) products[r][b] = Ints::all(0);
#pragma GCC unroll 8
    for (int i = 0; i < kSteps; ++i)
      for (int r = 0; r < R; ++r) {
        uint32_t four;
        std::memcpy(&four, w.quants[row + r] + (g * kSteps + i) * 4, 4);
        const Bytes quants = Words::all(four).template as<uint8_t>();
        for (int b = 0; b < B; ++b) {
          const SignedBytes values = SignedBytes::load(x[b * spans].values[g * kSteps + i]);
          products[r][b] = Format::kSigned ? dot_signed(quants, values, products[r][b]) : dot(quants, values, products[r][b]);
        }
      }
    for (int b = 0; b < B; ++b) {
      const BlockSpan& span = x[b * spans];
      const Floats scale = Floats::load(span.scale32[g * Format::kGroup / 32]);
      const Floats sums = Floats::load(Format::kGroup == 32 ? span.sum32[g] : span.sum16[g]);
      for (int r = 0; r < R; ++r) {
        acc[r][b] = fma(Floats::all(w.scale[g][row + r]) * scale, to_float(products[r][b]), acc[r][b]);
        acc[r][b] = fma(Floats::all(w.min[g][row + r]), sums, acc[r][b]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) acc[r][b].store(total + r * pitch + b * kLanes);
}

template <class Format>
void many(const Matrix& w, int64_t first, int64_t count, const BlockSpan* x, int64_t blocks, float* total) {
  constexpr int R = kWidth == 64 ? 4 : 2, B = kWidth == 64 ? 2 : 1;  // as many sums as registers hold
  static_assert(kTile % R == 0);
  const int64_t spans = (w.k + kSpan - 1) / kSpan, pitch = blocks * kLanes;
  std::memset(total, 0, sizeof(float) * kTile * pitch);
  Unpacked tile;
  if (count < kTile) std::memset(&tile, 0, sizeof tile);
  for (int64_t s = 0; s < spans; ++s) {
    for (int64_t r = 0; r < count; ++r) {
      const uint8_t* planes[Format::kPlanes];
      for (int i = 0; i < Format::kPlanes; ++i) planes[i] = plane<Format>(w, i, first + r, s);
      CutSpan<Format> cut;
      if ((s + 1) * kSpan > w.k) cut.copy(w, first + r, planes);
      unpack<Format>(planes, r, &tile);
    }
    for (int64_t b = 0; b < blocks; b += B)
      for (int64_t r = 0; r < count; r += R) {
        const BlockSpan* block = x + b * spans + s;
        float* to = total + r * pitch + b * kLanes;
        if (b + B <= blocks)
          add_span<Format, R, B>(tile, r, block, spans, to, pitch);
        else
          add_span<Format, R, 1>(tile, r, block, spans, to, pitch);
      }
  }
}

template <class Format>
void decode_packed(const Matrix& w, int64_t row, float* y) {
  constexpr int kGroups = kSpan / Format::kGroup;
  for (int64_t s = 0; s * kSpan < w.k; ++s) {
    const uint8_t* planes[Format::kPlanes];
    for (int i = 0; i < Format::kPlanes; ++i) planes[i] = plane<Format>(w, i, row, s);
    CutSpan<Format> cut;
    if ((s + 1) * kSpan > w.k) cut.copy(w, row, planes);
    uint8_t quants[kSpan];
    float scale[kGroups], min[kGroups], values[kSpan];
    for (int i = 0; i < 4; ++i) Format::quants(planes, i).store(quants + 64 * i);
    Floats8 scales[kGroups / 8], mins[kGroups / 8];
    Format::scales(planes, scales, mins);
    std::memcpy(scale, scales, sizeof scale), std::memcpy(min, mins, sizeof min);
    for (int g = 0; g < kGroups; ++g)
      for (int i = g * Format::kGroup; i < (g + 1) * Format::kGroup; ++i)
        values[i] = (Format::kSigned ? static_cast<float>(static_cast<int8_t>(quants[i])) : static_cast<float>(quants[i])) * scale[g] - min[g];
    std::memcpy(y + s * kSpan, values, sizeof(float) * (w.k - s * kSpan < kSpan ? w.k - s * kSpan : kSpan));
  }
}

template <class Element>
void decode_floats(const Matrix& w, int64_t row, float* y) {
  load_floats(reinterpret_cast<const Element*>(w.planes[0]) + row * w.k, w.k, y);
}

// y[j * stride + r] of R decoded rows and J of x, both (., k).
template <int R, int J>
void dot_floats(const float* rows, const float* x, int64_t k, float* y, int64_t stride) {
  Floats total[R][J];
  for (auto& of_row : total)
    for (auto& t : of_row) t = Floats::all(0);
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes)
    for (int j = 0; j < J; ++j) {
      const Floats values = Floats::load(x + j * k + i);
      for (int r = 0; r < R; ++r) total[r][j] = fma(Floats::load(rows + r * k + i), values, total[r][j]);
    }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) {
      float rest = 0;
      for (int64_t at = i; at < k; ++at) rest += rows[r * k + at] * x[j * k + at];
      y[j * stride + r] = sum(total[r][j]) + rest;
    }
}

template <int R>
void dot_floats_of(const float* rows, const float* x, int64_t k, int64_t m, float* y, int64_t stride) {
  int64_t j = 0;
  for (; j + 4 <= m; j += 4) dot_floats<R, 4>(rows, x + j * k, k, y + j * stride, stride);
  for (; j < m; ++j) dot_floats<R, 1>(rows, x + j * k, k, y + j * stride, stride);
}

template <void (*kDecode)(const Matrix&, int64_t, float*)>
void floats(const Matrix& w, int64_t first, int64_t count, const float* x, int64_t m, float* y, int64_t stride,
            float* scratch) {
  constexpr int R = 4;
  for (int64_t r = 0; r < count; r += R) {
    const int64_t rows = count - r < R ? count - r : R;
    for (int64_t i = 0; i < rows; ++i) kDecode(w, first + r + i, scratch + i * w.k);
    if (rows == R)
      dot_floats_of<R>(scratch, x, w.k, m, y + r, stride);
    else
      for (int64_t i = 0; i < rows; ++i) dot_floats_of<1>(scratch + i * w.k, x, w.k, m, y + r + i, stride);
  }
}

}  // namespace
}  // namespace jax_q4k
