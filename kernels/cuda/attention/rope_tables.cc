#include "kernels/cuda/attention/rope_tables.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/check.h"

namespace moeserve::cuda {

bool RopeTables::MustGrow(const RopeSettings& settings, int64_t tokens) const {
  const auto found = tables_.find(KeyOf(settings));
  return found == tables_.end() || tokens > found->second.tokens;
}

absl::Status RopeTables::Reserve(const RopeSettings& settings, int64_t tokens,
                                 cudaStream_t stream) {
  Table& table = tables_[KeyOf(settings)];
  const int pairs = settings.dimensions / 2;
  if (table.frequencies.bytes() == 0) {
    // The frequencies are computed on the host, as in the CPU backend, because powers in double
    // precision are slow on a device.
    std::vector<double> frequencies;
    for (int i = 0; i < pairs; ++i) {
      frequencies.push_back(std::pow(settings.theta, -2.0 * i / settings.dimensions));
    }
    const size_t bytes = frequencies.size() * sizeof(double);
    MOESERVE_ASSIGN_OR_RETURN(DeviceMemory memory, DeviceMemory::Allocate(bytes));
    MOESERVE_CUDA_RETURN_IF_ERROR(
        cudaMemcpyAsync(memory.data(), frequencies.data(), bytes, cudaMemcpyHostToDevice, stream));
    MOESERVE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
    table.frequencies = std::move(memory);
  }
  table.tokens = 0;
  table.angles = {};
  MOESERVE_ASSIGN_OR_RETURN(
      table.angles, DeviceMemory::Allocate(static_cast<size_t>(tokens * pairs) * sizeof(float2)));
  table.tokens = tokens;
  table.laid_out = false;
  return absl::OkStatus();
}

void RopeTables::BeginStep() {
  for (auto& [key, table] : tables_) table.laid_out = false;
}

const float2* RopeTables::Angles(const RopeSettings& settings, const StepView& step,
                                 cudaStream_t stream) {
  MOESERVE_CHECK(!MustGrow(settings, step.tokens), "room for a step's rotary angles");
  Table& table = tables_[KeyOf(settings)];
  if (!table.laid_out) {
    LaunchRopeAngles({.step = step,
                      .pairs = settings.dimensions / 2,
                      .frequencies = table.frequencies.as<double>(),
                      .angles = table.angles.as<float2>()},
                     stream);
    table.laid_out = true;
  }
  return table.angles.as<float2>();
}

}  // namespace moeserve::cuda
