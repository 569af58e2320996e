// Histograms of sizes and times that the engine measures.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace moeserve {

// A histogram with fixed bucket bounds; plain data, copied as a whole. Not thread-safe.
class BucketCounts {
 public:
  static constexpr size_t kMaxBuckets = 24;

  // `bounds` are ascending upper bounds without +Inf, fewer than kMaxBuckets, and outlive the
  // histogram.
  explicit constexpr BucketCounts(std::span<const double> bounds) : bounds_(bounds) {}

  void Observe(double value, uint64_t times = 1) {
    const auto bucket = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
    counts_[static_cast<size_t>(bucket)] += times;
    sum_ += value * static_cast<double>(times);
  }

  // Adds the observations of `other`, which must have the same bounds.
  void Add(const BucketCounts& other) {
    for (size_t i = 0; i < kMaxBuckets; ++i) counts_[i] += other.counts_[i];
    sum_ += other.sum_;
  }

  std::span<const double> bounds() const { return bounds_; }
  // Returns one count per bucket, not cumulative: bucket i counts the values above bounds()[i - 1]
  // and up to bounds()[i]; the last bucket counts the values above all bounds.
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

// Bucket bounds for the phases of a request, in seconds.
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
  // Time from submission to the first admission, or to the end of a request that is never admitted.
  // Every sequence that leaves the queue counts once.
  BucketCounts queue_seconds{kRequestPhaseBounds};
  // Time from admission to the first token, or to the end if no token was requested.
  BucketCounts prefill_seconds{kRequestPhaseBounds};
  // For finished sequences: decode_seconds is the time from the first token to the end,
  // inference_seconds the time from admission to the end.
  BucketCounts decode_seconds{kRequestPhaseBounds};
  BucketCounts inference_seconds{kRequestPhaseBounds};
  // One observation per step: its rows, its sequences and its time. prefill_step_seconds holds the
  // steps with prompt rows or recomputed rows, decode_step_seconds all remaining steps.
  BucketCounts step_tokens{kStepTokensBounds};
  BucketCounts step_sequences{kStepSequencesBounds};
  BucketCounts prefill_step_seconds{kStepSecondsBounds};
  BucketCounts decode_step_seconds{kStepSecondsBounds};

  // Adds the observations of `other`.
  void Add(const EngineHistograms& other) {
    queue_seconds.Add(other.queue_seconds);
    prefill_seconds.Add(other.prefill_seconds);
    decode_seconds.Add(other.decode_seconds);
    inference_seconds.Add(other.inference_seconds);
    step_tokens.Add(other.step_tokens);
    step_sequences.Add(other.step_sequences);
    prefill_step_seconds.Add(other.prefill_step_seconds);
    decode_step_seconds.Add(other.decode_step_seconds);
  }
};

}  // namespace moeserve
