#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "engine/sampling_params.h"
#include "server/http/openapi/schema_builder.h"
#include "server/http/openapi/schemas.h"

namespace moeserve::server::http {
namespace {

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();

constexpr char kAnswers[] = R"json({
"Usage": {"type": "object", "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
  "properties": {
    "prompt_tokens": {"type": "integer", "minimum": 0},
    "completion_tokens": {"type": "integer", "minimum": 0},
    "total_tokens": {"type": "integer", "minimum": 0},
    "prompt_tokens_details": {"type": "object", "properties": {
      "cached_tokens": {"type": "integer", "minimum": 0}}},
    "experts_per_token": {"type": "number", "minimum": 0},
    "activated_parameters_per_token": {"type": "number", "minimum": 0}}},
"Warnings": {"type": "array", "items": {"type": "string"},
  "description": "What the request asked for without effect, and whether time ran out"},
"TokenIds": {"type": "array", "items": {"type": "integer", "minimum": 0}},
"FinishReason": {"enum": ["stop", "length", "tool_calls", null]},
"StopReason": {"type": ["string", "integer", "null"],
  "description": "The stop string or the stop token that ended the choice"},
"PromptLogprobs": {"type": ["array", "null"], "items": {"type": ["object", "null"],
  "additionalProperties": {"type": "object", "required": ["logprob", "rank", "decoded_token"],
    "properties": {
      "logprob": {"type": "number"},
      "rank": {"type": "integer", "minimum": 1},
      "decoded_token": {"type": "string"}}}}},
"Layout": {"type": "object", "required": ["rows_per_token", "blocks"], "properties": {
  "rows_per_token": {"type": "integer", "minimum": 0},
  "blocks": {"type": "array", "items": {"$ref": "#/components/schemas/RoutedBlock"}}}},
"Routing": {"type": "object",
  "required": ["first_position", "tokens", "reused", "offsets", "experts", "weights"],
  "properties": {
    "layout": {"$ref": "#/components/schemas/Layout"},
    "first_position": {"type": "integer", "minimum": 0},
    "tokens": {"type": "integer", "minimum": 0},
    "reused": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    "offsets": {"type": "array", "items": {"type": "integer"}},
    "experts": {"type": "array", "items": {"type": "integer"}},
    "weights": {"type": "array", "items": {"type": "number"}}}},
"RoutingControl": {"type": "object", "properties": {
  "top_k": {"type": "integer", "minimum": 1},
  "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
  "masked_experts": {"type": "array", "items": {"type": "object",
    "required": ["layer", "experts"], "properties": {
      "layer": {"type": "integer", "minimum": 0},
      "block": {"$ref": "#/components/schemas/BlockName"},
      "experts": {"type": "array", "items": {"type": "integer", "minimum": 0}}}}},
  "biased_experts": {"type": "array", "items": {"type": "object",
    "required": ["layer", "expert", "bias"], "properties": {
      "layer": {"type": "integer", "minimum": 0},
      "block": {"$ref": "#/components/schemas/BlockName"},
      "expert": {"type": "integer", "minimum": 0},
      "bias": {"type": "number", "minimum": -1000, "maximum": 1000}}}}}},
"CompletionLogprobs": {"type": ["object", "null"],
  "required": ["tokens", "token_logprobs", "top_logprobs", "text_offset"],
  "properties": {
    "tokens": {"type": "array", "items": {"type": "string"}},
    "token_logprobs": {"type": "array", "items": {"type": ["number", "null"]}},
    "top_logprobs": {"type": "array", "items": {"type": ["object", "null"],
      "additionalProperties": {"type": "number"}}},
    "text_offset": {"type": "array", "items": {"type": "integer", "minimum": 0}}}},
"CompletionChoice": {"type": "object",
  "required": ["index", "text", "logprobs", "finish_reason", "stop_reason"],
  "properties": {
    "index": {"type": "integer", "minimum": 0},
    "text": {"type": "string"},
    "logprobs": {"$ref": "#/components/schemas/CompletionLogprobs"},
    "finish_reason": {"$ref": "#/components/schemas/FinishReason"},
    "stop_reason": {"$ref": "#/components/schemas/StopReason"},
    "prompt_logprobs": {"$ref": "#/components/schemas/PromptLogprobs"},
    "prompt_token_ids": {"$ref": "#/components/schemas/TokenIds"},
    "token_ids": {"$ref": "#/components/schemas/TokenIds"},
    "routing": {"$ref": "#/components/schemas/Routing"},
    "routed_experts": {"type": "string", "contentEncoding": "base64"}}},
"Completion": {"type": "object",
  "required": ["id", "object", "created", "model", "choices", "usage"],
  "properties": {
    "id": {"type": "string"},
    "object": {"const": "text_completion"},
    "created": {"type": "integer"},
    "model": {"type": "string"},
    "system_fingerprint": {"type": "string"},
    "choices": {"type": "array", "items": {"$ref": "#/components/schemas/CompletionChoice"}},
    "warnings": {"$ref": "#/components/schemas/Warnings"},
    "routing_control": {"$ref": "#/components/schemas/RoutingControl"},
    "usage": {"$ref": "#/components/schemas/Usage"}}},
"TokenLogprob": {"type": "object", "required": ["token", "logprob", "bytes"], "properties": {
  "token": {"type": "string"},
  "logprob": {"type": "number"},
  "bytes": {"type": ["array", "null"],
    "items": {"type": "integer", "minimum": 0, "maximum": 255}},
  "top_logprobs": {"type": "array", "items": {"$ref": "#/components/schemas/TokenLogprob"}}}},
"ToolCall": {"type": "object", "required": ["id", "type", "function"], "properties": {
  "id": {"type": "string"},
  "type": {"const": "function"},
  "function": {"type": "object", "required": ["name", "arguments"], "properties": {
    "name": {"type": "string"},
    "arguments": {"type": "string", "description": "JSON"}}}}},
"ChatChoice": {"type": "object",
  "required": ["index", "message", "logprobs", "finish_reason", "stop_reason"],
  "properties": {
    "index": {"type": "integer", "minimum": 0},
    "message": {"type": "object", "required": ["role", "content", "refusal"], "properties": {
      "role": {"const": "assistant"},
      "content": {"type": ["string", "null"]},
      "refusal": {"type": "null"},
      "reasoning_content": {"type": "string"},
      "tool_calls": {"type": "array", "items": {"$ref": "#/components/schemas/ToolCall"}}}},
    "logprobs": {"type": ["object", "null"], "properties": {
      "content": {"type": "array", "items": {"$ref": "#/components/schemas/TokenLogprob"}},
      "refusal": {"type": "null"}}},
    "finish_reason": {"$ref": "#/components/schemas/FinishReason"},
    "stop_reason": {"$ref": "#/components/schemas/StopReason"},
    "token_ids": {"$ref": "#/components/schemas/TokenIds"},
    "routing": {"$ref": "#/components/schemas/Routing"},
    "routed_experts": {"type": "string", "contentEncoding": "base64"}}},
"ChatCompletion": {"type": "object",
  "required": ["id", "object", "created", "model", "choices", "usage"],
  "properties": {
    "id": {"type": "string"},
    "object": {"const": "chat.completion"},
    "created": {"type": "integer"},
    "model": {"type": "string"},
    "system_fingerprint": {"type": "string"},
    "choices": {"type": "array", "items": {"$ref": "#/components/schemas/ChatChoice"}},
    "warnings": {"$ref": "#/components/schemas/Warnings"},
    "prompt_token_ids": {"$ref": "#/components/schemas/TokenIds"},
    "prompt_logprobs": {"$ref": "#/components/schemas/PromptLogprobs"},
    "routing_control": {"$ref": "#/components/schemas/RoutingControl"},
    "usage": {"$ref": "#/components/schemas/Usage"}}},
"ChatMessage": {"type": "object", "required": ["role"], "additionalProperties": true,
  "properties": {
    "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
    "content": {"anyOf": [
      {"type": ["string", "null"]},
      {"type": "array", "items": {"type": "object", "required": ["type", "text"],
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}}]}}}
})json";

