// Decides how many drafted tokens a step computes.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "engine/draft/acceptance_record.h"
#include "engine/draft/prompt_lookup.h"
#include "engine/statistics/expert_stats.h"

namespace moeserve {

// How much a step of the model reads, relative to a step of one row. The weights that every token
// uses are read once; of the experts, as many as the rows are expected to touch: E (1 - (1 - k /
// E)^rows) if each row selects k of E experts independently.
class ReadShare {
 public:
  // Uses only the properties of the model in `stats`, not its counters. `head_parameters` are those
  // of the LM head.
  ReadShare(const ExpertStats& stats, int64_t head_parameters);
  double operator()(int rows) const;

 private:
  struct Block {
    double parameters = 0.0;  // of all routed experts
    double share = 0.0;       // the share of experts that one token selects
  };
  double Parameters(int rows) const;

  double always_ = 0.0;
  std::vector<Block> blocks_;
};

// Learns how long steps with decoding rows take and how often drafted tokens are right, and chooses
// the number of drafted tokens that makes the tokens per second the most. Engine thread only.
class DraftDepth {
 public:
  // Steps with more decoding rows get no drafts.
  static constexpr int kMostRows = 128;

  explicit DraftDepth(ReadShare read_share) : read_share_(std::move(read_share)) {}

  // A sequence for which tokens were proposed.
  struct Candidate {
    const Proposal* proposal = nullptr;
    const AcceptanceRecord* record = nullptr;  // of the sequence
    int chosen = 0;                            // set by Choose(): leading tokens to compute
  };
  // Chooses for a step in which `rows` rows decode without drafts, at most `most` drafted tokens in
  // all. Chooses none before the time of such a step is known.
  void Choose(int rows, int most, std::span<Candidate> candidates) const;

  // Returns the expected share of right tokens of the draft model for the sequence with this
  // record.
  double ModelShare(const AcceptanceRecord& record) const;
  // Returns how many tokens a draft model, which takes `seconds_per_token` for one token of each
  // sequence, should propose for each of the sequences with these shares of right tokens, at most
  // `most`. `rows` as above.
  int ChooseModelDepth(int rows, std::span<const double> shares, int most,
                       double seconds_per_token) const;

  // Adds the time of a step that computed `rows` decoding rows, drafts included, and no others.
  void ObserveStep(int rows, double seconds);
  // Adds a proposed token of any sequence; see AcceptanceRecord::Add().
  void ObserveToken(int matched, bool right) { record_.Add(matched, right); }

  // Returns the expected time of a step in seconds; 0 if no step was observed. Times that were not
  // observed in the last steps are estimated from those of other numbers of rows.
  double Seconds(int rows) const;

 private:
  struct Timed {
    double seconds = 0.0;
    int observed = 0;        // number of steps
    uint64_t last_step = 0;  // the value of `steps_` at the last of them
  };

  // Whether the time of such steps was observed not long ago.
  bool Known(int rows) const;

  ReadShare read_share_;
  AcceptanceRecord record_;  // of all sequences
  uint64_t steps_ = 0;       // that were observed
  std::array<Timed, kMostRows + 1> times_{};
};

}  // namespace moeserve
