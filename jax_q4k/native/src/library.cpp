// Selects the kernel set in use, and reports what the library contains.

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "kernels.h"
#include "quantizers.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(JAX_Q4K_HAS_NEON)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace jax_q4k {
namespace {

#if defined(__x86_64__)
// CPUID; zeros for leaves that the processor lacks. The compilers' own test does not know every feature name.
struct Cpuid {
  uint32_t a = 0, b = 0, c = 0, d = 0;
  Cpuid(uint32_t leaf, uint32_t part) { __get_cpuid_count(leaf, part, &a, &b, &c, &d); }
};
#endif

struct Candidate {
  const Kernels* kernels = nullptr;
  const Quantizers* quantizers = nullptr;
  bool runs = false;  // on this processor
};

// The compiled kernel sets, best first. A compiler that does not know an instruction set leaves it out.
std::vector<Candidate> candidates() {
  std::vector<Candidate> found;
#if defined(__x86_64__)
  const Cpuid one(1, 0), seven(7, 0), more(7, 1);
  uint32_t saved = 0, high;  // registers that the system saves when it switches threads
  if (one.c >> 27 & 1) asm("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  const bool fma = one.c >> 12 & 1, f16c = one.c >> 29 & 1, avx = (saved & 0x6) == 0x6;
  [[maybe_unused]] const bool avx2 = avx && fma && f16c && (seven.b >> 5 & 1);
#endif
#if defined(JAX_Q4K_HAS_AVX512)
  constexpr uint32_t kParts = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  const bool avx512 = (saved & 0xe6) == 0xe6 && (seven.b & kParts) == kParts, vnni = seven.c >> 11 & 1;
  found.push_back({&kernels_avx512, &quantizers_avx512, avx2 && avx512 && vnni});
#endif
#if defined(JAX_Q4K_HAS_AVXVNNI)
  found.push_back({&kernels_avxvnni, &quantizers_avxvnni, avx2 && (more.a >> 4 & 1)});
#endif
#if defined(JAX_Q4K_HAS_AVX2)
  found.push_back({&kernels_avx2, &quantizers_avx2, avx2});
#endif
#if defined(JAX_Q4K_HAS_NEON)
  const unsigned long bits = getauxval(AT_HWCAP);
  found.push_back({&kernels_neon, &quantizers_neon, (bits & HWCAP_ASIMDDP) && (bits & HWCAP_ASIMDHP)});
#endif
  found.push_back({&kernels_portable, &quantizers_portable, true});
  return found;
}

// Returns the best set that this processor runs, or the set of that name if it runs here; else a null one.
Candidate find(std::string_view name = {}) {
  for (const Candidate& candidate : candidates())
    if (candidate.runs && (name.empty() || name == candidate.kernels->name)) return candidate;
  return {};
}

std::string names() {
  std::string all;
  for (const Candidate& candidate : candidates()) all += std::string(candidate.kernels->name) + " ";
  return all;
}

}  // namespace

const Kernels* kernels = find().kernels;
const Quantizers* quantizers = find().quantizers;
CodeBooks code_books;

}  // namespace jax_q4k

#pragma GCC visibility push(default)
extern "C" {
// Name of the kernel set in use.
const char* jax_q4k_kernels() { return jax_q4k::kernels->name; }
// Switches to the kernel set of that name, for tests and measurements; returns false if there is none or the processor
// cannot run it.
bool jax_q4k_select(const char* name) {
  const jax_q4k::Candidate found = *name ? jax_q4k::find(name) : jax_q4k::Candidate{};
  if (found.runs) jax_q4k::kernels = found.kernels, jax_q4k::quantizers = found.quantizers;
  return found.runs;
}
// Names of all compiled sets, each followed by a space.
const char* jax_q4k_compiled() {
  static const std::string names = jax_q4k::names();
  return names.c_str();
}
// Quantizes blocks of floats, f16 or bf16 by the quantizer of that format; see `FloatBlocks`. Returns 0 if a value is NaN or too
// large, 1 if all blocks are quantized, -1 if there is no such quantizer.
int jax_q4k_quantize(const char* format, const void* x, int32_t type, int64_t block, const float* importance, int64_t blocks,
                     int64_t first, int64_t period, float largest, uint8_t* packed, int64_t block_bytes) {
  using namespace jax_q4k;
  const auto* name = std::find(std::begin(kQuantizerNames), std::end(kQuantizerNames), format);
  if (name == std::end(kQuantizerNames)) return -1;
  const auto quantize = quantizers->quantize[name - std::begin(kQuantizerNames)];
  FloatBlocks s = {static_cast<const float*>(x), importance, blocks, first, period, largest, packed};
  const auto from = static_cast<FloatType>(type);
  if (from == FloatType::kF32) return quantize(s);
  alignas(64) float values[16 * 256];  // sixteen of the largest blocks; stays in L1
  const int64_t step = static_cast<int64_t>(std::size(values)) / block;
  s.x = values;
  for (int64_t at = 0; at < blocks; at += step) {
    s.blocks = std::min(step, blocks - at), s.first = first + at, s.packed = packed + at * block_bytes;
    quantizers->to_floats(from, static_cast<const uint16_t*>(x) + at * block, s.blocks * block, values);
    if (!quantize(s)) return 0;
  }
  return 1;
}
// Memory of the codebooks, for Python to fill in, and its size.
void* jax_q4k_code_books() { return &jax_q4k::code_books; }
uint64_t jax_q4k_code_books_size() { return sizeof jax_q4k::code_books; }
// `build.fingerprint()` of the sources of this library.
const char* jax_q4k_fingerprint() { return JAX_Q4K_FINGERPRINT; }
}
#pragma GCC visibility pop
