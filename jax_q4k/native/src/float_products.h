// Rows of any type as floats, and their products with float activations: for up to kFloatGemvRows rows, and for more.

#pragma once

#include <type_traits>

#include "conversions.h"
#include "formats.h"

namespace jax_q4k {
namespace {

// A row that is read one span at a time, and from the span 16 columns at a time as floats. Zeros follow the row's end.
template <class Format>
class PackedRow {
 public:
  static constexpr bool kRagged = false;  // ends at a multiple of 16 columns
  static constexpr bool kFew = Format::kFew;

  JAX_Q4K_INLINE void open(const Matrix& w, int64_t row) {
    whole_ = w.k / kSpan;
#pragma GCC unroll 4
    for (int i = 0; i < Format::kPlanes; ++i) planes_[i] = plane<Format>(w, i, row, 0);
    if (w.k % kSpan) end_.copy(w, row, end_planes_);
  }
  // Reads span s, and prefetches the span `ahead` spans later.
  JAX_Q4K_INLINE void read(int64_t s, int64_t ahead) {
    const uint8_t* at[Format::kPlanes];
#pragma GCC unroll 4
    for (int i = 0; i < Format::kPlanes; ++i) {
      at[i] = s < whole_ ? planes_[i] + s * Format::kBytes[i] : end_planes_[i];
#pragma GCC unroll 4
      for (int b = 0; b < Format::kBytes[i]; b += 64) __builtin_prefetch(at[i] + ahead * Format::kBytes[i] + b);
    }
    read_step<0>(at), read_step<1>(at), read_step<2>(at), read_step<3>(at);
    const Floats scales = Format::scales(at);
    scales.store(scales_);
    if (!k32) mins_of<Format>(at, scales).store(mins_);
  }
  // Returns columns [16 i, 16 i + 16) of the span.
  JAX_Q4K_INLINE Floats columns(int i) const {
    const float scale = scales_[k32 ? i & ~1 : i], min = k32 ? scales_[i | 1] : mins_[i];
    return to_float(Vector<Quant, 16>::load(quants_[i % 4][i / 4])) * Floats::all(scale) - Floats::all(min);
  }

 private:
  static constexpr bool k32 = Format::kGroup == 32;
  using Quant = std::conditional_t<Format::kSigned, int8_t, uint8_t>;

  template <int i>
  JAX_Q4K_INLINE void read_step(const uint8_t* const* at) {
    const Bytes quants = Format::template quants<i>(at);
    (Format::kSigned ? quants ^ Bytes::all(kZeroPoint) : quants).store(quants_[i]);
  }

  int64_t whole_;
  const uint8_t *planes_[Format::kPlanes], *end_planes_[Format::kPlanes];
  alignas(64) uint8_t quants_[4][4][16];
  alignas(64) float scales_[16], mins_[16];
  CutSpan<Format> end_;
};

template <class Element>
class FloatRow {
 public:
  static constexpr bool kRagged = true, kFew = false;

  JAX_Q4K_INLINE void open(const Matrix& w, int64_t row) {
    elements_ = reinterpret_cast<const Element*>(w.planes[0]) + row * w.k;
    k_ = w.k;
  }
  JAX_Q4K_INLINE void read(int64_t s, int64_t ahead) {
    at_ = elements_ + s * kSpan;
#pragma GCC unroll 16
    for (size_t b = 0; b < kSpan * sizeof(Element); b += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(at_ + ahead * kSpan) + b);
    const int64_t left = k_ - s * kSpan;
    if (left < kSpan && left % kLanes) {
      std::memset(end_, 0, sizeof end_);
      std::memcpy(end_, at_ + left / kLanes * kLanes, left % kLanes * sizeof(Element));
    }
  }
  JAX_Q4K_INLINE Floats columns(int i) const { return load_lanes(at_ + i * kLanes); }
  // Returns the last columns, if they are not a multiple of 16, zero-padded.
  JAX_Q4K_INLINE Floats last() const { return load_lanes(end_); }

