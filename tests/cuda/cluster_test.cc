// Clusters of blocks: barriers, shared memory of other blocks and copies between them. On the
// emulated device, also checks the errors that it must report.

#include "kernels/cuda/device/cluster.cuh"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/device/launch.h"
#include "tests/cuda/emulator_test_support.h"

namespace moeserve::cuda {
namespace {

// Devices without clusters skip these tests.
#define MOESERVE_NEEDS_CLUSTERS() \
  if (!HasClusters()) GTEST_SKIP() << "the device has no clusters"

__global__ void ClusterRankKernel(uint32_t* out) {
  const uint32_t block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  if (threadIdx.x == 0) out[block] = ClusterRank() * 100 + ClusterBlocks();
}

TEST(Cluster, RanksFollowTheDimensionsOfTheCluster) {
  MOESERVE_NEEDS_CLUSTERS();
  InEveryOrder([] {
    DeviceArray<uint32_t> out(6 * 4 * 2), alone(3);
    Launch(ClusterRankKernel, {.grid = dim3(6, 4, 2), .block = dim3(32), .cluster = dim3(3, 2, 1)},
           out.data());
    Launch(ClusterRankKernel, {.grid = dim3(3), .block = dim3(32)}, alone.data());
    const std::vector<uint32_t> got = out.Read();
    for (uint32_t i = 0; i < got.size(); ++i) {
      const uint32_t x = i % 6, y = i / 6 % 4;
      EXPECT_EQ(got[i], (y % 2 * 3 + x % 3) * 100 + 6) << i;
    }
    EXPECT_EQ(alone.Read(), (std::vector<uint32_t>{1, 1, 1}));
  });
}

struct ClusterExchange {
  uint4 quads[32];
  uint2 pairs[32];
  uint32_t words[32];
  uint32_t own[32];
};

// Each block stores values of 4, 8 and 16 bytes in the next block's memory and loads words from the
// one before. Without `sync`, it does not wait for the others after its stores.
__global__ void ClusterExchangeKernel(uint32_t* out, bool sync) {
  auto* shared = DynamicShared<ClusterExchange>();
  const uint32_t rank = ClusterRank(), blocks = ClusterBlocks(), t = threadIdx.x;
  const uint32_t value = blockIdx.x * 1000 + t;
  ClusterSync();
  const uint32_t next = (rank + 1) % blocks;
  ClusterStore(ClusterAddress(shared->quads + t, next), uint4{value, value + 1, value + 2, value});
  ClusterStore(ClusterAddress(shared->pairs + t, next), uint2{value, value + 3});
  ClusterStore(ClusterAddress(shared->words + t, next), value);
  shared->own[t] = value;
  if (sync) {
    ClusterSync();
  } else {
    __syncthreads();
  }
  uint32_t sum = shared->quads[t].z + shared->pairs[t].y + shared->words[t];
  sum += ClusterLoad<uint32_t>(ClusterAddress(shared->own + 31 - t, (rank + blocks - 1) % blocks));
  out[blockIdx.x * 32 + t] = sum;
  ClusterSync();
}

TEST(Cluster, BlocksAccessEachOthersMemory) {
  MOESERVE_NEEDS_CLUSTERS();
  for (const uint32_t blocks : {1u, 2u, 4u, 8u}) {
    InEveryOrder([&] {
      DeviceArray<uint32_t> out(16 * 32);
      Launch(ClusterExchangeKernel,
             {.grid = dim3(16),
              .block = dim3(32),
              .shared_bytes = sizeof(ClusterExchange),
              .cluster = dim3(blocks)},
             out.data(), true);
      const std::vector<uint32_t> got = out.Read();
      for (uint32_t i = 0; i < got.size(); ++i) {
        const uint32_t block = i / 32, t = i % 32;
        const uint32_t previous = block / blocks * blocks + (block + blocks - 1) % blocks;
        EXPECT_EQ(got[i], 4 * previous * 1000 + 3 * t + 5 + 31 - t) << blocks << ", " << i;
      }
    });
  }
}

struct ClusterRing {
  uint32_t items[2][32];
  uint64_t full[2];
  uint64_t empty[2];
};

// Block 1 of each cluster hands items to block 0 through a ring of two buffers in block 0. With
// `cta_scope`, block 0 waits as if the items came from its own block, which is an error.
__global__ void ClusterRingKernel(uint32_t* out, uint32_t items, bool cta_scope) {
  auto* shared = DynamicShared<ClusterRing>();
  const uint32_t rank = ClusterRank(), t = threadIdx.x;
  if (t == 0) {
    for (int i = 0; i < 2; ++i) {
      MbarrierInit(shared->full + i, 32);
      MbarrierInit(shared->empty + i, 1);
    }
    MbarrierInitFence();
  }
  ClusterSync();
  for (uint32_t item = 0; item < items; ++item) {
    const uint32_t slot = item % 2, parity = item / 2 % 2;
    if (rank == 1) {
      if (item >= 2) MbarrierWaitCluster(shared->empty + slot, parity ^ 1u);
      ClusterStore(ClusterAddress(shared->items[slot] + t, 0), item * 100 + t);
      MbarrierArriveCluster(ClusterAddress(shared->full + slot, 0));
    } else {
      if (cta_scope) {
        MbarrierWait(shared->full + slot, parity);
      } else {
        MbarrierWaitCluster(shared->full + slot, parity);
      }
      out[(blockIdx.x / 2 * items + item) * 32 + t] = shared->items[slot][31 - t];
      __syncwarp();
      if (t == 0) MbarrierArriveCluster(ClusterAddress(shared->empty + slot, 1));
    }
  }
  ClusterSync();
}

TEST(Cluster, MbarriersCarryARingBetweenBlocks) {
  MOESERVE_NEEDS_CLUSTERS();
  constexpr uint32_t kItems = 7;
  const LaunchShape shape{
      .grid = dim3(4), .block = dim3(32), .shared_bytes = sizeof(ClusterRing), .cluster = dim3(2)};
  InEveryOrder([&] {
    DeviceArray<uint32_t> out(2 * kItems * 32);
    Launch(ClusterRingKernel, shape, out.data(), kItems, false);
    const std::vector<uint32_t> got = out.Read();
    for (uint32_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i], i / 32 % kItems * 100 + 31 - i % 32) << i;
    }
  });
}

