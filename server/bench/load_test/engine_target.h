// A load target that is an engine in this process, without sockets.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "server/bench/load_test/load_target.h"

namespace moeserve::server {

class EngineTarget final : public LoadTarget {
 public:
  // Requests are sampled greedily, ignore EOS and have a deadline `timeout_seconds` after their
  // start.
  EngineTarget(std::shared_ptr<Engine> engine, double timeout_seconds);
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

  const std::shared_ptr<Engine> engine_;
  const absl::Duration timeout_;
  // Shared with the token sinks, which the engine may keep longer than this object lives.
  const std::shared_ptr<Inbox> inbox_;
  std::map<int64_t, std::shared_ptr<TokenSink>> running_;  // by the index of the request
};

}  // namespace moeserve::server