// The interfaces that are converted to chats: the main members.
constexpr char kConverted[] = R"json({
"ResponseRequest": {"type": "object", "required": ["input"], "additionalProperties": true,
  "properties": {
    "model": {"type": ["string", "null"]},
    "input": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
    "instructions": {"type": ["string", "null"]},
    "max_output_tokens": {"type": ["integer", "null"], "minimum": 1},
    "stream": {"type": ["boolean", "null"]},
    "tools": {"type": ["array", "null"], "items": {"type": "object"}}}},
"ResponseAnswer": {"type": "object", "additionalProperties": true,
  "required": ["id", "object", "created_at", "model", "status", "output", "usage"],
  "properties": {
    "id": {"type": "string"},
    "object": {"const": "response"},
    "warnings": {"$ref": "#/components/schemas/Warnings"},
    "created_at": {"type": "integer"},
    "model": {"type": "string"},
    "status": {"enum": ["in_progress", "completed", "incomplete", "failed"]},
    "output": {"type": "array", "items": {"type": "object", "required": ["type"],
      "additionalProperties": true, "properties": {"type": {"type": "string"}}}}}},
"MessageRequest": {"type": "object", "required": ["messages", "max_tokens"],
  "additionalProperties": true,
  "properties": {
    "model": {"type": ["string", "null"]},
    "messages": {"type": "array", "items": {"type": "object"}},
    "max_tokens": {"type": "integer", "minimum": 1},
    "system": {"anyOf": [{"type": ["string", "null"]},
                         {"type": "array", "items": {"type": "object"}}]},
    "stop_sequences": {"type": ["array", "null"], "items": {"type": "string"}},
    "stream": {"type": ["boolean", "null"]},
    "tools": {"type": ["array", "null"], "items": {"type": "object"}}}},
