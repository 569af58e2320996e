#include "server/generation/generation_request.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "base/error_text.h"
#include "server/base/api_error.h"

namespace moeserve::server {

bool TruncatePrompt(const GenerationParams& params, int max_model_len, std::vector<TokenId>& ids) {
  if (!params.truncate_prompt_tokens) return false;
  const int64_t room = max_model_len - params.max_tokens.value_or(kDefaultMaxTokens);
  const int64_t keep = *params.truncate_prompt_tokens == -1 ? std::max<int64_t>(1, room)
                                                            : *params.truncate_prompt_tokens;
  if (static_cast<int64_t>(ids.size()) <= keep) return false;
  ids.erase(ids.begin(), ids.end() - keep);
  return true;
}

Result<int> FitIntoContext(const GenerationParams& params, size_t prompt_tokens, int max_model_len,
                           std::string_view context_reason) {
  const int64_t prompt = static_cast<int64_t>(prompt_tokens);
  const int64_t room = max_model_len - prompt;
  const auto too_long = [&](int64_t wanted) {
    return MakeError(absl::StatusCode::kInvalidArgument, "context_length_exceeded",
                     Concat("the context length of this model is ", max_model_len, " tokens",
                            context_reason.empty() ? "" : Concat(" (", context_reason, ')'),
                            "; the prompt has ", prompt, " and ", wanted, " are to be generated"),
                     params.prompt_field);
  };
  if (!params.max_tokens) {
    if (room < 1) return too_long(1);
    return static_cast<int>(std::min<int64_t>(params.default_max_tokens, room));
  }
  if (*params.max_tokens > room) return too_long(*params.max_tokens);
  return *params.max_tokens;
}

PromptRules PromptRulesOf(const Engine& engine) {
  PromptRules rules{.tokenizer = engine.tokenizer(),
                    .max_model_len = engine.max_model_len(),
                    .context_reason = engine.context_reason()};
  const ModelSpec& spec = engine.spec();
  if (spec.encoder != nullptr) {
    rules.decoder_start = *spec.decoder_start_token_id;
    rules.max_source = std::min(rules.max_model_len, spec.encoder->max_position_embeddings);
  }
  return rules;
}

namespace {

Result<std::vector<TokenId>> EncodeInput(const PromptInput& input, std::string_view field,
                                         bool special_tokens, const Tokenizer* tokenizer) {
  if (!input.is_text) return input.ids;
  if (tokenizer == nullptr) {
    return InvalidValue(field, "this model has no tokenizer: send token ids");
  }
  auto ids = tokenizer->Encode(input.text, special_tokens);
  if (!ids.ok()) return WithApiCode(ids.status(), "invalid_value");
  return ids;
}

// Returns the token that the request, or else the model, wants after the decoder's start token.
Result<std::optional<TokenId>> ForcedStart(const CompletionParams& params,
                                           const PromptRules& rules) {
  const bool by_id = params.forced_bos_token_id.has_value();
  const char* const field = by_id ? "forced_bos_token_id" : "target_language";
  if (!by_id && params.target_language.empty()) {
    const bool free = rules.decoder_start && !params.decoder_prompt && !params.constraint;
    return free ? params.sampling.forced_bos_token_id : std::nullopt;
  }
  const auto refuse = [&](std::string_view expected) {
    return InvalidValue(field, Concat("'", field, "': expected ", expected));
  };
  if (!rules.decoder_start) return refuse("none, because this model has no encoder");
  if (params.decoder_prompt) return refuse("none together with 'decoder_prompt'");
  if (params.constraint) return refuse("none together with structured output");
  if (by_id && !params.target_language.empty()) return refuse("none beside 'target_language'");
  if (by_id) return params.forced_bos_token_id;
  const std::string& language = params.target_language;
  if (rules.tokenizer != nullptr) {
    for (const std::string& text : {language, Concat("__", language, "__")}) {
      const std::optional<TokenId> id = rules.tokenizer->TokenToId(text);
      if (id && rules.tokenizer->IsSpecial(*id)) return id;
    }
  }
  return refuse(
      Concat("the text of a special token of this model, found '", Printable(language, 64), "'"));
}

// Makes the prompt of an encoder-decoder the source, and lets the decoder begin with its start
// token and `given`.
absl::Status MakeSource(const GenerationParams& params, const PromptRules& rules,
                        const std::vector<TokenId>& given, PreparedPrompt& prompt) {
  prompt.source = std::move(prompt.ids);
  if (params.truncate_prompt_tokens) {
    const size_t keep = *params.truncate_prompt_tokens == -1
                            ? static_cast<size_t>(rules.max_source)
                            : static_cast<size_t>(*params.truncate_prompt_tokens);
    if (prompt.source.size() > keep) {
      prompt.source.erase(prompt.source.begin(), prompt.source.end() - static_cast<int64_t>(keep));
    }
  }
  if (std::ssize(prompt.source) > rules.max_source) {
    return MakeError(absl::StatusCode::kInvalidArgument, "context_length_exceeded",
                     Concat("the encoder of this model takes at most ", rules.max_source,
                            " tokens; the prompt has ", prompt.source.size()),
                     params.prompt_field);
  }
  prompt.ids.assign(1, *rules.decoder_start);
  prompt.ids.insert(prompt.ids.end(), given.begin(), given.end());
  return absl::OkStatus();
}

}  // namespace

Result<std::vector<PreparedPrompt>> PreparePrompts(const CompletionParams& params,
                                                   const PromptRules& rules) {
  std::vector<TokenId> given;
  if (params.decoder_prompt) {
    constexpr char kField[] = "decoder_prompt";
    if (!rules.decoder_start) {
      return InvalidValue(kField,
                          "'decoder_prompt': expected none, because this model has no "
                          "encoder: its prompt is what it continues");
    }
    MOESERVE_ASSIGN_OR_RETURN(given,
                              EncodeInput(*params.decoder_prompt, kField, false, rules.tokenizer));
  }
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<TokenId> forced_bos, ForcedStart(params, rules));
  const Tokenizer* const prompts_tokenizer = rules.decoder_start && rules.tokenizer != nullptr
                                                 ? &rules.tokenizer->source()
                                                 : rules.tokenizer;
  std::vector<PreparedPrompt> prepared;
  prepared.reserve(params.prompts.size());
  for (const PromptInput& input : params.prompts) {
    PreparedPrompt prompt;
    MOESERVE_ASSIGN_OR_RETURN(
        prompt.ids, EncodeInput(input, "prompt", params.add_special_tokens, prompts_tokenizer));
    if (prompt.ids.empty()) {
      return InvalidValue(params.prompt_field,
                          Concat("'", params.prompt_field,
                                 "' must not be empty: the tokenizer adds no token to it"));
    }
    bool truncated = false;
    if (rules.decoder_start) {
      MOESERVE_RETURN_IF_ERROR(MakeSource(params, rules, given, prompt));
    } else {
      truncated = TruncatePrompt(params, rules.max_model_len, prompt.ids);
    }
    MOESERVE_ASSIGN_OR_RETURN(
        prompt.max_tokens,
        FitIntoContext(params, prompt.ids.size(), rules.max_model_len, rules.context_reason));
    if (params.echo) {
      if (rules.decoder_start) {
        if (rules.tokenizer != nullptr) {
          MOESERVE_ASSIGN_OR_RETURN(prompt.echo_text, rules.tokenizer->Decode(given, false));
        }
      } else if (input.is_text && !truncated) {
        prompt.echo_text = input.text;
      } else if (rules.tokenizer != nullptr) {
        MOESERVE_ASSIGN_OR_RETURN(prompt.echo_text, rules.tokenizer->Decode(prompt.ids, false));
      }
    }
    prompt.forced_bos = forced_bos;
    prepared.push_back(std::move(prompt));
  }
  return prepared;
}

