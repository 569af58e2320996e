#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "engine/statistics/statistic_list.h"
#include "server/http/openapi/schema_builder.h"
#include "server/http/openapi/schema_text.h"
#include "server/http/openapi/schemas.h"

namespace moeserve::server::http {
namespace {

// In these texts, every object lists all members that answers can have.
constexpr char kServer[] = R"json({
"Error": {
  "error": {
    "message": "string", "type": "string", "param": ["string | null", "The field of the request"],
    "code": "string | null"}},
"InferenceError": {"error": "string"},
"Empty": ["object", {"properties": {}, "maxProperties": 0}],
"OpenApi": {"openapi": "any", "info": "any", "paths": "any"},
"Ping": {"status": "'ok'"},
"Ready": {"status": "'ok'", "ready": "true"},
"Live": {"status": "'ok'", "live": "true"},
"Version": {"version": "string", "commit": "string | null", "backend": "string"},
"MetricsHistory": {
  "interval_seconds": "number",
  "bounds": [{"...": "[number]"}, "The upper bounds of each histogram's buckets"],
  "readings": ["[MetricsReading]", "The oldest first, of the model or summed over all"]},
"MetricsReading": {
  "age_seconds": "number >= 0", "requests_running?": "integer", "requests_waiting?": "integer",
  "kv_cache_usage_ratio?": "number", "requests_finished_total?": "integer",
  "generation_tokens_total?": "integer", "prompt_tokens_total?": "integer",
  "time_to_first_token_seconds?": "BucketCounts", "inter_token_latency_seconds?": "BucketCounts",
  "request_duration_seconds?": "BucketCounts"},
"BucketCounts": ["[integer]",
  "Observations in each bucket, not cumulative; the last has no upper bound"],
"ServerInfo": {
  "name": "'moeserve'", "version": "string", "commit": "string | null", "device": "string",
  "state": "'loading' | 'serving' | 'draining'", "uptime_seconds": "number >= 0",
  "models": "[ServedModel]", "limits": [{"...": "number"}, "Limits of one request"],
  "settings": [{"...": "boolean | integer | string | array"},
    "Settings on which it depends how requests are answered"],
  "ranks": [[{"rank": "count", "host": "string", "up": "boolean"}],
    "Processes that compute the model together; empty if this process is alone"]},
"ServedModel": {
  "id": "string", "aliases": "[string]", "state": "'unloaded' | 'loading' | 'ready'",
  "version": "count", "memory_bytes": "count", "max_model_len?": "integer >= 1",
  "vocab_size?": "integer >= 1", "tokenizer?": "boolean",
  "chat_template?": ["boolean", "Whether chats are possible"], "routing_control?": "boolean",
  "default_sampling?": [{"...": "number"},
    "Defaults of the checkpoint, which replace those of the interface"]},
"ModelList": {
  "object": "'list'", "first_id?": "string | null", "last_id?": "string | null",
  "has_more?": "false", "data": "[Model]"},
"Model": {
  "id": "string", "object": "'model'", "type?": "'model'", "display_name?": "string",
  "created": "integer", "created_at?": "time", "lifecycle?": "'active'", "owned_by": "string",
  "root?": "string", "parent?": "null", "max_model_len?": "integer | null",
  "max_input_tokens?": "integer | null", "max_tokens?": "integer | null",
  "tasks?": ["[string]", "What the model computes"], "stacks?": "[StackName]",
  "version?": "integer | null"},
"OllamaDetails": {"format": "string", "family": "'moe' | 'dense'", "...": "any"},
"OllamaModels": {
  "models": [{
    "name": "string", "model": "string", "size": "count",
    "digest": ["string", "Differs for different served versions"], "details": "OllamaDetails",
    "modified_at?": "time", "expires_at?": "time", "size_vram?": "count",
    "context_length?": "integer >= 1"}]},
"OllamaShowRequest": {"model?": "string", "...": "any"},
"OllamaModel": {
  "modelfile?": "string", "parameters?": "string", "template?": "string",
  "details": "OllamaDetails", "model_info": {"...": "any"},
  "capabilities": "['completion' | 'tools' | 'thinking']", "modified_at?": "time"},
"OllamaVersion": {"version": "string"},
"LoadRequest": {
  "model": "string", "path?": ["string | null", "Relative to --models-folder"], "...": "none"},
"UnloadRequest": {"model": "string", "...": "none"},
"ModelStatus": {
  "id": "string", "object": "'model'", "aliases": "[string]",
  "state": "'unloaded' | 'loading' | 'ready'", "version": "count", "memory_bytes": "count"}
})json";

constexpr char kTokens[] = R"json({
"TokenizeRequest": [{
  "model?": "string | null", "prompt?": "string | null", "messages?": "[ChatMessage] | null",
  "add_special_tokens?": "boolean | null", "add_generation_prompt?": "boolean | null",
  "continue_final_message?": "boolean | null", "reasoning_effort?": "string | null",
  "chat_template?": "string | null", "chat_template_kwargs?": "object | null",
  "return_token_strs?": "boolean | null", "tools?": "[object] | null"},
  "With either prompt or messages"],
"Tokens": {
  "count": "count", "max_model_len": "integer", "tokens": "[integer]",
  "token_strs": "[string] | null"},
"DetokenizeRequest": {
  "model?": "string | null", "tokens": "[count]", "skip_special_tokens?": "boolean | null"},
