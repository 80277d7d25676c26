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

void start_query(Query& query, float* o, int64_t value_dim) {
  query.o = o, query.m = -std::numeric_limits<float>::infinity(), query.l = 0, query.seen = false;
  std::fill_n(o, value_dim, 0.0f);
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

// A part of a context is tokens [part * kPart, (part + 1) * kPart). It has a softmax of its own, and the parts are
// merged in order, so that a token's sums depend neither on the number of threads nor on the other tokens of its piece.
constexpr int64_t kPart = 256;
constexpr int64_t kSharing = 64;  // queries that share the tokens that are read, unless one token has more
constexpr int64_t kTasks = 16;  // per thread: another program may delay one
constexpr int64_t kMostStored = 1 << 26;  // floats of outputs of parts that are separate tasks

// Pieces of sequences: the last tokens of each one's context, and what they see of it.
struct Pieces {
  Tokens tokens;
  PageType type;
  int64_t batch, time, num_heads;
  const float* q;         // (batch, time, num_heads, head_dim)
  const int32_t* tables;  // page ids (batch, per_sequence); null: page b is sequence b
  int64_t per_sequence;
  const int32_t *lens;     // (batch,), tokens of each sequence; null: those of its piece
  const int32_t* lengths;  // (batch,), tokens of each piece; null: one token, which an empty sequence lacks
  int64_t window;                 // 0: all
  const float* sinks;             // (num_heads,), or null
  float* out;                     // (batch, time, num_heads, value_dim); zeros after a piece
  AttentionOptions options;
};

// Some tokens of a piece, with the queries of one KV head, and the keys [first, last) that any of them sees.
struct Block {
  int64_t sequence, head, token, count, before, first, last;

  int64_t first_part() const { return first / kPart; }
  int64_t parts() const { return std::max<int64_t>((last + kPart - 1) / kPart - first_part(), 1); }
};

// softmax(scale * q . K) V of each token over the tokens of its sequence up to itself.
void attend(const Threads& threads, const Pieces& pieces) {
  const Tokens& tokens = pieces.tokens;
  const int64_t head_dim = tokens.head_dim, value_dim = tokens.value_dim, num_heads = pieces.num_heads;
  if (num_heads == 0) return;
  const int64_t group = num_heads / tokens.num_heads, capacity = pieces.per_sequence * tokens.page_size;
  const int64_t most = std::max<int64_t>(kSharing / group, 1);
  auto seen_last = [&](int64_t before, int64_t token) { return std::min(before + token + 1, capacity); };
  auto seen_first = [&](int64_t last) { return pieces.window > 0 ? std::max<int64_t>(last - pieces.window, 0) : 0; };

  std::vector<Block> blocks;
  int64_t parts = 0, work = 0;
  for (int64_t b = 0; b < pieces.batch; ++b) {
    const int64_t length = std::clamp<int64_t>(pieces.lengths ? pieces.lengths[b] : pieces.lens[b], 0, pieces.time);
    const int64_t before = pieces.lens ? std::max<int64_t>(pieces.lens[b] - length, 0) : 0, row = num_heads * value_dim;
    std::fill_n(pieces.out + (b * pieces.time + length) * row, (pieces.time - length) * row, 0.0f);
    for (int64_t head = 0; head < tokens.num_heads; ++head)
      for (int64_t end = length; end > 0;) {  // longest first
        const int64_t token = (end - 1) / most * most, last = seen_last(before, end - 1);
        const Block block{b, head, token, end - token, before, seen_first(seen_last(before, token)), last};
        blocks.push_back(block);
        parts += block.parts(), work += block.count * group * (block.last - block.first) * (head_dim + value_dim);
        end = token;
      }
  }

  struct Task {
    size_t block;
    int64_t part, parts;  // from the block's first
    int64_t queries;      // index of its queries if the block's parts are separate tasks, else -1
  };
  std::vector<Task> tasks;
  std::vector<Task> divided;  // their first tasks
  int64_t stored = 0;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const int64_t count = blocks[i].parts();
    const int64_t size = blocks[i].count * group;
    const bool enough = count * kTasks * threads.count() <= parts;
    if (count == 1 || enough || (stored + count * size) * value_dim > kMostStored) {
      tasks.push_back({i, 0, count, -1});
      continue;
    }
    divided.push_back({i, 0, count, stored});
    for (int64_t part = 0; part < count; ++part, stored += size) tasks.push_back({i, part, 1, stored});
  }
  Query* part_queries = scratch<Query>(kPartQueries, stored);
  float* part_outputs = scratch<float>(kPartOutputs, stored * value_dim);

  // Calls visit(i, token, head, vector) for each query of a block; `vector` is its index in q and out.
  auto visit_queries = [&](const Block& block, const auto& visit) {
    for (int64_t token = block.token, i = 0; token < block.token + block.count; ++token)
      for (int64_t head = block.head * group; head < (block.head + 1) * group; ++head, ++i)
        visit(i, token, head, (block.sequence * pieces.time + token) * num_heads + head);
  };
  auto attend_part = [&](const Block& block, int64_t part, Query* queries, float* o) {
    const int64_t count = block.count * group, start = (block.first_part() + part) * kPart;
    visit_queries(block, [&](int64_t i, int64_t token, int64_t, int64_t vector) {
      Query& query = queries[i];
      start_query(query, o + i * value_dim, value_dim);
      query.q = pieces.q + vector * head_dim;
      query.last = seen_last(block.before, token), query.first = seen_first(query.last);
    });
    const int32_t row = static_cast<int32_t>(block.sequence);
    const int32_t* pages = pieces.tables ? pieces.tables + block.sequence * pieces.per_sequence : &row;
    kernels->attend[pieces.type](tokens, pages, block.head, std::max(start, block.first), std::min(start + kPart, block.last),
                                 queries, static_cast<int>(count), pieces.options);
  };
  auto merge = [&](const Block& block, const Query* part, Query* to) {
    for (int64_t i = 0; i < block.count * group; ++i) kernels->merge(part[i], value_dim, to + i);
  };
  auto finish = [&](const Block& block, const Query* queries) {
    visit_queries(block, [&](int64_t i, int64_t, int64_t head, int64_t vector) {
      finish_query(queries[i], pieces.sinks ? pieces.sinks + head : nullptr, value_dim, pieces.out + vector * value_dim);
    });
  };

  const int64_t count = static_cast<int64_t>(tasks.size());
  threads.run(count, work / std::max<int64_t>(count, 1), [&](int64_t t) {
    const Task& task = tasks[t];
    const Block& block = blocks[task.block];
    if (task.queries >= 0)
      return attend_part(block, task.part, part_queries + task.queries, part_outputs + task.queries * value_dim);
    const int64_t size = block.count * group;
    Query* queries = scratch<Query>(kQueries, 2 * size);
    float* outputs = scratch<float>(kOutputs, 2 * size * value_dim);
    attend_part(block, 0, queries, outputs);
    for (int64_t part = 1; part < task.parts; ++part) {
      attend_part(block, part, queries + size, outputs + size * value_dim);
      merge(block, queries + size, queries);
    }
    finish(block, queries);
  });
  threads.run(static_cast<int64_t>(divided.size()), stored * value_dim / std::max<int64_t>(divided.size(), 1), [&](int64_t t) {
    const Block& block = blocks[divided[t].block];
    Query* queries = part_queries + divided[t].queries;
    for (int64_t part = 1; part < divided[t].parts; ++part) merge(block, queries + part * block.count * group, queries);
    finish(block, queries);
  });
}

