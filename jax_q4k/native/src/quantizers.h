// Quantizers that turn blocks of floats into a file's bytes by one call, and a set of them per instruction set. Blocks of F32,
// F16 and BF16 are single values.

#pragma once

#include <cstdint>
#include <string_view>

namespace jax_q4k {

#define JAX_Q4K_QUANTIZERS(f) \
  f(Q4_0) f(Q4_1) f(Q5_0) f(Q5_1) f(Q8_0) f(Q2_K) f(Q3_K) f(Q4_K) f(Q5_K) f(Q6_K) f(TQ1_0) f(TQ2_0) f(NVFP4) f(MXFP4) \
  f(F32) f(F16) f(BF16)
#define JAX_Q4K_QUANTIZER_NAME(name) #name,
constexpr std::string_view kQuantizerNames[] = {JAX_Q4K_QUANTIZERS(JAX_Q4K_QUANTIZER_NAME)};
#undef JAX_Q4K_QUANTIZER_NAME

enum class FloatType : int32_t { kF32, kF16, kBf16 };

struct FloatBlocks {
  const float* x;           // (blocks, block)
  const float* importance;  // (period, block), positive; block b has row (first + b) % period
  int64_t blocks, first, period;
  float largest;    // magnitude of a value
  uint8_t* packed;  // (blocks, bytes of a block)
};

struct Quantizers {
  // Converts f16 or bf16 to floats.
  void (*to_floats)(FloatType type, const void* from, int64_t count, float* to);
  // Returns false, at the first one, if a value is NaN or exceeds the largest magnitude.
  bool (*quantize[sizeof kQuantizerNames / sizeof *kQuantizerNames])(const FloatBlocks&);
};

extern const Quantizers quantizers_avx512, quantizers_avxvnni, quantizers_avx2, quantizers_neon, quantizers_portable;

extern const Quantizers* quantizers;  // of the set in use

}  // namespace jax_q4k
