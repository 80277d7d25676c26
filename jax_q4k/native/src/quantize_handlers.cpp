// Handler of the quantizers whose values are codebook entries.

#include "ffi.h"

namespace jax_q4k {
namespace {

#define JAX_Q4K_NAME_OF(name) #name,
constexpr std::string_view kBookNames[] = {JAX_Q4K_BOOKS(JAX_Q4K_NAME_OF)};
#undef JAX_Q4K_NAME_OF
constexpr int64_t kBlock = 256, kMostEntries = 2048;

// x, w (blocks, 256), digits (entries, 4 or 8), levels (3 or 8) -> d (blocks), scales (blocks, 8 or 16), entries (blocks,
// 32 or 64), signs (blocks, 32): see `CodebookSearch`. Callers have a thread for each call.
void codebook_search(Call& call, std::string_view format, float unit) {
  auto& [threads, operands, results] = call;
  const auto* found = std::find(std::begin(kBookNames), std::end(kBookNames), format);
  if (found == std::end(kBookNames)) fail("format " + std::string(format) + " has no codebook");
  const bool fours = format.substr(0, 3) == "IQ3", scale_of_32 = format == "IQ1_S" || format == "IQ2_XXS" || fours;
  CodebookSearch s;
  s.x = operands.floats("x", {&s.blocks, kBlock});
  s.w = operands.floats("w", {s.blocks, kBlock});
  s.digits = static_cast<const uint8_t*>(operands.next("digits", {ffi::U8}, {&s.num_entries, fours ? 4 : 8}).untyped_data());
  s.levels = operands.floats("levels", {fours ? 8 : 3});
  s.unit = unit;
  s.d = results.floats("d", {s.blocks});
  s.scales = static_cast<uint8_t*>(results.next("scales", {ffi::U8}, {s.blocks, scale_of_32 ? 8 : 16}).untyped_data());
  s.entries = static_cast<uint16_t*>(results.next("entries", {ffi::U16}, {s.blocks, fours ? 64 : 32}).untyped_data());
  s.signs = static_cast<uint8_t*>(results.next("signs", {ffi::U8}, {s.blocks, 32}).untyped_data());
  call.finish();
  if (s.num_entries < 1 || s.num_entries > kMostEntries) fail("digits must have 1 to " + std::to_string(kMostEntries) + " rows");
  kernels->search_codebook[found - std::begin(kBookNames)](s);
}

}  // namespace
}  // namespace jax_q4k

#pragma GCC visibility push(default)
JAX_Q4K_HANDLER(codebook_search).Attr<std::string_view>("format").Attr<float>("unit"));
#pragma GCC visibility pop
