// Counts on the device what the experts do, from the routing plans of every step.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/handles.h"
#include "kernels/cuda/runtime.h"

namespace moeserve::cuda {

// What a token of a step is, for the counters. Recomputed tokens were counted before; of the rows
// that fill up a step nothing is counted.
inline constexpr uint8_t kTokenPrefill = 0, kTokenDecode = 1, kTokenRecompute = 2,
                         kTokenPadding = 255;

// A routed block whose plans are counted.
struct CountedBlock {
  int num_experts = 1;
  int sub_tokens = 1;     // rows of a token
  int most_distinct = 1;  // experts that one token can touch
  bool diverse = false;   // counts for the diversity histogram
};

// Sums over all steps, of one expert. All but `recomputed_selections` and `visits` leave recomputed
// tokens out.
struct ExpertCount {
  uint64_t selections = 0;
  uint64_t decode_selections = 0;
  uint64_t recomputed_selections = 0;
  uint64_t touching_tokens = 0;  // tokens of which some row chose the expert
  uint64_t visits = 0;           // steps in which a row chose the expert
  double weight_sum = 0.0;
};

// Bucket i counts values of at most 2^i, the last one all larger ones.
template <size_t kBuckets>
struct PowerHistogram {
  std::array<uint64_t, kBuckets> buckets{};
  uint64_t sum = 0;
};

// Of the model as a whole. Index 1 of the arrays of two: steps whose tokens were all of decode.
struct ModelCounts {
  uint64_t steps = 0;
  uint64_t tokens[3] = {};  // by kTokenPrefill and so on
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
  std::vector<BlockCounts> blocks;
};

// All launches of one stream. Per step: LaunchBeginStep, LaunchCount for every block, then
// LaunchEndStep. Sums have the same bits in every run; none depends on an order of arrival.
class ExpertCounters {
 public:
  // ResourceExhausted.
  static Result<ExpertCounters> Create(std::vector<CountedBlock> blocks, int max_tokens);
  // Between steps.
  Status Reserve(int max_tokens);

  // `kind`: device [tokens], there until the step ends.
  void LaunchBeginStep(const uint8_t* kind, int tokens, cudaStream_t stream);
  // A plan of tokens * sub_tokens rows.
  void LaunchCount(int block, const RoutingPlan& plan, cudaStream_t stream);
  void LaunchEndStep(cudaStream_t stream);

  // Device [tokens] 1: some row's scores had no finite maximum. Complete after the last
  // LaunchCount.
  const uint8_t* failed_tokens() const { return failed_.as<uint8_t>(); }

  // Waits for the stream. Internal where the copy fails.
  Result<CountsSnapshot> Read(cudaStream_t stream) const;

 private:
  struct Placed {
    CountedBlock block;
    int64_t experts = 0;    // index of the first ExpertCount
    int64_t histogram = 0;  // index of the first bucket
  };

  std::vector<Placed> blocks_;
  int64_t num_experts_ = 0;
  int64_t num_buckets_ = 0;  // of all blocks, behind them the diversity histogram
  int64_t most_diversity_ = 0;
  int max_tokens_ = 0;
  const uint8_t* kind_ = nullptr;
  int tokens_ = 0;
  DeviceMemory model_;       // ModelCounts
  DeviceMemory experts_;     // [num_experts_]
  DeviceMemory histograms_;  // [num_buckets_ + most_diversity_ + 1]
  DeviceMemory nonfinite_;   // [blocks]
  DeviceMemory step_;        // StepState
  DeviceMemory distinct_;    // [max_tokens_] of the block being counted, 0 between launches
  DeviceMemory diversity_;   // [max_tokens_]
  DeviceMemory failed_;      // [max_tokens_]
};

}  // namespace moeserve::cuda
