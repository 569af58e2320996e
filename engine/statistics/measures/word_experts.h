// Which experts compute given words (HMoE, fig. 10), and over how many experts the tokens of these
// words and of all other words spread (MH-MoE, fig. 7).
//
// A word is a run of letters and digits, also with single apostrophes or hyphens between them; all
// characters outside of ASCII count as letters, except for U+0080 to U+00BF, U+2000 to U+206F and
// U+3000 to U+3004 (spaces and punctuation). Words are equal if they differ only in the case of
// ASCII letters.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/routes/route_layout.h"
#include "engine/routes/routing_record.h"
#include "engine/statistics/measures/route_sequence.h"
#include "engine/text/tokenizer/tokenizer.h"

namespace moeserve {

// Values of WordTokens::word for tokens that belong to no listed word.
inline constexpr int kOtherWord = -1;  // to another word
inline constexpr int kNoWord = -2;     // to none: white space, punctuation, special tokens

// To which words the tokens of a text belong.
struct WordTokens {
  std::vector<int> word;              // [T] index in the list, kOtherWord or kNoWord
  std::vector<uint64_t> occurrences;  // [W]
};

// Finds the words of `list` in the text of `ids`. A token belongs to the first word of which it has
// a character. A special token ends a word. An entry of `list` that is not one word is never found.
WordTokens FindWords(const Tokenizer& tokenizer, std::span<const TokenId> ids,
                     const std::vector<std::string>& list);

// Tokens with the same number of distinct experts.
struct TokenSpread {
  uint64_t tokens = 0;
  std::vector<uint64_t>
      histogram;      // [n] tokens that chose n distinct experts in all blocks together
  double mean = 0.0;  // distinct experts per token and block; 0 without tokens
};

struct WordExperts {
  uint64_t occurrences = 0;
  uint64_t tokens = 0;
  // [block][E] how often each expert was chosen by the tokens of the word.
  std::vector<std::vector<uint64_t>> counts;
};

struct WordStatistics {
  std::vector<WordExperts> words;  // [W]
  // As in ExpertStats::diversity_blocks: the blocks that split tokens, or all.
  int diversity_blocks = 0;
  TokenSpread listed, others;  // tokens of the listed words, tokens of other words
};

// `routes` are those of all tokens, by routed block.
WordStatistics SummarizeWords(const WordTokens& tokens, const RouteLayout& layout,
                              std::span<const BlockRoutes> routes);

// Returns the routes of a record by routed block, without BlockRoutes::top1.
std::vector<BlockRoutes> RoutesOf(const RoutingRecord& record, const RouteLayout& layout);

}  // namespace moeserve
