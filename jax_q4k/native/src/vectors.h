// Vectors of 64 bytes, in one to four registers of the instruction set that this file is compiled for.
//
// Arithmetic uses GCC's and Clang's vector extension. Only what that cannot express is written per instruction set: dot
// products of bytes, conversions of f16, and joining a vector from pieces.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// Vectors are passed as arguments through memory; kernels are fast only if everything below is inlined.
#define JAX_Q4K_INLINE inline __attribute__((always_inline))

namespace jax_q4k {
namespace {  // this header compiles to different code in each file that includes it: nothing may be merged

#if defined(__AVX512F__) && defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define JAX_Q4K_AVX512  // with fewer features, AVX2 is used
#endif
#if defined(JAX_Q4K_AVX512)
constexpr int kWidth = 64;  // bytes of a register
#elif defined(__AVX2__)
constexpr int kWidth = 32;
#else
constexpr int kWidth = 16;
#endif

template <class Element, int kBytes>
struct Vector {
  static constexpr int kPart = kBytes < kWidth ? kBytes : kWidth, kParts = kBytes / kPart;
  static constexpr int kLanes = kBytes / sizeof(Element), kPartLanes = kPart / sizeof(Element);
  using Part __attribute__((vector_size(kPart))) = Element;
  Part part[kParts];

  static JAX_Q4K_INLINE Vector load(const void* from) {
    Vector v;  // register by register: a copy of the complete vector goes through memory
    for (int i = 0; i < kParts; ++i) std::memcpy(&v.part[i], static_cast<const char*>(from) + i * kPart, kPart);
    return v;
  }
  static JAX_Q4K_INLINE Vector all(Element value) {
    Vector v;
    for (auto& part : v.part) part = value - Part{};
    return v;
  }
  JAX_Q4K_INLINE void store(void* to) const {
    for (int i = 0; i < kParts; ++i) std::memcpy(static_cast<char*>(to) + i * kPart, &part[i], kPart);
  }

