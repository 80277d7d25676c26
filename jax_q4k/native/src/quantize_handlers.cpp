// Handler of the quantizers whose values are codebook entries.

#include "ffi.h"

namespace jax_q4k {
namespace {

struct BookLayout {
  std::string_view name;
  int64_t entry, scaled;  // values of an entry, and of a scale
};
#define JAX_Q4K_BOOK_LAYOUT(name, entry, scaled, ...) {#name, entry, scaled},
constexpr BookLayout kBooks[] = {JAX_Q4K_BOOKS(JAX_Q4K_BOOK_LAYOUT)};
#undef JAX_Q4K_BOOK_LAYOUT
constexpr int64_t kBlock = 256, kMostEntries = 2048;

// x, w (blocks, 256), digits (entries, 4 or 8), levels (3 or 8), pairs (any, 2) -> d (blocks), scales (blocks, 8 or 16), entries (blocks,
// 32 or 64), signs (blocks, 32): see `CodebookSearch`. Callers have a thread for each call.
void codebook_search(Call& call, std::string_view format, float unit) {
  auto& [threads, operands, results] = call;
  const auto* book = std::find_if(std::begin(kBooks), std::end(kBooks), [&](const BookLayout& b) { return b.name == format; });
  if (book == std::end(kBooks)) fail("format " + std::string(format) + " has no codebook");
  CodebookSearch s;
  s.x = operands.floats("x", {&s.blocks, kBlock});
  s.w = operands.floats("w", {s.blocks, kBlock});
  s.digits = static_cast<const uint8_t*>(operands.next("digits", {ffi::U8}, {&s.num_entries, book->entry}).untyped_data());
  s.levels = operands.floats("levels", {book->entry == 4 ? 8 : 3});
  s.pairs = static_cast<const uint8_t*>(operands.next("pairs", {ffi::U8}, {&s.num_pairs, 2}).untyped_data());
  s.unit = unit;
  s.d = results.floats("d", {s.blocks});
  s.scales = static_cast<uint8_t*>(results.next("scales", {ffi::U8}, {s.blocks, kBlock / book->scaled}).untyped_data());
  s.entries = static_cast<uint16_t*>(results.next("entries", {ffi::U16}, {s.blocks, kBlock / book->entry}).untyped_data());
  s.signs = static_cast<uint8_t*>(results.next("signs", {ffi::U8}, {s.blocks, 32}).untyped_data());
  call.finish();
  if (s.num_entries < 1 || s.num_entries > kMostEntries) fail("digits must have 1 to " + std::to_string(kMostEntries) + " rows");
  if (s.num_pairs > kMostPairs) fail("pairs must have at most " + std::to_string(kMostPairs) + " rows");
  const int64_t halves = book->entry == 4 ? 64 : 81;
  for (int64_t p = 0; p < s.num_pairs; ++p)
    if (std::max(s.pairs[2 * p], s.pairs[2 * p + 1]) >= halves + p) fail("row " + std::to_string(p) + " of pairs is out of range");
  kernels->search_codebook[book - std::begin(kBooks)](s);
}

}  // namespace
}  // namespace jax_q4k

#pragma GCC visibility push(default)
JAX_Q4K_HANDLER(codebook_search).Attr<std::string_view>("format").Attr<float>("unit"));
#pragma GCC visibility pop
