#include "server/rpc/inference/inference_service.h"

#include <string>
#include <utility>

#include "base/message.h"
#include "server/base/api_error.h"
#include "server/base/version.h"
#include "server/open_inference/description.h"
#include "server/open_inference/infer_json.h"
#include "server/rpc/inference/infer_call.h"
#include "server/rpc/inference/infer_messages.h"
#include "server/rpc/unary.h"

namespace moeserve::server::rpc {
namespace {

// Loads a model and then finishes the call. If the client leaves, the model is loaded nevertheless.
class LoadCall final : public grpc::ServerUnaryReactor,
                       public std::enable_shared_from_this<LoadCall> {
 public:
  LoadCall(grpc::CallbackServerContext* context, ServerContext& server,
           inference::RepositoryModelLoadResponse* response)
      : server_(server), call_(context, server, kRepositoryModelLoad), response_(response) {}

  static LoadCall* Start(grpc::CallbackServerContext* context, ServerContext& server,
                         const inference::RepositoryModelLoadRequest& request,
                         inference::RepositoryModelLoadResponse* response) {
    auto call = std::make_shared<LoadCall>(context, server, response);
    call->self_ = call;
    if (const absl::Status status = call->Begin(request); !status.ok()) call->EndOnce(status);
    return call.get();
  }

  void OnCancel() override { EndOnce(call_.CancelReason()); }
  void OnDone() override { self_.reset(); }

 private:
  absl::Status Begin(const inference::RepositoryModelLoadRequest& request);

  void EndOnce(const absl::Status& status) {
    {
      std::lock_guard lock(mutex_);
      if (ended_) return;
      ended_ = true;
      if (status.ok()) {
        response_->set_model_name(model_);
        response_->set_is_loaded(true);
      }
    }
    Finish(call_.End(status));
  }

  ServerContext& server_;
  Call call_;
  inference::RepositoryModelLoadResponse* const response_;
  std::shared_ptr<LoadCall> self_;
  std::string model_;
  std::mutex mutex_;
  bool ended_ = false;
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

absl::Status LoadCall::Begin(const inference::RepositoryModelLoadRequest& request) {
  MOESERVE_RETURN_IF_ERROR(call_.Check());
  MOESERVE_ASSIGN_OR_RETURN(model_, ModelName(request));
  std::string path;
  for (const auto& [name, parameter] : request.parameters()) {
    if (name != "path") {
      return InvalidValue("parameters", Concat("'parameters': only 'path' is supported, found '",
                                               Printable(name, 64), "'"));
    }
    path = parameter.string_param();
  }
  MOESERVE_ASSIGN_OR_RETURN(ModelManager * manager,
                            server_.ModelManagerFor(model_, call_.key().get()));
  manager->Load(model_, path, [self = shared_from_this()](const Result<ModelStatus>& result) {
    self->EndOnce(result.status());
  });
  return absl::OkStatus();
}

}  // namespace

void OpenInferenceService::Drain() {
  std::vector<std::weak_ptr<InferStream>> streams;
  {
    std::lock_guard lock(mutex_);
    streams = streams_;
  }
  for (const auto& weak : streams) {
    if (const auto stream = weak.lock()) stream->Drain();
  }
}

grpc::ServerUnaryReactor* OpenInferenceService::ServerLive(
    grpc::CallbackServerContext* context, const inference::ServerLiveRequest*,
    inference::ServerLiveResponse* response) {
  return Immediately(context, server_, kServerLive, [&](const ApiKey*) {
    response->set_live(server_.EngineStatus().ok());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* OpenInferenceService::ServerReady(
    grpc::CallbackServerContext* context, const inference::ServerReadyRequest*,
    inference::ServerReadyResponse* response) {
  return Immediately(context, server_, kServerReady, [&](const ApiKey*) {
    response->set_ready(server_.CheckServing().ok() && server_.EngineStatus().ok());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* OpenInferenceService::ModelReady(
    grpc::CallbackServerContext* context, const inference::ModelReadyRequest* request,
    inference::ModelReadyResponse* response) {
  return Immediately(context, server_, kModelReady, [&](const ApiKey* key) -> absl::Status {
    const auto model = server_.ModelFor(request->name(), key);
    const bool known = !absl::IsNotFound(model.status());
    if (!known || absl::IsPermissionDenied(model.status())) return model.status();
    response->set_ready(model.ok() && CheckVersion(**model, request->version()).ok());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* OpenInferenceService::ServerMetadata(
    grpc::CallbackServerContext* context, const inference::ServerMetadataRequest*,
    inference::ServerMetadataResponse* response) {
  return Immediately(context, server_, kServerMetadata, [&](const ApiKey*) {
    response->set_name(std::string(kInferPlatform));
    response->set_version(std::string(kVersion));
    for (const std::string_view extension : kInferExtensions) {
      // "generate" exists over HTTP only.
      if (extension != "generate") response->add_extensions(std::string(extension));
    }
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* OpenInferenceService::ModelMetadata(
    grpc::CallbackServerContext* context, const inference::ModelMetadataRequest* request,
    inference::ModelMetadataResponse* response) {
  return Immediately(context, server_, kModelMetadata, [&](const ApiKey* key) -> absl::Status {
    MOESERVE_ASSIGN_OR_RETURN(const auto model, server_.LoadedModelFor(request->name(), key));
    MOESERVE_RETURN_IF_ERROR(CheckVersion(*model, request->version()));
    MOESERVE_ASSIGN_OR_RETURN(const ModelStatus status, server_.models().Status(model->name()));
    Fill(status, request->name().empty() ? model->name() : request->name(), *response);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* OpenInferenceService::ModelInfer(
    grpc::CallbackServerContext* context, const inference::ModelInferRequest* request,
    inference::ModelInferResponse* response) {
  return InferCall::Start(context, *request, response, server_, dispatcher_);
}

grpc::ServerBidiReactor<inference::ModelInferRequest, inference::ModelStreamInferResponse>*
OpenInferenceService::ModelStreamInfer(grpc::CallbackServerContext* context) {
  const std::shared_ptr<InferStream> stream = InferStream::Start(context, server_, dispatcher_);
  std::lock_guard lock(mutex_);
  std::erase_if(streams_, [](const auto& weak) { return weak.expired(); });
  streams_.push_back(stream);
  return stream.get();
}

grpc::ServerUnaryReactor* OpenInferenceService::RepositoryIndex(
    grpc::CallbackServerContext* context, const inference::RepositoryIndexRequest* request,
    inference::RepositoryIndexResponse* response) {
  return Immediately(context, server_, kRepositoryIndex, [&](const ApiKey* key) -> absl::Status {
    if (!request->repository_name().empty()) {
      return InvalidValue("repository_name",
                          "'repository_name' must be empty: there is one repository");
    }
    for (const ModelStatus& model : server_.models().List()) {
      if (request->ready() && model.state != ModelState::kReady) continue;
      if (key != nullptr && !key->MayUseModel(model.name)) continue;
      auto& entry = *response->add_models();
      entry.set_name(model.name);
      if (model.version > 0) entry.set_version(std::to_string(model.version));
      entry.set_state(std::string(RepositoryState(model)));
      if (!model.error.ok()) entry.set_reason(std::string(kLoadFailed));
    }
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* OpenInferenceService::RepositoryModelLoad(
    grpc::CallbackServerContext* context, const inference::RepositoryModelLoadRequest* request,
    inference::RepositoryModelLoadResponse* response) {
  return LoadCall::Start(context, server_, *request, response);
}

grpc::ServerUnaryReactor* OpenInferenceService::RepositoryModelUnload(
    grpc::CallbackServerContext* context, const inference::RepositoryModelUnloadRequest* request,
    inference::RepositoryModelUnloadResponse* response) {
  return Immediately(
      context, server_, kRepositoryModelUnload, [&](const ApiKey* key) -> absl::Status {
        MOESERVE_ASSIGN_OR_RETURN(const std::string model, ModelName(*request));
        MOESERVE_ASSIGN_OR_RETURN(ModelManager * manager, server_.ModelManagerFor(model, key));
        MOESERVE_RETURN_IF_ERROR(manager->Unload(model));
        response->set_model_name(model);
        response->set_is_unloaded(true);
        return absl::OkStatus();
      });
}

}  // namespace moeserve::server::rpc
