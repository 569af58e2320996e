// Threads of the emulated device: behaviour that kernels may rely on, and errors that it must
// report.

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "tests/cuda/emulator_test_support.h"

namespace moeserve::cuda {
namespace {

__global__ void SumKernel(const float* in, float* out, int n) {
  float* partial = DynamicShared<float>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += in[blockIdx.x * n + i];
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullMask, sum, offset);
  if (lane == 0) partial[warp] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0.0f;
    for (unsigned w = 0; w < blockDim.x / 32; ++w) total += partial[w];
    out[blockIdx.x] = total;
  }
}

TEST(Emulator, BlocksReduceThroughShufflesAndSharedMemory) {
  const int n = 1000, blocks = 7;
  std::vector<float> in(static_cast<size_t>(n * blocks));
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i % 13);
  InEveryOrder([&] {
    DeviceArray<float> device_in(in);
    DeviceArray<float> out(blocks);
    Launch(SumKernel, {.grid = dim3(blocks), .block = dim3(256), .shared_bytes = 8 * sizeof(float)},
           device_in.data(), out.data(), n);
    const std::vector<float> sums = out.Read();
    for (int b = 0; b < blocks; ++b) {
      float expected = 0.0f;
      for (int i = 0; i < n; ++i) expected += in[static_cast<size_t>(b * n + i)];
      EXPECT_EQ(sums[static_cast<size_t>(b)], expected);
    }
  });
}

// Every lane's value is its lane number times 3. Each shuffle writes its results to its own row.
__global__ void ShuffleKernel(int* out, int width) {
  const int lane = threadIdx.x, value = 3 * lane;
  out[0 * 32 + lane] = __shfl_sync(kFullMask, value, 5, width);
  out[1 * 32 + lane] = __shfl_xor_sync(kFullMask, value, 3, width);
  out[2 * 32 + lane] = __shfl_up_sync(kFullMask, value, 2, width);
  out[3 * 32 + lane] = __shfl_down_sync(kFullMask, value, 2, width);
  const double wide = __shfl_sync(kFullMask, 1e300 * lane, 31 - lane);
  out[4 * 32 + lane] = wide == 1e300 * (31 - lane);
}

TEST(Emulator, ShufflesReadTheLanesThatCudaDefines) {
  for (const int width : {4, 8, 16, 32}) {
    InEveryOrder([&] {
      DeviceArray<int> out(5 * 32);
      Launch(ShuffleKernel, {.grid = dim3(1), .block = dim3(32)}, out.data(), width);
      const std::vector<int> got = out.Read();
      for (int lane = 0; lane < 32; ++lane) {
        const int begin = lane / width * width, in_segment = lane - begin;
        const auto at = [&](int row) { return got[static_cast<size_t>(row * 32 + lane)]; };
        EXPECT_EQ(at(0), 3 * (begin + 5 % width));
        EXPECT_EQ(at(1), 3 * (lane ^ 3));
        EXPECT_EQ(at(2), 3 * (in_segment >= 2 ? lane - 2 : lane));
        EXPECT_EQ(at(3), 3 * (in_segment + 2 < width ? lane + 2 : lane));
        EXPECT_EQ(at(4), 1);
      }
    });
  }
}

__global__ void VoteKernel(unsigned* out) {
  const unsigned lane = threadIdx.x;
  // The halves of the warp take different branches, with different numbers of collectives.
  if (lane < 16) {
    out[lane] = __ballot_sync(0xffffu, lane % 3 == 0);
    out[lane] ^= __shfl_sync(0xffffu, lane, 7) << 20;
  } else {
    out[lane] = __ballot_sync(0xffff0000u, lane % 5 == 0);
  }
  __syncwarp();
  out[32 + lane] = __match_any_sync(kFullMask, lane % 7);
  out[64 + lane] = __reduce_add_sync(kFullMask, lane);
  out[96 + lane] = static_cast<unsigned>(__reduce_min_sync(kFullMask, 3 - static_cast<int>(lane)));
  out[128 + lane] = __any_sync(kFullMask, lane == 9) * 2 + __all_sync(kFullMask, lane < 32);
}

