// Handler that draws tokens from logits.

#include <cmath>

#include "order.h"

namespace jax_q4k {
namespace {

constexpr int64_t kCandidates = 1024;  // most likely tokens that often decide which tokens top-p keeps
constexpr int64_t kSome = 64;          // tokens that are handled together, as vectors
constexpr float kMostNoise = 16.7f;    // above any noise: the largest is -log(-log(1 - 2^-24)) = 16.64

struct Parameters {
  float temperature, top_p, min_p;
  int32_t top_k;
  uint32_t key[2];
};

// Threefry-2x32 with 20 rounds (https://doi.org/10.1145/2063384.2063405) of the words 0 and x[i].
template <int64_t N>
void threefry(const uint32_t (&key)[2], const uint32_t (&x)[N], uint32_t (&first)[N], uint32_t (&second)[N]) {
  constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA};
  for (int64_t i = 0; i < N; ++i) first[i] = keys[0], second[i] = x[i] + keys[1];
  for (uint32_t group = 0; group < 5; ++group) {
    for (int rotation : kRotations[group % 2])
      for (int64_t i = 0; i < N; ++i) {
        first[i] += second[i];
        second[i] = first[i] ^ (second[i] << rotation | second[i] >> (32 - rotation));
      }
    for (int64_t i = 0; i < N; ++i) first[i] += keys[(group + 1) % 3], second[i] += keys[(group + 2) % 3] + group + 1;
  }
}

// The 23 bits of each token's noise, for tokens from `token` on.
void noise_bits(const Parameters& p, int64_t token, uint32_t (&bits)[kSome]) {
  uint32_t tokens[kSome], second[kSome];
  for (int64_t i = 0; i < kSome; ++i) tokens[i] = static_cast<uint32_t>(token + i);
  threefry(p.key, tokens, bits, second);
  for (int64_t i = 0; i < kSome; ++i) bits[i] >>= 9;
}

// Gumbel noise (https://arxiv.org/abs/1411.0030).
float noise_of(uint32_t bits) { return -std::log(-std::log((static_cast<float>(bits) + 0.5f) * 0x1p-23f)); }

// Bits below which noise is less than `noise`.
uint32_t least_bits(float noise) {
  return static_cast<uint32_t>(std::max(std::exp(-std::exp(-static_cast<double>(noise) + 1e-5)) * 0x1p23 - 2, 0.0));
}

// The sum of exp(x - best).
double total_of(const float* x, int64_t n, float best) {
  double total = 0;
  for (int64_t start = 0; start < n; start += kSome) {
    float powers[kSome], sum = 0;
    const int64_t count = std::min(kSome, n - start);
    for (int64_t i = 0; i < count; ++i) {  // Cody and Waite's reduction, and a polynomial
      const float y = std::max(x[start + i] - best, -87.0f), rounded = (y * 1.44269504f + 12582912.0f) - 12582912.0f;
      const float r = y - rounded * 0.693359375f - rounded * -2.12194440e-4f;
      const float power = 1 + r * (1 + r * (0.5f + r * (1.66666667e-1f + r * (4.16666667e-2f + r * (8.33333333e-3f + r * 1.38888889e-3f)))));
      const int32_t bits = (static_cast<int32_t>(rounded) + 127) << 23;
      float scale;
      std::memcpy(&scale, &bits, sizeof scale);
      powers[i] = y > -87.0f ? power * scale : 0;
    }
    for (int64_t i = 0; i < count; ++i) sum += powers[i];
    total += sum;
  }
  return total;
}

double weight_of(uint64_t key, float best) { return std::exp(static_cast<double>(value_of(key) - best)); }

// The key of the last of the fewest keys, largest first, whose weights sum to `goal`; the smallest key if all sum to less.
uint64_t last_within(uint64_t* keys, int64_t count, float best, double goal) {
  double before = 0;
  int64_t first = 0, last = count;  // the key is among these; those before sum to `before`
  while (last - first > 1) {
    const int64_t middle = (first + last) / 2;
    std::nth_element(keys + first, keys + middle, keys + last, std::greater<uint64_t>());
    double sum = before;
    for (int64_t i = first; i < middle; ++i) sum += weight_of(keys[i], best);
    if (sum >= goal)
      last = middle;
    else
      first = middle, before = sum;
  }
  return keys[first];
}

// The least key of the tokens that top-k and top-p keep.
uint64_t least_key(const float* x, int64_t n, const Parameters& p, float best) {
  const bool filters_k = p.top_k > 0 && p.top_k < n, filters_p = p.top_p < 1;
  if (!filters_k && !filters_p) return 0;
  const int64_t most = filters_k ? p.top_k : n;
  int64_t count = std::min<int64_t>(most, kCandidates);
  uint64_t* keys = largest(x, n, count);
  if (!filters_p && count == most) return keys[count - 1];
  double total = 0;
  if (count == most)
    for (int64_t i = 0; i < count; ++i) total += weight_of(keys[i], best);
  else if (!filters_k)
    total = total_of(x, n, best);
  if (count == most || !filters_k) {
    const double goal = p.top_p * static_cast<float>(total);
    double sum = 0;
    for (int64_t i = 0; i < count; ++i)
      if ((sum += weight_of(keys[i], best)) >= goal || i + 1 == most) return keys[i];
  }
  keys = scratch<uint64_t>(kBlocks, n);  // the candidates do not decide
  for (int64_t i = 0; i < n; ++i) keys[i] = key_of(x[i], i);
  if (filters_k) {
    std::nth_element(keys, keys + most - 1, keys + n, std::greater<uint64_t>());
    if (!filters_p) return keys[most - 1];
    total = 0;
    for (int64_t i = 0; i < most; ++i) total += weight_of(keys[i], best);
  }
  return last_within(keys, most, best, p.top_p * static_cast<float>(total));
}

// Draws a token of a row: the largest sum of a logit, divided by the temperature, and noise.
int32_t drawn(const float* x, int64_t n, const Parameters& p, float least_temperature) {
  const int64_t likeliest = argmax(x, n);
  const float best = x[likeliest];
  if (!(p.temperature >= least_temperature) || !std::isfinite(best)) return static_cast<int32_t>(likeliest);
  const uint64_t least = least_key(x, n, p, best);
  const float least_logit = best + std::log(p.min_p);
  uint32_t bits[kSome];
  noise_bits(p, likeliest, bits);
  int64_t token = likeliest;
  float score = noise_of(bits[0]), least_value;  // no token with a logit below can win
  uint32_t enough;                               // nor one with fewer bits
  auto won = [&] {
    least_value = std::max(best + 1.0001f * (score - kMostNoise) * p.temperature, least_logit);
    enough = least_bits(score);
  };
  won();
  for (int64_t start = 0; start < n; start += kSome) {
    const int64_t count = std::min(kSome, n - start);
    int possible = 0;
    for (int64_t i = 0; i < count; ++i) possible += x[start + i] >= least_value;
    if (!possible) continue;
    noise_bits(p, start, bits);
    for (int64_t i = 0; i < count; ++i) {
      const float value = x[start + i];
      if (bits[i] < enough || value < least_value || (least && key_of(value, start + i) < least)) continue;
      const float other = (value - best) / p.temperature + noise_of(bits[i]);
      if (other > score) score = other, token = start + i, won();
    }
  }
  return static_cast<int32_t>(token);
}

// logits (m, n) and parameters (m) -> tokens (m).
void draw(Call& call, float least_temperature) {
  auto& [threads, operands, results] = call;
  int64_t m, n;
  const float* logits = operands.floats("logits", {&m, &n});
  const float* temperature = operands.floats("temperature", {m});
  const int32_t* top_k = operands.ints("top_k", {m});
  const float *top_p = operands.floats("top_p", {m}), *min_p = operands.floats("min_p", {m});
  const int32_t *seed = operands.ints("seed", {m}), *step = operands.ints("step", {m});
  auto* tokens = static_cast<int32_t*>(results.next("tokens", {ffi::S32}, {m}).untyped_data());
  call.finish();
  if (n < 1) fail("logits must have at least one column");
  threads.run(m, 4 * kEasy * n, [&](int64_t row) {
    Parameters p{temperature[row], top_p[row], min_p[row], top_k[row], {}};
    uint32_t steps[1] = {static_cast<uint32_t>(step[row])}, first[1], second[1];
    threefry({0, static_cast<uint32_t>(seed[row])}, steps, first, second);
    p.key[0] = first[0], p.key[1] = second[0];
    tokens[row] = drawn(logits + row * n, n, p, least_temperature);
  });
}

}  // namespace
}  // namespace jax_q4k

#pragma GCC visibility push(default)
JAX_Q4K_HANDLER(draw).Attr<float>("least_temperature"));
#pragma GCC visibility pop
