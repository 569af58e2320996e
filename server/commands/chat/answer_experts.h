// Tells which experts computed an answer.
#pragma once

#include <string>

#include "engine/statistics/expert_stats.h"

namespace moeserve::server {

// Returns a line for each routed block with the `top` experts that were selected most often and
// their shares of the selections, then the table of ExpertStatsTable().
std::string AnswerExperts(const ExpertStats& stats, int top);

}  // namespace moeserve::server
