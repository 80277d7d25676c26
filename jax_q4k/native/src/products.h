// Packed rows times int8 activations: for up to kGemvRows rows of activations, and for more.

#pragma once

#include <algorithm>

#include "sums.h"

namespace jax_q4k {
namespace {

template <bool kSigned>
JAX_Q4K_INLINE Ints start_of(const int32_t* zero_point) {
  return kSigned && kZeroPoint ? Ints::load(zero_point) : Ints::all(0);
}

template <bool kSigned>
JAX_Q4K_INLINE Ints dot_of(const Bytes& quants, const SignedBytes& values, const Ints& acc) {
  return kSigned ? dot_signed(quants, values, acc) : dot(quants, values, acc);
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
    ((acc = dot_of<Format::kSigned>(steps[i], SignedBytes::load(x.values[i]), acc)), ...);
    return acc;
  }
}

// Spans of a matrix row that are multiplied before those of the next rows, and the end of the first part among them.
struct Pass {
  int64_t first, last, end_of_part;
  bool begins, ends;  // whether the first span begins a part, and whether the last one ends a part
};

// Multiplies spans of `count` rows of a matrix by M rows of activations; the last row is repeated if there are fewer. Adds
// parts, of `part` spans, to y[j * stride + r]. Sums of parts that are not complete are kept in `sums` for the next pass.
template <class Format, int M>
void gemv_rows(const Matrix& w, int64_t first, int64_t count, const Pass& pass, int64_t part, const RowSpan* x, int m, void* sums,
               float* y, int64_t stride) {
  static_assert(!(Format::kCut && Format::kMins));  // only scales are masked in a cut span
  constexpr int kAhead = kAheadBytes / (Format::kBytes[0] + Format::kBytes[1] + Format::kBytes[2] + Format::kBytes[3]);
  using Sums = SumsOf<Format, M>;
  static_assert(sizeof(Sums) <= kSumsBytes * M);
  const int64_t spans = (w.k + kSpan - 1) / kSpan, whole = w.k / kSpan;
  const RowSpan* values[M];
#pragma GCC unroll 8
  for (int j = 0; j < M; ++j) values[j] = x + (j < m ? j : m - 1) * spans;
  for (int64_t r = 0; r < count; ++r) {
    Sums total, *kept = static_cast<Sums*>(sums) + r;
    if (pass.begins)
      total.clear();
    else
      total = *kept;
    const uint8_t* planes[Format::kPlanes];
    for (int i = 0; i < Format::kPlanes; ++i) planes[i] = plane<Format>(w, i, first + r, pass.first);
    CutSpan<Format> cut;
    int64_t origin = pass.first, end_of_part = pass.end_of_part;  // span at `planes`
    for (int64_t start = pass.first, end; start < pass.last; start = end) {
      end = std::min(pass.last, end_of_part);
      if (start < whole) {
        end = std::min(end, whole);
      } else {  // the span that is cut
        origin = whole;
        if (!followed(w, first + r))
          cut.copy(w, first + r, planes);
        else
          for (int i = 0; i < Format::kPlanes; ++i) planes[i] = plane<Format>(w, i, first + r, whole);
      }
      for (int64_t s = start; s < end; ++s) {
        const uint8_t* at[Format::kPlanes];
#pragma GCC unroll 4
        for (int i = 0; i < Format::kPlanes; ++i) {
          at[i] = planes[i] + (s - origin) * Format::kBytes[i];
#pragma GCC unroll 4
          for (int b = 0; b < Format::kBytes[i]; b += 64) __builtin_prefetch(at[i] + kAhead * Format::kBytes[i] + b);
        }
        Floats scale = Format::scales(at);
        if (Format::kCut && s == whole) scale = scales_up_to(w.k % kSpan, scale);
        const auto scales = Sums::scales_of(at, scale);
        Bytes steps[4];
        read_steps<Format>(at, steps);
        auto dot_some = [&](int j, auto some) __attribute__((always_inline)) {
          const RowSpan& span = values[j][s];
          const Ints start = Format::kGroup == 32 ? start_of<Format::kSigned>(span.zero_point) : Ints::all(0);
          return dot_steps<Format>(steps, span, start, some);
        };
        total.add(scales, values, s, dot_some);
      }
      if (end < end_of_part && end < spans) continue;
      float added[M];
      total.add_up(added);
      total.clear();
#pragma GCC unroll 8
      for (int j = 0; j < M; ++j)
        if (j < m) y[j * stride + r] = end <= part ? added[j] : y[j * stride + r] + added[j];
      end_of_part += part;
    }
    if (!pass.ends) *kept = total;
  }
}

template <class Format>
void gemv(const Matrix& w, int64_t first, int64_t count, const RowSpan* x, int m, float* y, int64_t stride) {
  constexpr int M = Format::kFew || kWidth == 16 ? 1 : kWidth / 8;  // rows of activations at a time, limited by registers
  constexpr int kRows = 8;  // rows of the matrix per pass over some spans of x, as many as fit L1
  const int64_t spans = (w.k + kSpan - 1) / kSpan, part = part_spans(spans);
  for (int64_t r = 0; r < count; r += kRows) {
    const int64_t rows = std::min<int64_t>(kRows, count - r);
    for (int j = 0, taken; j < m; j += taken) {
      taken = std::min(m - j, M);
      auto* multiply = taken == 1 ? gemv_rows<Format, 1> : taken == 2 ? gemv_rows<Format, std::min(M, 2)>
                       : taken <= 4 ? gemv_rows<Format, std::min(M, 4)> : gemv_rows<Format, M>;
      const int64_t most = kNearBytes / (sizeof(RowSpan) * taken), passes = (spans + most - 1) / most, step = (spans + passes - 1) / passes;
      alignas(64) uint8_t sums[kRows * kSumsBytes * M];
      for (int64_t s = 0; s < spans; s += step) {
        const int64_t last = std::min(s + step, spans);
        const Pass pass{s, last, s / part * part + part, s % part == 0, last % part == 0 || last == spans};
        multiply(w, first + r, rows, pass, part, x + j * spans, taken, sums, y + j * stride + r, stride);
      }
    }
  }
}

// A group of columns of the spans of a part of a tile, unpacked: quants (row, span, column), scales and mins (span, row).
template <int kColumns>
struct alignas(64) UnpackedGroup {
  uint8_t quants[kTile * kPartSpans * kColumns];
  float scale[kPartSpans][kTile], min[kPartSpans][kTile];
  uint8_t unused[64];  // so that a place of all groups is not the same set of a cache
};
static_assert(sizeof(UnpackedGroup<32>) * 8 <= kUnpackedBytes && sizeof(UnpackedGroup<16>) * 16 <= kUnpackedBytes);

template <class Format>
void unpack(const uint8_t* const* planes, int64_t r, int64_t s, int64_t spans, UnpackedGroup<Format::kGroup>* to) {
  constexpr int kGroups = kSpan / Format::kGroup;
  const Bytes pieces[4] = {Format::template quants<0>(planes), Format::template quants<1>(planes),
                           Format::template quants<2>(planes), Format::template quants<3>(planes)};
  auto at = [&](int group) { return to[group].quants + (r * spans + s) * Format::kGroup; };
  if (Format::kGroup == 32) {
    store_pairs(pieces[0], pieces[1], at(0), at(2), at(4), at(6));
    store_pairs(pieces[2], pieces[3], at(1), at(3), at(5), at(7));
  } else {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) store_quarters(pieces[i], at(i), at(i + 4), at(i + 8), at(i + 12));
  }
  const Floats found = Format::scales(planes);
  float scales[16], mins[16];
  found.store(scales), mins_of<Format>(planes, found).store(mins);
#pragma GCC unroll 16
  for (int g = 0; g < kGroups; ++g)
    if (Format::kGroup == 32)
      to[g].scale[s][r] = scales[2 * g], to[g].min[s][r] = scales[2 * g + 1];
    else
      to[g].scale[s][r] = scales[g], to[g].min[s][r] = mins[g];
}

