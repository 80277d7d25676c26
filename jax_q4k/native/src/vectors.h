// Vectors of 64 bytes, as one to four registers of the instruction set that this file is compiled for.
//
// Arithmetic is GCC's and Clang's vector extension; only what that cannot say is written once per instruction set:
// dot products of bytes, conversions of f16, and a few permutations.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace jax_q4k {
namespace {  // this header's code differs between the files that include it: nothing of it may be merged

#if defined(__AVX512F__)
constexpr int kWidth = 64;  // bytes of a register
#elif defined(__AVX2__)
constexpr int kWidth = 32;
#else
constexpr int kWidth = 16;
#endif

template <class Element, int kBytes>
struct Vector {
  static constexpr int kPart = kBytes < kWidth ? kBytes : kWidth, kParts = kBytes / kPart;
  static constexpr int kLanes = kBytes / sizeof(Element);
  using Part __attribute__((vector_size(kPart))) = Element;
  Part part[kParts];

  static Vector load(const void* from) {
    Vector v;
    std::memcpy(&v, from, kBytes);
    return v;
  }
  static Vector all(Element value) {
    Vector v;
    for (auto& part : v.part) part = value - Part{};
    return v;
  }
  void store(void* to) const { std::memcpy(to, this, kBytes); }

  // The same bits as lanes of another type.
  template <class Other>
  Vector<Other, kBytes> as() const {
    Vector<Other, kBytes> v;
    std::memcpy(&v, this, kBytes);
    return v;
  }
};

#define JAX_Q4K_OPERATOR(op)                                                        \
  template <class E, int N>                                                         \
  Vector<E, N> operator op(const Vector<E, N>& a, const Vector<E, N>& b) {          \
    Vector<E, N> c;                                                                 \
    for (int i = 0; i < Vector<E, N>::kParts; ++i) c.part[i] = a.part[i] op b.part[i]; \
    return c;                                                                       \
  }
JAX_Q4K_OPERATOR(+)
JAX_Q4K_OPERATOR(-)
JAX_Q4K_OPERATOR(*)
JAX_Q4K_OPERATOR(&)
JAX_Q4K_OPERATOR(|)
JAX_Q4K_OPERATOR(^)
JAX_Q4K_OPERATOR(>>)
#undef JAX_Q4K_OPERATOR

using Bytes = Vector<uint8_t, 64>;
using SignedBytes = Vector<int8_t, 64>;
using Words = Vector<uint32_t, 64>;
using Ints = Vector<int32_t, 64>;
using Floats = Vector<float, 64>;
using Floats8 = Vector<float, 32>;

inline Floats to_float(const Ints& x) {
  Floats y;
  for (int i = 0; i < Ints::kParts; ++i) y.part[i] = __builtin_convertvector(x.part[i], Floats::Part);
  return y;
}

// a * b + c, rounded once (the compiler contracts it where the hardware can).
template <int N>
inline Vector<float, N> fma(const Vector<float, N>& a, const Vector<float, N>& b, const Vector<float, N>& c) {
  return a * b + c;
}

template <int N>
inline float sum(const Vector<float, N>& v) {
  auto total = v.part[0];
  for (int i = 1; i < Vector<float, N>::kParts; ++i) total += v.part[i];
  constexpr int kLanes = sizeof(total) / 4;
  float lanes[kLanes];
  std::memcpy(lanes, &total, sizeof total);
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) lanes[i] += lanes[i + n];
  return lanes[0];
}

inline float half(const void* from) {
  uint16_t bits;
  std::memcpy(&bits, from, 2);
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  const uint32_t magnitude = bits & 0x7fff, sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  uint32_t wide = (magnitude << 13) + (magnitude < 0x7c00 ? 0x38000000 : 0x70000000);  // infinity, NaN: highest exponent
  float value;
  std::memcpy(&value, &wide, 4);
  if (magnitude < 0x400) value = static_cast<float>(magnitude) * 0x1p-24f;  // a subnormal float might count as zero
  std::memcpy(&wide, &value, 4);
  wide |= sign;
  std::memcpy(&value, &wide, 4);
  return value;
#endif
}

// Eight f16 in a row.
inline Floats8 halves(const void* from) {
#if defined(__F16C__)
  __m256 v = _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from)));
  return Floats8::load(&v);
#else
  float v[8];
  for (int i = 0; i < 8; ++i) v[i] = half(static_cast<const uint8_t*>(from) + 2 * i);
  return Floats8::load(v);
#endif
}

// Eight bytes as floats.
template <class Byte>
inline Floats8 floats_of(uint64_t bytes) {
#if defined(__AVX2__)
  __m128i packed = _mm_cvtsi64_si128(static_cast<long long>(bytes));
  __m256i wide = Byte(-1) < 0 ? _mm256_cvtepi8_epi32(packed) : _mm256_cvtepu8_epi32(packed);
  __m256 v = _mm256_cvtepi32_ps(wide);
  return Floats8::load(&v);
#else
  Byte lanes[8];
  std::memcpy(lanes, &bytes, 8);
  float v[8];
  for (int i = 0; i < 8; ++i) v[i] = lanes[i];
  return Floats8::load(v);
#endif
}

