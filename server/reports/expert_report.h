// Expert statistics as JSON and as a table.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/statistics/expert_stats.h"
#include "server/base/json.h"

namespace moeserve::server {

// Returns the response of GET /v1/experts/stats. Without `window_seconds`, the statistics are since
// the start of the server. In the activation ratio, an expert counts as active if its selections,
// divided by the tokens, exceed `threshold`. Names the stack if the model has two.
OrderedJson ExpertStatsJson(const ExpertStats& stats, const std::string& model,
                            std::optional<double> window_seconds, double threshold);

// Returns the tokens and the mean activated parameters per token of each stack of a model, and the
// mean over the tokens of all stacks.
OrderedJson StacksJson(const std::vector<ExpertStats>& stacks);

// Returns one line per routed block (rows, balance, distinct experts) and the totals of the model.
std::string ExpertStatsTable(const ExpertStats& stats, double threshold);

}  // namespace moeserve::server