// acc = `count` spans of group g of rows [row, row + R) of a tile times B blocks of activations, which are `spans` apart.
template <int kGroup, bool kSigned, int kRun, int R, int B>
JAX_Q4K_INLINE void add_products(const UnpackedGroup<kGroup>& w, int g, int64_t row, const BlockSpan* x, int64_t spans,
                                 int64_t count, Floats (&acc)[R][B]) {
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) acc[r][b] = Floats::all(0);
  for (int64_t s = 0; s < count; ++s) {
    Ints products[R][B];
    for (int r = 0; r < R; ++r)
      for (int b = 0; b < B; ++b) products[r][b] = start_of<kSigned>(x[b * spans + s].zero_point[g]);
#pragma GCC unroll 8
    for (int start = 0; start < kGroup / 4; start += kRun) {
      Narrow sums[R][B];
      for (int r = 0; r < R; ++r)
        for (int b = 0; b < B; ++b) sums[r][b] = Narrow::all(0);
#pragma GCC unroll 8
      for (int i = start; i < start + kRun; ++i)
        for (int r = 0; r < R; ++r) {
          uint32_t four;
          std::memcpy(&four, w.quants + ((row + r) * count + s) * kGroup + i * 4, 4);
          const Bytes quants = Words::all(four).template as<uint8_t>();
          for (int b = 0; b < B; ++b) {
            const SignedBytes values = SignedBytes::load(x[b * spans + s].values[g * (kGroup / 4) + i]);
            if constexpr (kRun > 1)
              sums[r][b] = dot(quants, values, sums[r][b]);
            else
              products[r][b] = dot_of<kSigned>(quants, values, products[r][b]);
          }
        }
      for (int r = 0; r < R && kRun > 1; ++r)
        for (int b = 0; b < B; ++b) products[r][b] = widened(sums[r][b], products[r][b]);
    }
    for (int b = 0; b < B; ++b) {
      const BlockSpan& span = x[b * spans + s];
      const Floats scale = Floats::load(span.scale32[g * kGroup / 32]);
      for (int r = 0; r < R; ++r) {
        if (kGroup == 16) acc[r][b] = fma(Floats::all(w.min[s][row + r]), Floats::load(span.sum16[g]), acc[r][b]);
        acc[r][b] = fma(Floats::all(w.scale[s][row + r]) * scale, to_float(products[r][b]), acc[r][b]);
      }
    }
  }
}

