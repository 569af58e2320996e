// Runs a request of the Open Inference Protocol for generated text.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/generation/generation.h"
#include "server/generation/submission.h"
#include "server/open_inference/infer_run.h"

namespace moeserve::server {

class GenerateRun final : public InferRun {
 public:
  // As InferRun::Prepare(), for a model that generates.
  static Result<std::unique_ptr<InferRun>> Prepare(ServerContext& server,
                                                   const std::shared_ptr<ServedModel>& model,
                                                   const InferRequest& request, Pieces pieces,
                                                   std::shared_ptr<const ApiKey> key,
                                                   std::shared_ptr<RequestRecord> record);

  bool NeedsCompiling() override { return submission_.NeedsCompiling(); }
  absl::Status Compile() override;
  absl::Status Launch(absl::Time deadline, std::function<void()> wake) override;
  Result<std::optional<InferAnswer>> Take() override;
  void Cancel() override;
  bool overflowed() const override { return generation_->overflowed(); }
  bool stream() const override { return settings_.stream; }

 private:
  struct Choice {
    std::string text;
    std::optional<FinishReason> finish_reason;
    int output_tokens = 0;
    bool started = false;
  };

  GenerateRun(SubmissionContext context, CompletionParams params, InferSettings settings,
              const InferRequest& request, const ServedModel& model);

  absl::Status Add(const ChoiceEvent& event);
  InferAnswer Answer();

  Submission submission_;
  const InferSettings settings_;
  const absl::Time start_;
  const std::string version_;
  const std::string request_id_;
  const std::vector<RequestedOutput> outputs_;  // never empty
  std::vector<Choice> choices_;
  MemoryCharge charge_;  // of what was collected
  std::unique_ptr<Generation> generation_;
};

}  // namespace moeserve::server
