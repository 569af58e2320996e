// Expert profiles of a running engine.
#pragma once

#include <string>

#include "engine/statistics/expert_profile.h"
#include "server/generation/engine_api.h"

namespace moeserve::server {

// What the engine has counted so far; no routes. Token counts are copied while the engine runs and
// may hold a part of the running step.
ExpertProfile LiveProfile(const EngineApi& engine, const std::string& model);

}  // namespace moeserve::server