 private:
  const Element *elements_, *at_;
  int64_t k_;
  Element end_[kLanes];
};

template <class Row>
void decode_row(const Matrix& w, int64_t row, float* y) {
  Row from;
  from.open(w, row);
  for (int64_t s = 0; s * kSpan < w.k; ++s, y += kSpan) {
    from.read(s, 1);
    const int64_t n = w.k - s * kSpan < kSpan ? w.k - s * kSpan : kSpan;
    for (int i = 0; i < n / kLanes; ++i) from.columns(i).store(y + i * kLanes);
    if constexpr (Row::kRagged) {
      float last[kLanes];
      if (n % kLanes) from.last().store(last), std::memcpy(y + n / kLanes * kLanes, last, n % kLanes * 4);
    }
  }
}

// `float_gemv` for R rows of the matrix and M rows of activations; the last row is repeated if there are fewer.
template <class Row, int R, int M>
void float_rows(const Matrix& w, int64_t first, int64_t count, const float* x, int m, float* y, int64_t stride) {
  Row rows[R];
  const float* values[M];
  Floats total[M][R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) rows[r].open(w, first + (r < count ? r : count - 1));
#pragma GCC unroll 4
  for (int j = 0; j < M; ++j) {
    values[j] = x + (j < m ? j : m - 1) * w.k;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) total[j][r] = Floats::all(0);
  }
  for (int64_t start = 0; start < w.k; start += kSpan) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) rows[r].read(start / kSpan, R * (w.k / kSpan));
    const int64_t n = w.k - start < kSpan ? w.k - start : kSpan;
    for (int i = 0; i < n / kLanes; ++i) {
      Floats weights[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) weights[r] = rows[r].columns(i);
#pragma GCC unroll 4
      for (int j = 0; j < M; ++j) {
        const Floats of_x = Floats::load(values[j] + start + i * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) total[j][r] = fma(weights[r], of_x, total[j][r]);
      }
    }
    if constexpr (Row::kRagged)
      if (n % kLanes)
#pragma GCC unroll 4
        for (int j = 0; j < M; ++j) {
          float last[kLanes] = {};
          std::memcpy(last, values[j] + start + n / kLanes * kLanes, n % kLanes * 4);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) total[j][r] = fma(rows[r].last(), Floats::load(last), total[j][r]);
        }
  }
#pragma GCC unroll 4
  for (int j = 0; j < M; ++j)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const float product = sum(total[j][r]);
      if (j < m && r < count) y[j * stride + r] = product;
    }
}

template <class Row, int M>
void float_rows_of(const Matrix& w, int64_t first, int64_t count, const float* x, int m, float* y, int64_t stride) {
  constexpr int kSums = Row::kFew ? 1 : kWidth == 64 ? 16 : kWidth == 32 ? 4 : 2;  // about as many as registers hold
  constexpr int R = kSums < M ? 1 : kSums / M < 4 ? kSums / M : 4;
  for (int64_t r = 0; r < count; r += R) float_rows<Row, R, M>(w, first + r, count - r, x, m, y + r, stride);
}

template <class Row>
void float_gemv(const Matrix& w, int64_t first, int64_t count, const float* x, int m, float* y, int64_t stride) {
  if constexpr (Row::kFew) {
    for (int j = 0; j < m; ++j) float_rows_of<Row, 1>(w, first, count, x + j * w.k, 1, y + j * stride, stride);
  } else {
    auto* rows = m == 1 ? float_rows_of<Row, 1> : m == 2 ? float_rows_of<Row, 2> : float_rows_of<Row, kFloatGemvRows>;
    rows(w, first, count, x, m, y, stride);
  }
}

// Weights that are multiplied while they are in L1: a span of kAbreast rows, one per lane, in kBlocks vectors. At most
// kRows rows of activations are multiplied at a time, as many sums as registers hold.
#if defined(JAX_Q4K_AVX512)
constexpr int kBlocks = 2, kRows = 12;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kBlocks = 1, kRows = 6;
#else
constexpr int kBlocks = 1, kRows = 2;
#endif
constexpr int kAbreast = kBlocks * kLanes;

// What decoding has in common is not inlined into each format's function: they would be several times as long.
__attribute__((noinline)) void transpose_scales(Floats (&v)[kLanes]) { transpose(v); }

// Stores the columns of one step of a span of 16 rows as floats, to[column * kAbreast + row]. words[r] has four quants of
// row r in each 32 bits; scales and mins are transposed.
template <bool kSigned, bool k32, bool kMins>
__attribute__((noinline)) void store_columns(int step, Floats (&words)[kLanes], const Floats* scales, const Floats* mins, float offset,
                                             float* to) {
  transpose(words);
  for (int q = 0; q < 4; ++q) {
    const int group = 4 * q + step;
    const Floats scale = scales[k32 ? group & ~1 : group];
    const Floats min = kMins ? mins[group] : k32 ? scales[group | 1] : scale * Floats::all(offset);
    for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
      for (int b = 0; b < 4; ++b) {
        const Floats word = words[4 * q + i];
        Ints quants;
        if constexpr (kSigned)
          quants = (word.template as<int32_t>() << Ints::all(24 - 8 * b)) >> Ints::all(24);
        else
          quants = ((word.template as<uint32_t>() >> Words::all(8 * b)) & Words::all(0xff)).template as<int32_t>();
        (to_float(quants) * scale - min).store(to + (64 * q + 16 * step + 4 * i + b) * kAbreast);
      }
  }
}