constexpr uint32_t kBulkWords = 64;
struct ClusterBulk {
  uint32_t from_global[kBulkWords];
  uint32_t from_block[kBulkWords];
  uint32_t source[kBulkWords];
  uint4 quads[8];
  uint2 pairs[8];
  uint32_t words[8];
  uint64_t global_barrier;
  uint64_t block_barrier;
  uint64_t store_barrier;
};

// Block 1 copies from global memory to the blocks in `mask`, each block copies to the next one, and
// all blocks store values in block 0.
__global__ void ClusterBulkKernel(const uint32_t* in, uint32_t* out, uint32_t mask) {
  auto* shared = DynamicShared<ClusterBulk>();
  const uint32_t rank = ClusterRank(), blocks = ClusterBlocks(), t = threadIdx.x;
  PrefetchBulk(in, kBulkWords * 4);
  if (t == 0) {
    MbarrierInit(&shared->global_barrier, 1);
    MbarrierInit(&shared->block_barrier, 1);
    MbarrierInit(&shared->store_barrier, 1);
    MbarrierInitFence();
    if ((mask >> rank & 1u) != 0) MbarrierArriveExpect(&shared->global_barrier, kBulkWords * 4);
    MbarrierArriveExpect(&shared->block_barrier, kBulkWords * 4);
    if (rank == 0) MbarrierArriveExpect(&shared->store_barrier, blocks * (4 + 8 + 16));
  }
  for (uint32_t i = t; i < kBulkWords; i += blockDim.x) shared->source[i] = 1000 * rank + i;
  FenceAsyncShared();
  ClusterSync();
  if (t == 0) {
    const uint32_t next = (rank + 1) % blocks;
    if (rank == 1) {
      CopyBulkMulticast(shared->from_global, in, kBulkWords * 4, &shared->global_barrier, mask);
    }
    CopyBulkCluster(ClusterAddress(shared->from_block, next), shared->source, kBulkWords * 4,
                    ClusterAddress(&shared->block_barrier, next));
    const uint32_t barrier = ClusterAddress(&shared->store_barrier, 0);
    ClusterStoreAsync(ClusterAddress(shared->words + rank, 0), rank, barrier);
    ClusterStoreAsync(ClusterAddress(shared->pairs + rank, 0), uint2{rank, rank + 1}, barrier);
    ClusterStoreAsync(ClusterAddress(shared->quads + rank, 0), uint4{rank, 0, 0, rank + 2},
                      barrier);
  }
  uint32_t* row = out + blockIdx.x * (2 * kBulkWords + 1);
  MbarrierWait(&shared->block_barrier, 0);
  for (uint32_t i = t; i < kBulkWords; i += blockDim.x) row[i] = shared->from_block[i];
  if ((mask >> rank & 1u) != 0) {
    MbarrierWait(&shared->global_barrier, 0);
    for (uint32_t i = t; i < kBulkWords; i += blockDim.x) {
      row[kBulkWords + i] = shared->from_global[i];
    }
  }
  if (rank == 0) {
    MbarrierWait(&shared->store_barrier, 0);
    uint32_t sum = 0;
    for (uint32_t i = 0; i < blocks; ++i) {
      sum += shared->words[i] + shared->pairs[i].y + shared->quads[i].w;
    }
    row[2 * kBulkWords] = sum;
  }
  ClusterSync();
}

