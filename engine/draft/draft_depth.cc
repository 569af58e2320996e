#include "engine/draft/draft_depth.h"

#include <algorithm>
#include <cmath>

namespace moeserve {
namespace {

constexpr double kNewest = 0.1;  // the weight of a new time in the average of times
// A time counts as at most this many times the expected one, to limit the effect of outliers.
constexpr double kOutlier = 3.0;
// A time counts for so many further steps. A number of rows that a slow step made look bad is no
// longer chosen, so its time must be forgotten to be measured again.
constexpr uint64_t kRemembered = 256;
// Drafts must be expected to raise the tokens per second by this factor: times are not exact.
constexpr double kLeastGain = 1.03;
// The share of right tokens that is assumed before any was observed.
constexpr double kFirstShare = 0.5;

}  // namespace

ReadShare::ReadShare(const ExpertStats& stats, int64_t head_parameters)
    : always_(static_cast<double>(stats.always_active_parameters + head_parameters)) {
  for (const BlockExpertStats& b : stats.blocks) {
    Block block;
    for (const int64_t n : b.expert_parameters) block.parameters += static_cast<double>(n);
    const double selected = std::min(b.split_heads * b.max_selected, b.num_experts);
    block.share = selected / b.num_experts;
    blocks_.push_back(block);
  }
}

double ReadShare::Parameters(int rows) const {
  double sum = always_;
  for (const Block& b : blocks_) sum += b.parameters * (1.0 - std::pow(1.0 - b.share, rows));
  return sum;
}

double ReadShare::operator()(int rows) const {
  const double one = Parameters(1);
  return one > 0.0 ? Parameters(rows) / one : 1.0;
}

void DraftDepth::ObserveStep(int rows, double seconds) {
  if (rows < 1 || rows > kMostRows) return;
  Timed& t = times_[static_cast<size_t>(rows)];
  if (!Known(rows)) t = {};
  t.last_step = ++steps_;
  if (t.observed > 0) seconds = std::min(seconds, kOutlier * t.seconds);
  ++t.observed;
  const double weight = std::max(1.0 / t.observed, kNewest);
  t.seconds += weight * (seconds - t.seconds);
}

bool DraftDepth::Known(int rows) const {
  const Timed& t = times_[static_cast<size_t>(rows)];
  return t.observed > 0 && steps_ - t.last_step <= kRemembered;
}

double DraftDepth::Seconds(int rows) const {
  // The nearest numbers of rows whose times are known.
  int below = rows, above = rows;
  while (below > 0 && !Known(below)) --below;
  while (above <= kMostRows && !Known(above)) ++above;
  const auto seconds = [&](int n) { return times_[static_cast<size_t>(n)].seconds; };
  const auto scaled = [&](int n) { return seconds(n) * read_share_(rows) / read_share_(n); };
  if (below == 0) return above > kMostRows ? 0.0 : scaled(above);
  if (above > kMostRows) return scaled(below);
  if (below == above) return seconds(below);
  const double share = static_cast<double>(rows - below) / (above - below);
  return seconds(below) + share * (seconds(above) - seconds(below));
}

void DraftDepth::Choose(int rows, int most, std::span<Candidate> candidates) const {
  for (Candidate& c : candidates) c.chosen = 0;
  most = std::min(most, kMostRows - rows);
  const double base = Seconds(rows);
  if (rows < 1 || most <= 0 || base <= 0.0) return;

  // A token counts if it and all before it are right, so the probabilities of a proposal fall from
  // token to token, and the most probable tokens of all proposals are leading ones.
  struct Token {
    double probability;
    Candidate* candidate;
  };
  std::vector<Token> tokens;
  for (Candidate& c : candidates) {
    double probability = 1.0;
    for (size_t i = 0; i < c.proposal->tokens.size(); ++i) {
      const int matched = c.proposal->MatchedBefore(i);
      probability *= c.record->Share(matched, record_.Share(matched, kFirstShare));
      tokens.push_back({probability, &c});
    }
  }
  std::stable_sort(tokens.begin(), tokens.end(),
                   [](const Token& a, const Token& b) { return a.probability > b.probability; });
  if (std::ssize(tokens) > most) tokens.resize(static_cast<size_t>(most));
  double expected = rows;
  double best = kLeastGain * expected / base;
  size_t chosen = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    expected += tokens[i].probability;
    const double rate = expected / Seconds(rows + static_cast<int>(i) + 1);
    if (rate > best) {
      best = rate;
      chosen = i + 1;
    }
  }
  for (size_t i = 0; i < chosen; ++i) ++tokens[i].candidate->chosen;
}

double DraftDepth::ModelShare(const AcceptanceRecord& record) const {
  return record.Share(0, record_.Share(0, kFirstShare));
}

int DraftDepth::ChooseModelDepth(int rows, std::span<const double> shares, int most,
                                 double seconds_per_token) const {
  const double base = Seconds(rows);
  if (rows < 1 || shares.empty() || base <= 0.0) return 0;
  const auto sequences = static_cast<int>(shares.size());
  std::vector<double> probabilities(shares.size(), 1.0);
  double expected = rows, best = kLeastGain * rows / base;
  int chosen = 0;
  for (int depth = 1; depth <= most && rows + depth * sequences <= kMostRows; ++depth) {
    for (size_t i = 0; i < shares.size(); ++i) {
      probabilities[i] *= shares[i];
      expected += probabilities[i];
    }
    const double rate = expected / (Seconds(rows + depth * sequences) + depth * seconds_per_token);
    if (rate > best) {
      best = rate;
      chosen = depth;
    }
  }
  return chosen;
}

}  // namespace moeserve
