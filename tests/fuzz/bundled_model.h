// A bundled model as the server sees it, without its weights: what the targets of requests share.
#pragma once

#include <memory>
#include <vector>

#include "base/status.h"
#include "engine/routes/route_layout.h"
#include "model_loaders/checkpoint/loader.h"
#include "server/base/memory_budget.h"
#include "server/chat/chat_format.h"
#include "server/generation/generation_request.h"

namespace moeserve::testing {

class BundledModel {
 public:
  // Loads mh-moe of deploy/models at the first call.
  static const BundledModel& Get();

  // Returns rules of which the bits of `options` choose: strict fields, a key without the scope
  // `routing`, no routing records, no routing control.
  server::RequestRules Rules(uint8_t options) const;

  // Does what the server does with a request until the engine has it, and makes the engine's own
  // checks. Compiles no constraint.
  absl::Status Admit(const server::GenerationParams& params,
                     const std::vector<server::PreparedPrompt>& prompts,
                     const std::shared_ptr<server::MemoryBudget>& memory) const;
  // The same, with prompts that are not encoded yet.
  absl::Status Admit(const server::CompletionParams& params,
                     const std::shared_ptr<server::MemoryBudget>& memory) const;

  const Tokenizer& tokenizer() const { return *checkpoint_.tokenizer; }
  const ModelSpec& spec() const { return checkpoint_.spec; }
  const server::ChatFormat& chat_format() const { return *chat_format_; }
  int max_model_len() const { return 512; }

 private:
  BundledModel();

  Checkpoint checkpoint_;
  std::unique_ptr<RouteLayout> layout_;
  std::unique_ptr<server::ChatFormat> chat_format_;
};

}  // namespace moeserve::testing
