// Computes log-probabilities of translations that are given, with an encoder-decoder.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "server/commands/score/text_scorer.h"

namespace moeserve::server {

struct TextPair {
  std::string source;
  std::string target;
};

// Reads a source, a tab and a translation from each line of a file; empty lines are left out.
// InvalidArgument, naming the line, for another one. Error messages contain `path` unchanged.
Result<std::vector<TextPair>> ReadTextPairs(const std::string& path);

struct PairScore {
  // Of the translations. `run` and `windows` are those of the decoder, which begin with its start
  // token, or of the encoder if that is asked for.
  Score score;
  std::vector<int> sources;  // tokens of each source
};

// Computes each pair by itself; the special tokens of the tokenizers surround both texts, and those
// behind a translation are scored, too. InvalidArgument if the model has no tokenizer, is no
// encoder-decoder, or if a text is too long; ScoringOptions::window is not used.
Result<PairScore> ScorePairs(const std::vector<TextPair>& pairs, bool of_encoder,
                             const ScoringOptions& options, const std::shared_ptr<Engine>& engine);

}  // namespace moeserve::server