"DetokenizedText": {"prompt": "string"},
"TokenizerInfo": {
  "model?": "string", "tokenizer_class": "string", "vocab_size": "integer >= 1",
  "model_max_length?": "integer >= 1", "bos_token": "string | null", "eos_token": "string | null",
  "pad_token": "string | null", "unk_token?": "string | null", "eos_token_ids?": "[integer]",
  "add_bos_token?": "boolean | null", "add_eos_token?": "boolean | null",
  "special_tokens?": [{"id": "integer", "token": "string"}], "chat_template": "string | null"}
})json";

constexpr char kExperts[] = R"json({
"BlockName": "'attention' | 'feed_forward' | 'cross_attention'",
"StackName": ["'encoder' | 'decoder'", "Only models with two stacks of layers have it"],
"ExpertLayout": {
  "model": "string", "stack?": "StackName", "rows_per_token": "count", "blocks": "[RoutedBlock]"},
"RoutedBlock": {
  "layer": "count", "block": "BlockName", "experts": "integer >= 1", "sub_tokens": "integer >= 1",
  "first_row": "count"},
"ExpertTokens": {
  "stack?": "StackName", "layer": "integer", "block": "BlockName", "min_count": "integer",
  "vocabulary?": "integer", "counted_tokens?": ["integer",
    "Tokens with counts of their own; fewer than the vocabulary if the table is limited"],
  "token_stats_mib_of_all?": ["integer",
    "The value of --token-stats-mib with which all tokens are counted"],
  "experts": [{
    "expert": "integer",
    "tokens": [{
      "id": "integer", "text": "string | null", "count": "integer", "pmi": "number | null",
      "log_pmi": "number | null",
      "g2": ["number", "Log-likelihood ratio; negative below the expected count"],
      "share": "number"}]}]},
"Matrix": "[[number | null]]",
"ExpertSimilarity": {
  "stack?": "StackName", "layer": "integer", "block": "BlockName",
  "wasserstein": {"metric": "string", "matrix": "Matrix"}, "total_variation": {"matrix": "Matrix"},
  "kl": {"eps": "number", "matrix": "Matrix"}},
"ExpertCollapse": {
  "model": "string",
  "layers": [{
    "stack?": "StackName", "layer": "integer", "block": "BlockName", "value": "number | null",
    "classes?": "integer",
    "rank?": "integer", "reason?": "string", "rows": "integer", "seen": "integer"}]}
})json";

constexpr char kInference[] = R"json({
"InferenceServer": {"name": "string", "version": "string", "extensions": "[string]"},
"TensorMetadata": {"name": "string", "datatype": "string", "shape": "[integer]"},
"InferenceModel": {
  "name": "string", "versions?": "[string]", "platform": "string", "inputs": "[TensorMetadata]",
  "outputs": "[TensorMetadata]"},
"InferenceReady": {"name": "string", "ready": "true"},
"InferTensor": {
  "name": "string", "datatype": "string", "shape": "[count]", "parameters?": {"...": "any"},
  "data?": "[any]"},
"InferRequest": {
  "id?": "string", "parameters?": [{"...": "any"}, "Fields of CompletionRequest"],
  "inputs": "[InferTensor]", "outputs?": [{"name": "string", "parameters?": {"...": "any"}}]},
"InferAnswer": {
  "model_name": "string", "model_version": "string", "id?": "string",
  "parameters?": {"...": "any"}, "outputs": "[InferTensor]"},
"GenerateRequest": {
  "id?": "string",
  "text_input": ["any",
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}],
  "parameters?": [{"...": "any"}, "Fields of CompletionRequest"], "...": "any"},
"GenerateAnswer": {
  "model_name": "string", "model_version": "string", "id?": "string",
  "text_output": "string | [string]", "...": "any"},
"IndexRequest": {"ready?": "boolean | null"},
"RepositoryCommand": {"parameters?": [{"path?": "string", "...": "none"}, null]},
"RepositoryIndex": [{
  "name": "string", "version?": "string", "state": "'READY' | 'LOADING' | 'UNAVAILABLE'",
  "reason?": "string"}]
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
"stack": {"name": "stack", "in": "query", "schema": {"$ref": "#/components/schemas/StackName"},
  "description": "Which stack of an encoder-decoder; default: its decoder"},
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
  const OrderedJson stack = {{"$ref", "#/components/schemas/StackName"}};
  block["properties"]["stack"] = stack;
  AddStatisticSchemas(BlockStatistics(), BlockExpertStats(), block);
  OrderedJson out = {{"type", "object"}, {"required", {"model", "window_seconds", "layers"}}};
  out["properties"]["model"] = TypeSchema("string");
  out["properties"]["stack"] = stack;
  out["properties"]["stacks"] = {
      {"type", "object"},
      {"description", "Tokens and mean activated parameters by stack, and the mean over all"}};
  out["properties"]["window_seconds"] =
      OrNull(TypeSchema("number", "The time that is covered; null: since the start"));
  AddStatisticSchemas(ModelStatistics(), ExpertStats(), out);
  out["properties"]["layers"] = ListSchema(std::move(block), "The routed blocks");
  return out;
}

}  // namespace

void AddServerSchemas(OrderedJson& out) {
  for (const char* text : {kServer, kTokens, kExperts, kInference}) out.update(ParseSchemas(text));
  out["ExpertStatistics"] = ExpertStatisticsSchema();
}

OrderedJson Parameters() { return OrderedJson::parse(kParameters); }

}  // namespace moeserve::server::http
