// Attention of single tokens over a bf16 or int8 cache on the tensor cores, by a cluster of blocks
// per token and kv head. The blocks compute the splits of the context in turn, a round of
// neighbouring splits at a time. They send the results of a round to each other's shared memory,
// where each block merges its share of the columns in ascending order of the splits: the sums, and
// so the bits, are those of attention_split_mma.cu and attention_work.cu, but there is no work
// list, no second launch, and no partial result in device memory.
#include <array>
#include <map>

#include "base/check.h"
#include "base/mutex.h"
#include "kernels/cuda/attention/attention_kernels.h"
#include "kernels/cuda/attention/attention_prepare.cuh"
#include "kernels/cuda/attention/attention_split.cuh"
#include "kernels/cuda/device/cluster.cuh"
#include "kernels/cuda/device/launch.h"

namespace moeserve::cuda {
namespace {

constexpr int kMostClusterBlocks = 16, kFewestClusterBlocks = 4;

__device__ __forceinline__ int Log2(int power_of_two) { return 31 - __clz(power_of_two); }

template <int kDim, bool kInt8>
struct SharedCluster {
  SharedSplit<kDim, 2, kInt8> split;
  // What the blocks send to this block in even and in odd rounds.
  alignas(16) float sums[2][kSplitRows * kDim];       // [rank][row][column of this block]
  float2 weights[2][kMostClusterBlocks][kSplitRows];  // the maximum and the sum of weights
  uint64_t sent[2];                                   // mbarriers of the rounds' bytes
};

// Merges the results of a cluster's blocks. Of the rows, each block has the columns from its rank *
// kDim / blocks on; eight threads share a row.
//
// A round is merged when the block has computed its split of the next round, so it seldom waits for
// slower blocks. The results of that next round are sent only then, and after a barrier. So a block
// that has all results of a round knows that the round before it has been merged everywhere, and
// that its buffers may be overwritten.
template <int kDim, bool kInt8>
class ClusterMerge {
  static constexpr int kThreadsOfRow = kSplitThreads / kSplitRows;
  // The pairs of columns of a thread in the smallest cluster.
  static constexpr int kPairs = kDim / kFewestClusterBlocks / 2 / kThreadsOfRow;

 public:
  // `rows` is the number of the block's rows in use. Starts the cluster's first barrier.
  __device__ __forceinline__ ClusterMerge(SharedCluster<kDim, kInt8>& shared, int splits, int rows)
      : shared_(shared),
        rank_(static_cast<int>(ClusterRank())),
        blocks_(static_cast<int>(ClusterBlocks())),
        splits_(splits),
        rows_(rows),
        columns_(kDim >> Log2(blocks_)),
        row_(static_cast<int>(threadIdx.x) / kThreadsOfRow),
        first_(static_cast<int>(threadIdx.x) % kThreadsOfRow * 2) {
    if (threadIdx.x == 0) {
      for (uint64_t& barrier : shared_.sent) MbarrierInit(&barrier, 1);
      MbarrierInitFence();
    }
    __syncwarp();
    ClusterArrive();
  }

  // Merges the round before the one that the block has computed.
  __device__ __forceinline__ void MergePrevious() {
    if (round_ > 0) MergeRound(round_ - 1);
  }

  // Sends the results of this round to the blocks that have their columns. There must be a barrier
  // between MergePrevious() and this.
  __device__ __forceinline__ void Send(const float (&maximum)[2], const float (&sum)[2],
                                       const SplitSums<kDim>& sums) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int buffer = round_ % 2;
    EndRound();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane / 4 + h * 8;
      if (row >= rows_) continue;
#pragma unroll
      for (int n = 0; n < kSplitColumns<kDim> / 8; ++n) {
        const int column = warp * kSplitColumns<kDim> + n * 8 + lane % 4 * 2;
        const int owner = column >> Log2(columns_);
        SendPair(owner, buffer, Place(buffer, rank_, row) + (column & (columns_ - 1)),
                 make_float2(sums[n][h * 2], sums[n][h * 2 + 1]));
      }
      const int owner = warp * 4 + lane % 4;
      static_assert(kSplitThreads / 32 * 4 == kMostClusterBlocks);
      if (owner < blocks_) {
        SendPair(owner, buffer, &shared_.weights[buffer][rank_][row],
                 make_float2(maximum[h], sum[h]));
      }
    }
    __syncwarp();
  }

  // Merges the remaining rounds and stores the rows.
  __device__ __forceinline__ void Finish(const AttentionLaunch& a) {
    for (int merged = max(round_ - 1, 0); merged * blocks_ < splits_; ++merged) {
      if (merged == round_) EndRound();  // the last round has no split for this block
      MergeRound(merged);
    }
    StoreRows(a);
  }

 private:
  __device__ __forceinline__ void EndRound() {
    // The other blocks have started.
    if (round_ == 0) ClusterWait();
    if (threadIdx.x == 0) {
      const int bytes = BlocksOf(round_) * rows_ * (columns_ * 4 + 8);
      MbarrierArriveExpect(&shared_.sent[round_ % 2], static_cast<uint32_t>(bytes));
    }
    ++round_;
  }

