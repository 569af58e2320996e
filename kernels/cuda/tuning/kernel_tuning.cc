#include "kernels/cuda/tuning/kernel_tuning.h"

#include "base/error_text.h"

namespace moeserve::cuda {

bool KernelTuning::IsWanted(int site, int64_t rows, const TuningSettings& settings) {
  if (choices_->Has(site, rows)) return false;
  if (std::chrono::steady_clock::now() - begin_ <= settings.limit) return true;
  ++left_out_;
  return false;
}

Status KernelTuning::MeasureCase(int site, int64_t rows, const TuneCase& tune_case,
                                 const std::vector<int>& ids, TuneDevice& device) {
  MOESERVE_ASSIGN_OR_RETURN(const TuneResult result, Tune(tune_case, device));
  choices_->Choose(site, rows, ids[static_cast<size_t>(result.chosen)]);
  ++measured_;
  for (const std::string& name : result.different) {
    messages_.push_back(Concat(tune_case.name, ": the kernel ", name,
                               " computes other bits on this device and is not used"));
  }
  return absl::OkStatus();
}

Result<std::vector<std::string>> KernelTuning::Measure(const TuningSettings& settings,
                                                       const TuneDeviceFactory& devices,
                                                       cudaStream_t stream) {
  records_ = false;
  measured_ = left_out_ = 0;
  messages_.clear();
  begin_ = std::chrono::steady_clock::now();
  Status status = MeasureRecorded(settings, devices, stream);
  ForgetRecorded();
  if (absl::IsResourceExhausted(status)) {
    messages_.push_back(Concat(
        what_, " were not measured for all numbers of rows: ", std::string(status.message())));
    status = absl::OkStatus();
  }
  MOESERVE_RETURN_IF_ERROR(status);
  return std::move(messages_);
}

}  // namespace moeserve::cuda
