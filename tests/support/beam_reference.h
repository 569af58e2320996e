// Beam search as its definition reads, without regard to time and memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <ostream>
#include <tuple>
#include <vector>

#include "engine/beam/beam_params.h"
#include "engine/text/token_id.h"

namespace moeserve::testing {

struct ReferenceHypothesis {
  std::vector<TokenId> tokens;  // behind the prompt
  double sum = 0.0;
  double score = 0.0;

  friend bool operator==(const ReferenceHypothesis&, const ReferenceHypothesis&) = default;
  friend void PrintTo(const ReferenceHypothesis& h, std::ostream* out) {
    for (const TokenId t : h.tokens) *out << t << " ";
    *out << "sum " << h.sum << " score " << h.score << "\n";
  }
};

struct ReferenceSearch {
  BeamParams params;
  std::vector<TokenId> ends;  // distinct
  int limit = 1;              // largest number of tokens
  // Returns the log-probabilities [V] of the tokens that may follow these.
  std::function<std::vector<float>(const std::vector<TokenId>&)> logprobs;
  // Whether a text ends although its last token is not in `ends`.
  std::function<bool(const std::vector<TokenId>&)> text_ends = [](const std::vector<TokenId>&) {
    return false;
  };
  int steps = 0;  // that the last Run() took

  std::vector<ReferenceHypothesis> Run() {
    const auto width = static_cast<size_t>(params.num_beams);
    const size_t kept = std::max<size_t>(2, 1 + ends.size()) * width;
    std::vector<ReferenceHypothesis> running = {{}}, finished;
    for (steps = 0; !running.empty();) {
      const int length = ++steps;
      struct Candidate {
        double sum;
        size_t beam;
        TokenId token;
      };
      std::vector<Candidate> candidates;
      for (size_t b = 0; b < running.size(); ++b) {
        const std::vector<float> row = logprobs(running[b].tokens);
        for (size_t t = 0; t < row.size(); ++t) {
          if (std::isinf(row[t])) continue;
          candidates.push_back(
              {running[b].sum + static_cast<double>(row[t]), b, static_cast<TokenId>(t)});
        }
      }
      std::sort(candidates.begin(), candidates.end(), [](const auto& x, const auto& y) {
        return std::make_tuple(-x.sum, x.beam, x.token) < std::make_tuple(-y.sum, y.beam, y.token);
      });
      if (candidates.size() > kept) candidates.resize(kept);
      std::vector<ReferenceHypothesis> next;
      for (size_t rank = 0; rank < candidates.size(); ++rank) {
        ReferenceHypothesis h = running[candidates[rank].beam];
        h.tokens.push_back(candidates[rank].token);
        h.sum = candidates[rank].sum;
        h.score = h.sum / std::pow(length, params.length_penalty);
        const bool ended = std::find(ends.begin(), ends.end(), h.tokens.back()) != ends.end() ||
                           length == limit || text_ends(h.tokens);
        if (ended && rank < width) {
          finished.push_back(h);
        } else if (!ended && next.size() < width) {
          next.push_back(h);
        }
      }
      // Equal scores: the earlier one stays.
      std::stable_sort(finished.begin(), finished.end(),
                       [](const auto& x, const auto& y) { return x.score > y.score; });
      if (finished.size() > width) finished.resize(width);
      running = next;
      if (running.empty() || finished.size() < width) continue;
      if (params.early_stopping == EarlyStopping::kTrue) break;
      int best_length = length;
      if (params.early_stopping == EarlyStopping::kNever && params.length_penalty > 0) {
        best_length = limit;
      }
      const double best = running.front().sum / std::pow(best_length, params.length_penalty);
      if (best <= finished.back().score) break;
    }
    return finished;
  }
};

}  // namespace moeserve::testing
