// Packed rows, read in spans of 256 weights: weight = scale * quant - min, with unsigned quants of a byte.
//
// One reader per block format; layouts as `ptx_kernels/formats` splits them into planes. Formats without a minimum
// have one all the same: what their signed quants are raised by, times the scale.

#pragma once

#include "kernels.h"
#include "vectors.h"

namespace jax_q4k {
namespace {

// What a reader is made of: kGroup weights share a scale and a min, of which `scales` stores 256 / kGroup each. If
// kSignedQuants, quants are signed bytes, and mins are 0.
template <Type kType, int kColumns, bool kSignedQuants = false>
struct Packed {
  static constexpr int kGroup = kColumns, kPlanes = kLayouts[kType].planes;
  static constexpr const int (&kBytes)[4] = kLayouts[kType].bytes;
  static constexpr bool kSigned = kSignedQuants;
};

struct ScalesOfK {  // the 12 bytes of Q4_K and Q5_K: eight 6-bit scales and eight 6-bit mins
  uint64_t scales, mins;
  explicit ScalesOfK(const uint8_t* p) {
    uint32_t a, b, c;
    std::memcpy(&a, p, 4), std::memcpy(&b, p + 4, 4), std::memcpy(&c, p + 8, 4);
    uint64_t high_scales = (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030), high_mins = (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030);
    scales = (a & 0x3f3f3f3f) | high_scales << 32;
    mins = (b & 0x3f3f3f3f) | high_mins << 32;
  }
};

struct Q4_K : Packed<kQ4_K, 32> {
  static void scales(const uint8_t* const* p, Floats8* scale, Floats8* min) {
    ScalesOfK k(p[0] + 4);
    *scale = floats_of<uint8_t>(k.scales) * Floats8::all(half(p[0]));
    *min = floats_of<uint8_t>(k.mins) * Floats8::all(half(p[0] + 2));
  }
  static Bytes quants(const uint8_t* const* p, int i) {
    return fields<32>(twice<32>(p[0] + 16 + 32 * i), 0, 4, 15);
  }
};

struct Q5_K : Packed<kQ5_K, 32> {
  static void scales(const uint8_t* const* p, Floats8* scale, Floats8* min) { Q4_K::scales(p, scale, min); }
  static Bytes quants(const uint8_t* const* p, int i) {
    Bytes high = fields<32>(twice<32>(p[0] + 16), 2 * i, 2 * i + 1, 1);
    return fields<32>(twice<32>(p[0] + 48 + 32 * i), 0, 4, 15) | (high * Bytes::all(16));
  }
};

struct Q6_K : Packed<kQ6_K, 16> {
  static void scales(const uint8_t* const* p, Floats8* scale, Floats8* min) {
    Floats8 d = Floats8::all(half(p[3]));
    for (int i = 0; i < 2; ++i) {
      uint64_t bytes;
      std::memcpy(&bytes, p[2] + 8 * i, 8);
      scale[i] = floats_of<int8_t>(bytes) * d;
      min[i] = scale[i] * Floats8::all(32);
    }
  }
  static Bytes quants(const uint8_t* const* p, int i) {
    Bytes low = Bytes::load(p[0] + i / 2 * 64);
    low = fields<32>(low, i % 2 * 4, i % 2 * 4, 15);
    Bytes high = fields<32>(twice<32>(p[1] + i / 2 * 32), i % 2 * 4, i % 2 * 4 + 2, 3);
    return low | (high.as<uint32_t>() * Words::all(16)).template as<uint8_t>();
  }
};

// Eight blocks of 32 weights make a span.

struct Q8_0 : Packed<kQ8_0, 32, true> {
  static void scales(const uint8_t* const* p, Floats8* scale, Floats8* min) {
    *scale = halves(p[1]);
    *min = Floats8::all(0);
  }
  static Bytes quants(const uint8_t* const* p, int i) { return Bytes::load(p[0] + 64 * i); }
};

struct Q4_0 : Packed<kQ4_0, 32> {
  static void scales(const uint8_t* const* p, Floats8* scale, Floats8* min) {
    *scale = halves(p[1]);
    *min = *scale * Floats8::all(8);
  }
  static Bytes quants(const uint8_t* const* p, int i) { return fields<16>(twice<16>(p[0] + 32 * i), 0, 4, 15); }
};

struct Q5_0 : Packed<kQ5_0, 32> {
  static void scales(const uint8_t* const* p, Floats8* scale, Floats8* min) {
    *scale = halves(p[2]);
    *min = *scale * Floats8::all(16);
  }
  static Bytes quants(const uint8_t* const* p, int i) {
    uint64_t bits;
    std::memcpy(&bits, p[1] + 8 * i, 8);
    return Q4_0::quants(p, i) | where(bits, 16);
  }
};

struct Q5_1 : Packed<kQ5_1, 32> {
  static void scales(const uint8_t* const* p, Floats8* scale, Floats8* min) {
    float d[8], m[8];
    for (int i = 0; i < 8; ++i) d[i] = half(p[2] + 4 * i), m[i] = -half(p[2] + 4 * i + 2);
    *scale = Floats8::load(d), *min = Floats8::load(m);
  }
  static Bytes quants(const uint8_t* const* p, int i) { return Q5_0::quants(p, i); }
};

// Where a plane of a row's span lies.
template <class Format>
const uint8_t* plane(const Matrix& w, int i, int64_t row, int64_t span) {
  return w.planes[i] + (row * (w.k / 32) + span * 8) * Format::kBytes[i] / 8;
}

// A row's last span where k is no multiple of 256: a copy that goes on with zeros.
template <class Format>
class CutSpan {
 public:
  void copy(const Matrix& w, int64_t row, const uint8_t** planes) {
    uint8_t* to = bytes_;
    for (int i = 0; i < Format::kPlanes; to += Format::kBytes[i++]) {
      std::memset(to, 0, Format::kBytes[i]);
      std::memcpy(to, plane<Format>(w, i, row, w.k / kSpan), w.k % kSpan / 32 * Format::kBytes[i] / 8);
      planes[i] = to;
    }
  }

 private:
  uint8_t bytes_[512];  // more than any format's span
};

}  // namespace
}  // namespace jax_q4k
