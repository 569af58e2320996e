#include "server/process/signals.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <ctime>
#include <utility>

namespace moeserve::server {
namespace {

sigset_t TerminationSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  return set;
}

}  // namespace

void BlockTerminationSignals() {
  const sigset_t set = TerminationSignals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

void BlockHangup() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

void IgnoreBrokenPipes() { signal(SIGPIPE, SIG_IGN); }

SignalWatcher::SignalWatcher(std::function<void()> on_first, std::function<void()> on_hangup)
    : thread_(
          [on_first = std::move(on_first), on_hangup = std::move(on_hangup)](std::stop_token stop) {
            sigset_t set = TerminationSignals();
            // Waiting for a signal that is not blocked has no defined effect.
            sigset_t blocked;
            pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
            if (sigismember(&blocked, SIGHUP) == 1) sigaddset(&set, SIGHUP);
            const timespec pause{0, 100'000'000};
            bool first = true;
            while (!stop.stop_requested()) {
              const int signal = sigtimedwait(&set, nullptr, &pause);
              if (signal <= 0) continue;
              if (signal == SIGHUP) {
                on_hangup();
                continue;
              }
              if (!first) _exit(128 + signal);
              first = false;
              on_first();
            }
          }) {}

SignalWatcher::~SignalWatcher() = default;

}  // namespace moeserve::server
