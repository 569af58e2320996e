#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "engine/statistics/statistic_list.h"
#include "server/http/openapi/schema_builder.h"
#include "server/http/openapi/schemas.h"

namespace moeserve::server::http {
namespace {

// In these texts, every object lists all members that answers can have.
constexpr char kServer[] = R"json({
"Error": {"type": "object", "required": ["error"], "properties": {
  "error": {"type": "object", "required": ["message", "type", "param", "code"], "properties": {
    "message": {"type": "string"},
    "type": {"type": "string"},
    "param": {"type": ["string", "null"], "description": "The field of the request"},
    "code": {"type": ["string", "null"]}}}}},
"InferenceError": {"type": "object", "required": ["error"], "properties": {
  "error": {"type": "string"}}},
"Empty": {"type": "object", "properties": {}, "maxProperties": 0},
"OpenApi": {"type": "object", "required": ["openapi", "info", "paths"]},
"Ping": {"type": "object", "required": ["status"], "properties": {"status": {"const": "ok"}}},
"Ready": {"type": "object", "required": ["status", "ready"], "properties": {
  "status": {"const": "ok"}, "ready": {"const": true}}},
"Live": {"type": "object", "required": ["status", "live"], "properties": {
  "status": {"const": "ok"}, "live": {"const": true}}},
"Version": {"type": "object", "required": ["version", "commit", "backend"], "properties": {
  "version": {"type": "string"},
  "commit": {"type": ["string", "null"]},
  "backend": {"type": "string"}}},
"MetricsHistory": {"type": "object", "required": ["interval_seconds", "bounds", "readings"],
  "properties": {
    "interval_seconds": {"type": "number"},
    "bounds": {"type": "object", "description": "The upper bounds of each histogram's buckets",
               "additionalProperties": {"type": "array", "items": {"type": "number"}}},
    "readings": {"type": "array", "description": "The oldest first, of the model or summed over all",
      "items": {"$ref": "#/components/schemas/MetricsReading"}}}},
"MetricsReading": {"type": "object", "required": ["age_seconds"], "properties": {
  "age_seconds": {"type": "number", "minimum": 0},
  "requests_running": {"type": "integer"},
  "requests_waiting": {"type": "integer"},
  "kv_cache_usage_ratio": {"type": "number"},
  "requests_finished_total": {"type": "integer"},
  "generation_tokens_total": {"type": "integer"},
  "prompt_tokens_total": {"type": "integer"},
  "time_to_first_token_seconds": {"$ref": "#/components/schemas/BucketCounts"},
  "inter_token_latency_seconds": {"$ref": "#/components/schemas/BucketCounts"},
  "request_duration_seconds": {"$ref": "#/components/schemas/BucketCounts"}}},
"BucketCounts": {"type": "array", "items": {"type": "integer"},
  "description": "Observations in each bucket, not cumulative; the last has no upper bound"},
"ServerInfo": {"type": "object",
  "required": ["name", "version", "commit", "device", "state", "uptime_seconds", "models",
               "limits", "settings"],
  "properties": {
    "name": {"const": "moeserve"},
    "version": {"type": "string"},
    "commit": {"type": ["string", "null"]},
    "device": {"type": "string"},
    "state": {"enum": ["loading", "serving", "draining"]},
    "uptime_seconds": {"type": "number", "minimum": 0},
    "models": {"type": "array", "items": {"$ref": "#/components/schemas/ServedModel"}},
    "limits": {"type": "object", "description": "Limits of one request",
               "additionalProperties": {"type": "number"}},
    "settings": {"type": "object",
      "description": "Settings on which it depends how requests are answered",
      "additionalProperties": {"type": ["boolean", "integer", "string", "array"]}}}},
"ServedModel": {"type": "object",
  "required": ["id", "aliases", "state", "version", "memory_bytes"],
  "properties": {
    "id": {"type": "string"},
    "aliases": {"type": "array", "items": {"type": "string"}},
    "state": {"enum": ["unloaded", "loading", "ready"]},
    "version": {"type": "integer", "minimum": 0},
    "memory_bytes": {"type": "integer", "minimum": 0},
    "max_model_len": {"type": "integer", "minimum": 1},
    "vocab_size": {"type": "integer", "minimum": 1},
    "tokenizer": {"type": "boolean"},
    "chat_template": {"type": "boolean", "description": "Whether chats are possible"},
    "routing_control": {"type": "boolean"},
    "default_sampling": {"type": "object", "additionalProperties": {"type": "number"},
      "description": "Defaults of the checkpoint, which replace those of the interface"}}},
"ModelList": {"type": "object", "required": ["object", "data"], "properties": {
  "object": {"const": "list"},
  "first_id": {"type": ["string", "null"]},
  "last_id": {"type": ["string", "null"]},
  "has_more": {"const": false},
  "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}}}},
"Model": {"type": "object", "required": ["id", "object", "created", "owned_by"], "properties": {
  "id": {"type": "string"},
  "object": {"const": "model"},
  "type": {"const": "model"},
  "display_name": {"type": "string"},
  "created": {"type": "integer"},
  "created_at": {"type": "string", "format": "date-time"},
  "lifecycle": {"const": "active"},
  "owned_by": {"type": "string"},
  "root": {"type": "string"},
  "parent": {"type": "null"},
  "max_model_len": {"type": ["integer", "null"]},
  "max_input_tokens": {"type": ["integer", "null"]},
  "max_tokens": {"type": ["integer", "null"]},
  "version": {"type": ["integer", "null"]}}},
"OllamaDetails": {"type": "object", "additionalProperties": true,
  "required": ["format", "family"], "properties": {
    "format": {"type": "string"}, "family": {"enum": ["moe", "dense"]}}},
"OllamaModels": {"type": "object", "required": ["models"], "properties": {
  "models": {"type": "array", "items": {"type": "object",
    "required": ["name", "model", "size", "digest", "details"], "properties": {
      "name": {"type": "string"},
      "model": {"type": "string"},
      "size": {"type": "integer", "minimum": 0},
      "digest": {"type": "string", "description": "Differs for different served versions"},
      "details": {"$ref": "#/components/schemas/OllamaDetails"},
      "modified_at": {"type": "string", "format": "date-time"},
      "expires_at": {"type": "string", "format": "date-time"},
      "size_vram": {"type": "integer", "minimum": 0},
      "context_length": {"type": "integer", "minimum": 1}}}}}},
"OllamaShowRequest": {"type": "object", "additionalProperties": true, "properties": {
  "model": {"type": "string"}}},
"OllamaModel": {"type": "object", "required": ["details", "model_info", "capabilities"],
  "properties": {
    "modelfile": {"type": "string"},
    "parameters": {"type": "string"},
    "template": {"type": "string"},
    "details": {"$ref": "#/components/schemas/OllamaDetails"},
    "model_info": {"type": "object", "additionalProperties": true},
    "capabilities": {"type": "array", "items": {"enum": ["completion", "tools", "thinking"]}},
    "modified_at": {"type": "string", "format": "date-time"}}},
"OllamaVersion": {"type": "object", "required": ["version"], "properties": {
  "version": {"type": "string"}}},
"LoadRequest": {"type": "object", "required": ["model"], "additionalProperties": false,
  "properties": {
    "model": {"type": "string"},
    "path": {"type": ["string", "null"], "description": "Relative to --models-folder"}}},
"UnloadRequest": {"type": "object", "required": ["model"], "additionalProperties": false,
  "properties": {"model": {"type": "string"}}},
"ModelStatus": {"type": "object",
  "required": ["id", "object", "aliases", "state", "version", "memory_bytes"],
  "properties": {
    "id": {"type": "string"},
    "object": {"const": "model"},
    "aliases": {"type": "array", "items": {"type": "string"}},
    "state": {"enum": ["unloaded", "loading", "ready"]},
    "version": {"type": "integer", "minimum": 0},
    "memory_bytes": {"type": "integer", "minimum": 0}}}
})json";

constexpr char kTokens[] = R"json({
"TokenizeRequest": {"type": "object", "description": "With either prompt or messages",
  "properties": {
    "model": {"type": ["string", "null"]},
    "prompt": {"type": ["string", "null"]},
    "messages": {"type": ["array", "null"], "items": {"$ref": "#/components/schemas/ChatMessage"}},
    "add_special_tokens": {"type": ["boolean", "null"]},
    "add_generation_prompt": {"type": ["boolean", "null"]},
    "continue_final_message": {"type": ["boolean", "null"]},
    "reasoning_effort": {"type": ["string", "null"]},
    "chat_template": {"type": ["string", "null"]},
    "chat_template_kwargs": {"type": ["object", "null"]},
    "return_token_strs": {"type": ["boolean", "null"]},
    "tools": {"type": ["array", "null"], "items": {"type": "object"}}}},
"Tokens": {"type": "object", "required": ["count", "max_model_len", "tokens", "token_strs"],
  "properties": {
    "count": {"type": "integer", "minimum": 0},
    "max_model_len": {"type": "integer"},
    "tokens": {"type": "array", "items": {"type": "integer"}},
    "token_strs": {"type": ["array", "null"], "items": {"type": "string"}}}},
"DetokenizeRequest": {"type": "object", "required": ["tokens"], "properties": {
  "model": {"type": ["string", "null"]},
  "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}},
  "skip_special_tokens": {"type": ["boolean", "null"]}}},
"DetokenizedText": {"type": "object", "required": ["prompt"], "properties": {
  "prompt": {"type": "string"}}},
"TokenizerInfo": {"type": "object",
  "required": ["tokenizer_class", "vocab_size", "bos_token", "eos_token", "pad_token",
               "chat_template"],
  "properties": {
    "model": {"type": "string"},
    "tokenizer_class": {"type": "string"},
    "vocab_size": {"type": "integer", "minimum": 1},
    "model_max_length": {"type": "integer", "minimum": 1},
    "bos_token": {"type": ["string", "null"]},
    "eos_token": {"type": ["string", "null"]},
    "pad_token": {"type": ["string", "null"]},
    "unk_token": {"type": ["string", "null"]},
    "eos_token_ids": {"type": "array", "items": {"type": "integer"}},
    "add_bos_token": {"type": ["boolean", "null"]},
    "add_eos_token": {"type": ["boolean", "null"]},
    "special_tokens": {"type": "array", "items": {"type": "object", "required": ["id", "token"],
      "properties": {"id": {"type": "integer"}, "token": {"type": "string"}}}},
    "chat_template": {"type": ["string", "null"]}}}
})json";

