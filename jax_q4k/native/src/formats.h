// Packed rows, read in spans of 256 weights: weight = scale * quant - min, with unsigned quants of a byte.
//
// One reader per block format; layouts as `ptx_kernels/formats` splits them into planes. A span's quants come in four
// steps of 64: step i has columns [64 q + 16 i, + 16) of each quarter q, 16 bytes each. So four lanes that sum products
// of four bytes stay with one group of 16 columns for a step, with one of 32 for two.

// The list of formats comes first, and alone for `kernels.h`: enum, layouts and tables of functions expand from it.

#ifndef JAX_Q4K_FORMATS
// X(what GGUF calls it, columns of a block, the bytes that every plane has of 256 columns...)
#define JAX_Q4K_FORMATS(X)             \
  X(IQ4_NL, 32, 128, 16)               \
  X(MXFP4, 32, 128, 8)                 \
  X(Q4_0, 32, 128, 16)                 \
  X(Q4_1, 32, 128, 32)                 \
  X(Q5_0, 32, 128, 32, 16)             \
  X(Q5_1, 32, 128, 32, 32)             \
  X(Q8_0, 32, 256, 16)                 \
  X(IQ4_XS, 256, 128, 8)               \
  X(Q3_K, 256, 64, 32, 12, 2)          \
  X(Q4_K, 256, 144)                    \
  X(Q5_K, 256, 176)                    \
  X(Q6_K, 256, 128, 64, 16, 2)
#endif

#if !defined(JAX_Q4K_LIST_ALONE) && !defined(JAX_Q4K_READERS)
#define JAX_Q4K_READERS

#include "kernels.h"
#include "vectors.h"

namespace jax_q4k {
namespace {

// A reader's facts. kGroup weights share a scale, and `scales` gives all of a span: if kGroup is 32, scale and min of
// each group in turn; if 16, the scales, of which mins are the kOffset-fold. If kSigned, quants are signed bytes plus
// kZeroPoint, which products start less, and mins are 0.
template <Type kType, int kColumns, int kMin = 0, bool kSignedQuants = false>
struct Packed {
  static constexpr int kGroup = kColumns, kOffset = kMin, kPlanes = kLayouts[kType].planes;
  static constexpr const int (&kBytes)[4] = kLayouts[kType].bytes;
  static constexpr bool kSigned = kSignedQuants;
};

// The 12 bytes of Q4_K and Q5_K: eight 6-bit scales and eight 6-bit mins, times d and dmin before them.
JAX_Q4K_INLINE Floats scales_of_k(const uint8_t* p) {
  uint32_t a, b, c;
  std::memcpy(&a, p + 4, 4), std::memcpy(&b, p + 8, 4), std::memcpy(&c, p + 12, 4);
  const uint64_t high_scales = (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030);
  const uint64_t high_mins = (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030);
  return alternating_bytes((a & 0x3f3f3f3f) | high_scales << 32, (b & 0x3f3f3f3f) | high_mins << 32) * repeated_halves(p);
}

// Nibbles of 128 bytes: the low ones of every 32 are as many columns, the high ones the next.
template <int i>
JAX_Q4K_INLINE Bytes nibbles(const uint8_t* p) {
  constexpr int kShift = i / 2 * 4;
  return fields<kShift, kShift, kShift, kShift, 15>(every_second<i % 2>(p));
}

// Bits of every byte's low half, in its high half.
JAX_Q4K_INLINE Bytes upper(const Bytes& v) { return (v.as<uint32_t>() << Words::all(4)).as<uint8_t>(); }

struct Q4_K : Packed<kQ4_K, 32> {
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) { return scales_of_k(p[0]); }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) { return nibbles<i>(p[0] + 16); }
};

struct Q5_K : Packed<kQ5_K, 32> {
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) { return scales_of_k(p[0]); }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) {
    const uint8_t* high = p[0] + 16 + i % 2 * 16;  // bit g: of group g
    constexpr int g = i / 2;
    return nibbles<i>(p[0] + 48) | upper(fields<g, g + 2, g + 4, g + 6, 1>(joined(high, high, high, high)));
  }
};

struct Q6_K : Packed<kQ6_K, 16, 32> {
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) {
    uint16_t d;
    std::memcpy(&d, p[3], 2);
    return to_float(Vector<int8_t, 16>::load(p[2])) * Floats::all(half(d));
  }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) {
    const uint8_t *low = p[0] + 16 * i, *high = p[1] + i % 2 * 16;  // of 128 columns; those after lie 64 and 32 bytes on
    constexpr int g = i / 2 * 2;
    return fields<0, 4, 0, 4, 15>(joined(low, low, low + 64, low + 64)) |
           upper(fields<g, g + 4, g, g + 4, 3>(joined(high, high, high + 32, high + 32)));
  }
};

