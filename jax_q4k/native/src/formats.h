// Readers of packed rows, in spans of 256 weights: weight = scale * quant - min, with unsigned quants of one byte.
//
// There is one reader per block format; `ptx_kernels/formats` defines the planes. A span's quants come in four pieces
// of 64 bytes: piece i has columns [64 q + 16 i, 64 q + 16 i + 16) of each quarter q. Products take them in steps
// (`RowSpan`).

// The list of formats comes first, and `kernels.h` includes it alone: enum, layouts and function tables expand from it.

#ifndef JAX_Q4K_FORMATS
// X(GGUF's name, columns of a block, bytes of each plane for 256 columns...)
#define JAX_Q4K_FORMATS(X)             \
  X(IQ4_NL, 32, 128, 16)               \
  X(MXFP4, 32, 128, 8)                 \
  X(Q4_0, 32, 128, 16)                 \
  X(Q4_1, 32, 128, 32)                 \
  X(Q5_0, 32, 128, 32, 16)             \
  X(Q5_1, 32, 128, 32, 32)             \
  X(Q8_0, 32, 256, 16)                 \
  X(NVFP4, 64, 128, 16)                \
  X(IQ1_M, 256, 32, 16, 8)             \
  X(IQ1_S, 256, 32, 16, 2)             \
  X(IQ2_S, 256, 64, 8, 8, 2)           \
  X(IQ2_XS, 256, 64, 8, 2)             \
  X(IQ2_XXS, 256, 64, 2)               \
  X(IQ3_S, 256, 64, 32, 12, 2)         \
  X(IQ3_XXS, 256, 64, 32, 2)           \
  X(IQ4_XS, 256, 128, 8)               \
  X(Q2_K, 256, 64, 16, 4)              \
  X(Q3_K, 256, 64, 32, 12, 2)          \
  X(Q4_K, 256, 144)                    \
  X(Q5_K, 256, 176)                    \
  X(Q6_K, 256, 128, 64, 16, 2)         \
  X(TQ1_0, 256, 52, 2)                 \
  X(TQ2_0, 256, 64, 2)

// Formats whose quantizers search a codebook: values of an entry and of a scale, the largest scale, signs, and whether all
// values of a scale are raised or lowered together.
#define JAX_Q4K_BOOKS(X)              \
  X(IQ1_M, 8, 16, 7, kTernary, false)  \
  X(IQ1_S, 8, 32, 7, kTernary, true)   \
  X(IQ2_S, 8, 16, 15, kFreeSigns)      \
  X(IQ2_XS, 8, 16, 15, kEvenSigns)     \
  X(IQ2_XXS, 8, 32, 15, kEvenSigns)    \
  X(IQ3_S, 4, 32, 15, kFreeSigns)      \
  X(IQ3_XXS, 4, 32, 15, kEvenSigns)

// Whether the scale of a block and its weights may be subnormal floats.
#define JAX_Q4K_HAS_SUBNORMALS(type) ((type) == kMXFP4)
#endif

#if !defined(JAX_Q4K_LIST_ALONE) && !defined(JAX_Q4K_READERS)
#define JAX_Q4K_READERS

#include "kernels.h"
#include "vectors.h"

