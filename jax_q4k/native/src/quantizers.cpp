// Quantizers of blocks of floats, compiled once per instruction set, as kernels.cpp is. The candidates of their searches are
// those of the modules in `quantizers/`, which programs trace.

#include "quantizers.h"

#include <cmath>

#include "affine_search.h"
#include "symmetric_search.h"

namespace jax_q4k {
namespace {

using Eight = EightFloats;
JAX_Q4K_INLINE float sum(const Eight& v) {
  float lanes[8];
  v.store(lanes);
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}
JAX_Q4K_INLINE float maximum(const Eight& v) {
  float lanes[8], most = 0;
  v.store(lanes);
  for (float lane : lanes) most = lane > most ? lane : most;
  return most;
}

// Magnitudes of a block's values, and weights of their squared errors: importance * sqrt(1 + x^2 / (2 * mean of x^2)).
template <int kBlock>
struct alignas(32) Weighted {
  float magnitude[kBlock], weight[kBlock];

  // Returns false if a value is NaN or exceeds `largest`.
  JAX_Q4K_INLINE bool read(const float* x, const float* importance, float largest) {
    Eight squares = Eight::all(0), most = squares;
    for (int i = 0; i < kBlock; i += 8) {
      const Eight v = Eight::load(x + i), m = larger(v, Eight::all(0) - v);
      m.store(magnitude + i);
      squares = fma(v, v, squares), most = larger(most, m);
    }
    const float total = sum(squares);
    if (!(maximum(most) <= largest) || std::isnan(total)) return false;
    const float mean = total / kBlock, over = mean >= 0x1p-126f ? 1 / (2 * mean) : 0;
    for (int i = 0; i < kBlock; ++i) weight[i] = importance[i] * std::sqrt(1 + magnitude[i] * magnitude[i] * over);
    return true;
  }
};

// Calls block(values, weighted, packed) for all blocks.
template <int kBlock, int kBytes, class Block>
JAX_Q4K_INLINE bool each_block(const FloatBlocks& s, Block block) {
  Weighted<kBlock> weighted;
  for (int64_t b = 0; b < s.blocks; ++b) {
    const float* x = s.x + b * kBlock;
    if (!weighted.read(x, s.importance + (s.first + b) % s.period * kBlock, s.largest)) return false;
    block(x, weighted, s.packed + b * kBytes);
  }
  return true;
}

// Ternary blocks of 256: the values above a limit are not zero. Given sums p of their w * |x| and q of their w, the best d
// is p / q, and lowers the error by p^2 / q.
constexpr int kTernary = 256, kTogether = 5, kRefits = 2;

template <int kLimits>
JAX_Q4K_INLINE void try_limits(const Weighted<kTernary>& x, const float* limits, float* p, float* q) {
  Eight limit[kLimits], sums[kLimits], weights[kLimits];
  for (int l = 0; l < kLimits; ++l) limit[l] = Eight::all(limits[l]), sums[l] = weights[l] = Eight::all(0);
  for (int i = 0; i < kTernary; i += 8) {
    const Eight m = Eight::load(x.magnitude + i), w = Eight::load(x.weight + i), wm = w * m;
    for (int l = 0; l < kLimits; ++l) {
      sums[l] = sums[l] + where_less(limit[l], m, wm, Eight::all(0));
      weights[l] = weights[l] + where_less(limit[l], m, w, Eight::all(0));
    }
  }
  for (int l = 0; l < kLimits; ++l) p[l] = sum(sums[l]), q[l] = sum(weights[l]);
}

// Returns d, as bits of an f16, and quants + 1.
JAX_Q4K_INLINE Half ternary(const float* x, const Weighted<kTernary>& weighted, uint8_t* digits) {
  // the largest magnitude divided by 2, and by nine numbers from 2.4 to 40 in geometric progression
  static constexpr float kParts[2 * kTogether] = {1 / 2.0f, 1 / 2.4f, 1 / 3.411476f, 1 / 4.849237f, 1 / 6.89294f, 1 / 9.797959f, 1 / 13.92729f, 1 / 19.79693f, 1 / 28.14031f, 1 / 40.0f};
  Eight most = Eight::all(0);
  for (int i = 0; i < kTernary; i += 8) most = larger(most, Eight::load(weighted.magnitude + i));
  const float largest = maximum(most);
  float best = largest, least = 0;
  for (int part = 0; part < 2 * kTogether; part += kTogether) {
    float limits[kTogether], p[kTogether], q[kTogether];
    for (int l = 0; l < kTogether; ++l) limits[l] = largest * kParts[part + l];
    try_limits<kTogether>(weighted, limits, p, q);
    for (int l = 0; l < kTogether; ++l) {
      const float d = p[l] * reciprocal(q[l]);
      if (-d * p[l] < least) least = -d * p[l], best = d;
    }
  }
  for (int refit = 0; refit < kRefits; ++refit) {
    float p, q;
    const float limit = best / 2;
    try_limits<1>(weighted, &limit, &p, &q);
    best = p * reciprocal(q);
  }
  Half d;
  from_float(best < kLargestHalf ? best : kLargestHalf, &d);
  const float inverse = reciprocal(to_float(d));
  for (int i = 0; i < kTernary; ++i) {
    const float v = x[i] * inverse;
    digits[i] = static_cast<uint8_t>(1 + (v > 0.5f) - (v < -0.5f));
  }
  return d;
}

bool quantize_TQ2_0(const FloatBlocks& s) {
  return each_block<kTernary, 66>(s, [](const float* x, const Weighted<kTernary>& weighted, uint8_t* packed) {
    uint8_t digits[kTernary];
    const Half d = ternary(x, weighted, digits);
    for (int h = 0; h < 2; ++h) pack_bits<2, 4>(digits + 128 * h, 32, 0, packed + 32 * h);
    std::memcpy(packed + 64, &d, 2);
  });
}

// Packs `kDigits` groups of n digits in base 3 into fractions of 256, rounded up because the decoder rounds down.
template <int kDigits>
JAX_Q4K_INLINE void fractions(const uint8_t* digits, int n, uint8_t* packed) {
  for (int j = 0; j < n; ++j) {
    uint16_t number = 0;
    for (int i = 0; i < 5; ++i) number = static_cast<uint16_t>(3 * number + (i < kDigits ? digits[i * n + j] : 0));
    packed[j] = static_cast<uint8_t>(static_cast<uint16_t>(number * 256 + 242) / 243);
  }
}

bool quantize_TQ1_0(const FloatBlocks& s) {
  return each_block<kTernary, 54>(s, [](const float* x, const Weighted<kTernary>& weighted, uint8_t* packed) {
    uint8_t digits[kTernary];
    const Half d = ternary(x, weighted, digits);
    fractions<5>(digits, 32, packed);
    fractions<5>(digits + 160, 16, packed + 32);
    fractions<4>(digits + 240, 4, packed + 48);
    std::memcpy(packed + 52, &d, 2);
  });
}

// The nearest of the values 0, 1, 2, 3, 4, 6, 8, 12, which are fp4 e2m1, of a positive x below 2^20. Adding and
// subtracting 2^23 or more rounds to steps of 1, of 2 from 4, and of 4 from 8.
JAX_Q4K_INLINE Eight nearest_fp4(const Eight& x) {
  const Eight power = (x.as<int32_t>() & EightInts::all(0x7f800000)).as<float>();
  const Eight shift = larger(power * Eight::all(0x1p22f), Eight::all(0x1p23f));
  Eight rounded = x + shift;
  rounded = rounded - shift;
  return smaller(rounded, Eight::all(12));
}

// Error of kValues values for a scale and its reciprocal.
template <int kValues>
JAX_Q4K_INLINE float fp4_error(const float* magnitude, const float* weight, float scale, float inverse) {
  Eight error = Eight::all(0);
  for (int i = 0; i < kValues; i += 8) {
    const Eight m = Eight::load(magnitude + i);
    const Eight q = nearest_fp4(smaller(m * Eight::all(inverse), Eight::all(16)));
    const Eight rest = q * Eight::all(scale) - m;
    error = fma(Eight::load(weight + i) * rest, rest, error);
  }
  return sum(error);
}

// Codes of eight fp4 values: indices of 0, 1, 2, 3, 4, 6, 8, 12, plus 8 for negative ones.
JAX_Q4K_INLINE Eight fp4_codes(const float* x, const float* magnitude, float inverse) {
  const Eight zero = Eight::all(0), value = nearest_fp4(smaller(Eight::load(magnitude) * Eight::all(inverse), Eight::all(16)));
  const Eight code = smaller(smaller(value, value * Eight::all(0.5f) + Eight::all(2)), Eight::all(7));
  return code + where_less(Eight::load(x), zero, where_less(zero, code, Eight::all(8), zero), zero);
}
// Packs the codes of kValues values: the first half in low nibbles, the last half in high ones.
template <int kValues>
JAX_Q4K_INLINE void pack_fp4(const float* x, const float* magnitude, float inverse, uint8_t* packed) {
  constexpr int kHalf = kValues / 2;
  float bytes[kHalf];
  for (int i = 0; i < kHalf; i += 8) {
    const Eight high = fp4_codes(x + kHalf + i, magnitude + kHalf + i, inverse);
    (fp4_codes(x + i, magnitude + i, inverse) + Eight::all(16) * high).store(bytes + i);
  }
  for (int i = 0; i < kHalf; ++i) packed[i] = static_cast<uint8_t>(static_cast<int32_t>(bytes[i]));
}

// Half the value of a scale's code, fp8 e4m3 without a sign.
JAX_Q4K_INLINE float half_of_scale(int code) {
  return code < 8 ? static_cast<float>(code) * 0x1p-10f : 0.5f * bits_of<float>(static_cast<uint32_t>(code + (120 << 3)) << 20);
}

bool quantize_NVFP4(const FloatBlocks& s) {
  constexpr int kSub = 16, kSubs = 4, kTop = 126;
  // codes to try, relative to that which maps the largest magnitude to 12
  static constexpr int kSteps[] = {0, 1, -1, 2, -2, 3, -3, 4, -4, 5, -5, -6, -7, -8};
  static const auto scales = [] {
    struct Scales { float scale[kTop + 1], inverse[kTop + 1]; } all;
    for (int c = 0; c <= kTop; ++c) all.scale[c] = half_of_scale(c), all.inverse[c] = reciprocal(all.scale[c]);
    return all;
  }();
  return each_block<kSub * kSubs, 36>(s, [](const float* x, const Weighted<kSub * kSubs>& weighted, uint8_t* packed) {
    for (int sub = 0; sub < kSubs; ++sub) {
      const float *magnitude = weighted.magnitude + kSub * sub, *weight = weighted.weight + kSub * sub;
      const float scale = maximum(larger(Eight::load(magnitude), Eight::load(magnitude + 8))) / 6;
      const int code = scale < 0x1p-6f ? static_cast<int>(scale * 0x1p9f) : static_cast<int>(bits_of<uint32_t>(scale) >> 20) - (120 << 3);
      float least = INFINITY;
      int best = 0, tried = -1;
      for (int step : kSteps) {
        const int c = code + step < 0 ? 0 : code + step > kTop ? kTop : code + step;
        if (c == tried) continue;
        tried = c;
        const float error = fp4_error<kSub>(magnitude, weight, scales.scale[c], scales.inverse[c]);
        if (error < least) least = error, best = c;
      }
      packed[sub] = static_cast<uint8_t>(best);
      pack_fp4<kSub>(x + kSub * sub, magnitude, scales.inverse[best], packed + kSubs + kSub / 2 * sub);
    }
  });
}

bool quantize_MXFP4(const FloatBlocks& s) {
  constexpr int kBlock = 32, kSteps[] = {0, 1, -1, 2};  // of the exponent that maps the largest magnitude to 8 to 16
  return each_block<kBlock, 17>(s, [&](const float* x, const Weighted<kBlock>& weighted, uint8_t* packed) {
    Eight most = Eight::all(0);
    for (int i = 0; i < kBlock; i += 8) most = larger(most, Eight::load(weighted.magnitude + i));
    const float largest = maximum(most);
    const int exponent = static_cast<int>(bits_of<uint32_t>(largest) >> 23) - 2;
    auto power = [](int e) { return bits_of<float>(static_cast<uint32_t>(e + 127) << 23); };
    float least = INFINITY;
    int best = 2;  // no subnormal scale
    for (int step : kSteps) {
      const int e = exponent + step < 2 ? 2 : exponent + step;
      const float error = fp4_error<kBlock>(weighted.magnitude, weighted.weight, power(e - 128), power(128 - e));
      if (error < least) least = error, best = e;
    }
    packed[0] = static_cast<uint8_t>(largest > 0 ? best : 0);
    pack_fp4<kBlock>(x, weighted.magnitude, power(128 - best), packed + 1);
  });
}

// One scale, quantized like ggml's: d = largest magnitude / 127, halves rounded away from zero; without a search.
bool quantize_Q8_0(const FloatBlocks& s) {
  constexpr int kBlock = 32, kBytes = 34;
  for (int64_t b = 0; b < s.blocks; ++b) {
    const float* x = s.x + b * kBlock;
    uint8_t* packed = s.packed + b * kBytes;
    Eight most = Eight::all(0), nan = most;
    for (int i = 0; i < kBlock; i += 8) {
      const Eight v = Eight::load(x + i);
      most = larger(most, larger(v, Eight::all(0) - v)), nan = nan + v * Eight::all(0);
    }
    const float largest = maximum(most), d = largest / 127, inverse = reciprocal(d);
    if (!(largest <= s.largest) || std::isnan(sum(nan))) return false;
    store_half(d, packed);
    for (int i = 0; i < kBlock; ++i) {
      const float scaled = x[i] * inverse, whole = static_cast<float>(static_cast<int32_t>(scaled)), rest = scaled - whole;
      packed[2 + i] = static_cast<uint8_t>(static_cast<int32_t>(whole) + (rest >= 0.5f) - (rest <= -0.5f));
    }
  }
  return true;
}

bool quantize_Q4_0(const FloatBlocks& s) {
  return symmetric_blocks<Integers<8, 4, 8>, 18>(s, [](float d, const uint8_t* quants, uint8_t* packed) {
    store_half(d, packed), pack_bits<4, 2>(quants, 16, 0, packed + 2);
  });
}

bool quantize_Q5_0(const FloatBlocks& s) {
  return symmetric_blocks<Integers<16, 8, 8>, 22>(s, [](float d, const uint8_t* quants, uint8_t* packed) {
    store_half(d, packed), pack_fifth_bits(quants, packed + 2), pack_bits<4, 2>(quants, 16, 0, packed + 6);
  });
}

bool quantize_Q4_1(const FloatBlocks& s) {
  return affine_blocks<15, 20>(s, [](float d, float m, const uint8_t* quants, uint8_t* packed) {
    store_half(d, packed), store_half(m, packed + 2), pack_bits<4, 2>(quants, 16, 0, packed + 4);
  });
}

bool quantize_Q5_1(const FloatBlocks& s) {
  return affine_blocks<31, 24>(s, [](float d, float m, const uint8_t* quants, uint8_t* packed) {
    store_half(d, packed), store_half(m, packed + 2);
    pack_fifth_bits(quants, packed + 4), pack_bits<4, 2>(quants, 16, 0, packed + 8);
  });
}

bool quantize_Q2_K(const FloatBlocks& s) {
  return affine_super_blocks<16, 16, 3, 15, 84>(
      s, [](float d, float dmin, const uint8_t* scales, const uint8_t* minimums, const uint8_t* quants, uint8_t* packed) {
        for (int i = 0; i < 16; ++i) packed[i] = static_cast<uint8_t>(scales[i] | minimums[i] << 4);
        for (int h = 0; h < 2; ++h) pack_bits<2, 4>(quants + 128 * h, 32, 0, packed + 16 + 32 * h);
        store_half(d, packed + 80), store_half(dmin, packed + 82);
      });
}

// d, dmin and the 12 bytes of 6-bit scales and minimums of Q4_K and Q5_K.
JAX_Q4K_INLINE void pack_k_scales(float d, float dmin, const uint8_t* scales, const uint8_t* minimums, uint8_t* packed) {
  store_half(d, packed), store_half(dmin, packed + 2);
  for (int i = 0; i < 4; ++i) {
    packed[4 + i] = static_cast<uint8_t>(scales[i] | scales[4 + i] >> 4 << 6);
    packed[8 + i] = static_cast<uint8_t>(minimums[i] | minimums[4 + i] >> 4 << 6);
    packed[12 + i] = static_cast<uint8_t>((scales[4 + i] & 15) | minimums[4 + i] << 4);
  }
}

bool quantize_Q4_K(const FloatBlocks& s) {
  return affine_super_blocks<32, 8, 15, 63, 144>(
      s, [](float d, float dmin, const uint8_t* scales, const uint8_t* minimums, const uint8_t* quants, uint8_t* packed) {
        pack_k_scales(d, dmin, scales, minimums, packed);
        for (int j = 0; j < 4; ++j) pack_bits<4, 2>(quants + 64 * j, 32, 0, packed + 16 + 32 * j);
      });
}

bool quantize_Q5_K(const FloatBlocks& s) {
  return affine_super_blocks<32, 8, 31, 63, 176>(
      s, [](float d, float dmin, const uint8_t* scales, const uint8_t* minimums, const uint8_t* quants, uint8_t* packed) {
        pack_k_scales(d, dmin, scales, minimums, packed);
        pack_bits<1, 8>(quants, 32, 4, packed + 16);
        for (int j = 0; j < 4; ++j) pack_bits<4, 2>(quants + 64 * j, 32, 0, packed + 48 + 32 * j);
      });
}

bool quantize_Q3_K(const FloatBlocks& s) {
  return symmetric_super_blocks<Integers<4, 1, 8>, 16, 16, 32, 110>(s, [](float d, const int8_t* scales, const uint8_t* quants, uint8_t* packed) {
    pack_bits<1, 8>(quants, 32, 2, packed);
    for (int h = 0; h < 2; ++h) pack_bits<2, 4>(quants + 128 * h, 32, 0, packed + 32 + 32 * h);
    uint8_t shifted[16];
    for (int i = 0; i < 16; ++i) shifted[i] = static_cast<uint8_t>(scales[i] + 32);
    pack_bits<4, 2>(shifted, 8, 0, packed + 96), pack_bits<2, 4>(shifted, 4, 4, packed + 104);
    store_half(d, packed + 108);
  });
}

bool quantize_Q6_K(const FloatBlocks& s) {
  return symmetric_super_blocks<Integers<32, 17, 4>, 16, 16, 128, 210>(s, [](float d, const int8_t* scales, const uint8_t* quants, uint8_t* packed) {
    for (int h = 0; h < 2; ++h) {
      pack_bits<4, 2>(quants + 128 * h, 64, 0, packed + 64 * h);
      pack_bits<2, 4>(quants + 128 * h, 32, 4, packed + 128 + 32 * h);
    }
    std::memcpy(packed + 192, scales, 16), store_half(d, packed + 208);
  });
}

JAX_Q4K_INLINE void store_lanes(const Floats& x, float* to) { x.store(to); }
template <class T>
JAX_Q4K_INLINE void store_lanes(const Floats& x, T* to) {
  float lanes[kLanes];
  x.store(lanes);
  for (int i = 0; i < kLanes; ++i) from_float(lanes[i], to + i);
}
#if defined(__F16C__)
JAX_Q4K_INLINE void store_lanes(const Floats& x, Half* to) {
  float lanes[kLanes];
  x.store(lanes);
  for (int i = 0; i < 2; ++i) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(lanes + 8 * i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 8 * i), halves);
  }
}
#endif

