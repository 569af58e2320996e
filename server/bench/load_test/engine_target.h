// Load target: an engine in this process, without sockets.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "server/bench/load_test/load_target.h"
#include "server/generation/engine_api.h"

namespace moeserve::server {

class EngineTarget final : public LoadTarget {
 public:
  // Requests run greedily, ignore EOS and have `timeout_seconds` to end.
  EngineTarget(std::shared_ptr<EngineApi> engine, double timeout_seconds);
  // Cancels running requests without waiting for them.
  ~EngineTarget() override;

  double Now() override;
  void Start(const LoadRequest& request, double scheduled) override;
  std::vector<RequestResult> Wait(double until) override;
  void CancelAll() override;
  int64_t StrayAnswers() const override;
  Result<ServerCounters> Counters() override;

 private:
  class Inbox;
  class Sink;

  const std::shared_ptr<EngineApi> engine_;
  const absl::Duration timeout_;
  // Shared with the sinks, which the engine can keep longer than this object lives.
  const std::shared_ptr<Inbox> inbox_;
  std::set<int64_t> running_;  // indices of requests
};

}  // namespace moeserve::server
