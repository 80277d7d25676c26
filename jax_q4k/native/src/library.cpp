// Which kernels are in use, and what the library says of itself.

#include <string_view>
#include <vector>

#include "kernels.h"

#if defined(JAX_Q4K_HAS_NEON)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace jax_q4k {
namespace {

// What this processor can run, the best first. A compiler that does not know an instruction set leaves it out.
std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  [[maybe_unused]] const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
#if defined(JAX_Q4K_HAS_AVX512)
  if (avx2 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    found.push_back(&kernels_avx512);
#endif
#if defined(JAX_Q4K_HAS_AVXVNNI)
  if (avx2 && __builtin_cpu_supports("avxvnni")) found.push_back(&kernels_avxvnni);
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
// `build.fingerprint()` of what this was compiled from.
const char* jax_q4k_fingerprint() { return JAX_Q4K_FINGERPRINT; }
}
#pragma GCC visibility pop
