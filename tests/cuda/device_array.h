// Typed device memory for the tests of the CUDA kernels.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// `n` elements of device memory. Every byte is 0xff until it is written, so that a kernel that
// reads what it should not gets NaN or -1.
template <typename T>
class DeviceArray {
 public:
  // Allocates one byte more than needed, because a memory of 0 bytes has no address.
  explicit DeviceArray(size_t n) : n_(n) {
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data_), n * sizeof(T) + 1), cudaSuccess);
    EXPECT_EQ(cudaMemset(data_, 0xff, n * sizeof(T)), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  explicit DeviceArray(const std::vector<T>& v) : DeviceArray(v.size()) { Write(v); }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }
  // `v` has at most as many elements as the array.
  void Write(const std::vector<T>& v) {
    ASSERT_LE(v.size(), n_);
    EXPECT_EQ(cudaMemcpy(data_, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice),
              cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  // Waits for the device, then copies all elements.
  std::vector<T> Read() const {
    std::vector<T> v(n_);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(v.data(), data_, n_ * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    return v;
  }

 private:
  T* data_ = nullptr;
  size_t n_;
};

}  // namespace moeserve::cuda
