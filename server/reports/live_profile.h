// Builds an expert profile from a running engine.
#pragma once

#include <string>

#include "engine/engine.h"
#include "engine/statistics/expert_profile.h"

namespace moeserve::server {

// Returns a profile with the engine's counters and without routes. The token counts are copied
// while the engine runs and may include part of a running step.
ExpertProfile LiveProfile(const Engine& engine, const std::string& model);

}  // namespace moeserve::server
