// Implements EngineApi by an Engine.
#pragma once

#include <memory>

#include "engine/engine.h"
#include "server/generation/engine_api.h"

namespace moeserve::server {

// Returns an object, never null, that owns `engine`.
std::shared_ptr<EngineApi> AdaptEngine(std::unique_ptr<Engine> engine);

}  // namespace moeserve::server
