#include "server/rpc/inference/inference_service.h"

#include <string>
#include <utility>

#include "base/error_text.h"
#include "server/base/api_error.h"
#include "server/base/version.h"
#include "server/open_inference/description.h"
#include "server/open_inference/infer_json.h"
#include "server/rpc/calls/single_request.h"
#include "server/rpc/inference/infer_call.h"
#include "server/rpc/inference/infer_messages.h"

namespace moeserve::server::rpc {
namespace {

// Loads a model and then finishes the call. If the client leaves, the model is loaded nevertheless.
class LoadCall final : public UnaryCall<inference::RepositoryModelLoadRequest,
                                        inference::RepositoryModelLoadResponse>,
                       public std::enable_shared_from_this<LoadCall> {
 public:
  LoadCall(grpc::GenericCallbackServerContext* context, ServerContext& server)
      : UnaryCall(context, server, kRepositoryModelLoad), server_(server) {}

 private:
  absl::Status Run(const inference::RepositoryModelLoadRequest& request) override;

  ServerContext& server_;
};

// Triton's clients send the name in model_name, KServe's in the field of repository_name.
template <typename Request>
Result<std::string> ModelName(const Request& request) {
  if (request.model_name().empty()) {
    if (request.repository_name().empty()) return MissingField("model_name");
    return request.repository_name();
  }
  if (!request.repository_name().empty()) {
    return InvalidValue("repository_name",
                        "'repository_name' must be empty: there is one repository");
  }
  return request.model_name();
}

absl::Status LoadCall::Run(const inference::RepositoryModelLoadRequest& request) {
  MOESERVE_ASSIGN_OR_RETURN(const std::string model, ModelName(request));
  std::string path;
  for (const auto& [name, parameter] : request.parameters()) {
    if (name != "path") {
      return InvalidValue("parameters", Concat("'parameters': only 'path' is supported, found '",
                                               Printable(name, 64), "'"));
    }
    path = parameter.string_param();
  }
  MOESERVE_ASSIGN_OR_RETURN(ModelManager * manager,
                            server_.ModelManagerFor(model, call().key().get()));
  response().set_model_name(model);
  response().set_is_loaded(true);
  manager->Load(model, path, [self = shared_from_this()](const Result<ModelStatus>& result) {
    self->EndOnce(result.status());
  });
  return absl::OkStatus();
}

absl::Status ServerLive(ServerContext& server, const ApiKey*, const inference::ServerLiveRequest&,
                        inference::ServerLiveResponse& response) {
  response.set_live(server.EngineStatus().ok());
  return absl::OkStatus();
}

absl::Status ServerReady(ServerContext& server, const ApiKey*, const inference::ServerReadyRequest&,
                         inference::ServerReadyResponse& response) {
  response.set_ready(server.CheckServing().ok() && server.EngineStatus().ok());
  return absl::OkStatus();
}

absl::Status ModelReady(ServerContext& server, const ApiKey* key,
                        const inference::ModelReadyRequest& request,
                        inference::ModelReadyResponse& response) {
  const auto model = server.ModelFor(request.name(), key);
  const bool known = !absl::IsNotFound(model.status());
  if (!known || absl::IsPermissionDenied(model.status())) return model.status();
  response.set_ready(model.ok() && CheckVersion(**model, request.version()).ok());
  return absl::OkStatus();
}

absl::Status ServerMetadata(ServerContext&, const ApiKey*, const inference::ServerMetadataRequest&,
                            inference::ServerMetadataResponse& response) {
  response.set_name(std::string(kInferPlatform));
  response.set_version(std::string(kVersion));
  for (const std::string_view extension : kInferExtensions) {
    // "generate" exists over HTTP only.
    if (extension != "generate") response.add_extensions(std::string(extension));
  }
  return absl::OkStatus();
}

absl::Status ModelMetadata(ServerContext& server, const ApiKey* key,
                           const inference::ModelMetadataRequest& request,
                           inference::ModelMetadataResponse& response) {
  MOESERVE_ASSIGN_OR_RETURN(const auto model, server.LoadedModelFor(request.name(), key));
  MOESERVE_RETURN_IF_ERROR(CheckVersion(*model, request.version()));
  MOESERVE_ASSIGN_OR_RETURN(const ModelStatus status, server.models().Status(model->name()));
  Fill(status, request.name().empty() ? model->name() : request.name(),
       InferKindOf(model->engine().spec()), response);
  return absl::OkStatus();
}

absl::Status RepositoryIndex(ServerContext& server, const ApiKey* key,
                             const inference::RepositoryIndexRequest& request,
                             inference::RepositoryIndexResponse& response) {
  if (!request.repository_name().empty()) {
    return InvalidValue("repository_name",
                        "'repository_name' must be empty: there is one repository");
  }
  for (const ModelStatus& model : server.models().List()) {
    if (request.ready() && model.state != ModelState::kReady) continue;
    if (key != nullptr && !key->MayUseModel(model.name)) continue;
    auto& entry = *response.add_models();
    entry.set_name(model.name);
    if (model.version > 0) entry.set_version(std::to_string(model.version));
    entry.set_state(std::string(RepositoryState(model)));
    if (!model.error.ok()) entry.set_reason(std::string(kLoadFailed));
  }
  return absl::OkStatus();
}

absl::Status RepositoryModelUnload(ServerContext& server, const ApiKey* key,
                                   const inference::RepositoryModelUnloadRequest& request,
                                   inference::RepositoryModelUnloadResponse& response) {
  MOESERVE_ASSIGN_OR_RETURN(const std::string model, ModelName(request));
  MOESERVE_ASSIGN_OR_RETURN(ModelManager * manager, server.ModelManagerFor(model, key));
  MOESERVE_RETURN_IF_ERROR(manager->Unload(model));
  response.set_model_name(model);
  response.set_is_unloaded(true);
  return absl::OkStatus();
}

}  // namespace

OpenInferenceService::OpenInferenceService(Router& router, ServerContext& server,
                                           Dispatcher& dispatcher)
    : server_(server), dispatcher_(dispatcher) {
  router.Add(kModelInfer, [&](grpc::GenericCallbackServerContext* context) {
    return InferCall::Start<InferCall>(context, server, dispatcher);
  });
  router.Add(kModelStreamInfer,
             [this](grpc::GenericCallbackServerContext* context) { return StartStream(context); });
  router.Add(kRepositoryModelLoad, [&](grpc::GenericCallbackServerContext* context) {
    return LoadCall::Start<LoadCall>(context, server);
  });
  router.AddImmediate(kServerLive, ServerLive);
  router.AddImmediate(kServerReady, ServerReady);
  router.AddImmediate(kModelReady, ModelReady);
  router.AddImmediate(kServerMetadata, ServerMetadata);
  router.AddImmediate(kModelMetadata, ModelMetadata);
  router.AddImmediate(kRepositoryIndex, RepositoryIndex);
  router.AddImmediate(kRepositoryModelUnload, RepositoryModelUnload);
}

void OpenInferenceService::Drain() {
  std::vector<std::weak_ptr<InferStream>> streams;
  {
    MutexLock lock(mutex_);
    streams = streams_;
  }
  for (const auto& weak : streams) {
    if (const auto stream = weak.lock()) stream->Drain();
  }
}

InferStream* OpenInferenceService::StartStream(grpc::GenericCallbackServerContext* context) {
  const std::shared_ptr<InferStream> stream = InferStream::Start(context, server_, dispatcher_);
  MutexLock lock(mutex_);
  std::erase_if(streams_, [](const auto& weak) { return weak.expired(); });
  streams_.push_back(stream);
  return stream.get();
}

}  // namespace moeserve::server::rpc
