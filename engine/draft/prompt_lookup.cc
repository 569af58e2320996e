#include "engine/draft/prompt_lookup.h"

#include <algorithm>
#include <cstdint>

namespace moeserve {
namespace {

// Positions that one test covers. Only few blocks hold the last two tokens, so the loop over a
// block, which compilers vectorize, decides the time of a search.
constexpr int64_t kBlock = 64;

// Returns whether some i in [begin, begin + kBlock) has text[i - 1] == before and text[i] == last.
bool BlockHas(const TokenId* text, TokenId before, TokenId last) {
  int found = 0;
  for (int64_t i = 0; i < kBlock; ++i) {
    found |= static_cast<int>(text[i - 1] == before) & static_cast<int>(text[i] == last);
  }
  return found != 0;
}

// Sets the proposal's tokens to the `most` tokens from `distance` before the end of the text on.
void Take(std::span<const TokenId> text, int64_t distance, int most, Proposal& proposal) {
  proposal.distance = distance;
  const auto tokens = text.last(static_cast<size_t>(distance));
  for (int64_t i = 0; i < most; ++i) {
    proposal.tokens.push_back(tokens[static_cast<size_t>(i % distance)]);
  }
}

}  // namespace

Proposal LookUp(std::span<const TokenId> text, int most) {
  const int64_t size = std::ssize(text);
  Proposal proposal;
  if (size <= kShortestMatch || most <= 0) return proposal;
  const TokenId last = text[size - 1], before = text[size - 2];
  int64_t place = 0;                      // the proposal begins here
  const auto consider = [&](int64_t i) {  // text[i] is the last matching token
    if (text[i] != last || text[i - 1] != before) return;
    int matched = 2;
    while (matched < kLongestMatch && i - matched >= 0 &&
           text[i - matched] == text[size - 1 - matched]) {
      ++matched;
    }
    if (matched > proposal.matched) {
      proposal.matched = matched;
      place = i + 1;
    }
  };
  // Goes backwards, so that the last of several equally good places is taken.
  int64_t end = size - 1;
  while (end - kBlock >= 1 && proposal.matched < kLongestMatch) {
    const int64_t begin = end - kBlock;
    if (BlockHas(text.data() + begin, before, last)) {
      for (int64_t i = end - 1; i >= begin; --i) consider(i);
    }
    end = begin;
  }
  for (int64_t i = end - 1; i >= 1 && proposal.matched < kLongestMatch; --i) consider(i);
  if (proposal.matched == 0) return proposal;
  Take(text, size - place, most, proposal);
  return proposal;
}

Proposal LookUp(std::span<const TokenId> text, int most, Alignment& alignment) {
  Proposal proposal = LookUp(text, most);
  const int64_t size = std::ssize(text);
  if (proposal.matched >= kAligningMatch) alignment = {proposal.distance, size};
  const bool holds = alignment.length > 0 && size - alignment.length <= kAlignedTokens;
  if (proposal.matched > 0 || most <= 0 || !holds) return proposal;
  // Shifts of 0, -1, 1, -2, 2 ... A shorter distance is a later place.
  for (int64_t i = 0; i <= 2 * kMostShift; ++i) {
    const int64_t shift = i % 2 == 0 ? i / 2 : -(i + 1) / 2;
    const int64_t distance = alignment.distance + shift;
    if (distance < 1 || distance >= size) continue;
    if (text[size - distance - 1] != text[size - 1]) continue;
    proposal.matched = 1;
    Take(text, distance, most, proposal);
    break;
  }
  return proposal;
}

}  // namespace moeserve
