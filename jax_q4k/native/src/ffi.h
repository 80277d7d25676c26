// Basis of every handler: checked operands and results, scratch memory, errors.

#pragma once

#include <algorithm>
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

namespace ffi = xla::ffi;
using Dims = ffi::Span<const int64_t>;

struct Invalid {
  std::string message;
};
[[noreturn]] inline void fail(std::string message) { throw Invalid{std::move(message)}; }

inline std::string text(Dims dims) {
  std::string s = "(";
  for (size_t i = 0; i < dims.size(); ++i) s += (i ? ", " : "") + std::to_string(dims[i]);
  return s + ")";
}

// An expected axis size, or a pointer that receives the actual size.
struct Axis {
  int64_t size = -1;
  int64_t* found = nullptr;
  Axis(int64_t size) : size(size) {}
  Axis(int64_t* found) : found(found) {}
};

// The operands or results of a call, in order; each is checked when it is taken.
template <class Buffers>
class OperandReader {
 public:
  OperandReader(const char* what, const Buffers& buffers) : what_(what), buffers_(buffers) {}

  // Rank of the next buffer; 0 if there is none.
  size_t rank() const { return at_ < buffers_.size() ? get(at_).dimensions().size() : 0; }

  // Takes the next buffer; `dims` of -1 match any size.
  ffi::AnyBuffer next(const char* name, std::initializer_list<ffi::DataType> types, std::initializer_list<Axis> axes) {
    std::vector<int64_t> dims;
    for (const Axis& axis : axes) dims.push_back(axis.size);
    ffi::AnyBuffer buffer = next(name, types, Dims(dims.data(), dims.size()));
    for (size_t i = 0; i < axes.size(); ++i)
      if (axes.begin()[i].found) *axes.begin()[i].found = buffer.dimensions()[i];
    return buffer;
  }
  ffi::AnyBuffer next(const char* name, std::initializer_list<ffi::DataType> types, Dims dims) {
    if (at_ >= buffers_.size()) fail(std::string("too few ") + what_ + ": " + name + " is missing");
    ffi::AnyBuffer buffer = get(at_++);
    if (std::find(types.begin(), types.end(), buffer.element_type()) == types.end())
      fail(std::string(name) + " has an element type that this call does not take");
    bool fits = buffer.dimensions().size() == dims.size();
    for (size_t i = 0; fits && i < dims.size(); ++i) fits = dims[i] < 0 || dims[i] == buffer.dimensions()[i];
    if (!fits) fail(std::string(name) + " has shape " + text(buffer.dimensions()) + "; it must be " + text(dims));
    return buffer;
  }
  float* floats(const char* name, std::initializer_list<Axis> axes) {
    return static_cast<float*>(next(name, {ffi::F32}, axes).untyped_data());
  }
  const int32_t* ints(const char* name, std::initializer_list<Axis> axes) {
    return static_cast<const int32_t*>(next(name, {ffi::S32}, axes).untyped_data());
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
using Operands = OperandReader<ffi::RemainingArgs>;
using Results = OperandReader<ffi::RemainingRets>;

// Thread-local memory that grows and is kept, so that the steps of a loop need no new pages from the system. `kind`
// separates uses that overlap in time.
enum Scratch { kSpans, kBlocks, kNormalized, kTotals, kRows, kUp, kHidden, kQueries, kOutputs, kPartQueries, kPartOutputs, kOfTokens, kGathered, kScratches };
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

struct Call {
  Threads threads;
  Operands operands;
  Results results;

  // Checks that nothing is left to take.
  void finish() const { operands.finish(), results.finish(); }
};

// Wraps `body` for XLA: its exceptions become errors of the program.
template <class... Attributes>
auto handler(void (*body)(Call&, Attributes...)) {
  return [body](ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, Attributes... attributes) {
    try {
      Call call{Threads(&pool), Operands("operands", args), Results("results", rets)};
      body(call, attributes...);
      return ffi::Error::Success();
    } catch (const Invalid& invalid) {
      return ffi::Error::InvalidArgument("jax_q4k: " + invalid.message);
    } catch (const std::bad_alloc&) {
      return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jax_q4k: out of memory");
    } catch (const std::exception& other) {
      return ffi::Error::Internal(std::string("jax_q4k: ") + other.what());
    }
  };
}

}  // namespace jax_q4k

// Defines a symbol for XLA: JAX_Q4K_HANDLER(name).Attr<...>("...")...);
#define JAX_Q4K_HANDLER(name) XLA_FFI_DEFINE_HANDLER_SYMBOL( \
    jax_q4k_##name, jax_q4k::handler(jax_q4k::name), \
    xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().RemainingArgs().RemainingRets()
