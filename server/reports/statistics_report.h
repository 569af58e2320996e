// The statistics of engine/statistics as JSON and as text.
#pragma once

#include <cstdint>
#include <string>

#include "engine/statistics/expert_profile.h"
#include "engine/statistics/expert_stats.h"
#include "engine/statistics/hidden_samples.h"
#include "engine/statistics/measures/macs.h"
#include "engine/statistics/measures/token_affinity.h"
#include "engine/text/tokenizer/tokenizer.h"
#include "server/base/json.h"

namespace moeserve::server {

// Returns [{"expert", "tokens": [{"id", "text", "count", "pmi", "log_pmi", "g2", "share"}]}],
// one entry per expert. If `tokenizer` is null, "text" is absent.
OrderedJson TopTokensJson(const TokenCounts& counts, const Tokenizer* tokenizer, uint32_t min_count,
                          int top, TokenRank rank = TokenRank::kPmi);

// Returns {"wasserstein": {"metric", "matrix"}, "total_variation": {"matrix"}, "kl": {"eps",
// "matrix"}}. Undefined matrix elements are null.
OrderedJson SimilarityJson(const TokenCounts& counts, double eps);

// Returns {"value", "classes", "rank", "rows", "seen"}, or {"value": null, "reason"}.
OrderedJson CollapseJson(const HiddenSample& sample);

// Returns {"matrices", "attention"}; "attention" may be null.
OrderedJson MacsJson(const MeasuredMacs& macs);

struct ProfileReportOptions {
  double threshold = 0.0;
  uint32_t min_count = 5;
  int top = 10;      // most tokens listed per expert
  double eps = 1.0;  // smoothing of the token counts in KL divergences
};

// Returns ExpertStatsJson() in which every block also has "top_tokens", "similarity" and
// "collapse". These are null if the profile lacks the data for them.
OrderedJson ProfileJson(const ExpertProfile& profile, const Tokenizer* tokenizer,
                        const ProfileReportOptions& options);

// Returns ExpertStatsTable() and a few lines per block about top tokens, similarity and collapse.
std::string ProfileTable(const ExpertProfile& profile, const Tokenizer* tokenizer,
                         const ProfileReportOptions& options);

}  // namespace moeserve::server
