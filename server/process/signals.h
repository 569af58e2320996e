// Handles SIGTERM, SIGINT and SIGHUP on a thread instead of in a signal handler.
#pragma once

#include <functional>
#include <thread>

namespace moeserve::server {

// Blocks SIGTERM and SIGINT. Must be called in main() before any thread starts, because new threads
// inherit the signal mask.
void BlockTerminationSignals();

// Blocks SIGHUP, under the same rule. Without it, SIGHUP ends the process.
void BlockHangup();

// Makes a write to a pipe or socket without a reader fail instead of ending the process.
void IgnoreBrokenPipes();

// Waits for SIGTERM and SIGINT, which must be blocked, on its own thread. The first signal runs
// `on_first`; a second signal ends the process at once. If SIGHUP is blocked, each one runs
// `on_hangup`.
class SignalWatcher {
 public:
  explicit SignalWatcher(
      std::function<void()> on_first, std::function<void()> on_hangup = [] {});
  ~SignalWatcher();

  SignalWatcher(const SignalWatcher&) = delete;
  SignalWatcher& operator=(const SignalWatcher&) = delete;

 private:
  std::thread thread_;
};

}  // namespace moeserve::server