constexpr char kExperts[] = R"json({
"BlockName": {"enum": ["attention", "feed_forward"]},
"ExpertLayout": {"type": "object", "required": ["model", "rows_per_token", "blocks"],
  "properties": {
    "model": {"type": "string"},
    "rows_per_token": {"type": "integer", "minimum": 0},
    "blocks": {"type": "array", "items": {"$ref": "#/components/schemas/RoutedBlock"}}}},
"RoutedBlock": {"type": "object",
  "required": ["layer", "block", "experts", "sub_tokens", "first_row"],
  "properties": {
    "layer": {"type": "integer", "minimum": 0},
    "block": {"$ref": "#/components/schemas/BlockName"},
    "experts": {"type": "integer", "minimum": 1},
    "sub_tokens": {"type": "integer", "minimum": 1},
    "first_row": {"type": "integer", "minimum": 0}}},
"ExpertTokens": {"type": "object", "required": ["layer", "block", "min_count", "experts"],
  "properties": {
    "layer": {"type": "integer"},
    "block": {"$ref": "#/components/schemas/BlockName"},
    "min_count": {"type": "integer"},
    "vocabulary": {"type": "integer"},
    "counted_tokens": {"type": "integer", "description":
      "Tokens with counts of their own; fewer than the vocabulary if the table is limited"},
    "token_stats_mib_of_all": {"type": "integer", "description":
      "The value of --token-stats-mib with which all tokens are counted"},
    "experts": {"type": "array", "items": {"type": "object", "required": ["expert", "tokens"],
      "properties": {
        "expert": {"type": "integer"},
        "tokens": {"type": "array", "items": {"type": "object",
          "required": ["id", "text", "count", "pmi", "log_pmi", "g2", "share"],
          "properties": {
            "id": {"type": "integer"},
            "text": {"type": ["string", "null"]},
            "count": {"type": "integer"},
            "pmi": {"type": ["number", "null"]},
            "log_pmi": {"type": ["number", "null"]},
            "g2": {"type": "number",
                   "description": "Log-likelihood ratio; negative below the expected count"},
            "share": {"type": "number"}}}}}}}}},
