// A mutex whose use clang checks (-Wthread-safety). Members that it guards are declared with
// ABSL_GUARDED_BY(mutex), functions that need it locked with ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex).
#pragma once

#include <mutex>

#include "absl/base/thread_annotations.h"

namespace moeserve {

// std::mutex with the attributes that clang needs.
class ABSL_LOCKABLE Mutex {
 private:
  friend class MutexLock;
  std::mutex mutex_;
};

// Holds a mutex. std::condition_variable and std::condition_variable_any can wait with it; their
// predicates need ABSL_EXCLUSIVE_LOCKS_REQUIRED.
class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex) : lock_(mutex.mutex_) {}
  ~MutexLock() ABSL_UNLOCK_FUNCTION() = default;
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { lock_.lock(); }
  void unlock() ABSL_UNLOCK_FUNCTION() { lock_.unlock(); }
  // For std::condition_variable.
  operator std::unique_lock<std::mutex>&() { return lock_; }

 private:
  std::unique_lock<std::mutex> lock_;
};

}  // namespace moeserve
