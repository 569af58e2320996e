#include <algorithm>
#include <type_traits>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/cuda/expert_counters.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/route_warp.cuh"

namespace moeserve::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// Up to this many rows a warp counts an expert, else a block does.
constexpr int kWarpRows = 512;

// What a step leaves for its launches; `arrivals` is 0 between them.
struct StepState {
  int32_t decode_only = 0;
  int32_t arrivals = 0;
};

using Counter = unsigned long long;  // what atomicAdd takes

__device__ void Add(uint64_t* counter, uint64_t value) {
  atomicAdd(reinterpret_cast<Counter*>(counter), static_cast<Counter>(value));
}

template <size_t kBuckets>
__device__ void Observe(PowerHistogram<kBuckets>* histogram, uint64_t value) {
  // Through pointers: the members of std::array are host functions.
  uint64_t* buckets = reinterpret_cast<uint64_t*>(histogram);
  size_t i = 0;
  while (i + 1 < kBuckets && value > uint64_t{1} << i) ++i;
  Add(buckets + i, 1);
  Add(&histogram->sum, value);
}

struct BeginStepArgs {
  const uint8_t* kind;
  int tokens;
  ModelCounts* model;
  StepState* step;
  int32_t* diversity;
};

__global__ void __launch_bounds__(kThreads) BeginStepKernel(BeginStepArgs a) {
  const int thread = static_cast<int>(threadIdx.x);
  int counts[3] = {};
  for (int t = thread; t < a.tokens; t += kThreads) {
    const uint8_t kind = a.kind[t];
#pragma unroll
    for (int k = 0; k < 3; ++k) counts[k] += kind == k;
    a.diversity[t] = 0;
  }
  bool others = false;
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    const int32_t in_warp = __reduce_add_sync(kFullMask, counts[k]);
    if (thread % 32 == 0 && in_warp > 0) Add(&a.model->tokens[k], static_cast<uint64_t>(in_warp));
    others = others || (k != kTokenDecode && in_warp > 0);
  }
  others = __syncthreads_or(others) != 0;
  if (thread == 0) {
    a.step->decode_only = !others;
    Add(&a.model->steps, 1);
  }
}

struct CountArgs {
  RoutingPlan plan;
  const uint8_t* kind;
  const int32_t* token_ids;
  int tokens;
  int sub_tokens;
  int warps_per_expert;  // 1 or kWarps
  bool diverse;
  int most_distinct;
  ModelCounts* model;
  StepState* step;
  ExpertCount* experts;  // of the block
  uint64_t* histogram;   // of the block
  uint64_t* nonfinite;   // of the block
  int32_t* distinct;
  int32_t* diversity;
  const int64_t* parameters;  // of the block's experts
  TokenRoutes* routes;
  uint32_t* token_experts;  // the block's columns of the table, or null
  int64_t table_width;
};

// Counters of the table stay at their maximum: whoever wraps one around puts it back, and all that
// added meanwhile did so before the launch ends.
__device__ void AddSaturating(uint32_t* counter) {
  if (atomicAdd(counter, 1u) == UINT32_MAX) atomicMax(counter, UINT32_MAX);
}

struct Share {
  double weights;
  int32_t decoded, recomputed, tokens;
};

// An expert's assignments lie together, rows ascending: those of one token are neighbours, so the
// first of them is seen without a mark.
__device__ void CountExpert(const CountArgs& a, int e, Share* shares) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int32_t begin = a.plan.expert_offsets[e], end = a.plan.expert_offsets[e + 1];
  const uint64_t parameters = static_cast<uint64_t>(a.parameters[e]);
  const int stride = 32 * a.warps_per_expert;
  const int first_lane = a.warps_per_expert == 1 ? lane : static_cast<int>(threadIdx.x);
  Share own{0.0, 0, 0, 0};
  for (int32_t i = begin + first_lane; i < end; i += stride) {
    const int32_t token = a.plan.row_of_assignment[i] / a.sub_tokens;
    const bool first = i == begin || a.plan.row_of_assignment[i - 1] / a.sub_tokens != token;
    const uint8_t kind = a.kind[token];
    Add(&a.routes[token].parameters, parameters);
    if (kind == kTokenRecompute) {
      ++own.recomputed;
      continue;
    }
    if (a.token_experts != nullptr) {
      AddSaturating(a.token_experts + a.token_ids[token] * a.table_width + e);
    }
    own.decoded += kind == kTokenDecode;
    own.weights += a.plan.weight_of_assignment[i];
    if (first) {
      ++own.tokens;
      atomicAdd(a.distinct + token, 1);
    }
  }
  own.decoded = __reduce_add_sync(kFullMask, own.decoded);
  own.recomputed = __reduce_add_sync(kFullMask, own.recomputed);
  own.tokens = __reduce_add_sync(kFullMask, own.tokens);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    own.weights = own.weights + __shfl_xor_sync(kFullMask, own.weights, distance);
  }
  bool writes = lane == 0;
  if (a.warps_per_expert > 1) {
    if (lane == 0) shares[warp] = own;
    __syncthreads();
    writes = threadIdx.x == 0;
    for (int w = 1; writes && w < kWarps; ++w) {
      own.decoded += shares[w].decoded;
      own.recomputed += shares[w].recomputed;
      own.tokens += shares[w].tokens;
      own.weights += shares[w].weights;
    }
  }
  if (!writes || begin == end) return;
  const uint64_t rows = static_cast<uint64_t>(end - begin);
  ExpertCount& count = a.experts[e];
  count.selections += rows - static_cast<uint64_t>(own.recomputed);
  count.decode_selections += static_cast<uint64_t>(own.decoded);
  count.recomputed_selections += static_cast<uint64_t>(own.recomputed);
  count.touching_tokens += static_cast<uint64_t>(own.tokens);
  count.visits += 1;
  count.weight_sum += own.weights;
  Observe(&a.model->expert_rows[a.step->decode_only], rows);
}

