#include "server/generation/live_generations.h"

#include <vector>

#include "server/generation/generation.h"

namespace moeserve::server {

void LiveGenerations::Add(const std::shared_ptr<EventChannel>& channel) {
  absl::Status error;
  {
    MutexLock lock(mutex_);
    channels_.emplace(channel.get(), channel);
    error = error_;
  }
  if (!error.ok()) channel->End(error);
}

void LiveGenerations::Remove(const EventChannel* channel) {
  MutexLock lock(mutex_);
  channels_.erase(channel);
}

void LiveGenerations::Close(const absl::Status& error) {
  std::vector<std::shared_ptr<EventChannel>> live;
  {
    MutexLock lock(mutex_);
    error_ = error;
    for (const auto& [key, weak] : channels_) {
      if (auto channel = weak.lock()) live.push_back(std::move(channel));
    }
  }
  // Without the lock, because the consumers are woken here.
  for (const auto& channel : live) channel->End(error);
}

void LiveGenerations::Open() {
  MutexLock lock(mutex_);
  error_ = absl::OkStatus();
}

absl::Status LiveGenerations::status() const {
  MutexLock lock(mutex_);
  return error_;
}

}  // namespace moeserve::server
