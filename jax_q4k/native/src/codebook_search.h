// Searches codebook entries, signs and scales for blocks of floats: the quantizers of ggml's IQ1, IQ2 and IQ3 formats.
//
// weight = d * unit * (2 * scale + 1) * value. 16 sub-blocks, one per lane, are searched at a time. For a step t = d *
// unit * (2 * scale + 1), the error of a value is w * (x - t * v)^2 = w * x^2 + t * v * (t * v * w - 2 * a), a = w * x.
// An entry consists of two halves; the errors of all possible halves are tabulated, and the error of an entry is the sum
// of two numbers of the tables. Entries are sorted by their first halves, so that only the minimum over the second
// halves depends on the entry. Minima of two that many first halves need are computed once.

#pragma once

#include <cmath>

#include "conversions.h"
#include "kernels.h"
#include "vectors.h"

namespace jax_q4k {
namespace {

JAX_Q4K_INLINE Floats where_equal(const Ints& a, int b, const Floats& x, const Floats& y) {
  Floats c;
  for (int i = 0; i < Floats::kParts; ++i) c.part[i] = a.part[i] == b ? x.part[i] : y.part[i];
  return c;
}

// The nearest positive finite f16.
inline float positive_half(float x) {
  Half nearest;
  from_float(x > 0x1p-24f ? x < 65504 ? x : 65504 : 0x1p-24f, &nearest);
  return to_float(nearest);
}

// How a format stores values: values of an entry and of a scale, the largest scale, signs. Ternary values are shifted
// by 1 / 8 up or down, all of a scale or eight at a time.
template <int kEntry_, int kScaled_, int kLargestScale_, Signs kSigns_, bool kShiftOfScaled_ = false>
struct BookShape {
  static constexpr int kEntry = kEntry_, kScaled = kScaled_, kLargestScale = kLargestScale_;
  static constexpr Signs kSigns = kSigns_;
  static constexpr bool kShiftOfScaled = kShiftOfScaled_;
  static constexpr int kHalf = kEntry / 2, kLevels = kHalf == 4 ? 3 : 8;
  static constexpr int kHalves = kHalf == 4 ? 81 : 64;  // kLevels to the power of kHalf
};

// Entries by their first halves.
template <class Shape>
struct Book {
  static constexpr int kTogether = 2;  // second halves that are read together, after the first one
  int used = 0;                        // first halves that occur
  int first[Shape::kHalves], begin[Shape::kHalves + 1];
  uint16_t second[2048 + Shape::kHalves * kTogether];  // second halves, or pairs, of a first half; the last one fills up
  int num_pairs;
  const uint8_t* pairs;
  uint16_t entry[Shape::kHalves * Shape::kHalves] = {};
  float level[Shape::kLevels];

  explicit Book(const CodebookSearch& s) : num_pairs(static_cast<int>(s.num_pairs)), pairs(s.pairs) {
    for (int l = 0; l < Shape::kLevels; ++l) level[l] = s.levels[l];
    auto half = [&](int64_t e, int at) {
      int index = 0;
      for (int i = 0; i < Shape::kHalf; ++i) index = index * Shape::kLevels + s.digits[e * Shape::kEntry + at + i] % Shape::kLevels;
      return index;
    };
    bool has[Shape::kHalves][Shape::kHalves + kMostPairs] = {};  // whether a first half has a second half, or a pair
    for (int64_t e = 0; e < s.num_entries; ++e) {
      const int f = half(e, 0), g = half(e, Shape::kHalf);
      has[f][g] = true, entry[f * Shape::kHalves + g] = static_cast<uint16_t>(e);
    }
    int count = 0;
    for (int f = 0; f < Shape::kHalves; ++f) {
      for (int p = 0; p < num_pairs; ++p) {
        bool &a = has[f][pairs[2 * p]], &b = has[f][pairs[2 * p + 1]];
        if (&a != &b && a && b) a = b = false, has[f][Shape::kHalves + p] = true;
      }
      const int start = count;
      for (int g = 0; g < Shape::kHalves + num_pairs; ++g)
        if (has[f][g]) second[count++] = static_cast<uint16_t>(g);
      if (count == start) continue;
      for (; (count - start - 1) % kTogether; ++count) second[count] = second[count - 1];
      first[used] = f, begin[used++] = start;
    }
    begin[used] = count;
  }
};

// The best values of 16 sub-blocks for a step: sums of a * v and w * v^2, and what is stored.
template <class Shape>
struct Fit {
  static constexpr int kEights = Shape::kScaled / 8, kEntries = Shape::kScaled / Shape::kEntry;
  Floats p, q;
  Ints halves[kEntries];  // first half * 128 + second half
  Ints other[kEights];    // of eight values: the one with the opposite sign, 8 for none; or whether they are shifted down
};

// 16 sub-blocks, values first.
template <class Shape>
struct SubBlocks {
  Floats a[Shape::kScaled], w[Shape::kScaled];  // w * |x| or, if ternary, w * x; and w
  Floats odd[Shape::kScaled / 8];               // 1 if an odd number of eight values is negative, else 0
};

template <class Shape>
class Searcher {
 public:
  explicit Searcher(const CodebookSearch& s) : book_(s) {}

