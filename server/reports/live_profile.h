// Builds an expert profile from the statistics of a running engine.
#pragma once

#include <string>

#include "engine/statistics/expert_profile.h"
#include "server/reports/stack_experts.h"

namespace moeserve::server {

// Returns a profile with the counters of a stack and without routes. The token counts are copied
// while the engine runs and may include part of a running step.
ExpertProfile LiveProfile(const StackExperts& experts, const std::string& model);

}  // namespace moeserve::server