"MessageAnswer": {"type": "object", "additionalProperties": true,
  "required": ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"],
  "properties": {
    "id": {"type": "string"},
    "type": {"const": "message"},
    "warnings": {"$ref": "#/components/schemas/Warnings"},
    "role": {"const": "assistant"},
    "model": {"type": "string"},
    "content": {"type": "array", "items": {"type": "object", "required": ["type"],
      "additionalProperties": true, "properties": {"type": {"type": "string"}}}},
    "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", null]},
    "stop_sequence": {"type": ["string", "null"]}}},
"MessageError": {"type": "object", "required": ["error"], "additionalProperties": true,
  "properties": {
    "type": {"const": "error"},
    "error": {"type": "object", "required": ["type", "message"], "additionalProperties": true,
      "properties": {"type": {"type": "string"}, "message": {"type": "string"}}}}},
"MessageCountRequest": {"type": "object", "required": ["messages"], "additionalProperties": true,
  "properties": {
    "model": {"type": ["string", "null"]},
    "messages": {"type": "array", "items": {"type": "object"}}}},
"ResponseCount": {"type": "object", "required": ["object", "input_tokens"], "properties": {
  "object": {"const": "response.input_tokens"},
  "input_tokens": {"type": "integer", "minimum": 0}}},
"MessageCount": {"type": "object", "required": ["input_tokens"], "properties": {
  "input_tokens": {"type": "integer", "minimum": 0}}}
})json";

// Ollama's API. Objects list all members that answers can have.
constexpr char kOllama[] = R"json({
"OllamaChatRequest": {"type": "object", "additionalProperties": true, "properties": {
  "model": {"type": ["string", "null"]},
  "messages": {"type": ["array", "null"], "items": {"type": "object"}},
  "tools": {"type": ["array", "null"], "items": {"type": "object"}},
  "stream": {"type": ["boolean", "null"], "description": "Default: true"},
  "format": {"type": ["string", "object", "null"], "description": "\"json\", or a JSON schema"},
  "think": {"type": ["boolean", "string", "null"]},
  "options": {"type": ["object", "null"], "description": "How tokens are sampled"}}},