  // Reinterprets the bits as lanes of another type.
  template <class Other>
  JAX_Q4K_INLINE Vector<Other, kBytes> as() const {
    Vector<Other, kBytes> v;
    for (int i = 0; i < kParts; ++i) v.part[i] = (typename Vector<Other, kBytes>::Part)part[i];
    return v;
  }
};

#define JAX_Q4K_OPERATOR(op)                                                        \
  template <class E, int N>                                                         \
  JAX_Q4K_INLINE Vector<E, N> operator op(const Vector<E, N>& a, const Vector<E, N>& b) {          \
    Vector<E, N> c;                                                                 \
    for (int i = 0; i < Vector<E, N>::kParts; ++i) c.part[i] = a.part[i] op b.part[i]; \
    return c;                                                                       \
  }
JAX_Q4K_OPERATOR(+)
JAX_Q4K_OPERATOR(-)
JAX_Q4K_OPERATOR(*)
JAX_Q4K_OPERATOR(/)
JAX_Q4K_OPERATOR(&)
JAX_Q4K_OPERATOR(|)
JAX_Q4K_OPERATOR(^)
JAX_Q4K_OPERATOR(>>)
JAX_Q4K_OPERATOR(<<)
#undef JAX_Q4K_OPERATOR

using Bytes = Vector<uint8_t, 64>;
using SignedBytes = Vector<int8_t, 64>;
using Words = Vector<uint32_t, 64>;
using Ints = Vector<int32_t, 64>;
using Floats = Vector<float, 64>;
using EightFloats = Vector<float, 32>;
using EightInts = Vector<int32_t, 32>;
using Halves = Vector<uint16_t, 32>;  // f16, with as many lanes as Floats

// a * b + c, rounded once if the hardware can. The compiler is not asked to contract, as it does that only sometimes.
template <int N>
JAX_Q4K_INLINE Vector<float, N> fma(const Vector<float, N>& a, const Vector<float, N>& b, const Vector<float, N>& c) {
  Vector<float, N> d;
  for (int i = 0; i < d.kParts; ++i) {
    using Part [[maybe_unused]] = typename Vector<float, N>::Part;
#if defined(__AVX2__)
    if constexpr (sizeof(Part) == 32) d.part[i] = (Part)_mm256_fmadd_ps((__m256)a.part[i], (__m256)b.part[i], (__m256)c.part[i]);
#if defined(JAX_Q4K_AVX512)
    if constexpr (sizeof(Part) == 64) d.part[i] = (Part)_mm512_fmadd_ps((__m512)a.part[i], (__m512)b.part[i], (__m512)c.part[i]);
#endif
#elif defined(__aarch64__)
    d.part[i] = (Part)vfmaq_f32((float32x4_t)c.part[i], (float32x4_t)a.part[i], (float32x4_t)b.part[i]);
#else
    d.part[i] = a.part[i] * b.part[i] + c.part[i];
#endif
  }
  return d;
}

// x where a < b, else y.
template <int N, class Element>
JAX_Q4K_INLINE Vector<Element, N> where_less(const Vector<float, N>& a, const Vector<float, N>& b, const Vector<Element, N>& x,
                                             const Vector<Element, N>& y) {
  Vector<Element, N> c;
  for (int i = 0; i < c.kParts; ++i) c.part[i] = a.part[i] < b.part[i] ? x.part[i] : y.part[i];
  return c;
}
// The larger, and the smaller, lanes; those of b where a is NaN. Of x86's instructions for it, compilers find only some.
template <bool kLarger, class Part>
JAX_Q4K_INLINE Part chosen(Part a, Part b) {
#if defined(JAX_Q4K_AVX512)
  if constexpr (sizeof(Part) == 64)
    return (Part)(kLarger ? _mm512_max_ps((__m512)a, (__m512)b) : _mm512_min_ps((__m512)a, (__m512)b));
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(Part) == 32)
    return (Part)(kLarger ? _mm256_max_ps((__m256)a, (__m256)b) : _mm256_min_ps((__m256)a, (__m256)b));
#endif
#if defined(__x86_64__)
  if constexpr (sizeof(Part) == 16) return (Part)(kLarger ? _mm_max_ps((__m128)a, (__m128)b) : _mm_min_ps((__m128)a, (__m128)b));
#endif
  return kLarger ? (b < a ? a : b) : (a < b ? a : b);
}
template <int N>
JAX_Q4K_INLINE Vector<float, N> larger(const Vector<float, N>& a, const Vector<float, N>& b) {
  Vector<float, N> c;
  for (int i = 0; i < c.kParts; ++i) c.part[i] = chosen<true>(a.part[i], b.part[i]);
  return c;
}
template <int N>
JAX_Q4K_INLINE Vector<float, N> smaller(const Vector<float, N>& a, const Vector<float, N>& b) {
  Vector<float, N> c;
  for (int i = 0; i < c.kParts; ++i) c.part[i] = chosen<false>(a.part[i], b.part[i]);
  return c;
}

// Shuffles the concatenated lanes of a and b: lane i of the result is lane kLane(i).
template <int (*kLane)(int), class Part, int... i>
JAX_Q4K_INLINE Part shuffled(Part a, Part b, std::integer_sequence<int, i...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kLane(i)...);
#else
  using Index __attribute__((vector_size(sizeof(Part)))) = int32_t;
  return __builtin_shuffle(a, b, Index{kLane(i)...});
#endif
}
template <int (*kLane)(int), class Part>
JAX_Q4K_INLINE Part shuffled(Part a, Part b) {
  return shuffled<kLane>(a, b, std::make_integer_sequence<int, static_cast<int>(sizeof(Part) / 4)>());
}

// For every four lanes, takes the even, or the odd, two lanes of a and then those of b.
template <int kOdd>
constexpr int two_of_four(int i) { return i / 4 * 4 + i % 2 * 2 + kOdd + i % 4 / 2 * Floats::kPartLanes; }
template <int kOdd>
JAX_Q4K_INLINE Floats::Part halved(Floats::Part a, Floats::Part b) { return shuffled<two_of_four<kOdd>>(a, b); }
// For every four lanes, sums of adjacent lanes: two sums of a and then two of b.
JAX_Q4K_INLINE Ints::Part sums_of_pairs(Ints::Part a, Ints::Part b) {
  const auto x = (Floats::Part)a, y = (Floats::Part)b;
  return (Ints::Part)halved<0>(x, y) + (Ints::Part)halved<1>(x, y);
}
// Swaps the middle two of every four lanes, which is the order of `sums_of_pairs`.
constexpr int middle_swapped(int i) { return i / 4 * 4 + (i % 4 == 1 ? 2 : i % 4 == 2 ? 1 : i % 4); }

