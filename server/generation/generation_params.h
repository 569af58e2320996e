// The parameters of a request that generates tokens, for HTTP and gRPC, and the rules for checking
// them.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "engine/request.h"
#include "model_loaders/checkpoint/loader.h"
#include "server/base/limits.h"
#include "server/generation/constraint_compiler.h"
#include "server/generation/routing_params.h"

namespace moeserve::server {

// The settings and model properties that determine how a request is read.
struct RequestRules {
  RequestLimits limits;
  std::vector<std::string> served_names;  // that may be used; the first is the default
  GenerationDefaults defaults;            // of the model; they replace the API's defaults
  const Tokenizer* tokenizer = nullptr;   // lives as long as the engine; null if the model has none
  int vocab_size = 0;
  int source_vocab_size = 0;     // of an encoder with a vocabulary of its own, else 0
  bool strict_fields = false;    // whether unknown fields are an error
  int max_num_seqs = kMaxBeams;  // of the engine: a request has no more beams
  int min_priority = 0;          // the lowest `priority`, which is served first
  RoutingRules routing;

  // Returns the size of the vocabulary of prompts.
  int prompt_vocab_size() const { return source_vocab_size > 0 ? source_vocab_size : vocab_size; }
};

// The parameters that completions and chats have in common. Prompts are stored elsewhere.
struct GenerationParams {
  std::string model;  // the served name that the request named
  // Without max_tokens, logprobs and prompt_logprobs, which MakeEngineRequests() sets.
  SamplingParams sampling;
  std::optional<ConstraintField> constraint;  // its compiled form becomes sampling.constraint
  int priority = 0;
  std::string cache_salt;
  int n = 1;  // samples per prompt, or results of a beam search
  // How many samples per prompt are returned: those with the highest mean log-probability of their
  // tokens. 0: all. Streams return all.
  int best = 0;
  bool stream = false;
  bool include_usage = false;
  bool continuous_usage = false;
  std::optional<int> truncate_prompt_tokens;  // -1: keep as many as fit
  bool return_token_ids = false;
  bool return_tokens_as_token_ids = false;
  RoutingParams routing;
  std::string request_id;  // from the request's body; empty if absent
  int ignored_fields = 0;  // number of unknown fields in the body
  // What the response says about fields that have no effect.
  std::vector<std::string> warnings;
  std::vector<TokenId> prediction;  // what the answer will resemble (Request::prediction)
  size_t repeated_bytes = 0;        // memory of what the response repeats of the request

  // The name of the request field in errors about the length of the prompt.
  std::string_view prompt_field = "prompt";
  std::optional<int> max_tokens;
  int default_max_tokens = kDefaultMaxTokens;  // if max_tokens is absent; reduced to what fits
  // The least number of generated tokens, and of all tokens of the decoder beside an encoder, that
  // the model's generation_config.json wants; reduced to what max_tokens allows.
  int default_min_tokens = 0;
  int default_min_length = 0;
  // The first token after the start token of an encoder-decoder, as an id or as the text of a
  // special token or of a language. At most one of them is set.
  std::optional<TokenId> forced_bos_token_id;
  std::string target_language;
  bool add_special_tokens = true;
  bool echo = false;
  std::optional<int> logprobs;         // number of alternatives to return per generated token
  std::optional<int> prompt_logprobs;  // number of alternatives to return per prompt token
};

// Returns the defaults of the API, replaced by the model's defaults where the model has them. The
// forced tokens are for encoder-decoders; MakeEngineRequests() removes them elsewhere.
SamplingParams DefaultSampling(const GenerationDefaults& model);

// Sets the model's least lengths, for a request that names no min_tokens.
void SetDefaultLengths(const GenerationDefaults& model, GenerationParams& params);

// Returns the served name for `requested`, the first one if `requested` is empty. NotFound, with
// API error code "model_not_found", for an unknown name. PermissionDenied if there is no name at
// all, which is so if the request's key may use none.
Result<std::string> ResolveModel(const std::string& requested,
                                 const std::vector<std::string>& served_names);

// Returns the priority of a request that names none: 0, or the lowest that is allowed.
int DefaultPriority(const RequestRules& rules);

// Returns InvalidArgument if other parameters contradict the constraint.
absl::Status CheckConstraint(const GenerationParams& params);

// Returns the token sequences that spell `words`: for each word, how it is tokenized at the start
// of a text and after a space.
Result<std::vector<std::vector<TokenId>>> EncodeBadWords(const std::vector<std::string>& words,
                                                         const RequestRules& rules);

}  // namespace moeserve::server
