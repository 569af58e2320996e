// Beam search: which beams go on with which token, which hypotheses are finished, and when the
// search is over. Knows nothing of models and memory.
//
// The definition is that of transformers. P tokens are there at the start, at most M - P follow.
// At first one beam runs, with score 0. Each step extends every running beam by every token: the
// sum of a candidate is that of its beam plus the log-probability of the token. The
// max(2, 1 + |E|) * num_beams best candidates are ranked by their sums (equal sums: the lower beam,
// then the lower token id). A candidate ends if its token is in E, if the caller says so, or if its
// length n is M.
//
// - Of the first num_beams candidates, those that end become hypotheses, with the score
//   sum / (n - P)^length_penalty. The num_beams best are kept (equal scores: the earlier one).
// - The num_beams best candidates that do not end run on.
// - The search is over if no beam runs, or as EarlyStopping says.
//
// Sums are double-precision sums of single-precision log-probabilities.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "engine/beam/beam_params.h"
#include "engine/text/token_id.h"

namespace moeserve {

// A beam that runs, extended by a token.
struct BeamCandidate {
  int beam = 0;  // index among the running beams before the step
  TokenId token = 0;
  double sum = 0.0;  // of the log-probabilities of all tokens behind the first P

  friend bool operator==(const BeamCandidate&, const BeamCandidate&) = default;
};

struct FinishedBeam {
  int number = 0;  // counts the hypotheses of a search
  double score = 0.0;
  double sum = 0.0;

  friend bool operator==(const FinishedBeam&, const FinishedBeam&) = default;
};

// What became of the candidates of a step.
struct BeamStep {
  // The beams that run from now on, best first. They take the places of the earlier ones.
  std::vector<BeamCandidate> running;
  // The candidates that ended and were kept, and their numbers. A later candidate of the same step
  // may already have replaced one.
  std::vector<std::pair<int, BeamCandidate>> finished;
  bool over = false;
};

// One search. In each step, call Extend() for every running beam, then Advance(), until that says
// that the search is over. One thread at a time.
class BeamSearch {
 public:
  // `ends` is E, in any order. `limit` is M - P, at least 1.
  BeamSearch(const BeamParams& params, std::vector<TokenId> ends, int limit);

  // The number of beams that run, and the sum of one of them.
  int running() const { return static_cast<int>(sums_.size()); }
  double sum(int beam) const { return sums_[static_cast<size_t>(beam)]; }
  // The number of tokens that each running beam has behind the first P.
  int length() const { return length_; }

  // Adds the candidates of a running beam. `logprobs` [V] are the log-probabilities of the tokens;
  // a token with -infinity is no candidate. None is NaN.
  void Extend(int beam, std::span<const float> logprobs);
  // Forgets the candidates of this step, so that all beams can be extended again.
  void Restart() { candidates_.clear(); }

  // Ends the step. `ends` says whether a candidate whose token is not in E ends all the same; it is
  // called in the order of the ranks, and only for candidates that matter.
  BeamStep Advance(const std::function<bool(const BeamCandidate&)>& ends);
  // As Advance(), but only reports the candidates that would run on or be finished. Changes
  // nothing.
  std::vector<BeamCandidate> Preview(const std::function<bool(const BeamCandidate&)>& ends);

  // Ends the search before its end: the running beams become hypotheses as they are. Returns their
  // numbers: an entry for each beam.
  std::vector<int> Close();

  bool IsEnd(TokenId token) const;
  // The hypotheses, best first.
  const std::vector<FinishedBeam>& finished() const { return finished_; }

 private:
  // Calls `visit`(candidate, ends) for the candidates that matter, in the order of their ranks.
  void Rank(const std::function<bool(const BeamCandidate&)>& ends,
            const std::function<void(const BeamCandidate&, bool)>& visit);
  // Adds a hypothesis of this length if it is among the best. Returns its number; -1 if it is not.
  int Finish(double sum, int length);
  double Score(double sum, int length) const;
  bool Stops() const;

  const BeamParams params_;
  const std::vector<TokenId> ends_;  // ascending
  const int limit_;
  const size_t kept_;  // number of candidates that are ranked
  int length_ = 0;
  std::vector<double> sums_{0.0};          // of the running beams, best first
  std::vector<BeamCandidate> candidates_;  // a heap of the best of this step, the worst at its top
  std::vector<FinishedBeam> finished_;     // best first
  int next_number_ = 0;
};

}  // namespace moeserve
