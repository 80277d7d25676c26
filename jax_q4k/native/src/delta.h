// The gated delta rule (`jax_q4k.gated_delta_rule`), token by token on some columns of a head's state, and the
// operations before it in a decode step.

#pragma once

#include "activations.h"
#include "kernels.h"

namespace jax_q4k {

namespace {

// Processes V adjacent vectors of columns. They are copied to `block` (key_dim, V) and stay in L1 there: rows of the
// state itself, a power of two apart, would map to few of its sets. Each token is one pass: S = decay * S + k d^T, read
// with q and with the next token's key, which gives that token's correction d up to its decay.
template <int V>
void delta_columns(const DeltaTokens& x, float* state, int64_t stride, float* block) {
  alignas(64) static constexpr float kZeros[kMaxHeadDim] = {};
  constexpr int64_t kRow = V * kLanes;
  auto is_padding = [&](int64_t t) { return x.beta[t * x.gate_step] == 0 && x.g[t * x.gate_step] == 0; };
  auto key = [&](int64_t t) { return is_padding(t) ? kZeros : x.k + t * x.key_step; };
  Floats dots[V];  // S^T k of the next token
  for (auto& dot : dots) dot = Floats::all(0);
  const float* k = key(0);
  for (int64_t i = 0; i < x.key_dim; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const Floats s = Floats::load(state + i * stride + v * kLanes);
      s.store(block + i * kRow + v * kLanes);
      dots[v] = fma(Floats::all(k[i]), s, dots[v]);
    }
  for (int64_t t = 0; t < x.count; ++t) {
    const bool padding = is_padding(t);
    const float decay = __builtin_expf(x.g[t * x.gate_step]), beta = x.beta[t * x.gate_step];
    const float* q = x.q + t * x.key_step;
    Floats d[V], out[V];
    for (int v = 0; v < V; ++v) {
      d[v] = Floats::all(beta) * (Floats::load(x.v + t * x.value_step + v * kLanes) - Floats::all(decay) * dots[v]);
      out[v] = dots[v] = Floats::all(0);
    }
    auto pass = [&](auto changed, auto more, const float* next, float* to, int64_t to_stride) __attribute__((always_inline)) {
      for (int64_t i = 0; i < x.key_dim; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          Floats s = Floats::load(block + i * kRow + v * kLanes);
          if (changed) s = fma(Floats::all(k[i]), d[v], Floats::all(decay) * s);
          s.store(to + i * to_stride + v * kLanes);
          out[v] = fma(Floats::all(q[i]), s, out[v]);
          if (more) dots[v] = fma(Floats::all(next[i]), s, dots[v]);
        }
    };
    auto run = [&](auto changed) __attribute__((always_inline)) {
      if (t + 1 == x.count) return pass(changed, std::false_type(), nullptr, state, stride);
      const float* next = key(t + 1);
      pass(changed, std::true_type(), next, block, kRow);
      k = next;
    };
    padding ? run(std::false_type()) : run(std::true_type());
    for (int v = 0; v < V; ++v) (Floats::all(x.scale) * out[v]).store(x.o + t * x.value_step + v * kLanes);
  }
}

inline void delta(const DeltaTokens& x, int64_t columns, float* state, int64_t stride, float* block) {
  if (columns == kDeltaColumns)
    delta_columns<kDeltaColumns / kLanes>(x, state, stride, block);
  else
    delta_columns<1>(x, state, stride, block);
}

inline void convolve(const float* x, const float* ring, int64_t channels, int64_t width, int64_t position, const float* weight,
                     int64_t count, float* y) {
  std::memset(y, 0, count * sizeof(float));
  for (int64_t ago = position < width ? position : width - 1; ago >= 0; --ago) {
    const float* column = ago ? ring + (position - ago) % width * channels : x;
    const float* tap = weight + width - 1 - ago;
    if (width == 4)  // the width in models, as a stride that the compiler knows
      for (int64_t c = 0; c < count; ++c) y[c] += column[c] * tap[c * 4];
    else
      for (int64_t c = 0; c < count; ++c) y[c] += column[c] * tap[c * width];
  }
  for (int64_t c = 0; c < count; c += kLanes) {
    const Floats sums = Floats::load(y + c);
    (sums * sigmoid(sums)).store(y + c);
  }
}

inline void make_unit(float* x, int64_t count, float eps) {
  Floats squares = Floats::all(0);
  for (int64_t i = 0; i < count; i += kLanes) squares = fma(Floats::load(x + i), Floats::load(x + i), squares);
  const Floats factor = Floats::all(1.0f / __builtin_sqrtf(sum(squares) + eps));
  for (int64_t i = 0; i < count; i += kLanes) (Floats::load(x + i) * factor).store(x + i);
}

}  // namespace
}  // namespace jax_q4k