"OllamaGenerateRequest": {"type": "object", "additionalProperties": true, "properties": {
  "model": {"type": ["string", "null"]},
  "prompt": {"type": ["string", "null"]},
  "system": {"type": ["string", "null"]},
  "raw": {"type": ["boolean", "null"], "description": "Without the chat template"},
  "stream": {"type": ["boolean", "null"], "description": "Default: true"},
  "format": {"type": ["string", "object", "null"], "description": "\"json\", or a JSON schema"},
  "think": {"type": ["boolean", "string", "null"]},
  "options": {"type": ["object", "null"], "description": "How tokens are sampled"}}},
"OllamaAnswer": {"type": "object", "required": ["model", "created_at", "done"], "properties": {
  "model": {"type": "string"},
  "created_at": {"type": "string", "format": "date-time"},
  "message": {"type": "object", "required": ["role", "content"], "properties": {
    "role": {"const": "assistant"},
    "content": {"type": "string"},
    "thinking": {"type": "string"},
    "tool_calls": {"type": "array", "items": {"type": "object", "required": ["id", "function"],
      "properties": {
        "id": {"type": "string"},
        "function": {"type": "object", "required": ["index", "name", "arguments"],
          "additionalProperties": true}}}}}},
  "response": {"type": "string"},
  "thinking": {"type": "string"},
  "logprobs": {"type": "array", "items": {"$ref": "#/components/schemas/TokenLogprob"}},
  "done": {"type": "boolean"},
  "done_reason": {"enum": ["stop", "length", "load"]},
  "warnings": {"$ref": "#/components/schemas/Warnings"},
  "total_duration": {"type": "integer", "minimum": 0, "description": "Nanoseconds, as all"},
  "load_duration": {"type": "integer", "minimum": 0},
  "prompt_eval_count": {"type": "integer", "minimum": 0},
  "prompt_eval_duration": {"type": "integer", "minimum": 0},
  "eval_count": {"type": "integer", "minimum": 0},
  "eval_duration": {"type": "integer", "minimum": 0}}},
"OllamaError": {"type": "object", "required": ["error"], "properties": {
  "error": {"type": "string"}}}
})json";

OrderedJson SamplingSchema(const SamplingField& field) {
  const char* const type = field.is_integer() ? "integer" : "number";
  OrderedJson out = {{"type", type}};
  const auto bound = [&](double value) {
    return field.is_integer() ? OrderedJson(static_cast<int64_t>(value)) : OrderedJson(value);
  };
  out[field.min_excluded ? "exclusiveMinimum" : "minimum"] = bound(field.min);
  out["maximum"] = bound(field.max);
  return Described(std::move(out), field.meaning);
}

// The fields that ParseSamplingFields() reads.
void AddSampling(const RequestLimits& limits, RequestSchema& out) {
  for (const SamplingField& field : kDrawFields) out.Optional(field.name, SamplingSchema(field));
  for (const SamplingField& field : kPenaltyFields) out.Optional(field.name, SamplingSchema(field));
  for (const SamplingFlag& flag : kSamplingFlags) {
    out.Optional(flag.name, TypeSchema("boolean", flag.meaning));
  }
  out.Optional("seed", TypeSchema("integer", "Equal seeds give equal answers"));
  OrderedJson stops = ListSchema(TypeSchema("string"));
  stops["maxItems"] = limits.max_stop;
  OrderedJson stop;
  stop["anyOf"] = OrderedJson::array({TypeSchema("string"), std::move(stops)});
  out.Optional("stop", Described(std::move(stop), "Texts that end the answer"));
  OrderedJson ids = ListSchema(TypeSchema("integer"), "Tokens that end the answer");
  ids["maxItems"] = limits.max_stop_token_ids;
  out.Optional("stop_token_ids", std::move(ids));
  OrderedJson bias = TypeSchema("object", "Token ids and what is added to their logits");
  bias["additionalProperties"] = RangeSchema("number", -kMaxLogitBias, kMaxLogitBias);
  bias["maxProperties"] = limits.max_logit_bias;
  out.Optional("logit_bias", std::move(bias));
  OrderedJson words = ListSchema(TypeSchema("string"), "Texts that are not generated");
  words["maxItems"] = limits.max_bad_words;
  out.Optional("bad_words", std::move(words));
  out.Optional("allowed_token_ids", ListSchema(TypeSchema("integer"), "No others are generated"));
}