"Matrix": {"type": "array", "items": {"type": "array", "items": {"type": ["number", "null"]}}},
"ExpertSimilarity": {"type": "object", "required": ["layer", "block", "wasserstein", "kl"],
  "properties": {
    "layer": {"type": "integer"},
    "block": {"$ref": "#/components/schemas/BlockName"},
    "wasserstein": {"type": "object", "required": ["metric", "matrix"], "properties": {
      "metric": {"type": "string"},
      "matrix": {"$ref": "#/components/schemas/Matrix"}}},
    "kl": {"type": "object", "required": ["eps", "matrix"], "properties": {
      "eps": {"type": "number"},
      "matrix": {"$ref": "#/components/schemas/Matrix"}}}}},
"ExpertCollapse": {"type": "object", "required": ["model", "layers"], "properties": {
  "model": {"type": "string"},
  "layers": {"type": "array", "items": {"type": "object",
    "required": ["layer", "block", "value", "rows", "seen"],
    "properties": {
      "layer": {"type": "integer"},
      "block": {"$ref": "#/components/schemas/BlockName"},
      "value": {"type": ["number", "null"]},
      "classes": {"type": "integer"},
      "rank": {"type": "integer"},
      "reason": {"type": "string"},
      "rows": {"type": "integer"},
      "seen": {"type": "integer"}}}}}}
})json";