struct Q3_K : Packed<kQ3_K, 16, 4> {
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) {
    uint32_t a, b, c;
    std::memcpy(&a, p[2], 4), std::memcpy(&b, p[2] + 4, 4), std::memcpy(&c, p[2] + 8, 4);
    uint32_t six[4];  // bits of sixteen scales
    for (int u = 0; u < 4; ++u) six[u] = ((u % 2 ? b : a) >> u / 2 * 4 & 0x0f0f0f0f) | (c >> 2 * u & 0x03030303) << 4;
    uint16_t d;
    std::memcpy(&d, p[3], 2);
    return (to_float(Vector<uint8_t, 16>::load(six)) - Floats::all(32)) * Floats::all(half(d));
  }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) {
    const uint8_t *low = p[0] + i % 2 * 16, *high = p[1] + i % 2 * 16;  // of 128 columns; of all
    constexpr int g = i / 2;
    const Bytes third = fields<g, g + 2, g + 4, g + 6, 1>(joined(high, high, high, high));
    return fields<2 * g, 2 * g + 4, 2 * g, 2 * g + 4, 3>(joined(low, low, low + 32, low + 32)) |
           (third.as<uint32_t>() << Words::all(2)).as<uint8_t>();
  }
};

// Eight blocks of 32 weights make a span.

struct Q8_0 : Packed<kQ8_0, 32, 0, true> {
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) { return doubled_halves(p[1]) * alternating(1, 0); }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) {
    const uint8_t* at = p[0] + 16 * i;
    return joined(at, at + 64, at + 128, at + 192) ^ Bytes::all(kZeroPoint);
  }
};

struct Q4_0 : Packed<kQ4_0, 32> {
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) { return doubled_halves(p[1]) * alternating(1, 8); }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) {
    constexpr int kShift = i % 2 * 4;
    return fields<kShift, kShift, kShift, kShift, 15>(every_second<i / 2>(p[0]));
  }
};

struct Q4_1 : Packed<kQ4_1, 32> {
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) { return to_float(Halves::load(p[1])) * alternating(1, -1); }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) { return Q4_0::quants<i>(p); }
};

// Weights that are entries of a table of 16 signed bytes; Q4_0's nibbles number them.
template <Type kType>
struct Codes : Packed<kType, 32, 0, true> {
  template <int i>
  static JAX_Q4K_INLINE Bytes entries(const int8_t (&table)[16], const uint8_t* const* p) {
    return looked_up(Vector<uint8_t, 16>::load(table) ^ Vector<uint8_t, 16>::all(kZeroPoint), Q4_0::quants<i>(p));
  }
};

constexpr int8_t kTableOfIQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

struct IQ4_NL : Codes<kIQ4_NL> {
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) { return doubled_halves(p[1]) * alternating(1, 0); }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) { return entries<i>(kTableOfIQ4, p); }
};

struct IQ4_XS : Codes<kIQ4_XS> {
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) {
    uint16_t d, high;
    uint32_t low;
    std::memcpy(&d, p[1], 2), std::memcpy(&high, p[1] + 2, 2), std::memcpy(&low, p[1] + 4, 4);
    float scales[16] = {};
    for (int b = 0; b < 8; ++b) scales[2 * b] = static_cast<int>((low >> 4 * b & 15) | (high >> 2 * b & 3) << 4) - 32;
    return Floats::load(scales) * Floats::all(half(d));
  }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) { return entries<i>(kTableOfIQ4, p); }
};

struct MXFP4 : Codes<kMXFP4> {
  static constexpr int8_t kTable[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) {  // 2^(e - 128)
    uint32_t bits[16] = {};
    for (int block = 0; block < 8; ++block) {
      const uint32_t e = p[1][block];
      bits[2 * block] = e < 2 ? 0x200000u << e : (e - 1) << 23;
    }
    return Floats::load(bits);
  }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) { return entries<i>(kTable, p); }
};

struct Q5_0 : Packed<kQ5_0, 32> {
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) { return doubled_halves(p[2]) * alternating(1, 16); }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) {
    uint64_t bits = 0;
    for (int q = 3; q >= 0; --q) {
      uint16_t quarter;
      std::memcpy(&quarter, p[1] + 8 * q + 2 * i, 2);
      bits = bits << 16 | quarter;
    }
    return Q4_0::quants<i>(p) | where(bits, 16);
  }
};

struct Q5_1 : Packed<kQ5_1, 32> {
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) { return to_float(Halves::load(p[2])) * alternating(1, -1); }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) { return Q5_0::quants<i>(p); }
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

#endif  // JAX_Q4K_READERS