// The constraints of structured output.
void AddConstraints(RequestSchema& out) {
  OrderedJson format = TypeSchema("object", "The form of the answer");
  format["required"] = {"type"};
  format["properties"]["type"]["enum"] = {"text", "json_object", "json_schema", "structural_tag"};
  format["properties"]["json_schema"] = TypeSchema("object");
  out.Optional("response_format", std::move(format));
  out.Optional("structured_outputs",
               TypeSchema("object",
                          "One of json, json_object, regex, choice, grammar and "
                          "structural_tag"));
  OrderedJson schema;
  schema["anyOf"] =
      OrderedJson::array({TypeSchema("object"), TypeSchema("string"), TypeSchema("boolean")});
  out.Optional("guided_json", Described(std::move(schema), "A JSON schema"));
  out.Optional("guided_regex", TypeSchema("string", "A regular expression"));
  out.Optional("guided_choice", ListSchema(TypeSchema("string"), "The possible answers"));
  out.Optional("guided_grammar", TypeSchema("string", "A grammar"));
}

// The fields that ParseSharedFields() reads.
void AddShared(const ServerSettings& settings, RequestSchema& out) {
  const RequestLimits& limits = settings.limits;
  out.Optional("model", TypeSchema("string", "Default: the first model that the key may use"));
  out.Optional("n", RangeSchema("integer", 1, limits.max_n, "Choices per prompt"));
  out.Optional("stream", TypeSchema("boolean", "Send the answer in pieces, as events"));
  OrderedJson options = TypeSchema("object", "Needs stream");
  for (const char* name : {"include_usage", "continuous_usage_stats"}) {
    options["properties"][name] = OrNull(TypeSchema("boolean"));
  }
  out.Optional("stream_options", std::move(options));
  AddSampling(limits, out);
  AddConstraints(out);
  out.Optional("truncate_prompt_tokens",
               RangeSchema("integer", int64_t{-1}, kMaxInt,
                           "Keep the last tokens of the prompt; -1: as many as fit"));
  out.Optional("return_token_ids", TypeSchema("boolean", "Also return the ids of the tokens"));
  out.Optional("return_tokens_as_token_ids",
               TypeSchema("boolean", "Name tokens token_id:7 in log-probabilities"));
  OrderedJson id = TypeSchema("string", "The part of the answer's id after its prefix");
  id["pattern"] = "^[A-Za-z0-9._-]{1,128}$";
  out.Optional("request_id", std::move(id));
  out.Optional("cache_salt",
               Described({{"type", "string"}, {"minLength", 1}, {"maxLength", 128}},
                         "Shares cached prefixes only with requests that have the same"));
  out.Optional("priority", Described({{"type", "integer"}, {"minimum", settings.min_priority}},
                                     "Requests with lower values are served first"));
  out.Optional("return_routing", TypeSchema("boolean",
                                            "Return which experts computed the tokens "
                                            "(--routing-records)"));
  out.Optional("return_routed_experts",
               TypeSchema("boolean", "The same as a table (--routing-records)"));
  out.Optional("routing_control", RefSchema("RoutingControl"));
  OrderedJson prediction = TypeSchema("object", "A text that the answer will resemble");
  prediction["required"] = {"type", "content"};
  prediction["properties"]["type"]["const"] = "content";
  prediction["properties"]["content"]["anyOf"] =
      OrderedJson::array({TypeSchema("string"), ListSchema(TypeSchema("object"))});
  out.Optional("prediction", std::move(prediction));
  out.Optional("verbosity", TypeSchema("string", "Has no effect: the answer has a warning"));
  constexpr std::string_view kNoEffect = "Has no effect";
  for (const char* name : {"user", "service_tier", "safety_identifier", "prompt_cache_key",
                           "prompt_cache_retention"}) {
    out.Optional(name, TypeSchema("string", kNoEffect));
  }
  out.Optional("metadata", TypeSchema("object", kNoEffect));
  out.Optional("store", TypeSchema("boolean", kNoEffect));
  out.Optional("parallel_tool_calls", TypeSchema("boolean"));
}

