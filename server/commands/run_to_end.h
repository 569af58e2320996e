// Runs requests and blocks until they end; for commands.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "engine/request.h"
#include "server/generation/engine_api.h"

namespace moeserve::server {

// Calls `on_delta`, on this thread, with each piece of request i in order. Returns the first error,
// which cancels the other requests.
absl::Status RunToEnd(std::shared_ptr<EngineApi> engine, std::vector<Request> requests,
                      const std::function<void(size_t, const OutputDelta&)>& on_delta);

}  // namespace moeserve::server