// Rounds floats to another type.
template <class T>
bool round_to(const FloatBlocks& s) {
  T* to = reinterpret_cast<T*>(s.packed);
  Floats most = Floats::all(0), nan = most;
  auto sixteen = [&](const float* from, T* into) __attribute__((always_inline)) {
    const Floats x = Floats::load(from);
    most = larger(most, magnitude(x)), nan = nan + x * Floats::all(0);
    store_lanes(x, into);
  };
  int64_t i = 0;
  for (; i + kLanes <= s.blocks; i += kLanes) sixteen(s.x + i, to + i);
  if (i < s.blocks) {
    float rest[kLanes] = {};
    T rounded[kLanes];
    std::memcpy(rest, s.x + i, (s.blocks - i) * sizeof(float));
    sixteen(rest, rounded);
    std::memcpy(to + i, rounded, (s.blocks - i) * sizeof(T));
  }
  float greatest[kLanes], total[kLanes];
  most.store(greatest), nan.store(total);
  for (int lane = 0; lane < kLanes; ++lane)
    if (!(greatest[lane] <= s.largest) || std::isnan(total[lane])) return false;
  return true;
}
bool quantize_F32(const FloatBlocks& s) { return round_to<float>(s); }
bool quantize_F16(const FloatBlocks& s) { return round_to<Half>(s); }
bool quantize_BF16(const FloatBlocks& s) { return round_to<Bf16>(s); }

template <class T>
void converted(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) load_lanes(from + i).store(to + i);
  for (; i < count; ++i) to[i] = to_float(from[i]);
}
void to_floats(FloatType type, const void* from, int64_t count, float* to) {
  if (type == FloatType::kF16) converted(static_cast<const Half*>(from), count, to);
  if (type == FloatType::kBf16) converted(static_cast<const Bf16*>(from), count, to);
}

}  // namespace

#define JAX_Q4K_QUANTIZE(name) quantize_##name,
const Quantizers JAX_Q4K_QUANTIZER_SET = {to_floats, {JAX_Q4K_QUANTIZERS(JAX_Q4K_QUANTIZE)}};

}  // namespace jax_q4k
