// Runs requests for a command and blocks until all have ended.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "engine/engine.h"
#include "engine/request.h"

namespace moeserve::server {

// Calls `on_delta` on the calling thread with each output piece and the index of its request.
// Pieces of one request come in order; pieces of different requests interleave as they arrive.
// After the first error, cancels the other requests and returns that error. If `cancelled` is set
// and returns true, which it is asked several times a second, cancels all requests and returns
// Cancelled.
absl::Status RunToEnd(std::shared_ptr<Engine> engine, std::vector<Request> requests,
                      const std::function<void(size_t, const OutputDelta&)>& on_delta,
                      const std::function<bool()>& cancelled = {});

}  // namespace moeserve::server
