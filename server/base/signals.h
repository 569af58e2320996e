// SIGTERM and SIGINT as events instead of interruptions.
#pragma once

#include <functional>
#include <thread>

namespace moeserve::server {

// In main(), before any thread exists: threads inherit the mask.
void BlockTerminationSignals();

// Waits for the blocked signals on a thread of its own. The first one runs `on_first`; a second one
// ends the process at once.
class SignalWatcher {
 public:
  explicit SignalWatcher(std::function<void()> on_first);
  ~SignalWatcher();

  SignalWatcher(const SignalWatcher&) = delete;
  SignalWatcher& operator=(const SignalWatcher&) = delete;

 private:
  std::jthread thread_;
};

}  // namespace moeserve::server