// For every 16 bytes, joins the first, or the last, eight bytes of a with those of b.
template <int kLast>
constexpr int eight_lane(int i) { return i / 4 * 4 + 2 * kLast + i % 2 + i % 4 / 2 * Ints::kPartLanes; }
template <int kLast>
JAX_Q4K_INLINE Bytes eights(const Bytes& a, const Bytes& b) {
  Bytes c;
  for (int i = 0; i < Bytes::kParts; ++i)
    c.part[i] = (Bytes::Part)shuffled<eight_lane<kLast>>((Ints::Part)a.part[i], (Ints::Part)b.part[i]);
  return c;
}

// For every four lanes, interleaves the first, or the last, two lanes of a and b in runs of kRun.
template <int kRun, int kLast>
constexpr int zipped(int i) { return i / 4 * 4 + 2 * kLast + (kRun == 1 ? i % 4 / 2 : i % 2) + i / kRun % 2 * Floats::kPartLanes; }
// Takes the even, or the odd, quarters (16 bytes each) of a and then of b.
template <int kOdd>
constexpr int quarters(int i) { return (i / 4 * 2 + kOdd) * 4 + i % 4; }

// Transposes: lane j of vector i becomes lane i of vector j.
JAX_Q4K_INLINE void transpose(Floats (&v)[16]) {
  using Part = Floats::Part;
  constexpr int kQuarters = Floats::kPart / 16;
  Floats to[16];
#pragma GCC unroll 4
  for (int part = 0; part < Floats::kParts; ++part) {
    Part fours[4][4];  // [j][g], quarter q: lane 4 q + j of vectors [4 g, 4 g + 4)
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      const Part a = v[4 * g].part[part], b = v[4 * g + 1].part[part], c = v[4 * g + 2].part[part], d = v[4 * g + 3].part[part];
      const Part low = shuffled<zipped<1, 0>>(a, b), high = shuffled<zipped<1, 1>>(a, b);
      const Part next_low = shuffled<zipped<1, 0>>(c, d), next_high = shuffled<zipped<1, 1>>(c, d);
      fours[0][g] = shuffled<zipped<2, 0>>(low, next_low), fours[1][g] = shuffled<zipped<2, 1>>(low, next_low);
      fours[2][g] = shuffled<zipped<2, 0>>(high, next_high), fours[3][g] = shuffled<zipped<2, 1>>(high, next_high);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Part a = fours[j][0], b = fours[j][1], c = fours[j][2], d = fours[j][3];
      if constexpr (kQuarters == 4) {
        const Part even = shuffled<quarters<0>>(a, b), odd = shuffled<quarters<1>>(a, b);
        const Part next_even = shuffled<quarters<0>>(c, d), next_odd = shuffled<quarters<1>>(c, d);
        to[j].part[0] = shuffled<quarters<0>>(even, next_even), to[j + 4].part[0] = shuffled<quarters<0>>(odd, next_odd);
        to[j + 8].part[0] = shuffled<quarters<1>>(even, next_even), to[j + 12].part[0] = shuffled<quarters<1>>(odd, next_odd);
      } else if constexpr (kQuarters == 2) {
        to[8 * part + j].part[0] = shuffled<quarters<0>>(a, b), to[8 * part + j].part[1] = shuffled<quarters<0>>(c, d);
        to[8 * part + j + 4].part[0] = shuffled<quarters<1>>(a, b), to[8 * part + j + 4].part[1] = shuffled<quarters<1>>(c, d);
      } else {
        to[4 * part + j].part[0] = a, to[4 * part + j].part[1] = b, to[4 * part + j].part[2] = c, to[4 * part + j].part[3] = d;
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) v[i] = to[i];
}

template <int kApart>
constexpr int lane_apart(int i) { return i ^ kApart; }
template <int kApart, class Part, class Operation>
JAX_Q4K_INLINE Part folded(Part v, const Operation& operation) {
  if constexpr (kApart == 0) return v;
  else return folded<kApart / 2>(operation(v, shuffled<lane_apart<kApart>>(v, v)), operation);
}
// Reduces all lanes in pairs by an operation on vectors: lanes that are half a vector apart, then a quarter, and so on.
template <int N, class Operation>
JAX_Q4K_INLINE float reduced(Vector<float, N> v, const Operation& operation) {
  for (int apart = v.kParts / 2; apart; apart /= 2)
    for (int i = 0; i < apart; ++i) v.part[i] = operation(v.part[i], v.part[i + apart]);
  return folded<Vector<float, N>::kPartLanes / 2>(v.part[0], operation)[0];
}
template <int N>
JAX_Q4K_INLINE float sum(const Vector<float, N>& v) {
  return reduced(v, [](auto a, auto b) { return a + b; });
}
JAX_Q4K_INLINE float highest(const Floats& v) {
  return reduced(v, [](auto a, auto b) { return a > b ? a : b; });
}

template <int N>
JAX_Q4K_INLINE Vector<float, N> to_float(const Vector<int32_t, N>& x) {
  Vector<float, N> y;
  for (int i = 0; i < x.kParts; ++i) y.part[i] = __builtin_convertvector(x.part[i], typename Vector<float, N>::Part);
  return y;
}

// Swaps every even lane with the next one.
template <class Element>
JAX_Q4K_INLINE Vector<Element, 64> neighbours(const Vector<Element, 64>& v) {
  Vector<Element, 64> w;
  for (int i = 0; i < v.kParts; ++i) w.part[i] = shuffled<lane_apart<1>>(v.part[i], v.part[i]);
  return w;
}

// Converts sixteen bytes to floats.
template <class Byte>
JAX_Q4K_INLINE Floats to_float(const Vector<Byte, 16>& x) {
#if defined(JAX_Q4K_AVX512)
  Ints ints;
  ints.part[0] = (Ints::Part)(Byte(-1) < 0 ? _mm512_cvtepi8_epi32((__m128i)x.part[0]) : _mm512_cvtepu8_epi32((__m128i)x.part[0]));
#elif defined(__AVX2__)
  Ints ints;
  for (int i = 0; i < 2; ++i) {
    const __m128i eight = i ? _mm_srli_si128((__m128i)x.part[0], 8) : (__m128i)x.part[0];
    ints.part[i] = (Ints::Part)(Byte(-1) < 0 ? _mm256_cvtepi8_epi32(eight) : _mm256_cvtepu8_epi32(eight));
  }
#else
  Byte bytes[16];
  int32_t wide[16];
  x.store(bytes);
  for (int i = 0; i < 16; ++i) wide[i] = bytes[i];
  const Ints ints = Ints::load(wide);
#endif
  return to_float(ints);
}

JAX_Q4K_INLINE float half(uint16_t bits) {
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  const uint32_t magnitude = bits & 0x7fff, sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  uint32_t wide = (magnitude << 13) + (magnitude < 0x7c00 ? 0x38000000 : 0x70000000);  // infinity, NaN: highest exponent
  float value;
  std::memcpy(&value, &wide, 4);
  if (magnitude < 0x400) value = static_cast<float>(magnitude) * 0x1p-24f;  // a subnormal float might be flushed to zero
  std::memcpy(&wide, &value, 4);
  wide |= sign;
  std::memcpy(&value, &wide, 4);
  return value;
#endif
}

JAX_Q4K_INLINE Floats to_float(const Halves& x) {
  Floats y;
#if defined(JAX_Q4K_AVX512)
  y.part[0] = (Floats::Part)_mm512_cvtph_ps((__m256i)x.part[0]);
#elif defined(__F16C__)
  y.part[0] = (Floats::Part)_mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)x.part[0]));
  y.part[1] = (Floats::Part)_mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)x.part[0], 1));
