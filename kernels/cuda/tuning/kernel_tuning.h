// What the tuners of all kinds of operations have in common.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/tuning/choices.h"
#include "kernels/cuda/tuning/tuner.h"

namespace moeserve::cuda {

struct TuningSettings {
  // Time after which no further measurement begins.
  std::chrono::steady_clock::duration limit = std::chrono::seconds(5);
  int rows_factor = 4;  // from one number of rows to the next that is measured
};

// Makes a device that measures operations whose results are in `output`.
using TuneDeviceFactory =
    std::function<std::unique_ptr<TuneDevice>(cudaStream_t stream, void* output, size_t bytes)>;

// First, the operations of a step are recorded, the largest one that can occur; then Measure()
// chooses kernels for all numbers of rows up to those of the step; later operations look their
// kernels up.
//
// Only one thread at a time may use an object.
class KernelTuning {
 public:
  // `what` names the operations in messages. `choices` must outlive the object.
  KernelTuning(std::string what, Choices* choices) : choices_(choices), what_(std::move(what)) {}
  virtual ~KernelTuning() = default;

  // While the object records, the functions that look kernels up also remember the operation.
  void Record(bool records) { records_ = records; }

  // Measures the recorded operations that have no choice yet, and forgets the recorded ones, whose
  // weights must still exist. Waits for the device. If memory for the measurements is missing, they
  // end early. Returns messages about kernels whose results were wrong, which are never chosen.
  Result<std::vector<std::string>> Measure(const TuningSettings& settings,
                                           const TuneDeviceFactory& devices, cudaStream_t stream);
  // Returns the number of measurements of the last Measure(), and of those that it left out because
  // its time was over.
  int measured() const { return measured_; }
  int left_out() const { return left_out_; }

 protected:
  // Measures what was recorded.
  virtual Status MeasureRecorded(const TuningSettings& settings, const TuneDeviceFactory& devices,
                                 cudaStream_t stream) = 0;
  virtual void ForgetRecorded() = 0;

  // Returns whether the site is to be measured with these rows now: it has no choice for them, and
  // time is left. Counts what is left out.
  bool IsWanted(int site, int64_t rows, const TuningSettings& settings);
  // Measures the candidates and keeps the choice, the index of one of `ids`.
  Status MeasureCase(int site, int64_t rows, const TuneCase& tune_case, const std::vector<int>& ids,
                     TuneDevice& device);

  Choices* const choices_;
  bool records_ = false;

 private:
  const std::string what_;
  std::vector<std::string> messages_;
  std::chrono::steady_clock::time_point begin_;
  int measured_ = 0, left_out_ = 0;
};

}  // namespace moeserve::cuda
