// Requests that compute something of texts and generate nothing, as the interfaces state them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/kinds.h"
#include "base/status.h"
#include "engine/engine.h"
#include "engine/request.h"
#include "engine/spec/spec.h"
#include "model_loaders/checkpoint/sentence_transformers.h"
#include "model_loaders/tokenizer/tokenizer_config.h"
#include "server/encode/entities.h"
#include "server/generation/generation_params.h"
#include "server/generation/routing_params.h"

namespace moeserve::server {

inline constexpr size_t kMaxEncodeInputs = 2048;
inline constexpr int kMaxFillTokens = 100;
// Bytes of a text that is paired with several others, all its copies together.
inline constexpr size_t kMaxFirstBytes = size_t{32} << 20;
// Tokens of all filled texts of an answer.
inline constexpr int64_t kMaxFilledTokens = int64_t{2} << 20;

// kScore is the similarity of pairs of texts.
enum class EncodeTask : uint8_t {
  kEmbed,
  kTokenEmbed,
  kClassify,
  kTokenClassify,
  kScore,
  kFillMask
};
constexpr NameTraits Traits(EncodeTask k) {
  return NameIn({"embed", "token_embed", "classify", "token_classify", "score", "fill_mask"}, k);
}
inline constexpr int kEncodeTasks = 6;

// A text, or two, or token ids.
struct TextInput {
  bool is_text = true;
  std::string text;
  std::optional<std::string> pair;
  std::vector<TokenId> ids;
  std::vector<uint8_t> types;  // of `ids`; or empty
};

struct EncodeJob {
  std::string model;  // the served name that the request named
  EncodeTask task = EncodeTask::kEmbed;
  std::vector<TextInput> inputs;
  std::string_view input_field = "input";  // the name of the request field in errors about inputs
  std::string prompt;                      // put in front of every text
  bool add_special_tokens = true;
  std::optional<int> truncate;         // tokens of an input; -1: as many as the model takes
  std::optional<bool> truncates_left;  // absent: decoders do
  int priority = 0;
  std::string cache_salt;
  std::string request_id;  // from the request's body; empty if absent
  RoutingParams routing;
  int ignored_fields = 0;  // number of unknown fields in the body
  std::vector<std::string> warnings;

  bool base64 = false;            // vectors are base64 of little-endian float32
  std::optional<int> dimensions;  // vectors are cut to this size
  // Whether vectors are normalized, or logits become scores; absent: as the model says, or yes.
  std::optional<bool> activation;
  std::optional<Aggregation> aggregation;  // kTokenClassify: entities instead of scores of tokens

  // kScore with a model that makes vectors: the inputs whose vectors are compared.
  std::vector<std::pair<int, int>> pairs;
  std::vector<std::string> documents;  // of a ranking, to be returned; or empty
  std::optional<int> max_document_tokens;
  std::optional<int> top_n;

  // kFillMask
  int top_k = 5;
  bool fills = false;               // the answer has the text with each candidate in its place
  std::vector<TokenId> targets;     // the only candidates, unless empty
  bool logprobs = false;            // of `targets_of` at every position
  std::vector<TokenId> targets_of;  // one for each position; empty: the input itself
};

// What is known of a model, for reading and preparing its requests. Lives as long as the model.
struct EncodeModel {
  const ModelSpec* spec = nullptr;
  const Tokenizer* tokenizer = nullptr;  // null if the model has none
  const TextSettings* settings = nullptr;
  std::optional<TokenId> mask;           // the token that stands for a masked word
  int max_tokens = 0;                    // of one input, special tokens included
  std::string_view context_reason = {};  // EngineOptions::context_reason
};

// `engine` and `settings` must outlive the result.
EncodeModel MakeEncodeModel(const Engine& engine, const TextSettings& settings,
                            const TokenizerConfig& tokenizer_config);

// CheckTask() of server/generation/task_check.h.
absl::Status CheckTask(const ModelSpec& spec, EncodeTask task, std::string_view field = "model");

// Returns the first task of kEmbed, kClassify and kTokenClassify that the model has, else kEmbed.
EncodeTask DefaultPoolingTask(const ModelSpec& spec);

// Sets `job.prompt` to the model's prompt of this name, or to that for a kind of input ("query" or
// "document"; none if the model has no such prompt), or to the model's default. InvalidArgument for
// a name that the model does not have.
absl::Status SetPrompt(const TextSettings& settings, const std::optional<std::string>& name,
                       const std::optional<std::string>& kind, EncodeJob& job);

// Checks `job.dimensions`. InvalidArgument naming the sizes that the model has.
absl::Status CheckDimensions(const EncodeModel& model, const EncodeJob& job);

// Sets `job.aggregation`: the default of the model's labels if `name` is absent.
absl::Status SetAggregation(const ModelSpec& spec, const std::optional<std::string>& name,
                            EncodeJob& job);

// Sets the inputs of a comparison of texts: one first text for all second ones, or as many.
absl::Status SetPairs(const ModelSpec& spec, std::vector<std::string> first,
                      std::vector<std::string> second, std::string_view field, EncodeJob& job);

// One input, ready for the engine.
struct PreparedText {
  std::vector<TokenId> ids;
  std::vector<uint8_t> types;    // empty: all 0
  std::vector<uint8_t> special;  // 1 for tokens that are not of the text; empty: unknown
  std::vector<TextSpan> spans;   // bytes of TextInput::text with the prompt; empty: unknown
  std::vector<int32_t> masks;    // kFillMask: positions of mask tokens
};

// Tokenizes the inputs, cuts them if requested and checks that they fit. InvalidArgument, naming
// the field. `max_bytes` limits one text.
Result<std::vector<PreparedText>> PrepareTexts(const EncodeJob& job, const EncodeModel& model,
                                               size_t max_bytes);

// Returns what the engine computes of an input.
EncodeParams EncodeParamsOf(const EncodeJob& job, const ModelSpec& spec, const PreparedText& text);

// Returns the number of values that the answers to all inputs have.
int64_t CountAnswerValues(const EncodeJob& job, const ModelSpec& spec,
                          const std::vector<PreparedText>& texts);

// Returns the number of tokens of all filled texts (EncodeJob::fills) of the answer.
int64_t CountFilledTokens(const EncodeJob& job, const std::vector<PreparedText>& texts);

}  // namespace moeserve::server
