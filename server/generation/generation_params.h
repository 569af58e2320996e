// The parameters of a generating request, of any interface, and the rules for reading them.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "engine/request.h"
#include "model_loaders/loader.h"
#include "server/base/limits.h"
#include "server/generation/constraint_compiler.h"
#include "server/generation/routing_params.h"

namespace moeserve::server {

// The part of the server's state that decides how a request is read.
struct RequestRules {
  RequestLimits limits;
  std::vector<std::string> served_names;  // not empty; the first is the default
  GenerationDefaults defaults;            // of the model; they replace those of the API
  const Tokenizer* tokenizer = nullptr;   // lives as long as the engine; null: the model has none
  int vocab_size = 0;
  bool strict_fields = false;  // unknown fields are an error
  RoutingRules routing;
};

// The fields that completions and chats have in common. Prompts are kept apart.
struct GenerationParams {
  std::string model;        // the served name that was asked for
  SamplingParams sampling;  // max_tokens, logprobs and prompt_logprobs are set per prompt
  std::optional<ConstraintField> constraint;  // to be compiled into sampling.constraint
  int priority = 0;
  std::string cache_salt;
  int n = 1;  // samples of each prompt
  bool stream = false;
  bool include_usage = false;
  bool continuous_usage = false;
  std::optional<int> truncate_prompt_tokens;  // -1: as many as fit
  bool return_token_ids = false;
  bool return_tokens_as_token_ids = false;
  RoutingParams routing;
  std::string request_id;  // of the body; empty: none
  int ignored_fields = 0;  // unknown fields of the body

  std::string_view prompt_field = "prompt";  // the field that errors about the prompt's length name
  std::optional<int> max_tokens;
  int default_max_tokens = kDefaultMaxTokens;  // where that is absent; clamped to what fits
  bool add_special_tokens = true;
  bool echo = false;
  std::optional<int> logprobs;         // alternatives beside each generated token
  std::optional<int> prompt_logprobs;  // beside each prompt token
};

// The defaults of the API, replaced by those that the model has.
SamplingParams DefaultSampling(const GenerationDefaults& model);

// Returns the served name for `requested`, the first one if that is empty. NotFound, code
// model_not_found, for any other.
Result<std::string> ResolveModel(const std::string& requested,
                                 const std::vector<std::string>& served_names);

// InvalidArgument: fields that contradict the constraint.
absl::Status CheckConstraint(const GenerationParams& params);

// Returns the token sequences that spell `words`, each at the start of a text and after a space.
Result<std::vector<std::vector<TokenId>>> EncodeBadWords(const std::vector<std::string>& words,
                                                         const RequestRules& rules);

}  // namespace moeserve::server
