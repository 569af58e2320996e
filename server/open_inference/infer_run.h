// Runs one request of the Open Inference Protocol, for HTTP and gRPC alike.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/status.h"
#include "server/context.h"
#include "server/generation/generation.h"
#include "server/generation/submission.h"
#include "server/open_inference/infer_request.h"

namespace moeserve::server {

struct InferAnswer {
  std::string model;
  std::string version;
  std::string id;  // of the request; may be empty
  std::vector<InferTensor> outputs;
  std::vector<bool> binary;  // per output: RequestedOutput::binary
  bool streamed = false;     // whether this is a piece of a streamed answer
  bool last = true;
};

// Returns NotFound unless `version` is empty or the number of the version that is served.
absl::Status CheckVersion(const ServedModel& model, const std::string& version);

// Call Prepare(), Compile(), Launch(), then Take() whenever `wake` was called. Must be used by one
// thread at a time.
class InferRun {
 public:
  // `key` and `record` may be null. Errors: those of ServerContext::ModelFor() and of parsing.
  static Result<std::unique_ptr<InferRun>> Prepare(ServerContext& server,
                                                   const InferRequest& request, Pieces pieces,
                                                   std::shared_ptr<const ApiKey> key,
                                                   std::shared_ptr<RequestRecord> record);

  // Returns whether Compile() takes long, so that it must not run on I/O threads.
  bool NeedsCompiling() { return submission_.NeedsCompiling(); }
  // Compiles the constraint, if there is one. Errors: those of Submission::CompileConstraint().
  absl::Status Compile();
  // Submits the request. `deadline` is the call's; that of the request can be earlier. Errors and
  // `wake`: those of Submission.
  absl::Status Launch(absl::Time deadline, std::function<void()> wake);

  // Returns the whole answer once it is complete, or each piece of a streamed one; nullopt if there
  // is none yet. After an error and after the last answer, must not be called again.
  Result<std::optional<InferAnswer>> Take();
  void Cancel();
  bool overflowed() const { return generation_->overflowed(); }
  bool stream() const { return settings_.stream; }

 private:
  struct Choice {
    std::string text;
    std::optional<FinishReason> finish_reason;
    int output_tokens = 0;
    bool started = false;
  };

  InferRun(SubmissionContext context, CompletionParams params, InferSettings settings,
           const InferRequest& request, const ServedModel& model);

  absl::Status Add(const ChoiceEvent& event);
  InferAnswer Answer();

  Submission submission_;
  const InferSettings settings_;
  const absl::Time start_;
  const std::string version_;
  const std::string request_id_;
  std::vector<RequestedOutput> outputs_;  // never empty
  std::vector<Choice> choices_;
  MemoryCharge charge_;  // of what was collected
  std::unique_ptr<Generation> generation_;
};

}  // namespace moeserve::server