namespace jax_q4k {
namespace {

// Properties of a reader. kGroup weights share a scale, and `scales` returns those of a span: for kGroup 32, scale and
// min of each group alternate; for 16, the scales alone, and mins are kOffset * scale, or the result of `mins` if
// kMins. If kSigned, quants are signed bytes plus kZeroPoint, which is subtracted in the start value of products, and
// mins are 0. kFew: files have few tensors of the format, which gets fewer kernels.
template <Type kType, int kColumns, int kMin = 0, bool kSignedQuants = false>
struct Packed {
  static constexpr int kGroup = kColumns, kOffset = kMin, kPlanes = kLayouts[kType].planes;
  static constexpr const int (&kBytes)[4] = kLayouts[kType].bytes;
  static constexpr int kMost = 128;  // upper limit of unsigned quants
  static constexpr bool kSigned = kSignedQuants, kMins = false, kFew = false;
  static constexpr bool kCut = kLayouts[kType].block < kSpan;  // whether a row may end within its last span
};

template <class Number>
JAX_Q4K_INLINE Number loaded(const uint8_t* p) {
  Number number;
  std::memcpy(&number, p, sizeof number);
  return number;
}

// Decodes the 12 bytes of Q4_K and Q5_K, eight 6-bit scales and eight 6-bit mins, times the d and dmin before them.
JAX_Q4K_INLINE Floats scales_of_k(const uint8_t* p) {
  const auto a = loaded<uint32_t>(p + 4), b = loaded<uint32_t>(p + 8), c = loaded<uint32_t>(p + 12);
  const uint64_t high_scales = (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030);
  const uint64_t high_mins = (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030);
  return alternating_bytes((a & 0x3f3f3f3f) | high_scales << 32, (b & 0x3f3f3f3f) | high_mins << 32) * repeated_halves(p);
}

// Nibbles of 128 bytes: of every 32 bytes, the low nibbles are 32 columns and the high nibbles the next 32.
template <int i>
JAX_Q4K_INLINE Bytes nibbles(const uint8_t* p) {
  constexpr int kShift = i / 2 * 4;
  return fields<kShift, kShift, kShift, kShift, 15>(every_second<i % 2>(p));
}

// Moves the bits of every byte's low half to its high half.
JAX_Q4K_INLINE Bytes upper(const Bytes& v) { return (v.as<uint32_t>() << Words::all(4)).as<uint8_t>(); }

// Two bits of every byte for each of four groups of 32: 64 bytes for 256 columns.
template <int i>
JAX_Q4K_INLINE Bytes pairs(const uint8_t* p) {
  constexpr int g = i / 2 * 2;
  p += i % 2 * 16;  // for 128 columns; the other 128 are 32 bytes later
  return fields<g, g + 4, g, g + 4, 3>(joined(p, p, p + 32, p + 32));
}

struct Q4_K : Packed<kQ4_K, 32> {
  static constexpr int kMost = 15;
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) { return scales_of_k(p[0]); }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) { return nibbles<i>(p[0] + 16); }
};

struct Q5_K : Packed<kQ5_K, 32> {
  static constexpr int kMost = 31;
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) { return scales_of_k(p[0]); }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) {
    const uint8_t* high = p[0] + 16 + i % 2 * 16;  // bit g belongs to group g
    constexpr int g = i / 2;
    return nibbles<i>(p[0] + 48) | upper(fields<g, g + 2, g + 4, g + 6, 1>(joined(high, high, high, high)));
  }
};

struct Q6_K : Packed<kQ6_K, 16, 32> {
  static constexpr int kMost = 63;
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) {
    return to_float(Vector<int8_t, 16>::load(p[2])) * Floats::all(half(loaded<uint16_t>(p[3])));
  }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) {
    const uint8_t* low = p[0] + 16 * i;  // for 128 columns; the other 128 are 64 bytes later
    return fields<0, 4, 0, 4, 15>(joined(low, low, low + 64, low + 64)) | upper(pairs<i>(p[1]));
  }
};

struct Q2_K : Packed<kQ2_K, 16> {
  static constexpr int kMost = 3;
  static constexpr bool kMins = true;
  // Low or high nibbles of the groups' bytes, times the f16 at offset `factor`.
  template <int kShift>
  static JAX_Q4K_INLINE Floats times(const uint8_t* const* p, int factor) {
    const auto bytes = Vector<uint32_t, 16>::load(p[1]) >> Vector<uint32_t, 16>::all(kShift);
    const float d = half(loaded<uint16_t>(p[2] + factor));
    return to_float(bytes.template as<uint8_t>() & Vector<uint8_t, 16>::all(15)) * Floats::all(d);
  }
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) { return times<0>(p, 0); }
  static JAX_Q4K_INLINE Floats mins(const uint8_t* const* p) { return times<4>(p, 2); }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) { return pairs<i>(p[0]); }
};

struct Q3_K : Packed<kQ3_K, 16, 4> {
  static constexpr int kMost = 7;
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) {
    using Fours = Vector<uint32_t, 16>;  // four scales per word: their four low bits, and two high bits
    static constexpr uint32_t kLow[4] = {0, 0, 4, 4}, kHigh[4] = {0, 2, 4, 6};
    const Fours low = Vector<uint64_t, 16>::all(loaded<uint64_t>(p[2])).as<uint32_t>() >> Fours::load(kLow);
    const Fours high = Fours::all(loaded<uint32_t>(p[2] + 8)) >> Fours::load(kHigh);
    const Fours six = (low & Fours::all(0x0f0f0f0f)) | (high & Fours::all(0x03030303)) << Fours::all(4);
    const float d = half(loaded<uint16_t>(p[3]));
    return (to_float(six.as<uint8_t>()) - Floats::all(32)) * Floats::all(d);
  }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) {
    const uint8_t* high = p[1] + i % 2 * 16;
    constexpr int g = i / 2;
    const Bytes third = fields<g, g + 2, g + 4, g + 6, 1>(joined(high, high, high, high));
    return pairs<i>(p[0]) |
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
  static constexpr int kMost = 15;
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) { return doubled_halves(p[1]) * alternating(1, 8); }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) {
    constexpr int kShift = i % 2 * 4;
    return fields<kShift, kShift, kShift, kShift, 15>(every_second<i / 2>(p[0]));
  }
};