  // The best values for step t, of each sub-block.
  Fit<Shape> fit(const SubBlocks<Shape>& x, const Floats& t) {
    if constexpr (Shape::kSigns == kTernary) return fit_shifted(x, t);
    else return fit_signed(x, t);
  }

  // Replaces *best where `error` is less than `least`.
  static void take_better(const Floats& error, const Fit<Shape>& fit, const Floats& least, Fit<Shape>* best) {
    best->p = where_less(error, least, fit.p, best->p), best->q = where_less(error, least, fit.q, best->q);
    for (int i = 0; i < Fit<Shape>::kEntries; ++i) best->halves[i] = where_less(error, least, fit.halves[i], best->halves[i]);
    for (int i = 0; i < Fit<Shape>::kEights; ++i) best->other[i] = where_less(error, least, fit.other[i], best->other[i]);
  }

  const Book<Shape>& book() const { return book_; }

 private:
  static constexpr int kHalves = Shape::kHalves, kLevels = Shape::kLevels, kEights = Fit<Shape>::kEights;
  static constexpr int kVariants = Shape::kSigns == kFreeSigns ? 1 : 2;
  static constexpr uint32_t kIndexBits = 127;  // the low bits of a second half's error are replaced by its index

  Fit<Shape> fit_signed(const SubBlocks<Shape>& x, const Floats& t) {
    constexpr bool kFlips = Shape::kSigns == kEvenSigns;
    Floats level[kLevels], steps[kLevels];
    for (int l = 0; l < kLevels; ++l) level[l] = Floats::all(book_.level[l]), steps[l] = t * level[l];
    Fit<Shape> result = {};
    for (int i = 0; i < kEights; ++i) {
      const Floats* a = x.a + 8 * i;
      const Floats* w = x.w + 8 * i;
      if constexpr (Shape::kEntry == 8) {  // without a sign to flip, the second variant is the first
        result.halves[i] = nearest(a, w, x.odd[i], steps, steps).halves[kFlips];
      } else {
        const Nearest low = nearest(a, w, x.odd[i], steps, steps), high = nearest(a + 4, w + 4, x.odd[i], steps, steps);
        result.halves[2 * i] = low.halves[0], result.halves[2 * i + 1] = high.halves[0];
        if constexpr (kFlips) {  // the opposite sign is in one of the two entries
          const Floats in_low = low.error[1] + high.error[0], in_high = low.error[0] + high.error[1];
          result.halves[2 * i] = where_less(in_high, in_low, low.halves[0], low.halves[1]);
          result.halves[2 * i + 1] = where_less(in_high, in_low, high.halves[1], high.halves[0]);
        }
      }
      Floats p = Floats::all(0), q = p, flipped = Floats::all(INFINITY);
      Ints other = Ints::all(8);
      for (int j = 0; j < 8; ++j) {
        const Floats v = value(digit_of(result.halves[(8 * i + j) / Shape::kEntry], j % Shape::kEntry), level);
        const Floats product = a[j] * v;
        p = p + product, q = fma(w[j] * v, v, q);
        if constexpr (kFlips) other = where_less(product, flipped, Ints::all(j), other), flipped = smaller(product, flipped);
      }
      if constexpr (kFlips) {
        other = where_less(Floats::all(0), x.odd[i], other, Ints::all(8));
        p = p - x.odd[i] * (flipped + flipped);
      }
      result.other[i] = other, result.p = result.p + p, result.q = result.q + q;
    }
    return result;
  }