#else
  uint16_t bits[16];
  float values[16];
  x.store(bits);
  for (int i = 0; i < 16; ++i) values[i] = half(bits[i]);
  y = Floats::load(values);
#endif
  return y;
}

// Two adjacent f16, eight times.
JAX_Q4K_INLINE Floats repeated_halves(const uint8_t* two) {
  uint32_t bits;
  std::memcpy(&bits, two, 4);
#if defined(__AVX2__)
  const __m128 both = _mm_cvtph_ps(_mm_cvtsi32_si128(static_cast<int>(bits)));
  return Vector<double, 64>::all(_mm_cvtsd_f64(_mm_castps_pd(both))).as<float>();
#else
  return to_float(Vector<uint32_t, 32>::all(bits).as<uint16_t>());
#endif
}

// Eight adjacent f16, each twice.
JAX_Q4K_INLINE Floats doubled_halves(const uint8_t* eight) {
#if defined(__AVX2__)
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(eight)));
  const __m256i both = _mm256_or_si256(wide, _mm256_slli_epi32(wide, 16));
  return to_float(Halves::load(&both));
#else
  uint16_t from[8], to[16];
  std::memcpy(from, eight, 16);
  for (int i = 0; i < 16; ++i) to[i] = from[i / 2];
  return to_float(Halves::load(to));