// Attention of pieces, or of one token per sequence, over the tokens in the block tables. `latent_values`: number of
// values that a latent key begins with; 0 if values have their own pages.
void paged_attention(Call& call, float scale, float soft_cap, int64_t window, int64_t latent_values, bool contiguous,
                     bool has_lengths, bool has_sinks) {
  auto& [threads, operands, results] = call;
  Pieces pieces{};
  int64_t head_dim;
  pieces.q = operands.floats("q", {&pieces.batch, &pieces.time, &pieces.num_heads, &head_dim});
  const Pages pages = take_pages(operands, latent_values != 0, contiguous);
  pieces.tokens = pages.tokens, pieces.type = pages.type;
  Tokens& tokens = pieces.tokens;
  if (tokens.head_dim != head_dim || pieces.num_heads % tokens.num_heads) fail("q's heads do not fit the pages");
  if (tokens.latent) check_dim("value_dim", tokens.value_dim = latent_values, head_dim);
  pieces.per_sequence = 1;
  if (!contiguous) pieces.tables = operands.ints("block_tables", {pieces.batch, &pieces.per_sequence});
  if (contiguous && tokens.num_pages != pieces.batch) fail("a contiguous cache must have one row per sequence");
  pieces.lens = operands.ints("context_lens", {pieces.batch});
  if (has_lengths) pieces.lengths = operands.ints("lengths", {pieces.batch});
  if (!has_lengths && pieces.time != 1) fail("pieces must have lengths");
  if (has_sinks) pieces.sinks = operands.floats("sinks", {pieces.num_heads});
  pieces.out = results.floats("out", {pieces.batch, pieces.time, pieces.num_heads, tokens.value_dim});
  call.finish();
  pieces.window = window, pieces.options = {scale, soft_cap};
  attend(threads, pieces);
}

// Attention of whole prompts, with contiguous keys (batch, time, heads, head_dim) and values (batch, time, heads,
// value_dim).
void causal_attention(Call& call, float scale, float soft_cap, int64_t window, bool has_sinks) {
  auto& [threads, operands, results] = call;
  Pieces pieces{};
  int64_t batch, time, num_heads, head_dim, kv_heads, value_dim;
  pieces.q = operands.floats("q", {&batch, &time, &num_heads, &head_dim});
  float* k = operands.floats("k", {batch, time, &kv_heads, head_dim});
  float* v = operands.floats("v", {batch, time, kv_heads, &value_dim});
  pieces.lengths = operands.ints("lengths", {batch});
  if (has_sinks) pieces.sinks = operands.floats("sinks", {num_heads});
  pieces.out = results.floats("out", {batch, time, num_heads, value_dim});
  call.finish();
  if (kv_heads < 1 || num_heads % kv_heads) fail("num_heads must be a multiple of num_kv_heads");
  check_dim("head_dim", head_dim), check_dim("value_dim", value_dim);
  pieces.tokens = {k, v, nullptr, nullptr, batch, kv_heads, time, head_dim, value_dim, time * kv_heads, 1, kv_heads, false};
  pieces.type = kPageF32, pieces.batch = batch, pieces.time = time, pieces.num_heads = num_heads, pieces.per_sequence = 1;
  pieces.window = window, pieces.options = {scale, soft_cap};
  attend(threads, pieces);
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
    .Attr<bool>("pieces").Attr<bool>("sinks"));
JAX_Q4K_HANDLER(causal_attention).Attr<float>("scale").Attr<float>("soft_cap").Attr<int64_t>("window").Attr<bool>("sinks"));
JAX_Q4K_HANDLER(rope_append)
    .Attr<bool>("rope").Attr<bool>("latent").Attr<bool>("interleaved").Attr<bool>("norms").Attr<bool>("returned")
    .Attr<float>("eps"));
JAX_Q4K_HANDLER(rotate).Attr<bool>("interleaved"));
#pragma GCC visibility pop
