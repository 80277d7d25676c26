// Handlers of mixtures of experts (MoE): activations times the matrices of each token's experts.
//
// A slot is a token and one of its experts. Slots are sorted by expert, and data per slot is in that order, so that the
// slots of an expert are rows of one product. A token's experts are summed in the order of their ids.

#include "multiply.h"

namespace jax_q4k {
namespace {

// Matrices (count, n, k), viewed as one matrix of count * n rows.
struct Experts {
  Matrix all;
  int64_t count, n, k;
};

// Sizes of -1 match any size.
Experts take_experts(Operands& operands, const char* name, std::string_view format, int64_t count, int64_t n, int64_t k) {
  Matrix all{0, 0, type_of(format), {}};
  const Layout& layout = kLayouts[all.type];
  int64_t dims[] = {count, n, k, 0};  // for planes: count, n, blocks, bytes
  if (all.type < kBlockFormats && k >= 0) {
    if (k % layout.block) fail(std::string(name) + " of k=" + std::to_string(k) + " in blocks of " + std::to_string(layout.block));
    dims[2] = k / layout.block;
  }
  for (int i = 0; i < layout.planes; ++i) {
    dims[3] = layout.bytes[i] * layout.block / kSpan;
    auto buffer = all.type < kBlockFormats ? operands.next(name, {ffi::U8}, Dims(dims, 4))
                                           : operands.next(name, {element_of(all.type)}, Dims(dims, 3));
    std::copy_n(buffer.dimensions().begin(), 3, dims);
    all.planes[i] = static_cast<const uint8_t*>(buffer.untyped_data());
  }
  all.n = dims[0] * dims[1], all.k = dims[2] * layout.block;
  return {all, dims[0], dims[1], all.k};
}

// Slots whose expert is local, sorted by expert.
struct Routes {
  struct Group {
    int64_t expert, first, count;  // sorted slots [first, first + count)
  };
  std::vector<int64_t> slots;
  std::vector<Group> groups;
};

Routes sorted(const int32_t* ids, int64_t slots, int64_t experts) {
  Routes routes;
  std::vector<int64_t> next(experts + 1, 0);
  auto here = [&](int64_t s) { return ids[s] >= 0 && ids[s] < experts; };
  for (int64_t s = 0; s < slots; ++s)
    if (here(s)) ++next[ids[s] + 1];
  for (int64_t e = 0; e < experts; ++e) {
    if (next[e + 1]) routes.groups.push_back({e, next[e], next[e + 1]});
    next[e + 1] += next[e];
  }
  routes.slots.resize(next[experts]);
  for (int64_t s = 0; s < slots; ++s)
    if (here(s)) routes.slots[next[ids[s]]++] = s;
  return routes;
}

// How activations are multiplied: as int8 or as floats; floats by the same product whatever the number of a group's rows,
// because the products for few and for many rows of floats add in different orders.
struct Kind {
  bool quantized, one_product;
};

// Prepares int8 activations of each group; `fill(i, spans)` writes those of sorted slot i.
template <class Fill>
std::vector<Prepared> quantized_groups(const Threads& threads, const Routes& routes, int64_t k, const Fill& fill) {
  const int64_t spans = (k + kSpan - 1) / kSpan;
  struct Task {
    int64_t first, count, block;  // block -1: rows
  };
  std::vector<Task> tasks;
  int64_t blocks = 0;
  for (const auto& group : routes.groups)
    for (int64_t i = 0; i < group.count; i += kLanes)
      tasks.push_back({group.first + i, std::min<int64_t>(kLanes, group.count - i), group.count <= kGemvRows ? -1 : blocks++});
  RowSpan* rows = scratch<RowSpan>(kSpans, routes.slots.size() * spans);
  BlockSpan* packed = scratch<BlockSpan>(kBlocks, blocks * spans);
  threads.run(static_cast<int64_t>(tasks.size()), kEasy * kLanes * k, [&](int64_t t) {
    const Task& task = tasks[t];
    RowSpan* to = task.block < 0 ? rows + task.first * spans : scratch<RowSpan>(kGathered, kLanes * spans);
    for (int64_t i = 0; i < task.count; ++i) fill(task.first + i, to + i * spans);
    if (task.block >= 0)
      for (int64_t s = 0; s < spans; ++s)
        kernels->pack(to, spans, static_cast<int>(task.count), s, packed + task.block * spans + s);
  });
  std::vector<Prepared> prepared;
  blocks = 0;
  for (const auto& group : routes.groups) {
    const bool few = group.count <= kGemvRows;
    prepared.push_back({group.count, k, spans, nullptr, few ? rows + group.first * spans : nullptr, few ? nullptr : packed + blocks * spans});
    if (!few) blocks += (group.count + kLanes - 1) / kLanes;
  }
  return prepared;
}

// Prepares float activations of each group, from (slots, k) in sorted order.
std::vector<Prepared> float_groups(const Routes& routes, const float* x, int64_t k, Kind kind) {
  std::vector<Prepared> prepared;
  for (const auto& group : routes.groups)
    prepared.push_back({group.count, k, (k + kSpan - 1) / kSpan, x + group.first * k, nullptr, nullptr, !kind.one_product && group.count <= kFloatGemvRows});
  return prepared;
}

// Prepares activations of each group from rows (rows, k), normalized if there is a norm's weight. `shared` consecutive
// slots use the same row.
std::vector<Prepared> of_tokens(const Threads& threads, const Routes& routes, const float* x, int64_t rows, int64_t shared, int64_t k,
                                const float* norm, float eps, Kind kind) {
  const int64_t spans = (k + kSpan - 1) / kSpan, slots = static_cast<int64_t>(routes.slots.size());
  if (kind.quantized) {  // quantizes each row once
    RowSpan* tokens = scratch<RowSpan>(kOfTokens, rows * spans);
    threads.run(rows, kEasy * k, [&](int64_t j) {
      float* normalized = scratch<float>(kNormalized, k);
      if (norm) kernels->normalize(x + j * k, norm, eps, k, normalized);
      kernels->quantize(norm ? normalized : x + j * k, k, tokens + j * spans);
    });
    return quantized_groups(threads, routes, k, [&](int64_t i, RowSpan* to) {
      std::copy_n(tokens + routes.slots[i] / shared * spans, spans, to);
    });
  }
  float* gathered = scratch<float>(kOfTokens, slots * k);
  threads.run(slots, kEasy * k, [&](int64_t i) {
    const float* from = x + routes.slots[i] / shared * k;
    if (norm)
      kernels->normalize(from, norm, eps, k, gathered + i * k);
    else
      std::copy_n(from, k, gathered + i * k);
  });
  return float_groups(routes, gathered, k, kind);
}

// Rows of a matrix per task: a tile if there are many activations.
int64_t rows_of_task(const Threads& threads, const std::vector<Prepared>& groups, int64_t all_rows) {
  for (const Prepared& group : groups)
    if (group.in_tiles()) return kTile;
  return std::clamp<int64_t>(all_rows / (threads.count() * 8) / 16 * 16, 16, 256);
}

// Calls task(group, first row, count) for every group and all rows of its matrix (n, k).
template <class Task>
void for_groups(const Threads& threads, const Routes& routes, const std::vector<Prepared>& x, int64_t n, int64_t k, const Task& task) {
  const int64_t groups = static_cast<int64_t>(x.size()), slots = static_cast<int64_t>(routes.slots.size());
  const int64_t rows = rows_of_task(threads, x, groups * n), parts = (n + rows - 1) / rows;
  const int64_t work = rows * k * slots / std::max<int64_t>(groups, 1);
  threads.run(groups * parts, work, [&](int64_t t) {
    const int64_t first = t % parts * rows;
    task(t / parts, first, std::min(rows, n - first));
  });
}

void add(const float* from, int64_t count, float* to) {
  for (int64_t r = 0; r < count; ++r) to[r] += from[r];
}

struct Network {
  Experts gate, up, down;
  Activation activation;
  bool quantized, quantized_down;
  const float *norm, *gate_bias, *up_bias, *down_bias, *down_scale;  // or nullptr
  float eps;
};

// h (slots, inner) = activation(gate, up) of every slot, in sorted order.
void hidden(const Network& net, const Threads& threads, const Routes& routes, const std::vector<Prepared>& x, float* h) {
  const int64_t inner = net.gate.n;
  for_groups(threads, routes, x, inner, 2 * net.gate.k, [&](int64_t g, int64_t first, int64_t count) {
    const auto& group = routes.groups[g];
    const int64_t row = group.expert * inner + first;
    float *to = h + group.first * inner + first, *up = scratch<float>(kUp, group.count * count);
    multiply(net.gate.all, row, count, x[g], to, inner);
    multiply(net.up.all, row, count, x[g], up, count);
    for (int64_t i = 0; i < group.count; ++i) {
      if (net.gate_bias) add(net.gate_bias + row, count, to + i * inner);
      if (net.up_bias) add(net.up_bias + row, count, up + i * count);
      kernels->gate(to + i * inner, up + i * count, count, net.activation, to + i * inner);
    }
  });
}

// y (m, n) = [residual +] the weighted sums of the slots' products with `down`. A task has some rows of all experts, and
// all tokens, so that it alone adds to its columns of y.
void add_up(const Network& net, const Threads& threads, const Routes& routes, const std::vector<Prepared>& h, const float* weights,
            int64_t m, int64_t top, const float* residual, float* y) {
  const int64_t n = net.down.n, slots = static_cast<int64_t>(routes.slots.size());
  const int64_t rows = rows_of_task(threads, h, n);
  threads.run((n + rows - 1) / rows, rows * net.down.k * std::max<int64_t>(slots, 1), [&](int64_t t) {
    const int64_t first = t * rows, count = std::min(rows, n - first);
    for (int64_t j = 0; j < m; ++j) {
      float* to = y + j * n + first;
      if (residual)
        std::copy_n(residual + j * n + first, count, to);
      else
        std::fill_n(to, count, 0.0f);
    }
    for (size_t g = 0; g < h.size(); ++g) {
      const auto& group = routes.groups[g];
      float* products = scratch<float>(kUp, group.count * count);
      multiply(net.down.all, group.expert * n + first, count, h[g], products, count);
      const float scale = net.down_scale ? net.down_scale[group.expert] : 1.0f;
      for (int64_t i = 0; i < group.count; ++i) {
        const int64_t slot = routes.slots[group.first + i];
        float *from = products + i * count, *to = y + slot / top * n + first;
        if (scale != 1.0f)
          for (int64_t r = 0; r < count; ++r) from[r] *= scale;
        if (net.down_bias) add(net.down_bias + group.expert * n + first, count, from);
        for (int64_t r = 0; r < count; ++r) to[r] += weights[slot] * from[r];
      }
    }
  });
}

constexpr int64_t kSlotFloats = 1 << 23;  // floats of slots that are processed together; bounds the memory between products

int64_t tokens_together(int64_t top, int64_t floats) {
  return std::max<int64_t>(1, kSlotFloats / std::max<int64_t>(1, top * floats));
}

// [residual +] the sums over a token's experts of weight * (scale * (down @ h) + bias), with h = activation(gate @ x +
// bias, up @ x + bias) for [rms_norm](x).
void expert_mlp(Call& call, std::string_view gate, std::string_view up, std::string_view down, std::string_view activation,
                bool quantized, bool quantized_down, bool one_product, std::string_view biases, bool down_scale, bool norm, float eps,
                bool residual) {
  auto& [threads, operands, results] = call;
  int64_t m, k, top;
  const float* x = operands.floats("x", {&m, &k});
  const int32_t* ids = operands.ints("ids", {m, &top});
  const float* weights = operands.floats("weights", {m, top});
  Network net{};
  net.activation = activation_of(activation), net.quantized = quantized, net.quantized_down = quantized_down, net.eps = eps;
  if (norm) net.norm = operands.floats("norm_weight", {k});
  net.gate = take_experts(operands, "gate", gate, -1, -1, k);
  const int64_t experts = net.gate.count, inner = net.gate.n;
  net.up = take_experts(operands, "up", up, experts, inner, k);
  net.down = take_experts(operands, "down", down, experts, -1, inner);
  const int64_t n = net.down.n;
  if ((quantized && (net.gate.all.type >= kBlockFormats || net.up.all.type >= kBlockFormats)) ||
      (quantized_down && net.down.all.type >= kBlockFormats))
    fail("floats are multiplied as floats");
  if (biases.size() != 3) fail("biases must say which of three there are");
  if (biases[0] == '1') net.gate_bias = operands.floats("gate's bias", {experts, inner});
  if (biases[1] == '1') net.up_bias = operands.floats("up's bias", {experts, inner});
  if (biases[2] == '1') net.down_bias = operands.floats("down's bias", {experts, n});
  if (down_scale) net.down_scale = operands.floats("down_scale", {experts});
  const float* addend = residual ? operands.floats("residual", {m, n}) : nullptr;
  float* y = results.floats("y", {m, n});
  call.finish();

  const int64_t together = tokens_together(top, std::max(inner, k));
  const Kind kind{quantized, one_product}, of_down{quantized_down, one_product};
  for (int64_t start = 0; start < m; start += together) {
    const int64_t rows = std::min(together, m - start);
    const Routes routes = sorted(ids + start * top, rows * top, experts);
    float* h = scratch<float>(kHidden, routes.slots.size() * inner);
    hidden(net, threads, routes, of_tokens(threads, routes, x + start * k, rows, top, k, net.norm, eps, kind), h);
    auto quantize = [&](int64_t i, RowSpan* to) { kernels->quantize(h + i * inner, inner, to); };
    const auto prepared =
        quantized_down ? quantized_groups(threads, routes, inner, quantize) : float_groups(routes, h, inner, of_down);
    add_up(net, threads, routes, prepared, weights + start * top, rows, top, addend ? addend + start * n : nullptr, y + start * n);
  }
}

// Multiplies every slot by its expert's matrix; gives zeros if the expert is not local. If x (rows, k) has fewer rows
// than slots, consecutive slots share a row.
void expert_matmul(Call& call, std::string_view format, bool quantized, bool one_product) {
  auto& [threads, operands, results] = call;
  int64_t given, k, m, top;
  const float* x = operands.floats("x", {&given, &k});
  const int32_t* ids = operands.ints("ids", {&m, &top});
  const Experts w = take_experts(operands, "w", format, -1, -1, k);
  if (given != m && given != m * top) fail("x must have a row for each token, or for each of its experts");
  if (quantized && w.all.type >= kBlockFormats) fail("floats are multiplied as floats");
  float* y = results.floats("y", {m, top, w.n});
  call.finish();

  const int64_t shared = given == m ? top : 1, together = tokens_together(top, k);
  for (int64_t start = 0; start < m; start += together) {
    const int64_t tokens = std::min(together, m - start);
    const Routes routes = sorted(ids + start * top, tokens * top, w.count);
    const auto prepared =
        of_tokens(threads, routes, x + start * top / shared * k, tokens * top / shared, shared, k, nullptr, 0, {quantized, one_product});
    float* to = y + start * top * w.n;
    if (static_cast<int64_t>(routes.slots.size()) < tokens * top) std::fill_n(to, tokens * top * w.n, 0.0f);
    for_groups(threads, routes, prepared, w.n, k, [&](int64_t g, int64_t first, int64_t count) {
      const auto& group = routes.groups[g];
      float* products = scratch<float>(kUp, group.count * count);
      multiply(w.all, group.expert * w.n + first, count, prepared[g], products, count);
      for (int64_t i = 0; i < group.count; ++i)
        std::copy_n(products + i * count, count, to + routes.slots[group.first + i] * w.n + first);
    });
  }
}

}  // namespace
}  // namespace jax_q4k

#pragma GCC visibility push(default)
JAX_Q4K_HANDLER(expert_mlp)
    .Attr<std::string_view>("gate").Attr<std::string_view>("up").Attr<std::string_view>("down")
    .Attr<std::string_view>("activation").Attr<bool>("quantized").Attr<bool>("quantized_down").Attr<bool>("one_product")
    .Attr<std::string_view>("biases").Attr<bool>("down_scale").Attr<bool>("norm").Attr<float>("eps").Attr<bool>("residual"));
JAX_Q4K_HANDLER(expert_matmul).Attr<std::string_view>("format").Attr<bool>("quantized").Attr<bool>("one_product"));
#pragma GCC visibility pop
