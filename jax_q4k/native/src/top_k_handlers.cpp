// Handlers of argmax and top-k.

#include "order.h"

namespace jax_q4k {
namespace {

constexpr int64_t kSorting = 256;  // cost of gathering and sorting a value, in multiply-adds

// x (m, n) -> the largest value (m) of each row, and its index.
void argmax(Call& call) {
  auto& [threads, operands, results] = call;
  int64_t m, n;
  const float* x = operands.floats("x", {&m, &n});
  float* values = results.floats("values", {m});
  auto* indices = static_cast<int32_t*>(results.next("indices", {ffi::S32}, {m}).untyped_data());
  call.finish();
  if (n < 1) fail("x must have at least one column");
  threads.run(m, kEasy * n, [&](int64_t row) {
    const int64_t index = argmax(x + row * n, n);
    values[row] = x[row * n + index], indices[row] = static_cast<int32_t>(index);
  });
}

// x (m, n) -> the largest values (m, count) of each row, descending, and their indices.
void top_k(Call& call) {
  auto& [threads, operands, results] = call;
  int64_t m, n, count;
  const float* x = operands.floats("x", {&m, &n});
  float* values = results.floats("values", {m, &count});
  auto* indices = static_cast<int32_t*>(results.next("indices", {ffi::S32}, {m, count}).untyped_data());
  call.finish();
  if (count < 1 || count > n) fail("values must have 1 to " + std::to_string(n) + " columns");
  threads.run(m, kEasy * n + kSorting * count, [&](int64_t row) {
    const uint64_t* keys = largest(x + row * n, n, count);
    for (int64_t i = row * count; i < (row + 1) * count; ++i, ++keys) values[i] = value_of(*keys), indices[i] = index_of(*keys);
  });
}

}  // namespace
}  // namespace jax_q4k

#pragma GCC visibility push(default)
JAX_Q4K_HANDLER(argmax));
JAX_Q4K_HANDLER(top_k));
#pragma GCC visibility pop
