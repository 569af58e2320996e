// The engine behind the interface that the servers use.
#pragma once

#include <memory>

#include "engine/engine.h"
#include "server/generation/engine_api.h"

namespace moeserve::server {

// Never null; owns `engine`.
std::shared_ptr<EngineApi> AdaptEngine(std::unique_ptr<Engine> engine);

}  // namespace moeserve::server
