// XLA FFI handlers for the CPU: they check buffers, deal work to XLA's threads, and call the kernels.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels.h"
#include "threads.h"
#include "xla/ffi/api/ffi.h"

namespace jax_q4k {
namespace {

namespace ffi = xla::ffi;
using Dims = ffi::Span<const int64_t>;

// The best kernels for this processor, or what `jax_q4k_select` chose.
const Kernels* best() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("f16c"))
    return &kernels_avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return &kernels_avx2;
#endif
  return &kernels_portable;
}
const Kernels* kernels = best();

bool select(std::string_view name) {
  const Kernels* known[] = {best(),
#if defined(__x86_64__)
                            best() == &kernels_avx512 ? &kernels_avx2 : nullptr,
#endif
                            &kernels_portable};
  for (const Kernels* candidate : known)
    if (candidate && name == candidate->name) return kernels = candidate, true;
  return false;
}

struct Invalid {
  std::string message;
};
[[noreturn]] void fail(std::string message) { throw Invalid{std::move(message)}; }

// The exception that is being handled, as XLA takes it.
ffi::Error error() {
  try {
    throw;
  } catch (const Invalid& invalid) {
    return ffi::Error::InvalidArgument("jax_q4k: " + invalid.message);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jax_q4k: out of memory");
  } catch (const std::exception& other) {
    return ffi::Error::Internal(std::string("jax_q4k: ") + other.what());
  }
}

std::string text(Dims dims) {
  std::string s = "(";
  for (size_t i = 0; i < dims.size(); ++i) s += (i ? ", " : "") + std::to_string(dims[i]);
  return s + ")";
}

// The operands or results of a call, in order; each is checked as it is taken.
template <class Buffers>
class Taker {
 public:
  Taker(const char* what, const Buffers& buffers) : what_(what), buffers_(buffers) {}

  // The next one; `dims` of -1 match anything.
  ffi::AnyBuffer next(const char* name, std::initializer_list<ffi::DataType> types, std::initializer_list<int64_t> dims) {
    if (at_ >= buffers_.size()) fail(std::string("too few ") + what_ + ": " + name + " is missing");
    ffi::AnyBuffer buffer = get(at_++);
    if (std::find(types.begin(), types.end(), buffer.element_type()) == types.end())
      fail(std::string(name) + " has an element type that this call does not take");
    bool fits = buffer.dimensions().size() == dims.size();
    for (size_t i = 0; fits && i < dims.size(); ++i) fits = dims.begin()[i] < 0 || dims.begin()[i] == buffer.dimensions()[i];
    if (!fits) fail(std::string(name) + " has shape " + text(buffer.dimensions()) + "; it must be " + text(Dims(dims.begin(), dims.size())));
    return buffer;
  }
  float* floats(const char* name, std::initializer_list<int64_t> dims) {
    return static_cast<float*>(next(name, {ffi::F32}, dims).untyped_data());
  }
  const int32_t* ints(const char* name, std::initializer_list<int64_t> dims) {
    return static_cast<const int32_t*>(next(name, {ffi::S32}, dims).untyped_data());
  }
  void finish() const {
    if (at_ != buffers_.size()) fail(std::string("too many ") + what_);
  }

 private:
  ffi::AnyBuffer get(size_t i) const {
    auto found = buffers_.template get<ffi::AnyBuffer>(i);
    if (!found.has_value()) fail(std::string(what_) + " " + std::to_string(i) + " is no array");
    if constexpr (std::is_same_v<Buffers, ffi::RemainingRets>)
      return **found;
    else
      return *found;
  }
  const char* what_;
  const Buffers& buffers_;
  size_t at_ = 0;
};
using Operands = Taker<ffi::RemainingArgs>;
using Results = Taker<ffi::RemainingRets>;

// Memory of a thread that grows and is kept: steps of a loop allocate nothing. `kind` tells uses apart that overlap.
enum Scratch { kSpans, kBlocks, kNormalized, kTotals, kRows, kUp, kQueries, kScratches };
template <class T>
T* scratch(Scratch kind, size_t count) {
  struct Memory {
    void* data = nullptr;
    size_t bytes = 0;
    ~Memory() { std::free(data); }
  };
  static thread_local Memory memories[kScratches];
  Memory& memory = memories[kind];
  const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
  if (bytes > memory.bytes) {
    std::free(memory.data);
    memory.data = std::aligned_alloc(64, bytes);
    memory.bytes = memory.data ? bytes : 0;
    if (!memory.data) throw std::bad_alloc();
  }
  return static_cast<T*>(memory.data);
}

