#include "server/http/routes/model_routes.h"

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "model_loaders/files/strict_json.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/http/error_response.h"
#include "server/openai/answer.h"

namespace moeserve::server::http {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxBodyBytes = 16 << 10;

Json StatusJson(const ModelStatus& model) {
  Json out;
  out["id"] = model.name;
  out["object"] = "model";
  out["aliases"] = model.aliases;
  out["state"] = Name(model.state);
  out["version"] = model.version;
  out["memory_bytes"] = model.memory_bytes;
  return out;
}

Response ToResponse(const Result<ModelStatus>& result) {
  if (!result.ok()) return ErrorResponse(result.status());
  Response response;
  response.body = DumpJson(StatusJson(*result));
  return response;
}

// Waits until a model is loaded. If the client leaves, the model is loaded nevertheless.
class LoadResponse final : public PendingResponse {
 public:
  struct Shared {
    std::mutex mutex;
    std::optional<Result<ModelStatus>> result;
  };

  explicit LoadResponse(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}

  Progress Next() override {
    std::lock_guard lock(shared_->mutex);
    if (!shared_->result) return Wait();
    return ToResponse(*shared_->result);
  }

 private:
  const std::shared_ptr<Shared> shared_;
};

struct Command {
  ModelManager* manager = nullptr;
  std::string model;
  std::string path;
};

Result<Command> ParseCommand(const Request& request, const ServerContext& context) {
  Command out;
  out.manager = context.model_manager();
  if (out.manager == nullptr) {
    return MakeError(absl::StatusCode::kInvalidArgument, "model_control_off",
                     "clients may not load models: start the server with --model-control or "
                     "--models-folder");
  }
  if (request.body.size() > kMaxBodyBytes) {
    return MakeError(absl::StatusCode::kResourceExhausted, "request_too_large",
                     "the body is too large");
  }
  JsonLimits limits;
  limits.max_depth = 4;
  auto body = ParseStrictJson(request.body, limits);
  if (!body.ok() || !body->is_object()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "invalid_json",
                     "the body must be a JSON object");
  }
  for (const auto& [name, value] : body->items()) {
    if (name != "model" && name != "path") {
      return InvalidValue("", "the body may have the fields 'model' and 'path' only");
    }
  }
  MOESERVE_ASSIGN_OR_RETURN(const auto model, StringField(*body, "model"));
  MOESERVE_ASSIGN_OR_RETURN(const auto path, StringField(*body, "path"));
  if (!model) return MissingField("model");
  if (request.key != nullptr && !request.key->MayUseModel(*model)) {
    return MakeError(absl::StatusCode::kPermissionDenied, "permission_denied",
                     "this API key may not use this model", "model");
  }
  out.model = *model;
  out.path = path.value_or("");
  return out;
}

Handled Load(const Request& request, ServerContext& context) {
  const auto command = ParseCommand(request, context);
  if (!command.ok()) return ErrorResponse(command.status());
  auto shared = std::make_shared<LoadResponse::Shared>();
  command->manager->Load(command->model, command->path,
                         [shared, wake = request.wake](Result<ModelStatus> result) {
                           {
                             std::lock_guard lock(shared->mutex);
                             shared->result = std::move(result);
                           }
                           wake();
                         });
  return std::make_unique<LoadResponse>(std::move(shared));
}

Handled Unload(const Request& request, ServerContext& context) {
  const auto command = ParseCommand(request, context);
  if (!command.ok()) return ErrorResponse(command.status());
  if (!command->path.empty()) return ErrorResponse(InvalidValue("path", "unknown field 'path'"));
  const absl::Status status = command->manager->Unload(command->model);
  if (!status.ok()) return ErrorResponse(status);
  return ToResponse(context.models().Status(command->model));
}

}  // namespace

void AddModelRoutes(Router& router, ServerContext& context) {
  const auto add = [&](std::string_view path, Handled (*handler)(const Request&, ServerContext&)) {
    context.metrics().DeclareHttp(path, "POST");
    router.Add("POST", path, Access::Key(Scope::kAdmin), Work::kQuick,
               [handler, &context](const Request& request) { return handler(request, context); });
  };
  add("/v1/models/load", &Load);
  add("/v1/models/unload", &Unload);
}

}  // namespace moeserve::server::http