// The same for the mins of a group of 32 columns.
template <int R, int B>
JAX_Q4K_INLINE void add_mins(const UnpackedGroup<32>& w, int g, int64_t row, const BlockSpan* x, int64_t spans, int64_t count,
                             Floats (&acc)[R][B]) {
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) acc[r][b] = Floats::all(0);
  for (int64_t s = 0; s < count; ++s)
    for (int b = 0; b < B; ++b) {
      const Floats sums = Floats::load(x[b * spans + s].sum32[g]);
      for (int r = 0; r < R; ++r) acc[r][b] = fma(Floats::all(w.min[s][row + r]), sums, acc[r][b]);
    }
}

template <int R, int B>
JAX_Q4K_INLINE void add_to(const Floats (&from)[R][B], Floats (&to)[R][B]) {
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) to[r][b] = to[r][b] + from[r][b];
}

// total[r][j] = [total[r][j] +] the product of a part, of `count` spans, of row r of a tile and lane j of the blocks.
template <int kGroup, bool kSigned, int kRun>
void add_part(const UnpackedGroup<kGroup>* w, int64_t rows, const BlockSpan* x, int64_t spans, int64_t count, int64_t blocks,
              bool first, float* total) {
  // as many sums as registers hold; while Narrow sums are in registers, the floats wait in memory
  constexpr bool kFlips = kWidth == 32 && kSigned && !kZeroPoint;  // `dot_signed` needs magnitudes: of only R words
  constexpr int R = kFlips ? 1 : kRun > 1 ? 4 : kWidth / 16, B = kWidth == 64 ? 2 : kFlips ? 4 : 1;
  static_assert(kTile % (R * B) == 0);
  constexpr bool kMins = kGroup == 32 && !kSigned;
  constexpr int kGroups = kSpan / kGroup;
  const int64_t pitch = blocks * kLanes;
  alignas(64) float pending[4][kTile][B * kLanes];  // sums of 1, 2, 4 and 8 groups
  for (int64_t b = 0, taken; b < blocks; b += taken) {
    taken = b + B <= blocks ? B : 1;
    const BlockSpan* block = x + b * spans;
    for (int turn = 0; turn < kGroups; ++turn) {
      const int lane = added_as(turn, kGroups), g = kGroup == 16 ? lane16(lane) : lane32(lane);
      auto add = [&](auto tile_rows, auto tile_blocks) __attribute__((always_inline)) {
        constexpr int kR = decltype(tile_rows)::value, kB = decltype(tile_blocks)::value;
        for (int64_t row = 0; row < rows; row += kR) {
          Floats acc[kR][kB], mins[kR][kB];
          add_products<kGroup, kSigned, kRun>(w[g], g, row, block, spans, count, acc);
          if constexpr (kMins) add_mins(w[g], g, row, block, spans, count, mins), add_to(mins, acc);
          int level = 0;
          for (; turn >> level & 1; ++level)
            for (int r = 0; r < kR; ++r)
              for (int c = 0; c < kB; ++c) acc[r][c] = Floats::load(pending[level][row + r] + c * kLanes) + acc[r][c];
          for (int r = 0; r < kR; ++r)
            for (int c = 0; c < kB; ++c) {
              float* to = turn + 1 < kGroups ? pending[level][row + r] + c * kLanes : total + (row + r) * pitch + (b + c) * kLanes;
              if (turn + 1 == kGroups && !first) acc[r][c] = Floats::load(to) + acc[r][c];
              acc[r][c].store(to);
            }
        }
      };
      if (taken == B)
        add(std::integral_constant<int, R>(), std::integral_constant<int, B>());
      else
        add(std::integral_constant<int, R * B>(), std::integral_constant<int, 1>());
    }
  }
}

