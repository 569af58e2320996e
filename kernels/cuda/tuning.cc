// Chooses the kernels of the CUDA backend by measuring them on its device.

#include <filesystem>

#include "absl/strings/escaping.h"
#include "base/error_text.h"
#include "base/sha256.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/tuning/graph_device.h"
#include "kernels/cuda/tuning/tuning_key.h"

namespace moeserve::cuda {

absl::Status CudaBackend::OpenChoices(const BackendOptions& options) {
  choices_ = std::make_unique<Choices>();
  products_ = std::make_unique<ProductTuning>(choices_.get());
  attention_tuning_ = std::make_unique<AttentionTuning>(choices_.get());
  route_tuning_ = std::make_unique<RouteTuning>(choices_.get());
  sampler_tuning_ = std::make_unique<SamplerTuning>(choices_.get());
  // Products last, because they have the most measurements.
  tunings_ = {attention_tuning_.get(), sampler_tuning_.get(), route_tuning_.get(), products_.get()};
  tunes_fully_ = options.cuda_tune == "full";
  choices_file_ = options.cuda_tune_file;
  MOESERVE_ASSIGN_OR_RETURN(choices_key_, TuningKey());
  if (choices_file_.empty()) return absl::OkStatus();
  std::error_code error;
  if (std::filesystem::is_directory(choices_file_, error)) {
    choices_file_ +=
        Concat("/cuda-tune-", absl::BytesToHexString(Sha256(choices_key_)).substr(0, 16));
  }
  const Status loaded = choices_->Load(choices_file_, choices_key_);
  // A file of another program or device is replaced; one that cannot be read is worth a message.
  if (!loaded.ok() && !absl::IsNotFound(loaded) && !absl::IsFailedPrecondition(loaded)) {
    tuning_messages_.push_back(std::string(loaded.message()) + "; kernels are measured again");
  }
  return absl::OkStatus();
}

std::vector<std::string> CudaBackend::warnings() const {
  std::vector<std::string> warnings = tuning_messages_;
  if (dense_ != nullptr) {
    const std::vector<std::string>& dense = dense_->warnings();
    warnings.insert(warnings.end(), dense.begin(), dense.end());
  }
  return warnings;
}

void CudaBackend::BeginTuning() {
  for (KernelTuning* const tuning : tunings_) tuning->Record(true);
}

absl::Status CudaBackend::EndTuning() {
  if (tunings_.empty()) return absl::OkStatus();
  Synchronize();
  TuningSettings settings;
  if (tunes_fully_) settings = {.limit = std::chrono::minutes(1), .rows_factor = 2};
  const auto device = [](cudaStream_t stream, void* output, size_t bytes) {
    return std::unique_ptr<TuneDevice>(new GraphTuneDevice(stream, output, bytes));
  };
  const auto end = std::chrono::steady_clock::now() + settings.limit;
  int measured = 0, left_out = 0;
  for (KernelTuning* const tuning : tunings_) {
    settings.limit = end - std::chrono::steady_clock::now();
    MOESERVE_ASSIGN_OR_RETURN(const std::vector<std::string> messages,
                              tuning->Measure(settings, device, stream_.get()));
    tuning_messages_.insert(tuning_messages_.end(), messages.begin(), messages.end());
    measured += tuning->measured();
    left_out += tuning->left_out();
  }
  // Recorded steps have the kernels that were chosen before.
  DropRecordings();
  if (left_out > 0) {
    tuning_messages_.push_back(std::to_string(left_out) +
                               " measurements of kernels were left out, because they took too "
                               "long; the next start continues them");
  }
  if (measured == 0 || choices_file_.empty()) return absl::OkStatus();
  if (const Status saved = choices_->Save(choices_file_, choices_key_); !saved.ok()) {
    tuning_messages_.push_back(std::string(saved.message()) +
                               "; the next start measures kernels again (--cuda-tune-file)");
  }
  return absl::OkStatus();
}

}  // namespace moeserve::cuda
