// Subnormal floats, which XLA's threads flush to zero.

#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jax_q4k {

// If `kept`, lets this thread compute with subnormal floats as in IEEE 754 for the lifetime of the object.
class Subnormals {
 public:
  explicit Subnormals(bool kept) : kept_(kept) {
    if (kept_) before_ = control(), set(before_ & ~kFlush);
  }
  ~Subnormals() {
    if (kept_) set(before_);
  }
  Subnormals(const Subnormals&) = delete;
  Subnormals& operator=(const Subnormals&) = delete;

 private:
#if defined(__x86_64__)
  using Control = uint32_t;
  static constexpr Control kFlush = 0x8040;  // flush results, and operands, to zero
  static Control control() { return _mm_getcsr(); }
  static void set(Control value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
  using Control = uint64_t;
  static constexpr Control kFlush = 1 << 24;
  static Control control() {
    Control value;
    asm volatile("mrs %0, fpcr" : "=r"(value)::"memory");
    return value;
  }
  static void set(Control value) { asm volatile("msr fpcr, %0" ::"r"(value) : "memory"); }
#else
  using Control = uint32_t;
  static constexpr Control kFlush = 0;
  static Control control() { return 0; }
  static void set(Control) {}
#endif

  const bool kept_;
  Control before_ = 0;
};

}  // namespace jax_q4k
