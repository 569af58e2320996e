// How often each token type was sent to each expert: what pointwise mutual information, expert
// similarity and expert synergy are computed from.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace moeserve {

// A table [vocabulary][experts of all routed blocks] of 32-bit counters that stop at their maximum.
// One thread adds; any thread reads, without a lock and without stopping the writer: a copy taken
// while tokens run may hold a part of the running step.
class TokenExpertCounts {
 public:
  // Bytes of the table for such a model.
  static int64_t BytesFor(int64_t vocabulary, int64_t experts) {
    return vocabulary * experts * static_cast<int64_t>(sizeof(uint32_t));
  }

  TokenExpertCounts(int64_t vocabulary, int64_t experts)
      : vocabulary_(vocabulary),
        experts_(experts),
        counts_(
            std::make_unique<std::atomic<uint32_t>[]>(static_cast<size_t>(vocabulary * experts))) {}

  int64_t vocabulary() const { return vocabulary_; }
  int64_t experts() const { return experts_; }

  // Where a pair's counter lies. `expert` numbers the experts of all blocks (RouteLayout).
  size_t IndexOf(int32_t token, uint32_t expert) const {
    return static_cast<size_t>(token * experts_ + expert);
  }

  // Adds 1 at each of `indices`. The table is larger than the caches and every token touches
  // another place of it, so counters are asked for well before they are needed.
  void Add(std::span<const size_t> indices) {
    constexpr size_t kAhead = 24;
    for (size_t i = 0; i < indices.size(); ++i) {
      if (i + kAhead < indices.size()) __builtin_prefetch(&counts_[indices[i + kAhead]], 1);
      std::atomic<uint32_t>& count = counts_[indices[i]];
      const uint32_t old = count.load(std::memory_order_relaxed);
      count.store(old + (old != UINT32_MAX), std::memory_order_relaxed);
    }
  }

  int64_t size() const { return vocabulary_ * experts_; }
  // Replaces the counters from `first` on.
  void Assign(int64_t first, std::span<const uint32_t> counts) {
    for (size_t i = 0; i < counts.size(); ++i) {
      counts_[static_cast<size_t>(first) + i].store(counts[i], std::memory_order_relaxed);
    }
  }

  // [vocabulary * count] the columns [first, first + count), tokens outermost.
  std::vector<uint32_t> Columns(int64_t first, int64_t count) const {
    std::vector<uint32_t> out(static_cast<size_t>(vocabulary_ * count));
    for (int64_t t = 0; t < vocabulary_; ++t) {
      for (int64_t e = 0; e < count; ++e) {
        out[static_cast<size_t>(t * count + e)] =
            counts_[static_cast<size_t>(t * experts_ + first + e)].load(std::memory_order_relaxed);
      }
    }
    return out;
  }

 private:
  const int64_t vocabulary_;
  const int64_t experts_;
  std::unique_ptr<std::atomic<uint32_t>[]> counts_;
};

}  // namespace moeserve