struct Q4_1 : Packed<kQ4_1, 32> {
  static constexpr int kMost = 15;
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) { return to_float(Halves::load(p[1])) * alternating(1, -1); }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) { return Q4_0::quants<i>(p); }
};

// Weights that are entries of a codebook of 16 signed bytes, indexed by Q4_0's nibbles.
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
    static constexpr uint32_t kLow[16] = {0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28};
    static constexpr uint32_t kHigh[16] = {0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14};
    const Words low = Words::all(loaded<uint32_t>(p[1] + 4)) >> Words::load(kLow);
    const Words high = Words::all(loaded<uint16_t>(p[1] + 2)) >> Words::load(kHigh);
    const Words six = (low & Words::all(15)) | (high & Words::all(3)) << Words::all(4);
    const Floats d = Floats::all(half(loaded<uint16_t>(p[1])));
    return (to_float(six.as<int32_t>()) - Floats::all(32)) * alternating(1, 0) * d;
  }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) { return entries<i>(kTableOfIQ4, p); }
};

struct MXFP4 : Codes<kMXFP4> {
  static constexpr int8_t kTable[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) {  // 2^(e - 128)
    static constexpr uint32_t kEven[16] = {~0u, 0, ~0u, 0, ~0u, 0, ~0u, 0, ~0u, 0, ~0u, 0, ~0u, 0, ~0u, 0};
    const Words e = in_even_lanes(p[1]);
    Words bits;
    for (int i = 0; i < Words::kParts; ++i) bits.part[i] = e.part[i] < 2 ? 0x200000 << e.part[i] : (e.part[i] - 1) << 23;
    return (bits & Words::load(kEven)).as<float>();
  }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) { return entries<i>(kTable, p); }
};

struct Q5_0 : Packed<kQ5_0, 32> {
  static constexpr int kMost = 31;
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) { return doubled_halves(p[2]) * alternating(1, 16); }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) {
    return Q4_0::quants<i>(p) | flags<i>(p[1], 16);
  }
};

struct Q5_1 : Packed<kQ5_1, 32> {
  static constexpr int kMost = 31;
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) { return to_float(Halves::load(p[2])) * alternating(1, -1); }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) { return Q5_0::quants<i>(p); }
};

// Codebook formats, and others that are read in groups of eight weights. A `Reader` returns a group as bytes, weight /
// scale + kMin, and the scale of every 16 columns.
template <Type kType, int kMin, class Reader>
struct Eights : Packed<kType, 16, kMin> {
  static constexpr bool kFew = true;
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) {
    float found[16];
    read_scales(p, found);
    return Floats::load(found);
  }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) {
    uint64_t found[8];
    read_step(p, i, found);
    return Bytes::load(found);
  }

 private:
  // Not inlined into unrolled kernels, which would take the compiler minutes.
  static __attribute__((noinline)) void read_scales(const uint8_t* const* p, float* to) {
    for (int g = 0; g < 16; ++g) to[g] = Reader::scale(p, g);
  }
  static __attribute__((noinline)) void read_step(const uint8_t* const* p, int step, uint64_t* to) {
    for (int i = 0; i < 8; ++i) to[i] = Reader::eight(p, i / 2 * 8 + 2 * step + i % 2);
  }
};

constexpr uint64_t kEachByte = 0x0101010101010101;

// Eight bytes kMin + magnitude, or kMin - magnitude where the byte's bit is set.
template <int kMin>
JAX_Q4K_INLINE uint64_t with_signs(uint64_t magnitudes, uint64_t bits) {
  const uint64_t set = ((bits * kEachByte & 0x8040201008040201) + 0x7f * kEachByte) >> 7 & kEachByte;  // no byte carries
  const uint64_t mask = set * 255;
  return kMin * kEachByte + (magnitudes & ~mask) - (magnitudes & mask);
}

// Adds an eighth bit to seven, so that an even number of bits is set.
JAX_Q4K_INLINE uint64_t even_signs(uint32_t seven) { return (seven & 127) | (__builtin_popcount(seven & 127) & 1) << 7; }

