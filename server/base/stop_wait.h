// How a thread waits that may be asked to stop.
#pragma once

#include <chrono>
#include <condition_variable>
#include <stop_token>

#include "base/mutex.h"

namespace moeserve::server {

// Waits for `time`, or until a stop is requested. Returns whether none is.
inline bool WaitUnlessStopped(const std::stop_token& stop, std::chrono::nanoseconds time) {
  Mutex mutex;
  std::condition_variable_any never;
  MutexLock lock(mutex);
  never.wait_for(lock, stop, time, [] { return false; });
  return !stop.stop_requested();
}

}  // namespace moeserve::server
