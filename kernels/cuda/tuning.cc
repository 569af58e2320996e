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
  if (products_ == nullptr) return;
  products_->Record(true);
  attention_tuning_->Record(true);
}

absl::Status CudaBackend::EndTuning() {
  if (products_ == nullptr) return absl::OkStatus();
  Synchronize();
  ProductTuningSettings settings;
  if (tunes_fully_) settings = {.limit = std::chrono::minutes(1), .rows_factor = 2};
  const auto device = [](cudaStream_t stream, void* output, size_t bytes) {
    return std::unique_ptr<TuneDevice>(new GraphTuneDevice(stream, output, bytes));
  };
  const auto add = [&](const std::vector<std::string>& messages) {
    tuning_messages_.insert(tuning_messages_.end(), messages.begin(), messages.end());
  };
  // Attention first, because it has few measurements.
  const auto begin = std::chrono::steady_clock::now();
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<std::string> of_attention,
                            attention_tuning_->Measure(settings, device, stream_.get()));
  add(of_attention);
  settings.limit -= std::chrono::steady_clock::now() - begin;
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<std::string> of_products,
                            products_->Measure(settings, device, stream_.get()));
  add(of_products);
  const int left_out = products_->left_out() + attention_tuning_->left_out();
  const int measured = products_->measured() + attention_tuning_->measured();
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
