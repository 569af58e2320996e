// Typed device memory, and all orders of execution, for tests on the emulated device.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

template <typename T>
class DeviceArray {
 public:
  // Allocates n uninitialised elements.
  explicit DeviceArray(size_t n) : n_(n) {
    EXPECT_EQ(cudaMalloc(&data_, n * sizeof(T)), cudaSuccess);
  }
  explicit DeviceArray(const std::vector<T>& v) : DeviceArray(v.size()) {
    EXPECT_EQ(cudaMemcpy(data_, v.data(), n_ * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  T* data() const { return data_; }
  std::vector<T> Read() const {
    std::vector<T> v(n_);
    EXPECT_EQ(cudaMemcpy(v.data(), data_, n_ * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    return v;
  }

 private:
  T* data_ = nullptr;
  size_t n_;
};

// Calls `f` with several orders of threads and blocks.
template <typename F>
void InEveryOrder(F&& f) {
#if defined(MOESERVE_CUDA_EMULATION)
  const emulator::Order before = emulator::GetOrder();
  for (const emulator::Order order :
       {emulator::Order{emulator::Order::kForward, 0},
        emulator::Order{emulator::Order::kReverse, 0}, emulator::Order{emulator::Order::kRandom, 1},
        emulator::Order{emulator::Order::kRandom, 2}}) {
    SCOPED_TRACE(testing::Message()
                 << "order " << static_cast<int>(order.kind) << ", seed " << order.seed);
    emulator::SetOrder(order);
    f();
  }
  emulator::SetOrder(before);
#else
  f();
#endif
}

}  // namespace moeserve::cuda
