// The statistics of words (engine/statistics/measures/word_experts.h) as JSON and as text.
#pragma once

#include <string>
#include <vector>

#include "engine/statistics/measures/word_experts.h"
#include "server/base/json.h"

namespace moeserve::server {

// Returns {"diversity": {"blocks", "listed": {"tokens", "mean", "histogram"}, "others": {...}},
// "words": [{"word", "occurrences", "tokens", "layers": [{"layer", "block", "counts",
// "shares"}]}]}. A share is the part of the word's choices in the block; all are 0 if the word does
// not occur.
OrderedJson WordsJson(const std::vector<std::string>& words, const WordStatistics& statistics,
                      const RouteLayout& layout);

// Returns a line for each word, with its experts of the first routed block by share, and the two
// diversities.
std::string WordsTable(const std::vector<std::string>& words, const WordStatistics& statistics,
                       const RouteLayout& layout);

}  // namespace moeserve::server
