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

// How many assignments of each expert which rank adds: [e, r]. Without PlanOwners::row_begin, every
// rank adds all.
class Added {
 public:
  // `first_added`: PlanAdders::first_added in host memory; empty without row_begin.
  Added(std::span<const int32_t> offsets, std::span<const int32_t> first_added, int ranks)
      : offsets_(offsets), first_(first_added), ranks_(static_cast<size_t>(ranks)) {}

  int32_t operator()(int e, int rank) const {
    if (first_.empty()) return offsets_[e + 1] - offsets_[e];
    const size_t at = static_cast<size_t>(e) * ranks_ + static_cast<size_t>(rank);
    const bool last = static_cast<size_t>(rank) + 1 == ranks_;
    return (last ? offsets_[e + 1] : first_[at + 1]) - first_[at];
  }

 private:
  std::span<const int32_t> offsets_, first_;
  size_t ranks_;
};

// The first assignments of the experts in the joint plan and in that of the own experts.
struct Numbering {
  std::vector<int32_t> joint, local;
  std::vector<int32_t> place;  // PlanAdders::place; empty without row_begin
  std::vector<int64_t> rows_of_rank, rows_for_rank;
  int64_t first = 0;

  Numbering(const RoutingPlan& plan, const PlanOwners& owners, std::span<const int32_t> offsets,
            const Added& added)
      : joint(static_cast<size_t>(plan.num_experts) + 1),
        local(static_cast<size_t>(owners.places) + 1),
        rows_of_rank(static_cast<size_t>(owners.ranks)) {
    int32_t next = 0, own = 0;
    // Ranks in ascending order, then experts without an owner.
    for (int turn = 0; turn <= owners.ranks; ++turn) {
      const int owner = turn < owners.ranks ? turn : kNoOwner;
      const int32_t begin = next;
      if (owner == owners.rank) first = begin;
      for (int e = 0; e < plan.num_experts; ++e) {
        if (owner == owners.rank && e < owners.places) local[e] = own;
        if (owners.of_expert[e] != owner) continue;
        MOESERVE_CHECK(owner == kNoOwner || e < owners.places, "owners of experts with a place");
        joint[e] = next;
        next += added(e, owners.rank);
        if (owner == owners.rank) own += offsets[e + 1] - offsets[e];
      }
      if (owner != kNoOwner) rows_of_rank[turn] = next - begin;
    }
    local.back() = own;
    joint.back() = next;
    if (!owners.row_begin.empty()) SortByAdder(plan, owners, added);
  }