__global__ void __launch_bounds__(kThreads) CountKernel(CountArgs a) {
  // The flag of LastToArrive and counters of the block, shares of the warps, then the histogram.
  int32_t* flag = DynamicShared<int32_t>();
  int32_t* active = flag + 1;
  int32_t* nonfinite = flag + 2;
  Share* shares = reinterpret_cast<Share*>(flag + 4);
  int32_t* histogram = reinterpret_cast<int32_t*>(shares + kWarps);
  const int thread = static_cast<int>(threadIdx.x);
  const int e = a.warps_per_expert == 1 ? static_cast<int>(blockIdx.x) * kWarps + thread / 32
                                        : static_cast<int>(blockIdx.x);
  if (e < a.plan.num_experts) CountExpert(a, e, shares);
  if (!LastToArrive(&a.step->arrivals, static_cast<int>(gridDim.x), flag)) return;

  // One block looks at the tokens.
  for (int n = thread; n <= a.most_distinct; n += kThreads) histogram[n] = 0;
  if (thread == 0) *active = *nonfinite = 0;
  __syncthreads();
  for (int i = thread; i < a.plan.num_experts; i += kThreads) {
    if (a.plan.expert_offsets[i] != a.plan.expert_offsets[i + 1]) atomicAdd(active, 1);
  }
  for (int t = thread; t < a.tokens; t += kThreads) {
    const uint8_t kind = a.kind[t];
    if (kind == kTokenPadding) continue;
    const int first_row = t * a.sub_tokens, end_row = first_row + a.sub_tokens;
    a.routes[t].routes +=
        static_cast<uint64_t>(a.plan.row_offsets[end_row] - a.plan.row_offsets[first_row]);
    if (kind == kTokenRecompute) continue;
    int bad = 0;
    for (int r = first_row; r < end_row; ++r) bad += a.plan.row_nonfinite[r] != 0;
    if (bad > 0) atomicAdd(nonfinite, bad);
    const int32_t touched = __ldcg(a.distinct + t);
    a.distinct[t] = 0;
    atomicAdd(histogram + min(touched, a.most_distinct), 1);
    if (a.diverse) a.diversity[t] += touched;
  }
  __syncthreads();
  for (int n = thread; n <= a.most_distinct; n += kThreads) {
    a.histogram[n] += static_cast<uint64_t>(histogram[n]);
  }
  if (thread == 0) {
    *a.nonfinite += static_cast<uint64_t>(*nonfinite);
    Observe(&a.model->active_experts[a.step->decode_only], static_cast<uint64_t>(*active));
  }
}

struct EndStepArgs {
  const uint8_t* kind;
  int tokens;
  const int32_t* diversity;
  int64_t most;
  uint64_t* histogram;
};

__global__ void __launch_bounds__(kThreads) EndStepKernel(EndStepArgs a) {
  const int t = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (t >= a.tokens || a.kind[t] == kTokenPadding || a.kind[t] == kTokenRecompute) return;
  Add(a.histogram + min(static_cast<int64_t>(a.diversity[t]), a.most), 1);
}

