// The operations of ranks on a CUDA device.
#pragma once

#include <map>
#include <span>
#include <utility>
#include <vector>

#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/ranks/plan_division.h"
#include "kernels/rank_ops.h"

namespace moeserve::cuda {

// An exchange that moves bytes of the host gets copies in pinned memory: the own part is copied
// there before the exchange, the others are copied back after it. One that reads device memory
// (Exchange::reads_device_memory()) takes part in the order of the stream.
class CudaRankOps final : public RankOps {
 public:
  // All operations are those of one stream, which outlives the object.
  explicit CudaRankOps(cudaStream_t stream) : stream_(stream) {}

  std::span<const int32_t> ExpertOffsets(const RoutingPlan& plan) override;
  PlanParts Divide(const RoutingPlan& plan, const PlanOwners& owners, int slot) override;
  void StartGather(const RowsView& results, std::span<const int64_t> rows_of_rank,
                   Exchange& exchange) override;
  void FinishGather(Exchange& exchange) override;
  void StartScatter(const RowsView& own, const PlanParts& parts, const RowsView& packed,
                    const RowsView& results, Exchange& exchange) override;
  void FinishScatter(Exchange& exchange) override;
  void GatherColumns(const RowsView& own, const RowsView& output, Exchange& exchange) override;
  // The sum of ChecksumOfWord() over the words of the rows. The CPU's checksum is a chain that no
  // device computes in parallel; ranks are all of one kind, so the two are never compared.
  uint64_t Checksum(const RowsView& rows) override;

 private:
  // An exchange between its start and its end.
  struct Running {
    bool runs = false;
    char* results = nullptr;     // the parts of all ranks in device memory
    char* staged = nullptr;      // the same in host memory; null if the exchange reads the device's
    int64_t begin = 0, end = 0;  // the bytes of the own part
    int64_t bytes = 0;           // of all parts
  };

  void Begin(const RowsView& results, std::span<const int64_t> bytes, const Exchange& exchange);
  // Copies the parts of others to the device.
  void CopyFromOthers();
  // Copies arrays to the device.
  void Upload(std::span<const std::pair<int32_t*, std::span<const int32_t>>> arrays);
  // Fills `adders` but `place` and `by_adder`, with `row_begin` in device memory. Returns
  // first_added, for which it waits.
  std::vector<int32_t> FindAdders(const RoutingPlan& plan, const PlanOwners& owners,
                                  PlanAdders& adders, int32_t* row_begin);
  void Synchronize();
  void Copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);
  // Makes the memory large enough; its contents are lost.
  void Reserve(PinnedMemory& memory, int64_t bytes);
  static void Reserve(DeviceMemory& memory, int64_t bytes);

  cudaStream_t stream_;
  std::map<int, DeviceMemory> parts_;        // by slot: the arrays of the parts of its plan
  std::vector<int32_t> offsets_;             // of ExpertOffsets()
  std::vector<int64_t> bytes_, send_bytes_;  // of the exchange that runs
  Running running_;
  PinnedMemory staged_;    // what is exchanged
  PinnedMemory small_;     // what the host reads
  PinnedMemory uploaded_;  // what Divide() copies to the device
  Event copied_;           // after the copies from `uploaded_`
  DeviceMemory checksum_;
};

}  // namespace moeserve::cuda