 private:
  void SortByAdder(const RoutingPlan& plan, const PlanOwners& owners, const Added& added) {
    rows_for_rank.resize(rows_of_rank.size());
    place.resize(static_cast<size_t>(plan.num_experts) * rows_of_rank.size());
    int32_t next = 0;
    for (int r = 0; r < owners.ranks; ++r) {
      const int32_t begin = next;
      for (int e = 0; e < owners.places; ++e) {
        if (owners.of_expert[e] != owners.rank) continue;
        place[static_cast<size_t>(e) * rows_of_rank.size() + static_cast<size_t>(r)] = next;
        next += added(e, r);
      }
      rows_for_rank[r] = next - begin;
    }
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

void CudaRankOps::Upload(std::span<const std::pair<int32_t*, std::span<const int32_t>>> arrays) {
  if (copied_.get() == nullptr) {
    Result<Event> event = Event::Create(false);
    MustSucceed(event.status(), "an event for ranks");
    copied_ = *std::move(event);
  } else {
    MustSucceed(copied_.Synchronize(), "wait for the copy of an earlier plan");
  }
  size_t words = 0;
  for (const auto& [to, from] : arrays) words += from.size();
  Reserve(uploaded_, static_cast<int64_t>(std::max<size_t>(words, 1) * sizeof(int32_t)));
  auto* pinned = uploaded_.as<int32_t>();
  for (const auto& [to, from] : arrays) {
    std::ranges::copy(from, pinned);
    Copy(to, pinned, from.size_bytes(), cudaMemcpyHostToDevice);
    pinned += from.size();
  }
  MustSucceed(copied_.Record(stream_), "note the copy of a plan");
}

std::vector<int32_t> CudaRankOps::FindAdders(const RoutingPlan& plan, const PlanOwners& owners,
                                             PlanAdders& adders, int32_t* row_begin) {
  const std::vector<int32_t> begins(owners.row_begin.begin(), owners.row_begin.end());
  const std::pair<int32_t*, std::span<const int32_t>> upload{row_begin, begins};
  Upload({&upload, 1});
  adders.ranks = owners.ranks;
  adders.row_begin = row_begin;
  LaunchFindAdders(plan, adders, stream_);
  std::vector<int32_t> first(static_cast<size_t>(plan.num_experts * owners.ranks));
  const size_t bytes = first.size() * sizeof(int32_t);
  Reserve(small_, static_cast<int64_t>(bytes));
  Copy(small_.data(), adders.first_added, bytes, cudaMemcpyDeviceToHost);
  Synchronize();
  std::copy_n(small_.as<int32_t>(), first.size(), first.begin());
  return first;
}

PlanParts CudaRankOps::Divide(const RoutingPlan& plan, const PlanOwners& owners, int slot) {
  MOESERVE_CHECK(std::ssize(owners.of_expert) == plan.num_experts, "an owner for every expert");
  const bool adds_some = !owners.row_begin.empty();
  const std::span<const int32_t> offsets =
      owners.expert_offsets.empty() ? ExpertOffsets(plan) : owners.expert_offsets;
  PlanDivision division{.plan = plan, .rank = owners.rank, .places = owners.places};
  division.plan.num_assignments = offsets.back();
  division.end_row = plan.rows;
  int32_t* row_begin = nullptr;
  int32_t* place = nullptr;
  // Room for every plan of so many rows.
  const auto lay_out = [&](Arrays arrays) {
    arrays.Take(division.joint, plan.num_experts, plan.capacity);
    arrays.Take(division.local, owners.places, plan.capacity);
    arrays.Take(division.local.row_offsets, int64_t{plan.rows} + 1);
    arrays.Take(division.local_numbers, plan.capacity);
    if (adds_some) {
      const int64_t pairs = int64_t{plan.num_experts} * owners.ranks;
      arrays.Take(division.joint.row_offsets, int64_t{plan.rows} + 1);
      arrays.Take(row_begin, int64_t{owners.ranks} + 1);
      arrays.Take(place, pairs);
      arrays.Take(division.adders.first_added, pairs);
      arrays.Take(division.adders.by_adder, plan.capacity);
    }
    return arrays.bytes();
  };
  DeviceMemory& memory = parts_[slot];
  Reserve(memory, lay_out(Arrays()));
  lay_out(Arrays(memory.as<char>()));

  std::vector<int32_t> first_added;
  if (adds_some) {
    MOESERVE_CHECK(std::ssize(owners.row_begin) == owners.ranks + 1 && owners.row_begin[0] == 0 &&
                       owners.row_begin.back() == plan.rows,
                   "each row is added by one rank");
    first_added = FindAdders(plan, owners, division.adders, row_begin);
    division.adders.place = place;
    division.begin_row = static_cast<int>(owners.row_begin[owners.rank]);
    division.end_row = static_cast<int>(owners.row_begin[owners.rank + 1]);
  }
  Numbering numbers(plan, owners, offsets, Added(offsets, first_added, owners.ranks));
  const std::pair<int32_t*, std::span<const int32_t>> uploads[] = {
      {division.joint.expert_offsets, numbers.joint},
      {division.local.expert_offsets, numbers.local},
      {place, numbers.place}};
  Upload(uploads);
  LaunchDividePlan(division, stream_);

  PlanParts parts;
  parts.joint = PartOf(plan, division.joint, numbers.joint.back());
  parts.joint.rows = division.end_row - division.begin_row;
  if (plan.row_nonfinite != nullptr) parts.joint.row_nonfinite += division.begin_row;
  parts.local = PartOf(plan, division.local, numbers.local.back());
  parts.local.num_experts = owners.places;
  parts.rows_of_rank = std::move(numbers.rows_of_rank);
  parts.first = numbers.first;
  parts.rows_for_rank = std::move(numbers.rows_for_rank);
  parts.by_adder = division.adders.by_adder;
  return parts;
}

void CudaRankOps::StartGather(const RowsView& results, std::span<const int64_t> rows_of_rank,
                              Exchange& exchange) {
  // Whole rows, with the columns that pad them: so a part is one piece of memory.
  bytes_.clear();
  for (const int64_t rows : rows_of_rank) bytes_.push_back(rows * RowBytes(results));
  Begin(results, bytes_, exchange);
  if (exchange.reads_device_memory()) {
    return exchange.StartDeviceGather(results.data, bytes_, stream_);
  }
  Reserve(staged_, std::max<int64_t>(running_.bytes, 1));
  running_.staged = staged_.as<char>();
  Copy(running_.staged + running_.begin, static_cast<char*>(results.data) + running_.begin,
       static_cast<size_t>(running_.end - running_.begin), cudaMemcpyDeviceToHost);
  // For the own part, and for the copies from this memory of an earlier exchange.
  Synchronize();
  exchange.StartGather(running_.staged, bytes_);
}

void CudaRankOps::FinishGather(Exchange& exchange) {
  if (exchange.reads_device_memory()) {
    exchange.FinishDeviceGather();
  } else {
    exchange.FinishGather();
    CopyFromOthers();
  }
  running_ = {};
}

void CudaRankOps::StartScatter(const RowsView& own, const PlanParts& parts, const RowsView& packed,
                               const RowsView& results, Exchange& exchange) {
  MOESERVE_CHECK(own.stride == packed.stride && own.stride == results.stride &&
                     own.dtype == packed.dtype && own.dtype == results.dtype,
                 "rows of one layout");
  const auto rank = static_cast<size_t>(exchange.rank());
  const int64_t row = RowBytes(own);
  const int64_t stays = parts.rows_for_rank[rank];
  MOESERVE_CHECK(stays == parts.rows_of_rank[rank], "as many rows are kept as added");
  MOESERVE_CHECK(packed.rows == own.rows - stays, "room for what is sent");
  const int64_t kept = std::accumulate(parts.rows_for_rank.begin(),
                                       parts.rows_for_rank.begin() + exchange.rank(), int64_t{0});
  LaunchPackResults({.own = static_cast<const char*>(own.data),
                     .by_adder = parts.by_adder,
                     .packed = static_cast<char*>(packed.data),
                     .results = static_cast<char*>(results.data),
                     .row_bytes = row,
                     .rows = own.rows,
                     .kept = kept,
                     .kept_end = kept + stays,
                     .first = parts.first},
                    stream_);
  bytes_.clear();
  send_bytes_.clear();
  for (size_t r = 0; r < parts.rows_of_rank.size(); ++r) {
    send_bytes_.push_back(r == rank ? 0 : parts.rows_for_rank[r] * row);
    bytes_.push_back(parts.rows_of_rank[r] * row);
  }
  Begin(results, bytes_, exchange);
  if (exchange.reads_device_memory()) {
    return exchange.StartDeviceAllToAll(packed.data, send_bytes_, results.data, bytes_, stream_);
  }
  const int64_t sent = packed.rows * row;
  Reserve(staged_, std::max<int64_t>(sent + running_.bytes, 1));
  running_.staged = staged_.as<char>() + sent;
  Copy(staged_.data(), packed.data, static_cast<size_t>(sent), cudaMemcpyDeviceToHost);
  Synchronize();
  exchange.StartAllToAll(staged_.data(), send_bytes_, running_.staged, bytes_);
}

void CudaRankOps::FinishScatter(Exchange& exchange) {
  if (exchange.reads_device_memory()) {
    exchange.FinishDeviceAllToAll();
  } else {
    exchange.FinishAllToAll();
    CopyFromOthers();
  }
  running_ = {};
}

void CudaRankOps::Begin(const RowsView& results, std::span<const int64_t> bytes,
                        const Exchange& exchange) {
  MOESERVE_CHECK(!running_.runs, "one exchange at a time");
  const auto own = bytes.begin() + exchange.rank();
  running_ = {.runs = true, .results = static_cast<char*>(results.data)};
  running_.begin = std::accumulate(bytes.begin(), own, int64_t{0});
  running_.end = running_.begin + *own;
  running_.bytes = std::accumulate(own, bytes.end(), running_.begin);
}

void CudaRankOps::CopyFromOthers() {
  const auto copy_back = [&](int64_t begin, int64_t end) {
    Copy(running_.results + begin, running_.staged + begin, static_cast<size_t>(end - begin),
         cudaMemcpyHostToDevice);
  };
  copy_back(0, running_.begin);
  copy_back(running_.end, running_.bytes);
}

void CudaRankOps::GatherColumns(const RowsView& own, const RowsView& output, Exchange& exchange) {
  MOESERVE_CHECK(own.dtype == DType::kF32 && own.stride == own.cols, "f32 rows without padding");
  const auto part = static_cast<size_t>(own.rows * own.cols) * sizeof(float);
  const bool leader = exchange.rank() == 0;
  const size_t all = leader ? part * static_cast<size_t>(exchange.ranks()) : 0;
  Reserve(staged_, std::max<int64_t>(static_cast<int64_t>(part + all), 1));
  Copy(staged_.data(), own.data, part, cudaMemcpyDeviceToHost);
  Synchronize();
  char* const columns = staged_.as<char>() + part;
  exchange.GatherAtLeader({staged_.as<char>(), part}, {columns, all});
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
