#include <algorithm>
#include <tuple>
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
  uint8_t* failed;
};

__global__ void __launch_bounds__(kThreads) BeginStepKernel(BeginStepArgs a) {
  const int thread = static_cast<int>(threadIdx.x);
  int counts[3] = {};
  for (int t = thread; t < a.tokens; t += kThreads) {
    const uint8_t kind = a.kind[t];
#pragma unroll
    for (int k = 0; k < 3; ++k) counts[k] += kind == k;
    a.diversity[t] = 0;
    a.failed[t] = 0;
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
  uint8_t* failed;
};

struct Share {
  double weights;
  int32_t decoded, recomputed, tokens;
};

// An expert's assignments lie together, rows ascending: those of one token are neighbours, so the
// first of them is seen without a mark.
__device__ void CountExpert(const CountArgs& a, int e, Share* shares) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int32_t begin = a.plan.expert_offsets[e], end = a.plan.expert_offsets[e + 1];
  const int stride = 32 * a.warps_per_expert;
  const int first_lane = a.warps_per_expert == 1 ? lane : static_cast<int>(threadIdx.x);
  Share own{0.0, 0, 0, 0};
  for (int32_t i = begin + first_lane; i < end; i += stride) {
    const int32_t token = a.plan.row_of_assignment[i] / a.sub_tokens;
    const bool first = i == begin || a.plan.row_of_assignment[i - 1] / a.sub_tokens != token;
    const uint8_t kind = a.kind[token];
    if (kind == kTokenRecompute) {
      ++own.recomputed;
      continue;
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
    int bad = 0;
    for (int r = t * a.sub_tokens; r < (t + 1) * a.sub_tokens; ++r) {
      const uint8_t status = a.plan.row_nonfinite[r];
      bad += status != 0;
      if (status == 2) a.failed[t] = 1;
    }
    if (kind == kTokenRecompute) continue;
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

Result<ExpertCounters> ExpertCounters::Create(std::vector<CountedBlock> blocks, int max_tokens) {
  ExpertCounters c;
  for (const CountedBlock& block : blocks) {
    c.blocks_.push_back({.block = block, .experts = c.num_experts_, .histogram = c.num_buckets_});
    c.num_experts_ += block.num_experts;
    c.num_buckets_ += block.most_distinct + 1;
    if (block.diverse) c.most_diversity_ += block.most_distinct;
  }
  const int64_t counter = sizeof(uint64_t);
  MOESERVE_ASSIGN_OR_RETURN(c.model_, Zeroed(sizeof(ModelCounts)));
  MOESERVE_ASSIGN_OR_RETURN(c.experts_,
                            Zeroed(c.num_experts_ * static_cast<int64_t>(sizeof(ExpertCount))));
  MOESERVE_ASSIGN_OR_RETURN(c.histograms_,
                            Zeroed((c.num_buckets_ + c.most_diversity_ + 1) * counter));
  MOESERVE_ASSIGN_OR_RETURN(c.nonfinite_, Zeroed(static_cast<int64_t>(blocks.size()) * counter));
  MOESERVE_ASSIGN_OR_RETURN(c.step_, Zeroed(sizeof(StepState)));
  MOESERVE_RETURN_IF_ERROR(c.Reserve(max_tokens));
  return c;
}

Status ExpertCounters::Reserve(int max_tokens) {
  if (max_tokens <= max_tokens_ && distinct_.data() != nullptr) return absl::OkStatus();
  MOESERVE_ASSIGN_OR_RETURN(distinct_, Zeroed(int64_t{max_tokens} * 4));
  MOESERVE_ASSIGN_OR_RETURN(diversity_, Zeroed(int64_t{max_tokens} * 4));
  MOESERVE_ASSIGN_OR_RETURN(failed_, Zeroed(max_tokens));
  max_tokens_ = max_tokens;
  return absl::OkStatus();
}

void ExpertCounters::LaunchBeginStep(const uint8_t* kind, int tokens, cudaStream_t stream) {
  MOESERVE_CHECK(tokens <= max_tokens_, "ExpertCounters::Reserve comes before the step");
  kind_ = kind;
  tokens_ = tokens;
  Launch(BeginStepKernel, {.grid = 1, .block = kThreads, .stream = stream},
         BeginStepArgs{.kind = kind,
                       .tokens = tokens,
                       .model = model_.as<ModelCounts>(),
                       .step = step_.as<StepState>(),
                       .diversity = diversity_.as<int32_t>(),
                       .failed = failed_.as<uint8_t>()});
}

void ExpertCounters::LaunchCount(int block, const RoutingPlan& plan, cudaStream_t stream) {
  const Placed& placed = blocks_[static_cast<size_t>(block)];
  const CountedBlock& b = placed.block;
  MOESERVE_CHECK(plan.rows == tokens_ * b.sub_tokens && plan.num_experts == b.num_experts,
                 "a plan of this block and step");
  const bool warps = plan.rows <= kWarpRows;
  const int64_t blocks = warps ? (b.num_experts + kWarps - 1) / kWarps : b.num_experts;
  const size_t shared =
      16 + kWarps * sizeof(Share) + (static_cast<size_t>(b.most_distinct) + 1) * 4;
  Launch(CountKernel,
         {.grid = static_cast<unsigned>(blocks),
          .block = kThreads,
          .shared_bytes = shared,
          .stream = stream},
         CountArgs{.plan = plan,
                   .kind = kind_,
                   .tokens = tokens_,
                   .sub_tokens = b.sub_tokens,
                   .warps_per_expert = warps ? 1 : kWarps,
                   .diverse = b.diverse,
                   .most_distinct = b.most_distinct,
                   .model = model_.as<ModelCounts>(),
                   .step = step_.as<StepState>(),
                   .experts = experts_.as<ExpertCount>() + placed.experts,
                   .histogram = histograms_.as<uint64_t>() + placed.histogram,
                   .nonfinite = nonfinite_.as<uint64_t>() + block,
                   .distinct = distinct_.as<int32_t>(),
                   .diversity = diversity_.as<int32_t>(),
                   .failed = failed_.as<uint8_t>()});
}

void ExpertCounters::LaunchEndStep(cudaStream_t stream) {
  Launch(EndStepKernel,
         {.grid = static_cast<unsigned>((tokens_ + kThreads - 1) / kThreads),
          .block = kThreads,
          .stream = stream},
         EndStepArgs{.kind = kind_,
                     .tokens = tokens_,
                     .diversity = diversity_.as<int32_t>(),
                     .most = most_diversity_,
                     .histogram = histograms_.as<uint64_t>() + num_buckets_});
}

Result<CountsSnapshot> ExpertCounters::Read(cudaStream_t stream) const {
  CountsSnapshot s;
  std::vector<ExpertCount> experts(static_cast<size_t>(num_experts_));
  std::vector<uint64_t> histograms(static_cast<size_t>(num_buckets_ + most_diversity_ + 1));
  std::vector<uint64_t> nonfinite(blocks_.size());
  for (auto [to, from, bytes] :
       {std::tuple<void*, const DeviceMemory*, size_t>{&s.model, &model_, sizeof(s.model)},
        {experts.data(), &experts_, experts.size() * sizeof(ExpertCount)},
        {histograms.data(), &histograms_, histograms.size() * sizeof(uint64_t)},
        {nonfinite.data(), &nonfinite_, nonfinite.size() * sizeof(uint64_t)}}) {
    MOESERVE_CUDA_RETURN_IF_ERROR(
        cudaMemcpyAsync(to, from->data(), bytes, cudaMemcpyDeviceToHost, stream));
  }
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const Placed& p = blocks_[i];
    BlockCounts& b = s.blocks.emplace_back();
    b.experts.assign(experts.begin() + p.experts,
                     experts.begin() + p.experts + p.block.num_experts);
    b.distinct_histogram.assign(histograms.begin() + p.histogram,
                                histograms.begin() + p.histogram + p.block.most_distinct + 1);
    b.nonfinite_rows = nonfinite[i];
  }
  s.diversity_histogram.assign(histograms.begin() + num_buckets_, histograms.end());
  return s;
}

}  // namespace moeserve::cuda