TEST(Emulator, VotesOfHalfWarpsAndReductions) {
  InEveryOrder([] {
    DeviceArray<unsigned> out(5 * 32);
    Launch(VoteKernel, {.grid = dim3(1), .block = dim3(32)}, out.data());
    const std::vector<unsigned> got = out.Read();
    unsigned low = 0, high = 0;
    for (unsigned i = 0; i < 16; ++i) low |= i % 3 == 0 ? 1u << i : 0;
    for (unsigned i = 16; i < 32; ++i) high |= i % 5 == 0 ? 1u << i : 0;
    for (unsigned lane = 0; lane < 32; ++lane) {
      EXPECT_EQ(got[lane], lane < 16 ? low ^ (7u << 20) : high);
      unsigned same = 0;
      for (unsigned i = lane % 7; i < 32; i += 7) same |= 1u << i;
      EXPECT_EQ(got[32 + lane], same);
      EXPECT_EQ(got[64 + lane], 31u * 32 / 2);
      EXPECT_EQ(static_cast<int>(got[96 + lane]), 3 - 31);
      EXPECT_EQ(got[128 + lane], 3u);
    }
  });
}

__global__ void BarrierKernel(int* out) {
  int* shared = DynamicShared<int>();
  const int t = threadIdx.x, n = blockDim.x;
  // The threads of the last warp exit; barriers of the remaining threads must not wait for them.
  if (t >= n - 32) return;
  shared[t] = t;
  __syncthreads();
  const int left = shared[(t + 1) % (n - 32)];
  const int count = __syncthreads_count(t % 3 == 0);
  const int either = __syncthreads_or(t == 5), both = __syncthreads_and(t != 5);
  out[t] = left + 1000 * count + 100000 * either + 1000000 * both;
}

TEST(Emulator, BarriersOfABlockCountThreadsThatHaveLeft) {
  InEveryOrder([] {
    const int n = 160, running = n - 32;
    DeviceArray<int> out(n);
    Launch(BarrierKernel, {.grid = dim3(1), .block = dim3(n), .shared_bytes = n * sizeof(int)},
           out.data());
    const std::vector<int> got = out.Read();
    for (int t = 0; t < running; ++t) {
      EXPECT_EQ(got[static_cast<size_t>(t)],
                (t + 1) % running + 1000 * ((running + 2) / 3) + 100000);
    }
  });
}

// Warp 0 produces and warps 1 and 2 consume, through one buffer.
__global__ void NamedBarrierKernel(int* out, int rounds) {
  int* shared = DynamicShared<int>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int round = 0; round < rounds; ++round) {
    if (warp == 0) {
      if (round > 0) NamedBarrierSync(2, 96);
      shared[lane] = 100 * round + lane;
      NamedBarrierArrive(1, 96);
    } else {
      NamedBarrierSync(1, 96);
      out[(round * 2 + warp - 1) * 32 + lane] = shared[31 - lane];
      if (round + 1 < rounds) NamedBarrierArrive(2, 96);
    }
  }
}

TEST(Emulator, NamedBarriersOrderProducerAndConsumers) {
  InEveryOrder([] {
    const int rounds = 6;
    DeviceArray<int> out(rounds * 64);
    Launch(NamedBarrierKernel,
           {.grid = dim3(1), .block = dim3(96), .shared_bytes = 32 * sizeof(int)}, out.data(),
           rounds);
    const std::vector<int> got = out.Read();
    for (int i = 0; i < rounds * 64; ++i) {
      EXPECT_EQ(got[static_cast<size_t>(i)], 100 * (i / 64) + 31 - i % 32);
    }
  });
}

// Has a race: there is no barrier between write and read.
__global__ void RaceKernel(int* out) {
  int* shared = DynamicShared<int>();
  const int t = threadIdx.x, n = blockDim.x;
  shared[t] = t + 1;
  out[t] = shared[(t + 1) % n];
}

TEST(Emulator, OrdersAndPoisonMakeAMissingBarrierShow) {
  std::set<std::vector<int>> results;
  InEveryOrder([&] {
    DeviceArray<int> out(64);
    Launch(RaceKernel, {.grid = dim3(1), .block = dim3(64), .shared_bytes = 64 * sizeof(int)},
           out.data());
    results.insert(out.Read());
  });
  EXPECT_GE(results.size(), 3u);
  for (const auto& r : results) EXPECT_TRUE(std::count(r.begin(), r.end(), -1) > 0);
}

__global__ void LastBlockKernel(unsigned* counter, int* order, int* last) {
  __threadfence();
  const unsigned arrived = atomicAdd(counter, 1u);
  order[arrived] = static_cast<int>(blockIdx.x);
  if (arrived == gridDim.x - 1) *last = static_cast<int>(blockIdx.x);
}

