// Runs one request of the Open Inference Protocol, for HTTP and gRPC alike.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/status.h"
#include "server/context.h"
#include "server/open_inference/description.h"
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

// Returns InvalidArgument if the request names an output that is not in `known`, or one twice.
absl::Status CheckOutputs(const InferRequest& request, std::span<const TensorDescription> known);
// Returns the outputs that the request names, or all of `known`.
std::vector<RequestedOutput> ChosenOutputs(const InferRequest& request,
                                           std::span<const TensorDescription> known);

// Call Prepare(), Compile(), Launch(), then Take() whenever `wake` was called. Must be used by one
// thread at a time.
class InferRun {
 public:
  // Reads the request as one for what the model computes: generated text, vectors or labels.
  // `key` and `record` may be null. Errors: those of ServerContext::ModelFor() and of parsing.
  static Result<std::unique_ptr<InferRun>> Prepare(ServerContext& server,
                                                   const InferRequest& request, Pieces pieces,
                                                   std::shared_ptr<const ApiKey> key,
                                                   std::shared_ptr<RequestRecord> record);
  InferRun() = default;
  InferRun(const InferRun&) = delete;
  InferRun& operator=(const InferRun&) = delete;
  virtual ~InferRun() = default;

  // Returns whether Compile() takes long, so that it must not run on I/O threads.
  virtual bool NeedsCompiling() = 0;
  // Compiles the constraint, if there is one. Errors: those of Submission::CompileConstraint().
  virtual absl::Status Compile() = 0;
  // Submits the request. `deadline` is the call's; that of the request can be earlier. Errors and
  // `wake`: those of Submission.
  virtual absl::Status Launch(absl::Time deadline, std::function<void()> wake) = 0;

  // Returns the whole answer once it is complete, or each piece of a streamed one; nullopt if there
  // is none yet. After an error and after the last answer, must not be called again.
  virtual Result<std::optional<InferAnswer>> Take() = 0;
  virtual void Cancel() = 0;
  virtual bool overflowed() const = 0;
  virtual bool stream() const = 0;
};

}  // namespace moeserve::server
