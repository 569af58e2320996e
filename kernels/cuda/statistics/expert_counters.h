// Counts on the device what the experts do, from the routing plans of every step.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/route_counters.h"

namespace moeserve::cuda {

// Sums have the same bits in every run; none depends on an order of arrival.
class ExpertCounters {
 public:
  // ResourceExhausted.
  static Result<ExpertCounters> Create(const CountSettings& settings, int max_tokens);
  // Between steps.
  Status Reserve(int max_tokens);
  int max_tokens() const { return max_tokens_; }

  struct Step {
    int tokens = 0;
    const uint8_t* kind = nullptr;       // device [tokens]
    const int32_t* token_ids = nullptr;  // device [tokens]
    TokenRoutes* routes = nullptr;       // device [tokens], 0 before
  };
  // Adds a step, in one launch for up to 48 blocks: at its end, so that nothing else of it waits.
  // `plans`: of every block of the settings, in their order, of tokens * sub_tokens rows each; one
  // without arrays was not routed. They lie at addresses of their own. All launches of one stream.
  void LaunchCount(const Step& step, std::span<const RoutingPlan> plans, cudaStream_t stream);

  // One copy; waits for the stream. Internal where it fails.
  Result<CountsSnapshot> Read(cudaStream_t stream);
  // Device [vocabulary, experts of all blocks]; null: none is kept.
  const uint32_t* token_experts() const { return token_experts_.as<uint32_t>(); }
  int64_t token_experts_size() const { return token_experts_size_; }

 private:
  struct Placed {
    CountedBlock block;
    int64_t experts = 0;    // index of the first ExpertCount
    int64_t histogram = 0;  // index of the first bucket
  };
  // Where the counters lie in `counts_`, which one copy brings to the host.
  struct Layout {
    ModelCounts* model;
    ExpertCount* experts;  // [num_experts_]
    uint64_t* histograms;  // [num_buckets_ + most_diversity_ + 1]
    uint64_t* nonfinite;   // [blocks]
    size_t bytes;
  };
  Layout LayOut(void* base) const;

  std::vector<Placed> blocks_;
  int64_t num_experts_ = 0;
  int64_t num_buckets_ = 0;  // of all blocks, behind them the diversity histogram
  int64_t most_diversity_ = 0;
  int64_t token_experts_size_ = 0;
  int max_tokens_ = 0;
  DeviceMemory counts_;         // see Layout
  DeviceMemory parameters_;     // [num_experts_] int64
  DeviceMemory token_experts_;  // [vocabulary, num_experts_]
  // Scratch, 0 between launches (the last: between steps).
  DeviceMemory arrivals_;   // [1 + blocks]
  DeviceMemory distinct_;   // [blocks, max_tokens_]
  DeviceMemory diversity_;  // [max_tokens_]
  PinnedMemory host_;       // of Read()
};

}  // namespace moeserve::cuda