// Decodes span s of 16 rows to floats, to[column * kAbreast + row]; the last row is repeated if there are fewer.
template <class Format>
void decode_block(const Matrix& w, int64_t first, int64_t count, int64_t s, float* to, PackedRow<Format>*) {
  constexpr bool k32 = Format::kGroup == 32;
  const uint8_t* planes[kLanes][Format::kPlanes];
  CutSpan<Format> cut[kLanes];
  for (int r = 0; r < kLanes; ++r) {
    const int64_t row = first + (r < count ? r : count - 1);
    if ((s + 1) * kSpan > w.k)
      cut[r].copy(w, row, planes[r]);
    else
      for (int i = 0; i < Format::kPlanes; ++i) {
        planes[r][i] = plane<Format>(w, i, row, s);
        for (int b = 0; b < Format::kBytes[i]; b += 64) __builtin_prefetch(planes[r][i] + Format::kBytes[i] + b);
      }
  }
  Floats scales[kLanes];  // after the transpose, of one group each; for groups of 32, scale and min alternate
  for (int r = 0; r < kLanes; ++r) scales[r] = Format::scales(planes[r]);
  Floats mins[Format::kMins ? kLanes : 1];
  if constexpr (Format::kMins) {
    for (int r = 0; r < kLanes; ++r) mins[r] = Format::mins(planes[r]);
    transpose_scales(mins);
  }
  transpose_scales(scales);
  const auto decode_step = [&](auto step) {
    Floats words[kLanes];
    for (int r = 0; r < kLanes; ++r) {
      const Bytes quants = Format::template quants<decltype(step)::value>(planes[r]);
      words[r] = (Format::kSigned ? quants ^ Bytes::all(kZeroPoint) : quants).template as<float>();
    }
    store_columns<Format::kSigned, k32, Format::kMins>(step, words, scales, mins, Format::kOffset, to);
  };
  decode_step(std::integral_constant<int, 0>()), decode_step(std::integral_constant<int, 1>());
  decode_step(std::integral_constant<int, 2>()), decode_step(std::integral_constant<int, 3>());
}

template <class Element>
void decode_block(const Matrix& w, int64_t first, int64_t count, int64_t s, float* to, FloatRow<Element>*) {
  const Element* rows[kLanes];
  for (int r = 0; r < kLanes; ++r)
    rows[r] = reinterpret_cast<const Element*>(w.planes[0]) + (first + (r < count ? r : count - 1)) * w.k + s * kSpan;
  const int64_t n = w.k - s * kSpan < kSpan ? w.k - s * kSpan : kSpan;
  for (int64_t c = 0; c < n; c += kLanes) {
    Element ends[kLanes][kLanes];  // zero-padded copies of rows that end within these columns
    if (n - c < kLanes)
      for (int r = 0; r < kLanes; ++r) {
        std::memset(ends[r], 0, sizeof ends[r]);
        std::memcpy(ends[r], rows[r] + c, (n - c) * sizeof(Element));
      }
    Floats square[kLanes];
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) square[r] = load_lanes(n - c < kLanes ? ends[r] : rows[r] + c);
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) square[i].store(to + (c + i) * kAbreast);
  }
}

// total[j * kAbreast + r] += kAbreast rows of weights times J rows of x, over `columns` columns.
template <int J>
void add_columns(const float* weights, const float* x, int64_t k, int64_t columns, float* total) {
  Floats acc[J][kBlocks];
#pragma GCC unroll 16
  for (int j = 0; j < J; ++j)
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) acc[j][b] = Floats::load(total + j * kAbreast + b * kLanes);
  for (int64_t c = 0; c < columns; ++c) {
    Floats of_w[kBlocks];
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) of_w[b] = Floats::load(weights + c * kAbreast + b * kLanes);
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j) {
      const Floats of_x = Floats::all(x[j * k + c]);
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) acc[j][b] = fma(of_w[b], of_x, acc[j][b]);
    }
  }
#pragma GCC unroll 16
  for (int j = 0; j < J; ++j)
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) acc[j][b].store(total + j * kAbreast + b * kLanes);
}

template <int... kFewer>
void add_rows_of(int rows, const float* weights, const float* x, int64_t k, int64_t columns, float* total,
                 std::integer_sequence<int, kFewer...>) {
  (void)((rows == kFewer + 1 && (add_columns<kFewer + 1>(weights, x, k, columns, total), true)) || ...);
}

template <class Row>
void float_gemm(const Matrix& w, int64_t first, int64_t count, const float* x, int64_t m, float* memory, float* y, int64_t stride) {
  float *weights = memory, *total = memory + kAbreast * kSpan;
  const int64_t parts = (m + kRows - 1) / kRows;  // even parts of the activations: few rows leave execution units idle
  for (int64_t r = 0; r < count; r += kAbreast) {
    const int64_t rows = count - r < kAbreast ? count - r : kAbreast;
    std::memset(total, 0, sizeof(float) * kAbreast * m);
    for (int64_t start = 0; start < w.k; start += kSpan) {
      const int64_t columns = w.k - start < kSpan ? w.k - start : kSpan;
      for (int64_t b = 0; b < rows; b += kLanes)
        decode_block(w, first + r + b, rows - b, start / kSpan, weights + b, static_cast<Row*>(nullptr));
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t j = m * part / parts, next = m * (part + 1) / parts;
        add_rows_of(static_cast<int>(next - j), weights, x + j * w.k + start, w.k, columns, total + j * kAbreast,
                    std::make_integer_sequence<int, kRows>());
      }
    }
    for (int64_t j = 0; j < m; ++j) std::memcpy(y + j * stride + r, total + j * kAbreast, sizeof(float) * rows);
  }
}

}  // namespace
}  // namespace jax_q4k
