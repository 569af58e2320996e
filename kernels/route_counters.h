// Counters of routing plans. A backend adds every step to them while it runs the step.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"

namespace moeserve {

// The kind of a token of a step. Recomputed tokens were counted in an earlier step; padding fills a
// step up and is not counted.
inline constexpr uint8_t kTokenPrefill = 0, kTokenDecode = 1, kTokenRecompute = 2,
                         kTokenPadding = 255;

// A routed block whose plans are counted.
struct CountedBlock {
  int slot = 0;  // of its plans (RouteArgs)
  int num_experts = 1;
  int sub_tokens = 1;                      // rows of a token
  int most_distinct = 1;                   // most experts that one token can touch
  bool diverse = false;                    // contributes to the diversity histogram
  std::vector<int64_t> expert_parameters;  // [num_experts]
};

struct CountSettings {
  std::vector<CountedBlock> blocks;
  // Rows of the token x expert table; 0: no table is kept.
  int64_t vocabulary = 0;
};

// Sums over all steps for one expert. All but `recomputed_selections` and `visits` leave recomputed
// tokens out.
struct ExpertCount {
  uint64_t selections = 0;
  uint64_t decode_selections = 0;
  uint64_t recomputed_selections = 0;
  uint64_t touching_tokens = 0;  // tokens with at least one row that chose the expert
  uint64_t visits = 0;           // steps in which a row chose the expert
  double weight_sum = 0.0;
};

// Bucket i counts values of at most 2^i, the last one all larger ones.
template <size_t kBuckets>
struct PowerHistogram {
  std::array<uint64_t, kBuckets> buckets{};
  uint64_t sum = 0;

  void Observe(uint64_t value, uint64_t times = 1) {
    size_t i = 0;
    while (i + 1 < kBuckets && value > uint64_t{1} << i) ++i;
    buckets[i] += times;
    sum += value * times;
  }
};

// Counts over the whole model. Arrays of two are indexed by the kind of step: 1 where all its
// tokens were kTokenDecode, else 0.
struct ModelCounts {
  uint64_t steps = 0;
  uint64_t tokens[3] = {};  // by kTokenPrefill and so on
  // Over every step and routed block, recomputed rows included: rows of an expert that had any;
  // experts that had any.
  PowerHistogram<15> expert_rows[2];
  PowerHistogram<11> active_experts[2];
};

struct BlockCounts {
  std::vector<ExpertCount> experts;
  std::vector<uint64_t> distinct_histogram;  // [most_distinct + 1] tokens by experts they touched
  uint64_t nonfinite_rows = 0;
};

struct CountsSnapshot {
  ModelCounts model;
  std::vector<uint64_t> diversity_histogram;  // [sum of most_distinct of the diverse blocks + 1]
  std::vector<BlockCounts> blocks;            // in the order of CountSettings::blocks
};

// A snapshot of the shape that `settings` ask for, with every count 0.
CountsSnapshot ZeroCounts(const CountSettings& settings);

// Work of the experts of all counted blocks for one token of a step, recomputed tokens included.
struct TokenRoutes {
  uint64_t parameters = 0;  // of the experts, once for every (row, expert) pair
  uint64_t routes = 0;      // (row, expert) pairs
};

// Counters of one model, 0 at first. Made by a backend, which outlives them; destroyed when no step
// that counts is running.
class RouteCounters {
 public:
  virtual ~RouteCounters() = default;
  // Makes all finished steps visible to Read(). A device is waited for; on the CPU every step is
  // visible when it ends. The backend's thread, between steps. Internal where the device fails.
  virtual Status Refresh() = 0;
  // Whole steps, at least those of the last Refresh(). Any thread.
  virtual CountsSnapshot Read() const = 0;
  // Copies elements [first, first + part.size()) of the token x expert table [vocabulary, experts
  // of all blocks]: how often each token was sent to each expert, saturating at UINT32_MAX. Any
  // thread; may contain a part of the running step. Internal where the device fails.
  virtual Status ReadTokenExperts(int64_t first, std::span<uint32_t> part) const = 0;
};

}  // namespace moeserve
