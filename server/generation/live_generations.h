// The output queues of all generations that run, so that they can be ended without the engine.
#pragma once

#include <memory>
#include <unordered_map>

#include "absl/status/status.h"
#include "base/mutex.h"

namespace moeserve::server {

class EventChannel;

// Thread-safe.
class LiveGenerations {
 public:
  // Adds a generation's queue, which must be removed before it is destroyed. While the registry is
  // closed, the queue is ended at once.
  void Add(const std::shared_ptr<EventChannel>& channel);
  void Remove(const EventChannel* channel);

  // Ends every queue with `error`, and those that are added later, until Open() is called. What the
  // engine still sends to an ended queue is dropped.
  void Close(const absl::Status& error);
  void Open();

  // Returns the error of Close(); OK while the registry is open.
  absl::Status status() const;

 private:
  mutable Mutex mutex_;
  absl::Status error_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<const EventChannel*, std::weak_ptr<EventChannel>> channels_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace moeserve::server