  Fit<Shape> fit_shifted(const SubBlocks<Shape>& x, const Floats& t) {
    Floats level[2][kLevels], steps[2][kLevels], p[2][kEights], q[2][kEights], error[2][kEights];
    Ints halves[2][kEights];
    const Floats two_t = t + t;
    Floats total[2] = {Floats::all(0), Floats::all(0)};
    for (int lowered = 0; lowered < 2; ++lowered)
      for (int l = 0; l < kLevels; ++l)
        level[lowered][l] = Floats::all(book_.level[l] + (lowered ? -0.125f : 0.125f)), steps[lowered][l] = t * level[lowered][l];
    for (int i = 0; i < kEights; ++i) {
      const Nearest found = nearest(x.a + 8 * i, x.w + 8 * i, x.odd[i], steps[0], steps[1]);
      for (int lowered = 0; lowered < 2; ++lowered) {
        halves[lowered][i] = found.halves[lowered];
        Floats sum = Floats::all(0), squares = sum;
        for (int j = 0; j < 8; ++j) {
          const Floats v = value(digit_of(found.halves[lowered], j), level[lowered]);
          sum = fma(x.a[8 * i + j], v, sum), squares = fma(x.w[8 * i + j] * v, v, squares);
        }
        p[lowered][i] = sum, q[lowered][i] = squares, error[lowered][i] = t * t * squares - two_t * sum;
        total[lowered] = total[lowered] + error[lowered][i];
      }
    }
    Fit<Shape> result = {};
    for (int i = 0; i < kEights; ++i) {
      const Floats up = Shape::kShiftOfScaled ? total[0] : error[0][i], down = Shape::kShiftOfScaled ? total[1] : error[1][i];
      result.halves[i] = where_less(down, up, halves[1][i], halves[0][i]);
      result.other[i] = where_less(down, up, Ints::all(1), Ints::all(0));
      result.p = result.p + where_less(down, up, p[1][i], p[0][i]), result.q = result.q + where_less(down, up, q[1][i], q[0][i]);
    }
    return result;
  }

  // The nearest entry in two variants: with all signs, and with one of them flipped where `odd`; or, if ternary, with
  // both shifts. With kFreeSigns there is only the first.
  struct Nearest {
    Ints halves[2];
    Floats error[2];
  };

  // Digit i of the levels of an entry.
  static JAX_Q4K_INLINE Ints digit_of(const Ints& halves, int i) {
    const Ints half = i < Shape::kHalf ? halves >> Ints::all(7) : halves & Ints::all(127);
    i %= Shape::kHalf;
    if constexpr (kLevels == 8) return i == 0 ? half >> Ints::all(3) : half & Ints::all(7);
    const Ints pair = half * Ints::all(57) >> Ints::all(9);  // / 9
    const Ints two = i < 2 ? pair : half - pair * Ints::all(9);
    const Ints first = two * Ints::all(11) >> Ints::all(5);  // / 3
    return i % 2 == 0 ? first : two - first * Ints::all(3);
  }

  // The level of each lane's digit.
  static JAX_Q4K_INLINE Floats value(const Ints& digit, const Floats* level) {
    Floats v = level[0];
    for (int l = 1; l < kLevels; ++l) v = where_equal(digit, l, level[l], v);
    return v;
  }