TEST(Cluster, CopiesReachTheBlocksThatTheyAreFor) {
  MOESERVE_NEEDS_CLUSTERS();
  constexpr uint32_t kBlocks = 4, kMask = 0b1011, kRow = 2 * kBulkWords + 1;
  std::vector<uint32_t> in(kBulkWords);
  for (uint32_t i = 0; i < kBulkWords; ++i) in[i] = 7 * i + 1;
  InEveryOrder([&] {
    DeviceArray<uint32_t> device_in(in), out(2 * kBlocks * kRow);
    Launch(ClusterBulkKernel,
           {.grid = dim3(2 * kBlocks),
            .block = dim3(32),
            .shared_bytes = sizeof(ClusterBulk),
            .cluster = dim3(kBlocks)},
           device_in.data(), out.data(), kMask);
    const std::vector<uint32_t> got = out.Read();
    for (uint32_t block = 0; block < 2 * kBlocks; ++block) {
      const uint32_t rank = block % kBlocks, previous = (rank + kBlocks - 1) % kBlocks;
      const uint32_t* row = got.data() + block * kRow;
      for (uint32_t i = 0; i < kBulkWords; ++i) {
        EXPECT_EQ(row[i], 1000 * previous + i);
        EXPECT_EQ(row[kBulkWords + i], (kMask >> rank & 1u) != 0 ? in[i] : ~0u);
      }
      EXPECT_EQ(row[2 * kBulkWords], rank == 0 ? 3 * 6 + 3 * kBlocks : ~0u);
    }
  });
}

struct MulticastRounds {
  uint32_t words[2 * kBulkWords];
  uint64_t full;
  uint64_t empty;
};

// In each round, each of two blocks copies half of a buffer into both. Both must have read it
// before the next round. A thread adds what it has read, weighted by the round.
__global__ void MulticastRoundsKernel(const uint32_t* in, uint32_t* out, uint32_t rounds) {
  auto* shared = DynamicShared<MulticastRounds>();
  const uint32_t rank = ClusterRank(), t = threadIdx.x;
  if (t == 0) {
    MbarrierInit(&shared->full, 1);
    MbarrierInit(&shared->empty, 2);
    MbarrierInitFence();
  }
  __syncwarp();
  ClusterSync();
  uint32_t sum = 0;
  for (uint32_t round = 0; round < rounds; ++round) {
    if (t == 0) {
      MbarrierWait(&shared->empty, round % 2 ^ 1);
      MbarrierArriveExpect(&shared->full, sizeof(shared->words));
      CopyBulkMulticast(shared->words + rank * kBulkWords, in + (2 * round + rank) * kBulkWords,
                        kBulkWords * 4, &shared->full, 3);
    }
    MbarrierWait(&shared->full, round % 2);
    for (uint32_t i = t; i < 2 * kBulkWords; i += blockDim.x) {
      sum += (round + 1) * shared->words[i];
    }
    FenceAsyncShared();
    __syncwarp();
    if (t < 2) MbarrierReleaseCluster(ClusterAddress(&shared->empty, t));
  }
  out[blockIdx.x * blockDim.x + t] = sum;
  ClusterSync();
}

TEST(Cluster, BuffersAreReleasedByBothBlocks) {
  MOESERVE_NEEDS_CLUSTERS();
  constexpr uint32_t kRounds = 5, kThreads = 32;
  std::vector<uint32_t> in(2 * kRounds * kBulkWords), expected(kThreads);
  for (uint32_t i = 0; i < in.size(); ++i) {
    in[i] = 11 * i + 5;
    expected[i % (2 * kBulkWords) % kThreads] += (i / (2 * kBulkWords) + 1) * in[i];
  }
  InEveryOrder([&] {
    DeviceArray<uint32_t> device_in(in), out(4 * kThreads);
    Launch(MulticastRoundsKernel,
           {.grid = dim3(4),
            .block = dim3(kThreads),
            .shared_bytes = sizeof(MulticastRounds),
            .cluster = dim3(2)},
           device_in.data(), out.data(), kRounds);
    const std::vector<uint32_t> got = out.Read();
    for (uint32_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], expected[i % kThreads]) << i;
  });
}

