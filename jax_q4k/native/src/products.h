// Packed rows times int8 activations: for up to kGemvRows rows of activations, and for more.

#pragma once

#include <algorithm>

#include "formats.h"

namespace jax_q4k {
namespace {

template <class Format>
JAX_Q4K_INLINE Ints start_of(const int32_t* zero_point) {
  return Format::kSigned && kZeroPoint ? Ints::load(zero_point) : Ints::all(0);
}

template <class Format>
JAX_Q4K_INLINE Ints dot_of(const Bytes& quants, const SignedBytes& values, const Ints& acc) {
  return Format::kSigned ? dot_signed(quants, values, acc) : dot(quants, values, acc);
}

constexpr int64_t kNearBytes = 32 << 10;  // bytes of L1 for activations
constexpr int kAheadBytes = 8 << 10;      // prefetch distance in bytes: what a core reads until the first of them arrive

// Number of words of a group whose products are accumulated as Narrow, or 1.
template <class Format>
constexpr int run_of() {
  for (int run = Format::kGroup / 4; run > 1 && !Format::kSigned; run /= 2)
    if (run * Format::kMost <= kNarrow) return run;
  return 1;
}

// Reads the quants of a span in the order of `RowSpan`.
template <class Format>
JAX_Q4K_INLINE void read_steps(const uint8_t* const* planes, Bytes (&steps)[4]) {
  const Bytes a = Format::template quants<0>(planes), b = Format::template quants<1>(planes);
  const Bytes c = Format::template quants<2>(planes), d = Format::template quants<3>(planes);
  steps[0] = eights<0>(a, c), steps[1] = eights<1>(a, c), steps[2] = eights<0>(b, d), steps[3] = eights<1>(b, d);
}

// acc + the products of these steps' quants with the activations.
template <class Format, int... i>
JAX_Q4K_INLINE Ints dot_steps(const Bytes (&steps)[4], const RowSpan& x, Ints acc, std::integer_sequence<int, i...>) {
  if constexpr (run_of<Format>() >= static_cast<int>(sizeof...(i))) {
    Narrow sums = Narrow::all(0);
    ((sums = dot(steps[i], SignedBytes::load(x.values[i]), sums)), ...);
    return widened(sums, acc);
  } else {
    ((acc = dot_of<Format>(steps[i], SignedBytes::load(x.values[i]), acc)), ...);
    return acc;
  }
}

// Multiplies spans [first, last) of a matrix row by M rows of activations; the last row is repeated if there are fewer.
// Keeps the results in `sums` until the last span, and then writes y[j * stride].
template <class Format, int M>
void gemv_row(const Matrix& w, int64_t row, int64_t first, int64_t last, const RowSpan* x, int m, Floats* sums, float* y,
              int64_t stride) {
  static_assert(!(Format::kCut && Format::kMins));  // only scales are masked in a cut span
  constexpr bool k32 = Format::kGroup == 32;
  constexpr int kAhead = kAheadBytes / (Format::kBytes[0] + Format::kBytes[1] + Format::kBytes[2] + Format::kBytes[3]);
  const int64_t spans = (w.k + kSpan - 1) / kSpan, whole = w.k / kSpan;
  const uint8_t* planes[Format::kPlanes];
  const RowSpan* values[M];
  Floats total[M];
  for (int i = 0; i < Format::kPlanes; ++i) planes[i] = plane<Format>(w, i, row, first);
#pragma GCC unroll 8
  for (int j = 0; j < M; ++j) values[j] = x + (j < m ? j : m - 1) * spans, total[j] = first ? sums[j] : Floats::all(0);
  const Floats only_mins = alternating(0, -1);  // selects -min, if scales and mins alternate

  CutSpan<Format> cut;
  for (int64_t start = first, end = std::min(last, whole); start < last; start = end, end = last) {
    if (start == whole) {  // the span that is cut
      if (!followed(w, row))
        cut.copy(w, row, planes);
      else
        for (int i = 0; i < Format::kPlanes; ++i) planes[i] = plane<Format>(w, i, row, whole);
    }
    for (int64_t s = start; s < end; ++s) {
      const uint8_t* at[Format::kPlanes];
#pragma GCC unroll 4
      for (int i = 0; i < Format::kPlanes; ++i) {
        at[i] = planes[i] + (s - start) * Format::kBytes[i];
#pragma GCC unroll 4
        for (int b = 0; b < Format::kBytes[i]; b += 64) __builtin_prefetch(at[i] + kAhead * Format::kBytes[i] + b);
      }
      Floats scale = Format::scales(at);
      if (Format::kCut && s == whole) scale = scales_up_to(w.k % kSpan, scale);
      const Floats lowered = k32 ? scale : Floats::all(0) - mins_of<Format>(at, scale);
      Bytes steps[4];
      read_steps<Format>(at, steps);
#pragma GCC unroll 8
      for (int j = 0; j < M; ++j) {
        const RowSpan& span = values[j][s];
        const Floats scales = scale * Floats::load(k32 ? span.scale_sum32[0] : span.scale16);
        if constexpr (k32) {
          const Ints products = dot_steps<Format>(steps, span, start_of<Format>(span.zero_point), std::integer_sequence<int, 0, 1, 2, 3>());
          if (!Format::kSigned) total[j] = fma(scales, only_mins, total[j]);
          total[j] = fma(to_float(products), in_pairs<0>(scales), total[j]);
        } else {
          total[j] = fma(lowered, Floats::load(span.sum16), total[j]);
          total[j] = fma(to_float(dot_steps<Format>(steps, span, Ints::all(0), std::integer_sequence<int, 0, 1>())), in_pairs<0>(scales), total[j]);
          total[j] = fma(to_float(dot_steps<Format>(steps, span, Ints::all(0), std::integer_sequence<int, 2, 3>())), in_pairs<1>(scales), total[j]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < M; ++j) {
    if (last < spans)
      sums[j] = total[j];
    else if (const float all = sum(total[j]); j < m)
      y[j * stride] = all;
  }
}

template <class Format>
void gemv(const Matrix& w, int64_t first, int64_t count, const RowSpan* x, int m, float* y, int64_t stride) {
  constexpr int M = Format::kFew || kWidth == 16 ? 1 : kWidth / 8;  // rows of activations at a time, limited by registers
  constexpr int kRows = 8;  // rows of the matrix per part of x; a part has as many spans as fit L1
  const int64_t spans = (w.k + kSpan - 1) / kSpan;
  for (int64_t r = 0; r < count; r += kRows) {
    const int64_t rows = std::min<int64_t>(kRows, count - r);
    for (int j = 0, taken; j < m; j += taken) {
      taken = std::min(m - j, M);
      auto* row = taken == 1 ? gemv_row<Format, 1> : taken == 2 ? gemv_row<Format, std::min(M, 2)>
                  : taken <= 4 ? gemv_row<Format, std::min(M, 4)> : gemv_row<Format, M>;
      const int64_t most = kNearBytes / (sizeof(RowSpan) * taken), parts = (spans + most - 1) / most, part = (spans + parts - 1) / parts;
      Floats sums[kRows][M];
      for (int64_t s = 0; s < spans; s += part)
        for (int64_t i = 0; i < rows; ++i)
          row(w, first + r + i, s, std::min(s + part, spans), x + j * spans, taken, sums[i], y + j * stride + r + i, stride);
    }
  }
}

// An unpacked span of a tile of rows. The first axis of scales and mins is the group, so that those of a group are
// adjacent.
struct alignas(64) Unpacked {
  uint8_t quants[kTile][kSpan];
  float scale[16][kTile], min[16][kTile];
};

template <class Format>
void unpack(const uint8_t* const* planes, int64_t r, Unpacked* to) {
  Bytes steps[4];
  read_steps<Format>(planes, steps);
  for (int i = 0; i < 4; ++i) steps[i].store(to->quants[r] + 64 * i);
  const Floats found = Format::scales(planes);
  float scales[16], mins[16];
  found.store(scales), mins_of<Format>(planes, found).store(mins);
  if (Format::kGroup == 32)
    for (int g = 0; g < 8; ++g) to->scale[g][r] = scales[2 * g], to->min[g][r] = -scales[2 * g + 1];
  else
    for (int g = 0; g < 16; ++g) to->scale[g][r] = scales[g], to->min[g][r] = -mins[g];
}

// total[r][b] += rows [row, row + R) of the tile times B blocks of activations, which are `spans` apart.
template <class Format, int R, int B>
void add_span(const Unpacked& w, int64_t row, const BlockSpan* x, int64_t spans, float* total, int64_t pitch) {
  constexpr bool k32 = Format::kGroup == 32;
  Floats acc[R][B];
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) acc[r][b] = Floats::load(total + r * pitch + b * kLanes);
  for (int g = 0; g < kSpan / Format::kGroup; ++g) {
    Ints products[R][B];
    for (int r = 0; r < R; ++r)
      for (int b = 0; b < B; ++b) products[r][b] = start_of<Format>(x[b * spans].zero_point[g]);
    const int first = k32 ? 2 * g : g % 2 * 32 + g / 2 * 2;  // the group's first word, in the order of steps
    constexpr int kRun = run_of<Format>();
#pragma GCC unroll 8
    for (int start = 0; start < Format::kGroup / 4; start += kRun) {
      Narrow sums[R][B];
      for (int r = 0; r < R; ++r)
        for (int b = 0; b < B; ++b) sums[r][b] = Narrow::all(0);
#pragma GCC unroll 8
      for (int i = start; i < start + kRun; ++i)
        for (int r = 0; r < R; ++r) {
          const int word = first + i / 2 * 16 + i % 2;
          uint32_t four;
          std::memcpy(&four, w.quants[row + r] + word * 4, 4);
          const Bytes quants = Words::all(four).template as<uint8_t>();
          for (int b = 0; b < B; ++b) {
            const SignedBytes values = SignedBytes::load(x[b * spans].values[word]);
            if constexpr (kRun > 1)
              sums[r][b] = dot(quants, values, sums[r][b]);
            else
              products[r][b] = dot_of<Format>(quants, values, products[r][b]);
          }
        }
      for (int r = 0; r < R && kRun > 1; ++r)
        for (int b = 0; b < B; ++b) products[r][b] = widened(sums[r][b], products[r][b]);
    }
    for (int b = 0; b < B; ++b) {
      const BlockSpan& span = x[b * spans];
      const Floats scale = Floats::load(span.scale32[g * Format::kGroup / 32]);
      const Floats sums = Floats::load(k32 ? span.sum32[g] : span.sum16[g]);
      for (int r = 0; r < R; ++r) {
        acc[r][b] = fma(Floats::all(w.scale[g][row + r]) * scale, to_float(products[r][b]), acc[r][b]);
        if (!Format::kSigned) acc[r][b] = fma(Floats::all(w.min[g][row + r]), sums, acc[r][b]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) acc[r][b].store(total + r * pitch + b * kLanes);
}

template <class Format>
void gemm(const Matrix& w, int64_t first, int64_t count, const BlockSpan* x, int64_t blocks, float* total) {
  // as many sums as registers hold; while Narrow sums are in registers, the floats wait in memory
  constexpr bool kFlips = kWidth == 32 && Format::kSigned && !kZeroPoint;  // `dot_signed` needs magnitudes: of only R words
  constexpr int R = kFlips ? 1 : run_of<Format>() > 1 ? 4 : kWidth / 16, B = kWidth == 64 ? 2 : kFlips ? 4 : 1;
  static_assert(kTile % (R * B) == 0);
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
      for (int i = 0; i < Format::kPlanes; ++i)  // the row's next span: so many rows in turn are no stream to a processor
        for (int b = 0; b < Format::kBytes[i] + 63; b += 64) __builtin_prefetch(planes[i] + Format::kBytes[i] + b);
      unpack<Format>(planes, r, &tile);
    }
    for (int64_t b = 0, taken; b < blocks; b += taken) {
      taken = b + B <= blocks ? B : 1;
      const BlockSpan* block = x + b * spans + s;
      float* to = total + b * kLanes;
      if (taken == B)
        for (int64_t r = 0; r < count; r += R) add_span<Format, R, B>(tile, r, block, spans, to + r * pitch, pitch);
      else
        for (int64_t r = 0; r < count; r += R * B) add_span<Format, R * B, 1>(tile, r, block, spans, to + r * pitch, pitch);
    }
  }
}

// `gemm`, or nullptr for formats without one.
template <class Format>
constexpr auto gemm_of() {
  if constexpr (Format::kFew)
    return nullptr;
  else
    return gemm<Format>;
}

// to[j * stride + r] = from[r * pitch + j], j < m <= 16, r < count.
inline void transpose_totals(const float* from, int64_t pitch, int64_t count, int64_t m, float* to, int64_t stride) {
  for (int64_t r = 0; r < count; r += kLanes) {
    const int64_t n = count - r < kLanes ? count - r : kLanes;
    Floats square[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) square[i] = Floats::load(from + (r + (i < n ? i : 0)) * pitch);
    transpose(square);
    for (int64_t j = 0; j < m; ++j) {
      float row[kLanes];
      square[j].store(n == kLanes ? to + j * stride + r : row);
      if (n < kLanes) std::memcpy(to + j * stride + r, row, n * 4);
    }
  }
}

}  // namespace
}  // namespace jax_q4k
