// Proposes the continuation of a text from an earlier place in the same text ("prompt lookup
// decoding"): edits, summaries and code repeat much of what they were given.
#pragma once

#include <cstdint>
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
  int64_t distance = 0;  // from that place to the end of the text; 0 if nothing matches

  // Returns on how many matching tokens token `i` rests if those before it are right.
  int MatchedBefore(size_t i) const {
    return matched <= kByModel ? matched : matched + static_cast<int>(i);
  }
};

inline constexpr int kShortestMatch = 2;
inline constexpr int kLongestMatch = 16;

// Which earlier part of a text its end repeats. An edited copy repeats the original with tokens
// replaced, inserted or left out; after such a change, one token shows where it goes on.
struct Alignment {
  int64_t distance = 0;  // Proposal::distance of the last match of kAligningMatch or more tokens
  int64_t length = 0;    // of the text at that time; 0: there was none
};
inline constexpr int kAligningMatch = 4;
inline constexpr int64_t kAlignedTokens = 32;  // an alignment holds for so many further tokens
inline constexpr int64_t kMostShift = 16;      // by how many tokens one change can shift the copy

// Returns at most `most` tokens that followed the last kShortestMatch or more tokens of `text` at
// an earlier place. Of several places, takes the one where most tokens match, and of these the
// last. If the text repeats itself up to its end, the proposal goes on with the repetition. Takes
// time proportional to the length of the text.
Proposal LookUp(std::span<const TokenId> text, int most);

// Does the same. If nothing is found and `alignment` holds, returns the tokens behind the last
// token where it occurs nearest to the aligned place, at most kMostShift tokens from it (of two
// such places, the later one); `matched` is then 1. `alignment` belongs to the text, which may grow
// between calls; this function updates it.
Proposal LookUp(std::span<const TokenId> text, int most, Alignment& alignment);

}  // namespace moeserve