Type type_of(std::string_view name) {
  for (int i = 0; i < kTypes; ++i)
    if (kLayouts[i].name == name) return static_cast<Type>(i);
  fail("unknown format " + std::string(name));
}

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
  for (int i = 0; i < layout.planes; ++i) {
    const int64_t n = i ? w.n : -1, blocks = i ? w.k / layout.block : -1;
    auto buffer = operands.next("a plane of the weights", {ffi::U8}, {n, blocks, layout.bytes[i] * layout.block / kSpan});
    w.n = buffer.dimensions()[0], w.k = buffer.dimensions()[1] * layout.block;
    w.planes[i] = static_cast<const uint8_t*>(buffer.untyped_data());
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

constexpr int64_t kEasy = 4;  // multiply-adds that take as long as moving, rounding or turning a float

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
  if (quantized && m > kFew) {
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

constexpr int64_t kManyRows = 512;  // of activations that share one unpacking of a tile
constexpr int64_t kFloatRows = 64;  // of activations as they are that share it: as many as stay in a core's cache

// Rows [first, first + count) of w times activations [start, start + m): y[j * stride + r].
void multiply(const Matrix& w, int64_t first, int64_t count, const Prepared& x, int64_t start, int64_t m, float* y, int64_t stride) {
  if (x.rows) {
    kernels->few[w.type](w, first, count, x.rows + start * x.spans, static_cast<int>(m), y, stride);
  } else if (x.blocks) {
    const int64_t blocks = (m + kLanes - 1) / kLanes;
    float* total = scratch<float>(kTotals, kTile * blocks * kLanes);
    kernels->many[w.type](w, first, count, x.blocks + start / kLanes * x.spans, blocks, total);
    for (int64_t b = 0; b < m; b += kLanes)
      kernels->transpose(total + b, blocks * kLanes, count, std::min<int64_t>(kLanes, m - b), y + b * stride, stride);
  } else {
    kernels->floats[w.type](w, first, count, x.x + start * x.k, m, y, stride, scratch<float>(kRows, 4 * x.k));
  }
}

// [residual +] [rms_norm](x) @ w.T [+ bias] of several matrices; or activation(x @ gate.T) * (x @ up.T) of two.
ffi::Error products(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, std::string_view formats,
                    std::string_view biases, std::string_view activation, bool quantized, bool norm, float eps, bool residual) try {
  Threads threads(&pool);
  Operands operands("operands", args);
  Results results("results", rets);
  auto x_buffer = operands.next("x", {ffi::F32}, {-1, -1});
  const int64_t m = x_buffer.dimensions()[0], k = x_buffer.dimensions()[1];
  const float* norm_weight = norm ? operands.floats("norm_weight", {k}) : nullptr;
  const std::vector<Matrix> matrices = take_matrices(operands, formats, k);
  const bool gated = !activation.empty();
  if (gated && (matrices.size() != 2 || matrices[0].n != matrices[1].n)) fail("gate and up must have as many rows");
  if (biases.size() != matrices.size() || (residual && matrices.size() != 1)) fail("biases or residual without a matrix");
  std::vector<const float*> bias(matrices.size());
  for (size_t i = 0; i < matrices.size(); ++i)
    if (biases[i] == '1') bias[i] = operands.floats("bias", {matrices[i].n});
  const float* addend = residual ? operands.floats("residual", {m, matrices[0].n}) : nullptr;
  operands.finish();
  std::vector<float*> y;
  for (size_t i = 0; i < (gated ? 1 : matrices.size()); ++i) y.push_back(results.floats("y", {m, matrices[i].n}));
  results.finish();
  for (const Matrix& w : matrices)
    if (quantized && w.type >= kBlockFormats) fail("floats are multiplied as floats");

  const Prepared prepared = prepare(threads, static_cast<const float*>(x_buffer.untyped_data()), m, k, norm_weight, eps, quantized);
  // A task is some rows of a matrix, times some of the activations.
  const int64_t part = prepared.blocks ? kManyRows : kFloatRows, parts = (m + part - 1) / part;
  int64_t all_rows = 0;
  for (const Matrix& w : matrices) all_rows += w.n;
  const int64_t few_rows = std::clamp<int64_t>(all_rows / (threads.count() * 8) / 16 * 16, 16, 256);
  const int64_t rows = prepared.blocks ? kTile : few_rows;
  struct Task {
    size_t matrix;
    int64_t first, count, start, m;
  };
  std::vector<Task> tasks;
  for (size_t i = 0; i < y.size(); ++i)
    for (int64_t p = 0; p < parts; ++p)
      for (int64_t first = 0; first < matrices[i].n; first += rows)
        tasks.push_back({i, first, std::min(rows, matrices[i].n - first), p * part, std::min(part, m - p * part)});

  const int64_t work = all_rows * k * m / static_cast<int64_t>(std::max<size_t>(tasks.size(), 1));
  threads.run(static_cast<int64_t>(tasks.size()), work, [&](int64_t t) {
    const Task& task = tasks[t];
    const Matrix& w = matrices[task.matrix];
    float* to = y[task.matrix] + task.start * w.n + task.first;
    multiply(w, task.first, task.count, prepared, task.start, task.m, to, w.n);
    if (gated) {
      float* up = scratch<float>(kUp, task.m * task.count);
      multiply(matrices[1], task.first, task.count, prepared, task.start, task.m, up, task.count);
      for (int64_t j = 0; j < task.m; ++j)
        kernels->gate(to + j * w.n, up + j * task.count, task.count, activation == "gelu", to + j * w.n);
    }
    for (int64_t j = 0; j < task.m; ++j) {
      float* row = to + j * w.n;
      if (bias[task.matrix])
        for (int64_t r = 0; r < task.count; ++r) row[r] += bias[task.matrix][task.first + r];
      if (addend)
        for (int64_t r = 0; r < task.count; ++r) row[r] += addend[(task.start + j) * w.n + task.first + r];
    }
  });
  return ffi::Error::Success();
} catch (...) {
  return error();
}

// Rows `ids` of a matrix as floats; an id outside it gives a row of NaN.
ffi::Error embedding(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, std::string_view format) try {
  Threads threads(&pool);
  Operands operands("operands", args);
  Results results("results", rets);
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
  return ffi::Error::Success();
} catch (...) {
  return error();
}

PageType page_type(ffi::DataType type) {
  switch (type) {
    case ffi::F32: return kPageF32;
    case ffi::F16: return kPageF16;
    case ffi::BF16: return kPageBF16;
    case ffi::S8: return kPageInt8;
    default: return kPageE4M3;
  }
}

// Pages (num_pages, num_kv_heads, page_size, head_dim) of keys and of values, and the scales of int8 ones.
template <class Buffers>
std::pair<Tokens, PageType> take_pages(Taker<Buffers>& from) {
  auto k = from.next("k_pages", {ffi::F32, ffi::F16, ffi::BF16, ffi::S8, ffi::F8E4M3FN}, {-1, -1, -1, -1});
  const auto d = k.dimensions();
  auto v = from.next("v_pages", {k.element_type()}, {d[0], d[1], d[2], d[3]});
  if (d[1] < 1) fail("pages must have at least one head");
  if (d[2] % kTokens) fail("page_size must be a multiple of 16");
  if (d[3] < 16 || d[3] > kMaxHeadDim || d[3] % 16) fail("head_dim must be a multiple of 16 up to 256");
  Tokens tokens{k.untyped_data(), v.untyped_data(), nullptr, nullptr, d[0], d[1], d[2], d[3], d[1] * d[2] * d[3], d[2] * d[3], d[3]};
  if (k.element_type() == ffi::S8) {
    tokens.k_scales = from.floats("k_scales", {d[0], d[1], d[2]});
    tokens.v_scales = from.floats("v_scales", {d[0], d[1], d[2]});
  }
  return {tokens, page_type(k.element_type())};
}

void start_query(Query& query, const float* q, int64_t first, int64_t last, int64_t head_dim) {
  query.q = q, query.first = first, query.last = last;
  query.highest = -std::numeric_limits<float>::infinity(), query.total = 0;
  std::fill_n(query.values, head_dim, 0.0f);
}

void finish_query(const Query& query, const float* sink, int64_t head_dim, float* out) {
  float total = query.total, factor = 1;
  if (sink && total != 0) {  // a logit in the denominator that has no value
    const float highest = std::max(query.highest, *sink);
    factor = std::exp(query.highest - highest);
    total = total * factor + std::exp(*sink - highest);
  }
  for (int64_t d = 0; d < head_dim; ++d) out[d] = total == 0 ? 0.0f : query.values[d] * factor / total;
}

constexpr int64_t kPart = 512;  // tokens of a context that one task sees; so that sums do not depend on threads

// One query token per sequence: softmax(scale * q . K) V over the tokens that the block tables name.
ffi::Error paged_attention(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, float scale, float soft_cap,
                           int64_t window, bool contiguous, bool has_sinks) try {
  Threads threads(&pool);
  Operands operands("operands", args);
  Results results("results", rets);
  auto q_buffer = operands.next("q", {ffi::F32}, {-1, -1, -1});
  const int64_t batch = q_buffer.dimensions()[0], num_heads = q_buffer.dimensions()[1], head_dim = q_buffer.dimensions()[2];
  const float* q = static_cast<const float*>(q_buffer.untyped_data());
  const auto [tokens, type] = take_pages(operands);
  if (tokens.head_dim != head_dim || num_heads % tokens.num_heads) fail("q's heads do not fit the pages");
  const int32_t* tables = nullptr;
  int64_t per_sequence = 1;
  if (!contiguous) {
    auto buffer = operands.next("block_tables", {ffi::S32}, {batch, -1});
    tables = static_cast<const int32_t*>(buffer.untyped_data());
    per_sequence = buffer.dimensions()[1];
  } else if (tokens.num_pages != batch) {
    fail("a contiguous cache must have one row per sequence");
  }
  const int32_t* lens = operands.ints("context_lens", {batch});
  const float* sinks = has_sinks ? operands.floats("sinks", {num_heads}) : nullptr;
  operands.finish();
  float* out = results.floats("out", {batch, num_heads, head_dim});
  results.finish();

  const int64_t group = num_heads / tokens.num_heads, page_size = tokens.page_size;
  struct Task {
    int64_t sequence, head, first, last;
  };
  std::vector<Task> tasks;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = std::clamp<int64_t>(lens[b], 0, per_sequence * page_size);
    const int64_t start = window > 0 ? std::max<int64_t>(length - window, 0) : 0;
    for (int64_t h = 0; h < tokens.num_heads; ++h)
      for (int64_t first = start / kPart * kPart; first < std::max<int64_t>(length, 1); first += kPart)
        tasks.push_back({b, h, std::max(first, start), std::min(first + kPart, length)});
  }
  Query* queries = scratch<Query>(kQueries, tasks.size() * group);
  const AttentionOptions options{scale, soft_cap};
  int64_t seen = 0;
  for (const Task& task : tasks) seen += task.last - task.first;
  const int64_t work = 2 * seen * group * head_dim / static_cast<int64_t>(std::max<size_t>(tasks.size(), 1));
  threads.run(static_cast<int64_t>(tasks.size()), work, [&](int64_t t) {
    const Task& task = tasks[t];
    Query* mine = queries + t * group;
    for (int64_t i = 0; i < group; ++i)
      start_query(mine[i], q + (task.sequence * num_heads + task.head * group + i) * head_dim, task.first, task.last, head_dim);
    const int32_t row = static_cast<int32_t>(task.sequence);  // of a contiguous cache, its only page
    const int32_t* pages = contiguous ? &row : tables + task.sequence * per_sequence;
    kernels->attend[type](tokens, pages, task.head, task.first, task.last, mine, static_cast<int>(group), options);
  });
  // The parts of a context, merged in their order.
  size_t t = 0;
  while (t < tasks.size()) {
    size_t end = t + 1;
    while (end < tasks.size() && tasks[end].sequence == tasks[t].sequence && tasks[end].head == tasks[t].head) ++end;
    for (int64_t i = 0; i < group; ++i) {
      Query& merged = queries[t * group + i];
      for (size_t part = t + 1; part < end; ++part) kernels->merge(queries[part * group + i], head_dim, &merged);
      const int64_t head = tasks[t].head * group + i;
      finish_query(merged, sinks ? sinks + head : nullptr, head_dim, out + (tasks[t].sequence * num_heads + head) * head_dim);
    }
    t = end;
  }
  return ffi::Error::Success();
} catch (...) {
  return error();
}

constexpr int64_t kQueryTokens = 16;  // of a prompt, that share what is read of keys and values

// softmax(q . K / sqrt(head_dim)) V over each token's own past, of fresh keys and values (batch, time, heads, head_dim).
ffi::Error causal_attention(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets) try {
  Threads threads(&pool);
  Operands operands("operands", args);
  Results results("results", rets);
  auto q_buffer = operands.next("q", {ffi::F32}, {-1, -1, -1, -1});
  const auto d = q_buffer.dimensions();
  const int64_t batch = d[0], time = d[1], num_heads = d[2], head_dim = d[3];
  const float* q = static_cast<const float*>(q_buffer.untyped_data());
  auto k_buffer = operands.next("k", {ffi::F32}, {batch, time, -1, head_dim});
  const int64_t kv_heads = k_buffer.dimensions()[2];
  float* v = operands.floats("v", {batch, time, kv_heads, head_dim});
  const int32_t* lengths = operands.ints("lengths", {batch});
  operands.finish();
  float* out = results.floats("out", {batch, time, num_heads, head_dim});
  results.finish();
  if (kv_heads < 1 || num_heads % kv_heads) fail("num_heads must be a multiple of num_kv_heads");
  if (head_dim < 16 || head_dim > kMaxHeadDim || head_dim % 16) fail("head_dim must be a multiple of 16 up to 256");
  const Tokens tokens{k_buffer.untyped_data(), v, nullptr, nullptr, batch, kv_heads, time, head_dim,
                      time * kv_heads * head_dim, head_dim, kv_heads * head_dim};
  const int64_t group = num_heads / kv_heads, steps = (time + kQueryTokens - 1) / kQueryTokens;
  const AttentionOptions options{1.0f / std::sqrt(static_cast<float>(head_dim)), 0};
  threads.run(batch * kv_heads * steps, kQueryTokens * group * time * head_dim, [&](int64_t t) {
    const int64_t step = steps - 1 - t % steps, head = t / steps % kv_heads, b = t / steps / kv_heads;  // long ones first
    const int64_t first = step * kQueryTokens, count = std::min(kQueryTokens, time - first) * group;
    const int64_t length = std::clamp<int64_t>(lengths[b], 0, time);
    Query* queries = scratch<Query>(kQueries, count);
    auto place = [&](int64_t i) { return ((b * time + first + i / group) * num_heads + head * group + i % group) * head_dim; };
    for (int64_t i = 0; i < count; ++i)
      start_query(queries[i], q + place(i), 0, std::min(first + i / group + 1, length), head_dim);
    const int32_t page = static_cast<int32_t>(b);
    kernels->attend[kPageF32](tokens, &page, head, 0, std::min(first + kQueryTokens, length), queries, static_cast<int>(count), options);
    for (int64_t i = 0; i < count; ++i) finish_query(queries[i], nullptr, head_dim, out + place(i));
  });
  return ffi::Error::Success();
} catch (...) {
  return error();
}

// Rotated q and k, k and v appended to the pages, which are updated in place.
ffi::Error rope_append(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, bool rope, bool interleaved,
                       bool norms, float eps) try {
  Threads threads(&pool);
  Operands operands("operands", args);
  Results results("results", rets);
  take_pages(operands);
  const auto [tokens, type] = take_pages(results);
  const int64_t head_dim = tokens.head_dim, kv_heads = tokens.num_heads;
  int64_t num_heads = 0, half = 0;
  const float *q = nullptr, *cos = nullptr, *sin = nullptr, *q_norm = nullptr, *k_norm = nullptr;
  if (rope) {
    auto buffer = operands.next("q", {ffi::F32}, {-1, -1, head_dim});
    q = static_cast<const float*>(buffer.untyped_data()), num_heads = buffer.dimensions()[1];
  }
  auto k_buffer = operands.next("k", {ffi::F32}, {-1, kv_heads, head_dim});
  const int64_t count = k_buffer.dimensions()[0];
  const float* k = static_cast<const float*>(k_buffer.untyped_data());
  const float* v = operands.floats("v", {count, kv_heads, head_dim});
  const int32_t* slots = operands.ints("slot_mapping", {count});
  float* out = nullptr;
  if (rope) {
    auto buffer = operands.next("cos", {ffi::F32}, {count, -1});
    cos = static_cast<const float*>(buffer.untyped_data()), half = buffer.dimensions()[1];
    if (2 * half > head_dim) fail("cos has more angles than half of head_dim");
    sin = operands.floats("sin", {count, half});
    if (norms) q_norm = operands.floats("q_norm", {head_dim}), k_norm = operands.floats("k_norm", {head_dim});
    out = results.floats("q", {count, num_heads, head_dim});
  }
  operands.finish();
  results.finish();
  threads.run(count, kEasy * (num_heads + kv_heads) * head_dim, [&](int64_t t) {
    auto turn = [&](const float* from, const float* norm, int64_t heads, float* to) {
      for (int64_t h = 0; h < heads; ++h) {
        float* x = to + h * head_dim;
        if (norm)
          kernels->normalize(from + h * head_dim, norm, eps, head_dim, x);
        else
          std::memcpy(x, from + h * head_dim, head_dim * sizeof(float));
        kernels->rotate(x, cos + t * half, sin + t * half, half, interleaved);
      }
    };
    const float* keys = k + t * kv_heads * head_dim;
    if (rope) {
      turn(q + t * num_heads * head_dim, q_norm, num_heads, out + t * num_heads * head_dim);
      float* turned = scratch<float>(kRows, kv_heads * head_dim);
      turn(keys, k_norm, kv_heads, turned);
      keys = turned;
    }
    const int64_t slot = slots[t];
    if (slot >= 0 && slot < tokens.num_pages * tokens.page_size)
      kernels->append[type](tokens, slot / tokens.page_size, slot % tokens.page_size, keys, v + t * kv_heads * head_dim);
  });
  return ffi::Error::Success();
} catch (...) {
  return error();
}

// Heads of x, turned by the angles of their tokens.
ffi::Error rotate(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, bool interleaved) try {
  Threads threads(&pool);
  Operands operands("operands", args);
  Results results("results", rets);
  auto buffer = operands.next("x", {ffi::F32}, {-1, -1, -1});
  const int64_t count = buffer.dimensions()[0], size = buffer.dimensions()[1] * buffer.dimensions()[2];
  const int64_t heads = buffer.dimensions()[1], head_dim = buffer.dimensions()[2];
  const float* x = static_cast<const float*>(buffer.untyped_data());
  auto cos_buffer = operands.next("cos", {ffi::F32}, {count, -1});
  const int64_t half = cos_buffer.dimensions()[1];
  if (2 * half > head_dim) fail("cos has more angles than half of head_dim");
  const float* cos = static_cast<const float*>(cos_buffer.untyped_data());
  const float* sin = operands.floats("sin", {count, half});
  operands.finish();
  float* y = results.floats("y", {count, heads, head_dim});
  results.finish();
  threads.run(count, kEasy * size, [&](int64_t t) {
    std::memcpy(y + t * size, x + t * size, size * sizeof(float));
    for (int64_t h = 0; h < heads; ++h) kernels->rotate(y + t * size + h * head_dim, cos + t * half, sin + t * half, half, interleaved);
  });
  return ffi::Error::Success();
} catch (...) {
  return error();
}

}  // namespace
}  // namespace jax_q4k

