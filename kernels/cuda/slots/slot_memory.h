// Divides a piece of memory among experts of different sizes.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace moeserve::cuda {

// First fit: a request gets the first hole that is large enough; holes that touch become one.
class SlotMemory {
 public:
  // All places begin at multiples of this.
  static constexpr int64_t kAlignment = 256;
  static int64_t RoundUp(int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  explicit SlotMemory(int64_t bytes = 0);
  // Returns the offset of `bytes`, at least 1; nullopt if no hole is large enough.
  std::optional<int64_t> Take(int64_t bytes);
  // Gives back what Take(bytes) has returned.
  void Give(int64_t offset, int64_t bytes);
  // Returns the number of holes.
  int holes() const { return static_cast<int>(holes_.size()); }

 private:
  std::map<int64_t, int64_t> holes_;  // begin to end
};

}  // namespace moeserve::cuda
