// Implements the service of proto/moeserve/v1/moeserve.proto.
#pragma once

#include "moeserve/v1/moeserve.grpc.pb.h"
#include "server/context.h"
#include "server/rpc/dispatcher.h"

namespace moeserve::server::rpc {

class InferenceService final : public v1::Inference::CallbackService {
 public:
  // `server` and `dispatcher` must outlive the service and every call.
  InferenceService(ServerContext& server, Dispatcher& dispatcher)
      : server_(server), dispatcher_(dispatcher) {}

  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(
      grpc::CallbackServerContext* context, const v1::GenerateRequest* request) override;
  grpc::ServerUnaryReactor* Score(grpc::CallbackServerContext* context,
                                  const v1::ScoreRequest* request,
                                  v1::ScoreResponse* response) override;
  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context,
                                     const v1::TokenizeRequest* request,
                                     v1::TokenizeResponse* response) override;
  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context,
                                       const v1::DetokenizeRequest* request,
                                       v1::DetokenizeResponse* response) override;
  grpc::ServerUnaryReactor* GetExpertStats(grpc::CallbackServerContext* context,
                                           const v1::GetExpertStatsRequest* request,
                                           v1::GetExpertStatsResponse* response) override;
  grpc::ServerUnaryReactor* GetModelInfo(grpc::CallbackServerContext* context,
                                         const v1::GetModelInfoRequest* request,
                                         v1::GetModelInfoResponse* response) override;

 private:
  ServerContext& server_;
  Dispatcher& dispatcher_;
};

}  // namespace moeserve::server::rpc
