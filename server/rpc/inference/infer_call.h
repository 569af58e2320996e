// One running ModelInfer call.
#pragma once

#include <grpcpp/support/server_callback.h>

#include <memory>
#include <mutex>

#include "inference/grpc_predict_v2.pb.h"
#include "server/open_inference/infer_run.h"
#include "server/rpc/call.h"
#include "server/rpc/dispatcher.h"

namespace moeserve::server::rpc {

// Keeps itself alive until OnDone().
class InferCall final : public grpc::ServerUnaryReactor,
                        public std::enable_shared_from_this<InferCall> {
 public:
  // `response` must live until OnDone().
  static InferCall* Start(grpc::CallbackServerContext* context,
                          const inference::ModelInferRequest& request,
                          inference::ModelInferResponse* response, ServerContext& server,
                          Dispatcher& dispatcher);

  InferCall(grpc::CallbackServerContext* context, bool raw, inference::ModelInferResponse* response,
            ServerContext& server);

  void OnCancel() override;
  void OnDone() override;

 private:
  using EventQueue = std::shared_ptr<Dispatcher::Queue>;

  absl::Status Submit(const inference::ModelInferRequest& request, const EventQueue& queue);
  absl::Status Launch(const EventQueue& queue);
  void Advance();
  void EndOnce(const absl::Status& status);

  const bool raw_;  // whether the elements are sent as bytes
  inference::ModelInferResponse* const response_;
  ServerContext& server_;
  Call call_;
  std::shared_ptr<InferCall> self_;

  std::mutex mutex_;               // guards the members below
  std::unique_ptr<InferRun> run_;  // null if the request was refused when it was read
  bool launched_ = false;
  bool ended_ = false;
};

}  // namespace moeserve::server::rpc
