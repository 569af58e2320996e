// Splits of long contexts: computes the list of work items, and merges the partial results.
#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/attention/attention_kernels.h"
#include "kernels/cuda/attention/attention_rows.cuh"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"

namespace moeserve::cuda {
namespace {

constexpr int kWorkThreads = 256;
constexpr int kWarps = kWorkThreads / 32;
constexpr int kMergeThreads = 128;

struct SharedScan {
  int totals[kWarps];
};

// Returns the sum of `value` over the threads before this one; *total becomes the sum over all
// threads.
__device__ inline int ExclusiveSum(int value, SharedScan* shared, int* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive = value;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kFullMask, inclusive, step);
    if (lane >= step) inclusive += other;
  }
  if (lane == 31) shared->totals[warp] = inclusive;
  __syncthreads();
  int before = 0, all = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += shared->totals[w];
    all += shared->totals[w];
  }
  __syncthreads();
  *total = all;
  return before + inclusive - value;
}

__global__ void __launch_bounds__(kWorkThreads)
    WorkKernel(const StepView step, const int tokens, const SeenKeys seen, const int split_tokens,
               const AttentionWork work) {
  GridDependencyPass();
  auto* shared = DynamicShared<SharedScan>();
  int items = 0, wanted_slots = 0;
  for (int base = 0; base < tokens; base += kWorkThreads) {
    const int token = base + static_cast<int>(threadIdx.x);
    int first = 0, splits = 0;
    if (token < tokens) {
      splits = 1;
      const int sequence = step.sequence[token];
      if (sequence >= 0) {
        const int position = step.position[token];
        const int last = LastKey(seen, position, LengthOf(step, seen, sequence));
        first = FirstKey(seen, position) / split_tokens;
        splits = last / split_tokens - first + 1;
      }
    }
    int total;
    // After the first token that does not fit, no later token fits either, so slots are assigned by
    // a prefix sum alone.
    const int slot = wanted_slots + ExclusiveSum(splits > 1 ? splits : 0, shared, &total);
    wanted_slots += total;
    const bool split = splits > 1 && slot + splits <= work.slots;
    const int count = split ? splits : splits > 0;
    const int item = items + ExclusiveSum(count, shared, &total);
    items += total;
    if (token < tokens) work.slot_of_token[token] = split ? slot : -1;
    for (int i = 0; i < count; ++i) {
      work.item_token[item + i] = token;
      work.item_split[item + i] = split ? first + i : -1;
    }
  }
  if (threadIdx.x == 0) *work.item_count = items;
}

// Each warp merges 128 columns of one query head over all splits in ascending order.
__global__ void __launch_bounds__(kMergeThreads)
    MergeKernel(const AttentionLaunch a, const int split_tokens) {
  GridDependencyPass();
  constexpr int kAhead = 8;  // number of splits whose loads are in flight together
  const int token = blockIdx.x;
  const int first_slot = a.work.slot_of_token[token];
  if (first_slot < 0) return;
  const int n = blockIdx.y * (kMergeThreads / 32) + threadIdx.x / 32;
  int rows = 1, query_row = token;
  if (a.rows.row_offsets != nullptr) {
    rows = a.rows.row_offsets[token + 1] - a.rows.row_offsets[token];
  }
  if (n >= rows * a.heads) return;
  const int head = n % a.heads;
  if (a.rows.row_offsets != nullptr) {
    query_row = a.rows.assignments_of_row[a.rows.row_offsets[token] + n / a.heads];
  }
  const int position = a.step.position[token];
  const int last = LastKey(a.seen, position, LengthOf(a.step, a.seen, a.step.sequence[token]));
  const int splits = last / split_tokens - FirstKey(a.seen, position) / split_tokens + 1;
  const int padded = a.cache.padded_value_dim();
  const int64_t stride = PartialStride(padded);
  const int64_t split_stride = int64_t{a.rows.max_per_token} * a.heads * stride;
  const float* from = a.work.partial + first_slot * split_stride + n * stride;
  const int column = blockIdx.z * 128 + threadIdx.x % 32 * 4;
  const bool stored = column < padded;
  float maximum = kMinusInfinity, sum = 0.0f;
  float4 merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int begin = 0; begin < splits; begin += kAhead) {
    float2 weights[kAhead];
    float4 sums[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      weights[i] = make_float2(kMinusInfinity, 0.0f);
      sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (begin + i < splits) {
        const float* split = from + (begin + i) * split_stride;
        weights[i] = *reinterpret_cast<const float2*>(split + padded);
        if (stored) sums[i] = *reinterpret_cast<const float4*>(split + column);
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const MergeFactors f = Merge(&maximum, &sum, weights[i].x, weights[i].y);
      merged.x = fmaf(sums[i].x, f.split, merged.x * f.merged);
      merged.y = fmaf(sums[i].y, f.split, merged.y * f.merged);
      merged.z = fmaf(sums[i].z, f.split, merged.z * f.merged);
      merged.w = fmaf(sums[i].w, f.split, merged.w * f.merged);
    }
  }
  const float inverse = InverseOfSum(a, head, maximum, sum);
  const int dim = a.cache.value_dim();
  const int64_t to = query_row * a.output_stride + head * dim;
  const float values[4] = {merged.x * inverse, merged.y * inverse, merged.z * inverse,
                           merged.w * inverse};
  if (a.output_dtype == DType::kBF16) {
    Bf16* row = static_cast<Bf16*>(a.output) + to;
    StoreBf16Pair(row, column, dim, values[0], values[1]);
    StoreBf16Pair(row, column + 2, dim, values[2], values[3]);
    return;
  }
  float* row = static_cast<float*>(a.output) + to;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (column + i < dim) row[column + i] = values[i];
  }
}