Result<DeviceMemory> Zeroed(int64_t bytes) {
  const size_t size = static_cast<size_t>(std::max<int64_t>(bytes, 16));
  MOESERVE_ASSIGN_OR_RETURN(DeviceMemory memory, DeviceMemory::Allocate(size));
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaMemset(memory.data(), 0, size));
  // Streams that use it do not wait for this one.
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
    if (block.diverse) c.most_diversity_ += block.most_distinct;
    parameters.insert(parameters.end(), block.expert_parameters.begin(),
                      block.expert_parameters.end());
  }
  const size_t bytes = c.LayOut(nullptr).bytes;
  MOESERVE_ASSIGN_OR_RETURN(c.counts_, Zeroed(static_cast<int64_t>(bytes)));
  MOESERVE_ASSIGN_OR_RETURN(c.host_, PinnedMemory::Allocate(bytes));
  MOESERVE_ASSIGN_OR_RETURN(c.state_, Zeroed(sizeof(StepState)));
  MOESERVE_ASSIGN_OR_RETURN(c.parameters_,
                            Zeroed(c.num_experts_ * static_cast<int64_t>(sizeof(int64_t))));
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaMemcpy(c.parameters_.data(), parameters.data(),
                                           parameters.size() * sizeof(int64_t),
                                           cudaMemcpyHostToDevice));
  c.token_experts_size_ = settings.vocabulary * c.num_experts_;
  if (c.token_experts_size_ > 0) {
    MOESERVE_ASSIGN_OR_RETURN(
        c.token_experts_, Zeroed(c.token_experts_size_ * static_cast<int64_t>(sizeof(uint32_t))));
  }
  MOESERVE_RETURN_IF_ERROR(c.Reserve(max_tokens));
  return c;
}

Status ExpertCounters::Reserve(int max_tokens) {
  if (max_tokens <= max_tokens_ && distinct_.data() != nullptr) return absl::OkStatus();
  MOESERVE_ASSIGN_OR_RETURN(distinct_, Zeroed(int64_t{max_tokens} * 4));
  MOESERVE_ASSIGN_OR_RETURN(diversity_, Zeroed(int64_t{max_tokens} * 4));
  max_tokens_ = max_tokens;
  return absl::OkStatus();
}

void ExpertCounters::LaunchBeginStep(const Step& step, cudaStream_t stream) {
  MOESERVE_CHECK(step.tokens <= max_tokens_, "ExpertCounters::Reserve comes before the step");
  step_ = step;
  Launch(BeginStepKernel, {.grid = 1, .block = kThreads, .stream = stream},
         BeginStepArgs{.kind = step.kind,
                       .tokens = step.tokens,
                       .model = LayOut(counts_.data()).model,
                       .step = state_.as<StepState>(),
                       .diversity = diversity_.as<int32_t>()});
}

void ExpertCounters::LaunchCount(int block, const RoutingPlan& plan, cudaStream_t stream) {
  const Placed& placed = blocks_[static_cast<size_t>(block)];
  const CountedBlock& b = placed.block;
  MOESERVE_CHECK(plan.rows == step_.tokens * b.sub_tokens && plan.num_experts == b.num_experts,
                 "a plan of this block and step");
  const bool warps = plan.rows <= kWarpRows;
  const int64_t blocks = warps ? (b.num_experts + kWarps - 1) / kWarps : b.num_experts;
  const size_t shared =
      16 + kWarps * sizeof(Share) + (static_cast<size_t>(b.most_distinct) + 1) * 4;
  const Layout counts = LayOut(counts_.data());
  Launch(CountKernel,
         {.grid = static_cast<unsigned>(blocks),
          .block = kThreads,
          .shared_bytes = shared,
          .stream = stream},
         CountArgs{.plan = plan,
                   .kind = step_.kind,
                   .token_ids = step_.token_ids,
                   .tokens = step_.tokens,
                   .sub_tokens = b.sub_tokens,
                   .warps_per_expert = warps ? 1 : kWarps,
                   .diverse = b.diverse,
                   .most_distinct = b.most_distinct,
                   .model = counts.model,
                   .step = state_.as<StepState>(),
                   .experts = counts.experts + placed.experts,
                   .histogram = counts.histograms + placed.histogram,
                   .nonfinite = counts.nonfinite + block,
                   .distinct = distinct_.as<int32_t>(),
                   .diversity = diversity_.as<int32_t>(),
                   .parameters = parameters_.as<int64_t>() + placed.experts,
                   .routes = step_.routes,
                   .token_experts = token_experts_size_ == 0
                                        ? nullptr
                                        : token_experts_.as<uint32_t>() + placed.experts,
                   .table_width = num_experts_});
}

void ExpertCounters::LaunchEndStep(cudaStream_t stream) {
  Launch(EndStepKernel,
         {.grid = static_cast<unsigned>((step_.tokens + kThreads - 1) / kThreads),
          .block = kThreads,
          .stream = stream},
         EndStepArgs{.kind = step_.kind,
                     .tokens = step_.tokens,
                     .diversity = diversity_.as<int32_t>(),
                     .most = most_diversity_,
                     .histogram = LayOut(counts_.data()).histograms + num_buckets_});
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