constexpr char kInference[] = R"json({
"InferenceServer": {"type": "object", "required": ["name", "version", "extensions"],
  "properties": {
    "name": {"type": "string"},
    "version": {"type": "string"},
    "extensions": {"type": "array", "items": {"type": "string"}}}},
"TensorMetadata": {"type": "object", "required": ["name", "datatype", "shape"], "properties": {
  "name": {"type": "string"},
  "datatype": {"type": "string"},
  "shape": {"type": "array", "items": {"type": "integer"}}}},
"InferenceModel": {"type": "object", "required": ["name", "platform", "inputs", "outputs"],
  "properties": {
    "name": {"type": "string"},
    "versions": {"type": "array", "items": {"type": "string"}},
    "platform": {"type": "string"},
    "inputs": {"type": "array", "items": {"$ref": "#/components/schemas/TensorMetadata"}},
    "outputs": {"type": "array", "items": {"$ref": "#/components/schemas/TensorMetadata"}}}},
"InferenceReady": {"type": "object", "required": ["name", "ready"], "properties": {
  "name": {"type": "string"}, "ready": {"const": true}}},
"InferTensor": {"type": "object", "required": ["name", "datatype", "shape"], "properties": {
  "name": {"type": "string"},
  "datatype": {"type": "string"},
  "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
  "parameters": {"type": "object", "additionalProperties": true},
  "data": {"type": "array", "items": true}}},
"InferRequest": {"type": "object", "required": ["inputs"], "properties": {
  "id": {"type": "string"},
  "parameters": {"type": "object", "additionalProperties": true,
    "description": "Fields of CompletionRequest"},
  "inputs": {"type": "array", "items": {"$ref": "#/components/schemas/InferTensor"}},
  "outputs": {"type": "array", "items": {"type": "object", "required": ["name"], "properties": {
    "name": {"type": "string"},
    "parameters": {"type": "object", "additionalProperties": true}}}}}},
"InferAnswer": {"type": "object", "required": ["model_name", "model_version", "outputs"],
  "properties": {
    "model_name": {"type": "string"},
    "model_version": {"type": "string"},
    "id": {"type": "string"},
    "parameters": {"type": "object", "additionalProperties": true},
    "outputs": {"type": "array", "items": {"$ref": "#/components/schemas/InferTensor"}}}},
"GenerateRequest": {"type": "object", "required": ["text_input"], "additionalProperties": true,
  "properties": {
    "id": {"type": "string"},
    "text_input": {"anyOf": [{"type": "string"},
                             {"type": "array", "items": {"type": "string"}, "minItems": 1}]},
    "parameters": {"type": "object", "additionalProperties": true,
      "description": "Fields of CompletionRequest"}}},
"GenerateAnswer": {"type": "object", "required": ["model_name", "model_version", "text_output"],
  "additionalProperties": true,
  "properties": {
    "model_name": {"type": "string"},
    "model_version": {"type": "string"},
    "id": {"type": "string"},
    "text_output": {"anyOf": [{"type": "string"},
                              {"type": "array", "items": {"type": "string"}}]}}},
"IndexRequest": {"type": "object", "properties": {"ready": {"type": ["boolean", "null"]}}},
"RepositoryCommand": {"type": "object", "properties": {
  "parameters": {"type": ["object", "null"], "additionalProperties": false,
    "properties": {"path": {"type": "string"}}}}},
"RepositoryIndex": {"type": "array", "items": {"type": "object", "required": ["name", "state"],
  "properties": {
    "name": {"type": "string"},
    "version": {"type": "string"},
    "state": {"enum": ["READY", "LOADING", "UNAVAILABLE"]},
    "reason": {"type": "string"}}}}
})json";

constexpr char kParameters[] = R"json({
"model": {"name": "model", "in": "path", "required": true, "schema": {"type": "string"},
  "description": "The name of a served model"},
