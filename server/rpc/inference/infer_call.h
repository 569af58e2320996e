// One running ModelInfer call.
#pragma once

#include <memory>
#include <mutex>

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

  void OnDone() override;

 private:
  absl::Status Run(const inference::ModelInferRequest& request) override;
  void Cancel() override;
  absl::Status Launch();
  void Advance();

  ServerContext& server_;
  const std::shared_ptr<Dispatcher::Queue> queue_;
  bool raw_ = false;  // whether the elements are sent as bytes

  std::mutex mutex_;               // guards the members below
  std::unique_ptr<InferRun> run_;  // null if the request was refused when it was read
  bool launched_ = false;
  bool done_ = false;  // whether the client waits no longer
};

}  // namespace moeserve::server::rpc
