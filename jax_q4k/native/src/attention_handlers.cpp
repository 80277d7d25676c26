// Handlers of attention, of its KV cache, and of rotary embeddings.

#include <cmath>

#include "ffi.h"

namespace jax_q4k {
namespace {

PageType page_type(ffi::DataType type) {
  switch (type) {
    case ffi::F32: return kPageF32;
    case ffi::F16: return kPageF16;
    case ffi::BF16: return kPageBF16;
    case ffi::S8: return kPageInt8;
    default: return kPageE4M3;
  }
}

void check_dim(const char* name, int64_t dim, int64_t most = kMaxHeadDim) {
  if (dim < 16 || dim > most || dim % 16) fail(std::string(name) + " must be a multiple of 16 up to " + std::to_string(most));
}

struct Pages {
  Tokens tokens;
  PageType type;
};

// Takes pages (num_pages, num_kv_heads, page_size, head_dim) of keys and, unless latent, of values, and the scales of
// int8 pages. Pages of a contiguous cache are as long as the cache.
template <class Buffers>
Pages take_pages(OperandReader<Buffers>& from, bool latent, bool contiguous = false) {
  auto k = from.next("k_pages", {ffi::F32, ffi::F16, ffi::BF16, ffi::S8, ffi::F8E4M3FN}, {-1, -1, -1, -1});
  const auto d = k.dimensions();
  void* v = latent ? nullptr : from.next("v_pages", {k.element_type()}, {d[0], d[1], d[2], d[3]}).untyped_data();
  if (d[1] < 1 || d[2] < 1) fail("pages must have at least one head and one token");
  if (!contiguous && d[2] % kTokens) fail("page_size must be a multiple of 16");
  check_dim("head_dim", d[3]);
  Tokens tokens{k.untyped_data(), v, nullptr, nullptr, d[0], d[1], d[2], d[3], d[3], d[1] * d[2], d[2], 1, latent};
  if (k.element_type() == ffi::S8) {
    tokens.k_scales = from.floats("k_scales", {d[0], d[1], d[2]});
    if (!latent) tokens.v_scales = from.floats("v_scales", {d[0], d[1], d[2]});
  }
  return {tokens, page_type(k.element_type())};
}

void start_query(Query& query, const float* q, int64_t first, int64_t last, int64_t value_dim) {
  query.q = q, query.first = first, query.last = last;
  query.m = -std::numeric_limits<float>::infinity(), query.l = 0, query.seen = false;
  std::fill_n(query.o, value_dim, 0.0f);
}

void finish_query(const Query& query, const float* sink, int64_t value_dim, float* out) {
  float l = query.l, factor = 1;
  if (sink && query.seen) {  // a logit in the denominator, without a value
    const float m = std::max(query.m, *sink);
    factor = std::exp(query.m - m);
    l = l * factor + std::exp(*sink - m);
  }
  for (int64_t d = 0; d < value_dim; ++d) out[d] = query.seen ? query.o[d] * factor / l : 0.0f;
}

constexpr int64_t kPart = 256;  // maximum tokens of a context per task; sums must not depend on the number of threads

// One query token per sequence: softmax(scale * q . K) V over the tokens in the block tables. `latent_values`: number
// of values that a latent key begins with; 0 if values have their own pages.
void paged_attention(Call& call, float scale, float soft_cap, int64_t window, int64_t latent_values, bool contiguous,
                     bool has_sinks) {
  auto& [threads, operands, results] = call;
  int64_t batch, num_heads, head_dim, per_sequence = 1;
  const float* q = operands.floats("q", {&batch, &num_heads, &head_dim});
  Pages pages = take_pages(operands, latent_values != 0, contiguous);
  Tokens& tokens = pages.tokens;
  if (tokens.head_dim != head_dim || num_heads % tokens.num_heads) fail("q's heads do not fit the pages");
  if (tokens.latent) check_dim("value_dim", tokens.value_dim = latent_values, head_dim);
  const int64_t value_dim = tokens.value_dim;
  const int32_t* tables = contiguous ? nullptr : operands.ints("block_tables", {batch, &per_sequence});
  if (contiguous && tokens.num_pages != batch) fail("a contiguous cache must have one row per sequence");
  const int32_t* lens = operands.ints("context_lens", {batch});
  const float* sinks = has_sinks ? operands.floats("sinks", {num_heads}) : nullptr;
  float* out = results.floats("out", {batch, num_heads, value_dim});
  call.finish();

  const int64_t group = num_heads / tokens.num_heads, page_size = tokens.page_size;
  struct Task {
    int64_t sequence, head, first, last;
  };
  std::vector<Task> tasks;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = std::clamp<int64_t>(lens[b], 0, per_sequence * page_size);
    const int64_t start = window > 0 ? std::max<int64_t>(length - window, 0) : 0;
    const int64_t begin = start / kTokens * kTokens, tiles = (length - begin + kTokens - 1) / kTokens;
    const int64_t parts = std::max<int64_t>((tiles * kTokens + kPart - 1) / kPart, 1);
    const int64_t step = std::max<int64_t>((tiles + parts - 1) / parts, 1) * kTokens;
    for (int64_t h = 0; h < tokens.num_heads; ++h)
      for (int64_t first = begin; first < std::max<int64_t>(length, 1); first += step)
        tasks.push_back({b, h, std::max(first, start), std::min(first + step, length)});
  }
  Query* queries = scratch<Query>(kQueries, tasks.size() * group);
  const AttentionOptions options{scale, soft_cap};
  int64_t seen = 0;
  for (const Task& task : tasks) seen += task.last - task.first;
  const int64_t work = seen * group * (head_dim + value_dim) / static_cast<int64_t>(std::max<size_t>(tasks.size(), 1));
  threads.run(static_cast<int64_t>(tasks.size()), work, [&](int64_t t) {
    const Task& task = tasks[t];
    Query* mine = queries + t * group;
    for (int64_t i = 0; i < group; ++i)
      start_query(mine[i], q + (task.sequence * num_heads + task.head * group + i) * head_dim, task.first, task.last, value_dim);
    const int32_t row = static_cast<int32_t>(task.sequence);  // the only page of this sequence in a contiguous cache
    const int32_t* table = contiguous ? &row : tables + task.sequence * per_sequence;
    kernels->attend[pages.type](tokens, table, task.head, task.first, task.last, mine, static_cast<int>(group), options);
  });
  // Merges the parts of each context in order.
  size_t t = 0;
  while (t < tasks.size()) {
    size_t end = t + 1;
    while (end < tasks.size() && tasks[end].sequence == tasks[t].sequence && tasks[end].head == tasks[t].head) ++end;
    for (int64_t i = 0; i < group; ++i) {
      Query& merged = queries[t * group + i];
      for (size_t part = t + 1; part < end; ++part) kernels->merge(queries[part * group + i], value_dim, &merged);
      const int64_t head = tasks[t].head * group + i;
      finish_query(merged, sinks ? sinks + head : nullptr, value_dim, out + (tasks[t].sequence * num_heads + head) * value_dim);
    }
    t = end;
  }
}

constexpr int64_t kQueryTokens = 16;  // tokens of a prompt per task, which share the keys and values that are read

// softmax(scale * q . K) V of each token over itself and those before it, or the last `window` of these (0: all), with
// contiguous keys (batch, time, heads, head_dim) and values (batch, time, heads, value_dim).
void causal_attention(Call& call, float scale, float soft_cap, int64_t window, bool has_sinks) {
  auto& [threads, operands, results] = call;
  int64_t batch, time, num_heads, head_dim, kv_heads, value_dim;
  const float* q = operands.floats("q", {&batch, &time, &num_heads, &head_dim});
  float* k = operands.floats("k", {batch, time, &kv_heads, head_dim});
  float* v = operands.floats("v", {batch, time, kv_heads, &value_dim});
  const int32_t* lengths = operands.ints("lengths", {batch});
  const float* sinks = has_sinks ? operands.floats("sinks", {num_heads}) : nullptr;
  float* out = results.floats("out", {batch, time, num_heads, value_dim});
  call.finish();
  if (kv_heads < 1 || num_heads % kv_heads) fail("num_heads must be a multiple of num_kv_heads");
  check_dim("head_dim", head_dim), check_dim("value_dim", value_dim);
  const Tokens tokens{k, v, nullptr, nullptr, batch, kv_heads, time, head_dim, value_dim, time * kv_heads, 1, kv_heads, false};
  const int64_t group = num_heads / kv_heads, steps = (time + kQueryTokens - 1) / kQueryTokens;
  const AttentionOptions options{scale, soft_cap};
  auto first_seen = [&](int64_t token) { return window > 0 ? std::max<int64_t>(token + 1 - window, 0) : 0; };
  const int64_t seen = window > 0 ? std::min(time, std::min(window, time) + kQueryTokens) : time;
  threads.run(batch * kv_heads * steps, kQueryTokens * group * seen * (head_dim + value_dim) / 2, [&](int64_t t) {
    const int64_t step = steps - 1 - t % steps, head = t / steps % kv_heads, b = t / steps / kv_heads;  // longest first
    const int64_t first = step * kQueryTokens, count = std::min(kQueryTokens, time - first) * group;
    const int64_t length = std::clamp<int64_t>(lengths[b], 0, time);
    Query* queries = scratch<Query>(kQueries, count);
    auto place = [&](int64_t i) { return (b * time + first + i / group) * num_heads + head * group + i % group; };
    for (int64_t i = 0; i < count; ++i) {
      const int64_t token = first + i / group;
      start_query(queries[i], q + place(i) * head_dim, first_seen(token), std::min(token + 1, length), value_dim);
    }
    const int32_t page = static_cast<int32_t>(b);
    kernels->attend[kPageF32](tokens, &page, head, first_seen(first), std::min(first + kQueryTokens, length), queries,
                              static_cast<int>(count), options);
    for (int64_t i = 0; i < count; ++i)
      finish_query(queries[i], sinks ? sinks + head * group + i % group : nullptr, value_dim, out + place(i) * value_dim);
  });
}

// Angles (count, half) that rotate pairs of a head's dimensions.
struct Angles {
  const float *cos = nullptr, *sin = nullptr;
  int64_t half = 0;
  bool interleaved = false;

