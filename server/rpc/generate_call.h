// One running Generate call.
#pragma once

#include <grpcpp/alarm.h>
#include <grpcpp/support/server_callback.h>

#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "moeserve/v1/moeserve.pb.h"
#include "server/generation/generation.h"
#include "server/generation/submission.h"
#include "server/rpc/call.h"
#include "server/rpc/dispatcher.h"
#include "server/rpc/messages.h"

namespace moeserve::server::rpc {

// Keeps itself alive until gRPC is done with it. At most one write is outstanding.
class GenerateCall final : public grpc::ServerWriteReactor<v1::GenerateResponse>,
                           public std::enable_shared_from_this<GenerateCall> {
 public:
  // Always gives a reactor; a refused request is one that has finished already.
  static GenerateCall* Start(grpc::CallbackServerContext* context,
                             const v1::GenerateRequest& request, ServerContext& server,
                             Dispatcher& dispatcher);

  GenerateCall(grpc::CallbackServerContext* context, ServerContext& server);

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  using EventQueue = std::shared_ptr<Dispatcher::Queue>;

  // Reads the request and launches it, here or, where a constraint has to be compiled, on the pool.
  absl::Status Submit(const v1::GenerateRequest& request, const EventQueue& queue);
  absl::Status Launch(const CompletionParams& params, const EventQueue& queue);
  void Fail(const absl::Status& status);  // before anything was generated
  // Writes or finishes if there is something to write or to finish.
  void Advance();
  absl::Status Collect();  // with mutex_
  v1::GenerateResponse NewMessage(int choice);
  // Puts messages with the first routes of `record` into ready_; what is left fits into the message
  // that follows them.
  RoutingRecord SendRoutesAhead(int choice, const RoutingRecord& record);
  void End(const absl::Status& status);
  void WatchForStall();  // with mutex_

  grpc::CallbackServerContext* const context_;
  ServerContext& server_;
  Call call_;
  std::shared_ptr<GenerateCall> self_;
  std::unique_ptr<Submission> submission_;  // null: the request was refused when it was read
  std::vector<bool> opened_;                // by choice: its first message was made
  grpc::Alarm stall_alarm_;

  std::mutex mutex_;  // guards what follows
  std::unique_ptr<Generation> generation_;
  std::deque<v1::GenerateResponse> ready_;
  v1::GenerateResponse writing_message_;
  absl::Status failure_;  // to be reported after what is ready
  uint64_t writes_ = 0;
  bool writing_ = false;
  bool ended_ = false;
  bool alarm_set_ = false;
};

}  // namespace moeserve::server::rpc