#endif
}

// Eight bytes in the even lanes, zeros in the odd ones.
JAX_Q4K_INLINE Words in_even_lanes(const uint8_t* eight) {
  Words v;
#if defined(JAX_Q4K_AVX512)
  v.part[0] = (Words::Part)_mm512_cvtepu8_epi64(_mm_loadu_si64(eight));
#elif defined(__AVX2__)
  for (int i = 0; i < 2; ++i) v.part[i] = (Words::Part)_mm256_cvtepu8_epi64(_mm_loadu_si32(eight + 4 * i));
#else
  uint32_t lanes[16] = {};
  for (int i = 0; i < 8; ++i) lanes[2 * i] = eight[i];
  v = Words::load(lanes);
#endif
  return v;
}

// a in even lanes, b in odd ones.
JAX_Q4K_INLINE Floats alternating(float a, float b) {
  float lanes[16];
  for (int i = 0; i < 16; i += 2) lanes[i] = a, lanes[i + 1] = b;
  return Floats::load(lanes);
}

// Eight bytes of `a` and of `b`, alternating, as floats.
JAX_Q4K_INLINE Floats alternating_bytes(uint64_t a, uint64_t b) {
#if defined(__x86_64__)
  const __m128i both = _mm_unpacklo_epi8(_mm_cvtsi64_si128(static_cast<long long>(a)), _mm_cvtsi64_si128(static_cast<long long>(b)));
#else
  uint8_t both[16];
  for (int i = 0; i < 16; ++i) both[i] = static_cast<uint8_t>((i % 2 ? b : a) >> i / 2 * 8);
#endif
  return to_float(Vector<uint8_t, 16>::load(&both));
}

