#include <algorithm>
#include <array>
#include <map>

#include "base/check.h"
#include "base/mutex.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/rows/row_sampler.cuh"
#include "kernels/cuda/rows/sampler.h"

namespace moeserve::cuda {
namespace {

// A block has one warp per 32 * kTokensPerThread tokens of the vocabulary, up to kMaxWarps.
constexpr int kTokensPerThread = 8;
// Estimates: rows up to kOneBlockTokens gain little from clusters, and those above kLongRow gain
// from more than 8 blocks.
constexpr int kOneBlockTokens = 32768;
constexpr int kLongRow = 400'000;

template <bool kCached>
__global__ void __launch_bounds__(kMaxWarps * 32, 1) SampleKernel(SampleLaunch args) {
  GridDependencyPass();
  const SampleRow row = args.rows[blockIdx.x];
  if (row.row < 0) return;
  char* memory = DynamicShared<char>();
  RowSampler<kCached, false> sampler(
      *reinterpret_cast<SharedState*>(memory), nullptr, args.logits + row.row * args.stride,
      reinterpret_cast<float*>(memory + kStateBytes), args.vocabulary, row.drawable);
  sampler.Run(row, args.results[blockIdx.x]);
}

// One cluster per row.
__global__ void __launch_bounds__(kMaxWarps * 32, 1) SampleClusterKernel(SampleLaunch args) {
  GridDependencyPass();
  const uint32_t index = blockIdx.x / ClusterBlocks();
  const SampleRow row = args.rows[index];
  if (row.row < 0) return;
  char* memory = DynamicShared<char>();
  auto* cluster = reinterpret_cast<ClusterState*>(memory + kStateBytes);
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : cluster->barriers) MbarrierInit(&barrier, 1);
    MbarrierInitFence();
  }
  __syncwarp();
  ClusterArrive();  // Load() waits
  RowSampler<true, true> sampler(
      *reinterpret_cast<SharedState*>(memory), cluster, args.logits + row.row * args.stride,
      reinterpret_cast<float*>(memory + kStateBytes + kClusterStateBytes), args.vocabulary,
      row.drawable);
  sampler.Run(row, args.results[index]);
}

// Returns the shape of a launch with one block per row, or one cluster of `blocks` > 1 blocks.
LaunchShape SampleShape(int rows, int vocabulary, int blocks, cudaStream_t stream) {
  const int per_warp = 32 * kTokensPerThread * blocks;
  const int warps = std::min((vocabulary + per_warp - 1) / per_warp, kMaxWarps);
  LaunchShape shape{dim3(static_cast<unsigned>(rows * blocks)),
                    dim3(static_cast<unsigned>(warps * 32)),
                    kStateBytes,
                    stream,
                    true,
                    dim3(static_cast<unsigned>(blocks))};
  if (blocks > 1) {
    shape.shared_bytes += kClusterStateBytes + static_cast<size_t>(warps) * sizeof(float) *
                                                   SegmentTokens(vocabulary, blocks, warps);
  }
  return shape;
}

// Returns whether the current device can run a cluster of this size. Asks CUDA once per shape.
bool CanSampleByClusters(int vocabulary, int blocks) {
  static Mutex mutex;
  static auto* const known ABSL_PT_GUARDED_BY(mutex) = new std::map<std::array<int, 3>, bool>;
  if (!HasClusters()) return false;
  const LaunchShape shape = SampleShape(1, vocabulary, blocks, nullptr);
  if (shape.shared_bytes > SharedMemoryLimit()) return false;
  int device = 0;
  MOESERVE_CHECK(cudaGetDevice(&device) == cudaSuccess, "no current CUDA device");
  MutexLock lock(mutex);
  const auto [entry, is_new] = known->try_emplace({device, vocabulary, blocks}, false);
  if (is_new) entry->second = MaxActiveClusters(SampleClusterKernel, shape) > 0;
  return entry->second;
}

}  // namespace

std::vector<int> SampleBlockCounts(int vocabulary) {
  std::vector<int> counts = {1};
  for (const int blocks : {4, 8, 16}) {
    if (CanSampleByClusters(vocabulary, blocks)) counts.push_back(blocks);
  }
  return counts;
}

int ChooseSampleBlocks(int rows, int vocabulary) {
  if (vocabulary <= kOneBlockTokens) return 1;
  const int multiprocessors = DeviceAttribute(cudaDevAttrMultiProcessorCount);
  const int most = vocabulary > kLongRow ? 16 : 8;
  for (const int blocks : {most, 8, 4}) {
    if (rows * blocks <= multiprocessors && CanSampleByClusters(vocabulary, blocks)) return blocks;
  }
  for (const int blocks : {4, 8, 16}) {
    if (CanSampleByClusters(vocabulary, blocks)) return blocks;
  }
  return 1;
}

void LaunchSample(const SampleLaunch& args, cudaStream_t stream) {
  MOESERVE_CHECK(args.vocabulary >= 1 && args.vocabulary <= 1 << 23 &&
                     args.stride >= args.vocabulary && args.count >= 0,
                 "shape of the logits");
  const int blocks =
      args.blocks == 0 ? ChooseSampleBlocks(args.count, args.vocabulary) : args.blocks;
  LaunchShape shape = SampleShape(args.count, args.vocabulary, blocks, stream);
  if (blocks > 1) {
    MOESERVE_CHECK(blocks <= kMaxBlocks && CanSampleByClusters(args.vocabulary, blocks),
                   "blocks per row of the sampler");
    Launch(SampleClusterKernel, shape, args);
    return;
  }
  const size_t with_row = kStateBytes + static_cast<size_t>(args.vocabulary) * sizeof(float);
  if (with_row <= SharedMemoryLimit()) {
    shape.shared_bytes = with_row;
    Launch(SampleKernel<true>, shape, args);
  } else {
    Launch(SampleKernel<false>, shape, args);
  }
}

}  // namespace moeserve::cuda
