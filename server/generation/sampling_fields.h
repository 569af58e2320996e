// The request fields that all generating endpoints share: which model, how to sample, how to
// stream.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "engine/request.h"
#include "model_loaders/loader.h"
#include "nlohmann/json.hpp"
#include "server/base/limits.h"
#include "server/generation/routing_fields.h"
#include "server/generation/structured_fields.h"

namespace moeserve::server {

// What the parser has to know of the server.
struct RequestRules {
  RequestLimits limits;
  std::vector<std::string> served_names;  // not empty; the first is the default
  GenerationDefaults defaults;            // replace those of the API
  const Tokenizer* tokenizer = nullptr;   // lives as long as the engine; null: the model has none
  int vocab_size = 0;
  bool strict_fields = false;  // unknown fields are an error
  RoutingRules routing;
};

struct SharedParams {
  std::string model;        // the served name that was asked for
  SamplingParams sampling;  // max_tokens, logprobs and prompt_logprobs are set per prompt
  std::optional<ConstraintField> constraint;  // to be compiled into sampling.constraint
  int priority = 0;
  std::string cache_salt;
  int n = 1;
  bool stream = false;
  bool include_usage = false;
  bool continuous_usage = false;
  std::optional<int> truncate_prompt_tokens;  // -1: as many as fit
  bool return_token_ids = false;
  bool return_tokens_as_token_ids = false;
  RoutingParams routing;
  std::string request_id;  // of the body; empty: none
  int ignored_fields = 0;
};

// Reads the shared fields of `body`, an object, and judges all the others: known but not supported
// ones, and unknown ones, which are all but the shared and `own_fields`, which the caller reads.
// The error names the field. NotFound: a model that is not served.
absl::Status ParseSharedFields(const nlohmann::json& body, const RequestRules& rules,
                               std::span<const std::string_view> own_fields, SharedParams& out);

// InvalidArgument: fields that contradict the constraint.
absl::Status CheckConstraint(const SharedParams& params);

// `requested` empty: the first served name. NotFound, code model_not_found, for any other.
Result<std::string> ResolveModel(const std::string& requested,
                                 const std::vector<std::string>& served_names);

}  // namespace moeserve::server
