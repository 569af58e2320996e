// Ends calls whose client does not take what the server writes.
#pragma once

#include <grpcpp/alarm.h>
#include <grpcpp/server_context.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "base/mutex.h"
#include "server/context.h"
#include "server/rpc/grpc_time.h"

namespace moeserve::server::rpc {

// A member of the call. Thread-safe.
class StallAlarm {
 public:
  // `context` must be valid until Cancel().
  StallAlarm(grpc::ServerContextBase* context, const ServerContext& server)
      : context_(context), limit_(server.settings().http.write_stall_timeout) {}

  // Learns that a write has begun or ended.
  void Progress() {
    MutexLock lock(mutex_);
    ++steps_;
  }

  // Cancels the call if the write that is in progress does not end within the limit. Does nothing
  // while an earlier write is watched.
  void Watch(std::weak_ptr<void> call) {
    MutexLock lock(mutex_);
    if (std::exchange(set_, true)) return;
    // The alarm keeps its callback, so a strong reference would keep the call alive.
    alarm_.Set(GrpcDeadline(limit_), [this, call = std::move(call), step = steps_](bool fired) {
      const auto self = call.lock();
      if (!fired || self == nullptr) return;
      MutexLock lock(mutex_);
      set_ = false;
      if (steps_ == step) context_->TryCancel();
    });
  }

  // Must be called when the call is done.
  void Cancel() {
    Progress();
    alarm_.Cancel();
  }

 private:
  grpc::ServerContextBase* const context_;
  const absl::Duration limit_;
  Mutex mutex_;
  uint64_t steps_ ABSL_GUARDED_BY(mutex_) = 0;
  bool set_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Alarm alarm_;
};

}  // namespace moeserve::server::rpc
