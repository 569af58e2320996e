#include "kernels/cuda/ranks/rank_ops.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "base/check.h"
#include "kernels/cuda/ranks/checksum.h"
#include "kernels/cuda/ranks/plan_division.h"

namespace moeserve::cuda {
namespace {

// Stops the process: after an error in a step the device is unusable.
void MustSucceed(const absl::Status& status, const char* what) {
  if (status.ok()) return;
  moeserve::internal::CheckFailed(__FILE__, __LINE__, what, std::string(status.message()).c_str());
}

int64_t RowBytes(const RowsView& rows) {
  return rows.stride * static_cast<int64_t>(SizeOf(rows.dtype));
}

// The first assignments of the experts in the joint plan and in that of the own experts.
struct Numbering {
  std::vector<int32_t> joint, local;
  std::vector<int64_t> rows_of_rank;
  int64_t first = 0;

  Numbering(const RoutingPlan& plan, const PlanOwners& owners, std::span<const int32_t> offsets)
      : joint(static_cast<size_t>(plan.num_experts) + 1),
        local(static_cast<size_t>(owners.places) + 1),
        rows_of_rank(static_cast<size_t>(owners.ranks)) {
    int32_t next = 0;
    // Ranks in ascending order, then experts without an owner.
    for (int turn = 0; turn <= owners.ranks; ++turn) {
      const int owner = turn < owners.ranks ? turn : kNoOwner;
      const int32_t begin = next;
      if (owner == owners.rank) first = begin;
      for (int e = 0; e < plan.num_experts; ++e) {
        if (owner == owners.rank && e < owners.places) local[e] = next - begin;
        if (owners.of_expert[e] != owner) continue;
        MOESERVE_CHECK(owner == kNoOwner || e < owners.places, "owners of experts with a place");
        joint[e] = next;
        next += offsets[e + 1] - offsets[e];
      }
      if (owner != kNoOwner) rows_of_rank[turn] = next - begin;
      if (owner == owners.rank) local.back() = next - begin;
    }
    joint.back() = next;
  }
};

// Takes arrays of 4-byte elements from one piece of memory, each 16-byte aligned. Without memory,
// it only counts.
class Arrays {
 public:
  explicit Arrays(char* memory = nullptr) : memory_(memory) {}

