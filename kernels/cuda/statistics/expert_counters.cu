#include <algorithm>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/routing/route_warp.cuh"
#include "kernels/cuda/statistics/expert_counters.h"

namespace moeserve::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// If a plan has at most this many rows, one warp counts an expert; otherwise a thread block does.
constexpr int kWarpRows = 512;

// The largest number of MoE blocks that one launch counts; it is limited by the size of a launch's
// parameters.
constexpr int kMostBlocks = 48;

using Counter = unsigned long long;  // the type that atomicAdd takes

__device__ void Add(uint64_t* counter, uint64_t value) {
  atomicAdd(reinterpret_cast<Counter*>(counter), static_cast<Counter>(value));
}

template <size_t kBuckets>
__device__ void Observe(PowerHistogram<kBuckets>* histogram, uint64_t value) {
  // The buckets are accessed through a pointer, because the members of std::array are host
  // functions.
  uint64_t* buckets = reinterpret_cast<uint64_t*>(histogram);
  size_t i = 0;
  while (i + 1 < kBuckets && value > uint64_t{1} << i) ++i;
  Add(buckets + i, 1);
  Add(&histogram->sum, value);
}

// The arguments for one MoE block of the model.
struct BlockArgs {
  const int32_t* expert_offsets;  // this and the following pointers are arrays of the block's plan
  const int32_t* row_of_assignment;
  const float* weight_of_assignment;
  const int32_t* row_offsets;
  const uint8_t* row_nonfinite;
  int32_t index;  // index among all counted blocks
  int32_t num_experts;
  int32_t sub_tokens;
  int32_t most_distinct;
  int32_t first_expert;  // index of the first expert among the experts of all blocks
  int32_t first_bucket;
  bool in_diversity;
  bool wide;  // a thread block counts an expert; if false, a warp does
};

struct CountArgs {
  BlockArgs blocks[kMostBlocks] = {};
  int num_blocks = 0;  // 0 if no block was routed; then one thread block counts the tokens
  bool last = false;   // whether this is the last launch of the step
  int tokens;
  const uint8_t* kind;
  const int32_t* token_ids;
  TokenRoutes* routes;
  ModelCounts* model;
  ExpertCount* experts;  // of all MoE blocks
  uint64_t* histograms;
  uint64_t* nonfinite;
  uint64_t* diversity_histogram;
  int64_t most_diversity;
  int32_t* arrivals;  // [1 + blocks] 0 between launches: counter of finished MoE blocks, then one
                      // counter per MoE block
  int32_t* distinct;  // [blocks, distinct_stride] number of experts that each token used, 0 between
                      // launches
  int64_t distinct_stride;
  // [tokens] sum of `distinct` over the blocks with in_diversity, 0 between steps
  int32_t* diversity;
  const int64_t* parameters;    // of the experts of all blocks
  uint32_t* token_experts;      // [table_rows(), table_width] or null
  const int32_t* row_of_token;  // [vocabulary], or null if every token has a row
  int64_t table_width;
};
static_assert(sizeof(CountArgs) <= 4096);

// Adds 1 to a counter of the table, which saturates at UINT32_MAX. The thread whose addition wraps
// the counter around sets it back to the maximum. Additions by other threads in the meantime do no
// harm, because the maximum is restored before the launch ends.
__device__ void AddSaturating(uint32_t* counter) {
  if (atomicAdd(counter, 1u) == UINT32_MAX) atomicMax(counter, UINT32_MAX);
}

struct Share {
  double weights;
  int32_t decoded, recomputed, rejected, tokens;
};

// Returns whether all tokens of the step are kTokenDecode, kTokenRejected or padding. Every thread
// block computes this itself, which is cheaper than a preceding launch that stores the result.
__device__ bool OnlyDecodes(const CountArgs& a) {
  bool others = false;
  for (int t = static_cast<int>(threadIdx.x); t < a.tokens; t += kThreads) {
    const uint8_t kind = a.kind[t];
    others = others || (kind != kTokenDecode && kind != kTokenRejected && kind != kTokenPadding);
  }
  return __syncthreads_or(others) == 0;
}

