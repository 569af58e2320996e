// A device for measurements whose results do not depend on real time.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "kernels/cuda/tuning/graph_device.h"
#include "kernels/cuda/tuning/kernel_tuning.h"

namespace moeserve::testing {

// Emulated kernels are slow, and what is measured must not depend on it.
inline constexpr cuda::TuningSettings kNoLimit{.limit = std::chrono::hours(1), .rows_factor = 4};

// Compares bits on the device. Each operation that is prepared seems to be faster than the one
// before it.
class CountingDevice : public cuda::GraphTuneDevice {
 public:
  using GraphTuneDevice::GraphTuneDevice;
  Result<std::function<Result<double>()>> Prepare(
      const std::function<void(int)>& enqueue) override {
    for (int turn = 0; turn < 3; ++turn) enqueue(turn);
    const double time = 100.0 / static_cast<double>(++prepared_);
    return std::function<Result<double>()>([time]() -> Result<double> { return time; });
  }

 private:
  int prepared_ = 0;
};

inline std::unique_ptr<cuda::TuneDevice> NewCountingDevice(cudaStream_t stream, void* output,
                                                           size_t bytes) {
  return std::make_unique<CountingDevice>(stream, output, bytes);
}

}  // namespace moeserve::testing