#pragma GCC visibility push(default)

#define JAX_Q4K_HANDLER(name) XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_q4k_##name, jax_q4k::name, \
    xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().RemainingArgs().RemainingRets()

JAX_Q4K_HANDLER(products)
    .Attr<std::string_view>("formats").Attr<std::string_view>("biases").Attr<std::string_view>("activation")
    .Attr<bool>("quantized").Attr<bool>("norm").Attr<float>("eps").Attr<bool>("residual"));
JAX_Q4K_HANDLER(embedding).Attr<std::string_view>("format"));
JAX_Q4K_HANDLER(paged_attention)
    .Attr<float>("scale").Attr<float>("soft_cap").Attr<int64_t>("window").Attr<bool>("contiguous").Attr<bool>("sinks"));
JAX_Q4K_HANDLER(causal_attention));
JAX_Q4K_HANDLER(rope_append).Attr<bool>("rope").Attr<bool>("interleaved").Attr<bool>("norms").Attr<float>("eps"));
JAX_Q4K_HANDLER(rotate).Attr<bool>("interleaved"));

extern "C" {
// The name of the kernels in use.
const char* jax_q4k_kernels() { return jax_q4k::kernels->name; }
// Uses the kernels of that name from now on, for tests and measurements; false if there are none or the processor
// lacks what they need.
bool jax_q4k_select(const char* name) { return jax_q4k::select(name); }
// `build.fingerprint()` of what this was compiled from.
const char* jax_q4k_fingerprint() { return JAX_Q4K_FINGERPRINT; }
}

#pragma GCC visibility pop
