// Which kernels are in use, and what the library says of itself.

#include <string_view>
#include <vector>

#include "kernels.h"

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
// What the processor says of itself; zeros of what it does not know. Compilers' own test does not know every name.
struct Cpuid {
  uint32_t a = 0, b = 0, c = 0, d = 0;
  Cpuid(uint32_t leaf, uint32_t part) { __get_cpuid_count(leaf, part, &a, &b, &c, &d); }
};
#endif

// What this processor can run, the best first. A compiler that does not know an instruction set leaves it out.
std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  const Cpuid one(1, 0), seven(7, 0), more(7, 1);
  uint32_t saved = 0, high;  // by the system, when it gives the processor to another thread
  if (one.c >> 27 & 1) asm("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  const bool fma = one.c >> 12 & 1, f16c = one.c >> 29 & 1, avx = (saved & 0x6) == 0x6;
  [[maybe_unused]] const bool avx2 = avx && fma && f16c && (seven.b >> 5 & 1);
#endif
#if defined(JAX_Q4K_HAS_AVX512)
  constexpr uint32_t kParts = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  if (avx2 && (saved & 0xe6) == 0xe6 && (seven.b & kParts) == kParts && (seven.c >> 11 & 1)) found.push_back(&kernels_avx512);
#endif
#if defined(JAX_Q4K_HAS_AVXVNNI)
  if (avx2 && (more.a >> 4 & 1)) found.push_back(&kernels_avxvnni);
#endif
#if defined(JAX_Q4K_HAS_AVX2)
  if (avx2) found.push_back(&kernels_avx2);
#endif
#if defined(JAX_Q4K_HAS_NEON)
  const unsigned long bits = getauxval(AT_HWCAP);
  if ((bits & HWCAP_ASIMDDP) && (bits & HWCAP_ASIMDHP)) found.push_back(&kernels_neon);
#endif
  found.push_back(&kernels_portable);
  return found;
}

bool select(std::string_view name) {
  for (const Kernels* candidate : usable())
    if (name == candidate->name) return kernels = candidate, true;
  return false;
}

}  // namespace

const Kernels* kernels = usable().front();

}  // namespace jax_q4k

#pragma GCC visibility push(default)
extern "C" {
// The name of the kernels in use.
const char* jax_q4k_kernels() { return jax_q4k::kernels->name; }
// Uses the kernels of that name from now on, for tests and measurements; false if there are none or the processor
// lacks what they need.
bool jax_q4k_select(const char* name) { return jax_q4k::select(name); }
// The names of all that were compiled, each with a space behind it.
const char* jax_q4k_compiled() {
  return ""
#if defined(JAX_Q4K_HAS_AVX512)
         "avx512 "
#endif
#if defined(JAX_Q4K_HAS_AVXVNNI)
         "avxvnni "
#endif
#if defined(JAX_Q4K_HAS_AVX2)
         "avx2 "
#endif
#if defined(JAX_Q4K_HAS_NEON)
         "neon "
#endif
         "portable ";
}
// `build.fingerprint()` of what this was compiled from.
const char* jax_q4k_fingerprint() { return JAX_Q4K_FINGERPRINT; }
}
#pragma GCC visibility pop
