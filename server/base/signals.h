// Handles SIGTERM and SIGINT on a thread instead of in a signal handler.
#pragma once

#include <functional>
#include <thread>

namespace moeserve::server {

// Call in main() before any thread starts: threads inherit the mask.
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
