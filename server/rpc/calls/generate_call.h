// One running Generate call.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "moeserve/v1/moeserve.pb.h"
#include "server/generation/generation.h"
#include "server/generation/submission.h"
#include "server/rpc/calls/single_request.h"
#include "server/rpc/calls/stall_alarm.h"
#include "server/rpc/dispatcher.h"
#include "server/rpc/messages/messages.h"

namespace moeserve::server::rpc {

// At most one write is in progress.
class GenerateCall final : public SingleRequestCall<v1::GenerateRequest>,
                           public std::enable_shared_from_this<GenerateCall> {
 public:
  GenerateCall(grpc::GenericCallbackServerContext* context, ServerContext& server,
               Dispatcher& dispatcher);

  // Starts the next write or finishes the call, if either is possible.
  void Advance();

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  // Reads the request and starts it. If its constraint must be compiled first, the work pool
  // compiles the constraint and starts the request.
  absl::Status Run(const v1::GenerateRequest& request) override;
  absl::Status Launch(const CompletionParams& params);
  void Refuse(const absl::Status& status) override;  // ends a call that does not generate yet
  absl::Status Collect() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  v1::GenerateResponse NewMessage(int choice);
  // Splits a large routing record, of the source or of the other tokens: queues messages with its
  // first routes and returns the remaining routes, which fit into the next message.
  RoutingRecord SendRoutesAhead(int choice, const RoutingRecord& record, bool of_source)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End(const absl::Status& status);

  ServerContext& server_;
  const std::shared_ptr<Dispatcher::Queue> queue_;
  std::unique_ptr<Submission> submission_;  // null if the request was refused when it was read
  std::vector<bool> opened_;                // per choice: whether its first message was queued
  grpc::ByteBuffer writing_bytes_;          // gRPC reads them during a write
  StallAlarm stall_alarm_;

  Mutex mutex_;
  std::unique_ptr<Generation> generation_ ABSL_GUARDED_BY(mutex_);
  std::deque<v1::GenerateResponse> ready_ ABSL_GUARDED_BY(mutex_);
  MemoryCharge charge_ ABSL_GUARDED_BY(mutex_);   // of the messages collected last
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);  // reported after the messages in ready_
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace moeserve::server::rpc