  // Returns the number of blocks that have a split in a round.
  __device__ __forceinline__ int BlocksOf(int round) const {
    return min(splits_ - round * blocks_, blocks_);
  }
  // Returns the place of the first of this block's columns in a row of what a block sends.
  __device__ __forceinline__ float* Place(int buffer, int rank, int row) {
    return shared_.sums[buffer] + (rank * kSplitRows + row) * columns_;
  }

  __device__ __forceinline__ void SendPair(int owner, int buffer, const void* place, float2 pair) {
    const auto rank = static_cast<uint32_t>(owner);
    ClusterStoreAsync(ClusterAddress(place, rank), pair,
                      ClusterAddress(&shared_.sent[buffer], rank));
  }

  __device__ __forceinline__ void MergeRound(int round) {
    const int buffer = round % 2, count = BlocksOf(round);
    MbarrierWait(&shared_.sent[buffer], round / 2 % 2);
    if (row_ < rows_) {
#pragma unroll 4
      for (int rank = 0; rank < count; ++rank) {
        const float2 weights = shared_.weights[buffer][rank][row_];
        const float* from = Place(buffer, rank, row_) + first_;
        const MergeFactors f = Merge(&maximum_, &sum_, weights.x, weights.y);
#pragma unroll
        for (int p = 0; p < kPairs; ++p) {
          if (!HasPair(p)) continue;
          const float2 sums = *reinterpret_cast<const float2*>(from + p * 2 * kThreadsOfRow);
          merged_[p].x = fmaf(sums.x, f.split, merged_[p].x * f.merged);
          merged_[p].y = fmaf(sums.y, f.split, merged_[p].y * f.merged);
        }
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ bool HasPair(int p) const {
    return first_ + p * 2 * kThreadsOfRow < columns_;
  }

  __device__ __forceinline__ void StoreRows(const AttentionLaunch& a) const {
    if (row_ >= rows_) return;
    const int query_row = shared_.split.rows.query_row[row_];
    const int head = shared_.split.rows.head[row_];
    const int dim = a.cache.value_dim();
    const float inverse = InverseOfSum(a, head, maximum_, sum_);
    Bf16* to = static_cast<Bf16*>(a.output) + query_row * a.output_stride + head * dim;
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      if (!HasPair(p)) continue;
      StoreBf16Pair(to, rank_ * columns_ + first_ + p * 2 * kThreadsOfRow, dim,
                    merged_[p].x * inverse, merged_[p].y * inverse);
    }
  }

  SharedCluster<kDim, kInt8>& shared_;
  const int rank_, blocks_;
  const int splits_, rows_;
  const int columns_;      // per block
  const int row_, first_;  // the row and the first column that this thread merges
  int round_ = 0;
  float maximum_ = kMinusInfinity, sum_ = 0.0f;
  float2 merged_[kPairs] = {};
};

// The grid is (ranks of the clusters of all chunks of rows) x kv heads x tokens. `prepare` is
// NormRopeAppendLaunch, with a bf16 cache, or NoPrepare.
template <int kDim, bool kInt8, typename Prepare>
__global__ void __launch_bounds__(kSplitThreads)
    AttentionClusterKernel(const AttentionLaunch a, const int split_tokens, const float scale,
                           const Prepare prepare) {
  GridDependencyPass();
  const int rank = static_cast<int>(ClusterRank()), blocks = static_cast<int>(ClusterBlocks());
  const int token = blockIdx.z, kv_head = blockIdx.y;
  const int chunk = static_cast<int>(blockIdx.x) >> Log2(blocks);
  const int sequence = a.step.sequence[token], position = a.step.position[token];
  const int heads = QueryHeadsOf(a, token, token + 1) - chunk * kSplitRows;
  if constexpr (kPrepares<Prepare>) {
    // A token may have no query rows.
    const int splits = position / split_tokens - FirstKey(a.seen, position) / split_tokens + 1;
    const bool appends = sequence >= 0 && (chunk == 0 || heads > 0);
    if (appends && rank == (splits - 1) % blocks) {
      AppendToken(a, prepare, token, sequence, position, kv_head);
    }
  }
  if (heads <= 0) return;
  auto& shared = *DynamicShared<SharedCluster<kDim, kInt8>>();
  auto& rows = shared.split.rows;
  const int length = LengthOf(a.step, a.seen, sequence);
  if (sequence < 0) {
    if (rank > 0) return;
    FindRows(a, token, token + 1, kv_head, chunk, length, &rows);
    StoreZeros(a, rows, kSplitThreads);
    return;
  }
  // All rows are those of one token, so their keys are known before the rows.
  const int first = FirstKey(a.seen, position), last = LastKey(a.seen, position, length);
  const BlockKeys range{a.step.page_tables + int64_t{sequence} * a.step.table_stride, first, last,
                        TilesOf<kTileKeys>(first, last)};
  const int first_split = first >> Log2(split_tokens), split_tiles = split_tokens / kTileKeys;
  const SplitTiles tiles{max(range.tiles.begin, (first_split + rank) * split_tiles),
                         range.tiles.end, split_tiles, (blocks - 1) * split_tiles};
  ClusterMerge<kDim, kInt8> merge(shared, (last >> Log2(split_tokens)) - first_split + 1,
                                  min(heads, kSplitRows));
  ComputeSplits(
      a, scale, kv_head, range, tiles, shared.split,
      [&] {
        FindRows(a, token, token + 1, kv_head, chunk, length, &rows);
        if constexpr (kPrepares<Prepare>) {
          LoadPreparedQueries<kDim, kSplitRows, kSplitThreads>(a, prepare, token, rows,
                                                               shared.split.queries);
        } else {
          LoadQueries<kDim, kSplitRows, kSplitThreads>(a, rows, shared.split.queries);
        }
      },
      [&](float factor, RowState<1>* state, SplitSums<kDim>& sums) {
        const float maximum[2] = {state->maximum[0] * factor, state->maximum[1] * factor};
        float sum[2];
        merge.MergePrevious();
        ShareSums(shared.split, *state, sum);
        merge.Send(maximum, sum, sums);
        *state = {};
#pragma unroll
        for (auto& fragment : sums) {
#pragma unroll
          for (float& s : fragment) s = 0.0f;
        }
      });
  merge.Finish(a);
}

template <int kDim, bool kInt8>
LaunchShape ClusterShape(const AttentionLaunch& args, int blocks, cudaStream_t stream) {
  const int chunks = (GroupOf(args) + kSplitRows - 1) / kSplitRows;
  return {.grid = dim3(blocks * chunks, args.cache.num_kv_heads, args.tiled_from),
          .block = dim3(kSplitThreads),
          .shared_bytes = sizeof(SharedCluster<kDim, kInt8>),
          .stream = stream,
          .overlaps_predecessor = true,
          .cluster = dim3(blocks)};
}

// Returns whether the current device can run a cluster of this size. Asks CUDA once per shape.
template <int kDim, bool kInt8>
bool CanRunCluster(int blocks) {
  static Mutex mutex;
  static auto* const known ABSL_PT_GUARDED_BY(mutex) = new std::map<std::array<int, 2>, bool>;
  LaunchShape shape{.grid = dim3(blocks),
                    .block = dim3(kSplitThreads),
                    .shared_bytes = sizeof(SharedCluster<kDim, kInt8>),
                    .cluster = dim3(blocks)};
  if (shape.shared_bytes > SharedMemoryLimit()) return false;
  int device = 0;
  MOESERVE_CHECK(cudaGetDevice(&device) == cudaSuccess, "no current CUDA device");
  MutexLock lock(mutex);
  const auto [entry, is_new] = known->try_emplace({device, blocks}, false);
  if (is_new) {
    entry->second = MaxActiveClusters(AttentionClusterKernel<kDim, kInt8, NoPrepare>, shape) > 0;
  }
  return entry->second;
}

template <int kDim, bool kInt8, typename Prepare>
void LaunchOf(const AttentionLaunch& args, int blocks, const Prepare& prepare,
              cudaStream_t stream) {
  Launch(AttentionClusterKernel<kDim, kInt8, Prepare>,
         ClusterShape<kDim, kInt8>(args, blocks, stream), args, SplitTokensOf(args),
         args.scale * kLog2E, prepare);
}

}  // namespace

bool ClusterAttentionFits(const AttentionLaunch& args, int blocks) {
  constexpr int kMostInGrid = 65535;  // in its y and z directions
  if (!HasClusters() || args.tiled_from > kMostInGrid || args.cache.num_kv_heads > kMostInGrid) {
    return false;
  }
  const bool int8 = args.cache.type == KvCacheType::kInt8;
  bool fits = false;
  WithWidthOfHeads(args.cache.widest_dim(), [&]<int kDim>() {
    fits = int8 ? CanRunCluster<kDim, true>(blocks) : CanRunCluster<kDim, false>(blocks);
  });
  return fits;
}

void LaunchClusterMma(const AttentionLaunch& args, int blocks, cudaStream_t stream) {
  const bool int8 = args.cache.type == KvCacheType::kInt8;
  MOESERVE_CHECK(!int8 || args.prepare == nullptr, "attention appends to bf16 caches only");
  WithWidthOfHeads(args.cache.widest_dim(), [&]<int kDim>() {
    if (args.prepare != nullptr) {
      LaunchOf<kDim, false>(args, blocks, PrepareOf(args), stream);
    } else if (int8) {
      LaunchOf<kDim, true>(args, blocks, NoPrepare{}, stream);
    } else {
      LaunchOf<kDim, false>(args, blocks, NoPrepare{}, stream);
    }
  });
}

}  // namespace moeserve::cuda