// Counts one expert. The assignments of an expert are adjacent and their rows ascend, so the
// assignments of one token are adjacent. Therefore a thread recognises the first assignment of a
// token by comparing it with the previous assignment.
__device__ void CountExpert(const CountArgs& a, const BlockArgs& b, int e, bool decode_only,
                            Share* shares) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int32_t begin = b.expert_offsets[e], end = b.expert_offsets[e + 1];
  const int64_t expert = b.first_expert + e;
  const uint64_t parameters = static_cast<uint64_t>(a.parameters[expert]);
  int32_t* distinct = a.distinct + b.index * a.distinct_stride;
  const int stride = b.wide ? kThreads : 32;
  const int first_lane = b.wide ? static_cast<int>(threadIdx.x) : lane;
  Share own{0.0, 0, 0, 0, 0};
  for (int32_t i = begin + first_lane; i < end; i += stride) {
    const int32_t token = b.row_of_assignment[i] / b.sub_tokens;
    const bool first = i == begin || b.row_of_assignment[i - 1] / b.sub_tokens != token;
    const uint8_t kind = a.kind[token];
    Add(&a.routes[token].parameters, parameters);
    if (IsCountedApart(kind)) {
      ++(kind == kTokenRecompute ? own.recomputed : own.rejected);
      continue;
    }
    if (a.token_experts != nullptr) {
      const int32_t id = a.token_ids[token];
      const int32_t row = a.row_of_token == nullptr ? id : a.row_of_token[id];
      AddSaturating(a.token_experts + row * a.table_width + expert);
    }
    own.decoded += kind == kTokenDecode;
    own.weights += b.weight_of_assignment[i];
    if (first) {
      ++own.tokens;
      atomicAdd(distinct + token, 1);
    }
  }
  own.decoded = __reduce_add_sync(kFullMask, own.decoded);
  own.recomputed = __reduce_add_sync(kFullMask, own.recomputed);
  own.rejected = __reduce_add_sync(kFullMask, own.rejected);
  own.tokens = __reduce_add_sync(kFullMask, own.tokens);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    own.weights = own.weights + __shfl_xor_sync(kFullMask, own.weights, distance);
  }
  bool writes = lane == 0;
  if (b.wide) {
    if (lane == 0) shares[warp] = own;
    __syncthreads();
    writes = threadIdx.x == 0;
    for (int w = 1; writes && w < kWarps; ++w) {
      own.decoded += shares[w].decoded;
      own.recomputed += shares[w].recomputed;
      own.rejected += shares[w].rejected;
      own.tokens += shares[w].tokens;
      own.weights += shares[w].weights;
    }
  }
  if (!writes || begin == end) return;
  const uint64_t rows = static_cast<uint64_t>(end - begin);
  ExpertCount& count = a.experts[expert];
  count.selections += rows - static_cast<uint64_t>(own.recomputed + own.rejected);
  count.decode_selections += static_cast<uint64_t>(own.decoded);
  count.recomputed_selections += static_cast<uint64_t>(own.recomputed);
  count.rejected_selections += static_cast<uint64_t>(own.rejected);
  count.touching_tokens += static_cast<uint64_t>(own.tokens);
  count.visits += 1;
  count.weight_sum += own.weights;
  Observe(&a.model->expert_rows[decode_only], rows);
}

// Counts, per token, how the experts of one MoE block were used. A single thread block runs this
// function, while other thread blocks may count other MoE blocks, so all data that several MoE
// blocks share is added to atomically.
__device__ void CountTokens(const CountArgs& a, const BlockArgs& b, bool decode_only,
                            int32_t* active, int32_t* nonfinite, int32_t* histogram) {
  const int thread = static_cast<int>(threadIdx.x);
  int32_t* distinct = a.distinct + b.index * a.distinct_stride;
  for (int n = thread; n <= b.most_distinct; n += kThreads) histogram[n] = 0;
  if (thread == 0) *active = *nonfinite = 0;
  __syncthreads();
  for (int i = thread; i < b.num_experts; i += kThreads) {
    if (b.expert_offsets[i] != b.expert_offsets[i + 1]) atomicAdd(active, 1);
  }
  for (int t = thread; t < a.tokens; t += kThreads) {
    const uint8_t kind = a.kind[t];
    if (kind == kTokenPadding) continue;
    const int first_row = t * b.sub_tokens, end_row = first_row + b.sub_tokens;
    Add(&a.routes[t].routes,
        static_cast<uint64_t>(b.row_offsets[end_row] - b.row_offsets[first_row]));
    if (IsCountedApart(kind)) continue;
    int bad = 0;
    for (int r = first_row; r < end_row; ++r) bad += b.row_nonfinite[r] != 0;
    if (bad > 0) atomicAdd(nonfinite, bad);
    const int32_t touched = __ldcg(distinct + t);
    distinct[t] = 0;
    atomicAdd(histogram + min(touched, b.most_distinct), 1);
    if (b.in_diversity) atomicAdd(a.diversity + t, touched);
  }
  __syncthreads();
  uint64_t* sums = a.histograms + b.first_bucket;
  for (int n = thread; n <= b.most_distinct; n += kThreads) {
    sums[n] += static_cast<uint64_t>(histogram[n]);
  }
  if (thread == 0) {
    a.nonfinite[b.index] += static_cast<uint64_t>(*nonfinite);
    Observe(&a.model->active_experts[decode_only], static_cast<uint64_t>(*active));
  }
}

