// Counts, on the device, how the experts are used, from the routing plans of every step.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/route_counters.h"

namespace moeserve::cuda {

// All sums have the same bits in every run, because none depends on the order in which threads
// arrive.
class ExpertCounters {
 public:
  // ResourceExhausted if memory runs out.
  static Result<ExpertCounters> Create(const CountSettings& settings, int max_tokens);
  // Grows the memory for steps of up to `max_tokens` tokens. Must be called between steps only.
  Status Reserve(int max_tokens);
  int max_tokens() const { return max_tokens_; }

  struct Step {
    int tokens = 0;
    const uint8_t* kind = nullptr;       // device memory [tokens]
    const int32_t* token_ids = nullptr;  // device memory [tokens]
    TokenRoutes* routes = nullptr;       // device memory [tokens], must be 0 before the launch
  };
  // Adds a step, with one launch per 48 MoE blocks. Must be called at the end of a step, so that no
  // other operation of the step waits for it. `plans` holds one plan for every block of the
  // settings, in the same order, with tokens * sub_tokens rows each; a plan without arrays means
  // that the block was not routed. The arrays of different plans must not share memory. All
  // launches must use the same stream.
  void LaunchCount(const Step& step, std::span<const RoutingPlan> plans, cudaStream_t stream);

  // Does what RouteCounters::AssignTokenRows() says, with one launch per 256 rows.
  void LaunchAssignRows(std::span<const TokenRowChange> changes, cudaStream_t stream);

  // Copies all counts with a single copy and waits for the stream. Internal if the device fails.
  Result<CountsSnapshot> Read(cudaStream_t stream);
  // Returns the token x expert table in device memory [table_rows(), experts of all blocks], or
  // null if there is none.
  const uint32_t* token_experts() const { return token_experts_.as<uint32_t>(); }
  int64_t token_experts_size() const { return token_experts_size_; }

 private:
  struct Placed {
    CountedBlock block;
    int64_t experts = 0;    // index of the first ExpertCount
    int64_t histogram = 0;  // index of the first bucket
  };
  // The positions of the counters in `counts_`, so that a single copy transfers all of them to the
  // host.
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
  int64_t num_buckets_ = 0;  // of all blocks; the diversity histogram follows these buckets
  int64_t most_diversity_ = 0;
  int64_t token_experts_size_ = 0;
  int64_t own_rows_ = 0;
  int max_tokens_ = 0;
  DeviceMemory counts_;         // all counters, at the positions in Layout
  DeviceMemory parameters_;     // [num_experts_] int64
  DeviceMemory token_experts_;  // [table_rows(), num_experts_]
  DeviceMemory row_of_token_;   // [vocabulary] int32; empty if every token has a row
  // Scratch memory. arrivals_ and distinct_ are 0 between launches, diversity_ is 0 between steps.
  DeviceMemory arrivals_;   // [1 + blocks]
  DeviceMemory distinct_;   // [blocks, max_tokens_]
  DeviceMemory diversity_;  // [max_tokens_]
  PinnedMemory host_;       // used by Read()
};

}  // namespace moeserve::cuda
