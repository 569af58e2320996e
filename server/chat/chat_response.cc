#include "server/chat/chat_response.h"

#include <string>
#include <string_view>
#include <utility>

#include "server/generation/token_text.h"

namespace moeserve::server {
namespace {

constexpr std::string_view kObject = "chat.completion";
constexpr std::string_view kChunkObject = "chat.completion.chunk";

OrderedJson BytesJson(const Tokenizer* tokenizer, TokenId token) {
  const std::string bytes = tokenizer == nullptr ? std::string() : tokenizer->TokenBytes(token);
  if (bytes.empty()) return nullptr;
  OrderedJson list = OrderedJson::array();
  for (const char c : bytes) list.push_back(static_cast<unsigned char>(c));
  return list;
}

OrderedJson TokenJson(const Tokenizer* tokenizer, TokenId token, float logprob, bool as_id) {
  return {{"token", TokenText(tokenizer, token, as_id)},
          {"logprob", LogprobValue(logprob)},
          {"bytes", BytesJson(tokenizer, token)}};
}

// Returns the entries of `tool_calls`. Those of a stream have the index of the call; only the first
// entry of a call has its id and name.
OrderedJson CallsJson(std::vector<ToolCallDelta> calls, bool streamed) {
  OrderedJson list = OrderedJson::array();
  for (ToolCallDelta& call : calls) {
    OrderedJson entry = OrderedJson::object();
    if (streamed) entry["index"] = call.index;
    if (!call.id.empty()) {
      entry["id"] = std::move(call.id);
      entry["type"] = "function";
      entry["function"]["name"] = std::move(call.name);
    }
    entry["function"]["arguments"] = std::move(call.arguments);
    list.push_back(std::move(entry));
  }
  return list;
}

}  // namespace

Result<OrderedJson> ChatLogprobJson(const Tokenizer* tokenizer, const TokenLogprob& logprob,
                                    bool token_as_id) {
  MOESERVE_RETURN_IF_ERROR(CheckLogprob(logprob));
  OrderedJson entry = TokenJson(tokenizer, logprob.token, logprob.logprob, token_as_id);
  entry["top_logprobs"] = OrderedJson::array();
  for (const auto& [token, value] : logprob.top) {
    entry["top_logprobs"].push_back(TokenJson(tokenizer, token, value, token_as_id));
  }
  return entry;
}

ChatWriter::ChatWriter(AnswerIdentity identity, const AnswerOptions& options,
                       const ChatAnswerRules& rules, const Tokenizer* tokenizer, int choices)
    : ChunkWriter(options),
      identity_(std::move(identity)),
      rules_(rules),
      tokenizer_(tokenizer),
      choices_(choices) {
  for (int i = 0; i < choices; ++i) {
    choices_[i].part.index = i;
    if (!rules_.split.needed()) continue;
    choices_[i].splitter = AnswerSplitter::Make(rules_.split, [this, i](int call) {
      return ToolCallId(*rules_.split.syntax, identity_.unique_id, i, call);
    });
  }
}

absl::Status ChatWriter::Add(int index, const PreparedPrompt& prompt, OutputDelta delta) {
  Choice& choice = choices_[index];
  if (!choice.started) {
    choice.started = true;
    if (options_.return_token_ids) choice.part.prompt_token_ids = prompt.ids;
    // Only the first choice has prompt log-probabilities, because all choices have the same prompt.
    if (options_.prompt_logprobs && index == 0) {
      MOESERVE_RETURN_IF_ERROR(CheckPromptLogprobs(prompt, delta));
      choice.part.prompt_logprobs =
          PromptLogprobsJson(tokenizer_, delta.prompt_logprobs, *options_.prompt_logprobs);
    }
  }
  if (options_.logprobs) {
    for (const TokenLogprob& logprob : delta.logprobs) {
      MOESERVE_ASSIGN_OR_RETURN(OrderedJson entry,
                                ChatLogprobJson(tokenizer_, logprob, options_.tokens_as_ids));
      choice.logprobs.push_back(std::move(entry));
    }
  }
  choice.part.Add(std::move(delta), options_.return_token_ids);
  Split(choice);
  return absl::OkStatus();
}

void ChatWriter::Split(Choice& choice) {
  if (choice.splitter == nullptr) {
    choice.message.content += std::exchange(choice.part.text, {});
    return;
  }
  choice.message.Append(choice.splitter->Push(std::exchange(choice.part.text, {})));
  if (choice.part.finish_reason) choice.message.Append(choice.splitter->Finish());
  if (!rules_.include_reasoning) choice.message.reasoning.clear();
}

OrderedJson ChatWriter::FinishReason(const Choice& choice) const {
  const bool calls = choice.splitter != nullptr && choice.splitter->calls() > 0;
  if (calls && !rules_.named_tool && choice.part.finish_reason == moeserve::FinishReason::kStop) {
    return "tool_calls";
  }
  return FinishReasonJson(choice.part);
}

// Returns the message of a unary response.
OrderedJson ChatWriter::TakeMessage(Choice& choice) const {
  AssistantDelta message = std::exchange(choice.message, {});
  OrderedJson out = {{"role", "assistant"}, {"content", nullptr}, {"refusal", nullptr}};
  if (!message.content.empty() || message.calls.empty()) {
    out["content"] = std::move(message.content);
  }
  if (!message.reasoning.empty()) out["reasoning_content"] = std::move(message.reasoning);
  if (!message.calls.empty()) out["tool_calls"] = CallsJson(std::move(message.calls), false);
  return out;
}

OrderedJson ChatWriter::TakeLogprobs(Choice& choice) {
  if (!options_.logprobs) return nullptr;
  return {{"content", std::exchange(choice.logprobs, OrderedJson::array())}, {"refusal", nullptr}};
}

std::vector<OrderedJson> ChatWriter::TakeChunks(int index) {
  Choice& choice = choices_[index];
  ChoicePart& part = choice.part;
  if (part.absent) return {};
  std::vector<OrderedJson> chunks;
  const auto add = [&](OrderedJson delta, OrderedJson logprobs) -> OrderedJson& {
    OrderedJson item = {{"index", index},
                        {"delta", std::move(delta)},
                        {"logprobs", std::move(logprobs)},
                        {"finish_reason", nullptr}};
    chunks.push_back(EnvelopeJson(identity_, kChunkObject, OrderedJson::array({std::move(item)})));
    return chunks.back()["choices"][0];
  };
  const auto add_ids = [&](OrderedJson& item) {
    if (part.token_ids && !part.token_ids->empty()) item["token_ids"] = *part.token_ids;
    part.token_ids.reset();
    PutRouting(part, options_.routing, item);
    part.routing.reset();
    part.source_routing.reset();
  };
  if (!choice.opened) {
    choice.opened = true;
    add({{"role", "assistant"}, {"content", ""}}, nullptr);
    if (part.prompt_token_ids) chunks.back()["prompt_token_ids"] = *part.prompt_token_ids;
  }
  const bool has_more =
      !choice.logprobs.empty() || part.HasRoutes() || (part.token_ids && !part.token_ids->empty());
  AssistantDelta message = std::exchange(choice.message, {});
  // Log-probabilities and ids go with the first chunk.
  if (!message.reasoning.empty()) {
    add_ids(add({{"reasoning_content", std::move(message.reasoning)}}, TakeLogprobs(choice)));
  }
  if (!message.content.empty() || (message.empty() && has_more && !part.finish_reason)) {
    add_ids(add({{"content", std::move(message.content)}}, TakeLogprobs(choice)));
  }
  if (!message.calls.empty()) {
    add_ids(add({{"tool_calls", CallsJson(std::move(message.calls), true)}}, TakeLogprobs(choice)));
  }
  if (part.finish_reason) {
    const bool has_logprobs = !choice.logprobs.empty();
    OrderedJson& item =
        add(OrderedJson::object(), has_logprobs ? TakeLogprobs(choice) : OrderedJson(nullptr));
    item["finish_reason"] = FinishReason(choice);
    item["stop_reason"] = StopReasonJson(part);
    PutBeam(part, item);
    add_ids(item);
  }
  part = ChoicePart();
  part.index = index;
  return chunks;
}

OrderedJson ChatWriter::EmptyChunk() const {
  return EnvelopeJson(identity_, kChunkObject, OrderedJson::array());
}

OrderedJson ChatWriter::TakeWhole() {
  OrderedJson list = OrderedJson::array();
  for (Choice& choice : choices_) {
    ChoicePart& part = choice.part;
    if (part.absent) continue;
    OrderedJson item;
    item["index"] = part.index;
    item["message"] = TakeMessage(choice);
    item["logprobs"] = TakeLogprobs(choice);
    item["finish_reason"] = FinishReason(choice);
    item["stop_reason"] = StopReasonJson(part);
    PutBeam(part, item);
    if (part.token_ids) item["token_ids"] = *part.token_ids;
    PutRouting(part, options_.routing, item);
    list.push_back(std::move(item));
  }
  OrderedJson answer = EnvelopeJson(identity_, kObject, std::move(list));
  ChoicePart& first = choices_.front().part;
  if (first.prompt_token_ids) answer["prompt_token_ids"] = *std::move(first.prompt_token_ids);
  if (!first.prompt_logprobs.is_null()) {
    answer["prompt_logprobs"] = std::move(first.prompt_logprobs);
  }
  return answer;
}

}  // namespace moeserve::server
