// The largest values of a row, in order.

#pragma once

#include <functional>

#include "ffi.h"

namespace jax_q4k {
namespace {

constexpr int64_t kGroups = 2;    // groups per value wanted, whose maxima give a limit
constexpr int64_t kScan = 64;     // values that are compared with the limit at a time, as vectors
constexpr int64_t kSpare = 1024;  // more values than twice those wanted that are gathered before the smallest go

// Index of the first NaN, or else of the first of the largest values.
inline int64_t argmax(const float* x, int64_t n) {
  int64_t best = 0;
  for (int64_t start = 0; start < n; start += kScan) {
    const int64_t end = std::min(start + kScan, n);
    int better = 0;
    for (int64_t i = start; i < end; ++i) better += !(x[i] <= x[best]);
    for (int64_t i = start; better && i < end; ++i) {
      if (std::isnan(x[i])) return i;
      if (x[i] > x[best]) best = i;
    }
  }
  return best;
}

// A number that is larger for larger values, and among equal ones for lower indices. NaN is the largest value;
// subnormals are zeros.
inline uint64_t key_of(float value, int64_t index) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t order = bits >> 31 ? ~bits : bits | 0x80000000;
  if (magnitude > 0x7f800000) order = 0xffffffff;
  if (magnitude < 0x00800000) order = 0x80000000;
  return uint64_t{order} << 32 | static_cast<uint32_t>(~index);
}

inline float value_of(uint64_t key) {
  const uint32_t order = key >> 32, bits = order >> 31 ? order & 0x7fffffff : ~order;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline int32_t index_of(uint64_t key) { return ~static_cast<uint32_t>(key); }

// Returns the keys of the `count` largest of n values, in descending order. A first pass finds a limit: the count-th
// largest of the maxima of several groups, which at least `count` values reach, and few more. A second pass gathers these.
inline uint64_t* largest(const float* x, int64_t n, int64_t count) {
  const int64_t groups = kGroups * count, room = 2 * count + kSpare;
  uint64_t* keys = scratch<uint64_t>(kBlocks, room);
  float limit = std::numeric_limits<float>::quiet_NaN();  // no value is less
  if (n >= 2 * groups) {
    float* maxima = scratch<float>(kTotals, groups);
    std::fill_n(maxima, groups, -std::numeric_limits<float>::infinity());
    for (int64_t start = 0; start + groups <= n; start += groups)  // group i has every value i + start
      for (int64_t i = 0; i < groups; ++i) maxima[i] = x[start + i] > maxima[i] ? x[start + i] : maxima[i];
    std::nth_element(maxima, maxima + count - 1, maxima + groups, std::greater<float>());
    limit = maxima[count - 1];
  }
  int64_t size = 0;
  bool full = false;  // whether `count` values reach the limit before the next one
  auto wanted = [&](float value) { return !(value < limit) & !(full & (value == limit)); };
  auto shrink = [&] {
    std::nth_element(keys, keys + count - 1, keys + size, std::greater<uint64_t>());
    size = count, limit = value_of(keys[count - 1]), full = true;
  };
  for (int64_t start = 0; start < n; start += kScan) {
    int found = 0;
    if (start + kScan <= n) {
      for (int64_t i = 0; i < kScan; ++i) found += wanted(x[start + i]);
      if (!found) continue;
    }
    if (size + kScan > room) shrink();
    for (int64_t i = start; i < std::min(start + kScan, n); ++i)
      if (wanted(x[i])) keys[size++] = key_of(x[i], i);
  }
  shrink();
  std::sort(keys, keys + count, std::greater<uint64_t>());
  return keys;
}

}  // namespace
}  // namespace jax_q4k
