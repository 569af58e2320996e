// Submits a request to the engine, for HTTP and gRPC alike.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "base/status.h"
#include "server/base/limits.h"
#include "server/base/memory_budget.h"
#include "server/generation/constraint_compiler.h"
#include "server/generation/generation.h"
#include "server/generation/generation_request.h"
#include "server/keys/api_key.h"

namespace moeserve::server {

// The objects of the server that a submission uses.
struct SubmissionContext {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<ConstraintCompiler> constraint_compiler;
  std::shared_ptr<RequestMetrics> metrics;  // may be null
  std::shared_ptr<MemoryBudget> memory;     // null: no limit
  RequestLimits limits;
  std::shared_ptr<LiveGenerations> live;    // may be null
  std::shared_ptr<const RequestMacs> macs;  // may be null
  std::shared_ptr<const ApiKey> key;        // whose request it is; null on a server without keys
  std::shared_ptr<RequestRecord> record;    // learns what the request does; may be null
};

// One request. Call SetPrompts() and, if NeedsCompiling(), CompileConstraint(), in either order,
// then Start(). Must be used by one thread at a time.
class Submission {
 public:
  // `id_prefix` is the start of the response's id, such as "cmpl-".
  Submission(SubmissionContext context, GenerationParams params, std::string_view id_prefix);

  // Charges the memory that the request takes as long as this object exists. InvalidArgument if the
  // routing records of these prompts would get too long; ResourceExhausted if the answer's part
  // about the prompts does not fit into memory.
  absl::Status SetPrompts(std::vector<PreparedPrompt> prompts);

  // Returns whether CompileConstraint() must be called: whether there is a constraint that is not
  // cached.
  bool NeedsCompiling();
  // Takes up to the time limit of ConstraintLimits; must not be called on I/O threads.
  // InvalidArgument, with API error code "invalid_schema", if the constraint cannot be compiled.
  absl::Status CompileConstraint();

  // Submits one engine request per choice, all or none. The engine thread calls `wake` when the
  // result's Take() has new output; `wake` must return quickly. Returns the refusal of the key's
  // limits (Admission::Admit) or of the engine as the error.
  Result<std::unique_ptr<Generation>> Start(absl::Time deadline, std::function<void()> wake) const;

  // Returns the response's id: the prefix and `request_id` of the body, or the id of the HTTP
  // request or call, which the client may have chosen.
  const std::string& id() const { return id_; }
  const std::shared_ptr<Engine>& engine() const { return context_.engine; }
  const std::shared_ptr<MemoryBudget>& memory() const { return context_.memory; }
  const GenerationParams& params() const { return params_; }
  const std::vector<PreparedPrompt>& prompts() const { return prompts_; }
  size_t num_choices() const { return prompts_.size() * static_cast<size_t>(params_.n); }
  // Returns the prompt of `choice`, which is prompt * n + sample.
  const PreparedPrompt& PromptOf(int choice) const { return prompts_[choice / params_.n]; }

 private:
  const SubmissionContext context_;
  GenerationParams params_;
  const std::string id_;
  // Unlike `request_id`, a request id in a header may be that of another request that runs.
  const std::string engine_id_;
  std::vector<PreparedPrompt> prompts_;
  MemoryCharge charge_;
};

}  // namespace moeserve::server
