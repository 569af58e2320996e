// Computes log-probabilities of texts. A text is cut into windows, which the model computes
// independently, because a text can be longer than the context. A masked language model gives the
// tokens that are hidden from it log-probabilities; other encoders give none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "server/commands/progress/progress.h"
#include "server/commands/score/masked_windows.h"

namespace moeserve::server {

struct Score {
  int64_t tokens = 0;  // in the texts, without special tokens
  int64_t scored = 0;  // tokens that have a log-probability
  double sum_logprob = 0.0;
  size_t bytes = 0;
  int window = 0;  // tokens of a window, special tokens included
  // All token ids that the model computed, in order: the windows, each with its special tokens.
  std::vector<TokenId> run;
  int prefix = 0;                    // special tokens at the start of each window
  int suffix = 0;                    // special tokens at the end of each window
  std::vector<int> windows;          // tokens of each window, special tokens included
  std::vector<size_t> text_windows;  // number of windows of each text

  // Not a number if no token is scored.
  double nll_per_token() const { return -sum_logprob / static_cast<double>(scored); }
  double perplexity() const;
  double bits_per_byte() const;
};

struct ScoringOptions {
  int window = 0;  // tokens per window; 0 selects the context length
  // Whether only one window runs at a time, so that rows reach the model in the order of the texts.
  bool in_order = false;
  MaskOptions mask;                        // for masked language models
  std::optional<TokenId> mask_token = {};  // required by them
  // Overrides the routing of all windows; may be null.
  std::shared_ptr<const RoutingControl> routing_control = nullptr;
  ProgressOutput progress = ProgressOutput::kNone;
};

// Returns the contents of a file. Error messages contain `path` unchanged.
Result<std::string> ReadScoredText(const std::string& path);

// Runs the requests and adds the log-probabilities of their tokens to `score`. InvalidArgument if
// the model gives tokens log-probabilities but these have none.
absl::Status ComputeScore(std::vector<Request> requests, const ScoringOptions& options,
                          const std::shared_ptr<Engine>& engine, Score& score);

// Cuts the tokens of each text into windows that do not overlap. If the tokenizer starts texts with
// special tokens, every window starts with them, so that the first token of the text in each window
// is scored, too. Windows of an encoder are between the special tokens of its tokenizer.
// InvalidArgument if the model has no tokenizer or if a window or the texts are too short.
Result<Score> ScoreTexts(const std::vector<std::string>& texts, const ScoringOptions& options,
                         const std::shared_ptr<Engine>& engine);

}  // namespace moeserve::server
