#include "server/http/openapi/schema_text.h"
#include "server/http/openapi/schemas.h"

namespace moeserve::server::http {
namespace {

constexpr char kEncode[] = R"json({
"TextInput": ["any", {"description": "A text or token ids, or a list of texts or of lists of ids",
  "anyOf": [
    {"type": "string"},
    {"type": "array", "items": {"type": ["string", "integer", "array", "object"]},
      "minItems": 1, "maxItems": 2048},
    {"type": "object"}]}],
"TextList": ["any", {"anyOf": [
    {"type": "string"},
    {"type": "array", "items": {"type": ["string", "object"]}, "minItems": 1,
      "maxItems": 2048}]}],
"Vector": ["any", {"description": "Numbers, or base64 of little-endian float32; matrices have a row for each token",
  "anyOf": [
    {"type": "array", "items": {"type": ["number", "array"]}},
    {"type": "string", "contentEncoding": "base64"}]}],
"EncodeUsage": {
  "prompt_tokens": "count", "total_tokens": "count",
  "prompt_tokens_details?": {"cached_tokens?": "count"}, "experts_per_token?": "number >= 0",
  "activated_parameters_per_token?": "number >= 0", "macs_per_token?": "number >= 0"},
"RoutedText": {
  "routing?": "Routing", "routed_experts?": ["string", {"contentEncoding": "base64"}]},
"EmbeddingRequest": {
  "model?": "string | null", "input": "TextInput",
  "encoding_format?": "'float' | 'base64' | null", "dimensions?": "integer >= 1 | null",
  "prompt_name?": "string | null", "input_type?": "'query' | 'document' | null",
  "truncate_prompt_tokens?": ["integer >= -1 | null",
    "Tokens that stay of a longer input; -1: as many as the model takes"],
  "truncation_side?": "'left' | 'right' | null", "add_special_tokens?": "boolean | null",
  "use_activation?": ["boolean | null", "Whether vectors are normalized"],
  "normalize?": ["boolean | null", "An older name of use_activation"],
  "token_type_ids?": "array | null", "priority?": "integer | null", "request_id?": "string | null",
  "cache_salt?": "string | null", "routing_control?": "RoutingControl | null",
  "return_routing?": "boolean | null", "routing_records?": "boolean | null",
  "return_routed_experts?": "boolean | null", "...": "any"},
"Embeddings": {
  "object": "'list'", "model": "string", "usage": "EncodeUsage", "routing_control?": "RoutingControl",
  "warnings?": "Warnings",
  "data": [{
    "object": "'embedding'", "index": "count", "embedding": "Vector", "routing?": "Routing",
    "routed_experts?": ["string", {"contentEncoding": "base64"}]}]},
"PoolingRequest": [{
  "model?": "string | null", "input": "TextInput",
  "task?": "'embed' | 'token_embed' | 'classify' | 'token_classify' | null",
  "use_activation?": ["boolean | null",
    "Whether vectors are normalized, or logits become scores"],
  "encoding_format?": "'float' | 'base64' | null", "dimensions?": "integer >= 1 | null",
  "...": "any"}, "And the other fields of EmbeddingRequest"],
"Pooled": {
  "id": "string", "object": "'list'", "model": "string", "usage": "EncodeUsage",
  "routing_control?": "RoutingControl", "warnings?": "Warnings",
  "data": [{
    "object": "'pooling'", "index": "count", "data": "Vector",
    "shape?": ["[count]", "Of a matrix in base64"], "routing?": "Routing",
    "routed_experts?": ["string", {"contentEncoding": "base64"}]}]},
"ClassifyRequest": [{
  "model?": "string | null",
  "input": ["any", "As in EmbeddingRequest, or objects with text and text_pair"],
  "use_activation?": ["boolean | null", "Whether logits become scores (default)"],
  "aggregation?": "'none' | 'simple' | 'viterbi' | null", "...": "any"},
  "And truncate_prompt_tokens, truncation_side, add_special_tokens, routing fields"],
"NamedPart": {
  "entity_group": "string", "score": "number", "word": "string | null",
  "start": ["integer | null", "Characters of the text"], "end": "integer | null",
  "tokens": ["[count]", "The first token, and the one behind the last"]},
"Classes": {
  "id": "string", "object": "'list'", "model": "string", "usage": "EncodeUsage",
  "routing_control?": "RoutingControl", "warnings?": "Warnings",
  "data": [{
    "index": "count", "label?": "string", "probs?": "[number]", "num_classes?": "count",
    "entities?": ["[NamedPart]", "If the model labels tokens"], "routing?": "Routing",
    "routed_experts?": ["string", {"contentEncoding": "base64"}]}]},
"ScoreRequest": [{
  "model?": "string | null", "text_1?": "TextList", "text_2?": "TextList", "queries?": "TextList",
  "documents?": "TextList", "use_activation?": "boolean | null", "...": "any"},
  "With text_1 or queries, and text_2 or documents: one and several, or as many of both"],
"Scores": {
  "id": "string", "object": "'list'", "model": "string", "usage": "EncodeUsage",
  "routing_control?": "RoutingControl", "warnings?": "Warnings", "inputs?": ["[RoutedText]", "Of vectors that were compared"],
  "data": [{
    "index": "count", "object": "'score'", "score": "number", "routing?": "Routing",
    "routed_experts?": ["string", {"contentEncoding": "base64"}]}]},
"RerankRequest": {
  "model?": "string | null", "query": "string", "documents": "TextList",
  "top_n?": "integer >= 1 | null", "return_documents?": "boolean | null",
  "max_tokens_per_doc?": "integer >= 1 | null", "use_activation?": "boolean | null", "...": "any"},
"AnyRerankRequest": [{
  "model?": "string | null", "query": "string", "documents?": "TextList",
  "texts?": ["TextList", "Instead of documents: a request in the form of TEI"],
  "raw_scores?": "boolean | null", "return_text?": "boolean | null", "truncate?": "boolean | null",
  "...": "any"}, "And the other fields of RerankRequest"],
"AnyRanking": ["any", {"anyOf": [
    {"$ref": "#/components/schemas/Ranking"}, {"$ref": "#/components/schemas/TeiRanks"}]}],
"TeiRanks": [{"index": "count", "score": "number", "text?": "string"}],
"Ranking": {
  "id": "string", "model": "string", "usage": "EncodeUsage", "routing_control?": "RoutingControl",
  "warnings?": "Warnings",
  "inputs?": ["[RoutedText]", "Of vectors that were compared"],
  "results": [{
    "index": "count", "relevance_score": "number", "document?": {"text": "string"},
    "routing?": "Routing", "routed_experts?": ["string", {"contentEncoding": "base64"}]}]},
"FillMaskRequest": {
  "model?": "string | null",
  "input": ["any", {"anyOf": [
    {"type": "string"}, {"type": "array", "items": {"type": "integer"}, "minItems": 1}]}],
  "top_k?": "integer >= 1 | null",
  "targets?": ["array | null", "Texts of one token, or ids: the only candidates"],
  "logprobs?": ["boolean | null", "Of the token at each position"],
  "targets_of?": ["[integer] | null", "Other tokens for the positions"],
  "add_special_tokens?": "boolean | null", "...": "any"},
"FilledMasks": {
  "id": "string", "model": "string", "usage": "EncodeUsage", "routing_control?": "RoutingControl",
  "warnings?": "Warnings",
  "masks": [{
    "position": "count",
    "tokens": [{
      "token": "count", "token_str": "string", "score": "number", "logprob": "number",
      "sequence": "string | null"}]}],
  "logprobs?": "[number]", "routing?": "Routing",
  "routed_experts?": ["string", {"contentEncoding": "base64"}]},
"TeiTexts": {
  "model?": "string | null",
  "inputs": ["any", "A text, or a list of texts; for /predict also pairs, and lists of these"],
  "truncate?": ["boolean | null", "Whether longer texts are cut; default: they are refused"],
  "truncation_direction?": "'Left' | 'Right' | null", "prompt_name?": "string | null",
  "normalize?": ["boolean | null", "Of /embed; default: true"],
  "raw_scores?": ["boolean | null", "Of /predict; default: false"],
  "dimensions?": "integer >= 1 | null", "...": "any"},
"TeiVectors": ["any", {"type": "array", "items": {"type": "array"}}],
"TeiLabels": ["any", {"type": "array", "items": {"type": ["object", "array"]}}],
"TeiSentences": {
  "model?": "string | null", "inputs": {"source_sentence": "string", "sentences": "[string]"},
  "parameters?": "object | null", "...": "any"},
"TeiScores": "[number]",
"TeiInfo": {
  "model_id": "string", "model_sha?": "string | null", "model_type?": "object",
  "max_input_length": "count", "max_client_batch_size": "count", "version": "string"}
})json";

}  // namespace

void AddEncodeSchemas(OrderedJson& out) { out.update(ParseSchemas(kEncode)); }

}  // namespace moeserve::server::http