template <class Format>
void gemm(const Matrix& w, int64_t first, int64_t count, const BlockSpan* x, int64_t blocks, void* memory, float* total) {
  constexpr int kTogether = 8;  // a multiple of the rows that `add_part` takes at a time
  auto* groups = static_cast<UnpackedGroup<Format::kGroup>*>(memory);
  const int64_t spans = (w.k + kSpan - 1) / kSpan, part = part_spans(spans);
  const int64_t rows = (count + kTogether - 1) / kTogether * kTogether;  // the last row is repeated
  for (int64_t start = 0; start < spans; start += part) {
    const int64_t of_part = std::min(part, spans - start);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = first + std::min(r, count - 1);
      for (int64_t s = 0; s < of_part; ++s) {
        const uint8_t* planes[Format::kPlanes];
        for (int i = 0; i < Format::kPlanes; ++i) planes[i] = plane<Format>(w, i, row, start + s);
        CutSpan<Format> cut;
        if ((start + s + 1) * kSpan > w.k) cut.copy(w, row, planes);
        for (int i = 0; i < Format::kPlanes; ++i)  // of the next row: some spans of so many rows are no stream to a processor
          for (int b = 0; b < Format::kBytes[i] + 63; b += 64) __builtin_prefetch(planes[i] + w.k / 32 * Format::kBytes[i] / 8 + b);
        unpack<Format>(planes, r, s, of_part, groups);
      }
    }
    add_part<Format::kGroup, Format::kSigned, run_of<Format>()>(groups, rows, x + start, spans, of_part, blocks, start == 0, total);
  }
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
