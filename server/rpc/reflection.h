// Implements gRPC's reflection, v1 and v1alpha: clients such as grpcurl ask it for the interface of
// the server. gRPC's own plugin would answer without an API key.
#pragma once

#include "grpc/reflection/v1/reflection.grpc.pb.h"
#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "server/context.h"

namespace moeserve::server::rpc {

// `server` must outlive the services and every call.
class ReflectionV1Alpha final
    : public grpc::reflection::v1alpha::ServerReflection::CallbackService {
 public:
  explicit ReflectionV1Alpha(ServerContext& server) : server_(server) {}
  grpc::ServerBidiReactor<grpc::reflection::v1alpha::ServerReflectionRequest,
                          grpc::reflection::v1alpha::ServerReflectionResponse>*
  ServerReflectionInfo(grpc::CallbackServerContext* context) override;

 private:
  ServerContext& server_;
};

class ReflectionV1 final : public grpc::reflection::v1::ServerReflection::CallbackService {
 public:
  explicit ReflectionV1(ServerContext& server) : server_(server) {}
  grpc::ServerBidiReactor<grpc::reflection::v1::ServerReflectionRequest,
                          grpc::reflection::v1::ServerReflectionResponse>*
  ServerReflectionInfo(grpc::CallbackServerContext* context) override;

 private:
  ServerContext& server_;
};

}  // namespace moeserve::server::rpc
