// The RouteCounters of the CUDA backend.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/statistics/expert_counters.h"
#include "kernels/route_counters.h"

namespace moeserve::cuda {

class CudaRouteCounters : public RouteCounters {
 public:
  // `stream` is the stream of the steps. ResourceExhausted if memory runs out.
  static Result<std::unique_ptr<CudaRouteCounters>> Create(const CountSettings& settings,
                                                           cudaStream_t stream);

  Status Refresh() override;
  CountsSnapshot Read() const override;
  void AssignTokenRows(std::span<const TokenRowChange> changes) override;
  Status ReadTokenExperts(int64_t first, std::span<uint32_t> part) const override;

  ExpertCounters& counters() { return counters_; }
  // For each counted block, the slot of its plans.
  std::span<const int> slots() const { return slots_; }
  // Unique within the process: a recorded step is valid only for the counters with which it was
  // recorded.
  uint64_t id() const { return id_; }

 private:
  CudaRouteCounters() = default;

  ExpertCounters counters_;
  std::vector<int> slots_;
  uint64_t id_ = 0;
  cudaStream_t stream_ = nullptr;
  mutable std::mutex read_mutex_;
  CountsSnapshot read_;  // result of the last Refresh(); guarded by read_mutex_
  // The following members are used by ReadTokenExperts(), which does not wait for steps.
  mutable std::mutex copy_mutex_;
  Stream copies_;
  PinnedMemory staging_;
};

}  // namespace moeserve::cuda