OrderedJson CompletionRequest(const ServerSettings& settings) {
  const RequestLimits& limits = settings.limits;
  OrderedJson ids = ListSchema(RangeSchema("integer", int64_t{0}, kMaxInt));
  ids["minItems"] = 1;
  OrderedJson texts = ListSchema(TypeSchema("string"));
  texts["minItems"] = 1;
  texts["maxItems"] = limits.max_prompts;
  OrderedJson lists = ListSchema(ids);
  lists["minItems"] = 1;
  lists["maxItems"] = limits.max_prompts;
  OrderedJson prompt;
  prompt["anyOf"] = OrderedJson::array(
      {TypeSchema("string"), std::move(texts), std::move(ids), std::move(lists)});
  RequestSchema out;
  out.Required("prompt",
               Described(std::move(prompt), "A text, texts, token ids, or lists of token ids"));
  for (const char* name : {"max_completion_tokens", "max_tokens"}) {
    out.Optional(name,
                 RangeSchema("integer", int64_t{0}, kMaxInt, "Default: 16; 0 only with echo"));
  }
  out.Optional("best_of", RangeSchema("integer", 1, limits.max_n,
                                      "Generate so many choices per prompt, and return the n whose "
                                      "tokens are most probable on average"));
  out.Optional("echo", TypeSchema("boolean", "Start the text with the prompt"));
  out.Optional("logprobs", RangeSchema("integer", 0, limits.max_logprobs,
                                       "Alternatives per token of the answer"));
  out.Optional("prompt_logprobs", RangeSchema("integer", 0, limits.max_logprobs,
                                              "Alternatives per token of the prompt"));
  out.Optional("add_special_tokens",
               TypeSchema("boolean", "Whether texts get special tokens, such as BOS"));
  AddShared(settings, out);
  return out.Take();
}

OrderedJson ChatRequest(const ServerSettings& settings) {
  const RequestLimits& limits = settings.limits;
  OrderedJson messages = ListSchema(RefSchema("ChatMessage"));
  messages["minItems"] = 1;
  messages["maxItems"] = limits.max_messages;
  RequestSchema out;
  out.Required("messages", std::move(messages));
  for (const char* name : {"max_completion_tokens", "max_tokens"}) {
    out.Optional(name, RangeSchema("integer", int64_t{1}, kMaxInt,
                                   "Default: the room that the context has"));
  }
  out.Optional("logprobs", TypeSchema("boolean"));
  out.Optional("top_logprobs", RangeSchema("integer", 0, limits.max_logprobs, "Needs logprobs"));
  out.Optional("prompt_logprobs", RangeSchema("integer", 0, limits.max_logprobs));
  out.Optional("tools", ListSchema(TypeSchema("object"), "Functions that the model may call"));
  OrderedJson choice;
  choice["anyOf"] = OrderedJson::array({TypeSchema("string"), TypeSchema("object")});
  out.Optional("tool_choice", std::move(choice));
  OrderedJson effort = TypeSchema("string", "How much the model is to reason");
  out.Optional("reasoning_effort", std::move(effort));
  out.Optional("include_reasoning", TypeSchema("boolean"));
  out.Optional("add_generation_prompt", TypeSchema("boolean"));
  out.Optional("continue_final_message", TypeSchema("boolean"));
  out.Optional("add_special_tokens", TypeSchema("boolean"));
  out.Optional("chat_template", TypeSchema("string", "Needs --allow-request-chat-template"));
  out.Optional("chat_template_kwargs", TypeSchema("object", "Variables of the chat template"));
  AddShared(settings, out);
  return out.Take();
}

}  // namespace

void AddGenerationSchemas(const ServerSettings& settings, OrderedJson& out) {
  out["CompletionRequest"] = CompletionRequest(settings);
  out["ChatRequest"] = ChatRequest(settings);
  out.update(OrderedJson::parse(kAnswers));
  out.update(OrderedJson::parse(kConverted));
  out.update(OrderedJson::parse(kOllama));
}

}  // namespace moeserve::server::http
