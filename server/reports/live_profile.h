// Expert profiles of a running engine.
#pragma once

#include <string>

#include "engine/statistics/expert_profile.h"
#include "server/generation/engine_api.h"

namespace moeserve::server {

// Returns the counters of the engine, without routes. Token counts are copied while the engine runs
// and may include part of a running step.
ExpertProfile LiveProfile(const EngineApi& engine, const std::string& model);

}  // namespace moeserve::server
