// The operations of ranks on a CUDA device.
#pragma once

#include <map>
#include <vector>

#include "kernels/cuda/device/handles.h"
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
  void GatherColumns(const RowsView& own, const RowsView& output, Exchange& exchange) override;
  // The sum of ChecksumOfWord() over the words of the rows. The CPU's checksum is a chain that no
  // device computes in parallel; ranks are all of one kind, so the two are never compared.
  uint64_t Checksum(const RowsView& rows) override;

 private:
  // A gather between StartGather() and FinishGather().
  struct Gather {
    void* results = nullptr;     // null: none
    int64_t begin = 0, end = 0;  // the bytes of the own part
    int64_t bytes = 0;           // of all parts
  };

  void Synchronize();
  void Copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);
  // Makes the memory large enough; its contents are lost.
  void Reserve(PinnedMemory& memory, int64_t bytes);
  static void Reserve(DeviceMemory& memory, int64_t bytes);

  cudaStream_t stream_;
  std::map<int, DeviceMemory> parts_;  // by slot: the arrays of the parts of its plan
  std::vector<int32_t> offsets_;       // of ExpertOffsets()
  std::vector<int64_t> bytes_;         // scratch of StartGather()
  Gather gather_;
  PinnedMemory gathered_;  // of gathers and columns
  PinnedMemory small_;     // what ExpertOffsets() and Checksum() read
  PinnedMemory uploaded_;  // what Divide() copies to the device
  Event copied_;           // after the copies from `uploaded_`
  DeviceMemory checksum_;
};

}  // namespace moeserve::cuda
