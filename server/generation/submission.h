// Submits a request to the engine: the path that HTTP and gRPC share.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "base/status.h"
#include "server/base/limits.h"
#include "server/generation/constraint_compiler.h"
#include "server/generation/generation.h"
#include "server/generation/generation_request.h"

namespace moeserve::server {

// The parts of the server that a submission uses.
struct SubmissionContext {
  std::shared_ptr<EngineApi> engine;
  std::shared_ptr<ConstraintCompiler> constraint_compiler;
  std::shared_ptr<Metrics> metrics;  // may be null
  RequestLimits limits;
};

// One request. SetPrompts and the constraint come first, in either order, then Start. One thread at
// a time uses it.
class Submission {
 public:
  // `id_prefix` is the start of the answer's id, such as "cmpl-".
  Submission(SubmissionContext context, GenerationParams params, std::string_view id_prefix);

  // InvalidArgument: the routing records of these prompts would get too long.
  absl::Status SetPrompts(std::vector<PreparedPrompt> prompts);

  // Returns whether CompileConstraint has to be called: there is a constraint and it is not cached.
  bool NeedsCompiling();
  // Takes as long as ConstraintLimits allows: not for io threads. InvalidArgument, code
  // "invalid_schema", for a constraint that cannot be compiled.
  absl::Status CompileConstraint();

  // Submits one engine request per choice, all or none. `wake` as in GenerationOptions. The error
  // is the engine's refusal.
  Result<std::unique_ptr<Generation>> Start(absl::Time deadline, std::function<void()> wake) const;

  const std::string& id() const { return id_; }  // of the answer
  const std::shared_ptr<EngineApi>& engine() const { return context_.engine; }
  const GenerationParams& params() const { return params_; }
  const std::vector<PreparedPrompt>& prompts() const { return prompts_; }
  size_t num_choices() const { return prompts_.size() * static_cast<size_t>(params_.n); }
  // `choice` is prompt * n + sample.
  const PreparedPrompt& PromptOf(int choice) const { return prompts_[choice / params_.n]; }

 private:
  const SubmissionContext context_;
  GenerationParams params_;
  const std::string id_;
  std::vector<PreparedPrompt> prompts_;
};

}  // namespace moeserve::server
