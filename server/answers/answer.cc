#include "server/answers/answer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error_text.h"
#include "base/status.h"
#include "server/base/json_fields.h"
#include "server/base/version.h"
#include "server/fields/routing_fields.h"
#include "server/generation/token_text.h"

namespace moeserve::server {
namespace {

// The value for minus infinity that clients expect, because JSON cannot represent minus infinity.
constexpr double kMinusInfinity = -9999.0;

}  // namespace

AnswerOptions MakeAnswerOptions(const GenerationParams& params) {
  AnswerOptions options;
  options.echo = params.echo;
  options.logprobs = params.logprobs.has_value();
  options.echo_logprobs = params.logprobs.value_or(0);
  options.prompt_logprobs = params.prompt_logprobs;
  options.return_token_ids = params.return_token_ids;
  options.tokens_as_ids = params.return_tokens_as_token_ids;
  options.routing = params.routing;
  options.samples = params.n;
  options.best = params.best;
  options.include_usage = params.include_usage;
  options.continuous_usage = params.continuous_usage;
  options.warnings = params.warnings;
  return options;
}

void ChoicePart::Add(OutputDelta delta, bool return_token_ids) {
  text += delta.text;
  if (return_token_ids) {
    if (!token_ids) token_ids.emplace();
    token_ids->insert(token_ids->end(), delta.tokens.begin(), delta.tokens.end());
  }
  if (delta.routing) {
    if (!routing) routing.emplace();
    Append(*routing, *delta.routing);
  }
  if (delta.source_routing) source_routing = std::move(delta.source_routing);
  if (delta.beam) beam = delta.beam;
  absent = absent || delta.absent;
  if (delta.finished) {
    finish_reason = delta.finish_reason;
    stop_string = std::move(delta.stop_string);
    stop_token = delta.stop_token;
  }
}

double LogprobValue(float logprob) {
  return std::isinf(logprob) && logprob < 0 ? kMinusInfinity : static_cast<double>(logprob);
}

absl::Status CheckLogprob(const TokenLogprob& logprob) {
  bool nan = std::isnan(logprob.logprob);
  for (const auto& [token, value] : logprob.top) nan = nan || std::isnan(value);
  return nan ? absl::InternalError("a log-probability is not a number") : absl::OkStatus();
}

absl::Status CheckPromptLogprobs(const PreparedPrompt& prompt, const OutputDelta& first) {
  if (first.prompt_logprobs.size() != prompt.ids.size()) {
    return absl::InternalError("the engine gave no log-probabilities of the prompt");
  }
  for (const std::optional<TokenLogprob>& logprob : first.prompt_logprobs) {
    if (logprob) MOESERVE_RETURN_IF_ERROR(CheckLogprob(*logprob));
  }
  return absl::OkStatus();
}

OrderedJson PromptLogprobsJson(const Tokenizer* tokenizer,
                               std::span<const std::optional<TokenLogprob>> logprobs, int count) {
  const auto entry = [&](TokenId token, float logprob, int rank) {
    return OrderedJson{{"logprob", LogprobValue(logprob)},
                       {"rank", rank + 1},
                       {"decoded_token", TokenText(tokenizer, token, false)}};
  };
  OrderedJson list = OrderedJson::array();
  for (const std::optional<TokenLogprob>& logprob : logprobs) {
    if (!logprob) {
      list.push_back(nullptr);
      continue;
    }
    OrderedJson object;
    object[std::to_string(logprob->token)] = entry(logprob->token, logprob->logprob, logprob->rank);
    const size_t shown = std::min(logprob->top.size(), static_cast<size_t>(count));
    for (size_t i = 0; i < shown; ++i) {
      const auto& [token, value] = logprob->top[i];
      if (token == logprob->token) continue;
      object[std::to_string(token)] = entry(token, value, static_cast<int>(i));
    }
    list.push_back(std::move(object));
  }
  return list;
}

void PutRouting(const ChoicePart& part, const RoutingParams& params, OrderedJson& choice) {
  if (!part.HasRoutes()) return;
  if (params.record) choice["routing"] = RoutingRecordJson(*part.routing, *params.layout);
  if (params.record && part.source_routing && params.source_layout != nullptr) {
    choice["source_routing"] = RoutingRecordJson(*part.source_routing, *params.source_layout);
  }
  if (params.table) {
    choice["routed_experts"] = RoutedExpertsTable(*part.routing, *params.layout, params.num_layers);
  }
}

void PutBeam(const ChoicePart& part, OrderedJson& choice) {
  if (!part.beam) return;
  choice["beam_score"] = part.beam->score;
  choice["cumulative_logprob"] = part.beam->cumulative_logprob;
}

OrderedJson FinishReasonJson(const ChoicePart& part) {
  if (!part.finish_reason) return nullptr;
  return *part.finish_reason == FinishReason::kStop ? "stop" : "length";
}

OrderedJson StopReasonJson(const ChoicePart& part) {
  if (part.stop_string) return *part.stop_string;
  if (part.stop_token) return *part.stop_token;
  return nullptr;
}

OrderedJson EnvelopeJson(const AnswerIdentity& identity, std::string_view object,
                         OrderedJson choices) {
  OrderedJson answer;
  answer["id"] = identity.id;
  answer["object"] = object;
  answer["created"] = identity.created;
  answer["model"] = identity.model;
  answer["system_fingerprint"] = Concat("moeserve-", kVersion);
  answer["choices"] = std::move(choices);
  return answer;
}

OrderedJson UsageJson(const Usage& sums) {
  OrderedJson usage;
  usage["prompt_tokens"] = sums.prompt_tokens;
  usage["completion_tokens"] = sums.completion_tokens;
  usage["total_tokens"] = int64_t{sums.prompt_tokens} + sums.completion_tokens;
  usage["prompt_tokens_details"]["cached_tokens"] = sums.cached_tokens;
  if (sums.routed_tokens > 0) {
    const double tokens = sums.routed_tokens;
    usage["experts_per_token"] = static_cast<double>(sums.expert_routes) / tokens;
    usage["activated_parameters_per_token"] =
        static_cast<double>(sums.activated_parameters) / tokens;
    if (sums.macs) usage["macs_per_token"] = *sums.macs / tokens;
  }
  return usage;
}

void PutWarnings(const std::vector<std::string>& warnings, bool timed_out, OrderedJson& answer) {
  if (warnings.empty() && !timed_out) return;
  answer["warnings"] = warnings;
  if (timed_out) answer["warnings"].push_back(kTimeoutWarning);
}

std::string DumpJson(const OrderedJson& value) { return DumpOrdered(value); }

std::string SseEvent(const OrderedJson& value) { return Concat("data: ", DumpJson(value), "\n\n"); }

}  // namespace moeserve::server