// Joins two codebook entries of four magnitudes each.
JAX_Q4K_INLINE uint64_t both(const uint32_t* book, int first, int second) {
  return book[first] | static_cast<uint64_t>(book[second]) << 32;
}

struct IQ2_XXS : Eights<kIQ2_XXS, 64, IQ2_XXS> {
  static JAX_Q4K_INLINE float scale(const uint8_t* const* p, int g) {
    return half(loaded<uint16_t>(p[1])) * (p[0][g / 2 * 8 + 7] / 16 * 2 + 1) * 0.125f;
  }
  static JAX_Q4K_INLINE uint64_t eight(const uint8_t* const* p, int i) {
    const uint8_t* group = p[0] + i / 4 * 8;
    return with_signs<64>(code_books.iq2_xxs[group[i % 4]], even_signs(loaded<uint32_t>(group + 4) >> i % 4 * 7));
  }
};

struct IQ2_XS : Eights<kIQ2_XS, 64, IQ2_XS> {
  static JAX_Q4K_INLINE float scale(const uint8_t* const* p, int g) {
    return half(loaded<uint16_t>(p[2])) * ((p[1][g / 2] >> g % 2 * 4 & 15) * 2 + 1) * 0.125f;
  }
  static JAX_Q4K_INLINE uint64_t eight(const uint8_t* const* p, int i) {
    const uint16_t word = loaded<uint16_t>(p[0] + 2 * i);
    return with_signs<64>(code_books.iq2_xs[word & 511], even_signs(word >> 9));
  }
};

struct IQ2_S : Eights<kIQ2_S, 64, IQ2_S> {
  static JAX_Q4K_INLINE float scale(const uint8_t* const* p, int g) {
    return half(loaded<uint16_t>(p[3])) * ((p[2][g / 2] >> g % 2 * 4 & 15) * 2 + 1) * 0.125f;
  }
  static JAX_Q4K_INLINE uint64_t eight(const uint8_t* const* p, int i) {
    return with_signs<64>(code_books.iq2_s[p[0][i] | (p[1][i / 4] >> i % 4 * 2 & 3) << 8], p[0][32 + i]);
  }
};

struct IQ3_XXS : Eights<kIQ3_XXS, 64, IQ3_XXS> {
  static JAX_Q4K_INLINE float scale(const uint8_t* const* p, int g) {
    return half(loaded<uint16_t>(p[2])) * (p[1][g / 2 * 4 + 3] / 16 * 2 + 1) * 0.25f;
  }
  static JAX_Q4K_INLINE uint64_t eight(const uint8_t* const* p, int i) {
    const uint32_t word = loaded<uint32_t>(p[1] + i / 4 * 4);
    return with_signs<64>(both(code_books.iq3_xxs, p[0][2 * i], p[0][2 * i + 1]), even_signs(word >> i % 4 * 7));
  }
};

struct IQ3_S : Eights<kIQ3_S, 16, IQ3_S> {
  static JAX_Q4K_INLINE float scale(const uint8_t* const* p, int g) {
    return half(loaded<uint16_t>(p[3])) * ((p[2][8 + g / 4] >> g / 2 % 2 * 4 & 15) * 2 + 1);
  }
  static JAX_Q4K_INLINE uint64_t eight(const uint8_t* const* p, int i) {
    const int high = p[2][i / 4] >> i % 4 * 2;
    return with_signs<16>(both(code_books.iq3_s, p[0][2 * i] | (high & 1) << 8, p[0][2 * i + 1] | (high & 2) << 7), p[1][i]);
  }
};

// 8 * (entry plus or minus 1/8) + 16.
JAX_Q4K_INLINE uint64_t raised(int entry, bool lowered) {
  return code_books.iq1_s[entry] + (lowered ? 7 : 9) * kEachByte;
}

struct IQ1_S : Eights<kIQ1_S, 16, IQ1_S> {
  static JAX_Q4K_INLINE float scale(const uint8_t* const* p, int g) {
    return half(loaded<uint16_t>(p[2])) * ((p[1][g / 2 * 2 + 1] >> 4 & 7) * 2 + 1) * 0.125f;
  }
  static JAX_Q4K_INLINE uint64_t eight(const uint8_t* const* p, int i) {
    const uint16_t word = loaded<uint16_t>(p[1] + i / 4 * 2);
    return raised(p[0][i] | (word >> i % 4 * 3 & 7) << 8, word >> 15);
  }
};