  // Errors of all possible halves, and, with kEvenSigns, the same with the cheapest value's sign flipped where `odd`.
  static JAX_Q4K_INLINE void tabulate(const Floats* a, const Floats* w, const Floats& odd, const Floats* steps, Floats* errors,
                                      Floats* flipped) {
    Floats error[Shape::kHalf][kLevels], flip[Shape::kHalf][kLevels];
    for (int i = 0; i < Shape::kHalf; ++i) {
      const Floats minus = Floats::all(0) - (a[i] + a[i]);
      [[maybe_unused]] const Floats four = Floats::all(4) * a[i] * odd;
      for (int l = 0; l < kLevels; ++l) {
        error[i][l] = steps[l] * fma(steps[l], w[i], minus);
        if constexpr (Shape::kSigns == kEvenSigns) flip[i][l] = four * steps[l];
      }
    }
    if constexpr (kLevels == 8) {
      for (int j = 0; j < 64; ++j) {
        errors[j] = error[0][j / 8] + error[1][j % 8];
        if constexpr (Shape::kSigns == kEvenSigns) flipped[j] = errors[j] + smaller(flip[0][j / 8], flip[1][j % 8]);
      }
    } else {
      Floats pair[2][9], flip_pair[2][9];
      for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 9; ++j) {
          pair[i][j] = error[2 * i][j / 3] + error[2 * i + 1][j % 3];
          if constexpr (Shape::kSigns == kEvenSigns) flip_pair[i][j] = smaller(flip[2 * i][j / 3], flip[2 * i + 1][j % 3]);
        }
      for (int j = 0; j < 9; ++j)
        for (int k = 0; k < 9; ++k) {
          errors[9 * j + k] = pair[0][j] + pair[1][k];
          if constexpr (Shape::kSigns == kEvenSigns) flipped[9 * j + k] = errors[9 * j + k] + smaller(flip_pair[0][j], flip_pair[1][k]);
        }
    }
  }

  // The entry with the least error, for one entry's values. `steps` are levels times t, in both variants.
  JAX_Q4K_INLINE Nearest nearest(const Floats* a, const Floats* w, const Floats& odd, const Floats* steps,
                                 [[maybe_unused]] const Floats* other_steps) {
    tabulate(a, w, odd, steps, first_[0], first_[1]);
    tabulate(a + Shape::kHalf, w + Shape::kHalf, odd, steps, second_[0], second_[1]);
    if constexpr (Shape::kSigns == kTernary) {
      tabulate(a, w, odd, other_steps, first_[1], nullptr);
      tabulate(a + Shape::kHalf, w + Shape::kHalf, odd, other_steps, second_[1], nullptr);
    }
    for (int v = 0; v < kVariants; ++v)
      for (int j = 0; j < kHalves; ++j) second_[v][j] = indexed(second_[v][j], j);
    for (int p = 0; p < book_.num_pairs; ++p)
      for (int v = 0; v < kVariants; ++v)
        second_[v][kHalves + p] = smaller(second_[v][book_.pairs[2 * p]], second_[v][book_.pairs[2 * p + 1]]);
    Nearest found;
    Floats best_second[2];
    for (int v = 0; v < 2; ++v) found.error[v] = best_second[v] = Floats::all(INFINITY), found.halves[v] = Ints::all(0);
    for (int u = 0; u < book_.used; ++u) {
      Floats least[kVariants];
      for (int v = 0; v < kVariants; ++v) least[v] = second_[v][book_.second[book_.begin[u]]];
      for (int e = book_.begin[u] + 1; e < book_.begin[u + 1]; e += Book<Shape>::kTogether)
        for (int k = 0; k < Book<Shape>::kTogether; ++k)
          for (int v = 0; v < kVariants; ++v) least[v] = smaller(least[v], second_[v][book_.second[e + k]]);
      const int h = book_.first[u];
      const Ints first = Ints::all(h * 128);
      auto consider = [&](int v, const Floats& error, const Floats& second) __attribute__((always_inline)) {
        found.halves[v] = where_less(error, found.error[v], first, found.halves[v]);
        best_second[v] = where_less(error, found.error[v], second, best_second[v]);
        found.error[v] = smaller(error, found.error[v]);
      };
      if constexpr (Shape::kSigns != kEvenSigns || Shape::kEntry == 4) consider(0, first_[0][h] + least[0], least[0]);
      if constexpr (Shape::kSigns == kTernary) consider(1, first_[1][h] + least[1], least[1]);
      if constexpr (Shape::kSigns == kEvenSigns) {
        const Floats in_first = first_[1][h] + least[0], in_second = first_[0][h] + least[1];
        consider(1, smaller(in_first, in_second), where_less(in_second, in_first, least[1], least[0]));
      }
    }
    for (int v = 0; v < 2; ++v)
      found.halves[v] = found.halves[v] | (best_second[v].template as<int32_t>() & Ints::all(kIndexBits));
    return found;
  }
  static JAX_Q4K_INLINE Floats indexed(const Floats& error, int index) {
    return ((error.as<uint32_t>() & Words::all(~kIndexBits)) | Words::all(static_cast<uint32_t>(index))).template as<float>();
  }

