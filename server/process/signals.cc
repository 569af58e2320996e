#include "server/process/signals.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
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

// Ends a SignalWatcher's thread. It is sent to that thread only, which blocks it.
int EndSignal() { return SIGRTMIN; }

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

void BlockDrainSignal() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR1);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

void IgnoreBrokenPipes() { signal(SIGPIPE, SIG_IGN); }

SignalWatcher::SignalWatcher(std::function<void(int)> on_first, std::function<void()> on_hangup) {
  // The new thread inherits the mask, so EndSignal() is blocked there before it can arrive.
  sigset_t end, old;
  sigemptyset(&end);
  sigaddset(&end, EndSignal());
  pthread_sigmask(SIG_BLOCK, &end, &old);
  thread_ = std::thread([on_first = std::move(on_first), on_hangup = std::move(on_hangup)] {
    sigset_t set = TerminationSignals();
    sigaddset(&set, EndSignal());
    // Waiting for a signal that is not blocked has no defined effect.
    sigset_t blocked;
    pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
    for (const int number : {SIGHUP, SIGUSR1}) {
      if (sigismember(&blocked, number) == 1) sigaddset(&set, number);
    }
    bool first = true;
    while (true) {
      const int signal = sigwaitinfo(&set, nullptr);
      if (signal == EndSignal()) return;
      if (signal <= 0) continue;
      if (signal == SIGHUP) {
        on_hangup();
        continue;
      }
      if (!first && signal == SIGUSR1) continue;
      if (!first) _exit(128 + signal);
      first = false;
      on_first(signal);
    }
  });
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
}

SignalWatcher::~SignalWatcher() {
  pthread_kill(thread_.native_handle(), EndSignal());
  thread_.join();
}

Interruption::Interruption(std::string early)
    : early_(std::move(early)),
      watcher_((BlockTerminationSignals(), [this](int signal) { On(signal); })) {}

void Interruption::On(int signal) {
  if (begun_) {
    signal_ = signal;
    return;
  }
  std::fprintf(stderr, "%s\n", early_.c_str());
  std::fflush(stderr);
  _exit(128 + signal);
}

}  // namespace moeserve::server
