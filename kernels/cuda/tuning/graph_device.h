// Measures operations on the current device as graphs of several launches.
#pragma once

#include <functional>
#include <memory>

#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/tuning/tuner.h"

namespace moeserve::cuda {

// All operations must be enqueued on `stream` and write their results to `output`, device memory
// that the caller owns. Before a result is compared, every byte of `output` is set to 0xff.
class GraphTuneDevice : public TuneDevice {
 public:
  GraphTuneDevice(cudaStream_t stream, void* output, size_t output_bytes)
      : stream_(stream), output_(output), output_bytes_(output_bytes / 4 * 4) {}

  Result<std::function<Result<double>()>> Prepare(
      const std::function<void(int turn)>& enqueue) override;
  // ResourceExhausted if there is no memory for a second copy of the results.
  Status RunDefault(const std::function<void(int turn)>& enqueue) override;
  Result<bool> EqualsDefault(const std::function<void(int turn)>& enqueue) override;

 private:
  Status Run(const std::function<void(int turn)>& enqueue);

  cudaStream_t stream_;
  void* output_;
  size_t output_bytes_;
  DeviceMemory expected_;
  DeviceMemory differences_;
};

// Fills the memory with bf16 numbers between -1 and 1. As f32, they are such numbers, too.
Status FillWithNumbers(const DeviceMemory& memory, cudaStream_t stream);

}  // namespace moeserve::cuda