TEST(Emulator, BlocksRunInTheOrderAskedFor) {
  std::set<std::vector<int>> orders;
  InEveryOrder([&] {
    const int blocks = 40;
    DeviceArray<unsigned> counter(std::vector<unsigned>{0});
    DeviceArray<int> order(blocks), last(1);
    Launch(LastBlockKernel, {.grid = dim3(blocks), .block = dim3(1)}, counter.data(), order.data(),
           last.data());
    const std::vector<int> got = order.Read();
    EXPECT_EQ(std::set<int>(got.begin(), got.end()).size(), static_cast<size_t>(blocks));
    EXPECT_EQ(last.Read()[0], got.back());
    orders.insert(got);
  });
  EXPECT_EQ(orders.size(), 3u);  // kEager takes blocks as kForward does
}

__global__ void GridKernel(int* out) {
  const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const int threads = blockDim.x * blockDim.y * blockDim.z;
  // Lanes are numbered in the order of x, y, z.
  const int first = __shfl_sync(kFullMask, thread, 0);
  out[block * threads + thread] = thread - first;
}

TEST(Emulator, GridsAndBlocksOfThreeDimensions) {
  DeviceArray<int> out(2 * 3 * 2 * 64);
  Launch(GridKernel, {.grid = dim3(2, 3, 2), .block = dim3(4, 8, 2)}, out.data());
  const std::vector<int> got = out.Read();
  for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], static_cast<int>(i % 32));
}

// --- Errors -----------------------------------------------------------------------------------

enum class Fault {
  kDivergedBarrier,
  kLaneMissing,
  kOtherCollective,
  kNotInMask,
  kNamedBarrierCount,
  kAbsentLane,
  kArrivalLeft,
};

__global__ void FaultyKernel(Fault fault, int* out) {
  const int t = threadIdx.x;
  switch (fault) {
    case Fault::kDivergedBarrier:
      if (t < 32) {
        NamedBarrierSync(1, 64);
      } else {
        NamedBarrierSync(2, 64);
      }
      break;
    case Fault::kLaneMissing:
      // Lane 3 waits at another barrier than its warp.
      if (t != 3) __syncwarp();
      __syncthreads();
      break;
    case Fault::kOtherCollective:
      out[t] = t % 2 == 0 ? __shfl_sync(kFullMask, t, 0) : __shfl_xor_sync(kFullMask, t, 1);
      break;
    case Fault::kNotInMask:
      out[t] = __shfl_sync(0xfffffffeu, t, 1);
      break;
    case Fault::kNamedBarrierCount:
      NamedBarrierSync(1, t < 32 ? 64 : 32);
      break;
    case Fault::kAbsentLane:
      if (t < 16) out[t] = __shfl_sync(0xffffu, t, 20);
      break;
    case Fault::kArrivalLeft:
      if (t < 32) NamedBarrierArrive(3, 64);
      break;
  }
}

void RunFaulty(Fault fault) {
  emulator::SetOrder({});  // the error message must name the thread that is found first
  DeviceArray<int> out(64);
  Launch(FaultyKernel, {.grid = dim3(2), .block = dim3(64)}, fault, out.data());
  cudaDeviceSynchronize();
}

TEST(EmulatorDeathTest, FaultsAreReported) {
  EXPECT_DEATH(RunFaulty(Fault::kDivergedBarrier), "deadlock in block \\(0,0,0\\)");
  EXPECT_DEATH(RunFaulty(Fault::kLaneMissing), "deadlock.*\n.*__syncwarp.*emulator_test.cc:");
  EXPECT_DEATH(RunFaulty(Fault::kOtherCollective), "lanes of one warp disagree");
  EXPECT_DEATH(RunFaulty(Fault::kNotInMask), "not in the mask 0xfffffffe");
  EXPECT_DEATH(RunFaulty(Fault::kNamedBarrierCount), "expects 32 threads, another 64");
  EXPECT_DEATH(RunFaulty(Fault::kAbsentLane), "lane 0 reads lane 20");
  EXPECT_DEATH(RunFaulty(Fault::kArrivalLeft), "named barrier");
}

#if defined(__SANITIZE_ADDRESS__)
__global__ void OverrunKernel(int* out, int shared_index, int index) {
  out[index] = DynamicShared<int>()[shared_index];
}

TEST(EmulatorDeathTest, AddressSanitizerSeesOverrunsOfSharedAndDeviceMemory) {
  const auto run = [](int shared_index, int index) {
    DeviceArray<int> out(7);
    Launch(OverrunKernel, {.grid = dim3(1), .block = dim3(32), .shared_bytes = 5 * sizeof(int)},
           out.data(), shared_index, index);
    cudaDeviceSynchronize();
  };
  run(4, 6);
  EXPECT_DEATH(run(5, 6), "heap-buffer-overflow");
  EXPECT_DEATH(run(4, 7), "heap-buffer-overflow");
}
#endif

}  // namespace
}  // namespace moeserve::cuda
