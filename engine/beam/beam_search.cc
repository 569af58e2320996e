#include "engine/beam/beam_search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include "base/check.h"

namespace moeserve {
namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();

bool Better(const BeamCandidate& a, const BeamCandidate& b) {
  if (a.sum != b.sum) return a.sum > b.sum;
  return std::tie(a.beam, a.token) < std::tie(b.beam, b.token);
}

std::vector<TokenId> Distinct(std::vector<TokenId> ids) {
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

// A loop without branches, which is vectorised.
float Highest(std::span<const float> values) {
  float highest = kForbidden;
  for (const float v : values) highest = highest > v ? highest : v;
  return highest;
}

}  // namespace

BeamSearch::BeamSearch(const BeamParams& params, std::vector<TokenId> ends, int limit)
    : params_(params),
      ends_(Distinct(std::move(ends))),
      limit_(limit),
      kept_(std::max<size_t>(2, 1 + ends_.size()) * static_cast<size_t>(params.num_beams)) {
  MOESERVE_CHECK(params.num_beams >= 1 && limit >= 1, "a search has beams and tokens");
}

bool BeamSearch::IsEnd(TokenId token) const {
  return std::binary_search(ends_.begin(), ends_.end(), token);
}

void BeamSearch::Extend(int beam, std::span<const float> logprobs) {
  constexpr size_t kBlock = 64;
  const double before = sum(beam);
  for (size_t begin = 0; begin < logprobs.size(); begin += kBlock) {
    const auto block = logprobs.subspan(begin, std::min(kBlock, logprobs.size() - begin));
    // Of equal candidates, those that come first stay.
    if (candidates_.size() == kept_ &&
        !(before + static_cast<double>(Highest(block)) > candidates_.front().sum)) {
      continue;
    }
    for (size_t i = 0; i < block.size(); ++i) {
      if (block[i] == kForbidden) continue;
      const BeamCandidate candidate{beam, static_cast<TokenId>(begin + i),
                                    before + static_cast<double>(block[i])};
      if (candidates_.size() == kept_) {
        if (!Better(candidate, candidates_.front())) continue;
        std::pop_heap(candidates_.begin(), candidates_.end(), Better);
        candidates_.pop_back();
      }
      candidates_.push_back(candidate);
      std::push_heap(candidates_.begin(), candidates_.end(), Better);
    }
  }
}

void BeamSearch::Rank(const std::function<bool(const BeamCandidate&)>& ends,
                      const std::function<void(const BeamCandidate&, bool)>& visit) {
  std::vector<BeamCandidate> ranked = candidates_;
  std::sort(ranked.begin(), ranked.end(), Better);
  const auto beams = static_cast<size_t>(params_.num_beams);
  const bool last = length_ + 1 >= limit_;
  size_t running = 0;
  for (size_t rank = 0; rank < ranked.size() && (rank < beams || running < beams); ++rank) {
    const BeamCandidate& candidate = ranked[rank];
    // The caller is asked in any case, so that it knows how the hypothesis ends.
    const bool end = IsEnd(candidate.token) || ends(candidate) || last;
    if (end ? rank >= beams : running == beams) continue;
    running += end ? 0 : 1;
    visit(candidate, end);
  }
}

std::vector<BeamCandidate> BeamSearch::Preview(
    const std::function<bool(const BeamCandidate&)>& ends) {
  std::vector<BeamCandidate> visited;
  Rank(ends, [&](const BeamCandidate& candidate, bool) { visited.push_back(candidate); });
  return visited;
}

BeamStep BeamSearch::Advance(const std::function<bool(const BeamCandidate&)>& ends) {
  BeamStep step;
  Rank(ends, [&](const BeamCandidate& candidate, bool end) {
    if (!end) {
      step.running.push_back(candidate);
    } else if (const int number = Finish(candidate.sum, length_ + 1); number >= 0) {
      step.finished.emplace_back(number, candidate);
    }
  });
  candidates_.clear();
  ++length_;
  sums_.clear();
  for (const BeamCandidate& beam : step.running) sums_.push_back(beam.sum);
  step.over = Stops();
  return step;
}

std::vector<int> BeamSearch::Close() {
  candidates_.clear();
  std::vector<int> numbers;
  for (const double sum : std::exchange(sums_, {})) numbers.push_back(Finish(sum, length_));
  return numbers;
}

double BeamSearch::Score(double sum, int length) const {
  return sum / std::pow(static_cast<double>(length), params_.length_penalty);
}

int BeamSearch::Finish(double sum, int length) {
  const FinishedBeam made{next_number_++, Score(sum, length), sum};
  const auto place =
      std::upper_bound(finished_.begin(), finished_.end(), made,
                       [](const auto& a, const auto& b) { return a.score > b.score; });
  finished_.insert(place, made);
  if (static_cast<int>(finished_.size()) <= params_.num_beams) return made.number;
  const bool kept = finished_.back().number != made.number;
  finished_.pop_back();
  return kept ? made.number : -1;
}

bool BeamSearch::Stops() const {
  if (sums_.empty()) return true;
  if (static_cast<int>(finished_.size()) < params_.num_beams) return false;
  if (params_.early_stopping == EarlyStopping::kTrue) return true;
  const bool longest =
      params_.early_stopping == EarlyStopping::kNever && params_.length_penalty > 0.0;
  return Score(sums_.front(), longest ? limit_ : length_) <= finished_.back().score;
}

}  // namespace moeserve