absl::Status CheckRecordSize(const GenerationParams& params,
                             const std::vector<PreparedPrompt>& prompts, const ModelSpec& spec,
                             int64_t max_routes) {
  const RoutingParams& routing = params.routing;
  if (!routing.any_record()) return absl::OkStatus();
  const int64_t per_token = MostRoutes(spec, routing.control.get());
  int64_t tokens = 0;
  for (const PreparedPrompt& prompt : prompts) {
    tokens += static_cast<int64_t>(prompt.tokens()) + (params.stream ? 0 : prompt.max_tokens);
  }
  tokens *= params.n;
  if (per_token == 0 || tokens <= max_routes / per_token) return absl::OkStatus();
  const char* const field = routing.record  ? "return_routing"
                            : routing.table ? "return_routed_experts"
                                            : "return_word_experts";
  return InvalidValue(
      field, Concat("'", field, "': ", tokens, " tokens of all choices",
                    params.stream ? "' prompts" : "", " are too many for one answer: at most ",
                    max_routes / per_token, " with this model; ask for fewer choices or tokens"));
}

namespace {

// Returns the memory of the lists that every choice has a copy of.
size_t SamplingBytes(const SamplingParams& sampling) {
  size_t bytes = sampling.allowed_token_ids.size() * sizeof(TokenId) +
                 sampling.logit_bias.size() * sizeof(sampling.logit_bias[0]) +
                 sampling.stop_token_ids.size() * sizeof(TokenId);
  for (const auto& words : sampling.bad_words) {
    bytes += sizeof(words) + words.size() * sizeof(TokenId);
  }
  for (const std::string& stop : sampling.stop) bytes += sizeof(stop) + stop.size();
  return bytes;
}

size_t ConstraintBytes(const ConstraintSpec& spec) {
  size_t bytes = 2 * spec.text.size();
  for (const std::string& choice : spec.choices) bytes += sizeof(choice) + choice.size();
  return bytes;
}

}  // namespace

