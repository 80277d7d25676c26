// Conversions between float32 and other float types.

#pragma once

#include "vectors.h"

namespace jax_q4k {
namespace {

struct Half { uint16_t bits; };
struct Bf16 { uint16_t bits; };
struct E4m3 { uint8_t bits; };  // float8_e4m3fn: bias 7, no infinity

template <class To, class From>
To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return x; }
inline float to_float(Half x) { return half(x.bits); }
inline float to_float(Bf16 x) { return bits_of<float>(static_cast<uint32_t>(x.bits) << 16); }
inline float to_float(E4m3 x) {
  const uint32_t magnitude = x.bits & 0x7f;
  float value = bits_of<float>((magnitude << 20) + 0x3c000000);
  if (magnitude < 8) value = static_cast<float>(magnitude) * 0x1p-9f;  // XLA's threads flush subnormal floats to zero
  if (magnitude == 0x7f) value = __builtin_nanf("");
  return x.bits & 0x80 ? -value : value;
}

// Loads sixteen elements as floats.
JAX_Q4K_INLINE Floats load_lanes(const float* from) { return Floats::load(from); }
JAX_Q4K_INLINE Floats load_lanes(const Half* from) { return to_float(Halves::load(from)); }
JAX_Q4K_INLINE Floats load_lanes(const int8_t* from) { return to_float(Vector<int8_t, 16>::load(from)); }
JAX_Q4K_INLINE Floats load_lanes(const E4m3* from) {  // 2^8 times the f16 with the same exponent and mantissa, except NaN
  using Bytes __attribute__((vector_size(16))) = uint8_t;
  using Shorts __attribute__((vector_size(32))) = uint16_t;
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  const Shorts wide = __builtin_convertvector(bytes, Shorts), magnitude = wide & 0x7f;
  const Shorts nan = Shorts{} + 0x7e00, halves = (magnitude == 0x7f ? nan : magnitude << 7) | (wide & 0x80) << 8;
  return to_float(Halves::load(&halves)) * Floats::all(256);
}
template <class T>
JAX_Q4K_INLINE Floats load_lanes(const T* from) {
  float values[16];
  for (int i = 0; i < 16; ++i) values[i] = to_float(from[i]);
  return Floats::load(values);
}

// Shifts the magnitude bits of a float right by `shift`, rounding to nearest even.
inline uint32_t rounded(uint32_t bits, int shift) { return (bits + ((1u << (shift - 1)) - 1) + (bits >> shift & 1)) >> shift; }

inline void from_float(float x, float* to) { *to = x; }
inline void from_float(float x, Bf16* to) {
  const uint32_t bits = bits_of<uint32_t>(x);
  to->bits = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded(bits, 16));
}
inline void from_float(float x, Half* to) {
  const uint32_t bits = bits_of<uint32_t>(x), magnitude = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
  uint32_t half_bits;
  if (magnitude > 0x7f800000)
    half_bits = 0x7e00;
  else if (magnitude >= 0x477ff000)  // 65520, which rounds to infinity
    half_bits = 0x7c00;
  else if (magnitude < 0x38800000)  // 2^-14: a multiple of 2^-24
    half_bits = static_cast<uint32_t>(__builtin_rintf(bits_of<float>(magnitude) * 0x1p24f));
  else
    half_bits = rounded(magnitude - 0x38000000, 13);
  to->bits = static_cast<uint16_t>(sign | half_bits);
}
inline void from_float(float x, E4m3* to) {  // saturates at 448
  const uint32_t bits = bits_of<uint32_t>(x), sign = bits >> 24 & 0x80;
  uint32_t magnitude = bits & 0x7fffffff, code;
  if (magnitude > 0x7f800000) {
    code = 0x7f;
  } else {
    if (magnitude > 0x43e00000) magnitude = 0x43e00000;  // 448
    code = magnitude < 0x3c800000  // 2^-6: a multiple of 2^-9
               ? static_cast<uint32_t>(__builtin_rintf(bits_of<float>(magnitude) * 512.0f))
               : rounded(magnitude - 0x3c000000, 20);
  }
  to->bits = static_cast<uint8_t>(sign | code);
}

}  // namespace
}  // namespace jax_q4k
