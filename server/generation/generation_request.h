// Converts the parameters and the prompts of an API request to engine requests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/status.h"
#include "engine/engine.h"
#include "engine/request.h"
#include "engine/text/tokenizer/tokenizer.h"
#include "server/generation/generation_params.h"

namespace moeserve::server {

struct PromptInput {
  bool is_text = false;
  std::string text;
  std::vector<TokenId> ids;
};

struct CompletionParams : GenerationParams {
  std::vector<PromptInput> prompts;           // with an encoder-decoder, the sources
  std::optional<PromptInput> decoder_prompt;  // how each answer begins; encoder-decoders only
};

struct PreparedPrompt {
  // What the decoder continues. With an encoder-decoder, its start token and `decoder_prompt`.
  std::vector<TokenId> ids;
  std::vector<TokenId> source;  // of an encoder-decoder, the prompt; else empty
  std::string echo_text;        // the text of what is continued, if the request asked for echo
  int max_tokens = 0;
  std::optional<TokenId> forced_bos;  // SamplingParams::forced_bos_token_id

  // How many of `ids` are not the request's: the start token of an encoder-decoder.
  size_t start_tokens() const { return source.empty() ? 0 : 1; }
  // The number of the request's tokens.
  size_t tokens() const { return source.size() + ids.size() - start_tokens(); }
};

// What a model's prompts are encoded with, and how long they may be.
struct PromptRules {
  const Tokenizer* tokenizer = nullptr;  // may be null if all prompts are token ids
  int max_model_len = 0;
  std::string context_reason = {};  // EngineOptions::context_reason
  // Of an encoder-decoder: prompts are sources of at most `max_source` tokens, and the decoder
  // begins with `decoder_start`.
  std::optional<TokenId> decoder_start = std::nullopt;
  int max_source = 0;
};

PromptRules PromptRulesOf(const Engine& engine);

// Drops tokens from the start of `ids` so that `truncate_prompt_tokens` remain; returns whether
// tokens were dropped. With -1, keeps as many tokens as leave space in the context for
// `max_tokens`, or for kDefaultMaxTokens if `max_tokens` is absent.
bool TruncatePrompt(const GenerationParams& params, int max_model_len, std::vector<TokenId>& ids);

// Checks that one prompt and the requested output fit into the context. Returns the number of
// tokens to generate. `context_reason` is that of EngineOptions, for the error.
Result<int> FitIntoContext(const GenerationParams& params, size_t prompt_tokens, int max_model_len,
                           std::string_view context_reason = "");

// Encodes the prompts, truncates them if requested and checks that they fit into the context.
Result<std::vector<PreparedPrompt>> PreparePrompts(const CompletionParams& params,
                                                   const PromptRules& rules);

// Returns an error if the routing records of all choices together could have more than `max_routes`
// (row, expert) pairs.
absl::Status CheckRecordSize(const GenerationParams& params,
                             const std::vector<PreparedPrompt>& prompts, const ModelSpec& spec,
                             int64_t max_routes);

// Returns an estimate of the memory, in bytes, that a request holds from its admission to its end:
// its prompts, for every choice, and the parts of the answer about them. Generated tokens are not
// included.
size_t AdmissionBytes(const GenerationParams& params, const std::vector<PreparedPrompt>& prompts,
                      const ModelSpec& spec);

// Returns one engine request per choice. Choice prompt * n + sample is sample number `sample` of
// prompt number `prompt`.
std::vector<Request> MakeEngineRequests(const GenerationParams& params,
                                        const std::vector<PreparedPrompt>& prompts,
                                        const std::string& id, absl::Time deadline);

}  // namespace moeserve::server
