// A uniform sample of a block's router inputs, used to measure representation collapse (X-MoE, eq.
// 11).
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

namespace moeserve {

// Sampled router inputs [n, width] of one routed block, each with the expert that has the largest
// gate weight for the row.
struct HiddenSample {
  int64_t width = 0;
  int64_t capacity = 0;  // largest number of rows; n = min(capacity, seen)
  uint64_t seen = 0;     // number of rows offered
  std::vector<float> rows;
  std::vector<int32_t> experts;  // [n]

  int64_t size() const { return static_cast<int64_t>(experts.size()); }
};

// Reservoir sampling: keeps `capacity` of all offered rows, each row with the same probability. Not
// thread-safe.
class HiddenReservoir {
 public:
  HiddenReservoir(int64_t capacity, int64_t width, uint64_t seed) : random_(seed) {
    sample_.width = width;
    sample_.capacity = capacity;
  }

  // Offers the row `row` [width], for which `expert` has the largest gate weight.
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
