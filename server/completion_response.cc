#include "server/completion_response.h"

#include <cmath>
#include <utility>

#include "model_loaders/message.h"
#include "server/utf8.h"
#include "server/version.h"

namespace moeserve::server {
namespace {

using Json = nlohmann::ordered_json;

// What clients expect in place of minus infinity, which JSON cannot say.
constexpr double kMinusInfinity = -9999.0;

double LogprobValue(float logprob) {
  return std::isinf(logprob) && logprob < 0 ? kMinusInfinity : static_cast<double>(logprob);
}

// Keeps the larger of two values where ids share a text.
void PutLarger(Json& object, const std::string& key, double value) {
  const auto it = object.find(key);
  if (it == object.end()) {
    object[key] = value;
  } else if (it->get<double>() < value) {
    *it = value;
  }
}

}  // namespace

std::string TokenText(const Tokenizer* tokenizer, TokenId token, bool as_id) {
  if (as_id || tokenizer == nullptr) return Concat("token_id:", token);
  std::string bytes = tokenizer->TokenBytes(token);
  if (bytes.empty()) bytes = std::string(tokenizer->TokenString(token));
  return ReplaceInvalidUtf8(bytes);
}

void LogprobArrays::AddToken(const std::string& text) {
  tokens_.push_back(text);
  text_offset_.push_back(offset_);
  offset_ += CountCodePoints(text);
}

void LogprobArrays::AddUnscored(TokenId token) {
  AddToken(TokenText(tokenizer_, token, tokens_as_ids_));
  token_logprobs_.push_back(nullptr);
  top_logprobs_.push_back(nullptr);
}

absl::Status LogprobArrays::Add(const TokenLogprob& logprob) {
  bool nan = std::isnan(logprob.logprob);
  for (const auto& [token, value] : logprob.top) nan = nan || std::isnan(value);
  if (nan) return absl::InternalError("a log-probability is not a number");

  const std::string text = TokenText(tokenizer_, logprob.token, tokens_as_ids_);
  const double value = LogprobValue(logprob.logprob);
  AddToken(text);
  token_logprobs_.push_back(value);
  Json top = Json::object();
  for (const auto& [token, other] : logprob.top) {
    PutLarger(top, TokenText(tokenizer_, token, tokens_as_ids_), LogprobValue(other));
  }
  PutLarger(top, text, value);
  top_logprobs_.push_back(std::move(top));
  return absl::OkStatus();
}

Json LogprobArrays::Take() {
  Json out;
  out["tokens"] = std::exchange(tokens_, Json::array());
  out["token_logprobs"] = std::exchange(token_logprobs_, Json::array());
  out["top_logprobs"] = std::exchange(top_logprobs_, Json::array());
  out["text_offset"] = std::exchange(text_offset_, Json::array());
  return out;
}

Json UsageJson(int64_t prompt_tokens, int64_t completion_tokens, int64_t cached_tokens) {
  Json usage;
  usage["prompt_tokens"] = prompt_tokens;
  usage["completion_tokens"] = completion_tokens;
  usage["total_tokens"] = prompt_tokens + completion_tokens;
  usage["prompt_tokens_details"]["cached_tokens"] = cached_tokens;
  return usage;
}

Json ChoiceJson(const ChoicePart& part) {
  Json choice;
  choice["index"] = part.index;
  choice["text"] = part.text;
  choice["logprobs"] = part.logprobs;
  if (part.finish_reason) {
    choice["finish_reason"] = *part.finish_reason == FinishReason::kStop ? "stop" : "length";
  } else {
    choice["finish_reason"] = nullptr;
  }
  if (part.stop_string) {
    choice["stop_reason"] = *part.stop_string;
  } else if (part.stop_token) {
    choice["stop_reason"] = *part.stop_token;
  } else {
    choice["stop_reason"] = nullptr;
  }
  if (part.prompt_token_ids) choice["prompt_token_ids"] = *part.prompt_token_ids;
  if (part.token_ids) choice["token_ids"] = *part.token_ids;
  return choice;
}

Json CompletionJson(const AnswerIdentity& identity, Json choices) {
  Json answer;
  answer["id"] = identity.id;
  answer["object"] = "text_completion";
  answer["created"] = identity.created;
  answer["model"] = identity.model;
  answer["system_fingerprint"] = Concat("moeserve-", kVersion);
  answer["choices"] = std::move(choices);
  return answer;
}

std::string DumpJson(const Json& value) {
  return value.dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

std::string SseEvent(const Json& value) { return Concat("data: ", DumpJson(value), "\n\n"); }

}  // namespace moeserve::server
