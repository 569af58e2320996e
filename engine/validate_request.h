// Checks of a request that do not depend on the engine's state.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "engine/request.h"
#include "engine/spec/spec.h"

namespace moeserve {

struct RequestLimits {
  int max_model_len = 0;
  std::string context_reason = {};  // EngineOptions::context_reason
  bool has_tokenizer = false;
  bool routing_records = false;
  bool routing_control = false;
};

// Returns whether a model of this kind computes what a request asks for: null means that it
// generates text.
bool Computes(const ModelSpec& spec, const EncodeOutput* output);
// Returns what such a model computes, as interfaces call it: some of "generate", "embed",
// "token_embed", "classify", "token_classify", "score" (of two texts) and "fill_mask".
std::vector<std::string_view> TaskNames(const ModelSpec& spec);
// Returns these names for error messages: "generate, embed".
std::string TasksOf(const ModelSpec& spec);

// Returns whether one step must compute all tokens of the request.
bool ComputesWhole(const Request& request, const ModelSpec& spec);

// Returns InvalidArgument with the field, what was expected and what was found if `request` exceeds
// a limit.
absl::Status ValidateRequest(const Request& request, const RequestLimits& limits,
                             const ModelSpec& spec);

}  // namespace moeserve
