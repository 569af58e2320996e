// Runs requests and waits for them: for commands, which have nothing else to do.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "engine/request.h"
#include "server/generation/engine_api.h"

namespace moeserve::server {

// Calls `on_delta` on this thread with each piece of request i in order. The first error ends
// everything and is the result.
absl::Status RunToEnd(std::shared_ptr<EngineApi> engine, std::vector<Request> requests,
                      const std::function<void(size_t, const OutputDelta&)>& on_delta);

}  // namespace moeserve::server