// Counts, per token, how the experts of all MoE blocks together were used, and counts the tokens
// themselves.
__device__ void EndStep(const CountArgs& a) {
  const int thread = static_cast<int>(threadIdx.x);
  int counts[kCountedKinds] = {};
  for (int t = thread; t < a.tokens; t += kThreads) {
    const uint8_t kind = a.kind[t];
#pragma unroll
    for (int k = 0; k < kCountedKinds; ++k) counts[k] += kind == k;
    if (kind == kTokenPadding || IsCountedApart(kind)) continue;
    const int64_t touched = __ldcg(a.diversity + t);
    a.diversity[t] = 0;
    Add(a.diversity_histogram + min(touched, a.most_diversity), 1);
  }
#pragma unroll
  for (int k = 0; k < kCountedKinds; ++k) {
    const int32_t in_warp = __reduce_add_sync(kFullMask, counts[k]);
    if (thread % 32 == 0 && in_warp > 0) Add(&a.model->tokens[k], static_cast<uint64_t>(in_warp));
  }
  if (thread == 0) Add(&a.model->steps, 1);
}

// The grid is (thread blocks that the MoE block with the most experts needs) x (MoE blocks). The
// last thread block to finish an MoE block calls CountTokens() for that block; the last thread
// block to finish CountTokens() calls EndStep().
__global__ void __launch_bounds__(kThreads) CountKernel(CountArgs a) {
  GridDependencyPass();
  // Shared memory: the flag of LastToArrive() and two counters, then the partial sums of the warps,
  // then the histogram.
  int32_t* flag = DynamicShared<int32_t>();
  Share* shares = reinterpret_cast<Share*>(flag + 4);
  int32_t* histogram = reinterpret_cast<int32_t*>(shares + kWarps);
  if (a.num_blocks > 0) {
    const BlockArgs& b = a.blocks[blockIdx.y];
    const int x = static_cast<int>(blockIdx.x);
    const int needed = b.wide ? b.num_experts : (b.num_experts + kWarps - 1) / kWarps;
    if (x >= needed) return;
    const bool decode_only = OnlyDecodes(a);
    const int e = b.wide ? x : x * kWarps + static_cast<int>(threadIdx.x) / 32;
    if (e < b.num_experts) CountExpert(a, b, e, decode_only, shares);
    if (!LastToArrive(a.arrivals + 1 + b.index, needed, flag)) return;
    CountTokens(a, b, decode_only, flag + 1, flag + 2, histogram);
    if (!LastToArrive(a.arrivals, a.num_blocks, flag)) return;
  }
  if (a.last) EndStep(a);
}

constexpr int kRowsPerLaunch = 256;

struct AssignArgs {
  TokenRowChange changes[kRowsPerLaunch];
  uint32_t* token_experts;
  int32_t* row_of_token;
  int64_t table_width;
  int32_t shared_row;
};
static_assert(sizeof(AssignArgs) <= 4096);

// The grid has one thread block per change.
__global__ void __launch_bounds__(kThreads) AssignRowsKernel(AssignArgs a) {
  const TokenRowChange& change = a.changes[blockIdx.x];
  uint32_t* row = a.token_experts + change.row * a.table_width;
  uint32_t* shared = a.token_experts + a.shared_row * a.table_width;
  for (int64_t e = threadIdx.x; e < a.table_width; e += kThreads) {
    const uint32_t count = row[e];
    row[e] = 0;
    if (count == 0) continue;
    // See AddSaturating(): a sum that wraps around is set to the maximum.
    const uint32_t sum = atomicAdd(shared + e, count);
    if (sum > UINT32_MAX - count) atomicMax(shared + e, UINT32_MAX);
  }
  if (threadIdx.x != 0) return;
  if (change.replaced >= 0) a.row_of_token[change.replaced] = a.shared_row;
  a.row_of_token[change.token] = change.row;
}

Result<DeviceMemory> Zeroed(int64_t bytes) {
  const size_t size = static_cast<size_t>(std::max<int64_t>(bytes, 16));
  MOESERVE_ASSIGN_OR_RETURN(DeviceMemory memory, DeviceMemory::Allocate(size));
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaMemset(memory.data(), 0, size));
  // The streams that use this memory do not wait for the default stream.
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(nullptr));
  return memory;
}

}  // namespace

