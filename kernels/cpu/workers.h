// The threads of the CPU backend, and how the items of an operation are divided between them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cpu/thread_pool.h"

namespace moeserve::cpu {

// Only the backend's thread calls these functions, except Floats(). They return when all threads
// are done. A thread is identified by its number `worker` in [0, threads()).
class Workers {
 public:
  // `threads` must be at least 1.
  explicit Workers(int threads)
      : pool_(threads),
        scratch_(static_cast<size_t>(threads)),
        queues_(static_cast<size_t>(threads)) {}

  ThreadPool& pool() { return pool_; }
  int threads() const { return pool_.threads(); }

  // Returns scratch memory of n floats, aligned to 64 bytes, that only this thread uses. Valid
  // until the thread's next call. The memory grows and never shrinks.
  float* Floats(int worker, size_t n) {
    constexpr size_t kAlign = 64;
    std::vector<float>& floats = scratch_[static_cast<size_t>(worker)];
    if (floats.size() < n + kAlign / sizeof(float)) floats.resize(n + kAlign / sizeof(float));
    const auto address = reinterpret_cast<uintptr_t>(floats.data());
    return floats.data() + (kAlign - address % kAlign) % kAlign / sizeof(float);
  }

  // Sets the items of queue q in [0, threads()) for the next RunQueues().
  void SetQueue(int q, int64_t begin, int64_t end) {
    queues_[q].next.store(begin, std::memory_order_relaxed);
    queues_[q].end = end;
  }
  // Calls run(begin, end of its queue, worker) for every `step` items of the queues [0, queues).
  // Each thread has a queue of adjacent items, the same one in every call with as many queues. A
  // thread whose queue is empty takes items from the other queues, so that a descheduled thread
  // does not delay the others.
  template <typename Run>
  void RunQueues(int queues, int64_t step, const Run& run) {
    pool_.Run(queues, [&](int64_t, int worker) {
      for (int i = 0; i < queues; ++i) {
        Queue& queue = queues_[(worker + i) % queues];
        for (;;) {
          const int64_t begin = queue.next.fetch_add(step, std::memory_order_relaxed);
          if (begin >= queue.end) break;
          run(begin, queue.end, worker);
        }
      }
    });
  }
  // Runs body(begin, end, worker) on parts of [0, rows). If rows * work_per_row (in elementary
  // operations) is small, the calling thread runs all rows. Else a thread mostly gets the same rows
  // in all operations of a step, which its cache still holds from the operation before.
  template <typename Body>
  void ForRows(int64_t rows, int64_t work_per_row, const Body& body) {
    constexpr int64_t kInlineWork =
        1 << 15;  // with less work, handing parts to threads costs more than it saves
    if (threads() == 1 || rows * work_per_row < kInlineWork || rows < 2) {
      body(int64_t{0}, rows, 0);
      return;
    }
    const int64_t part = std::max<int64_t>(kInlineWork / 2 / std::max<int64_t>(work_per_row, 1), 1);
    const int queues = static_cast<int>(std::min<int64_t>(threads(), (rows + part - 1) / part));
    for (int q = 0; q < queues; ++q) SetQueue(q, rows * q / queues, rows * (q + 1) / queues);
    RunQueues(queues, part, [&](int64_t begin, int64_t end, int worker) {
      body(begin, std::min(begin + part, end), worker);
    });
  }
  // Like ForRows(), with body(row).
  template <typename Body>
  void ForEachRow(int64_t rows, int64_t work_per_row, const Body& body) {
    ForRows(rows, work_per_row, [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; ++r) body(r);
    });
  }

 private:
  // The part [next, end) of some numbered items that one thread takes first.
  struct alignas(64) Queue {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  ThreadPool pool_;
  std::vector<std::vector<float>> scratch_;  // [threads]
  std::vector<Queue> queues_;                // [threads]
};

}  // namespace moeserve::cpu