TEST(Cluster, LargeClustersRunWhereTheDeviceAllows) {
  MOESERVE_NEEDS_CLUSTERS();
  const LaunchShape shape{.grid = dim3(16),
                          .block = dim3(32),
                          .shared_bytes = sizeof(ClusterExchange),
                          .cluster = dim3(16)};
  if (MaxActiveClusters(ClusterExchangeKernel, shape) == 0) GTEST_SKIP();
  DeviceArray<uint32_t> out(16 * 32);
  Launch(ClusterExchangeKernel, shape, out.data(), true);
  EXPECT_EQ(out.Read()[0], 4 * 15 * 1000 + 5 + 31u);
}

#if defined(MOESERVE_CUDA_EMULATION)

TEST(Cluster, MissingBarriersShowInEveryOrder) {
  InEveryOrder([] {
    DeviceArray<uint32_t> out(4 * 32);
    Launch(ClusterExchangeKernel,
           {.grid = dim3(4),
            .block = dim3(32),
            .shared_bytes = sizeof(ClusterExchange),
            .cluster = dim3(2)},
           out.data(), false);
    // Each stored value is still ~0.
    for (const uint32_t sum : out.Read()) EXPECT_TRUE(sum > 0x7fffffffu || sum < 8000) << sum;
    DeviceArray<uint32_t> ring(2 * 32);
    Launch(ClusterRingKernel,
           {.grid = dim3(4),
            .block = dim3(32),
            .shared_bytes = sizeof(ClusterRing),
            .cluster = dim3(2)},
           ring.data(), 1u, true);
    EXPECT_EQ(ring.Read(), std::vector<uint32_t>(2 * 32, ~0u));
  });
}

TEST(Cluster, DevicesWithoutClustersHaveNone) {
  const LaunchShape shape{.grid = dim3(8), .block = dim3(32), .cluster = dim3(4)};
  const int multiprocessors = DeviceAttribute(cudaDevAttrMultiProcessorCount);
  EXPECT_EQ(MaxActiveClusters(ClusterRankKernel, shape), multiprocessors * 32 / 4);
  SetEmulatedCapability(8);
  EXPECT_FALSE(HasClusters());
  EXPECT_EQ(MaxActiveClusters(ClusterRankKernel, shape), 0);
  SetEmulatedCapability(9);
  SetEmulatedMultiprocessors(4);
  EXPECT_EQ(DeviceAttribute(cudaDevAttrMultiProcessorCount), 4);
  EXPECT_EQ(MaxActiveClusters(ClusterRankKernel, shape), 4 * 32 / 4);
  SetEmulatedMultiprocessors(multiprocessors);
}

enum class ClusterFault {
  kNeverVisible,
  kBeforeStart,
  kEarlyExit,
  kUnawaitedArrival,
  kSourceExits,
  kRank,
  kOverrun,
  kMisaligned,
  kMask,
  kOtherBlocksMbarrier,
  kNoInit,
  kArriveTwice,
  kWaitOnly,
  kMissingBlock,
  kMulticastExit,
};

