// Proposes the continuation of a text from an earlier place in the same text ("prompt lookup
// decoding"): edits, summaries and code repeat much of what they were given.
#pragma once

#include <span>
#include <vector>

#include "engine/text/token_id.h"

namespace moeserve {

// Proposals that do not rest on matching tokens: those of a draft model, and those of earlier
// outputs under the same constraint.
inline constexpr int kByModel = 0;
inline constexpr int kByConstraint = -1;

struct Proposal {
  std::vector<TokenId> tokens;  // empty if there is nothing to propose
  // Number of tokens before the end of the text that equal those before the place from which
  // `tokens` were taken, at most kLongestMatch; kByModel or kByConstraint for other proposals.
  int matched = kByModel;

  // Returns on how many matching tokens token `i` rests if those before it are right.
  int MatchedBefore(size_t i) const {
    return matched <= kByModel ? matched : matched + static_cast<int>(i);
  }
};

inline constexpr int kShortestMatch = 2;
inline constexpr int kLongestMatch = 16;

// Returns at most `most` tokens that followed the last kShortestMatch or more tokens of `text` at
// an earlier place. Of several places, takes the one where most tokens match, and of these the
// last. If the text repeats itself up to its end, the proposal goes on with the repetition. Takes
// time proportional to the length of the text.
Proposal LookUp(std::span<const TokenId> text, int most);

}  // namespace moeserve
