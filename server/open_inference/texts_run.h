// Runs a request of the Open Inference Protocol for vectors or labels of texts.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/encode/encode_run.h"
#include "server/open_inference/infer_run.h"

namespace moeserve::server {

class TextsRun final : public InferRun {
 public:
  // As InferRun::Prepare(), for a model that generates nothing. InvalidArgument, with API error
  // code "unsupported_task", for one whose answers have no tensors here.
  static Result<std::unique_ptr<InferRun>> Prepare(ServerContext& server,
                                                   const std::shared_ptr<ServedModel>& model,
                                                   const InferRequest& request, Pieces pieces,
                                                   std::shared_ptr<const ApiKey> key,
                                                   std::shared_ptr<RequestRecord> record);

  bool NeedsCompiling() override { return false; }
  absl::Status Compile() override { return absl::OkStatus(); }
  absl::Status Launch(absl::Time deadline, std::function<void()> wake) override;
  Result<std::optional<InferAnswer>> Take() override;
  void Cancel() override { run_->Cancel(); }
  bool overflowed() const override { return false; }
  bool stream() const override { return false; }

 private:
  TextsRun(std::unique_ptr<EncodeRun> run, std::optional<absl::Duration> timeout,
           const InferRequest& request, const ServedModel& model);

  InferTensor Output(const std::string& name) const;

  const std::unique_ptr<EncodeRun> run_;
  const std::optional<absl::Duration> timeout_;
  const absl::Time start_;
  const std::string version_;
  const std::string request_id_;
  const InferKind kind_;
  const std::vector<RequestedOutput> outputs_;  // never empty
};

}  // namespace moeserve::server
