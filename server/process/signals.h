// Handles SIGTERM, SIGINT and SIGHUP on a thread instead of in a signal handler.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <thread>

namespace moeserve::server {

// Blocks SIGTERM and SIGINT. Must be called in main() before any thread starts, because new threads
// inherit the signal mask.
void BlockTerminationSignals();

// Blocks SIGHUP, under the same rule. Without it, SIGHUP ends the process.
void BlockHangup();

// Blocks SIGUSR1, under the same rule: it then is a first SIGTERM, never a second one. mpirun
// passes it to its processes and lives on, while its own SIGTERM kills them soon.
void BlockDrainSignal();

// Makes a write to a pipe or socket without a reader fail instead of ending the process.
void IgnoreBrokenPipes();

// Waits for SIGTERM and SIGINT, which must be blocked, on its own thread. The first signal runs
// `on_first` with its number; a second signal ends the process at once. If SIGHUP is blocked, each
// one runs `on_hangup`.
class SignalWatcher {
 public:
  explicit SignalWatcher(
      std::function<void(int)> on_first, std::function<void()> on_hangup = [] {});
  ~SignalWatcher();

  SignalWatcher(const SignalWatcher&) = delete;
  SignalWatcher& operator=(const SignalWatcher&) = delete;

 private:
  std::thread thread_;
};

// Lets a command show what it has finished when SIGINT or SIGTERM arrives. Must be constructed
// before any other thread starts.
class Interruption {
 public:
  // Until Begin() is called, a signal prints `early` to standard error and ends the process.
  explicit Interruption(std::string early);

  // From now on, the first signal only sets signal(); a second one ends the process.
  void Begin() { begun_ = true; }
  // Returns the number of the signal that arrived after Begin(), or 0. Thread-safe.
  int signal() const { return signal_; }
  // Returns the exit status that shells give a process which the signal ended, or 0.
  int exit_status() const { return signal_ == 0 ? 0 : 128 + signal_; }

 private:
  void On(int signal);

  const std::string early_;
  std::atomic<bool> begun_{false};
  std::atomic<int> signal_{0};
  SignalWatcher watcher_;  // the last member: its thread uses the others
};

}  // namespace moeserve::server
