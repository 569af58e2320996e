#include "server/anthropic/message_writer.h"

#include <utility>

#include "base/error_text.h"
#include "server/anthropic/message_request.h"
#include "server/base/json_fields.h"
#include "server/fields/routing_fields.h"

namespace moeserve::server {

namespace {

void WriteEvent(const OrderedJson& event, std::string& out) {
  out += Concat("event: ", event["type"].get<std::string>(), "\n", SseEvent(event));
}

std::string_view ErrorType(const HttpError& error) {
  switch (error.status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 413:
      return "request_too_large";
    case 429:
      return "rate_limit_error";
    case 503:
      return "overloaded_error";
    default:
      return error.status < 500 ? "invalid_request_error" : "api_error";
  }
}

OrderedJson ErrorObject(const HttpError& error) {
  OrderedJson inner = {{"type", ErrorType(error)}, {"message", error.message}};
  if (!error.code.empty()) inner["code"] = error.code;
  if (!error.param.empty()) inner["param"] = MessageParam(error.param);
  // Clients that prefer threads send the whole conversation then.
  if (error.param == "thread") inner["details"] = {{"error_code", "thread_unsupported_request"}};
  return {{"type", "error"}, {"error", std::move(inner)}};
}

OrderedJson UsageOf(const Usage& sums) {
  const OrderedJson chat = UsageJson(sums);
  const int64_t cached = sums.cached_tokens;
  OrderedJson usage = {{"input_tokens", int64_t{sums.prompt_tokens} - cached},
                       {"cache_creation_input_tokens", 0},
                       {"cache_read_input_tokens", cached},
                       {"output_tokens", sums.completion_tokens}};
  for (const char* name :
       {"experts_per_token", "activated_parameters_per_token", "macs_per_token"}) {
    if (chat.contains(name)) usage[name] = chat[name];
  }
  return usage;
}

}  // namespace

std::string MessageErrorJson(const HttpError& error) { return DumpJson(ErrorObject(error)); }

std::string MessageWriter::ErrorBody(const HttpError& error) const {
  return MessageErrorJson(error);
}

void MessageWriter::AppendError(const HttpError& error, std::string& out) {
  WriteEvent(ErrorObject(error), out);
}

OrderedJson MessageWriter::Envelope() const {
  return {{"id", identity_.id},
          {"type", "message"},
          {"role", "assistant"},
          {"model", identity_.model},
          {"content", OrderedJson::array()},
          {"stop_reason", nullptr},
          {"stop_sequence", nullptr}};
}

OrderedJson MessageWriter::StopReason() const {
  if (end().finish_reason == FinishReason::kLength) return "max_tokens";
  if (end().stop_string) return "stop_sequence";
  return has_calls() ? "tool_use" : "end_turn";
}

OrderedJson MessageWriter::TakeAnswer(const Usage& sums) {
  OrderedJson answer = Envelope();
  for (const Block& block : blocks()) {
    switch (block.kind) {
      case Block::Kind::kReasoning:
        answer["content"].push_back(
            {{"type", "thinking"}, {"thinking", block.text}, {"signature", ""}});
        break;
      case Block::Kind::kText:
        answer["content"].push_back({{"type", "text"}, {"text", block.text}});
        break;
      case Block::Kind::kCall: {
        OrderedJson input = ParseOrdered(block.text);
        // The arguments are no JSON if the limit on tokens was reached.
        if (input.is_discarded()) input = OrderedJson::object();
        answer["content"].push_back({{"type", "tool_use"},
                                     {"id", block.call_id},
                                     {"name", block.call_name},
                                     {"input", std::move(input)}});
        break;
      }
    }
  }
  answer["stop_reason"] = StopReason();
  if (end().stop_string) answer["stop_sequence"] = *end().stop_string;
  if (const auto& control = options_.routing.control) {
    answer["routing_control"] = RoutingControlJson(control->change());
  }
  PutWarnings(options_.warnings, timed_out(), answer);
  answer["usage"] = UsageOf(sums);
  return answer;
}

void MessageWriter::WriteBegin(int prompt_tokens, std::string& out) {
  OrderedJson message = Envelope();
  PutWarnings(options_.warnings, false, message);
  message["usage"] = {{"input_tokens", prompt_tokens}, {"output_tokens", 0}};
  WriteEvent({{"type", "message_start"}, {"message", std::move(message)}}, out);
}

void MessageWriter::WriteOpen(const Block& block, std::string& out) {
  OrderedJson content;
  switch (block.kind) {
    case Block::Kind::kReasoning:
      content = {{"type", "thinking"}, {"thinking", ""}, {"signature", ""}};
      break;
    case Block::Kind::kText:
      content = {{"type", "text"}, {"text", ""}};
      break;
    case Block::Kind::kCall:
      content = {{"type", "tool_use"},
                 {"id", block.call_id},
                 {"name", block.call_name},
                 {"input", OrderedJson::object()}};
      break;
  }
  WriteEvent({{"type", "content_block_start"},
              {"index", block.index},
              {"content_block", std::move(content)}},
             out);
}

void MessageWriter::WriteDelta(const Block& block, std::string_view piece, OrderedJson /*logprobs*/,
                               std::string& out) {
  OrderedJson delta;
  switch (block.kind) {
    case Block::Kind::kReasoning:
      delta = {{"type", "thinking_delta"}, {"thinking", piece}};
      break;
    case Block::Kind::kText:
      delta = {{"type", "text_delta"}, {"text", piece}};
      break;
    case Block::Kind::kCall:
      delta = {{"type", "input_json_delta"}, {"partial_json", piece}};
      break;
  }
  WriteEvent({{"type", "content_block_delta"}, {"index", block.index}, {"delta", std::move(delta)}},
             out);
}

void MessageWriter::WriteClose(const Block& block, std::string& out) {
  WriteEvent({{"type", "content_block_stop"}, {"index", block.index}}, out);
}

void MessageWriter::WriteEnd(const Usage& sums, std::string& out) {
  OrderedJson delta = {{"stop_reason", StopReason()}, {"stop_sequence", nullptr}};
  if (end().stop_string) delta["stop_sequence"] = *end().stop_string;
  OrderedJson event = {
      {"type", "message_delta"}, {"delta", std::move(delta)}, {"usage", UsageOf(sums)}};
  PutWarnings({}, timed_out(), event);
  WriteEvent(event, out);
  WriteEvent({{"type", "message_stop"}}, out);
}

}  // namespace moeserve::server
