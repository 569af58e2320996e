// A uniform sample of the router inputs of a block, for representation collapse (X-MoE, eq. 11).
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

namespace moeserve {

// Rows [n, width] of one routed block, each with the expert of its largest weight.
struct HiddenSample {
  int64_t width = 0;
  int64_t capacity = 0;  // n is the smaller of this and `seen`
  uint64_t seen = 0;     // rows offered
  std::vector<float> rows;
  std::vector<int32_t> experts;  // [n]

  int64_t size() const { return static_cast<int64_t>(experts.size()); }
};

// Reservoir sampling: keeps `capacity` of all offered rows, each with the same probability. Not
// thread-safe.
class HiddenReservoir {
 public:
  HiddenReservoir(int64_t capacity, int64_t width, uint64_t seed) : random_(seed) {
    sample_.width = width;
    sample_.capacity = capacity;
  }

  // `row` [width]
  void Offer(const float* row, int32_t expert) {
    const uint64_t n = sample_.seen++;
    if (sample_.size() < sample_.capacity) {
      sample_.rows.insert(sample_.rows.end(), row, row + sample_.width);
      sample_.experts.push_back(expert);
      return;
    }
    const uint64_t place = std::uniform_int_distribution<uint64_t>(0, n)(random_);
    if (place >= static_cast<uint64_t>(sample_.capacity)) return;
    std::copy(row, row + sample_.width,
              sample_.rows.begin() + static_cast<std::ptrdiff_t>(place) * sample_.width);
    sample_.experts[place] = expert;
  }

  const HiddenSample& sample() const { return sample_; }

 private:
  std::mt19937_64 random_;
  HiddenSample sample_;
};

}  // namespace moeserve
