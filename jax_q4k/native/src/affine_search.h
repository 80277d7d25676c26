// Searches scales and minimums, weight = s * q - m with q in 0 to kTop: `quantizers/affine.py`, with the same candidates.

#pragma once

#include "block_lanes.h"

namespace jax_q4k {
namespace {

constexpr int kShifts = 4;  // levels by which quants may move up to bring a minimum to a multiple of dmin

// How many levels to try between the lowest and the highest value: see `affine.levels`.
template <int kTop>
struct Levels {
  float level[36] = {};
  int count = 0;
  constexpr Levels() {
    for (int third = 5; third > -31 && third > 3 * (1 - kTop); --third)
      if (third > -kTop || third % 3 == 0) level[count++] = static_cast<float>(kTop + third / 3.0);
  }
};

// Quants of x ~ s * q - m, given 1 / s.
template <int kTop>
JAX_Q4K_INLINE Floats affine_quants(const Floats& x, const Floats& inverse, const Floats& m) {
  return rounded((x + m) * inverse, 0, kTop);
}

// Best s and m of one sub-block alone, by least squares for the quants of some trial steps; m >= 0 if `kBounded`.
template <int kValues, int kTop, bool kBounded>
JAX_Q4K_INLINE void best_line(const Floats* x, const Floats* w, Floats* best_s, Floats* best_m) {
  const Floats zero = Floats::all(0), two = Floats::all(2);
  Floats low = x[0], high = x[0];
  for (int i = 1; i < kValues; ++i) low = smaller(x[i], low), high = larger(x[i], high);
  if (kBounded) low = smaller(low, zero);
  Floats y[kValues], sum_w = zero, sum_wy = zero;
  for (int i = 0; i < kValues; ++i) y[i] = x[i] - low, sum_w = sum_w + w[i], sum_wy = sum_wy + w[i] * y[i];
  Floats least = zero, s = zero, offset = zero;

  // Fits the line to quants by least squares, and keeps it if its error is the least so far.
  auto consider = [&](auto quant_of) __attribute__((always_inline)) {
    Floats q = zero, qq = zero, qy = zero;
    for (int i = 0; i < kValues; ++i) {
      const Floats quant = quant_of(y[i]), wq = w[i] * quant;
      q = q + wq, qq = qq + wq * quant, qy = qy + wq * y[i];
    }
    const Floats over = reciprocal(sum_w * qq - q * q);
    Floats trial = (sum_w * qy - sum_wy * q) * over, trial_offset = (sum_wy * qq - q * qy) * over;
    if (kBounded) {
      const Floats limit = zero - low, bounded = (qy - limit * q) * reciprocal(qq);
      trial = where_less(limit, trial_offset, bounded, trial), trial_offset = where_less(limit, trial_offset, limit, trial_offset);
    }
    const Floats gain = trial * (two * qy - trial * qq - two * trial_offset * q) + trial_offset * (two * sum_wy - trial_offset * sum_w);
    const Floats error = zero - gain;
    s = where_less(error, least, trial, s), offset = where_less(error, least, trial_offset, offset);
    least = smaller(error, least);
  };
  const Floats over_span = reciprocal(high - low);
  static constexpr Levels<kTop> levels;
  for (int l = 0; l < levels.count; ++l) {
    const Floats inverse = Floats::all(levels.level[l]) * over_span;
    if (levels.level[l] < kTop + 0.5f) consider([&](const Floats& value) { return rounded(value * inverse); });
    else consider([&](const Floats& value) { return rounded(smaller(value * inverse, Floats::all(kTop))); });
  }
  const Floats inverse = reciprocal(s), moved = zero - offset;
  consider([&](const Floats& value) { return affine_quants<kTop>(value, inverse, moved); });
  *best_s = s, *best_m = zero - (offset + low);
}

// Finds f16 d and integers n from 0 to kMaximum so that d * n is near the values of kSubs sub-blocks, with errors weighted by
// `cost`. Of the kChoices for a value, the one nearest to a multiple of d counts. Candidates for d are the three largest first
// choices divided by integers.
template <int kSubs, int kMaximum, int kChoices>
JAX_Q4K_INLINE Floats multiples(const Floats (&choices)[kChoices][kSubs], const Floats (&cost)[kSubs], Floats (&n)[kSubs]) {
  const Floats tiny = Floats::all(kSmallestHalf), infinite = Floats::all(INFINITY);
  Floats largest[3];
  for (Floats& one : largest) one = Floats::all(-INFINITY);
  for (Floats value : choices[0])
    for (Floats& one : largest) {
      const Floats other = smaller(one, value);
      one = larger(one, value), value = other;
    }
  // Distance of sub-block i's nearest choice to a multiple of d; writes the multiple.
  auto nearest = [&](const Floats& d, const Floats& inverse, int i, Floats* multiple) __attribute__((always_inline)) {
    Floats distance = infinite;
    for (int c = 0; c < kChoices; ++c) {
      const Floats trial = rounded(choices[c][i] * inverse, 0, kMaximum), off = magnitude(choices[c][i] - d * trial);
      if (multiple) *multiple = where_less(off, distance, trial, *multiple);
      distance = smaller(off, distance);
    }
    return distance;
  };
  Floats least = infinite, best = tiny;
  for (const Floats& one : largest) {
    Floats least_of_one = infinite, best_of_one = tiny;
    for (int parts = kMaximum; parts > kMaximum / 4; --parts) {
      const Floats d = larger(nearest_half(one / Floats::all(static_cast<float>(parts))), tiny), inverse = Floats::all(1) / d;
      Floats error = Floats::all(0);
      for (int i = 0; i < kSubs; ++i) {
        const Floats distance = nearest(d, inverse, i, nullptr);
        error = error + cost[i] * (distance * distance);
      }
      error = where_less(d * Floats::all(kMaximum + 0.5f), largest[0], infinite, error);
      best_of_one = where_less(error, least_of_one, d, best_of_one), least_of_one = smaller(error, least_of_one);
    }
    best = where_less(least_of_one, least, best_of_one, best), least = smaller(least_of_one, least);
  }
  const Floats inverse = Floats::all(1) / best;
  for (int i = 0; i < kSubs; ++i) {
    n[i] = Floats::all(0);
    nearest(best, inverse, i, &n[i]);
  }
  return best;
}

// Quantizes sixteen super-blocks: weight = d * scale * q - dmin * min, with scales and mins from 0 to kMaximum.
template <int kValues, int kSubs, int kTop, int kMaximum>
struct AffineSearch {
  using Blocks = Lanes<kValues, kSubs>;
  struct Found {
    Floats error, d, dmin, scale[kSubs], minimum[kSubs];
  };

