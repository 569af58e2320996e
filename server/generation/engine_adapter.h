// Implements EngineApi with an Engine.
#pragma once

#include <memory>

#include "engine/engine.h"
#include "server/generation/engine_api.h"

namespace moeserve::server {

// The result is not null and owns `engine`.
std::shared_ptr<EngineApi> AdaptEngine(std::unique_ptr<Engine> engine);

}  // namespace moeserve::server