  // Rotates a head of token t.
  void rotate(float* x, int64_t t) const { kernels->rotate(x, cos + t * half, sin + t * half, half, interleaved); }
};

Angles take_angles(Operands& operands, int64_t count, int64_t head_dim, bool interleaved) {
  int64_t half;
  const float* cos = operands.floats("cos", {count, &half});
  if (2 * half > head_dim) fail("cos has more angles than half of head_dim");
  return {cos, operands.floats("sin", {count, half}), half, interleaved};
}

constexpr int64_t kAppendTasks = 16;  // tasks own disjoint pages, so that the last token of a slot is the one that stays

// Rotates q and k, and appends k and, unless latent, v to the pages, which are updated in place. `returned`: k is a
// result, too.
void rope_append(Call& call, bool rope, bool latent, bool interleaved, bool norms, bool returned, float eps) {
  auto& [threads, operands, results] = call;
  const Tokens old = take_pages(operands, latent).tokens;
  const Pages pages = take_pages(results, latent);
  const Tokens& tokens = pages.tokens;
  if (old.k != tokens.k || old.v != tokens.v || old.k_scales != tokens.k_scales || old.v_scales != tokens.v_scales)
    fail("pages must be updated in place");
  const int64_t head_dim = tokens.head_dim, kv_heads = tokens.num_heads;
  int64_t num_heads = 0, q_count = 0, count;
  const float *q_norm = nullptr, *k_norm = nullptr;
  Angles angles;
  const float* q = rope ? operands.floats("q", {&q_count, &num_heads, head_dim}) : nullptr;
  const float* k = operands.floats("k", {&count, kv_heads, head_dim});
  if (rope && q_count != count) fail("q has " + std::to_string(q_count) + " tokens; k has " + std::to_string(count));
  const float* v = latent ? nullptr : operands.floats("v", {count, kv_heads, head_dim});
  const int32_t* slots = operands.ints("slot_mapping", {count});
  const int64_t kv_size = kv_heads * head_dim;
  float *out = nullptr, *keys = nullptr;
  if (rope) {
    angles = take_angles(operands, count, head_dim, interleaved);
    if (norms) q_norm = operands.floats("q_norm", {head_dim}), k_norm = operands.floats("k_norm", {head_dim});
    out = results.floats("q", {count, num_heads, head_dim});
    keys = returned ? results.floats("k", {count, kv_heads, head_dim}) : scratch<float>(kRows, count * kv_size);
  }
  call.finish();
  if (rope) {
    threads.run(count, kEasy * (num_heads + kv_heads) * head_dim, [&](int64_t t) {
      auto rotated = [&](const float* from, const float* norm, int64_t heads, float* to) {
        for (int64_t h = 0; h < heads; ++h) {
          float* x = to + h * head_dim;
          if (norm)
            kernels->normalize(from + h * head_dim, norm, eps, head_dim, x);
          else
            std::memcpy(x, from + h * head_dim, head_dim * sizeof(float));
          angles.rotate(x, t);
        }
      };
      rotated(q + t * num_heads * head_dim, q_norm, num_heads, out + t * num_heads * head_dim);
      rotated(k + t * kv_size, k_norm, kv_heads, keys + t * kv_size);
    });
    k = keys;
  }
  const int64_t tasks = std::min(count, kAppendTasks), slots_in_all = tokens.num_pages * tokens.page_size;
  threads.run(tasks, kEasy * kv_size * count / std::max<int64_t>(tasks, 1), [&](int64_t task) {
    for (int64_t t = 0; t < count; ++t) {
      const int64_t page = slots[t] / tokens.page_size, offset = slots[t] % tokens.page_size;
      if (slots[t] >= 0 && slots[t] < slots_in_all && page % tasks == task)
        kernels->append[pages.type](tokens, page, offset, k + t * kv_size, latent ? nullptr : v + t * kv_size);
    }
  });
}

// Rotates the heads of x by the angles of their tokens.
void rotate(Call& call, bool interleaved) {
  auto& [threads, operands, results] = call;
  int64_t count, heads, head_dim;
  const float* x = operands.floats("x", {&count, &heads, &head_dim});
  const Angles angles = take_angles(operands, count, head_dim, interleaved);
  float* y = results.floats("y", {count, heads, head_dim});
  call.finish();
  const int64_t size = heads * head_dim;
  threads.run(count, kEasy * size, [&](int64_t t) {
    std::memcpy(y + t * size, x + t * size, size * sizeof(float));
    for (int64_t h = 0; h < heads; ++h) angles.rotate(y + t * size + h * head_dim, t);
  });
}

}  // namespace
}  // namespace jax_q4k

#pragma GCC visibility push(default)
JAX_Q4K_HANDLER(paged_attention)
    .Attr<float>("scale").Attr<float>("soft_cap").Attr<int64_t>("window").Attr<int64_t>("value_dim").Attr<bool>("contiguous")
    .Attr<bool>("sinks"));
JAX_Q4K_HANDLER(causal_attention).Attr<float>("scale").Attr<float>("soft_cap").Attr<int64_t>("window").Attr<bool>("sinks"));
JAX_Q4K_HANDLER(rope_append)
    .Attr<bool>("rope").Attr<bool>("latent").Attr<bool>("interleaved").Attr<bool>("norms").Attr<bool>("returned")
    .Attr<float>("eps"));
JAX_Q4K_HANDLER(rotate).Attr<bool>("interleaved"));
#pragma GCC visibility pop