  static JAX_Q4K_INLINE Floats best_m(const Floats* x, const Floats* w, const Floats& s, const Floats& m, const Floats& sum_w) {
    const Floats inverse = reciprocal(s);
    Floats sum = Floats::all(0);
    for (int i = 0; i < kValues; ++i) sum = sum + w[i] * (s * affine_quants<kTop>(x[i], inverse, m) - x[i]);
    return sum / sum_w;
  }

  // Tries scales and minimums one step up or down, and quants some levels up or down with the minimum that then fits best.
  static void refine(const Blocks& blocks, const Floats* sum_w, Found* found) {
    static constexpr int kSteps[][3] = {{0, 0, 0}, {0, 1, 0}, {0, -1, 0}, {1, 0, 0}, {1, 1, 0}, {1, -1, 0}, {-1, 0, 0},
                                        {-1, 1, 0}, {-1, -1, 0}, {0, 0, 1}, {0, 0, -1}, {0, 0, 2}, {0, 0, -2}};
    const Floats zero = Floats::all(0), top = Floats::all(kMaximum), over = reciprocal(found->dmin);
    found->error = zero;
    for (int sub = 0; sub < kSubs; ++sub) {
      const Floats *x = blocks.x + sub * kValues, *w = blocks.w + sub * kValues;
      const Floats scale = found->scale[sub], minimum = found->minimum[sub], s = found->d * scale;
      const Floats m = best_m(x, w, s, found->dmin * minimum, sum_w[sub]);
      Floats least = Floats::all(INFINITY), best = scale, best_minimum = minimum;
      for (const auto& step : kSteps) {
        const Floats n = smaller(larger(scale + Floats::all(static_cast<float>(step[0])), zero), top);
        const Floats n_min = step[2] == 0 ? smaller(larger(minimum + Floats::all(static_cast<float>(step[1])), zero), top)
                                          : rounded((m + Floats::all(static_cast<float>(step[2])) * s) * over, 0, kMaximum);
        const Floats step_s = found->d * n, step_m = found->dmin * n_min, inverse = reciprocal(step_s);
        Floats error = zero;
        for (int i = 0; i < kValues; ++i) {
          const Floats off = step_s * affine_quants<kTop>(x[i], inverse, step_m) - step_m - x[i];
          error = error + w[i] * (off * off);
        }
        best = where_less(error, least, n, best), best_minimum = where_less(error, least, n_min, best_minimum);
        least = smaller(error, least);
      }
      found->scale[sub] = best, found->minimum[sub] = best_minimum, found->error = found->error + least;
    }
  }

