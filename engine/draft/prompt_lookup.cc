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
  const int64_t period = size - place;
  for (int64_t i = 0; i < most; ++i) {
    proposal.tokens.push_back(text[static_cast<size_t>(place + i % period)]);
  }
  return proposal;
}

}  // namespace moeserve
