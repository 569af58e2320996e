// Proposes tokens for structured output from earlier outputs under the same constraint: keys,
// punctuation and values that do not vary come back in every answer.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "engine/draft/prompt_lookup.h"
#include "engine/sample/sampler.h"
#include "engine/text/structured/constraint.h"

namespace moeserve {

// Remembers, for each state of a constraint, a token that followed it. A token that turned out
// wrong is not proposed before it was right again; one that was right repeatedly may be wrong once.
// Only requests with equal cache keys (Sequence::cache_key) share what is remembered, so proposals
// tell nothing about other users. Engine thread only.
class ConstraintMemory {
 public:
  // Adds the tokens that a request drew under its constraint.
  void Learn(const CompiledConstraint* constraint, const std::string& cache_key,
             std::span<const ConstraintStep> steps);
  // Proposes at most `most` tokens that follow `state`, none that would end the output.
  Proposal Propose(const CompiledConstraint* constraint, const std::string& cache_key,
                   const ConstraintState& state, int most);

 private:
  // Limits of the memory: about 6 MiB. Beyond them, the constraint that was not used for longest is
  // forgotten, and further states of a constraint are not added.
  static constexpr size_t kMostConstraints = 64;
  static constexpr size_t kMostStates = 4096;

  struct Followed {
    TokenId token = 0;
    int8_t trust = 0;  // it is proposed from kProposed on
  };
  struct Known {
    absl::flat_hash_map<uint64_t, Followed> states;
    uint64_t used = 0;  // value of uses_ at the last use
  };
  using Key = std::pair<const CompiledConstraint*, std::string>;

  absl::flat_hash_map<Key, std::unique_ptr<Known>> known_;
  uint64_t uses_ = 0;
};

}  // namespace moeserve