// acc[i] + the sum over j < 4 of a[4 i + j] * b[4 i + j]. a is at most 128 without VNNI, 127 on Arm.
JAX_Q4K_INLINE Ints dot(const Bytes& a, const SignedBytes& b, Ints acc = Ints::all(0)) {
#if defined(JAX_Q4K_AVX512)
  acc.part[0] = (Ints::Part)_mm512_dpbusd_epi32((__m512i)acc.part[0], (__m512i)a.part[0], (__m512i)b.part[0]);
#elif defined(__AVXVNNI__)
  for (int i = 0; i < 2; ++i)
    acc.part[i] = (Ints::Part)_mm256_dpbusd_avx_epi32((__m256i)acc.part[i], (__m256i)a.part[i], (__m256i)b.part[i]);
#elif defined(__AVX2__)
  const __m256i ones = _mm256_set1_epi16(1);
  for (int i = 0; i < 2; ++i) {
    __m256i pairs = _mm256_maddubs_epi16((__m256i)a.part[i], (__m256i)b.part[i]);
    acc.part[i] += (Ints::Part)_mm256_madd_epi16(pairs, ones);
    asm("" : "+x"(acc.part[i]));  // keeps this order: GCC would hold the products of a complete run, in memory
  }
#elif defined(__ARM_FEATURE_DOTPROD)
  for (int i = 0; i < 4; ++i)
    acc.part[i] = (Ints::Part)vdotq_s32((int32x4_t)acc.part[i], (int8x16_t)a.part[i], (int8x16_t)b.part[i]);
#else  // even and odd bytes by 16-bit products; a sum of two fits because a is at most 128
  using Shorts = Vector<int16_t, 64>;
  const Shorts eight = Shorts::all(8), low = a.as<int16_t>() & Shorts::all(0xff), high = a.as<int16_t>() >> eight;
  const Shorts values = b.as<int16_t>();
  const Ints pairs = (low * ((values << eight) >> eight) + (high & Shorts::all(0xff)) * (values >> eight)).as<int32_t>();
  acc = acc + ((pairs << Ints::all(16)) >> Ints::all(16)) + (pairs >> Ints::all(16));
#endif
  return acc;
}

// Partial sums of `dot` that are not yet widened to Ints. Plain AVX2 adds pairs of products in 16 bits, which suffice
// for a run of words if words * largest quant <= kNarrow. Other instruction sets use Ints.
#if defined(__AVX2__) && !defined(JAX_Q4K_AVX512) && !defined(__AVXVNNI__)
constexpr int kNarrow = 32767 / (2 * 127);
using Narrow = Vector<int16_t, 64>;
JAX_Q4K_INLINE Narrow dot(const Bytes& a, const SignedBytes& b, Narrow acc) {
  for (int i = 0; i < 2; ++i) {
    acc.part[i] += (Narrow::Part)_mm256_maddubs_epi16((__m256i)a.part[i], (__m256i)b.part[i]);
    asm("" : "+x"(acc.part[i]));
  }
  return acc;
}
JAX_Q4K_INLINE Ints widened(const Narrow& sums, Ints acc) {
  for (int i = 0; i < 2; ++i)
    acc.part[i] += (Ints::Part)_mm256_madd_epi16((__m256i)sums.part[i], _mm256_set1_epi16(1));
  return acc;
}
#else
constexpr int kNarrow = 0;
using Narrow = Ints;
JAX_Q4K_INLINE Ints widened(const Narrow& sums, const Ints& acc) { return sums + acc; }
#endif

// Added to signed bytes for `dot_signed`, because VNNI needs unsigned bytes.
#if defined(JAX_Q4K_AVX512) || defined(__AVXVNNI__)
constexpr int kZeroPoint = 128;
#else
constexpr int kZeroPoint = 0;
#endif

// `dot` of signed bytes plus kZeroPoint.
JAX_Q4K_INLINE Ints dot_signed(const Bytes& a, const SignedBytes& b, Ints acc = Ints::all(0)) {
#if defined(__AVX2__) && !defined(JAX_Q4K_AVX512) && !defined(__AVXVNNI__)
  Bytes magnitude;
  SignedBytes flipped;  // b with a's sign
  for (int i = 0; i < 2; ++i) {
    magnitude.part[i] = (Bytes::Part)_mm256_abs_epi8((__m256i)a.part[i]);
    flipped.part[i] = (SignedBytes::Part)_mm256_sign_epi8((__m256i)b.part[i], (__m256i)a.part[i]);
  }
  return dot(magnitude, flipped, acc);
#elif defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
  return dot(a, b, acc);
#else  // the low 7 bits minus the eighth, which is worth 128
  return dot(a & Bytes::all(0x7f), b, acc) - dot(a & Bytes::all(0x80), b);
#endif
}

// Joins 16 bytes from each address.
JAX_Q4K_INLINE Bytes joined(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) {
  Bytes v;
#if defined(__AVX2__)
  auto pair = [](const uint8_t* low, const uint8_t* high) __attribute__((always_inline)) {
    const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
    if (low == high) return _mm256_broadcastsi128_si256(first);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first), _mm_loadu_si128(reinterpret_cast<const __m128i*>(high)), 1);
  };
