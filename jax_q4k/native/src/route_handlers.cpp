// Handler of the router of a mixture of experts.

#include <cmath>

#include "order.h"

namespace jax_q4k {
namespace {

constexpr int64_t kScoring = 64;  // cost of a score and of its comparisons, in multiply-adds

// Scores of a token's logits: their softmax, or each one's sigmoid. Rounding depends on nothing but the token, while XLA
// rounds exponentials and sums by the shape that they are in.
void score(const float* logits, int64_t experts, bool softmax, float* scores) {
  if (!softmax) {
    for (int64_t e = 0; e < experts; ++e) scores[e] = 1 / (1 + std::exp(-logits[e]));
    return;
  }
  const float most = *std::max_element(logits, logits + experts);
  float sum = 0;
  for (int64_t e = 0; e < experts; ++e) sum += scores[e] = std::exp(logits[e] - most);
  for (int64_t e = 0; e < experts; ++e) scores[e] /= sum;
}

// logits [+ bias for the choice] -> ids and weights (m, top) of the best experts, chosen among the `groups_used` best
// groups, and the weights, divided by their sum if `normalize`, times `scale`.
void route(Call& call, bool softmax, bool has_bias, int64_t groups, int64_t groups_used, bool normalize, float least_sum, float scale) {
  auto& [threads, operands, results] = call;
  int64_t m, experts, top;
  const float* logits = operands.floats("logits", {&m, &experts});
  const float* bias = has_bias ? operands.floats("bias", {experts}) : nullptr;
  auto* ids = static_cast<int32_t*>(results.next("ids", {ffi::S32}, {m, &top}).untyped_data());
  float* weights = results.floats("weights", {m, top});
  call.finish();
  if (groups < 1 || experts % groups || groups_used < 1 || groups_used > groups) fail("the groups do not fit the experts");
  const int64_t members = experts / groups;
  if (top < 1 || top > members * groups_used) fail("ids must have 1 to " + std::to_string(members * groups_used) + " columns");

  threads.run(m, kScoring * experts, [&](int64_t row) {
    float* scores = scratch<float>(kRows, 2 * experts + groups);
    float *ranks = scores + experts, *of_groups = ranks + experts;
    score(logits + row * experts, experts, softmax, scores);
    for (int64_t e = 0; e < experts; ++e) {
      const float rank = bias ? scores[e] + bias[e] : scores[e];
      ranks[e] = std::isnan(rank) ? std::numeric_limits<float>::infinity() : rank;
    }
    if (groups_used < groups) {
      for (int64_t g = 0; g < groups; ++g) {  // the sum of a group's two best
        const uint64_t* two = largest(ranks + g * members, members, std::min<int64_t>(2, members));
        of_groups[g] = value_of(two[0]) + (members > 1 ? value_of(two[1]) : 0);
      }
      const uint64_t* in_order = largest(of_groups, groups, groups);
      for (int64_t i = groups_used; i < groups; ++i)
        std::fill_n(ranks + index_of(in_order[i]) * members, members, -std::numeric_limits<float>::infinity());
    }
    const uint64_t* found = largest(ranks, experts, top);
    float *to = weights + row * top, sum = 0;
    for (int64_t i = 0; i < top; ++i) {
      ids[row * top + i] = index_of(found[i]);
      sum += to[i] = scores[index_of(found[i])];
    }
    const float by = normalize && !(sum < least_sum) ? sum : normalize ? least_sum : 1;
    for (int64_t i = 0; i < top; ++i) to[i] = to[i] / by * scale;
  });
}

}  // namespace
}  // namespace jax_q4k

#pragma GCC visibility push(default)
JAX_Q4K_HANDLER(route)
    .Attr<bool>("softmax").Attr<bool>("bias").Attr<int64_t>("groups").Attr<int64_t>("groups_used").Attr<bool>("normalize")
    .Attr<float>("least_sum").Attr<float>("scale"));
#pragma GCC visibility pop
