#include "server/responses/response_writer.h"

#include <algorithm>
#include <utility>

#include "base/error_text.h"
#include "server/base/json_fields.h"
#include "server/fields/routing_fields.h"
#include "server/responses/response_request.h"

namespace moeserve::server {

namespace {

// Returns the error with the names of this API's fields.
HttpError Named(const HttpError& error) {
  HttpError named = error;
  named.param = ResponseParam(error.param);
  return named;
}

OrderedJson ContentPart(std::string_view text, OrderedJson logprobs) {
  return {{"type", "output_text"},
          {"text", text},
          {"annotations", OrderedJson::array()},
          {"logprobs", std::move(logprobs)}};
}

// Returns the input of a custom tool from the arguments of the function that stands for it; empty
// if the arguments were cut.
std::string CustomInput(const std::string& arguments) {
  const OrderedJson parsed = ParseOrdered(arguments);
  if (!parsed.is_object()) return "";
  const OrderedJson input = parsed.value(kCustomInput, OrderedJson());
  return input.is_string() ? input.get<std::string>() : "";
}

OrderedJson UsageOf(const Usage& sums, int reasoning_tokens) {
  const OrderedJson chat = UsageJson(sums);
  OrderedJson usage = {{"input_tokens", chat["prompt_tokens"]},
                       {"input_tokens_details", chat["prompt_tokens_details"]},
                       {"output_tokens", chat["completion_tokens"]},
                       {"output_tokens_details", {{"reasoning_tokens", reasoning_tokens}}},
                       {"total_tokens", chat["total_tokens"]}};
  for (const char* name :
       {"experts_per_token", "activated_parameters_per_token", "macs_per_token"}) {
    if (chat.contains(name)) usage[name] = chat[name];
  }
  return usage;
}

}  // namespace

ResponseWriter::ResponseWriter(AnswerIdentity identity, const AnswerOptions& options,
                               const ChatAnswerRules& rules, OrderedJson echo,
                               std::vector<std::string> custom_tools, const Tokenizer* tokenizer,
                               bool stream)
    : BlockWriter(std::move(identity), options, rules, tokenizer, stream),
      echo_(std::move(echo)),
      custom_tools_(std::move(custom_tools)) {}

bool ResponseWriter::IsCustom(const Block& block) const {
  return block.kind == Block::Kind::kCall && std::find(custom_tools_.begin(), custom_tools_.end(),
                                                       block.call_name) != custom_tools_.end();
}

std::string ResponseWriter::ItemId(const Block& block) const {
  const std::string_view prefix = block.kind == Block::Kind::kReasoning ? "rs_"
                                  : block.kind == Block::Kind::kText    ? "msg_"
                                  : IsCustom(block)                     ? "ctc_"
                                                                        : "fc_";
  return Concat(prefix, identity_.unique_id, "_", block.index);
}

OrderedJson ResponseWriter::Item(const Block& block, bool complete) const {
  const char* const status = complete ? "completed" : "in_progress";
  OrderedJson item = {{"id", ItemId(block)}};
  switch (block.kind) {
    case Block::Kind::kReasoning:
      item["type"] = "reasoning";
      item["summary"] = OrderedJson::array();
      item["content"] = OrderedJson::array();
      if (complete) {
        item["content"].push_back({{"type", "reasoning_text"}, {"text", block.text}});
      }
      break;
    case Block::Kind::kText:
      item["type"] = "message";
      item["status"] = status;
      item["role"] = "assistant";
      item["content"] = OrderedJson::array();
      if (complete) item["content"].push_back(ContentPart(block.text, block.logprobs));
      break;
    case Block::Kind::kCall: {
      const bool custom = IsCustom(block);
      item["type"] = custom ? "custom_tool_call" : "function_call";
      item["status"] = status;
      item["call_id"] = block.call_id;
      item["name"] = block.call_name;
      item[custom ? "input" : "arguments"] = !complete ? std::string()
                                             : custom  ? CustomInput(block.text)
                                                       : block.text;
      break;
    }
  }
  return item;
}

OrderedJson ResponseWriter::Response(const Usage* sums) const {
  const bool cut = end().finish_reason == FinishReason::kLength;
  OrderedJson response;
  response["id"] = identity_.id;
  response["object"] = "response";
  response["created_at"] = identity_.created;
  response["status"] = sums == nullptr ? "in_progress" : cut ? "incomplete" : "completed";
  response["background"] = false;
  response["error"] = nullptr;
  response["incomplete_details"] = nullptr;
  if (sums != nullptr && cut) response["incomplete_details"] = {{"reason", "max_output_tokens"}};
  response["model"] = identity_.model;
  response["output"] = OrderedJson::array();
  if (sums != nullptr) {
    for (const Block& block : blocks()) response["output"].push_back(Item(block, true));
    // The call or text that was being written when the limit was reached.
    if (cut && !response["output"].empty() && response["output"].back().contains("status")) {
      response["output"].back()["status"] = "incomplete";
    }
  }
  response.update(echo_);
  response["previous_response_id"] = nullptr;
  response["store"] = false;
  if (const auto& control = options_.routing.control) {
    response["routing_control"] = RoutingControlJson(control->change());
  }
  PutWarnings(options_.warnings, sums != nullptr && timed_out(), response);
  response["usage"] = sums == nullptr ? OrderedJson(nullptr) : UsageOf(*sums, reasoning_tokens());
  return response;
}

OrderedJson ResponseWriter::TakeAnswer(const Usage& sums) { return Response(&sums); }

std::string ResponseWriter::ErrorBody(const HttpError& error) const {
  return ErrorJson(Named(error));
}

void ResponseWriter::AppendError(const HttpError& error, std::string& out) {
  const HttpError named = Named(error);
  WriteEvent({{"type", "error"},
              {"code", named.code.empty() ? OrderedJson(nullptr) : OrderedJson(named.code)},
              {"message", named.message},
              {"param", named.param.empty() ? OrderedJson(nullptr) : OrderedJson(named.param)}},
             out);
}

void ResponseWriter::WriteEvent(OrderedJson event, std::string& out) {
  event["sequence_number"] = events_written_++;
  out += Concat("event: ", event["type"].get<std::string>(), "\n", SseEvent(event));
}

void ResponseWriter::WriteBegin(int /*prompt_tokens*/, std::string& out) {
  WriteEvent({{"type", "response.created"}, {"response", Response(nullptr)}}, out);
  WriteEvent({{"type", "response.in_progress"}, {"response", Response(nullptr)}}, out);
}

void ResponseWriter::WriteOpen(const Block& block, std::string& out) {
  WriteEvent({{"type", "response.output_item.added"},
              {"output_index", block.index},
              {"item", Item(block, false)}},
             out);
  if (block.kind == Block::Kind::kText) {
    WriteEvent({{"type", "response.content_part.added"},
                {"item_id", ItemId(block)},
                {"output_index", block.index},
                {"content_index", 0},
                {"part", ContentPart("", OrderedJson::array())}},
               out);
  }
}

void ResponseWriter::WriteDelta(const Block& block, std::string_view piece, OrderedJson logprobs,
                                std::string& out) {
  if (IsCustom(block)) return;  // the input is known when the arguments are complete
  OrderedJson event = {{"type", ""}, {"item_id", ItemId(block)}, {"output_index", block.index}};
  switch (block.kind) {
    case Block::Kind::kReasoning:
      event["type"] = "response.reasoning_text.delta";
      event["content_index"] = 0;
      break;
    case Block::Kind::kText:
      event["type"] = "response.output_text.delta";
      event["content_index"] = 0;
      event["logprobs"] = std::move(logprobs);
      break;
    case Block::Kind::kCall:
      event["type"] = "response.function_call_arguments.delta";
      break;
  }
  event["delta"] = piece;
  WriteEvent(std::move(event), out);
}

void ResponseWriter::WriteClose(const Block& block, std::string& out) {
  const OrderedJson place = {{"item_id", ItemId(block)}, {"output_index", block.index}};
  OrderedJson event = {{"type", ""}};
  event.update(place);
  switch (block.kind) {
    case Block::Kind::kReasoning:
      event["type"] = "response.reasoning_text.done";
      event["content_index"] = 0;
      event["text"] = block.text;
      WriteEvent(std::move(event), out);
      break;
    case Block::Kind::kText: {
      event["type"] = "response.output_text.done";
      event["content_index"] = 0;
      event["text"] = block.text;
      event["logprobs"] = block.logprobs;
      WriteEvent(std::move(event), out);
      OrderedJson part = {{"type", "response.content_part.done"}};
      part.update(place);
      part["content_index"] = 0;
      part["part"] = ContentPart(block.text, block.logprobs);
      WriteEvent(std::move(part), out);
      break;
    }
    case Block::Kind::kCall:
      if (IsCustom(block)) {
        const std::string input = CustomInput(block.text);
        event["type"] = "response.custom_tool_call_input.delta";
        event["delta"] = input;
        if (!input.empty()) WriteEvent(event, out);
        event["type"] = "response.custom_tool_call_input.done";
        event.erase("delta");
        event["input"] = input;
        WriteEvent(std::move(event), out);
        break;
      }
      event["type"] = "response.function_call_arguments.done";
      event["name"] = block.call_name;
      event["arguments"] = block.text;
      WriteEvent(std::move(event), out);
      break;
  }
  WriteEvent({{"type", "response.output_item.done"},
              {"output_index", block.index},
              {"item", Item(block, true)}},
             out);
}

void ResponseWriter::WriteEnd(const Usage& sums, std::string& out) {
  const bool cut = end().finish_reason == FinishReason::kLength;
  WriteEvent(
      {{"type", cut ? "response.incomplete" : "response.completed"}, {"response", Response(&sums)}},
      out);
}

}  // namespace moeserve::server
