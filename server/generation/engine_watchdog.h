// Notices that the engine's thread is stuck: that a step does not end.
#pragma once

#include <functional>
#include <memory>
#include <thread>

#include "absl/time/time.h"
#include "engine/engine.h"

namespace moeserve::server {

class EngineWatchdog {
 public:
  // Starts a thread that calls `changed`(true) when a round of the engine has taken longer than
  // `limit`, which must be positive, and `changed`(false) when that round has ended. Time in which
  // the whole process was stopped does not count.
  EngineWatchdog(std::shared_ptr<const Engine> engine, absl::Duration limit,
                 std::function<void(bool stuck)> changed);
  // Waits for a running call of `changed`; there are no further ones.
  ~EngineWatchdog() = default;

 private:
  void Watch(const std::stop_token& stop);

  const std::shared_ptr<const Engine> engine_;
  const absl::Duration limit_;
  const std::function<void(bool)> changed_;
  std::jthread thread_;  // last, because it uses the other members
};

}  // namespace moeserve::server
