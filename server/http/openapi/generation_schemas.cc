#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "engine/sampling_params.h"
#include "server/generation/routing_params.h"
#include "server/http/openapi/schema_builder.h"
#include "server/http/openapi/schema_text.h"
#include "server/http/openapi/schemas.h"

namespace moeserve::server::http {
namespace {

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();

constexpr char kAnswers[] = R"json({
"Usage": {
  "prompt_tokens": "count", "completion_tokens": "count", "total_tokens": "count",
  "prompt_tokens_details?": {"cached_tokens?": "count"}, "experts_per_token?": "number >= 0",
  "activated_parameters_per_token?": "number >= 0", "macs_per_token?": "number >= 0"},
"Warnings": ["[string]", "What the request asked for without effect, and whether time ran out"],
"TokenIds": "[count]",
"FinishReason": "'stop' | 'length' | 'tool_calls' | null",
"StopReason": ["string | integer | null",
  "The stop string or the stop token that ended the choice"],
"PromptLogprobs": [[[{
  "...": {"logprob": "number", "rank": "integer >= 1", "decoded_token": "string"}}, null]], null],
"Layout": {"rows_per_token": "count", "blocks": "[RoutedBlock]"},
"Routing": {
  "layout?": "Layout", "first_position": "count", "tokens": "count", "reused": "[[integer]]",
  "offsets": "[integer]", "experts": "[integer]", "weights": "[number]"},
"TokenSpread": {"tokens": "count", "mean": "number >= 0", "histogram": "[count]"},
"WordExperts": {
  "diversity": {"blocks": "count", "listed": "TokenSpread", "others": "TokenSpread"},
  "words": [{
    "word": "string", "occurrences": "count", "tokens": "count",
    "layers": [{"layer": "count", "block": "BlockName", "counts": "[count]",
      "shares": "[number]"}]}]},
"RoutingControl": {
  "top_k?": "integer >= 1", "top_p?": ["number", {"exclusiveMinimum": 0, "maximum": 1}],
  "masked_experts?": [{"layer": "count", "block?": "BlockName", "experts": "[count]"}],
  "biased_experts?": [{
    "layer": "count", "block?": "BlockName", "expert": "count",
    "bias": ["number >= -1000", {"maximum": 1000}]}]},
"CompletionLogprobs": [{
  "tokens": "[string]", "token_logprobs": "[number | null]",
  "top_logprobs": [[{"...": "number"}, null]], "text_offset": "[count]"}, null],
"CompletionChoice": {
  "index": "count", "text": "string", "logprobs": "CompletionLogprobs",
  "finish_reason": "FinishReason", "stop_reason": "StopReason",
  "prompt_logprobs?": "PromptLogprobs", "prompt_token_ids?": "TokenIds", "token_ids?": "TokenIds",
  "beam_score?": "number", "cumulative_logprob?": "number",
  "routing?": "Routing", "source_routing?": "Routing",
  "routed_experts?": ["string", {"contentEncoding": "base64"}],
  "word_experts?": "WordExperts"},
"Completion": {
  "id": "string", "object": "'text_completion'", "created": "integer", "model": "string",
  "system_fingerprint?": "string", "choices": "[CompletionChoice]", "warnings?": "Warnings",
  "routing_control?": "RoutingControl", "usage": "Usage"},
"TokenLogprob": {
  "token": "string", "logprob": "number", "bytes": [[["count", {"maximum": 255}]], null],
  "top_logprobs?": "[TokenLogprob]"},
"ToolCall": {
  "id": "string", "type": "'function'",
  "function": {"name": "string", "arguments": ["string", "JSON"]}},
"ChatChoice": {
  "index": "count",
  "message": {
    "role": "'assistant'", "content": "string | null", "refusal": "null",
    "reasoning_content?": "string", "tool_calls?": "[ToolCall]"},
  "logprobs": [{"content?": "[TokenLogprob]", "refusal?": "null"}, null],
  "finish_reason": "FinishReason", "stop_reason": "StopReason", "token_ids?": "TokenIds",
  "beam_score?": "number", "cumulative_logprob?": "number",
  "routing?": "Routing", "source_routing?": "Routing",
  "routed_experts?": ["string", {"contentEncoding": "base64"}]},
"ChatCompletion": {
  "id": "string", "object": "'chat.completion'", "created": "integer", "model": "string",
  "system_fingerprint?": "string", "choices": "[ChatChoice]", "warnings?": "Warnings",
  "prompt_token_ids?": "TokenIds", "prompt_logprobs?": "PromptLogprobs",
  "routing_control?": "RoutingControl", "usage": "Usage"},
"ChatMessage": {
  "role": "'system' | 'developer' | 'user' | 'assistant' | 'tool'",
  "content?": ["any", {"anyOf": [
    {"type": ["string", "null"]},
    {"type": "array", "items": {"type": "object", "required": ["type", "text"],
      "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}}]}],
  "...": "any"}
})json";

// The interfaces that are converted to chats: the main members.
constexpr char kConverted[] = R"json({
"ResponseRequest": {
  "model?": "string | null", "input": "string | [object]", "instructions?": "string | null",
  "max_output_tokens?": "integer >= 1 | null", "stream?": "boolean | null",
  "tools?": "[object] | null", "...": "any"},
"ResponseAnswer": {
  "id": "string", "object": "'response'", "warnings?": "Warnings", "created_at": "integer",
  "model": "string", "status": "'in_progress' | 'completed' | 'incomplete' | 'failed'",
  "output": [{"type": "string", "...": "any"}], "usage": "any", "...": "any"},
"MessageRequest": {
  "model?": "string | null", "messages": "[object]", "max_tokens": "integer >= 1",
  "system?": "string | null | [object]", "stop_sequences?": "[string] | null",
  "stream?": "boolean | null", "tools?": "[object] | null", "...": "any"},
"MessageAnswer": {
  "id": "string", "type": "'message'", "warnings?": "Warnings", "role": "'assistant'",
  "model": "string", "content": [{"type": "string", "...": "any"}],
  "stop_reason": "'end_turn' | 'max_tokens' | 'stop_sequence' | 'tool_use' | null",
  "stop_sequence": "string | null", "usage": "any", "...": "any"},
"MessageError": {
  "type?": "'error'", "error": {"type": "string", "message": "string", "...": "any"}, "...": "any"},
"MessageCountRequest": {"model?": "string | null", "messages": "[object]", "...": "any"},
"ResponseCount": {"object": "'response.input_tokens'", "input_tokens": "count"},
"MessageCount": {"input_tokens": "count"}
})json";

// Ollama's API. Objects list all members that answers can have.
constexpr char kOllama[] = R"json({
"OllamaChatRequest": {
  "model?": "string | null", "messages?": "[object] | null", "tools?": "[object] | null",
  "stream?": ["boolean | null", "Default: true"],
  "format?": ["string | object | null", "\"json\", or a JSON schema"],
  "think?": "boolean | string | null", "options?": ["object | null", "How tokens are sampled"],
  "...": "any"},
"OllamaGenerateRequest": {
  "model?": "string | null", "prompt?": "string | null", "system?": "string | null",
  "raw?": ["boolean | null", "Without the chat template"],
  "stream?": ["boolean | null", "Default: true"],
  "format?": ["string | object | null", "\"json\", or a JSON schema"],
  "think?": "boolean | string | null", "options?": ["object | null", "How tokens are sampled"],
  "...": "any"},
"OllamaAnswer": {
  "model": "string", "created_at": "time",
  "message?": {
    "role": "'assistant'", "content": "string", "thinking?": "string",
    "tool_calls?": [{
      "id": "string",
      "function": {"index": "any", "name": "any", "arguments": "any", "...": "any"}}]},
  "response?": "string", "thinking?": "string", "logprobs?": "[TokenLogprob]", "done": "boolean",
  "done_reason?": "'stop' | 'length' | 'load'", "warnings?": "Warnings",
  "total_duration?": ["count", "Nanoseconds, as all"], "load_duration?": "count",
  "prompt_eval_count?": "count", "prompt_eval_duration?": "count", "eval_count?": "count",
  "eval_duration?": "count"},
"OllamaError": {"error": "string"}
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

// The fields that ParseBeamFields() reads.
void AddBeams(RequestSchema& out) {
  out.Optional("use_beam_search",
               TypeSchema("boolean",
                          "Search for the n most probable answers instead of drawing tokens; a "
                          "stream sends them at the end"));
  out.Optional("num_beams", RangeSchema("integer", 1, kMaxBeams,
                                        "How many texts are continued at a time, at least n; "
                                        "default: n, or 4 without n"));
  out.Optional("length_penalty",
               RangeSchema("number", -kMaxLengthPenalty, kMaxLengthPenalty,
                           "Power of the number of tokens by which the log-probability of a text "
                           "is divided; default: 1"));
  OrderedJson early;
  early["enum"] = {false, true, "never"};
  out.Optional("early_stopping",
               Described(std::move(early),
                         "Whether the search ends at once when num_beams texts are finished; "
                         "never: only when no better one is possible"));
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
  AddBeams(out);
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
  OrderedJson beginning;
  beginning["anyOf"] = OrderedJson::array(
      {TypeSchema("string"), ListSchema(RangeSchema("integer", int64_t{0}, kMaxInt))});
  out.Optional("decoder_prompt",
               Described(std::move(beginning),
                         "How the answer begins, with an encoder-decoder, whose prompt is the "
                         "source: a text or token ids"));
  out.Optional("forced_bos_token_id",
               RangeSchema("integer", int64_t{0}, kMaxInt,
                           "The first token that an encoder-decoder generates; default: the "
                           "model's"));
  out.Optional("target_language",
               TypeSchema("string",
                          "The same, as the text of a special token (fra_Latn) or the "
                          "code of a language (fr)"));
  for (const char* name : {"max_completion_tokens", "max_tokens"}) {
    out.Optional(name,
                 RangeSchema("integer", int64_t{0}, kMaxInt, "Default: 16; 0 only with echo"));
  }
  out.Optional("best_of", RangeSchema("integer", 1, limits.max_n,
                                      "Generate so many choices per prompt, and return the n whose "
                                      "tokens are most probable on average"));
  OrderedJson words = ListSchema(TypeSchema("string"));
  words["minItems"] = 1;
  words["maxItems"] = kMaxListedWords;
  out.Optional("return_word_experts",
               Described(std::move(words),
                         "Return which experts computed these words, and the diversity of their "
                         "tokens (--routing-records)"));
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
  out.update(ParseSchemas(kAnswers));
  out.update(ParseSchemas(kConverted));
  out.update(ParseSchemas(kOllama));
}

}  // namespace moeserve::server::http