  // Fits d and dmin to the quants by least squares.
  static void fit(const Blocks& blocks, Found* found) {
    const Floats zero = Floats::all(0);
    Floats aa = zero, ab = zero, bb = zero, ax = zero, bx = zero;  // x ~ d * a + dmin * b
    Floats m[kSubs], inverse[kSubs];
    for (int sub = 0; sub < kSubs; ++sub)
      m[sub] = found->dmin * found->minimum[sub], inverse[sub] = reciprocal(found->d * found->scale[sub]);
    for (int i = 0; i < kValues; ++i)  // in the order of XLA's sums: rounding errors decide here
      for (int sub = 0; sub < kSubs; ++sub) {
        const Floats x = blocks.x[sub * kValues + i], w = blocks.w[sub * kValues + i], b = zero - found->minimum[sub];
        const Floats a = found->scale[sub] * affine_quants<kTop>(x, inverse[sub], m[sub]);
        aa = aa + w * (a * a), ab = ab + w * (a * b), bb = bb + w * (b * b), ax = ax + w * (a * x), bx = bx + w * (b * x);
      }
    const Floats determinant = aa * bb - ab * ab, over = reciprocal(determinant);
    const Floats limit = Floats::all(1e-6f) * aa * bb;  // below it, rounding errors decide
    const Floats d = where_less(limit, determinant, (bb * ax - ab * bx) * over, (ax - ab * found->dmin) * reciprocal(aa));
    const Floats dmin = where_less(limit, determinant, (aa * bx - ab * ax) * over, found->dmin);
    found->d = larger(nearest_half(d), zero), found->dmin = larger(nearest_half(dmin), zero);
  }

