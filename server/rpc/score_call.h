// One running Score call.
#pragma once

#include <grpcpp/support/server_callback.h>

#include <memory>
#include <mutex>

#include "moeserve/v1/moeserve.pb.h"
#include "server/generation/generation.h"
#include "server/generation/submission.h"
#include "server/rpc/call.h"
#include "server/rpc/dispatcher.h"

namespace moeserve::server::rpc {

// Keeps itself alive until OnDone().
class ScoreCall final : public grpc::ServerUnaryReactor,
                        public std::enable_shared_from_this<ScoreCall> {
 public:
  // `response` must live until OnDone().
  static ScoreCall* Start(grpc::CallbackServerContext* context, const v1::ScoreRequest& request,
                          v1::ScoreResponse* response, ServerContext& server,
                          Dispatcher& dispatcher);

  ScoreCall(grpc::CallbackServerContext* context, v1::ScoreResponse* response,
            ServerContext& server);

  void OnCancel() override;
  void OnDone() override;

 private:
  absl::Status Submit(const v1::ScoreRequest& request, Dispatcher& dispatcher);
  void Advance();
  absl::Status Take(const OutputDelta& delta);  // requires mutex_
  void EndOnce(const absl::Status& status);

  v1::ScoreResponse* const response_;
  ServerContext& server_;
  Call call_;
  std::shared_ptr<ScoreCall> self_;
  std::unique_ptr<Submission> submission_;  // null if the request was refused when it was read

  std::mutex mutex_;  // guards the members below
  std::unique_ptr<Generation> generation_;
  bool ended_ = false;
};

}  // namespace moeserve::server::rpc