"version": {"name": "version", "in": "path", "required": true, "schema": {"type": "string"}},
"file": {"name": "file", "in": "path", "required": true, "schema": {"type": "string"}},
"model_query": {"name": "model", "in": "query", "schema": {"type": "string"},
  "description": "The name of a served model; default: the first one that the key may use"},
"window": {"name": "window", "in": "query", "schema": {"type": "number", "minimum": 1},
  "description": "Counts the last so many seconds; default: since the start"},
"threshold": {"name": "threshold", "in": "query", "schema": {"type": "number", "minimum": 0},
  "description": "Selections per token above which an expert counts as activated; default: 0"},
"layer": {"name": "layer", "in": "query", "required": true,
  "schema": {"type": "integer", "minimum": 0}},
"optional_layer": {"name": "layer", "in": "query", "schema": {"type": "integer", "minimum": 0},
  "description": "Default: all layers"},
"block": {"name": "block", "in": "query", "schema": {"$ref": "#/components/schemas/BlockName"},
  "description": "May be absent if the layer routes one block"},
"top": {"name": "top", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 1000},
  "description": "How many tokens of each expert; default: 10"},
"min_count": {"name": "min_count", "in": "query", "schema": {"type": "integer", "minimum": 1},
  "description": "Tokens that occurred less often are left out; default: 5"},
"rank": {"name": "rank", "in": "query",
  "schema": {"type": "string", "enum": ["pmi", "g2", "count"]},
  "description": "What the tokens are ranked by; default: pmi"},
"eps": {"name": "eps", "in": "query", "schema": {"type": "number", "exclusiveMinimum": 0},
  "description": "Added to each count before the divergence; default: 1"},
"inference_header": {"name": "Inference-Header-Content-Length", "in": "header",
  "schema": {"type": "integer", "minimum": 0},
  "description": "The size of the JSON, after which the tensors' bytes follow"}
})json";

OrderedJson TypeOf(const StatisticValue& value) {
  if (std::holds_alternative<std::string>(value)) return TypeSchema("string");
  if (std::holds_alternative<double>(value)) return OrNull(TypeSchema("number"));
  if (std::holds_alternative<std::vector<double>>(value)) {
    return ListSchema(OrNull(TypeSchema("number")));
  }
  if (std::holds_alternative<uint64_t>(value) || std::holds_alternative<int64_t>(value)) {
    return TypeSchema("integer");
  }
  return ListSchema(TypeSchema("integer"));
}

// Adds the members that the statistics of `list` have in JSON. `stats` is only asked for types.
template <typename Stats>
void AddStatisticSchemas(std::span<const Statistic<Stats>> list, const Stats& stats,
                         OrderedJson& schema) {
  for (const Statistic<Stats>& statistic : list) {
    std::string_view name = statistic.name;
    if (name.empty()) continue;
    OrderedJson* object = &schema;
    for (size_t dot = name.find('.'); dot != std::string_view::npos; dot = name.find('.')) {
      object = &(*object)["properties"][std::string(name.substr(0, dot))];
      (*object)["type"] = "object";
      name.remove_prefix(dot + 1);
    }
    std::string meaning(statistic.meaning);
    if (!statistic.unit.empty()) meaning.append("; unit: ").append(statistic.unit);
    (*object)["properties"][std::string(name)] =
        Described(TypeOf(statistic.value(stats, {})), meaning);
  }
}

OrderedJson ExpertStatisticsSchema() {
  OrderedJson block = {{"type", "object"}, {"required", {"layer", "block", "rows", "counts"}}};
  AddStatisticSchemas(BlockStatistics(), BlockExpertStats(), block);
  OrderedJson out = {{"type", "object"}, {"required", {"model", "window_seconds", "layers"}}};
  out["properties"]["model"] = TypeSchema("string");
  out["properties"]["window_seconds"] =
      OrNull(TypeSchema("number", "The time that is covered; null: since the start"));
  AddStatisticSchemas(ModelStatistics(), ExpertStats(), out);
  out["properties"]["layers"] = ListSchema(std::move(block), "The routed blocks");
  return out;
}

}  // namespace

void AddServerSchemas(OrderedJson& out) {
  for (const char* text : {kServer, kTokens, kExperts, kInference})
    out.update(OrderedJson::parse(text));
  out["ExpertStatistics"] = ExpertStatisticsSchema();
}

OrderedJson Parameters() { return OrderedJson::parse(kParameters); }

}  // namespace moeserve::server::http