  static void search(const Blocks& blocks, Found* best) {
    const Floats zero = Floats::all(0);
    Floats s[1][kSubs], cost[kSubs], sum_w[kSubs], m[kShifts + 1][kSubs];
    for (int sub = 0; sub < kSubs; ++sub) {
      const Floats *x = blocks.x + sub * kValues, *w = blocks.w + sub * kValues;
      best_line<kValues, kTop, true>(x, w, &s[0][sub], &m[0][sub]);
      const Floats inverse = reciprocal(s[0][sub]);
      Floats sum = zero, q = zero, qq = zero;
      for (int i = 0; i < kValues; ++i) {
        const Floats quant = affine_quants<kTop>(x[i], inverse, m[0][sub]), wq = w[i] * quant;
        sum = sum + w[i], q = q + wq, qq = qq + wq * quant;
      }
      sum_w[sub] = sum, cost[sub] = larger(qq - q * q / sum, zero);  // of an error in s when m compensates for it
    }
    best->d = multiples<kSubs, kMaximum, 1>(s, cost, best->scale);
    for (int sub = 0; sub < kSubs; ++sub) {
      const Floats *x = blocks.x + sub * kValues, *w = blocks.w + sub * kValues, step = best->d * best->scale[sub];
      m[0][sub] = larger(best_m(x, w, step, m[0][sub], sum_w[sub]), zero);
      const Floats inverse = reciprocal(step);
      Floats highest = zero;
      for (int i = 0; i < kValues; ++i) highest = larger(highest, affine_quants<kTop>(x[i], inverse, m[0][sub]));
      const Floats room = Floats::all(kTop) - highest;
      for (int shift = 1; shift <= kShifts; ++shift)
        m[shift][sub] = m[0][sub] + smaller(room, Floats::all(static_cast<float>(shift))) * step;
    }
    best->dmin = multiples<kSubs, kMaximum, kShifts + 1>(m, sum_w, best->minimum);
    refine(blocks, sum_w, best);
    Found refined = *best;
    fit(blocks, &refined);
    refine(blocks, sum_w, &refined);
    best->d = where_less(refined.error, best->error, refined.d, best->d);
    best->dmin = where_less(refined.error, best->error, refined.dmin, best->dmin);
    Floats most = zero, most_minimum = zero;
    for (int sub = 0; sub < kSubs; ++sub) {
      best->scale[sub] = where_less(refined.error, best->error, refined.scale[sub], best->scale[sub]);
      best->minimum[sub] = where_less(refined.error, best->error, refined.minimum[sub], best->minimum[sub]);
      most = larger(most, best->scale[sub]), most_minimum = larger(most_minimum, best->minimum[sub]);
    }
    best->d = where_less(zero, most, best->d, zero), best->dmin = where_less(zero, most_minimum, best->dmin, zero);
  }
};

// Calls pack(d, dmin, scales, minimums, quants, packed) for each super-block; the last but one is uint8 (kSubs * kValues).
template <int kValues, int kSubs, int kTop, int kMaximum, int kBytes, class Pack>
JAX_Q4K_INLINE bool affine_super_blocks(const FloatBlocks& s, Pack pack) {
  using Search = AffineSearch<kValues, kSubs, kTop, kMaximum>;
  return each_sixteen<kValues, kSubs, kBytes>(s, [&](const auto& lanes, int count, const float* x, uint8_t* packed) {
    typename Search::Found found;
    Search::search(lanes, &found);
    float d[kLanes], dmin[kLanes], scale[kSubs][kLanes], minimum[kSubs][kLanes];
    found.d.store(d), found.dmin.store(dmin);
    for (int sub = 0; sub < kSubs; ++sub) found.scale[sub].store(scale[sub]), found.minimum[sub].store(minimum[sub]);
    for (int b = 0; b < count; ++b, x += kValues * kSubs, packed += kBytes) {
      uint8_t scales[kSubs], minimums[kSubs], quants[kSubs * kValues];
      for (int sub = 0; sub < kSubs; ++sub) {
        scales[sub] = static_cast<uint8_t>(scale[sub][b]), minimums[sub] = static_cast<uint8_t>(minimum[sub][b]);
        quantize_values<kValues>(x + sub * kValues, d[b] * scale[sub][b], dmin[b] * minimum[sub][b], 0, kTop, quants + sub * kValues);
      }
      pack(d[b], dmin[b], scales, minimums, quants, packed);
    }
  });
}

// Calls pack(d, m, quants, packed) for each block of 32, weight = d * q + m.
template <int kTop, int kBytes, class Pack>
JAX_Q4K_INLINE bool affine_blocks(const FloatBlocks& blocks, Pack pack) {
  constexpr int kBlock = 32;
  return each_sixteen<kBlock, 1, kBytes>(blocks, [&](const Lanes<kBlock>& lanes, int count, const float* x, uint8_t* packed) {
    // the nearest f16 and its neighbours; then quants moved up, so that m falls on another f16
    static constexpr int kSteps[][2] = {{0, 0}, {1, 0}, {-1, 0}, {0, 1}, {0, 2}, {0, 3}, {0, 4}};
    const Floats zero = Floats::all(0);
    Floats s, minimum, sum_w = zero, least = Floats::all(INFINITY);
    best_line<kBlock, kTop, false>(lanes.x, lanes.w, &s, &minimum);
    for (const Floats& w : lanes.w) sum_w = sum_w + w;
    Floats best = s, best_m = zero - minimum;
    const Floats ulp = larger(s * Floats::all(0x1p-11f), Floats::all(kSmallestHalf));
    for (const auto& step : kSteps) {
      const Floats d = larger(nearest_half(s + Floats::all(static_cast<float>(step[0])) * ulp), zero), inverse = reciprocal(d);
      const Floats moved = minimum + Floats::all(static_cast<float>(step[1])) * d;
      Floats sum = zero, error = zero;
      for (int i = 0; i < kBlock; ++i) sum = sum + lanes.w[i] * (lanes.x[i] - d * affine_quants<kTop>(lanes.x[i], inverse, moved));
      const Floats m = nearest_half(sum / sum_w), up = zero - m;
      for (int i = 0; i < kBlock; ++i) {
        const Floats off = d * affine_quants<kTop>(lanes.x[i], inverse, up) + m - lanes.x[i];
        error = error + lanes.w[i] * (off * off);
      }
      best = where_less(error, least, d, best), best_m = where_less(error, least, m, best_m), least = smaller(error, least);
    }
    float d[kLanes], m[kLanes];
    best.store(d), best_m.store(m);
    for (int b = 0; b < count; ++b, x += kBlock, packed += kBytes) {
      uint8_t quants[kBlock];
      quantize_values<kBlock>(x, d[b], -m[b], 0, kTop, quants);
      pack(d[b], m[b], quants, packed);
    }
  });
}

}  // namespace
}  // namespace jax_q4k