struct IQ1_M : Eights<kIQ1_M, 16, IQ1_M> {
  static JAX_Q4K_INLINE float scale(const uint8_t* const* p, int g) {
    const uint8_t* s = p[2];  // d's nibbles are the upper ones of bytes 1, 3, 5 and 7
    const uint16_t d = static_cast<uint16_t>(s[1] >> 4 | (s[3] & 0xf0) | (s[5] & 0xf0) << 4 | (s[7] & 0xf0) << 8);
    return half(d) * ((loaded<uint16_t>(s + g / 4 * 2) >> g % 4 * 3 & 7) * 2 + 1) * 0.125f;
  }
  static JAX_Q4K_INLINE uint64_t eight(const uint8_t* const* p, int i) {
    const int four = p[1][i / 2] >> i % 2 * 4;
    return raised(p[0][i] | (four & 7) << 8, four & 8);
  }
};

struct TQ1_0 : Eights<kTQ1_0, 1, TQ1_0> {
  static JAX_Q4K_INLINE float scale(const uint8_t* const* p, int) { return half(loaded<uint16_t>(p[1])); }
  // Eight base-3 digits: one of each of 8 bytes, or for the last groups two of each of 4 bytes.
  static JAX_Q4K_INLINE uint64_t eight(const uint8_t* const* p, int i) {
    constexpr uint8_t kPowers[5] = {1, 3, 9, 27, 81};
    uint8_t found[8];
    for (int j = 0; j < 8; ++j) {
      const int at = i < 20 ? i % 4 * 8 + j : i < 30 ? 32 + i % 2 * 8 + j : 48 + j % 4;
      const int digit = i < 20 ? i / 4 : i < 30 ? (i - 20) / 2 : (i - 30) * 2 + j / 4;
      found[j] = static_cast<uint8_t>(static_cast<uint8_t>(p[0][at] * kPowers[digit]) * 3 >> 8);
    }
    return loaded<uint64_t>(found);
  }
};

struct TQ2_0 : Packed<kTQ2_0, 16, 1> {
  static constexpr bool kFew = true;
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) { return Floats::all(half(loaded<uint16_t>(p[1]))); }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) { return pairs<i>(p[0]); }
};

struct NVFP4 : Packed<kNVFP4, 16, 12> {
  static constexpr bool kFew = true;
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) {
    uint32_t bits[16];
    for (int g = 0; g < 16; ++g) {
      const uint32_t code = p[1][g] & 127;
      const float subnormal = static_cast<float>(code) * 0x1p-10f;
      std::memcpy(bits + g, &subnormal, 4);
      if (code > 7) bits[g] = p[1][g] == 127 ? 0 : (code << 20) + (119u << 23);
    }
    return Floats::load(bits);
  }
  // The low nibbles of 8 bytes are 8 columns, the high nibbles the next 8.
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) {
    uint64_t found[8];
    for (int q = 0; q < 4; ++q) {
      const uint64_t codes = loaded<uint64_t>(p[0] + 32 * q + 8 * i);
      found[2 * q] = codes & 15 * kEachByte, found[2 * q + 1] = codes >> 4 & 15 * kEachByte;
    }
    return looked_up(Vector<uint8_t, 16>::load(MXFP4::kTable) + Vector<uint8_t, 16>::all(12), Bytes::load(found));
  }
};

// Mins of the groups, which are subtracted from the weights, for formats that scale 16 columns.
template <class Format>
JAX_Q4K_INLINE Floats mins_of(const uint8_t* const* p, const Floats& scales) {
  if constexpr (Format::kMins)
    return Format::mins(p);
  else
    return scales * Floats::all(Format::kOffset);
}

// Address of a plane of a row's span.
template <class Format>
const uint8_t* plane(const Matrix& w, int i, int64_t row, int64_t span) {
  return w.planes[i] + (row * (w.k / 32) + span * 8) * Format::kBytes[i] / 8;
}

// Returns whether a row's last span, if it is cut, may be read to its full length: the next row follows, and the scales
// of that part are masked.
inline bool followed(const Matrix& w, int64_t row) { return row * (w.k / 32) + w.k / kSpan * 8 + 8 <= w.n * (w.k / 32); }

// Keeps the scales of a span's first k columns; the others become zero.
JAX_Q4K_INLINE Floats scales_up_to(int64_t k, const Floats& scales) {
  static constexpr uint32_t kKept[32] = {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u};
  return (scales.as<uint32_t>() & Words::load(kKept + 16 - k / 16)).as<float>();
}

// A zero-padded copy of a last span that is cut.
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