#if defined(JAX_Q4K_AVX512)
  const __m256i low = pair(a, b);
  v.part[0] = (Bytes::Part)(a == c && b == d ? _mm512_broadcast_i64x4(low)
                                             : _mm512_inserti64x4(_mm512_castsi256_si512(low), pair(c, d), 1));
#else
  v.part[0] = (Bytes::Part)pair(a, b), v.part[1] = (Bytes::Part)pair(c, d);
#endif
#else
  std::memcpy(&v.part[0], a, 16), std::memcpy(&v.part[1], b, 16), std::memcpy(&v.part[2], c, 16), std::memcpy(&v.part[3], d, 16);
#endif
  return v;
}

// Stores 16 bytes at each address.
JAX_Q4K_INLINE void store_quarters(const Bytes& v, uint8_t* a, uint8_t* b, uint8_t* c, uint8_t* d) {
#if defined(__AVX2__)
  auto store = [](uint8_t* to, __m128i x) __attribute__((always_inline)) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), x); };
#if defined(JAX_Q4K_AVX512)
  const __m512i all = (__m512i)v.part[0];
  store(a, _mm512_castsi512_si128(all)), store(b, _mm512_extracti32x4_epi32(all, 1));
  store(c, _mm512_extracti32x4_epi32(all, 2)), store(d, _mm512_extracti32x4_epi32(all, 3));
#else
  const __m256i low = (__m256i)v.part[0], high = (__m256i)v.part[1];
  store(a, _mm256_castsi256_si128(low)), store(b, _mm256_extracti128_si256(low, 1));
  store(c, _mm256_castsi256_si128(high)), store(d, _mm256_extracti128_si256(high, 1));
#endif
#else
  std::memcpy(a, &v.part[0], 16), std::memcpy(b, &v.part[1], 16), std::memcpy(c, &v.part[2], 16), std::memcpy(d, &v.part[3], 16);
#endif
}

// Stores 16 bytes of a, and then of b, at each address.
JAX_Q4K_INLINE void store_pairs(const Bytes& a, const Bytes& b, uint8_t* first, uint8_t* second, uint8_t* third, uint8_t* fourth) {
#if defined(__AVX2__)
  auto store = [](uint8_t* to, __m256i x) __attribute__((always_inline)) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x); };
#if defined(JAX_Q4K_AVX512)
  const __m512i x = (__m512i)a.part[0], y = (__m512i)b.part[0];
  const __m512i low = _mm512_permutex2var_epi64(x, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), y);
  const __m512i high = _mm512_permutex2var_epi64(x, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), y);
  store(first, _mm512_castsi512_si256(low)), store(second, _mm512_extracti64x4_epi64(low, 1));
  store(third, _mm512_castsi512_si256(high)), store(fourth, _mm512_extracti64x4_epi64(high, 1));
#else
  const __m256i x[2] = {(__m256i)a.part[0], (__m256i)a.part[1]}, y[2] = {(__m256i)b.part[0], (__m256i)b.part[1]};
  store(first, _mm256_permute2x128_si256(x[0], y[0], 0x20)), store(second, _mm256_permute2x128_si256(x[0], y[0], 0x31));
  store(third, _mm256_permute2x128_si256(x[1], y[1], 0x20)), store(fourth, _mm256_permute2x128_si256(x[1], y[1], 0x31));
#endif
#else
  store_quarters(a, first, second, third, fourth);
  store_quarters(b, first + 16, second + 16, third + 16, fourth + 16);
#endif
}

// Takes the even, or the odd, ones of eight pieces of 16 bytes.
template <int kOdd>
JAX_Q4K_INLINE Bytes every_second(const uint8_t* p) {
#if defined(JAX_Q4K_AVX512)
  const __m512i first = _mm512_loadu_si512(p), second = _mm512_loadu_si512(p + 64);
  Bytes v;
  v.part[0] = (Bytes::Part)(_mm512_shuffle_i64x2(first, second, kOdd ? 0xdd : 0x88));
  return v;
#else
  p += 16 * kOdd;
  return joined(p, p + 32, p + 64, p + 96);
#endif
}

