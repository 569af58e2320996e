#include "engine/draft/constraint_memory.h"

#include <algorithm>

namespace moeserve {
namespace {

constexpr int8_t kMostTrust = 3;
constexpr int8_t kProposed = 2;

}  // namespace

void ConstraintMemory::Learn(const CompiledConstraint* constraint, const std::string& cache_key,
                             std::span<const ConstraintStep> steps) {
  if (steps.empty()) return;
  const Key key(constraint, cache_key);
  auto place = known_.find(key);
  if (place == known_.end()) {
    if (known_.size() >= kMostConstraints) {
      known_.erase(std::min_element(known_.begin(), known_.end(), [](const auto& a, const auto& b) {
        return a.second->used < b.second->used;
      }));
    }
    place = known_.emplace(key, std::make_unique<Known>()).first;
  }
  Known& known = *place->second;
  known.used = ++uses_;
  for (const ConstraintStep& step : steps) {
    const auto state = known.states.find(step.state);
    if (state == known.states.end()) {
      if (known.states.size() >= kMostStates) continue;
      known.states.emplace(step.state, Followed{step.token, kProposed});
      continue;
    }
    Followed& followed = state->second;
    if (followed.token == step.token) {
      followed.trust = std::min<int8_t>(static_cast<int8_t>(followed.trust + 1), kMostTrust);
    } else if (followed.trust > 0) {
      --followed.trust;
    } else {
      followed.token = step.token;
    }
  }
}

Proposal ConstraintMemory::Propose(const CompiledConstraint* constraint,
                                   const std::string& cache_key, const ConstraintState& state,
                                   int most) {
  Proposal proposal{.tokens = {}, .matched = kByConstraint};
  const auto place = known_.find(Key(constraint, cache_key));
  if (place == known_.end()) return proposal;
  Known& known = *place->second;
  known.used = ++uses_;
  std::unique_ptr<ConstraintState> at;  // a copy of `state` as soon as it must change
  const ConstraintState* now = &state;
  const int64_t most_work = state.work() + kStepWork;
  while (static_cast<int>(proposal.tokens.size()) < most && now->work() < most_work) {
    const auto next = known.states.find(now->StateHash());
    if (next == known.states.end() || next->second.trust < kProposed) break;
    if (at == nullptr) now = (at = state.Clone()).get();
    if (!at->Accept(next->second.token) || (at->complete() && !at->can_continue())) break;
    proposal.tokens.push_back(next->second.token);
  }
  return proposal;
}

}  // namespace moeserve
