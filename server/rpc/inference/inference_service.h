// Implements the service of proto/inference/grpc_predict_v2.proto, the Open Inference Protocol.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "inference/grpc_predict_v2.grpc.pb.h"
#include "server/context.h"
#include "server/rpc/dispatcher.h"
#include "server/rpc/inference/infer_stream.h"

namespace moeserve::server::rpc {

class OpenInferenceService final : public inference::GRPCInferenceService::CallbackService {
 public:
  // `server` and `dispatcher` must outlive the service and every call.
  OpenInferenceService(ServerContext& server, Dispatcher& dispatcher)
      : server_(server), dispatcher_(dispatcher) {}

  // Ends the streams that have no running request, and the others when they have none. The server
  // must be draining.
  void Drain();

  grpc::ServerUnaryReactor* ServerLive(grpc::CallbackServerContext* context,
                                       const inference::ServerLiveRequest* request,
                                       inference::ServerLiveResponse* response) override;
  grpc::ServerUnaryReactor* ServerReady(grpc::CallbackServerContext* context,
                                        const inference::ServerReadyRequest* request,
                                        inference::ServerReadyResponse* response) override;
  grpc::ServerUnaryReactor* ModelReady(grpc::CallbackServerContext* context,
                                       const inference::ModelReadyRequest* request,
                                       inference::ModelReadyResponse* response) override;
  grpc::ServerUnaryReactor* ServerMetadata(grpc::CallbackServerContext* context,
                                           const inference::ServerMetadataRequest* request,
                                           inference::ServerMetadataResponse* response) override;
  grpc::ServerUnaryReactor* ModelMetadata(grpc::CallbackServerContext* context,
                                          const inference::ModelMetadataRequest* request,
                                          inference::ModelMetadataResponse* response) override;
  grpc::ServerUnaryReactor* ModelInfer(grpc::CallbackServerContext* context,
                                       const inference::ModelInferRequest* request,
                                       inference::ModelInferResponse* response) override;
  grpc::ServerBidiReactor<inference::ModelInferRequest, inference::ModelStreamInferResponse>*
  ModelStreamInfer(grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* RepositoryIndex(grpc::CallbackServerContext* context,
                                            const inference::RepositoryIndexRequest* request,
                                            inference::RepositoryIndexResponse* response) override;
  grpc::ServerUnaryReactor* RepositoryModelLoad(
      grpc::CallbackServerContext* context, const inference::RepositoryModelLoadRequest* request,
      inference::RepositoryModelLoadResponse* response) override;
  grpc::ServerUnaryReactor* RepositoryModelUnload(
      grpc::CallbackServerContext* context, const inference::RepositoryModelUnloadRequest* request,
      inference::RepositoryModelUnloadResponse* response) override;

 private:
  ServerContext& server_;
  Dispatcher& dispatcher_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<InferStream>> streams_;  // also some that have ended
};

}  // namespace moeserve::server::rpc