__global__ void FaultyClusterKernel(ClusterFault fault, uint32_t* out) {
  auto* shared = DynamicShared<uint32_t>();
  auto* barrier = reinterpret_cast<uint64_t*>(shared + 32);
  const uint32_t rank = ClusterRank(), other = 1 - rank;
  if (fault == ClusterFault::kBeforeStart) ClusterStore(ClusterAddress(shared, other), 1u);
  if (fault == ClusterFault::kWaitOnly) ClusterWait();
  if (fault != ClusterFault::kNoInit) MbarrierInit(barrier, 1);
  ClusterArrive();
  if (fault == ClusterFault::kArriveTwice) ClusterArrive();
  ClusterWait();
  const uint32_t there = ClusterAddress(shared, other),
                 barrier_there = ClusterAddress(barrier, other);
  switch (fault) {
    case ClusterFault::kNeverVisible:
      if (rank == 0) ClusterStore(there, 1u);
      if (rank == 1) ClusterSync();
      break;
    case ClusterFault::kEarlyExit:
      if (rank == 0) out[0] = ClusterLoad<uint32_t>(there);
      break;
    case ClusterFault::kUnawaitedArrival:
      if (rank == 0) MbarrierArriveCluster(barrier_there);
      break;
    case ClusterFault::kSourceExits:
      if (rank == 0) {
        CopyBulkCluster(there, shared, 16, barrier_there);
      } else {
        MbarrierArriveExpect(barrier, 16);
        while (!MbarrierTryWait(barrier, 0)) {
        }
      }
      break;
    case ClusterFault::kRank:
      out[0] = ClusterLoad<uint32_t>(ClusterAddress(shared, 2));
      break;
    case ClusterFault::kOverrun:
      ClusterStore(ClusterAddress(shared + 34, other), 1u);
      break;
    case ClusterFault::kMisaligned:
      ClusterStore(ClusterAddress(shared + 1, other), uint2{1, 1});
      break;
    case ClusterFault::kMask:
      CopyBulkMulticast(shared, out, 16, barrier, 5);
      break;
    case ClusterFault::kMulticastExit:
      MbarrierExpect(barrier, 16);
      if (rank == 0) {
        CopyBulkMulticast(shared, out, 16, barrier, 3);
        MbarrierArrive(barrier);
        MbarrierWait(barrier, 0);
      }
      break;
    case ClusterFault::kOtherBlocksMbarrier:
      CopyBulkCluster(there, shared, 16, ClusterAddress(barrier, rank));
      break;
    case ClusterFault::kNoInit:
      MbarrierArriveCluster(barrier_there);
      break;
    case ClusterFault::kMissingBlock:
      if (rank == 0) {
        ClusterSync();
      } else {
        MbarrierWait(barrier, 0);
      }
      break;
    default:
      break;
  }
}

void RunFaultyCluster(ClusterFault fault, emulator::Order order) {
  emulator::SetOrder(order);
  DeviceArray<uint32_t> out(4);
  Launch(FaultyClusterKernel,
         {.grid = dim3(2), .block = dim3(1), .shared_bytes = 32 * 4 + 8, .cluster = dim3(2)}, fault,
         out.data());
  cudaDeviceSynchronize();
}

TEST(ClusterDeathTest, FaultsAreReportedInEveryOrder) {
  const std::string left = "has exited|may still access its shared memory";
  const std::vector<std::pair<ClusterFault, std::string>> faults = {
      {ClusterFault::kNeverVisible, "did not become visible there|" + left},
      {ClusterFault::kBeforeStart, "accessed before a barrier of the cluster"},
      {ClusterFault::kEarlyExit, left},
      {ClusterFault::kUnawaitedArrival, left},
      {ClusterFault::kSourceExits, "copies from its shared memory are under way"},
      {ClusterFault::kRank, "mapa: the rank 2 of a cluster of 2 blocks"},
      {ClusterFault::kOverrun, "bytes \\[136, 140\\) of another block's shared memory"},
      {ClusterFault::kMisaligned, "not aligned to 8 bytes"},
      {ClusterFault::kMask, "mask 0x5 of blocks in a cluster of 2"},
      {ClusterFault::kMulticastExit, left},
      {ClusterFault::kOtherBlocksMbarrier, "mbarrier is not in the block"},
      {ClusterFault::kNoInit, "mbarrier at 0x80 of shared memory was not initialised"},
      {ClusterFault::kArriveTwice, "arrives twice"},
      {ClusterFault::kWaitOnly, "without having arrived"},
      {ClusterFault::kMissingBlock, "deadlock.*\n.*\n.*waits in the barrier of the cluster"},
  };
  for (const auto& [fault, message] : faults) {
    for (const emulator::Order order : {emulator::Order{emulator::Order::kForward, 0},
                                        emulator::Order{emulator::Order::kReverse, 0},
                                        emulator::Order{emulator::Order::kEager, 0}}) {
      EXPECT_DEATH(RunFaultyCluster(fault, order), message) << static_cast<int>(fault);
    }
  }
}

TEST(ClusterDeathTest, LaunchesThatCannotBeStopTheProcess) {
  const auto launch = [](dim3 grid, dim3 cluster) {
    Launch(ClusterRankKernel, {.grid = grid, .block = dim3(32), .cluster = cluster}, nullptr);
  };
  EXPECT_DEATH(launch(dim3(6), dim3(4)), "invalid configuration");
  EXPECT_DEATH(launch(dim3(32), dim3(32)), "cudaErrorInvalidClusterSize");
  EXPECT_DEATH(
      {
        SetEmulatedCapability(8);
        launch(dim3(4), dim3(2));
      },
      "cudaErrorInvalidClusterSize");
}

#endif

}  // namespace
}  // namespace moeserve::cuda