ExpertCounters::Layout ExpertCounters::LayOut(void* base) const {
  Layout l{};
  char* at = static_cast<char*>(base);
  const auto take = [&at](auto*& array, int64_t count) {
    array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(at);
    at += static_cast<size_t>(count) * sizeof(*array);
  };
  take(l.model, 1);
  take(l.experts, num_experts_);
  take(l.histograms, num_buckets_ + most_diversity_ + 1);
  take(l.nonfinite, static_cast<int64_t>(blocks_.size()));
  l.bytes = static_cast<size_t>(at - static_cast<char*>(base));
  return l;
}

Result<ExpertCounters> ExpertCounters::Create(const CountSettings& settings, int max_tokens) {
  ExpertCounters c;
  std::vector<int64_t> parameters;
  for (const CountedBlock& block : settings.blocks) {
    MOESERVE_CHECK(static_cast<int>(block.expert_parameters.size()) == block.num_experts,
                   "the parameters of every expert");
    c.blocks_.push_back({.block = block, .experts = c.num_experts_, .histogram = c.num_buckets_});
    c.num_experts_ += block.num_experts;
    c.num_buckets_ += block.most_distinct + 1;
    if (block.in_diversity) c.most_diversity_ += block.most_distinct;
    parameters.insert(parameters.end(), block.expert_parameters.begin(),
                      block.expert_parameters.end());
  }
  const size_t bytes = c.LayOut(nullptr).bytes;
  MOESERVE_ASSIGN_OR_RETURN(c.counts_, Zeroed(static_cast<int64_t>(bytes)));
  MOESERVE_ASSIGN_OR_RETURN(c.host_, PinnedMemory::Allocate(bytes));
  MOESERVE_ASSIGN_OR_RETURN(c.arrivals_, Zeroed((1 + static_cast<int64_t>(c.blocks_.size())) * 4));
  MOESERVE_ASSIGN_OR_RETURN(c.parameters_,
                            Zeroed(c.num_experts_ * static_cast<int64_t>(sizeof(int64_t))));
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaMemcpy(c.parameters_.data(), parameters.data(),
                                           parameters.size() * sizeof(int64_t),
                                           cudaMemcpyHostToDevice));
  c.token_experts_size_ = settings.table_rows() * c.num_experts_;
  c.own_rows_ = settings.own_rows;
  if (c.token_experts_size_ > 0) {
    MOESERVE_ASSIGN_OR_RETURN(
        c.token_experts_, Zeroed(c.token_experts_size_ * static_cast<int64_t>(sizeof(uint32_t))));
  }
  if (c.own_rows_ > 0) {
    const std::vector<int32_t> rows(static_cast<size_t>(settings.vocabulary),
                                    static_cast<int32_t>(c.own_rows_));
    const size_t size = rows.size() * sizeof(int32_t);
    MOESERVE_ASSIGN_OR_RETURN(c.row_of_token_, DeviceMemory::Allocate(size));
    MOESERVE_CUDA_RETURN_IF_ERROR(
        cudaMemcpy(c.row_of_token_.data(), rows.data(), size, cudaMemcpyHostToDevice));
  }
  MOESERVE_RETURN_IF_ERROR(c.Reserve(max_tokens));
  return c;
}

Status ExpertCounters::Reserve(int max_tokens) {
  if (max_tokens <= max_tokens_ && distinct_.data() != nullptr) return absl::OkStatus();
  const int64_t blocks = static_cast<int64_t>(blocks_.size());
  MOESERVE_ASSIGN_OR_RETURN(distinct_, Zeroed(blocks * max_tokens * 4));
  MOESERVE_ASSIGN_OR_RETURN(diversity_, Zeroed(int64_t{max_tokens} * 4));
  max_tokens_ = max_tokens;
  return absl::OkStatus();
}

void ExpertCounters::LaunchAssignRows(std::span<const TokenRowChange> changes,
                                      cudaStream_t stream) {
  MOESERVE_CHECK(own_rows_ > 0, "a table whose rows are assigned");
  for (size_t begin = 0; begin < changes.size(); begin += kRowsPerLaunch) {
    const size_t count = std::min<size_t>(kRowsPerLaunch, changes.size() - begin);
    AssignArgs args{.changes = {},
                    .token_experts = token_experts_.as<uint32_t>(),
                    .row_of_token = row_of_token_.as<int32_t>(),
                    .table_width = num_experts_,
                    .shared_row = static_cast<int32_t>(own_rows_)};
    for (size_t i = 0; i < count; ++i) {
      args.changes[i] = changes[begin + i];
      MOESERVE_CHECK(args.changes[i].row >= 0 && args.changes[i].row < own_rows_,
                     "a row of the table");
    }
    Launch(AssignRowsKernel,
           {.grid = dim3(static_cast<unsigned>(count)), .block = kThreads, .stream = stream}, args);
  }
}

