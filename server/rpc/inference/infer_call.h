// One running ModelInfer call.
#pragma once

#include <memory>

#include "base/mutex.h"
#include "inference/grpc_predict_v2.pb.h"
#include "server/open_inference/infer_run.h"
#include "server/rpc/calls/single_request.h"
#include "server/rpc/dispatcher.h"

namespace moeserve::server::rpc {

class InferCall final
    : public UnaryCall<inference::ModelInferRequest, inference::ModelInferResponse>,
      public std::enable_shared_from_this<InferCall> {
 public:
  InferCall(grpc::GenericCallbackServerContext* context, ServerContext& server,
            Dispatcher& dispatcher);

  void Advance();  // takes what the engine has computed
  void OnDone() override;

 private:
  absl::Status Run(const inference::ModelInferRequest& request) override;
  void Cancel() override;
  absl::Status Launch();

  ServerContext& server_;
  const std::shared_ptr<Dispatcher::Queue> queue_;
  bool raw_ = false;  // whether the elements are sent as bytes

  // Null if the request was refused when it was read. Used without a lock by the thread that starts
  // the request, then, when launched_ is set, only with the lock.
  std::unique_ptr<InferRun> run_;

  Mutex mutex_;
  bool launched_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;  // whether the client waits no longer
};

}  // namespace moeserve::server::rpc
