// Log-probabilities of texts, window after window.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/generation/engine_api.h"

namespace moeserve::server {

struct Score {
  int64_t tokens = 0;  // of the texts
  int64_t scored = 0;
  double sum_logprob = 0.0;
  size_t bytes = 0;
  std::vector<TokenId> run;  // what the model was given, in order: windows with their prefixes

  double nll_per_token() const { return -sum_logprob / static_cast<double>(scored); }
  double perplexity() const;
  double bits_per_byte() const;
};

struct ScoringOptions {
  int window = 0;  // tokens of a window; 0: the context length
  bool in_order =
      false;  // one window at a time, so that rows reach the model in order of the texts
};

// The contents of a file. Errors name it as it was written.
Result<std::string> ReadScoredText(const std::string& path);

// Cuts each text's tokens into windows that do not overlap. Where the tokenizer starts a text with
// special tokens every window starts with them, so that its first token is scored as well.
// InvalidArgument: no tokenizer, a window or texts too short.
Result<Score> ScoreTexts(const std::vector<std::string>& texts, const ScoringOptions& options,
                         const std::shared_ptr<EngineApi>& engine);

}  // namespace moeserve::server