void ExpertCounters::LaunchCount(const Step& step, std::span<const RoutingPlan> plans,
                                 cudaStream_t stream) {
  MOESERVE_CHECK(step.tokens <= max_tokens_, "ExpertCounters::Reserve comes before the step");
  MOESERVE_CHECK(plans.size() == blocks_.size(), "a plan for every block");
  const Layout counts = LayOut(counts_.data());
  CountArgs args{
      .tokens = step.tokens,
      .kind = step.kind,
      .token_ids = step.token_ids,
      .routes = step.routes,
      .model = counts.model,
      .experts = counts.experts,
      .histograms = counts.histograms,
      .nonfinite = counts.nonfinite,
      .diversity_histogram = counts.histograms + num_buckets_,
      .most_diversity = most_diversity_,
      .arrivals = arrivals_.as<int32_t>(),
      .distinct = distinct_.as<int32_t>(),
      .distinct_stride = max_tokens_,
      .diversity = diversity_.as<int32_t>(),
      .parameters = parameters_.as<int64_t>(),
      .token_experts = token_experts_size_ == 0 ? nullptr : token_experts_.as<uint32_t>(),
      .row_of_token = own_rows_ == 0 ? nullptr : row_of_token_.as<int32_t>(),
      .table_width = num_experts_};
  for (size_t next = 0; !args.last;) {
    int grid = 1, most_distinct = 0;
    args.num_blocks = 0;
    for (; next < plans.size() && args.num_blocks < kMostBlocks; ++next) {
      const RoutingPlan& plan = plans[next];
      const Placed& placed = blocks_[next];
      const CountedBlock& b = placed.block;
      if (plan.expert_offsets == nullptr) continue;
      MOESERVE_CHECK(plan.rows == step.tokens * b.sub_tokens && plan.num_experts == b.num_experts,
                     "a plan of this block and step");
      const bool wide = plan.rows > kWarpRows;
      args.blocks[args.num_blocks++] = {.expert_offsets = plan.expert_offsets,
                                        .row_of_assignment = plan.row_of_assignment,
                                        .weight_of_assignment = plan.weight_of_assignment,
                                        .row_offsets = plan.row_offsets,
                                        .row_nonfinite = plan.row_nonfinite,
                                        .index = static_cast<int32_t>(next),
                                        .num_experts = b.num_experts,
                                        .sub_tokens = b.sub_tokens,
                                        .most_distinct = b.most_distinct,
                                        .first_expert = static_cast<int32_t>(placed.experts),
                                        .first_bucket = static_cast<int32_t>(placed.histogram),
                                        .in_diversity = b.in_diversity,
                                        .wide = wide};
      grid = std::max(grid, wide ? b.num_experts : (b.num_experts + kWarps - 1) / kWarps);
      most_distinct = std::max(most_distinct, b.most_distinct);
    }
    args.last = next == plans.size();
    const size_t shared =
        16 + kWarps * sizeof(Share) + (static_cast<size_t>(most_distinct) + 1) * 4;
    Launch(CountKernel,
           {.grid = dim3(static_cast<unsigned>(grid),
                         static_cast<unsigned>(std::max(args.num_blocks, 1))),
            .block = kThreads,
            .shared_bytes = shared,
            .stream = stream,
            .overlaps_predecessor = true},
           args);
  }
}

Result<CountsSnapshot> ExpertCounters::Read(cudaStream_t stream) {
  const Layout counts = LayOut(host_.data());
  MOESERVE_CUDA_RETURN_IF_ERROR(
      cudaMemcpyAsync(host_.data(), counts_.data(), counts.bytes, cudaMemcpyDeviceToHost, stream));
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
  CountsSnapshot s;
  s.model = *counts.model;
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const Placed& p = blocks_[i];
    const ExpertCount* experts = counts.experts + p.experts;
    const uint64_t* histogram = counts.histograms + p.histogram;
    BlockCounts& b = s.blocks.emplace_back();
    b.experts.assign(experts, experts + p.block.num_experts);
    b.distinct_histogram.assign(histogram, histogram + p.block.most_distinct + 1);
    b.nonfinite_rows = counts.nonfinite[i];
  }
  const uint64_t* diversity = counts.histograms + num_buckets_;
  s.diversity_histogram.assign(diversity, diversity + most_diversity_ + 1);
  return s;
}

}  // namespace moeserve::cuda
