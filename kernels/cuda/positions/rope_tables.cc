#include "kernels/cuda/positions/rope_tables.h"

#include <utility>
#include <vector>

#include "base/check.h"

namespace moeserve::cuda {

const RopeTables::Table* RopeTables::Find(const RopeSettings& settings) const {
  for (const Table& table : tables_) {
    if (SameAngles(table.settings, settings)) return &table;
  }
  return nullptr;
}

RopeTables::Table* RopeTables::Find(const RopeSettings& settings) {
  return const_cast<Table*>(std::as_const(*this).Find(settings));
}

bool RopeTables::MustGrow(const RopeSettings& settings, int64_t tokens) const {
  const Table* found = Find(settings);
  return found == nullptr || tokens > found->tokens;
}

absl::Status RopeTables::Reserve(const RopeSettings& settings, int64_t tokens,
                                 cudaStream_t stream) {
  Table* const found = Find(settings);
  Table& table = found != nullptr ? *found : tables_.emplace_back();
  table.settings = settings;
  const int pairs = settings.dimensions / 2;
  if (table.frequencies.bytes() == 0) {
    // The frequencies are computed on the host, as in the CPU backend, because powers in double
    // precision are slow on a device.
    std::vector<double> frequencies = RopeFrequencies(settings);
    if (settings.has_long()) {
      const std::vector<double> of_long = RopeFrequencies(settings, true);
      frequencies.insert(frequencies.end(), of_long.begin(), of_long.end());
    }
    const std::vector<double> rates = XposRates(settings);
    frequencies.insert(frequencies.end(), rates.begin(), rates.end());
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
  for (Table& table : tables_) table.laid_out = false;
}

const float2* RopeTables::Angles(const RopeSettings& settings, const StepView& step,
                                 cudaStream_t stream) {
  MOESERVE_CHECK(!MustGrow(settings, step.tokens), "room for a step's rotary angles");
  Table& table = *Find(settings);
  if (!table.laid_out) {
    const int pairs = settings.dimensions / 2;
    const double* const frequencies = table.frequencies.as<double>();
    LaunchRopeAngles(
        {.step = step,
         .pairs = pairs,
         .frequencies = frequencies,
         .magnitude = settings.magnitude(),
         .long_frequencies = settings.has_long() ? frequencies + pairs : nullptr,
         .long_magnitude = settings.has_long() ? settings.scaling->long_magnitude : 1.0,
         .xpos_rates = settings.xpos_base > 0.0
                           ? frequencies + (settings.has_long() ? 2 : 1) * pairs
                           : nullptr,
         .angles = table.angles.as<float2>()},
        stream);
    table.laid_out = true;
  }
  return table.angles.as<float2>();
}

}  // namespace moeserve::cuda