size_t AdmissionBytes(const GenerationParams& params, const std::vector<PreparedPrompt>& prompts,
                      const ModelSpec& spec) {
  // Bytes per choice, per token of its prompt, and per alternative in a list of log-probabilities:
  // measured peaks of unary answers, rounded up (tests/clients/test_memory.py).
  constexpr size_t kChoice = 8 << 10;
  constexpr size_t kToken = 24;
  constexpr size_t kTokenId = 48;
  constexpr size_t kScoredToken = 256;
  constexpr size_t kAlternative = 256;
  constexpr size_t kPromptAlternative = 900;
  constexpr size_t kRoute = 60;
  size_t per_token = kToken;
  if (params.return_token_ids) per_token += kTokenId;
  if (params.echo && params.logprobs) {
    per_token += kScoredToken + kAlternative * static_cast<size_t>(*params.logprobs + 1);
  }
  if (params.prompt_logprobs) {
    per_token +=
        kScoredToken + kPromptAlternative * static_cast<size_t>(*params.prompt_logprobs + 1);
  }
  if (params.routing.any_record()) {
    per_token += kRoute * static_cast<size_t>(MostRoutes(spec, params.routing.control.get()));
  }
  // Each choice searches in a copy of the prediction and of its own tokens.
  size_t bytes = prompts.size() *
                 (SamplingBytes(params.sampling) + 4 * params.prediction.size() * sizeof(TokenId));
  for (const PreparedPrompt& prompt : prompts) {
    bytes += kChoice + (prompt.source.size() + prompt.ids.size()) * per_token +
             4 * prompt.echo_text.size();
  }
  const int choices =
      std::max(params.n, params.sampling.beam ? params.sampling.beam->num_beams : 1);
  return bytes * static_cast<size_t>(choices) + params.repeated_bytes +
         (params.constraint ? ConstraintBytes(params.constraint->spec) : 0);
}

std::vector<Request> MakeEngineRequests(const GenerationParams& params,
                                        const std::vector<PreparedPrompt>& prompts,
                                        const std::string& id, absl::Time deadline) {
  // The engine returns one list of prompt log-probabilities, which serves both `prompt_logprobs`
  // and `echo` with `logprobs`. Request the larger number of alternatives.
  std::optional<int> prompt_logprobs = params.prompt_logprobs;
  if (params.echo && params.logprobs) {
    prompt_logprobs = std::max(*params.logprobs, prompt_logprobs.value_or(0));
  }
  std::vector<Request> requests;
  for (size_t p = 0; p < prompts.size(); ++p) {
    for (int sample = 0; sample < params.n; ++sample) {
      Request request;
      request.id = Concat(id, '-', p * params.n + sample);
      request.prompt = prompts[p].ids;
      request.source = prompts[p].source;
      request.sampling = params.sampling;
      request.sampling.sample_index = sample;
      request.sampling.max_tokens = prompts[p].max_tokens;
      request.sampling.forced_bos_token_id = prompts[p].forced_bos;
      int least = params.default_min_tokens;
      if (!prompts[p].source.empty()) {
        least =
            std::max(least, params.default_min_length - static_cast<int>(prompts[p].ids.size()));
      }
      request.sampling.min_tokens =
          std::max(params.sampling.min_tokens, std::min(least, prompts[p].max_tokens));
      if (prompts[p].source.empty() || params.constraint) {
        request.sampling.forced_eos_token_id.reset();
      }
      request.sampling.logprobs = params.logprobs;
      // The best samples are found by the log-probabilities of their tokens.
      if (params.best > 0 && !params.logprobs) request.sampling.logprobs = 0;
      request.sampling.prompt_logprobs = prompt_logprobs;
      request.deadline = deadline;
      request.priority = params.priority;
      request.cache_salt = params.cache_salt;
      request.routing_record = params.routing.any_record();
      request.routing_control = params.routing.control;
      request.prediction = params.prediction;
      requests.push_back(std::move(request));
    }
  }
  return requests;
}

}  // namespace moeserve::server
