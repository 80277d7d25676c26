// Tasks on XLA's thread pool.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jax_q4k {

// Minimum multiply-adds per thread; fewer cost less than waking it, which takes tens of microseconds.
constexpr int64_t kWorthWaking = 1 << 19;
constexpr int64_t kWorthTaking = 1 << 14;  // minimum that a thread takes at a time, else the atomic addition shows
constexpr int64_t kEasy = 4;  // cost in multiply-adds of moving, rounding or rotating a float

// An idle thread spins this long before it sleeps. The gaps between two products are shorter, and waking a thread takes
// about as long.
constexpr std::chrono::microseconds kLinger{100};

using Clock = std::chrono::steady_clock;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Tasks that threads share. Each thread processes its own range in order, then helps with what is left of the others.
// Rows that are adjacent in memory are prefetched by the hardware; a thread that jumped would wait for the first rows
// of every task. A helper may arrive when all tasks are done; it then touches nothing but this object.
struct Work {
  struct alignas(64) Next {
    std::atomic<int64_t> task;
  };
  const int64_t count, grain, parts;
  const void* task;
  void (*const call)(const void* task, int64_t i);
  std::unique_ptr<Next[]> next{new Next[parts]};
  std::atomic<int64_t> joined{0}, done{0};
  std::atomic<bool> failed{false}, awaited{false};
  std::exception_ptr error{};
  std::mutex mutex{};
  std::condition_variable finished{};

  Work(int64_t count, int64_t grain, int64_t parts, const void* task, void (*call)(const void*, int64_t))
      : count(count), grain(grain), parts(parts), task(task), call(call) {
    for (int64_t part = 0; part < parts; ++part) next[part].task = first(part);
  }

  int64_t first(int64_t part) const { return count / parts * part + std::min(part, count % parts); }

  void help() {
    const int64_t own = joined.fetch_add(1, std::memory_order_relaxed);
    for (int64_t part = own; part < own + parts; ++part) help(next[part % parts].task, first(part % parts + 1));
  }

  void help(std::atomic<int64_t>& next_task, int64_t end) {
    int64_t start;
    while ((start = next_task.fetch_add(grain, std::memory_order_relaxed)) < end) {
      const int64_t stop = std::min(start + grain, end);
      try {
        for (int64_t i = start; i < stop; ++i) call(task, i);
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
      }
      if (done.fetch_add(stop - start) + stop - start == count && awaited) {
        const std::lock_guard<std::mutex> lock(mutex);
        finished.notify_one();
      }
    }
  }

  // Returns when all tasks are done. A late helper has lost its processor to another program. A waiting thread that
  // sleeps soon runs again; one that spins or yields waits as long as that program runs.
  void wait() {
    for (const auto end = Clock::now() + kLinger; done < count && Clock::now() < end;)
      for (int i = 0; i < 64 && done.load(std::memory_order_acquire) < count; ++i) pause();
    if (done == count) return;
    awaited = true;
    std::unique_lock<std::mutex> lock(mutex);
    finished.wait(lock, [&] { return done == count; });
  }
};

// Helpers of all pools that have finished and linger.
class Helpers {
 public:
  static Helpers& all() {
    static Helpers& helpers = *new Helpers;  // never destroyed: some may linger when the process ends
    return helpers;
  }

  // Gives work to at most `wanted` lingering helpers; returns how many there were.
  int64_t call(const std::shared_ptr<Work>& work, int64_t wanted) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int64_t called = std::min(waiting_, wanted);
    if (called) work_ = work, called_ = called, calls_.fetch_add(1, std::memory_order_release);
    return called;
  }

  void help_and_linger(std::shared_ptr<Work> work) {
    while (work) {
      work->help();
      work = next();
    }
  }

 private:
  // Returns work that arrives within kLinger, or nullptr.
  std::shared_ptr<Work> next() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++waiting_;
    for (const auto end = Clock::now() + kLinger; !called_ && Clock::now() < end;) {
      const int64_t seen = calls_.load(std::memory_order_relaxed);
      lock.unlock();
      for (int i = 0; i < 64 && calls_.load(std::memory_order_acquire) == seen; ++i) pause();
      lock.lock();
    }
    --waiting_;
    if (!called_) return nullptr;
    return --called_ ? work_ : std::move(work_);
  }

  std::mutex mutex_;
  std::shared_ptr<Work> work_;        // the latest
  int64_t waiting_ = 0, called_ = 0;  // called_: helpers that have yet to take work_
  std::atomic<int64_t> calls_{0};
};

class Threads {
 public:
  explicit Threads(xla::ffi::ThreadPool* pool) : pool_(pool) {}

  int64_t count() const { return std::max<int64_t>(1, pool_->num_threads()); }

  // Calls task(i) for every i < count, in this thread and, if there is enough work, in free threads of the pool.
  // `work`: cost of a task in multiply-adds. Results must not depend on which thread runs a task. Returns when all
  // calls have returned; rethrows an exception of a task when none is running any more.
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
    auto call = [](const void* task, int64_t i) { (*static_cast<const Task*>(task))(i); };
    const std::shared_ptr<Work> shared(new Work(count, grain, helpers + 1, &task, call));
    try {
      for (int64_t i = Helpers::all().call(shared, helpers); i < helpers; ++i)
        pool_->Schedule([shared] { Helpers::all().help_and_linger(shared); });
    } catch (const std::bad_alloc&) {
    }  // goes on with fewer: the helpers already woken need the task alive
    shared->help();
    shared->wait();
    if (shared->failed) std::rethrow_exception(shared->error);
  }

 private:
  xla::ffi::ThreadPool* pool_;
};

}  // namespace jax_q4k