  template <typename T>
  void Take(T*& array, int64_t count) {
    static_assert(sizeof(T) == 4);
    if (memory_ != nullptr) array = reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += (count * 4 + 15) / 16 * 16;
  }
  void Take(PlanPartArrays& part, int64_t experts, int64_t assignments) {
    Take(part.expert_offsets, experts + 1);
    Take(part.expert_of_assignment, assignments);
    Take(part.row_of_assignment, assignments);
    Take(part.weight_of_assignment, assignments);
    Take(part.assignments_of_row, assignments);
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* memory_;
  int64_t bytes_ = 0;
};

RoutingPlan PartOf(const RoutingPlan& plan, const PlanPartArrays& arrays, int64_t assignments) {
  RoutingPlan part = plan;
  part.num_assignments = part.capacity = static_cast<int>(assignments);
  part.expected = 0;
  part.most_of_row = plan.MostOfRow();
  part.expert_offsets = arrays.expert_offsets;
  part.expert_of_assignment = arrays.expert_of_assignment;
  part.row_of_assignment = arrays.row_of_assignment;
  part.weight_of_assignment = arrays.weight_of_assignment;
  if (arrays.row_offsets != nullptr) part.row_offsets = arrays.row_offsets;
  part.assignments_of_row = arrays.assignments_of_row;
  return part;
}

}  // namespace

void CudaRankOps::Synchronize() {
  MustSucceed(CudaStatus(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"),
              "wait for the device");
}

void CudaRankOps::Copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (bytes == 0) return;
  MustSucceed(CudaStatus(cudaMemcpyAsync(to, from, bytes, kind, stream_), "cudaMemcpyAsync"),
              "copy what ranks exchange");
}

void CudaRankOps::Reserve(PinnedMemory& memory, int64_t bytes) {
  if (static_cast<int64_t>(memory.bytes()) >= bytes) return;
  Synchronize();  // a copy may still use the memory
  memory = {};
  Result<PinnedMemory> larger = PinnedMemory::Allocate(static_cast<size_t>(bytes + bytes / 2));
  MustSucceed(larger.status(), "host memory for ranks");
  memory = *std::move(larger);
}

void CudaRankOps::Reserve(DeviceMemory& memory, int64_t bytes) {
  if (static_cast<int64_t>(memory.bytes()) >= bytes) return;
  memory = {};
  Result<DeviceMemory> larger = DeviceMemory::Allocate(static_cast<size_t>(bytes));
  MustSucceed(larger.status(), "device memory for ranks");
  memory = *std::move(larger);
}

std::span<const int32_t> CudaRankOps::ExpertOffsets(const RoutingPlan& plan) {
  offsets_.resize(static_cast<size_t>(plan.num_experts) + 1);
  const size_t bytes = offsets_.size() * sizeof(int32_t);
  Reserve(small_, static_cast<int64_t>(bytes));
  Copy(small_.data(), plan.expert_offsets, bytes, cudaMemcpyDeviceToHost);
  Synchronize();
  std::copy_n(small_.as<int32_t>(), offsets_.size(), offsets_.begin());
  return offsets_;
}

PlanParts CudaRankOps::Divide(const RoutingPlan& plan, const PlanOwners& owners, int slot) {
  MOESERVE_CHECK(std::ssize(owners.of_expert) == plan.num_experts, "an owner for every expert");
  const std::span<const int32_t> offsets =
      owners.expert_offsets.empty() ? ExpertOffsets(plan) : owners.expert_offsets;
  Numbering numbers(plan, owners, offsets);
  const int64_t all = numbers.joint.back(), own = numbers.local.back();
  PlanDivision division{.plan = plan,
                        .joint = {},
                        .local = {},
                        .first = static_cast<int>(numbers.first),
                        .own = static_cast<int>(own)};
  division.plan.num_assignments = static_cast<int>(all);
  // Room for every plan of so many rows.
  const auto lay_out = [&](Arrays arrays) {
    arrays.Take(division.joint, plan.num_experts, plan.capacity);
    arrays.Take(division.local, owners.places, plan.capacity);
    arrays.Take(division.local.row_offsets, int64_t{plan.rows} + 1);
    return arrays.bytes();
  };
  DeviceMemory& memory = parts_[slot];
  Reserve(memory, lay_out(Arrays()));
  lay_out(Arrays(memory.as<char>()));

  std::vector<int32_t> both = numbers.joint;
  both.insert(both.end(), numbers.local.begin(), numbers.local.end());
  const std::span<const int32_t> words(both);
  if (copied_.get() == nullptr) {
    Result<Event> event = Event::Create(false);
    MustSucceed(event.status(), "an event for ranks");
    copied_ = *std::move(event);
  } else {
    MustSucceed(copied_.Synchronize(), "wait for the copy of an earlier plan");
  }
  Reserve(uploaded_, static_cast<int64_t>(words.size_bytes()));
  std::copy(words.begin(), words.end(), uploaded_.as<int32_t>());
  Copy(division.joint.expert_offsets, uploaded_.data(), numbers.joint.size() * sizeof(int32_t),
       cudaMemcpyHostToDevice);
  Copy(division.local.expert_offsets, uploaded_.as<int32_t>() + numbers.joint.size(),
       numbers.local.size() * sizeof(int32_t), cudaMemcpyHostToDevice);
  MustSucceed(copied_.Record(stream_), "note the copy of a plan");
  LaunchDividePlan(division, stream_);

  PlanParts parts;
  parts.joint = PartOf(plan, division.joint, all);
  parts.local = PartOf(plan, division.local, own);
  parts.local.num_experts = owners.places;
  parts.rows_of_rank = std::move(numbers.rows_of_rank);
  parts.first = numbers.first;
  return parts;
}

void CudaRankOps::StartGather(const RowsView& results, std::span<const int64_t> rows_of_rank,
                              Exchange& exchange) {
  MOESERVE_CHECK(gather_.results == nullptr, "one gather at a time");
  // Whole rows, with the columns that pad them: so a part is one piece of memory.
  bytes_.clear();
  for (const int64_t rows : rows_of_rank) bytes_.push_back(rows * RowBytes(results));
  if (exchange.reads_device_memory()) {
    exchange.StartDeviceGather(results.data, bytes_, stream_);
    return;
  }
  const auto own = bytes_.begin() + exchange.rank();
  gather_.begin = std::accumulate(bytes_.begin(), own, int64_t{0});
  gather_.end = gather_.begin + *own;
  gather_.bytes = std::accumulate(own, bytes_.end(), gather_.begin);
  gather_.results = results.data;
  Reserve(gathered_, std::max<int64_t>(gather_.bytes, 1));
  Copy(gathered_.as<char>() + gather_.begin, static_cast<char*>(results.data) + gather_.begin,
       static_cast<size_t>(*own), cudaMemcpyDeviceToHost);
  // For the own part, and for the copies from this memory of an earlier gather.
  Synchronize();
  exchange.StartGather(gathered_.data(), bytes_);
}

void CudaRankOps::FinishGather(Exchange& exchange) {
  if (exchange.reads_device_memory()) return exchange.FinishDeviceGather();
  exchange.FinishGather();
  const auto copy_back = [&](int64_t begin, int64_t end) {
    Copy(static_cast<char*>(gather_.results) + begin, gathered_.as<char>() + begin,
         static_cast<size_t>(end - begin), cudaMemcpyHostToDevice);
  };
  copy_back(0, gather_.begin);
  copy_back(gather_.end, gather_.bytes);
  gather_ = {};
}

void CudaRankOps::GatherColumns(const RowsView& own, const RowsView& output, Exchange& exchange) {
  MOESERVE_CHECK(own.dtype == DType::kF32 && own.stride == own.cols, "f32 rows without padding");
  const auto part = static_cast<size_t>(own.rows * own.cols) * sizeof(float);
  const bool leader = exchange.rank() == 0;
  const size_t all = leader ? part * static_cast<size_t>(exchange.ranks()) : 0;
  Reserve(gathered_, std::max<int64_t>(static_cast<int64_t>(part + all), 1));
  Copy(gathered_.data(), own.data, part, cudaMemcpyDeviceToHost);
  Synchronize();
  char* const columns = gathered_.as<char>() + part;
  exchange.GatherAtLeader({gathered_.as<char>(), part}, {columns, all});
  if (!leader || own.rows == 0) return;
  const size_t width = static_cast<size_t>(own.cols) * sizeof(float);
  for (int r = 0; r < exchange.ranks(); ++r) {
    const int64_t first = r * own.cols;
    const int64_t count = std::clamp<int64_t>(output.cols - first, 0, own.cols);
    if (count == 0) continue;
    MustSucceed(CudaStatus(cudaMemcpy2DAsync(reinterpret_cast<float*>(output.data) + first,
                                             static_cast<size_t>(RowBytes(output)),
                                             columns + static_cast<size_t>(r) * part, width,
                                             static_cast<size_t>(count) * sizeof(float),
                                             static_cast<size_t>(own.rows), cudaMemcpyHostToDevice,
                                             stream_),
                           "cudaMemcpy2DAsync"),
                "copy the columns of other ranks");
  }
}

uint64_t CudaRankOps::Checksum(const RowsView& rows) {
  MOESERVE_CHECK(rows.dtype == DType::kF32 && rows.stride == rows.cols, "f32 rows without padding");
  Reserve(checksum_, sizeof(unsigned long long));
  Reserve(small_, sizeof(unsigned long long));
  LaunchChecksum(static_cast<const uint32_t*>(rows.data), rows.rows * rows.cols,
                 checksum_.as<unsigned long long>(), stream_);
  Copy(small_.data(), checksum_.data(), sizeof(unsigned long long), cudaMemcpyDeviceToHost);
  Synchronize();
  return *small_.as<unsigned long long>();
}

}  // namespace moeserve::cuda