  Book<Shape> book_;
  Floats first_[2][kHalves], second_[2][kHalves + kMostPairs];  // errors of halves, in both variants
};

// Steps to try, relative to the one that maps the largest value of a sub-block to the highest level; how often the best
// step is fitted again; for how many d scales are chosen, for the first one among the nearest and its neighbours.
template <class Shape, Signs kSigns = Shape::kSigns, int kLevels = Shape::kLevels>
struct Trials {  // three levels
  static constexpr float kSteps[] = {1.08f, 0.98f, 0.9f, 0.8f, 0.68f, 0.55f};
  static constexpr int kRefits = 1, kRounds = 2;
};
template <class Shape, Signs kSigns>
struct Trials<Shape, kSigns, 8> {
  static constexpr float kSteps[] = {1.15f, 1.06f, 0.99f, 0.93f, 0.86f, 0.78f};
  static constexpr int kRefits = 1, kRounds = 2;
};
template <class Shape>
struct Trials<Shape, kTernary, 3> {
  static constexpr float kSteps[] = {0.85f, 0.66f, 0.5f};
  static constexpr int kRefits = 0, kRounds = 2;  // a refit saves less than 0.2 % of the error
};

// Finds d of one block: that for which the best steps of its sub-blocks, rounded to multiples of d, cost least.
template <int kSubs, int kLargestScale>
float best_d(const float* step, const float* q) {
  constexpr int kCandidates = 48;
  float highest = 0;
  for (int i = 0; i < kSubs; ++i) highest = step[i] > highest ? step[i] : highest;
  float d[kCandidates], error[kCandidates];
  for (int c = 0; c < kCandidates; ++c) {
    constexpr float kTop = 2 * kLargestScale + 1;
    d[c] = highest / (kTop * (1.15f - 0.9f * static_cast<float>(c) / kCandidates)), error[c] = 0;
  }
  for (int i = 0; i < kSubs; ++i)
    for (int c = 0; c < kCandidates; ++c) {
      float scale = (step[i] / d[c] - 1) * 0.5f;
      scale = scale > 0 ? scale : 0, scale = scale < kLargestScale ? scale : kLargestScale;
      scale = (scale + 12582912.0f) - 12582912.0f;  // rounds
      const float off = d[c] * (2 * scale + 1) - step[i];
      error[c] += q[i] * off * off;
    }
  int best = 0;
  for (int c = 1; c < kCandidates; ++c)
    if (error[c] < error[best]) best = c;
  return d[best];
}

// Writes the results of some blocks.
template <class Shape>
void store(const CodebookSearch& s, const Book<Shape>& book, const Fit<Shape>& fit, int64_t start, int blocks, const float* d,
           const float* scales) {
  constexpr int kSubs = 256 / Shape::kScaled, kEntries = Fit<Shape>::kEntries, kEights = Fit<Shape>::kEights;
  alignas(64) int32_t halves[kEntries][16], other[kEights][16];
  for (int i = 0; i < kEntries; ++i) fit.halves[i].store(halves[i]);
  for (int i = 0; i < kEights; ++i) fit.other[i].store(other[i]);
  for (int b = 0; b < blocks; ++b) {
    const int64_t block = start + b;
    const bool zeros = d[b] == 0;
    s.d[block] = d[b];
    for (int sub = 0; sub < kSubs; ++sub) {
      const int lane = b * kSubs + sub;
      s.scales[block * kSubs + sub] = zeros ? 0 : static_cast<uint8_t>(scales[lane]);
      for (int i = 0; i < kEntries; ++i)
        s.entries[(block * kSubs + sub) * kEntries + i] =
            zeros ? 0 : book.entry[(halves[i][lane] >> 7) * Shape::kHalves + (halves[i][lane] & 127)];
      for (int i = 0; i < kEights; ++i) {
        const int64_t eight = (block * kSubs + sub) * kEights + i;
        int bits = 0;
        if (Shape::kSigns == kTernary) bits = other[i][lane];
        else for (int j = 0; j < 8; ++j) bits |= (std::signbit(s.x[eight * 8 + j]) ? 1 : 0) << j;
        if (Shape::kSigns == kEvenSigns) bits ^= 1 << other[i][lane] & 255;
        s.signs[eight] = zeros ? 0 : static_cast<uint8_t>(bits);
      }
    }
  }
}

template <class Shape>
void search_codebook(const CodebookSearch& s) {
  constexpr int kScaled = Shape::kScaled, kSubs = 256 / kScaled, kBlocks = 16 / kSubs;
  using TheFit = Fit<Shape>;
  Searcher<Shape> searcher(s);
  const float top = s.levels[Shape::kLevels - 1];
  for (int64_t start = 0; start < s.blocks; start += kBlocks) {
    const int blocks = static_cast<int>(s.blocks - start < kBlocks ? s.blocks - start : kBlocks);
    SubBlocks<Shape> x;
    alignas(64) float values[kScaled][16] = {}, weights[kScaled][16], largest[16] = {}, odd[kScaled / 8][16] = {};
    float unit[kBlocks] = {};  // of a block: 1 in the numbers below is this much in the file's d
    for (int i = 0; i < kScaled; ++i)
      for (int lane = 0; lane < 16; ++lane) weights[i][lane] = 1;
    for (int b = 0; b < blocks; ++b) {
      const float* from = s.x + (start + b) * 256;
      const float* w = s.w + (start + b) * 256;
      float most = 0;
      for (int i = 0; i < 256; ++i) most = std::fabs(from[i]) > most ? std::fabs(from[i]) : most;
      if (most < 0x1p-40f) continue;  // all zeros
      int exponent;
      std::frexp(most, &exponent);
      const float over = std::ldexp(1.0f, -exponent);
      unit[b] = std::ldexp(1.0f, exponent) / s.unit;
      for (int i = 0; i < 256; ++i) {
        const int lane = b * kSubs + i / kScaled, at = i % kScaled;
        const float value = from[i] * over, magnitude = std::fabs(value);
        values[at][lane] = Shape::kSigns == kTernary ? value : magnitude, weights[at][lane] = w[i];
        if (magnitude > largest[lane]) largest[lane] = magnitude;
        if (std::signbit(value)) odd[at / 8][lane] = 1 - odd[at / 8][lane];
      }
    }
    for (int i = 0; i < kScaled; ++i) x.w[i] = Floats::load(weights[i]), x.a[i] = x.w[i] * Floats::load(values[i]);
    for (int i = 0; i < kScaled / 8; ++i) x.odd[i] = Floats::load(odd[i]);

    // the best step of each sub-block, whatever d is; p^2 / q is what the fitted step saves
    const Floats zero = Floats::all(0), small = Floats::all(1e-4f / top);
    const Floats at_top = larger(Floats::load(largest) * Floats::all(1 / top), small);
    Floats saved = Floats::all(-1), step = zero, curvature = zero;
    auto consider = [&](const Floats& t) {
      const TheFit fit = searcher.fit(x, t);
      const Floats p = larger(fit.p, zero), q = larger(fit.q, Floats::all(1e-30f)), saves = p * p / q;
      step = where_less(saved, saves, p / q, step), curvature = where_less(saved, saves, fit.q, curvature);
      saved = larger(saved, saves);
    };
    for (float trial : Trials<Shape>::kSteps) consider(at_top * Floats::all(trial));
    if (Shape::kSigns != kTernary) consider(at_top * Floats::all(top / s.levels[0]));  // all at the lowest level
    for (int i = 0; i < Trials<Shape>::kRefits; ++i) consider(larger(step, small));

    alignas(64) float steps[16], curvatures[16], p[16], q[16];
    step.store(steps), curvature.store(curvatures);
    float d[kBlocks] = {}, best_d_of[kBlocks] = {}, best_error[kBlocks] = {};
    alignas(64) float scale[16] = {}, best_scale[16] = {};
    TheFit chosen = {}, best = {};
    for (int b = 0; b < blocks; ++b) {
      if (unit[b] == 0) continue;
      const float found = best_d<kSubs, Shape::kLargestScale>(steps + b * kSubs, curvatures + b * kSubs);
      d[b] = positive_half(found * unit[b]);
    }
    for (int round = 0; round < Trials<Shape>::kRounds; ++round) {
      alignas(64) float d_of_lane[16];
      for (int lane = 0; lane < 16; ++lane) {
        const int b = lane / kSubs;
        d_of_lane[lane] = unit[b] == 0 ? 0 : d[b] / unit[b];
        if (round == 0) {
          const float exact = d_of_lane[lane] > 0 ? (steps[lane] / d_of_lane[lane] - 1) * 0.5f : 0;
          scale[lane] = std::nearbyint(exact < 0 ? 0 : exact > Shape::kLargestScale ? Shape::kLargestScale : exact);
        }
      }
      const Floats d_lane = Floats::load(d_of_lane), middle = Floats::load(scale);
      Floats least = Floats::all(INFINITY), chosen_scale = middle;
      for (int offset : {0, -1, 1}) {
        if (offset && round) break;
        const Floats trial = smaller(larger(middle + Floats::all(static_cast<float>(offset)), zero), Floats::all(Shape::kLargestScale));
        const Floats t = d_lane * (trial + trial + Floats::all(1));
        const TheFit fit = searcher.fit(x, t);
        const Floats error = t * (t * fit.q - (fit.p + fit.p));
        if (offset == 0) chosen = fit;
        else Searcher<Shape>::take_better(error, fit, least, &chosen);
        chosen_scale = where_less(error, least, trial, chosen_scale), least = smaller(error, least);
      }
      alignas(64) float errors[16];
      chosen_scale.store(scale), least.store(errors), chosen.p.store(p), chosen.q.store(q);
      alignas(64) float better[16];
      for (int b = 0; b < kBlocks; ++b) {
        float error = 0, sum_p = 0, sum_q = 0;
        for (int lane = b * kSubs; lane < (b + 1) * kSubs; ++lane) {
          const float factor = 2 * scale[lane] + 1;
          error += errors[lane], sum_p += factor * p[lane], sum_q += factor * factor * q[lane];
        }
        const bool improves = unit[b] != 0 && error < best_error[b];  // an error of 0 is that of zeros
        for (int lane = b * kSubs; lane < (b + 1) * kSubs; ++lane) {
          better[lane] = improves ? -1.0f : 1.0f;
          if (improves) best_scale[lane] = scale[lane];
        }
        if (improves) best_error[b] = error, best_d_of[b] = d[b];
        if (sum_p > 0 && sum_q > 0) d[b] = positive_half(sum_p / sum_q * unit[b]);
      }
      if (round == 0) best = chosen;
      else Searcher<Shape>::take_better(Floats::load(better), chosen, zero, &best);
    }
    store(s, searcher.book(), best, start, blocks, best_d_of, best_scale);
  }
}

#define JAX_Q4K_BOOK_SHAPE(name, ...) using Book##name = BookShape<__VA_ARGS__>;
JAX_Q4K_BOOKS(JAX_Q4K_BOOK_SHAPE)
#undef JAX_Q4K_BOOK_SHAPE

}  // namespace
}  // namespace jax_q4k
