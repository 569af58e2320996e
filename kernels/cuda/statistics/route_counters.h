// The RouteCounters of the CUDA backend.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/mutex.h"
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
  explicit CudaRouteCounters(const CountSettings& settings) : read_(ZeroCounts(settings)) {}

  ExpertCounters counters_;
  std::vector<int> slots_;
  uint64_t id_ = 0;
  cudaStream_t stream_ = nullptr;
  mutable Mutex read_mutex_;
  CountsSnapshot read_ ABSL_GUARDED_BY(read_mutex_);  // result of the last Refresh()
  // The following members are used by ReadTokenExperts(), which does not wait for steps.
  mutable Mutex copy_mutex_;
  Stream copies_ ABSL_GUARDED_BY(copy_mutex_);
  PinnedMemory staging_ ABSL_GUARDED_BY(copy_mutex_);
};

}  // namespace moeserve::cuda
