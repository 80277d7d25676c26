// Matrices among a handler's operands, and their products with rows of activations.

#pragma once

#include "ffi.h"
#include "subnormals.h"

namespace jax_q4k {
namespace {

inline Type type_of(std::string_view name) {
  for (int i = 0; i < kTypes; ++i)
    if (kLayouts[i].name == name) return static_cast<Type>(i);
  fail("unknown format " + std::string(name));
}

// Element type of a float matrix.
inline ffi::DataType element_of(Type type) { return type == kF32 ? ffi::F32 : type == kF16 ? ffi::F16 : ffi::BF16; }

// Takes a matrix. Its planes may have an additional first axis, of a stack; an index then follows. Negative indices
// count from the end; indices out of range are clamped.
inline Matrix take_matrix(Operands& operands, std::string_view format) {
  Matrix w{0, 0, type_of(format), {}};
  const Layout& layout = kLayouts[w.type];
  if (w.type >= kBlockFormats) {
    w.planes[0] = static_cast<const uint8_t*>(operands.next("weights", {element_of(w.type)}, {&w.n, &w.k}).untyped_data());
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

inline Activation activation_of(std::string_view name) {
  for (int i = 0; i < kActivations; ++i)
    if (kActivationNames[i] == name) return static_cast<Activation>(i);
  fail("unknown activation " + std::string(name));
}

// Activations in the form that a product takes: float rows, int8 rows (`rows`), or int8 blocks of 16 rows (`blocks`).
struct Prepared {
  int64_t m, k, spans;
  const float* x;
  const RowSpan* rows = nullptr;
  const BlockSpan* blocks = nullptr;
  bool few = m <= kFloatGemvRows;  // whether float rows are multiplied by the product for few rows

  // Whether a task should multiply a whole tile of the matrix.
  bool in_tiles() const { return blocks || (!rows && !few); }
};

inline Prepared prepare(const Threads& threads, const float* x, int64_t m, int64_t k, const float* norm, float eps, bool quantized) {
  Prepared p{m, k, (k + kSpan - 1) / kSpan, x};
  auto row = [&](int64_t j, float* to) {  // row j, in `to` if it is normalized
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

// Multiplies rows [first, first + count) of w by all activations: y[j * stride + r].
inline void multiply(const Matrix& w, int64_t first, int64_t count, const Prepared& x, float* y, int64_t stride) {
  const Subnormals kept(JAX_Q4K_HAS_SUBNORMALS(w.type));
  if (x.rows) {
    kernels->gemv[w.type](w, first, count, x.rows, static_cast<int>(x.m), y, stride);
  } else if (x.blocks) {
    const int64_t blocks = (x.m + kLanes - 1) / kLanes;
    float* total = scratch<float>(kTotals, kTile * blocks * kLanes);
    kernels->gemm[w.type](w, first, count, x.blocks, blocks, scratch<uint8_t>(kUnpacked, kUnpackedBytes), total);
    for (int64_t b = 0; b < x.m; b += kLanes)
      kernels->transpose(total + b, blocks * kLanes, count, std::min<int64_t>(kLanes, x.m - b), y + b * stride, stride);
  } else if (x.few) {
    kernels->float_gemv[w.type](w, first, count, x.x, static_cast<int>(x.m), y, stride);
  } else {
    kernels->float_gemm[w.type](w, first, count, x.x, x.m, scratch<float>(kTotals, kTile * (kSpan + x.m)), y, stride);
  }
}

}  // namespace
}  // namespace jax_q4k
