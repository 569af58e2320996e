#include "kernels/cuda/statistics/route_counters.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace moeserve::cuda {
namespace {

constexpr int kFirstTokens = 256;
constexpr size_t kStagingBytes = 1 << 20;

}  // namespace

Result<std::unique_ptr<CudaRouteCounters>> CudaRouteCounters::Create(const CountSettings& settings,
                                                                     cudaStream_t stream) {
  static std::atomic<uint64_t> last_id{0};
  std::unique_ptr<CudaRouteCounters> c(new CudaRouteCounters(settings));
  MOESERVE_ASSIGN_OR_RETURN(c->counters_, ExpertCounters::Create(settings, kFirstTokens));
  c->stream_ = stream;
  c->id_ = ++last_id;
  for (const CountedBlock& block : settings.blocks) c->slots_.push_back(block.slot);
  if (c->counters_.token_experts_size() > 0) {
    const MutexLock lock(c->copy_mutex_);
    MOESERVE_ASSIGN_OR_RETURN(c->copies_, Stream::Create());
    MOESERVE_ASSIGN_OR_RETURN(c->staging_, PinnedMemory::Allocate(kStagingBytes));
  }
  return c;
}

Status CudaRouteCounters::Refresh() {
  MOESERVE_ASSIGN_OR_RETURN(CountsSnapshot counts, counters_.Read(stream_));
  const MutexLock lock(read_mutex_);
  read_ = std::move(counts);
  return absl::OkStatus();
}

CountsSnapshot CudaRouteCounters::Read() const {
  const MutexLock lock(read_mutex_);
  return read_;
}

void CudaRouteCounters::AssignTokenRows(std::span<const TokenRowChange> changes) {
  counters_.LaunchAssignRows(changes, stream_);
}

Status CudaRouteCounters::ReadTokenExperts(int64_t first, std::span<uint32_t> part) const {
  MOESERVE_CHECK(
      first >= 0 && first + static_cast<int64_t>(part.size()) <= counters_.token_experts_size(),
      "elements of the table");
  const MutexLock lock(copy_mutex_);
  constexpr size_t kPiece = kStagingBytes / sizeof(uint32_t);
  for (size_t begin = 0; begin < part.size(); begin += kPiece) {
    const size_t bytes = std::min(kPiece, part.size() - begin) * sizeof(uint32_t);
    const uint32_t* from = counters_.token_experts() + first + static_cast<int64_t>(begin);
    MOESERVE_CUDA_RETURN_IF_ERROR(
        cudaMemcpyAsync(staging_.data(), from, bytes, cudaMemcpyDeviceToHost, copies_.get()));
    MOESERVE_RETURN_IF_ERROR(copies_.Synchronize());
    std::memcpy(part.data() + begin, staging_.data(), bytes);
  }
  return absl::OkStatus();
}

}  // namespace moeserve::cuda
