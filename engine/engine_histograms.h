// Histograms of sizes and times that the engine measures.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace moeserve {

// Counts observations by size in buckets of fixed bounds; plain data, copied as a whole. Not for
// use by two threads.
class BucketCounts {
 public:
  static constexpr size_t kMaxBuckets = 24;

  // Ascending upper bounds without +Inf, fewer than kMaxBuckets; they outlive the counts.
  explicit constexpr BucketCounts(std::span<const double> bounds) : bounds_(bounds) {}

  void Observe(double value, uint64_t times = 1) {
    const auto bucket = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
    counts_[static_cast<size_t>(bucket)] += times;
    sum_ += value * static_cast<double>(times);
  }

  std::span<const double> bounds() const { return bounds_; }
  // One count per bound, of values above the bound before it; then the count above all bounds.
  std::span<const uint64_t> counts() const { return {counts_.data(), bounds_.size() + 1}; }
  double sum() const { return sum_; }
  uint64_t total() const {
    uint64_t total = 0;
    for (const uint64_t count : counts()) total += count;
    return total;
  }

 private:
  std::span<const double> bounds_;
  std::array<uint64_t, kMaxBuckets> counts_{};
  double sum_ = 0.0;
};

// Bounds of the phases of a request, in seconds.
inline constexpr std::array kRequestPhaseBounds = {.3,  .5,   .8,   1.,   1.5,  2.,    2.5,
                                                   5.,  10.,  15.,  20.,  30.,  40.,   50.,
                                                   60., 120., 240., 480., 960., 1920., 7680.};
inline constexpr std::array kStepSecondsBounds = {.0005, .001, .0025, .005, .01, .025, .05, .1,
                                                  .25,   .5,   1.,    2.5,  5.,  10.,  30.};
inline constexpr std::array kStepTokensBounds = {
    1., 2., 4., 8., 16., 32., 64., 128., 256., 512., 1024., 2048., 4096., 8192., 16384.};
inline constexpr std::array kStepSequencesBounds = {1.,   2.,   4.,   8.,    16.,   32.,  64.,
                                                    128., 256., 512., 1024., 2048., 4096.};

// Times are in seconds of a steady clock. A sequence is one sample of one request.
struct EngineHistograms {
  // From submission to the first admission or the end: every sequence that leaves the queue counts
  // once.
  BucketCounts queue_seconds{kRequestPhaseBounds};
  // From admission to the first token, or to the end if no token was requested.
  BucketCounts prefill_seconds{kRequestPhaseBounds};
  // Of finished sequences: from the first token to the end, and from admission to the end.
  BucketCounts decode_seconds{kRequestPhaseBounds};
  BucketCounts inference_seconds{kRequestPhaseBounds};
  // Of every step: rows, sequences, and time. prefill_step_seconds: steps with rows of prompts or
  // recomputed rows; decode_step_seconds: all others.
  BucketCounts step_tokens{kStepTokensBounds};
  BucketCounts step_sequences{kStepSequencesBounds};
  BucketCounts prefill_step_seconds{kStepSecondsBounds};
  BucketCounts decode_step_seconds{kStepSecondsBounds};
};

}  // namespace moeserve
