// Handlers of products and of embeddings.

#include "ffi.h"

namespace jax_q4k {
namespace {

Type type_of(std::string_view name) {
  for (int i = 0; i < kTypes; ++i)
    if (kLayouts[i].name == name) return static_cast<Type>(i);
  fail("unknown format " + std::string(name));
}

// Packed planes are a matrix's, or with a fourth axis in front a stack's, and an index follows: below 0 it counts from
// the end, beyond either end it is the nearest.
Matrix take_matrix(Operands& operands, std::string_view format) {
  Matrix w{0, 0, type_of(format), {}};
  const Layout& layout = kLayouts[w.type];
  if (w.type >= kBlockFormats) {
    const ffi::DataType element = w.type == kF32 ? ffi::F32 : w.type == kF16 ? ffi::F16 : ffi::BF16;
    auto buffer = operands.next("weights", {element}, {-1, -1});
    w.n = buffer.dimensions()[0], w.k = buffer.dimensions()[1];
    w.planes[0] = static_cast<const uint8_t*>(buffer.untyped_data());
    return w;
  }
  const bool stacked = operands.rank() == 4;
  int64_t dims[] = {-1, -1, -1, 0};  // layers, n, blocks, bytes
  for (int i = 0; i < layout.planes; ++i) {
    dims[3] = layout.bytes[i] * layout.block / kSpan;
    auto buffer = operands.next("a plane of the weights", {ffi::U8}, stacked ? Dims(dims, 4) : Dims(dims + 1, 3));
    std::copy_n(buffer.dimensions().begin(), buffer.dimensions().size(), dims + !stacked);
    w.planes[i] = static_cast<const uint8_t*>(buffer.untyped_data());
  }
  w.n = dims[1], w.k = dims[2] * layout.block;
  if (stacked) {
    const int64_t layers = dims[0], index = *operands.ints("index", {});
    if (!layers) fail("a stack of weights is empty");
    const int64_t layer = std::clamp<int64_t>(index < 0 ? index + layers : index, 0, layers - 1);
    for (int i = 0; i < layout.planes; ++i) w.planes[i] += layer * w.n * dims[2] * (layout.bytes[i] * layout.block / kSpan);
  }
  return w;
}

// `names` are separated by commas.
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

// What products take: rows of activations as they are, as int8 (`rows`), or as int8 in blocks of 16 rows.
struct Prepared {
  int64_t m, k, spans;
  const float* x;
  const RowSpan* rows = nullptr;
  const BlockSpan* blocks = nullptr;
};

Prepared prepare(const Threads& threads, const float* x, int64_t m, int64_t k, const float* norm, float eps, bool quantized) {
  Prepared p{m, k, (k + kSpan - 1) / kSpan, x};
  auto row = [&](int64_t j, float* to) {  // row j, in `to` if it had to be normalized
    if (norm) kernels->normalize(x + j * k, norm, eps, k, to);
    return norm ? to : x + j * k;
  };
  if (quantized && m > kGemvRows) {
    const int64_t count = (m + kLanes - 1) / kLanes;
    BlockSpan* blocks = scratch<BlockSpan>(kBlocks, count * p.spans);
    threads.run(count, kEasy * kLanes * k, [&](int64_t b) {
      const int lanes = static_cast<int>(std::min<int64_t>(kLanes, m - b * kLanes));
      float* normalized = scratch<float>(kNormalized, k);
      RowSpan* rows = scratch<RowSpan>(kSpans, kLanes * p.spans);
      for (int i = 0; i < lanes; ++i) kernels->quantize(row(b * kLanes + i, normalized), k, rows + i * p.spans);
      for (int64_t i = 0; i < p.spans; ++i) kernels->pack(rows, p.spans, lanes, i, blocks + b * p.spans + i);
    });
    p.blocks = blocks;
  } else if (quantized) {
    RowSpan* rows = scratch<RowSpan>(kSpans, m * p.spans);
    threads.run(m, kEasy * k, [&](int64_t j) {
      kernels->quantize(row(j, scratch<float>(kNormalized, k)), k, rows + j * p.spans);
    });
    p.rows = rows;
  } else if (norm) {
    float* normalized = scratch<float>(kNormalized, m * k);
    threads.run(m, kEasy * k, [&](int64_t j) { row(j, normalized + j * k); });
    p.x = normalized;
  }
  return p;
}

constexpr int64_t kManyRows = 512;  // of activations that are prepared together and share one unpacking of a tile

// Rows [first, first + count) of w times all activations: y[j * stride + r].
void multiply(const Matrix& w, int64_t first, int64_t count, const Prepared& x, float* y, int64_t stride) {
  if (x.rows) {
    kernels->gemv[w.type](w, first, count, x.rows, static_cast<int>(x.m), y, stride);
  } else if (x.blocks) {
    const int64_t blocks = (x.m + kLanes - 1) / kLanes;
    float* total = scratch<float>(kTotals, kTile * blocks * kLanes);
    kernels->gemm[w.type](w, first, count, x.blocks, blocks, total);
    for (int64_t b = 0; b < x.m; b += kLanes)
      kernels->transpose(total + b, blocks * kLanes, count, std::min<int64_t>(kLanes, x.m - b), y + b * stride, stride);
  } else if (x.m <= kFloatGemvRows) {
    kernels->float_gemv[w.type](w, first, count, x.x, static_cast<int>(x.m), y, stride);
  } else {
    kernels->float_gemm[w.type](w, first, count, x.x, x.m, scratch<float>(kTotals, kTile * (kSpan + x.m)), y, stride);
  }
}

Activation activation_of(std::string_view name) {
  for (int i = 0; i < kActivations; ++i)
    if (kActivationNames[i] == name) return static_cast<Activation>(i);
  fail("unknown activation " + std::string(name));
}

// [residual +] [rms_norm](x) @ w.T [+ bias] of several matrices; or activation(x @ gate.T) * (x @ up.T) of two.
struct Product {
  std::vector<Matrix> matrices;
  bool quantized;
  std::string_view activation = {};
  const float* norm = nullptr;
  float eps = 0;
  std::vector<const float*> bias = {};  // of each matrix, or none at all

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
  const bool tiles = prepared.blocks || (!p.quantized && m > kFloatGemvRows);
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
  auto x_buffer = operands.next("x", {ffi::F32}, {-1, -1});
  const int64_t m = x_buffer.dimensions()[0], k = x_buffer.dimensions()[1];
  const float* x = static_cast<const float*>(x_buffer.untyped_data());
  const float* norm_weight = norm ? operands.floats("norm_weight", {k}) : nullptr;
  Product p{take_matrices(operands, formats, k), quantized, activation, norm_weight, eps};
  if (p.gated() && biases.find('1') != biases.npos) fail("gate and up take no bias");
  if (p.matrices.empty() || biases.size() != p.matrices.size() || (residual && p.matrices.size() != 1))
    fail("biases or residual without a matrix");
  for (size_t i = 0; i < biases.size(); ++i)
    p.bias.push_back(biases[i] == '1' ? operands.floats("bias", {p.matrices[i].n}) : nullptr);
  const float* addend = residual ? operands.floats("residual", {m, p.matrices[0].n}) : nullptr;
  operands.finish();
  check(p);
  std::vector<float*> y;
  for (size_t i = 0; i < (p.gated() ? 1 : p.matrices.size()); ++i) y.push_back(results.floats("y", {m, p.matrices[i].n}));
  results.finish();
  for (int64_t start = 0; start < m; start += kManyRows) {
    apply(p, threads, x + start * k, std::min(kManyRows, m - start), addend, y);
    for (size_t i = 0; i < y.size(); ++i) y[i] += kManyRows * p.matrices[i].n;
    if (addend) addend += kManyRows * p.matrices[0].n;
  }
}

constexpr int64_t kNetworkRows = 256;  // of a long prompt that go through the network together: gate's result is large

// [residual +] (activation(h @ gate.T) * (h @ up.T)) @ down.T of h = [rms_norm](x).
void mlp(Call& call, std::string_view formats, std::string_view down, std::string_view activation, bool quantized,
         bool quantized_down, bool norm, float eps, bool residual) {
  auto& [threads, operands, results] = call;
  auto x_buffer = operands.next("x", {ffi::F32}, {-1, -1});
  const int64_t m = x_buffer.dimensions()[0], k = x_buffer.dimensions()[1];
  const float* x = static_cast<const float*>(x_buffer.untyped_data());
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
  operands.finish();
  float* y = results.floats("y", {m, n});
  results.finish();
  for (int64_t start = 0; start < m; start += kNetworkRows) {
    const int64_t rows = std::min(kNetworkRows, m - start);
    float* h = scratch<float>(kHidden, rows * inner);
    apply(in, threads, x + start * k, rows, nullptr, {h});
    apply(out, threads, h, rows, addend ? addend + start * n : nullptr, {y + start * n});
  }
}

// Rows `ids` of a matrix as floats; an id outside it gives a row of NaN.
void embedding(Call& call, std::string_view format) {
  auto& [threads, operands, results] = call;
  auto ids_buffer = operands.next("ids", {ffi::S32}, {-1});
  const int64_t count = ids_buffer.dimensions()[0];
  const int32_t* ids = static_cast<const int32_t*>(ids_buffer.untyped_data());
  const Matrix w = take_matrix(operands, format);
  operands.finish();
  float* y = results.floats("y", {count, w.k});
  results.finish();
  threads.run(count, kEasy * w.k, [&](int64_t i) {
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
