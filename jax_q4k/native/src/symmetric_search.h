// Searches scales without minimums, weight = s * q with q in -kTop to kTop - 1: `quantizers/symmetric.py`, with the same
// candidates.

#pragma once

#include <algorithm>
#include <type_traits>

#include "block_lanes.h"

namespace jax_q4k {
namespace {

// Integers from -kTop to kTop - 1, and the levels to try for the value of largest magnitude: integers down to kMinimum, and
// fractions of 1 / kFractions near kTop. See `symmetric.integers`.
template <int kTop_, int kMinimum, int kFractions>
struct Integers {
  static constexpr int kTop = kTop_;
  float levels[(kTop - kMinimum + 1) + 3 * (kFractions - 1) + kFractions / 2];
  constexpr Integers() : levels() {
    int count = 0;
    for (int level = kTop; level >= kMinimum; --level) levels[count++] = static_cast<float>(-level);
    for (int i = 1 - 2 * kFractions; i < kFractions; ++i)
      if (i % kFractions) levels[count++] = -kTop - static_cast<float>(i) / kFractions;
    for (int i = -kFractions / 2; i < 0; ++i) levels[count++] = kTop + static_cast<float>(i) / kFractions;
  }
  // Limits that rounding needs if the largest value is at a level: none, the upper one, or both.
  enum Limits { kNone, kUpper, kBoth };
  static constexpr Limits limits(float level) {
    const float size = level < 0 ? -level : level;
    return size < kTop - 0.5f ? kNone : size < kTop + 0.5f ? kUpper : kBoth;
  }
  template <Limits kLimits = kBoth>
  static JAX_Q4K_INLINE Floats nearest(const Floats& x) {
    if constexpr (kLimits == kNone) return rounded(x);
    if constexpr (kLimits == kUpper) return rounded(smaller(x, Floats::all(kTop - 1)));
    return rounded(x, -kTop, kTop - 1);
  }
};

struct Step {
  Floats s, error, squares;  // and the error of s = 0
};

// Best step s of x ~ s * q; an f16 if `kHalf`. The errors of trials are sums of squares if `kExact`, else differences of sums:
// a third fewer instructions, but rounding errors relative to the sum of squares.
template <class Grid, int kValues, bool kHalf, bool kExact>
JAX_Q4K_INLINE Step best_step(const Floats* x, const Floats* w) {
  static constexpr Grid grid;
  const Floats zero = Floats::all(0);
  Floats largest = Floats::all(-1), extreme = zero, squares = zero, s = zero;
  for (int i = 0; i < kValues; ++i) {
    const Floats size = magnitude(x[i]);
    extreme = where_less(largest, size, x[i], extreme), largest = larger(size, largest);
    squares = squares + w[i] * x[i] * x[i];
  }
  Floats least = squares;
  // Fits s to the quants of kTrials trial steps, which are read together, and keeps it if its error is the least so far.
  auto consider = [&](const auto& inverse, auto limits) __attribute__((always_inline)) {
    constexpr int kTrials = sizeof inverse / sizeof *inverse;
    Floats qx[kTrials], qq[kTrials];
    for (int t = 0; t < kTrials; ++t) qx[t] = qq[t] = zero;
    for (int i = 0; i < kValues; ++i)
      for (int t = 0; t < kTrials; ++t) {
        const Floats q = Grid::template nearest<limits>(x[i] * inverse[t]), wq = w[i] * q;
        qx[t] = qx[t] + wq * x[i], qq[t] = qq[t] + wq * q;
      }
    for (int t = 0; t < kTrials; ++t) {
      const Floats fitted = qx[t] * reciprocal(qq[t]), trial = kHalf ? nearest_half(fitted) : fitted, moved = trial - fitted;
      Floats error = zero;
      if constexpr (kExact) {
        for (int i = 0; i < kValues; ++i) {
          const Floats off = trial * Grid::template nearest<limits>(x[i] * inverse[t]) - x[i];
          error = error + w[i] * (off * off);
        }
      } else {
        error = squares - fitted * qx[t] + moved * moved * qq[t];
      }
      s = where_less(error, least, trial, s), least = smaller(error, least);
    }
  };
  const Floats over = reciprocal(extreme);
  constexpr int kLevels = sizeof grid.levels / sizeof *grid.levels, kTogether = kHalf ? 2 : 1;
  for (int first = 0; first < kLevels; first += kTogether) {
    Floats inverse[kTogether];
    auto limits = Grid::kNone;
    for (int t = 0; t < kTogether; ++t) {
      const float level = grid.levels[std::min(first + t, kLevels - 1)];
      inverse[t] = Floats::all(level) * over, limits = std::max(limits, Grid::limits(level));
    }
    if (limits == Grid::kNone) consider(inverse, std::integral_constant<typename Grid::Limits, Grid::kNone>());
    if (limits == Grid::kUpper) consider(inverse, std::integral_constant<typename Grid::Limits, Grid::kUpper>());
    if (limits == Grid::kBoth) consider(inverse, std::integral_constant<typename Grid::Limits, Grid::kBoth>());
  }
  const Floats inverse[] = {reciprocal(s)};
  consider(inverse, std::integral_constant<typename Grid::Limits, Grid::kBoth>());
  return {s, least, squares};
}

// Best f16 step. Rounding errors of differences decide only in blocks that almost lie on a grid.
template <class Grid, int kValues>
JAX_Q4K_INLINE Floats best_half(const Floats* x, const Floats* w) {
  const Step found = best_step<Grid, kValues, true, false>(x, w);
  // a bound of the rounding errors of sums of kValues products: of w x^2, of w q^2 and, squared, of w q x
  const Floats limit = found.squares * Floats::all(4 * (kValues + 2) * kRoundoff);
  if (!any_less(found.error, limit)) return found.s;
  return where_less(found.error, limit, best_step<Grid, kValues, true, true>(x, w).s, found.s);
}

// Quantizes sixteen super-blocks: weight = d * scale * q, with scales from -kMaximum to kMaximum - 1.
template <class Grid, int kValues, int kSubs, int kMaximum>
struct SymmetricSearch {
  using Blocks = Lanes<kValues, kSubs>;
  struct Found {
    Floats error, d, scale[kSubs];
  };