template <int kQuarters, int... kLane>
JAX_Q4K_INLINE Words of_quarters(std::integer_sequence<int, kLane...>) {  // eight bits per quarter, the first in the lowest
  constexpr uint32_t kWords[16] = {(kQuarters >> kLane / 4 * 8 & 0xff)...};
  return Words::load(kWords);
}
// Extracts bits of the words from a, b, c, d in the four quarters; kMask selects those that stay in every byte.
template <int a, int b, int c, int d, int kMask>
JAX_Q4K_INLINE Bytes fields(const Bytes& v) {
  if (a == b && b == c && c == d) return (v.as<uint32_t>() >> Words::all(a)).template as<uint8_t>() & Bytes::all(kMask);
  const Words shifts = of_quarters<a | b << 8 | c << 16 | d << 24>(std::make_integer_sequence<int, 16>());
  return (v.as<uint32_t>() >> shifts).template as<uint8_t>() & Bytes::all(kMask);
}

// Looks up indices below 16 in a table of 16 bytes.
JAX_Q4K_INLINE Bytes looked_up(const Vector<uint8_t, 16>& table, const Bytes& at) {
  Bytes v;
#if defined(JAX_Q4K_AVX512)
  v.part[0] = (Bytes::Part)_mm512_shuffle_epi8(_mm512_broadcast_i32x4((__m128i)table.part[0]), (__m512i)at.part[0]);
#elif defined(__AVX2__)
  const __m256i both = _mm256_broadcastsi128_si256((__m128i)table.part[0]);
  for (int i = 0; i < 2; ++i) v.part[i] = (Bytes::Part)_mm256_shuffle_epi8(both, (__m256i)at.part[i]);
#elif defined(__aarch64__)
  for (int i = 0; i < 4; ++i) v.part[i] = (Bytes::Part)vqtbl1q_u8((uint8x16_t)table.part[0], (uint8x16_t)at.part[i]);
#else
  uint8_t entries[16], bytes[64];
  table.store(entries), at.store(bytes);
  for (auto& byte : bytes) byte = entries[byte];
  v = Bytes::load(bytes);
#endif
  return v;
}

// `value` where a bit is set, of 256 bits; i selects bytes [16 i, 16 i + 16) of every quarter.
template <int i>
JAX_Q4K_INLINE Bytes flags(const uint8_t* bits, uint8_t value) {
  Bytes v;
#if defined(__AVX2__)  // repeats every byte of bits eight times, then tests one bit of each
  constexpr auto kEight = [](long long byte) { return 0x0101010101010101 * byte; };
  const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201u));
#if defined(JAX_Q4K_AVX512)
  const __m512i quarters = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3),
                                                    _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bits))));
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_set_epi64x(kEight(2 * i + 1), kEight(2 * i)));
  const __mmask64 set = _mm512_test_epi8_mask(_mm512_shuffle_epi8(quarters, bytes), _mm512_broadcast_i64x4(bit));
  v.part[0] = (Bytes::Part)_mm512_maskz_set1_epi8(set, static_cast<char>(value));
#else
  const __m256i bytes = _mm256_setr_epi64x(kEight(2 * i), kEight(2 * i + 1), kEight(2 * i + 8), kEight(2 * i + 9));
  for (int part = 0; part < 2; ++part) {
    const __m256i half = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bits + 16 * part)));
    const __m256i set = _mm256_and_si256(_mm256_shuffle_epi8(half, bytes), bit);
    v.part[part] = (Bytes::Part)_mm256_and_si256(_mm256_cmpeq_epi8(set, bit), _mm256_set1_epi8(static_cast<char>(value)));
  }
#endif
#else
  uint8_t bytes[64];
  for (int at = 0; at < 64; ++at) bytes[at] = bits[at / 16 * 8 + 2 * i + at % 16 / 8] >> at % 8 & 1 ? value : 0;
  v = Bytes::load(bytes);
#endif
  return v;
}

}  // namespace
}  // namespace jax_q4k
