// Handlers of the gated delta rule: for sequences, and for a complete decode step between its projections.

#include <cmath>

#include "ffi.h"

namespace jax_q4k {
namespace {

// Heads of a gated delta net, and the k head that each v head uses.
struct Heads {
  int64_t keys, values, key_dim, value_dim;
  bool tiled;

  int64_t group() const { return values / keys; }
  int64_t key_of(int64_t value) const { return tiled ? value % keys : value / group(); }
  int64_t value_of(int64_t key, int64_t i) const { return tiled ? i * keys + key : key * group() + i; }
  int64_t size() const { return key_dim * value_dim; }  // elements of a head's state
};

void check(const Heads& heads) {
  if (heads.keys < 1 || heads.values < 1 || heads.values % heads.keys) fail("num_v_heads must be a multiple of num_k_heads");
  for (int64_t dim : {heads.key_dim, heads.value_dim})
    if (dim < kLanes || dim > kMaxHeadDim || dim % kLanes) fail("key_dim and value_dim must be multiples of 16 up to 576");
}

// Takes the operand and the result of that name, which must be the same array.
float* take_in_place(Call& call, const char* name, std::initializer_list<Axis> axes) {
  auto buffer = call.operands.next(name, {ffi::F32}, axes);
  if (call.results.next(name, {ffi::F32}, buffer.dimensions()).untyped_data() != buffer.untyped_data())
    fail(std::string(name) + " must be updated in place");
  return static_cast<float*>(buffer.untyped_data());
}

// Runs a head's tokens over columns [0, columns) of its state, whose rows are `stride` apart.
void run_columns(DeltaTokens tokens, int64_t columns, float* state, int64_t stride) {
  float* block = scratch<float>(kBlocks, tokens.key_dim * kDeltaColumns);
  for (int64_t at = 0; at < columns; at += kDeltaColumns) {
    kernels->delta(tokens, std::min<int64_t>(kDeltaColumns, columns - at), state + at, stride, block);
    tokens.v += kDeltaColumns, tokens.o += kDeltaColumns;
  }
}

// Multiply-adds per token and element of the state: it is read twice, and updated.
constexpr int64_t kPasses = 3;

// q, k (batch, time, keys, key_dim), v (batch, time, values, value_dim), g and beta (batch, time, values) -> o and the
// updated state.
void gated_delta_rule(Call& call, float scale, bool tiled) {
  auto& [threads, operands, results] = call;
  int64_t batch, time;
  Heads heads{0, 0, 0, 0, tiled};
  const float* q = operands.floats("q", {&batch, &time, &heads.keys, &heads.key_dim});
  const float* k = operands.floats("k", {batch, time, heads.keys, heads.key_dim});
  const float* v = operands.floats("v", {batch, time, &heads.values, &heads.value_dim});
  check(heads);
  const float* g = operands.floats("g", {batch, time, heads.values});
  const float* beta = operands.floats("beta", {batch, time, heads.values});
  float* o = results.floats("o", {batch, time, heads.values, heads.value_dim});
  float* state = take_in_place(call, "state", {batch, heads.values, heads.key_dim, heads.value_dim});
  call.finish();
  if (time == 0) return;
  // With one token, a head's columns stay together, as they come from memory.
  const int64_t columns = time > 1 ? kDeltaColumns : heads.value_dim, blocks = (heads.value_dim + columns - 1) / columns;
  threads.run(batch * heads.values * blocks, (kPasses * time + kEasy) * heads.key_dim * columns, [&](int64_t task) {
    const int64_t column = task % blocks * columns, head = task / blocks % heads.values, b = task / blocks / heads.values;
    const int64_t key = (b * time * heads.keys + heads.key_of(head)) * heads.key_dim;
    const int64_t gate = b * time * heads.values + head, value = gate * heads.value_dim + column;
    const DeltaTokens tokens{q + key, k + key, v + value, g + gate, beta + gate, o + value, time,
                             heads.keys * heads.key_dim, heads.values * heads.value_dim, heads.values, heads.key_dim, scale};
    run_columns(tokens, std::min(columns, heads.value_dim - column),
                state + (b * heads.values + head) * heads.size() + column, heads.value_dim);
  });
}

float softplus(float x) { return (x > 0 ? x : 0) + std::log1p(std::exp(-std::abs(x))); }

// One token per sequence: x (batch, channels) is q | k | v; the token's slot of the ring (batch, width, channels) is
// written.
void gated_delta_step(Call& call, float eps, bool tiled) {
  auto& [threads, operands, results] = call;
  int64_t batch, channels, out_dim, num_values, width, key_dim, value_dim;
  const float* x = operands.floats("qkv", {&batch, &channels});
  const float* z = operands.floats("z", {batch, &out_dim});
  const float* alpha = operands.floats("alpha", {batch, &num_values});
  const float* beta = operands.floats("beta", {batch, num_values});
  float* y = results.floats("y", {batch, out_dim});
  float* ring = take_in_place(call, "columns", {batch, &width, channels});
  float* state = take_in_place(call, "state", {batch, num_values, &key_dim, &value_dim});
  const Heads heads{(channels - out_dim) / 2 / std::max<int64_t>(key_dim, 1), num_values, key_dim, value_dim, tiled};
  check(heads);
  if (width < 1) fail("columns must have a slot");
  if (out_dim != num_values * value_dim || channels - out_dim != 2 * heads.keys * key_dim)
    fail("qkv and z do not fit the state");
  const int32_t* positions = operands.ints("positions", {batch});
  const float* taps = operands.floats("conv_weight", {channels, width});
  const float* bias = operands.floats("dt_bias", {num_values});
  const float* decay = operands.floats("decay", {num_values});
  const float* norm = operands.floats("norm_weight", {value_dim});
  call.finish();
  const float scale = 1 / std::sqrt(static_cast<float>(key_dim));
  const int64_t keys = heads.keys * key_dim;
  // A task is a k head and the v heads that use it, which share its convolution.
  threads.run(batch * heads.keys, (kPasses + kEasy) * heads.group() * heads.size(), [&](int64_t task) {
    const int64_t key = task % heads.keys, b = task / heads.keys, position = positions[b];
    auto out = [&](int64_t head) { return y + b * out_dim + head * value_dim; };
    if (position < 0) {
      for (int64_t i = 0; i < heads.group(); ++i) std::fill_n(out(heads.value_of(key, i)), value_dim, 0.0f);
      return;
    }
    float* mine = ring + b * width * channels;
    auto convolved = [&](int64_t first, int64_t count, float* u) {
      const float* from = x + b * channels + first;
      kernels->convolve(from, mine + first, channels, width, position, taps + first * width, count, u);
      std::copy_n(from, count, mine + position % width * channels + first);
    };
    float* q = scratch<float>(kRows, 2 * key_dim + 3 * value_dim);
    float *k = q + key_dim, *v = k + key_dim, *o = v + value_dim, *normalized = o + value_dim;
    convolved(key * key_dim, key_dim, q);
    convolved(keys + key * key_dim, key_dim, k);
    for (float* each : {q, k}) kernels->make_unit(each, key_dim, eps);
    for (int64_t i = 0; i < heads.group(); ++i) {
      const int64_t head = heads.value_of(key, i), gate = b * num_values + head;
      convolved(2 * keys + head * value_dim, value_dim, v);
      float* s = state + gate * heads.size();
      if (position == 0) std::fill_n(s, heads.size(), 0.0f);
      const float g = softplus(alpha[gate] + bias[head]) * decay[head], rate = 1 / (1 + std::exp(-beta[gate]));
      run_columns({q, k, v, &g, &rate, o, 1, 0, 0, 0, key_dim, scale}, value_dim, s, value_dim);
      kernels->normalize(o, norm, eps, value_dim, normalized);
      kernels->gate(z + b * out_dim + head * value_dim, normalized, value_dim, kSilu, out(head));
    }
  });
}

}  // namespace
}  // namespace jax_q4k

#pragma GCC visibility push(default)
JAX_Q4K_HANDLER(gated_delta_rule).Attr<float>("scale").Attr<bool>("tiled"));
JAX_Q4K_HANDLER(gated_delta_step).Attr<float>("eps").Attr<bool>("tiled"));
#pragma GCC visibility pop