  // Tries scales one step up or down.
  static void refine(const Blocks& blocks, Found* found) {
    found->error = Floats::all(0);
    for (int sub = 0; sub < kSubs; ++sub) {
      const Floats *x = blocks.x + sub * kValues, *w = blocks.w + sub * kValues, scale = found->scale[sub];
      Floats least = Floats::all(INFINITY), best = scale;
      for (int step : {0, 1, -1}) {
        const Floats n = smaller(larger(scale + Floats::all(static_cast<float>(step)), Floats::all(-kMaximum)), Floats::all(kMaximum - 1));
        const Floats s = found->d * n, inverse = reciprocal(s);
        Floats error = Floats::all(0);
        for (int i = 0; i < kValues; ++i) {
          const Floats off = s * Grid::nearest(x[i] * inverse) - x[i];
          error = error + w[i] * (off * off);
        }
        best = where_less(error, least, n, best), least = smaller(error, least);
      }
      found->scale[sub] = best, found->error = found->error + least;
    }
  }

  static void search(const Blocks& blocks, Found* best) {
    const Floats zero = Floats::all(0);
    Floats s[kSubs], cost[kSubs], most = Floats::all(-1), largest = zero;
    for (int sub = 0; sub < kSubs; ++sub) {
      const Floats *x = blocks.x + sub * kValues, *w = blocks.w + sub * kValues;
      s[sub] = best_step<Grid, kValues, false, true>(x, w).s, cost[sub] = zero;
      const Floats inverse = reciprocal(s[sub]), size = magnitude(s[sub]);
      for (int i = 0; i < kValues; ++i) {
        const Floats q = Grid::nearest(x[i] * inverse);
        cost[sub] = cost[sub] + w[i] * (q * q);
      }
      largest = where_less(most, size, s[sub], largest), most = larger(size, most);
    }
    // candidates for d: the largest step divided by integers, of both signs
    Floats least = Floats::all(INFINITY);
    best->d = Floats::all(kSmallestHalf);
    for (int sign : {-1, 1})
      for (int parts = sign < 0 ? kMaximum : kMaximum - 1; parts >= kMaximum / 2; --parts) {
        Floats d = nearest_half(largest / Floats::all(static_cast<float>(sign * parts)));
        const Ints smallest = (d.as<int32_t>() & Ints::all(INT32_MIN)) | Floats::all(kSmallestHalf).as<int32_t>();
        d = where_less(magnitude(d), Floats::all(kSmallestHalf), smallest.as<float>(), d);
        Floats error = zero;
        for (int sub = 0; sub < kSubs; ++sub) {
          const Floats off = s[sub] - d * rounded(s[sub] / d, -kMaximum, kMaximum - 1);
          error = error + cost[sub] * (off * off);
        }
        best->d = where_less(error, least, d, best->d), least = smaller(error, least);
      }
    for (int sub = 0; sub < kSubs; ++sub) best->scale[sub] = rounded(s[sub] / best->d, -kMaximum, kMaximum - 1);
    refine(blocks, best);

    Found refined = *best;
    Floats ax = zero, aa = zero;  // x ~ d * a
    Floats inverse[kSubs];
    for (int sub = 0; sub < kSubs; ++sub) inverse[sub] = reciprocal(best->d * best->scale[sub]);
    for (int i = 0; i < kValues; ++i)  // in the order of XLA's sums
      for (int sub = 0; sub < kSubs; ++sub) {
        const Floats x = blocks.x[sub * kValues + i], a = best->scale[sub] * Grid::nearest(x * inverse[sub]);
        const Floats wa = blocks.w[sub * kValues + i] * a;
        ax = ax + wa * x, aa = aa + wa * a;
      }
    refined.d = nearest_half(ax * reciprocal(aa));
    refine(blocks, &refined);
    most = zero;
    best->d = where_less(refined.error, best->error, refined.d, best->d);
    for (int sub = 0; sub < kSubs; ++sub) {
      best->scale[sub] = where_less(refined.error, best->error, refined.scale[sub], best->scale[sub]);
      most = larger(most, magnitude(best->scale[sub]));
    }
    best->d = where_less(zero, most, best->d, zero);
  }
};

// Calls pack(d, scales, quants, packed) for each super-block; scales are int8, and quants uint8, plus kTop.
template <class Grid, int kValues, int kSubs, int kMaximum, int kBytes, class Pack>
JAX_Q4K_INLINE bool symmetric_super_blocks(const FloatBlocks& s, Pack pack) {
  using Search = SymmetricSearch<Grid, kValues, kSubs, kMaximum>;
  return each_sixteen<kValues, kSubs, kBytes>(s, [&](const auto& lanes, int count, const float* x, uint8_t* packed) {
    typename Search::Found found;
    Search::search(lanes, &found);
    float d[kLanes], scale[kSubs][kLanes];
    found.d.store(d);
    for (int sub = 0; sub < kSubs; ++sub) found.scale[sub].store(scale[sub]);
    for (int b = 0; b < count; ++b, x += kValues * kSubs, packed += kBytes) {
      int8_t scales[kSubs];
      uint8_t quants[kSubs * kValues];
      for (int sub = 0; sub < kSubs; ++sub) {
        scales[sub] = static_cast<int8_t>(scale[sub][b]);
        quantize_values<kValues>(x + sub * kValues, d[b] * scale[sub][b], 0, -Grid::kTop, Grid::kTop - 1, quants + sub * kValues);
      }
      pack(d[b], scales, quants, packed);
    }
  });
}

// Calls pack(d, quants, packed) for each block of 32; quants are plus kTop.
template <class Grid, int kBytes, class Pack>
JAX_Q4K_INLINE bool symmetric_blocks(const FloatBlocks& s, Pack pack) {
  constexpr int kBlock = 32;
  return each_sixteen<kBlock, 1, kBytes>(s, [&](const Lanes<kBlock>& lanes, int count, const float* x, uint8_t* packed) {
    float d[kLanes];
    best_half<Grid, kBlock>(lanes.x, lanes.w).store(d);
    for (int b = 0; b < count; ++b, x += kBlock, packed += kBytes) {
      uint8_t quants[kBlock];
      quantize_values<kBlock>(x, d[b], 0, -Grid::kTop, Grid::kTop - 1, quants);
      pack(d[b], quants, packed);
    }
  });
}

}  // namespace
}  // namespace jax_q4k
