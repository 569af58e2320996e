// Handles SIGTERM and SIGINT on a thread instead of in a signal handler.
#pragma once

#include <functional>
#include <thread>

namespace moeserve::server {

// Blocks SIGTERM and SIGINT. Must be called in main() before any thread starts, because new threads
// inherit the signal mask.
void BlockTerminationSignals();

// Makes a write to a pipe or socket without a reader fail instead of ending the process.
void IgnoreBrokenPipes();

// Waits for SIGTERM and SIGINT, which must be blocked, on its own thread. The first signal runs
// `on_first`; a second signal ends the process at once.
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
