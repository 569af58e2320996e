#include "server/rpc/server.h"

#include <google/protobuf/stubs/logging.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/resource_quota.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "base/check.h"
#include "base/error_text.h"
#include "inference/grpc_predict_v2.pb.h"
#include "moeserve/v1/moeserve.pb.h"
#include "server/rpc/dispatcher.h"
#include "server/rpc/grpc_time.h"
#include "server/rpc/health.h"
#include "server/rpc/http2/connection_gate.h"
#include "server/rpc/inference/inference_service.h"
#include "server/rpc/messages/message_bytes.h"
#include "server/rpc/methods.h"
#include "server/rpc/reflection.h"
#include "server/rpc/router.h"
#include "server/rpc/service.h"

namespace moeserve::server::rpc {
namespace {

constexpr size_t kMemoryQuotaBytes = size_t{1} << 30;
// Time for clients to take what gRPC has sent before it closed their connections.
constexpr std::chrono::milliseconds kLastBytesTimeout{1000};

bool HasRights(const google::protobuf::MethodDescriptor& method) {
  return std::any_of(std::begin(kMethods), std::end(kMethods), [&](const Method* row) {
    return row->service == method.service()->full_name() && row->name == method.name() &&
           !row->scopes.empty();
  });
}

void SetLimits(grpc::ServerBuilder& builder) {
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.SetMaxSendMessageSize(4 * kMaxMessageBytes);
  grpc::ResourceQuota quota("moeserve");
  quota.Resize(kMemoryQuotaBytes);
  builder.SetResourceQuota(quota);
  const auto set = [&](const char* name, int value) { builder.AddChannelArgument(name, value); };
  constexpr int kSecond = 1000;
  constexpr int kMinute = 60 * kSecond;
  set(GRPC_ARG_KEEPALIVE_TIME_MS, kMinute);
  set(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20 * kSecond);
  set(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  set(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 30 * kSecond);
  set(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 2);
  set(GRPC_ARG_MAX_CONNECTION_AGE_MS, 30 * kMinute);
  set(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS, 10 * kMinute);
  set(GRPC_ARG_MAX_CONCURRENT_STREAMS, static_cast<int>(FrameLimits().max_streams));
  set(GRPC_ARG_MAX_METADATA_SIZE, 16 << 10);
  // Otherwise gRPC enlarges its windows as it likes, and the frame guard does not know what it
  // holds.
  set(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  set(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, static_cast<int>(FrameLimits().window_bytes));
  // ParseMessage() inflates messages.
  set(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
}

}  // namespace

class GrpcServer::Impl {
 public:
  explicit Impl(ServerContext& context)
      : context_(context),
        router_(context),
        health_(router_, context),
        open_inference_(router_, context, dispatcher_) {
    AddInference(router_, context, dispatcher_);
    Declare(*v1::GenerateRequest::descriptor()->file()->FindServiceByName("Inference"));
    Declare(*inference::ModelInferRequest::descriptor()->file()->FindServiceByName(
        "GRPCInferenceService"));
  }

  absl::Status Start(const GrpcServerOptions& options) {
    host_ =
        options.host.find(':') != std::string::npos ? Concat('[', options.host, ']') : options.host;
    ConnectionGateOptions gate;
    gate.host = options.host;
    gate.port = options.port;
    gate.max_connections = options.max_connections;
    gate.address_limit = options.address_limit;
    gate.tls = options.tls;
    gate.memory = context_.call_memory();
    MOESERVE_ASSIGN_OR_RETURN(
        gate_, ConnectionGate::Listen(gate, {.open = context_.metrics().grpc_connections,
                                             .dropped = context_.metrics().grpc_dropped,
                                             .over_limit = context_.metrics().grpc_over_limit}));
    // Protobuf would write a line for every string of a client that is not UTF-8.
    google::protobuf::SetLogHandler(nullptr);
    grpc::ServerBuilder builder;
    auto acceptor = builder.experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
        grpc::InsecureServerCredentials());
    SetLimits(builder);
    if (options.reflection) AddReflection(router_, context_);
    builder.RegisterCallbackGenericService(&router_);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) return absl::UnavailableError("the gRPC server does not start");
    SetServing(false);
    gate_->Start(std::move(acceptor));
    return absl::OkStatus();
  }

  void SetServing(bool serving) {
    health_.SetServing("", serving);
    health_.SetServing(std::string(kInference), serving);
    for (const ModelStatus& model : context_.models().List()) {
      const bool ready = serving && model.state == ModelState::kReady;
      health_.SetServing(Concat("model/", model.name), ready);
      for (const std::string& alias : model.aliases) {
        health_.SetServing(Concat("model/", alias), ready);
      }
    }
  }

  void Stop(absl::Duration grace) {
    if (server_ == nullptr || stopped_) return;
    stopped_ = true;
    gate_->Stop();
    open_inference_.Drain();
    health_.Shutdown();
    server_->Shutdown(GrpcDeadline(grace));
    server_->Wait();
    gate_->Close(kLastBytesTimeout);
  }

  std::string address() const { return Concat(host_, ':', port()); }
  int port() const { return gate_->port(); }

 private:
  void Declare(const google::protobuf::ServiceDescriptor& service) {
    for (int i = 0; i < service.method_count(); ++i) {
      const google::protobuf::MethodDescriptor& method = *service.method(i);
      context_.metrics().DeclareGrpc(method.name());
      MOESERVE_CHECK(HasRights(*service.method(i)), "every method has its row in kMethods");
      MOESERVE_CHECK(router_.Has({service.full_name(), service.method(i)->name(), {}}),
                     "every method has been added to the router");
    }
  }

  ServerContext& context_;
  // Declared before server_, so that the dispatcher outlives every call.
  Dispatcher dispatcher_;
  Router router_;
  HealthService health_;
  OpenInferenceService open_inference_;
  std::string host_;
  bool stopped_ = false;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<ConnectionGate> gate_;
};

GrpcServer::GrpcServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GrpcServer::~GrpcServer() { Stop(absl::ZeroDuration()); }

Result<std::unique_ptr<GrpcServer>> GrpcServer::Start(const GrpcServerOptions& options,
                                                      ServerContext& context) {
  auto impl = std::make_unique<Impl>(context);
  MOESERVE_RETURN_IF_ERROR(impl->Start(options));
  return std::unique_ptr<GrpcServer>(new GrpcServer(std::move(impl)));
}

std::string GrpcServer::address() const { return impl_->address(); }
int GrpcServer::port() const { return impl_->port(); }
void GrpcServer::SetServing(bool serving) { impl_->SetServing(serving); }
void GrpcServer::Stop(absl::Duration grace) { impl_->Stop(grace); }

}  // namespace moeserve::server::rpc