constexpr int64_t RoundUp(int64_t n) { return (n + 15) / 16 * 16; }

}  // namespace

int SplitTokens(int group) {
  // A wide group has large partial results. With twice the tokens per split, they stay below a
  // tenth of the keys and values that are read.
  return group <= 8 ? 256 : 512;
}

int MaxSplits(int max_context, const SeenKeys& seen, int split_tokens) {
  const int all = (max_context + split_tokens - 1) / split_tokens;
  if (seen.window <= 0 || seen.window > max_context) return all < 1 ? 1 : all;
  const int keys = seen.causal ? seen.window : std::min(2 * (seen.window - 1) + 1, max_context);
  // n neighbouring keys overlap at most 1 + ceil((n - 1) / split_tokens) splits.
  const int touched = 1 + (keys - 1 + split_tokens - 1) / split_tokens;
  return touched < all ? touched : all;
}

int64_t PartialFloats(int query_heads, int head_dim) {
  return query_heads * PartialStride(PaddedHeadDim(head_dim));
}

int64_t AttentionWorkBytes(int max_tokens, int slots, int64_t row_floats) {
  const int64_t items = int64_t{slots} + max_tokens;
  return 4 * (16 + 2 * RoundUp(items) + RoundUp(max_tokens) + slots * row_floats);
}

int AttentionSlots(int64_t row_floats) {
  constexpr int64_t kFewest = 512, kMost = 8192;
  constexpr int64_t kBytes = int64_t{192} << 20;
  MOESERVE_CHECK(row_floats > 0, "floats of a partial result");
  return static_cast<int>(
      std::clamp(kBytes / static_cast<int64_t>(row_floats * sizeof(float)), kFewest, kMost));
}

AttentionWork LayOutAttentionWork(void* memory, int max_tokens, int slots) {
  const int64_t items = int64_t{slots} + max_tokens;
  auto* next = static_cast<int32_t*>(memory);
  AttentionWork w;
  w.max_tokens = max_tokens;
  w.slots = slots;
  w.item_count = next;
  w.item_token = next + 16;
  w.item_split = w.item_token + RoundUp(items);
  w.slot_of_token = w.item_split + RoundUp(items);
  w.partial = reinterpret_cast<float*>(w.slot_of_token + RoundUp(max_tokens));
  return w;
}

void LaunchAttentionWork(const StepView& step, int tokens, const SeenKeys& seen, int split_tokens,
                         const AttentionWork& work, cudaStream_t stream) {
  MOESERVE_CHECK(tokens <= work.max_tokens, "tokens of the attention work list");
  if (tokens == 0) return;
  Launch(WorkKernel,
         {.grid = dim3(1),
          .block = dim3(kWorkThreads),
          .shared_bytes = sizeof(SharedScan),
          .stream = stream,
          .overlaps_predecessor = true},
         step, tokens, seen, split_tokens, work);
}

void LaunchMergeSplits(const AttentionLaunch& args, cudaStream_t stream) {
  const int query_heads = args.heads * args.rows.max_per_token;
  Launch(
      MergeKernel,
      {.grid = dim3(args.tiled_from, (query_heads + kMergeThreads / 32 - 1) / (kMergeThreads / 32),
                    (args.cache.padded_value_dim() + 127) / 128),
       .block = dim3(kMergeThreads),
       .stream = stream,
       .overlaps_predecessor = true},
      args, SplitTokensOf(args));
}

}  // namespace moeserve::cuda
