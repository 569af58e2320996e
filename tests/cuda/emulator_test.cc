// The emulated device itself: what kernels may rely on, and which faults it must report.

#include <gtest/gtest.h>

#include <vector>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"

namespace moeserve::cuda {
namespace {

template <typename T>
class Device {
 public:
  explicit Device(size_t n) : n_(n) { EXPECT_EQ(cudaMalloc(&data_, n * sizeof(T)), cudaSuccess); }
  explicit Device(const std::vector<T>& v) : Device(v.size()) {
    EXPECT_EQ(cudaMemcpy(data_, v.data(), n_ * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
  }
  ~Device() { cudaFree(data_); }
  T* data() { return data_; }
  std::vector<T> Read() {
    std::vector<T> v(n_);
    EXPECT_EQ(cudaMemcpy(v.data(), data_, n_ * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    return v;
  }

 private:
  T* data_ = nullptr;
  size_t n_;
};

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
  for (const emulator::Order order :
       {emulator::Order{}, emulator::Order{emulator::Order::kReverse, 0},
        emulator::Order{emulator::Order::kRandom, 1},
        emulator::Order{emulator::Order::kRandom, 2}}) {
    emulator::SetOrder(order);
    Device<float> device_in(in);
    Device<float> out(blocks);
    Launch(SumKernel, {.grid = dim3(blocks), .block = dim3(256), .shared_bytes = 8 * sizeof(float)},
           device_in.data(), out.data(), n);
    const std::vector<float> sums = out.Read();
    for (int b = 0; b < blocks; ++b) {
      float expected = 0.0f;
      for (int i = 0; i < n; ++i) expected += in[static_cast<size_t>(b * n + i)];
      EXPECT_EQ(sums[static_cast<size_t>(b)], expected);
    }
  }
  emulator::SetOrder({});
}

}  // namespace
}  // namespace moeserve::cuda