// acc[i] + the sum over j < 4 of a[4 i + j] * b[4 i + j]. a is at most 128, on NEON below.
inline Ints dot(const Bytes& a, const SignedBytes& b, Ints acc = Ints::all(0)) {
#if defined(__AVX512VNNI__)
  acc.part[0] = (Ints::Part)_mm512_dpbusd_epi32((__m512i)acc.part[0], (__m512i)a.part[0], (__m512i)b.part[0]);
#elif defined(__AVX2__)
  const __m256i ones = _mm256_set1_epi16(1);
  for (int i = 0; i < 2; ++i) {
    __m256i pairs = _mm256_maddubs_epi16((__m256i)a.part[i], (__m256i)b.part[i]);
    acc.part[i] += (Ints::Part)_mm256_madd_epi16(pairs, ones);
  }
#elif defined(__ARM_FEATURE_DOTPROD)
  for (int i = 0; i < 4; ++i)
    acc.part[i] = (Ints::Part)vdotq_s32((int32x4_t)acc.part[i], (int8x16_t)a.part[i], (int8x16_t)b.part[i]);
#else
  uint8_t u[64];
  int8_t s[64];
  int32_t total[16];
  a.store(u), b.store(s), acc.store(total);
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 4; ++j) total[i] += u[4 * i + j] * s[4 * i + j];
  acc = Ints::load(total);
#endif
  return acc;
}

// `dot` of bytes that are signed: as 7 bits less the eighth, which is worth 128.
inline Ints dot_signed(const Bytes& a, const SignedBytes& b, const Ints& acc = Ints::all(0)) {
#if defined(__ARM_FEATURE_DOTPROD)
  return dot(a, b, acc);  // which takes them so
#else
  return dot(a & Bytes::all(0x7f), b, acc) - dot(a & Bytes::all(0x80), b);
#endif
}

// [p[0, kRun), p[0, kRun), p[kRun, 2 kRun), ...]: each run of bytes twice, 64 in all.
template <int kRun>
inline Bytes twice(const uint8_t* p) {
#if defined(__AVX512F__)
  __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  __m512i both = kRun == 32 ? _mm512_broadcast_i64x4(bytes)
                            : _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3),
                                                       _mm512_castsi256_si512(bytes));
  return Bytes::load(&both);
#else
  uint8_t bytes[64];
  for (int i = 0; i < 64; i += 2 * kRun) std::memcpy(bytes + i, p + i / 2, kRun), std::memcpy(bytes + i + kRun, p + i / 2, kRun);
  return Bytes::load(bytes);
#endif
}

// The bits from `low` on of each first run of kRun bytes, from `high` on of each second one; `mask` says how many.
template <int kRun>
inline Bytes fields(const Bytes& v, uint32_t low, uint32_t high, uint8_t mask) {
  uint32_t shifts[16];
  for (int i = 0; i < 16; ++i) shifts[i] = i * 4 / kRun % 2 ? high : low;
  return (v.as<uint32_t>() >> Words::load(shifts)).template as<uint8_t>() & Bytes::all(mask);
}

// `value` where the bit is set.
inline Bytes where(uint64_t bits, uint8_t value) {
#if defined(__AVX512BW__)
  __m512i v = _mm512_maskz_set1_epi8(bits, static_cast<char>(value));
  return Bytes::load(&v);
#else
  uint8_t bytes[64];
  for (int i = 0; i < 8; ++i) {  // eight bits to bytes of 0 and 1, lowest first
    uint64_t spread = (((bits >> 8 * i & 0xff) * 0x0101010101010101u & 0x8040201008040201u) + 0x7f7f7f7f7f7f7f7fu) >> 7;
    spread = (spread & 0x0101010101010101u) * value;
    std::memcpy(bytes + 8 * i, &spread, 8);
  }
  return Bytes::load(bytes);
#endif
}

// Sixteen lanes of the eight or sixteen that `scales` holds; of eight, the others mean nothing.
inline Floats joined(const Floats8 (&scales)[2]) {
  Floats v;
  std::memcpy(&v, scales, 64);
  return v;
}
inline Floats joined(const Floats8 (&scales)[1]) {
#if defined(__AVX512F__)
  Floats v;
  v.part[0] = (Floats::Part)_mm512_castps256_ps512((__m256)scales[0].part[0]);
  return v;
#else
  const Floats8 both[2] = {scales[0], Floats8::all(0)};
  return joined(both);
#endif
}

// Lanes [i * 64 / kGroup, ...) of `scales`, each for kGroup / 4 lanes: what chunk i of 64 weights has, four a lane.
template <int kGroup>
inline Floats spread(const Floats& scales, int i) {
#if defined(__AVX512F__)
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i index = _mm512_add_epi32(_mm512_srli_epi32(lane, kGroup == 32 ? 3 : 2), _mm512_set1_epi32(i * 64 / kGroup));
  Floats v;
  v.part[0] = (Floats::Part)_mm512_permutexvar_ps(index, (__m512)scales.part[0]);
  return v;
#else
  float from[16], to[16];
  scales.store(from);
  for (int j = 0; j < 16; ++j) to[j] = from[i * 64 / kGroup + j / (kGroup / 4)];
  return Floats::load(to);
#endif
}

}  // namespace
}  // namespace jax_q4k
