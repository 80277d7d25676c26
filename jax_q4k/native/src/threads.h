// Tasks on XLA's thread pool.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace jax_q4k {

// Multiply-adds. Waking a thread takes tens of microseconds, as long as about these; so many are left to each.
constexpr int64_t kWorthWaking = 1 << 19;
constexpr int64_t kWorthTaking = 1 << 14;  // that a thread takes at a time: an atomic addition for less would show
constexpr int64_t kEasy = 4;  // multiply-adds that take as long as moving, rounding or rotating a float

class Threads {
 public:
  explicit Threads(xla::ffi::ThreadPool* pool) : pool_(pool) {}

  int64_t count() const { return std::max<int64_t>(1, pool_->num_threads()); }

  // Calls task(i) for every i < count, in this thread and, where there is work enough, in those of the pool that are
  // free. `work`: multiply-adds of a task, or what takes as long. Which thread does what is open: results must not
  // depend on it. Returns when all have been called; or throws what a task threw, when none is running any more.
  template <class Task>
  void run(int64_t count, int64_t work, const Task& task) const {
    work = std::clamp<int64_t>(work, 1, kWorthWaking);
    const int64_t grain = std::max<int64_t>(kWorthTaking / work, 1), takes = (count + grain - 1) / grain;
    const int64_t worth = count / ((kWorthWaking + work - 1) / work);
    const int64_t helpers = std::min({this->count(), takes, worth}) - 1;
    if (helpers < 1) {
      for (int64_t i = 0; i < count; ++i) task(i);
      return;
    }
    // A helper may start after everything is done: all that it then touches is this.
    struct State {
      std::atomic<int64_t> next{0}, done{0};
      std::atomic<bool> failed{false};
      std::exception_ptr error;
    };
    auto state = std::make_shared<State>();
    auto help = [state, count, grain, &task] {
      int64_t start;
      while ((start = state->next.fetch_add(grain, std::memory_order_relaxed)) < count) {
        const int64_t stop = std::min(start + grain, count);
        try {
          for (int64_t i = start; i < stop; ++i) task(i);
        } catch (...) {
          if (!state->failed.exchange(true)) state->error = std::current_exception();
        }
        state->done.fetch_add(stop - start, std::memory_order_release);
      }
    };
    try {
      for (int64_t i = 0; i < helpers; ++i) pool_->Schedule(std::function<void()>(help));
    } catch (const std::bad_alloc&) {
    }  // with fewer of them, then: those that were woken must find the task alive
    help();
    for (int spins = 0; state->done.load(std::memory_order_acquire) < count; ++spins)
      if (spins > 1000) std::this_thread::yield();
    if (state->failed) std::rethrow_exception(state->error);
  }

 private:
  xla::ffi::ThreadPool* pool_;
};

}  // namespace jax_q4k
