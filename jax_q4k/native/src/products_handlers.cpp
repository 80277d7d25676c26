// Handlers of matrix products and of embeddings.

#include "multiply.h"

namespace jax_q4k {
namespace {

// `names`: formats, separated by commas.
std::vector<Matrix> take_matrices(Operands& operands, std::string_view names, int64_t k) {
  std::vector<Matrix> matrices;
  while (!names.empty()) {
    const size_t end = std::min(names.find(','), names.size());
    matrices.push_back(take_matrix(operands, names.substr(0, end)));
    if (matrices.back().k != k) fail("weights have k=" + std::to_string(matrices.back().k) + "; x has " + std::to_string(k));
    names.remove_prefix(std::min(end + 1, names.size()));
  }
  return matrices;
}

constexpr int64_t kManyRows = 512;  // rows of activations that are prepared together and share each unpacked tile

// [residual +] [rms_norm](x) @ w.T [+ bias] for several matrices; or activation(x @ gate.T, x @ up.T) for two.
struct Product {
  std::vector<Matrix> matrices;
  bool quantized;
  std::string_view activation = {};
  const float* norm = nullptr;
  float eps = 0;
  std::vector<const float*> bias = {};  // one per matrix, or empty

  bool gated() const { return !activation.empty(); }
};

void check(const Product& p) {
  if (p.gated()) activation_of(p.activation);
  if (p.gated() && (p.matrices.size() != 2 || p.matrices[0].n != p.matrices[1].n)) fail("gate and up must have as many rows");
  for (const Matrix& w : p.matrices)
    if (p.quantized && w.type >= kBlockFormats) fail("floats are multiplied as floats");
}

void apply(const Product& p, const Threads& threads, const float* x, int64_t m, const float* residual, const std::vector<float*>& y) {
  const std::vector<Matrix>& matrices = p.matrices;
  const int64_t k = matrices[0].k;
  const Prepared prepared = prepare(threads, x, m, k, p.norm, p.eps, p.quantized);
  const Activation activation = p.gated() ? activation_of(p.activation) : kSilu;
  // A task is some rows of a matrix.
  int64_t all_rows = 0;
  for (const Matrix& w : matrices) all_rows += w.n;
  const int64_t share = std::clamp<int64_t>(all_rows / (threads.count() * 8) / 16 * 16, 16, 256);
  const bool tiles = prepared.in_tiles();
  const int64_t rows = tiles ? kTile : share;
  struct Task {
    size_t matrix;
    int64_t first, count;
  };
  std::vector<Task> tasks;
  for (size_t i = 0; i < y.size(); ++i)
    for (int64_t first = 0; first < matrices[i].n; first += rows)
      tasks.push_back({i, first, std::min(rows, matrices[i].n - first)});

  const int64_t work = all_rows * k * m / static_cast<int64_t>(std::max<size_t>(tasks.size(), 1));
  threads.run(static_cast<int64_t>(tasks.size()), work, [&](int64_t t) {
    const Task& task = tasks[t];
    const Matrix& w = matrices[task.matrix];
    float* to = y[task.matrix] + task.first;
    multiply(w, task.first, task.count, prepared, to, w.n);
    if (p.gated()) {
      float* up = scratch<float>(kUp, m * task.count);
      multiply(matrices[1], task.first, task.count, prepared, up, task.count);
      for (int64_t j = 0; j < m; ++j)
        kernels->gate(to + j * w.n, up + j * task.count, task.count, activation, to + j * w.n);
    }
    const float* bias = p.bias.empty() ? nullptr : p.bias[task.matrix];
    for (int64_t j = 0; j < m; ++j) {
      float* row = to + j * w.n;
      if (bias)
        for (int64_t r = 0; r < task.count; ++r) row[r] += bias[task.first + r];
      if (residual)
        for (int64_t r = 0; r < task.count; ++r) row[r] += residual[j * w.n + task.first + r];
    }
  });
}

void linear(Call& call, std::string_view formats, std::string_view biases, std::string_view activation, bool quantized,
              bool norm, float eps, bool residual) {
  auto& [threads, operands, results] = call;
  int64_t m, k;
  const float* x = operands.floats("x", {&m, &k});
  const float* norm_weight = norm ? operands.floats("norm_weight", {k}) : nullptr;
  Product p{take_matrices(operands, formats, k), quantized, activation, norm_weight, eps};
  if (p.gated() && biases.find('1') != biases.npos) fail("gate and up take no bias");
  if (p.matrices.empty() || biases.size() != p.matrices.size() || (residual && p.matrices.size() != 1))
    fail("biases or residual without a matrix");
  for (size_t i = 0; i < biases.size(); ++i)
    p.bias.push_back(biases[i] == '1' ? operands.floats("bias", {p.matrices[i].n}) : nullptr);
  const float* addend = residual ? operands.floats("residual", {m, p.matrices[0].n}) : nullptr;
  check(p);
  std::vector<float*> y;
  for (size_t i = 0; i < (p.gated() ? 1 : p.matrices.size()); ++i) y.push_back(results.floats("y", {m, p.matrices[i].n}));
  call.finish();
  for (int64_t start = 0; start < m; start += kManyRows) {
    apply(p, threads, x + start * k, std::min(kManyRows, m - start), addend, y);
    for (size_t i = 0; i < y.size(); ++i) y[i] += kManyRows * p.matrices[i].n;
    if (addend) addend += kManyRows * p.matrices[0].n;
  }
}

constexpr int64_t kNetworkRows = 256;  // rows of a long prompt per pass through the network, as gate's result is large

// [residual +] activation(h @ gate.T, h @ up.T) @ down.T for h = [rms_norm](x).
void mlp(Call& call, std::string_view formats, std::string_view down, std::string_view activation, bool quantized,
         bool quantized_down, bool norm, float eps, bool residual) {
  auto& [threads, operands, results] = call;
  int64_t m, k;
  const float* x = operands.floats("x", {&m, &k});
  const float* norm_weight = norm ? operands.floats("norm_weight", {k}) : nullptr;
  const Product in{take_matrices(operands, formats, k), quantized, activation, norm_weight, eps};
  if (!in.gated()) fail("activation is missing");
  check(in);
  const int64_t inner = in.matrices[0].n;
  const Product out{take_matrices(operands, down, inner), quantized_down};
  if (out.matrices.size() != 1) fail("down must be one matrix");
  check(out);
  const int64_t n = out.matrices[0].n;
  const float* addend = residual ? operands.floats("residual", {m, n}) : nullptr;
  float* y = results.floats("y", {m, n});
  call.finish();
  for (int64_t start = 0; start < m; start += kNetworkRows) {
    const int64_t rows = std::min(kNetworkRows, m - start);
    float* h = scratch<float>(kHidden, rows * inner);
    apply(in, threads, x + start * k, rows, nullptr, {h});
    apply(out, threads, h, rows, addend ? addend + start * n : nullptr, {y + start * n});
  }
}

// Looks up rows `ids` of a matrix as floats; an id out of range gives a row of NaN.
void embedding(Call& call, std::string_view format) {
  auto& [threads, operands, results] = call;
  int64_t count;
  const int32_t* ids = operands.ints("ids", {&count});
  const Matrix w = take_matrix(operands, format);
  float* y = results.floats("y", {count, w.k});
  call.finish();
  threads.run(count, kEasy * w.k, [&](int64_t i) {
    const Subnormals kept(JAX_Q4K_HAS_SUBNORMALS(w.type));
    if (ids[i] >= 0 && ids[i] < w.n)
      kernels->decode[w.type](w, ids[i], y + i * w.k);
    else
      std::fill_n(y + i * w.k, w.k, std::numeric_limits<float>::quiet_NaN());
  });
}

}  // namespace
}  // namespace jax_q4k

#pragma GCC visibility push(default)
JAX_Q4K_HANDLER(linear)
    .Attr<std::string_view>("formats").Attr<std::string_view>("biases").Attr<std::string_view>("activation")
    .Attr<bool>("quantized").Attr<bool>("norm").Attr<float>("eps").Attr<bool>("residual"));
JAX_Q4K_HANDLER(mlp)
    .Attr<std::string_view>("formats").Attr<std::string_view>("down").Attr<std::string_view>("activation")
    .Attr<bool>("quantized").Attr<bool>("quantized_down").Attr<bool>("norm").Attr<float>("eps").Attr<bool>("residual"));
JAX_Q4K_HANDLER(embedding).Attr<std::string_view>("format"));
#pragma GCC visibility pop
