// One running Score call.
#pragma once

#include <memory>

#include "base/mutex.h"
#include "moeserve/v1/moeserve.pb.h"
#include "server/generation/generation.h"
#include "server/generation/submission.h"
#include "server/rpc/calls/single_request.h"
#include "server/rpc/dispatcher.h"

namespace moeserve::server::rpc {

class ScoreCall final : public UnaryCall<v1::ScoreRequest, v1::ScoreResponse>,
                        public std::enable_shared_from_this<ScoreCall> {
 public:
  ScoreCall(grpc::GenericCallbackServerContext* context, ServerContext& server,
            Dispatcher& dispatcher);

  void Advance();  // takes what the engine has computed
  void OnDone() override;

 private:
  absl::Status Run(const v1::ScoreRequest& request) override;
  void Cancel() override;
  absl::Status Take(const OutputDelta& delta) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  ServerContext& server_;
  Dispatcher& dispatcher_;
  std::unique_ptr<Submission> submission_;  // null if the request was refused when it was read

  Mutex mutex_;
  std::unique_ptr<Generation> generation_ ABSL_GUARDED_BY(mutex_);
  bool done_ ABSL_GUARDED_BY(mutex_) = false;  // whether the client waits no longer
};

}  // namespace moeserve::server::rpc
