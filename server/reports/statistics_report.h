// The statistics of engine/statistics as JSON and as text.
#pragma once

#include <cstdint>
#include <string>

#include "engine/statistics/expert_profile.h"
#include "engine/statistics/expert_stats.h"
#include "engine/statistics/hidden_samples.h"
#include "engine/statistics/measures/token_affinity.h"
#include "engine/text/tokenizer/tokenizer.h"
#include "nlohmann/json.hpp"

namespace moeserve::server {

// Returns [{"expert", "tokens": [{"id", "text", "count", "pmi", "log_pmi", "share"}]}], one per
// expert. `tokenizer` may be null: then there are no texts.
nlohmann::ordered_json TopTokensJson(const TokenCounts& counts, const Tokenizer* tokenizer,
                                     uint32_t min_count, int top);

// Returns {"wasserstein": {"metric", "matrix"}, "kl": {"eps", "matrix"}}; null where undefined.
nlohmann::ordered_json SimilarityJson(const TokenCounts& counts, double eps);

// Returns {"value", "classes", "rank", "rows", "seen"}, or {"value": null, "reason"}.
nlohmann::ordered_json CollapseJson(const HiddenSample& sample);

struct ProfileReportOptions {
  double threshold = 0.0;
  uint32_t min_count = 5;
  int top = 10;      // tokens of an expert
  double eps = 1.0;  // smoothing of KL
};

// ExpertStatsJson() and, in each block, "top_tokens", "similarity" and "collapse" (null if the
// profile lacks their data).
nlohmann::ordered_json ProfileJson(const ExpertProfile& profile, const Tokenizer* tokenizer,
                                   const ProfileReportOptions& options);

// ExpertStatsTable() and a few lines per block for the other statistics.
std::string ProfileTable(const ExpertProfile& profile, const Tokenizer* tokenizer,
                         const ProfileReportOptions& options);

}  // namespace moeserve::server
